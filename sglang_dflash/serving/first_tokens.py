"""The first token of a streamed request takes a short way where few requests run.

An output goes from the scheduler to the detokenizer and from there to the HTTP server, through two queues whose
threads wake each other. While the GPU is in the next round the scheduler has time, so it decodes a first token itself
and sends it to the HTTP server in one datagram. What goes the long way is the same as ever, so that a datagram may get
lost: who has had it drops the output that the detokenizer made of the same token.
"""

from __future__ import annotations

import asyncio
import pickle
import socket
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import zmq
from sglang.srt.managers.detokenizer_manager import DetokenizerManager
from sglang.srt.managers.io_struct import BatchStrOutput, BatchTokenIDOutput

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from sglang.srt.server_args import ServerArgs

# Requests that run beside, at most. An output that comes twice costs the HTTP server time, of which it has none left
# where many run.
FEW = 4
_MOST_BYTES = 1 << 16
_IPC = "ipc://"


def socket_path(server_args: ServerArgs, queue: zmq.Socket) -> Path | None:
    """Where first tokens come; None where outputs have other ways, or another server than this one looks at them.

    Args:
        queue: either end of the HTTP server's, in a file that only this server's user can write to.
    """
    if server_args.tokenizer_worker_num > 1 or server_args.dp_size > 1:
        return None
    endpoint = queue.getsockopt_string(zmq.LAST_ENDPOINT)
    if server_args.skip_tokenizer_init or not endpoint.startswith(_IPC):
        return None
    return Path(endpoint.removeprefix(_IPC) + ".first")


class _Decoder(DetokenizerManager):
    """The release's, for outputs of requests that it knows nothing of before and forgets at once."""

    def __init__(self, server_args: ServerArgs, tokenizer: Any):
        self.tokenizer, self.decode_status = tokenizer, {}
        self.disable_tokenizer_batch_decode = server_args.disable_tokenizer_batch_decode
        self.is_tool_call_parser_gpt_oss = server_args.tool_call_parser == "gpt-oss"

    def decode(self, output: BatchTokenIDOutput) -> BatchStrOutput:
        decoded = self.handle_batch_token_id_out(output)
        self.decode_status.clear()
        decoded.load = None  # which replicas are chosen by
        return decoded


class AheadSender:
    """Stands for what sends a scheduler's outputs to the detokenizer."""

    def __init__(self, scheduler: Scheduler, path: Path):
        self._scheduler, self._path = scheduler, path
        self._detour = scheduler.send_to_detokenizer
        self.socket = self._detour.socket
        self._decoder = _Decoder(scheduler.server_args, scheduler.tokenizer)
        self._datagrams: socket.socket | None = None

    def send_output(self, output: Any, recv_obj: Any = None) -> None:
        """To the detokenizer, and a first token to the HTTP server before that."""
        # Nobody may be there, as in an engine without HTTP, or is too slow: the long way does it.
        if type(output) is BatchTokenIDOutput and self._goes_ahead(output):
            with suppress(OSError):
                there = self._connected()
                decoded = self._decoder.decode(output)
                there.send(pickle.dumps(decoded, pickle.HIGHEST_PROTOCOL))
        self._detour.send_output(output, recv_obj)

    def _goes_ahead(self, output: BatchTokenIDOutput) -> bool:
        """Whether it is one request's first token, without anything that an output carries once only."""
        return (
            output.completion_tokens == [1]
            and output.finished_reasons == [None]
            and output.output_token_logprobs_val is None
            and output.output_hidden_states is None
            and output.routed_experts is None
            and not output.customized_info
            and len(self._scheduler.running_batch.reqs) <= FEW
        )

    def _connected(self) -> socket.socket:
        """From the first token on.

        Raises:
            OSError: nobody is there yet.
        """
        if self._datagrams is None:
            datagrams = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            datagrams.setblocking(False)
            try:
                datagrams.connect(str(self._path))
            except OSError:
                datagrams.close()
                raise
            self._datagrams = datagrams
        return self._datagrams


class AheadReceiver:
    """Stands for what takes decoded outputs in the HTTP server."""

    def __init__(self, manager: TokenizerManager, path: Path):
        """Within the event loop."""
        self._manager, self._path, self._take = manager, path, manager._handle_batch_output
        self._had: set[str] = set()  # requests whose first output is still to come the long way
        self._datagrams = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._datagrams.setblocking(False)
        self._datagrams.bind(str(path))
        asyncio.get_running_loop().add_reader(self._datagrams.fileno(), self._read)

    def take(self, output: BatchStrOutput) -> None:
        """What the detokenizer sends, in the order of the scheduler."""
        if self._had and len(output.rids) == 1 and output.rids[0] in self._had:
            self._had.remove(output.rids[0])
        else:
            self._take(output)

    def _read(self) -> None:
        output = pickle.loads(self._datagrams.recv(_MOST_BYTES))
        self._path.unlink(missing_ok=True)  # the scheduler is connected
        [rid] = output.rids
        state = self._manager.rid_to_state.get(rid)
        # The long way was shorter, or the request is gone, as the release then says of what comes from there.
        if state is not None and not state.output_ids:
            self._take(output)
            self._had.add(rid)


def send_ahead(scheduler: Scheduler) -> None:
    """On the rank that sends outputs, if the HTTP server can take first tokens.

    Of pictures' models the scheduler has another tokenizer than the detokenizer.
    """
    if scheduler.send_to_detokenizer.socket is None or scheduler.model_config.is_multimodal:
        return
    path = socket_path(scheduler.server_args, scheduler.send_to_tokenizer.socket)
    if path is not None:
        scheduler.send_to_detokenizer = AheadSender(scheduler, path)


def take_ahead(manager: TokenizerManager) -> None:
    """Once, within the event loop in which the manager takes outputs."""
    path = socket_path(manager.server_args, manager.recv_from_detokenizer)
    if path is not None:
        # Found before the release's entry, which is for several types.
        manager._result_dispatcher._mapping[BatchStrOutput] = AheadReceiver(manager, path).take
