"""What a launched pass will give has no numbers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from sglang.srt.managers.overlap_utils import FutureMap
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_dflash.scheduler.futures import number_nothing


@pytest.mark.parametrize("overlap", [True, False])
def test_tokens_of_batches(overlap: bool) -> None:
    """They are no tensor, so that the release neither filters nor joins them."""
    future_map = None
    if overlap:
        future_map = FutureMap(8, 64, 256, "cpu", SpeculativeAlgorithm.from_string("DFLASH"))
    scheduler = SimpleNamespace(enable_overlap=overlap, future_map=future_map)
    number_nothing(scheduler)
    if overlap:
        futures = future_map.alloc_future_indices(5)
        assert -futures.indices is None
        future_map.store_to_map(futures, SimpleNamespace())  # which has nothing to store
