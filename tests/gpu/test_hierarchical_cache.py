"""The hierarchical cache on a GPU: copies by kernels and by the driver, beside rounds. Not run yet."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.checks import accept_length, assert_same
from tests.server.harness import CHOSEN_WORKERS, Server, running
from tests.server.host_hits import (
    ARGUMENTS,
    assert_hits,
    crowd_out,
    host_tokens,
    skip_without_memory,
)
from tests.unit.drafters import one_rank
from tests.unit.test_host_cache import World, bring_back

COPIES = [
    (page, io, layout, mla)
    for page in (1, 16)
    for io, layout in (
        ("kernel", "layer_first"),
        ("kernel", "page_first"),
        ("kernel", "page_head"),
        ("direct", "layer_first"),
        ("direct", "page_first_direct"),
    )
    for mla in (False, True)
    if not (mla and layout == "page_head")
]
WAYS = {
    "kernel": (),
    "pages": ("--page-size", "16", "--hicache-mem-layout", "page_first"),
    "back": ("--hicache-write-policy", "write_back", "--page-size", "16"),
    "direct": ("--hicache-io-backend", "direct", "--page-size", "16"),
    "triton": ("--attention-backend", "triton", "--speculative-dflash-verify", "auto"),
    "backend": ("--speculative-dflash-attention", "backend"),
}


@pytest.mark.parametrize(("page", "io", "layout", "mla"), COPIES)
def test_copies(page: int, io: str, layout: str, mla: bool) -> None:
    """Both pools' K/V to the last bit, read as soon as the batch may read it."""
    with one_rank():
        bring_back(World(page, "write_through", layout, mla, io, "cuda", wide=16))


@pytest.fixture(scope="module", params=[(w, way) for way in WAYS for w in CHOSEN_WORKERS])
def server(request: pytest.FixtureRequest, logs: Path) -> Iterator[Server]:
    skip_without_memory()
    worker, way = request.param
    log = logs / f"host-{worker}-{way}.log"
    with running(log, *ARGUMENTS, *WAYS[way], worker=worker) as started:
        yield started


def test_acceptance(server: Server, plain: Server, prompts: list[str]) -> None:
    """As many tokens a round after a hit on the host as after one on the device."""
    asked, on_device = prompts[:16], []
    for prompt in asked:
        server.generate(prompt)
        on_device.append(server.generate(prompt))
    crowd_out(server, prompts)
    assert_hits(server, plain, asked, on_device, least=1)
    server.check_idle()


def test_loads_beside_rounds(server: Server, plain: Server, prompts: list[str]) -> None:
    """Prefixes come back while others' rounds run, some of them in vain, into slots that were just freed."""
    asked = [*prompts[:24], *prompts[:24][::-1], *prompts[4:28]] * 4
    answers = server.generate_all(asked, 8)
    expected = plain.references(asked)
    for prompt, answer, reference in zip(asked, answers, expected, strict=True):
        assert_same(answer, reference, plain, prompt)
    assert sum(map(host_tokens, answers)) > 400
    assert accept_length(answers) > 3
    server.check_idle()
