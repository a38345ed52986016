"""What rounds write to the release's KV pools, by the pools' own writes and by a kernel."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, MHATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from sglang_dflash.gpu.kernels import store_rows as kernel
from sglang_dflash.round import clean_pool
from sglang_dflash.round.clean_pool import CleanPool
from sglang_dflash.two_pools import is_sliding

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # there in Triton's interpreter
NAN = float("nan")
HEADS, DIM = 2, 4
SIZES = dict(size=32, page_size=4, dtype=torch.float32, head_num=HEADS, head_dim=DIM, device=DEVICE)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Of the kernel."""
    made, store_rows = [], kernel.store_rows
    monkeypatch.setattr(
        kernel, "store_rows", lambda *given: (made.append("launch"), store_rows(*given))
    )
    return made


@pytest.fixture(params=["kernel", "pool"])
def way(request: pytest.FixtureRequest, launches: list[str], monkeypatch) -> Iterator[None]:
    """Both ways where there is no GPU, on which rows of the pool's own type are always written by the kernel."""
    if request.param == "pool" and DEVICE == "cuda":
        pytest.skip("rows on a GPU are written by the kernel")
    monkeypatch.setattr(clean_pool, "has_kernels", lambda rows: request.param == "kernel")
    yield
    assert bool(launches) == (request.param == "kernel")


def whole() -> MHATokenToKVPool:
    return MHATokenToKVPool(layer_num=2, enable_memory_saver=False, **SIZES)


def hybrid() -> HybridLinearKVPool:
    layers = dict(full_attention_layer_ids=[3, 7], enable_kvcache_transpose=False, mamba_pool=None)
    return HybridLinearKVPool(**layers, **SIZES)


def rows_of(*numbers: float) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of rows that are filled with numbers, and with ten times as much; parts of one product."""
    filled = torch.tensor(numbers, device=DEVICE)[:, None].expand(-1, HEADS * DIM)
    product = torch.cat([filled, filled, 10 * filled], dim=1)
    return tuple(part.unflatten(1, (HEADS, DIM)) for part in product.split(HEADS * DIM, dim=1)[1:])


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(("pool", "layers"), [(whole, (0, 1)), (hybrid, (3, 7))])
def test_slot_0_stays_clean(pool, layers: tuple[int, int]) -> None:
    """Rows without a slot write nothing there, whatever they hold; the others write what they hold."""
    made, slots = pool(), torch.tensor([5, 0, 7, 0], device=DEVICE)
    clean = CleanPool(made)
    layer = SimpleNamespace(layer_id=layers[1])
    clean.set_kv_buffer(layer, slots, *rows_of(1.0, NAN, NAN, 3.0), None, None)
    for factor, buffer in zip((1, 10), made.get_kv_buffer(layers[1]), strict=True):
        assert buffer[0].eq(0).all() and buffer[5].eq(factor).all() and buffer[7].isnan().all()
    assert not any(buffer.any() for buffer in made.get_kv_buffer(layers[0]))
    assert clean.get_key_buffer(layers[1]) is made.get_key_buffer(layers[1])


@pytest.mark.usefixtures("way")
def test_rows_in_vain_leave_nothing_behind() -> None:
    """A row that has no slot in the sliding layers' pool any more must not write where others look."""
    sizes = SIZES | dict(size=96, size_swa=24, page_size=1)
    layers = dict(swa_attention_layer_ids=[0, 2], full_attention_layer_ids=[1])
    pool, written = SWAKVPool(enable_kvcache_transpose=False, **layers, **sizes), {}
    slots = torch.tensor([3, 4, 0], device=DEVICE)
    sliding = torch.tensor([5, 0, 0], dtype=torch.int32, device=DEVICE)
    pool.set_swa_loc(sliding)
    for layer in (0, 1):
        rows = rows_of(NAN, NAN, NAN)
        CleanPool(pool, sliding).set_kv_buffer(SimpleNamespace(layer_id=layer), slots, *rows)
        written[layer] = pool.get_key_buffer(layer).isnan().flatten(1).any(1).nonzero().tolist()
    assert written == {0: [[5]], 1: [[3]]}
    assert [is_sliding(pool, layer) for layer in (0, 1, 2)] == [True, False, True]


def test_other_types_are_the_pools_own(launches: list[str], monkeypatch) -> None:
    """Which rounds them, by the layer's scales."""
    monkeypatch.setattr(clean_pool, "has_kernels", lambda rows: True)
    pool = MHATokenToKVPool(
        layer_num=1, enable_memory_saver=False, **SIZES | {"dtype": torch.float8_e4m3fn}
    )
    slots = torch.tensor([5, 0], device=DEVICE)
    CleanPool(pool).set_kv_buffer(SimpleNamespace(layer_id=0), slots, *rows_of(4.0, 8.0), 2.0, 5.0)
    keys, values = (buffer.float() for buffer in pool.get_kv_buffer(0))
    assert keys[5].eq(2).all() and values[5].eq(8).all() and not keys[0].any()
    assert not launches


def test_writes_around_the_pool_are_off() -> None:
    """The release's RoPE kernels write K/V themselves where a pool says that it holds bfloat16."""
    assert CleanPool(SimpleNamespace(dtype=torch.bfloat16)).dtype is None
