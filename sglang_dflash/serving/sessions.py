"""Which turns of streaming sessions are served, and how many sessions.

SGLang makes a refused turn the session's last, with one token for a prompt; the next turn, or the end of
the session, then frees slots that others use, and the server ends. Here a refused turn is none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import OpenSessionReqInput, TokenizedGenerateReqInput
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.session_controller import Session

# What a turn of another session may do to those before it.
_NOT_APPENDING = ("offset", "replace", "drop_previous_output")


def why_not_opened(scheduler: Scheduler, received: OpenSessionReqInput) -> str | None:
    """Why a session cannot be opened, as a sentence; None if it can.

    Each streaming session keeps a row of `req_to_token`, of which there are some to spare (`rows.py`).
    """
    if not received.streaming:
        return None
    sessions = scheduler.session_controller.sessions.values()
    limit = scheduler.max_running_requests
    if sum(session.streaming for session in sessions) < limit:
        return None
    return (
        f"{limit} streaming sessions are open, as many as --max-running-requests allows: close one, or start the "
        "server with a larger number."
    )


def why_not_a_turn(
    scheduler: Scheduler, session: Session, received: TokenizedGenerateReqInput
) -> str | None:
    """Why a request cannot be a turn of its session, as a sentence; None if it can."""
    if not session.streaming:
        return None
    for name in _NOT_APPENDING:
        value = getattr(received.session_params, name)
        if value:
            return f"{name} {value} is not supported in a streaming session, whose turns only append: leave it out."
    if received.sampling_params.n > 1:
        return (
            f"n {received.sampling_params.n} is not supported in a streaming session, which is one conversation: "
            "ask for one answer."
        )
    if not received.input_ids:
        return "A turn of a streaming session needs a prompt of at least one token: send one."
    for node in session.req_nodes.values():
        if not node.req.finished() and _is_served(scheduler, node.req):
            return (
                f"Session {session.session_id} is still answering request {node.req.rid}: wait for its end, or "
                "abort it."
            )
    return None


def _is_served(scheduler: Scheduler, req: Req) -> bool:
    """Whether a request waits or runs; one that is aborted in the queue does not and never finishes."""
    running = (scheduler.running_batch, scheduler.last_batch)
    places = [scheduler.waiting_queue, scheduler.grammar_manager.grammar_queue]
    places += [batch.reqs for batch in running if batch is not None]
    places.append([scheduler.chunked_req])
    return any(req is other for place in places for other in place)


def take_back(req: Req) -> None:
    """Makes a request that is refused no turn of its streaming session, which stays as it was."""
    session = req.session
    if session is None or not session.streaming:
        return
    req.session = None
    node = session.req_nodes.get(req.rid)
    if node is None or node.req is not req:
        return
    del session.req_nodes[req.rid]
    before = session.turn_before
    if before is not None:
        before.req.session = session
        session.req_nodes[before.req.rid] = before
