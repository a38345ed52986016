"""First tokens on their short way, between real sockets and with the bundled tokenizer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
import zmq.asyncio
from sglang.srt.managers.io_struct import BatchStrOutput, BatchTokenIDOutput
from transformers import AutoTokenizer

from sglang_dflash.serving.first_tokens import FEW, AheadSender, send_ahead, take_ahead

TARGET = Path(__file__).parents[2] / "checkpoints" / "tiny" / "target"
ARGUMENTS = {
    "tokenizer_worker_num": 1,
    "dp_size": 1,
    "skip_tokenizer_init": False,
    "disable_tokenizer_batch_decode": False,
    "tool_call_parser": None,
}
# Each makes an output one that goes the long way alone.
LONG_WAY = {
    "ended": {"finished_reasons": [{"type": "length"}]},
    "later": {"completion_tokens": [2]},
    "two": {"completion_tokens": [1, 1], "rids": ["a", "b"], "finished_reasons": [None, None]},
    "logprobs": {"output_token_logprobs_val": [[]]},
    "hidden": {"output_hidden_states": [[]]},
    "custom": {"customized_info": {"name": [1]}},
}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(TARGET)


def output(ids: list[int], **changed: Any) -> BatchTokenIDOutput:
    """Of the request a, whose prompt ends with the first of these ids."""
    told: dict[str, Any] = {field.name: None for field in fields(BatchTokenIDOutput)}
    told |= {"rids": ["a"], "finished_reasons": [None], "decoded_texts": [""], "decode_ids": [ids]}
    told |= {"read_offsets": [1], "output_ids": [ids[1:]], "completion_tokens": [len(ids) - 1]}
    told |= {name: [True] for name in ("skip_special_tokens", "spaces_between_special_tokens")}
    return BatchTokenIDOutput(**(told | {"no_stop_trim": [False], "customized_info": {}} | changed))


class Ends:
    """A scheduler and a tokenizer manager, as far as outputs go through them."""

    def __init__(self, tokenizer: Any, file: Path, **arguments: Any):
        self.taken: list[str] = []
        self.told: list[Any] = []
        args = SimpleNamespace(**(ARGUMENTS | arguments))
        queue = zmq.asyncio.Context.instance().socket(zmq.PULL)
        queue.bind(f"ipc://{file}")
        self.manager = SimpleNamespace(
            server_args=args,
            recv_from_detokenizer=queue,
            rid_to_state={"a": SimpleNamespace(output_ids=[])},
            _handle_batch_output=self._take,
            _result_dispatcher=SimpleNamespace(_mapping={}),
        )
        to_manager = zmq.Context.instance().socket(zmq.PUSH)
        to_manager.connect(f"ipc://{file}")
        detour = SimpleNamespace(
            socket=to_manager, send_output=lambda *sent: self.told.append(sent[0])
        )
        self.scheduler = SimpleNamespace(
            server_args=args,
            send_to_detokenizer=detour,
            send_to_tokenizer=SimpleNamespace(socket=to_manager),
            tokenizer=tokenizer,
            model_config=SimpleNamespace(is_multimodal=False),
            running_batch=SimpleNamespace(reqs=[None]),
        )

    def _take(self, decoded: BatchStrOutput) -> None:
        [text], [ids] = decoded.output_strs, decoded.output_ids
        self.taken.append(text)
        self.manager.rid_to_state[decoded.rids[0]].output_ids += ids

    def send(self, sent: BatchTokenIDOutput) -> None:
        self.scheduler.send_to_detokenizer.send_output(sent)

    def detokenized(self, text: str, ids: list[int]) -> None:
        """What comes the long way."""
        told: dict[str, Any] = {field.name: None for field in fields(BatchStrOutput)}
        told |= {"rids": ["a"], "output_strs": [text], "output_ids": [ids]}
        self.manager._result_dispatcher._mapping[BatchStrOutput](BatchStrOutput(**told))


def within_a_loop(ends: Ends, steps: Callable[[], Any]) -> None:
    async def run() -> None:
        send_ahead(ends.scheduler)
        take_ahead(ends.manager)
        await steps()

    asyncio.run(asyncio.wait_for(run(), 60))


def test_the_detour_tells_nothing_new(tokenizer: Any, tmp_path: Path) -> None:
    """What follows does; the file through which both met is gone."""
    ends = Ends(tokenizer, tmp_path / "queue")
    ids = tokenizer.encode("Alma has")[:2]

    async def steps() -> None:
        sent = output(ids)
        ends.send(sent)
        while not ends.taken:
            await asyncio.sleep(0.01)
        first = tokenizer.decode(ids)[len(tokenizer.decode(ids[:1])) :]
        assert first and ends.taken == [first] and ends.told == [sent]
        assert not list(tmp_path.glob("*.first"))
        ends.detokenized(first, ids[1:])
        assert ends.taken == [first]
        ends.detokenized(" more", [7])
        assert ends.taken == [first, " more"]

    within_a_loop(ends, steps)


@pytest.mark.parametrize("gone", [False, True], ids=["overtaken", "gone"])
def test_a_late_datagram(tokenizer: Any, tmp_path: Path, gone: bool) -> None:
    """Of a request that had its first token already, or that nobody waits for, nothing is taken or dropped."""
    ends = Ends(tokenizer, tmp_path / "queue")
    ids = tokenizer.encode("Alma has")[:2]

    async def steps() -> None:
        ends.send(output(ids))
        if gone:
            del ends.manager.rid_to_state["a"]
        else:
            ends.detokenized("first", ids[1:])
        while list(tmp_path.glob("*.first")):
            await asyncio.sleep(0.01)
        ends.manager.rid_to_state["a"] = SimpleNamespace(output_ids=[])
        ends.detokenized("next", [7])
        assert ends.taken == ["first", "next"][gone:]

    within_a_loop(ends, steps)


@pytest.mark.parametrize("changed", LONG_WAY.values(), ids=LONG_WAY)
def test_what_goes_the_long_way(tokenizer: Any, tmp_path: Path, changed: dict) -> None:
    ends = Ends(tokenizer, tmp_path / "queue")
    ids = tokenizer.encode("Alma has")[:2]

    async def steps() -> None:
        ends.send(output(ids, **changed))
        ends.scheduler.running_batch.reqs *= FEW + 1
        ends.send(output(ids))
        await asyncio.sleep(0.05)
        assert not ends.taken and len(ends.told) == 2

    within_a_loop(ends, steps)


def test_nobody_is_there(tokenizer: Any, tmp_path: Path) -> None:
    """As in an engine without HTTP."""
    ends = Ends(tokenizer, tmp_path / "queue")
    send_ahead(ends.scheduler)
    sent = output(tokenizer.encode("Alma has")[:2])
    ends.send(sent)
    assert ends.told == [sent]


@pytest.mark.parametrize(
    "argument", [{"tokenizer_worker_num": 2}, {"dp_size": 2}, {"skip_tokenizer_init": True}]
)
def test_other_ways(tokenizer: Any, tmp_path: Path, argument: dict) -> None:
    """Of outputs: nothing stands in them."""
    ends = Ends(tokenizer, tmp_path / "queue", **argument)
    send_ahead(ends.scheduler)
    take_ahead(ends.manager)
    assert not isinstance(ends.scheduler.send_to_detokenizer, AheadSender)
    assert not ends.manager._result_dispatcher._mapping and not list(tmp_path.glob("*.first"))
