"""Which state of the package runs: servers say it, and results of the serving benchmark have it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import pytest

from benchmark.traffic.counters import internal_state, kv_tokens
from benchmark.traffic.fleet import Served
from benchmark.traffic.systems import Choice
from sglang_dflash.process.source import digest_of, source_digest
from sglang_dflash.round import run
from sglang_dflash.round.run import RoundRunner


def test_digest(tmp_path: Path) -> None:
    """Of content and names of Python files, and of nothing else."""
    (tmp_path / "room").mkdir()
    (tmp_path / "room" / "a.py").write_text("1\n")
    first = digest_of(tmp_path)
    (tmp_path / "room" / "a.pyc").write_text("1\n")
    assert digest_of(tmp_path) == first and len(first) == 16
    (tmp_path / "room" / "a.py").write_text("2\n")
    second = digest_of(tmp_path)
    (tmp_path / "room" / "a.py").rename(tmp_path / "b.py")
    assert len({first, second, digest_of(tmp_path)}) == 3
    assert source_digest() == source_digest() != first


@pytest.fixture
def served() -> Iterator[Callable[[dict[str, str]], Served]]:
    """A server that has some pages."""
    found: dict[str, str] = {}

    class Pages(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path in found else 404)
            self.end_headers()
            self.wfile.write(found.get(self.path, "").encode())

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Pages)
    Thread(target=server.serve_forever, daemon=True).start()

    def with_pages(pages: dict[str, str]) -> Served:
        found.update(pages)
        return Served(Choice("a", "url"), f"http://127.0.0.1:{server.server_port}")

    yield with_pages
    server.shutdown()
    server.server_close()


def test_source_of_a_server(served: Callable[[dict[str, str]], Served]) -> None:
    """Of one of this project; of one of SGLang without it there is none, and vLLM's page is not asked for."""
    told = {"max_total_num_tokens": 5, "internal_states": [{"dflash_source": "0123"}]}
    ours = served({"/server_info": json.dumps(told), "/metrics": "sglang:gen_throughput 1.0\n"})
    info, page = ours.tells()
    assert internal_state(info)["dflash_source"] == "0123" and kv_tokens(info, page) == 5
    plain = served({"/server_info": json.dumps(told | {"internal_states": []})})
    info, page = plain.tells()
    assert internal_state(info) == {} and kv_tokens(info, page) == 5
    other = served({"/server_info": "not asked for", "/metrics": "vllm:num_requests_running 0.0\n"})
    info, page = other.tells()
    assert internal_state(info) == {} and kv_tokens(info, page) is None


def test_costs_of_another_state_are_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose rounds may take another time: a version stands for many states."""
    runner = object.__new__(RoundRunner)
    monkeypatch.setattr(RoundRunner, "attention", {"target": "fa3"})
    runner.prompt_graphs = None
    runner.graphs = SimpleNamespace(widths=[1, 16], narrow=[], sizes=[1])
    model = SimpleNamespace(parameters=lambda: [])
    config, asked = (
        SimpleNamespace(num_hidden_layers=2),
        SimpleNamespace(speculative_dflash_attention="auto"),
    )
    shown = dict(tp_size=1, dtype="bf16", kv_cache_dtype="auto")
    target = SimpleNamespace(model=model, model_config=config, server_args=asked, **shown)
    draft = SimpleNamespace(runner=SimpleNamespace(model=model))
    runner.parts = SimpleNamespace(
        target=SimpleNamespace(runner=target), draft=draft, adapters=None
    )
    names = set()
    for digest in ("0123", "4567"):
        monkeypatch.setattr(run, "source_digest", lambda digest=digest: digest)
        names |= {runner._name(), runner._name()}
    assert len(names) == 2
