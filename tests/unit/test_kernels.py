"""Triton kernels against the PyTorch code that they stand for, on random input.

Without a GPU they run in Triton's interpreter, which computes what the compiled kernels do.
"""

import pytest
import torch

from sglang_dflash.drafter.context_kv import context_kv
from sglang_dflash.drawing.not_finite import NOT_FINITE
from sglang_dflash.gpu.kernels.accept import accept_and_advance
from sglang_dflash.gpu.kernels.add_norm import add_norm, add_norm_reference
from sglang_dflash.gpu.kernels.context_store import context_store
from sglang_dflash.gpu.kernels.open_round import open_round, open_round_reference
from sglang_dflash.gpu.kernels.qk_norm_rope_store import (
    qk_norm_rope_store,
    qk_norm_rope_store_reference,
)
from sglang_dflash.gpu.kernels.sandwich_norm import (
    norm,
    norm_add,
    norm_add_norm,
    norm_reference,
)
from sglang_dflash.gpu.kernels.shared_gate import gate_shared, gate_shared_reference
from sglang_dflash.gpu.kernels.skinny_matmul import ROOMS, Tiling, launch, room_for
from sglang_dflash.gpu.kernels.start_requests import start_requests
from sglang_dflash.gpu.kernels.store_rows import store_rows
from sglang_dflash.gpu.kernels.swiglu import swiglu, swiglu_reference
from sglang_dflash.gpu.tilings import KNOWN, Key, Kind, candidates
from sglang_dflash.round.accept import accept
from sglang_dflash.round.ragged import Ragged
from sglang_dflash.round.state import ENDS, RequestState

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS, COLUMNS = 6, 2500


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def table(page_size: int) -> torch.Tensor:
    """[ROWS, COLUMNS] int32: pages in random order, slots of a page side by side."""
    pages = -(-COLUMNS // page_size)
    first = torch.randperm(ROWS * pages).view(ROWS, pages, 1) * page_size
    slots = (first + torch.arange(page_size)).flatten(1)[:, :COLUMNS]
    return slots.to(torch.int32).contiguous().to(DEVICE)


@pytest.mark.parametrize(("page_size", "width"), [(1, 16), (16, 5), (64, 16), (256, 2)])
def test_open_round(page_size: int, width: int) -> None:
    lengths = torch.randint(0, 2000, (ROWS + 1,), device=DEVICE)
    lengths[ROWS] = 0
    bonus = torch.randint(0, 100, (ROWS + 1,), device=DEVICE)
    rows = torch.tensor([3, 1, ROWS, 0], device=DEVICE)
    arguments = (rows, lengths, bonus, table(page_size))
    options = dict(
        width=width, page_size=page_size, padding_row=ROWS, mask_token_id=99, last_position=1500
    )
    pages = -(-COLUMNS // page_size)
    made, expected = (
        (
            torch.zeros(5, dtype=torch.int32, device=DEVICE),
            torch.full((5, pages), -1, dtype=torch.int32, device=DEVICE),
        )
        for _ in range(2)
    )
    results = open_round(*arguments, *made, **options)
    for result, reference in zip(
        results, open_round_reference(*arguments, *expected, **options), strict=True
    ):
        assert torch.equal(result, reference)
    assert torch.equal(made[0], expected[0])
    for request in range(len(rows)):
        needed = -(-int(made[0][request]) // page_size)
        assert torch.equal(made[1][request, :needed], expected[1][request, :needed])
        assert (made[1][request, needed:] == -1).all()  # what nobody reads is not copied


@pytest.mark.parametrize("beyond", [0, 5, 40])
def test_a_round_in_vain_past_the_end(beyond: int) -> None:
    """A length that went past the longest context, after which no round counts, leaves no row."""
    width, page_size = 16, 4
    lengths = torch.tensor([7, COLUMNS - width + beyond, 9, 0], device=DEVICE)
    bonus, rows = torch.zeros(4, dtype=torch.int64, device=DEVICE), torch.tensor([1], device=DEVICE)
    slots_of = table(page_size)[:3]
    options = dict(
        width=width, page_size=page_size, padding_row=3, mask_token_id=9, last_position=COLUMNS
    )
    for opened in (open_round, open_round_reference):
        keys = torch.zeros(1, dtype=torch.int32, device=DEVICE)
        pages = torch.zeros(1, COLUMNS // page_size, dtype=torch.int32, device=DEVICE)
        start, _, _, slots = opened(rows, lengths, bonus, slots_of, keys, pages, **options)
        assert set(slots.tolist()) <= set(slots_of[1].tolist())
        assert int(start) == COLUMNS - width and int(keys) == COLUMNS


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("width", [2, 3, 8, 15, 16])
def test_accept(width: int, ragged: bool) -> None:
    """Of all rows, and of those that were verified."""
    rows = torch.tensor([2, 0, 7, 1, 7], device=DEVICE)
    shared = None
    if ragged:
        counts = torch.tensor([width, 1, 2, min(3, width), 1], device=DEVICE)
        shared = Ragged.of(counts, int(counts.sum()), width)
    for _ in range(5):
        target = torch.randint(0, 2, (5, width), device=DEVICE)
        draft = torch.randint(0, 2, (5, width - 1), device=DEVICE)
        draft[0] = target[0, :-1]
        state = RequestState(7, DEVICE)
        state.lengths += torch.arange(8, device=DEVICE) * 10
        before = state.lengths.clone()
        counts = shared and shared.counts
        lengths, bonus = accept_and_advance(target, draft, rows, *state.moved_by_rounds, counts)
        expected = accept(target, shared.hide(draft) if shared else draft)
        assert torch.equal(lengths, expected.lengths)
        assert torch.equal(bonus, expected.bonus_tokens)
        for request, row in enumerate(rows.tolist()):
            moves = row != 7
            assert state.lengths[row] == before[row] + moves * expected.lengths[request]
            assert state.bonus_tokens[row] == moves * expected.bonus_tokens[request]


def test_ends() -> None:
    """A token that ends a request, or its limit, among what is committed; what lies behind ends nobody."""
    torch.manual_seed(1)
    requests, width = 40, 5
    rows = torch.randperm(requests, device=DEVICE)
    states = [RequestState(requests, DEVICE) for _ in range(2)]
    ends = torch.randint(0, 9, (requests, ENDS + 1), device=DEVICE)
    ends[:, -1] = torch.randint(5, 40, (requests,), device=DEVICE)
    ends[::2, :-1] = -100
    first, zero = torch.randint(0, 9, (requests,), device=DEVICE), torch.zeros_like(rows)
    for state in states:
        state.start(rows, first, zero, ends)
        assert state.ended[rows].tolist() == (ends[:, :-1] == first[:, None]).any(1).int().tolist()
    seen = []
    for _ in range(8):
        target = torch.randint(0, 9, (requests, width), device=DEVICE)
        draft = torch.where(torch.rand(requests, width - 1, device=DEVICE) < 0.5, target[:, :-1], 9)
        lengths, _ = accept_and_advance(
            target, draft.contiguous(), rows, *states[0].moved_by_rounds
        )
        accepted = accept(target, draft)
        states[1].advance(rows, target, lengths, accepted.bonus_tokens)
        assert torch.equal(states[0].ended, states[1].ended)
        seen.append(int(states[0].ended.sum()))
    assert seen == sorted(seen) and 0 < seen[0] < seen[-1] <= requests
    states[0].start(rows, first, zero)
    assert not states[0].ended[rows].any()


def test_accept_of_nan() -> None:
    """What NaN chose ends the accepted tokens, and the next round starts from a token that exists."""
    target = torch.tensor([[5, NOT_FINITE, 7], [NOT_FINITE, 6, 7], [5, 6, 7]], device=DEVICE)
    draft = torch.tensor([[5, 6]] * 3, device=DEVICE)
    rows = torch.arange(3, device=DEVICE)
    states = [RequestState(3, DEVICE) for _ in range(2)]
    lengths, _ = accept_and_advance(target, draft, rows, *states[0].moved_by_rounds)
    expected = accept(target, draft)
    states[1].advance(rows, target, expected.lengths, expected.bonus_tokens)
    assert lengths.tolist() == expected.lengths.tolist() == [2, 1, 3]
    for state in states:
        assert state.bonus_tokens.tolist() == [0, 0, 7, 0]


@pytest.mark.parametrize(("q_heads", "kv_heads", "dim"), [(8, 2, 64), (32, 8, 128), (3, 1, 64)])
@pytest.mark.parametrize(
    ("parts", "normed", "less_one"),
    [(1, True, False), (1, False, False), (3, True, False), (2, False, False), (1, True, True)],
)
def test_qk_norm_rope_store(
    q_heads: int, kv_heads: int, dim: int, parts: int, normed: bool, less_one: bool
) -> None:
    n = 5
    qkv = torch.randn(parts, n, (q_heads + 2 * kv_heads) * dim, device=DEVICE)
    weights = torch.rand(2, dim, device=DEVICE) if normed else (None, None)
    cos_sin = torch.randn(50, dim, device=DEVICE)
    positions = torch.randint(0, 50, (n,), device=DEVICE)
    slots = torch.randperm(20, device=DEVICE)[:n]
    caches = [torch.zeros(20, kv_heads, dim, device=DEVICE) for _ in range(4)]
    arguments = (qkv if parts > 1 else qkv[0], *weights, 1e-6, cos_sin, positions, slots)
    q = qk_norm_rope_store(*arguments, *caches[:2], less_one)
    expected = qk_norm_rope_store_reference(*arguments, *caches[2:], less_one)
    torch.testing.assert_close(q, expected)
    torch.testing.assert_close(caches[:2], caches[2:])


@pytest.mark.parametrize("normed", [True, False])
def test_context_store(normed: bool) -> None:
    layers, kv_heads, dim, n = 3, 2, 64, 7
    kv = torch.randn(n, layers * 2 * kv_heads * dim, device=DEVICE)
    norms = torch.rand(layers, dim, device=DEVICE) if normed else None
    cos_sin = torch.randn(40, dim, device=DEVICE)
    positions = torch.randint(0, 40, (n,), device=DEVICE)
    slots = 1 + torch.randperm(29, device=DEVICE)[:n]  # 0 is nobody's
    caches = torch.zeros(2, layers, 30, kv_heads, dim, device=DEVICE)
    addresses = torch.tensor(
        [[layer.data_ptr() for layer in cache] for cache in caches], dtype=torch.uint64
    ).to(DEVICE)
    context_store(kv, norms, 1e-6, cos_sin, positions, slots, *addresses, kv_heads)
    expected = context_kv(kv, norms, 1e-6, cos_sin[positions], kv_heads, layers)
    torch.testing.assert_close(caches[:, :, slots], torch.stack(expected))
    untouched = torch.ones(30, dtype=torch.bool, device=DEVICE)
    untouched[slots] = False
    assert not caches[:, :, untouched].any()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_store_rows(dtype: torch.dtype) -> None:
    """K and V of rows of one product, whose heads have other sizes; who has no slot writes none."""
    n, k_heads, dim, v_dim = 5, 3, 20, 12
    product = torch.randn(n, 7 + k_heads * (dim + v_dim), device=DEVICE)
    k, v = product[:, 7:].split([k_heads * dim, k_heads * v_dim], dim=1)
    caches = [torch.zeros(9, k_heads, size, device=DEVICE) for size in (dim, v_dim)]
    slots = torch.tensor([4, 0, 8, 3, 1], device=DEVICE, dtype=dtype)
    own = torch.tensor([2, 0, 5, 0, 1], device=DEVICE, dtype=torch.int32)
    store_rows(k.view(n, k_heads, dim), v, slots, *caches, own)
    for cache, rows in zip(caches, (k, v), strict=True):
        expected = torch.zeros_like(cache).flatten(1)
        expected[[4, 8, 1]] = rows[[0, 2, 4]]
        assert torch.equal(cache.flatten(1), expected)


@pytest.mark.parametrize(("hidden", "size"), [(96, 96), (100, 3000)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gate_shared(hidden: int, size: int, dtype: torch.dtype) -> None:
    x = torch.randn(6, 2 * hidden, device=DEVICE, dtype=dtype)[:, :hidden]
    weight = torch.randn(1, hidden, device=DEVICE, dtype=dtype) / hidden**0.5
    made = torch.randn(6, size, device=DEVICE, dtype=dtype)
    expected = gate_shared_reference(x, weight, made)
    found = gate_shared(x, weight, made)
    assert found is made
    noise = 1e-5 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(found, expected, rtol=noise, atol=noise)


@pytest.mark.parametrize(("n", "size", "parts"), [(5, 256, 1), (3, 100, 3), (40, 2560, 1)])
def test_add_norm(n: int, size: int, parts: int) -> None:
    x = torch.randn(parts, n, size, device=DEVICE)
    residual, weight = torch.randn(n, size, device=DEVICE), torch.rand(size, device=DEVICE)
    arguments = (x if parts > 1 else x[0], residual, weight, 1e-6)
    before = residual.clone()
    torch.testing.assert_close(add_norm(*arguments), add_norm_reference(*arguments))
    assert torch.equal(residual, before)


@pytest.mark.parametrize(("n", "size"), [(5, 256), (3, 100), (40, 3840)])
def test_sandwich_norm(n: int, size: int) -> None:
    x, residual = torch.randn(2, n, size, device=DEVICE)
    outer, inner = torch.rand(2, size, device=DEVICE) - 0.5
    expected = norm_reference(x, outer, 1e-6)
    torch.testing.assert_close(norm(x, outer, 1e-6), expected)
    expected = expected + residual
    torch.testing.assert_close(norm_add(x, residual, outer, 1e-6), expected)
    total, y = norm_add_norm(x, residual, outer, inner, 1e-6)
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close(y, norm_reference(total, inner, 1e-6))


@pytest.mark.parametrize(("n", "size"), [(3, 768), (40, 1500)])
def test_swiglu(n: int, size: int) -> None:
    gate_up = torch.randn(n, 2 * size, device=DEVICE)
    torch.testing.assert_close(swiglu(gate_up), swiglu_reference(gate_up))


@pytest.mark.parametrize("rows", [1, 16, 21, 64, 100])
@pytest.mark.parametrize(
    "tiling",
    [Tiling(64, 64, 128, 1, 2, 4), Tiling(64, 64, 64, 2, 3, 4), Tiling(128, 32, 64, 1, 4, 8)],
)
def test_skinny_matmul(tiling: Tiling, rows: int) -> None:
    # The interpreter multiplies bfloat16 as the integers in which it keeps them.
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    x = torch.randn(rows, 512, device=DEVICE, dtype=dtype)
    weight = torch.randn(256, 512, device=DEVICE, dtype=dtype) / 23
    y = launch(x, weight, tiling, False)
    assert y.shape == ((tiling.parts, rows, 256) if tiling.parts > 1 else (rows, 256))
    whole = y.sum(0) if tiling.parts > 1 else y
    expected = x.float() @ weight.float().t()
    torch.testing.assert_close(whole.float(), expected, rtol=1e-2, atol=1e-2)
    if tiling.parts == 1:
        torch.testing.assert_close(
            launch(x, weight, tiling, True),
            swiglu_reference(expected.to(dtype)),
            rtol=2e-2,
            atol=2e-2,
        )


def test_rooms_for_rows() -> None:
    assert [room_for(rows) for rows in (1, 16, 17, 64, 65, 128, 129)] == [
        16,
        16,
        32,
        64,
        128,
        128,
        None,
    ]


def test_a_tiling_that_does_not_fit() -> None:
    """What it would leave out, or cannot be compiled, is refused."""
    tiling = Tiling(64, 128, 128, 2, 5, 4)
    assert tiling.fits(4096, 12288)
    assert not tiling.fits(4096 + 32, 12288) and not tiling.fits(4096, 12288 + 128)
    assert not tiling.fits(4096, 128)  # a part is less than what is loaded first
    assert not tiling._replace(rows=48).fits(4800, 12288)
    assert not tiling._replace(parts=0).fits(4096, 12288)


REAL = {key: tiling for found in KNOWN.values() for key, tiling in found.items() if tiling}
# Of Qwen3-30B-A3B, and of Qwen3-8B on two GPUs.
OTHERS = tuple(
    Key(*product, rows)
    for rows in ROOMS
    for product in ((5120, 2048, Kind.SUMMED), (4096, 2048, Kind.WHOLE), (6144, 4096, Kind.SWIGLU))
)


@pytest.mark.skipif(DEVICE == "cpu", reason="the shapes of a real model need a GPU")
@pytest.mark.parametrize("key", [*REAL, *OTHERS], ids=str)
def test_tilings_of_real_models(key: Key) -> None:
    """As they run: at the rows of the key and less."""
    with_swiglu = key.kind is Kind.SWIGLU
    weight = torch.randn(
        key.size * (1 + with_swiglu), key.depth, device=DEVICE, dtype=torch.bfloat16
    )
    weight /= key.depth**0.5
    for tiling in [REAL[key]] if key in REAL else candidates(key, 132):
        for rows in (key.rows // 2 + 1, key.rows):
            x = torch.randn(rows, key.depth, device=DEVICE, dtype=torch.bfloat16)
            expected = x.float() @ weight.float().t()
            y = launch(x, weight, tiling, with_swiglu)
            assert (y.dim() == 3) == (tiling.parts > 1)
            whole = y.sum(0) if y.dim() == 3 else y
            if with_swiglu:
                expected = swiglu_reference(expected.to(torch.bfloat16)).float()
            torch.testing.assert_close(whole.float(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("tokens", [torch.int32, torch.int64])
def test_what_a_prefill_leaves(tokens: torch.dtype) -> None:
    """Of a token that ends its request, one that does not, and one that NaN chose; others' rows stay as they are."""
    rows = torch.tensor([4, 0, 2], device=DEVICE)
    first = torch.tensor([7, 8, NOT_FINITE], dtype=tokens, device=DEVICE)
    ends = torch.tensor([[5, 7, -100, -100, 30], [7, -100, -100, -100, 40], [5, 6, 7, 8, 50]])
    lengths = torch.tensor([11, 12, 13], device=DEVICE)
    before = {"lengths": 3, "bonus_tokens": 2, "ends": 1, "limits": 9, "ended": 1}
    made, expected = RequestState(6, DEVICE), RequestState(6, "cpu")
    for state in (made, expected):
        for name, value in before.items():
            getattr(state, name).fill_(value)
    expected.start(rows.cpu(), first.cpu(), lengths.cpu(), ends)
    start_requests(rows, first, lengths, ends.to(DEVICE), made.moved_by_rounds[:-1])
    for name in before:
        assert torch.equal(getattr(made, name).cpu(), getattr(expected, name)), name
    assert made.ended[rows].tolist() == [1, 0, 0] and made.bonus_tokens[2] == 0
