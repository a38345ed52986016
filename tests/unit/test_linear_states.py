"""States of linear attention after rounds that reject drafts, beside those of steps and prompts of the same tokens."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_dflash.cpu.linear_attention import bring, delta_net
from sglang_dflash.gpu.triton_attention import TritonBlockAttention
from sglang_dflash.round.linear_states import LinearStates
from sglang_dflash.round.prompt_graphs import PromptGraphs
from sglang_dflash.round.state import RequestState
from tests.unit.decoders import MASK, SIZES, write_target
from tests.unit.drafters import TARGET, save_random, speculators_config, zlab_config
from tests.unit.tapped import Target

WIDTH, TOKENS, INTERVAL, TRACKED = 8, 60, 16, 9
NOISE = 1e-5

pytestmark = pytest.mark.usefixtures("one_rank", "eager")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    target, drafter = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("drafter")
    write_target(target, "Qwen3-Next")
    sizes = {name: SIZES[name] for name in TARGET}
    raw = zlab_config(dflash_config={"mask_token_id": MASK, "target_layer_ids": [0, 2]}, **sizes)
    return target, save_random(drafter, speculators_config(raw, "target"))


def states_at(target: Target, slot: int) -> list[torch.Tensor]:
    cache = target.states.mamba_pool.mamba_cache
    return [cache.conv[0][:, slot].clone(), cache.temporal[:, slot].clone()]


def assert_close(made: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for one, other in zip(made, expected, strict=True):
        assert (one - other).norm() < NOISE * other.norm()


def linear_states(target: Target, state: RequestState) -> LinearStates:
    return LinearStates(target.runner, state, INTERVAL, WIDTH)


def prompted(folders: tuple[Path, Path], ids: torch.Tensor) -> Target:
    target = Target(*folders)
    target.run(ids, 0, ForwardMode.EXTEND)
    return target


@pytest.mark.parametrize("seed", range(4))
def test_rounds(folders: tuple[Path, Path], seed: int) -> None:
    """Of blocks whose accepted part is the text and whose rest is not; and what the prefix cache gets on the way."""
    chance = random.Random(seed)
    torch.manual_seed(seed)
    ids = torch.randint(4, SIZES["vocab_size"], (TOKENS + WIDTH,))
    target, at, row = prompted(folders, ids[:3]), 3, torch.tensor([0])
    state = RequestState(4, "cpu")
    req = SimpleNamespace(
        mamba_ping_pong_track_buffer=torch.tensor([TRACKED, 10]), mamba_next_track_idx=0
    )
    states = linear_states(target, state)
    tracked = 0
    while at < TOKENS - WIDTH:
        state.lengths[row], accepted = at, chance.randint(1, WIDTH)
        round = states.of(row, [req])
        block = ids[at : at + WIDTH].clone()
        block[accepted:] = torch.randint(4, SIZES["vocab_size"], (WIDTH - accepted,))
        before = states_at(target, 1)
        target.run(block, at, ForwardMode.TARGET_VERIFY)
        assert all(map(torch.equal, states_at(target, 1), before))
        round.keep(torch.tensor([accepted]), WIDTH)
        if (at + accepted) // INTERVAL != (at + 1) // INTERVAL:
            tracked = (at + accepted) // INTERVAL * INTERVAL
        at += accepted
    assert_close(states_at(target, 1), states_at(prompted(folders, ids[:at]), 1))
    assert tracked > 0
    assert_close(states_at(target, TRACKED), states_at(prompted(folders, ids[:tracked]), 1))


def test_attention_of_graphs(folders: tuple[Path, Path]) -> None:
    """What takes the backend's place leaves it linear attention: rows and what they read are the backend's."""
    ids = torch.randint(4, SIZES["vocab_size"], (2 * WIDTH,))
    table = 1 + torch.arange(2 * WIDTH, dtype=torch.int32)[None]
    made = []
    for graphed in (False, True):
        target, attention = prompted(folders, ids[:WIDTH]), None
        linear_states(target, RequestState(4, "cpu"))
        if graphed:
            runner = SimpleNamespace(
                page_size=1, token_to_kv_pool=target.pool, attention_chunk_size=None
            )
            attention = TritonBlockAttention(
                runner, torch.tensor([2 * WIDTH], dtype=torch.int32), table, WIDTH, True, False
            )
        rows = target.run(ids[WIDTH:], WIDTH, ForwardMode.TARGET_VERIFY, attention)
        left = target.backend.linear_attn_backend.block_rows
        made.append([rows.hidden_states, rows.taps, left.kept, left.convolved, left.gates])
    assert_close(made[1], made[0])


@pytest.mark.parametrize("requests", [4, 40])
def test_what_pads_a_batch(folders: tuple[Path, Path], requests: int) -> None:
    """Has the states of no request, also where more requests run than there are slots of states."""
    target, state = Target(*folders), RequestState(requests, "cpu")
    pool = target.states
    before = pool.req_index_to_mamba_index_mapping.clone()
    linear_states(target, state)
    assert pool.get_mamba_indices(torch.tensor([state.padding_row])).tolist() == [0]
    assert torch.equal(pool.req_index_to_mamba_index_mapping[: len(before)], before)


@pytest.mark.parametrize(("rows", "tokens"), [(3, 2), (6, 6)])
def test_a_request_that_ends_inside_a_block(
    folders: tuple[Path, Path], rows: int, tokens: int
) -> None:
    """Of what the device accepted behind its end, the prefix cache gets nothing."""
    ids = torch.randint(4, SIZES["vocab_size"], (INTERVAL + WIDTH,))
    start = INTERVAL - 3
    target, state, row = prompted(folders, ids[:start]), RequestState(4, "cpu"), torch.tensor([0])
    state.lengths[row] = start
    req = SimpleNamespace(
        mamba_ping_pong_track_buffer=torch.tensor([TRACKED, 10]), mamba_next_track_idx=0
    )
    round = linear_states(target, state).of(row, [req])
    target.run(ids[start : start + WIDTH], start, ForwardMode.TARGET_VERIFY)
    kept = states_at(target, TRACKED)
    round.keep(torch.tensor([rows]), WIDTH, tokens=torch.tensor([tokens]))
    assert_close(states_at(target, 1), states_at(prompted(folders, ids[: start + rows]), 1))
    if start + tokens >= INTERVAL:
        assert_close(states_at(target, TRACKED), states_at(prompted(folders, ids[:INTERVAL]), 1))
    else:
        assert all(map(torch.equal, states_at(target, TRACKED), kept))


@pytest.mark.parametrize("tracks", [False, True])
def test_prompts_beside_blocks(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, tracks: bool
) -> None:
    """All rows of a prompt count, and the prefix cache gets states of its last whole chunk that it wants."""
    monkeypatch.setattr("sglang_dflash.round.linear_states.CHUNK_SIZE", 8)
    ids = torch.randint(4, SIZES["vocab_size"], (40,))
    target, state = prompted(folders, ids[:10]), RequestState(4, "cpu")
    states = LinearStates(target.runner, state, INTERVAL, 64)
    target.run(ids[10:], 10, ForwardMode.TARGET_VERIFY)
    kept = states_at(target, TRACKED)
    # Behind a block of five rows, of another request.
    for name in ("kept", "convolved", "gates"):
        left = getattr(target.backend.linear_attn_backend.block_rows, name)
        left.copy_(left.roll(5, 1))
    batch = SimpleNamespace(
        req_pool_indices=torch.tensor([0]),
        extend_start_loc=torch.tensor([0]),
        extend_seq_lens=torch.tensor([30]),
        extend_prefix_lens=torch.tensor([10]),
        mamba_track_mask=torch.tensor([tracks]),
        mamba_track_seqlens=torch.tensor([10 + 17 if tracks else -1]),
        mamba_track_indices=torch.tensor([TRACKED]),
    )
    states.bring_prompts(batch, first=5)
    assert_close(states_at(target, 1), states_at(prompted(folders, ids), 1))
    if tracks:
        assert_close(states_at(target, TRACKED), states_at(prompted(folders, ids[:26]), 1))
    else:
        assert all(map(torch.equal, states_at(target, TRACKED), kept))


def test_rows_that_a_round_needs(folders: tuple[Path, Path]) -> None:
    """A pass over prompts alone would overwrite them until it is known how many count."""
    target, state, row = Target(*folders), RequestState(4, "cpu"), torch.tensor([0])
    states = linear_states(target, state)
    graphs = SimpleNamespace(
        parts=SimpleNamespace(linear_states=states),
        holds=lambda rows, requests: True,
        computes=lambda batch: True,
        _blocks=None,
    )
    prompts = SimpleNamespace(input_ids=[1, 2, 3], batch_size=1)
    assert PromptGraphs.can_run(graphs, prompts)
    req = SimpleNamespace(mamba_ping_pong_track_buffer=torch.tensor([TRACKED]))
    req.mamba_next_track_idx = 0
    round = states.of(row, [req])
    assert not PromptGraphs.can_run(graphs, prompts)
    graphs._blocks = object()  # the round's own, in the same pass
    assert PromptGraphs.can_run(graphs, prompts)
    graphs._blocks = None
    round.keep(torch.tensor([1]), WIDTH)
    assert PromptGraphs.can_run(graphs, prompts)


def test_states_of_a_lower_precision() -> None:
    """A row reads what the pool would have of the row before it, so a block is what its steps are."""
    torch.manual_seed(0)
    layer = SimpleNamespace(
        conv_weights=torch.randn(16, 4),
        bias=None,
        A_log=torch.randn(2),
        dt_bias=torch.randn(2),
        num_k_heads=1,
        num_v_heads=2,
        head_k_dim=4,
        q_dim=4,
        k_dim=4,
        v_dim=8,
    )
    mixed, a, b = torch.randn(6, 16), torch.randn(6, 2), torch.randn(6, 2)
    window, state = torch.zeros(16, 3), torch.zeros(2, 4, 4, dtype=torch.bfloat16)
    whole = delta_net(layer, mixed, a, b, window, state)
    pool = torch.zeros(1, 3, *state.shape, dtype=state.dtype)
    windows = torch.zeros(1, 3, *window.shape)
    slots, begins, tracked = (torch.tensor([n]) for n in (1, 0, 2))
    for row in range(6):
        one = slice(row, row + 1)
        made = delta_net(layer, mixed[one], a[one], b[one], window, state)
        window, state = made.windows[0], made.states[0]
        torch.testing.assert_close(made.output[0], whole.output[row])
        if row == 3:
            kept = window, state
    torch.testing.assert_close(window, whole.windows[-1])
    assert torch.equal(state, whole.states[-1])
    left = mixed[None], whole.convolved[None], whole.gates[None]
    counts, on_the_way = torch.tensor([6]), torch.tensor([4])
    bring(pool, windows, *left, slots, begins, counts, tracked, on_the_way)
    for slot, expected in ((0, None), (1, (window, state)), (2, kept)):
        found = windows[0, slot], pool[0, slot]
        assert all(map(torch.equal, found, expected or map(torch.zeros_like, found)))
