"""What the serving benchmark reads off servers' `/metrics`."""

from __future__ import annotations

import pytest

from benchmark.traffic import counters, figures
from benchmark.traffic.answers import Answer
from benchmark.traffic.clients import Heard

SGLANG = """\
# TYPE sglang:spec_verify_calls_total counter
sglang:spec_verify_calls_total{tp_rank="0"} 100.0
sglang:spec_verify_calls_total_created{tp_rank="0"} 1.7e+09
sglang:generation_tokens_total{model_name="a b"} 800.0
sglang:spec_accept_length{tp_rank="0"} 7.9
"""
OURS = SGLANG.replace("spec_verify_calls", "dflash_rounds")
VLLM = """\
vllm:spec_decode_num_drafts_total{engine="0"} 60.0
vllm:spec_decode_num_drafts_total{engine="1"} 40.0
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 700.0
vllm:generation_tokens_total{engine="0"} 8e+02
"""


@pytest.mark.parametrize("page", [SGLANG, OURS, VLLM])
def test_verify_steps_of_every_kind_of_server(page: str) -> None:
    assert counters.parse(page) == counters.Counters(100, 800)
    assert counters.parse("process_cpu_seconds_total 3.0\n\n# nothing") == counters.Counters()
    before = counters.Counters(20, 100)
    assert counters.parse(page).since(before) == counters.Counters(80, 700)
    assert counters.Counters(5, 6).since(counters.Counters()) == counters.Counters(5, 6)


def test_size_of_a_pool_by_the_server_itself() -> None:
    page = 'a 1\nvllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="3750"} 1.0\n'
    assert counters.kv_tokens({}, page) == 60000
    assert counters.kv_tokens({"max_total_num_tokens": 5}, "") == 5
    assert counters.kv_tokens({"vllm_config": "…"}, page.replace("3750", "None")) is None


def test_rounds_of_this_projects_servers() -> None:
    page = f"""\
{OURS}sglang:dflash_planned_rounds_total{{plan="whole",tp_rank="0"}} 7.0
sglang:dflash_planned_rounds_total{{plan="narrow",tp_rank="0"}} 3.0
sglang:dflash_verified_rows_total{{tp_rank="0"}} 640.0
sglang:dflash_host_step_seconds{{tp_rank="0",way="with_prompts"}} 0.011
sglang:dflash_host_step_seconds{{tp_rank="0",way="without_prompts"}} 0.002
"""
    host = {"with_prompts": 11.0, "without_prompts": 2.0}
    found = counters.parse(page)
    assert found == counters.Counters(100, 800, 10, 640, host)
    before = counters.Counters(40, 200, 4, 240, {"with_prompts": 13.0})
    assert found.since(before) == counters.Counters(60, 600, 6, 400, host)
    answer = Answer(0, 0.0, 1.0, [0.1, 1.0], [1, 2], 2, 5, "stop", "aaaa")
    heard = Heard([answer], 0.2, 0.3, 0.0)
    row = figures.figures(heard, figures.Goal(150, 95), found.since(before), clients=None)
    assert (row["launched_rounds"], row["verified_rows"], row["host_step_ms"]) == (6, 400, host)
    others = figures.figures(heard, figures.Goal(150, 95), counters.parse(VLLM), clients=None)
    assert {others[name] for name in ("launched_rounds", "verified_rows", "host_step_ms")} == {None}
