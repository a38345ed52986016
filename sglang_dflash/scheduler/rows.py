"""How many rows `req_to_token` has, so that a row rests before it gets another owner.

When a request finishes, a round in vain that was launched before is still to run, and takes its write slots
from the request's row. The scheduler writes the row of a new request on another stream, at once. Were it the
same row, the round in vain would write into the new owner's slots, among them those of a prefix that others
share.

SGLang's pool hands rows out in the order in which they came back. All that can come back with one result are
as many as run, and all that one prefill can take are as many; so with twice as many rows it never takes one
that has just come back, and when the next prefill does, the result of the round in vain has been seen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs


def rows_of_requests(args: ServerArgs, max_requests: int) -> int:
    """Rows for `max_requests` that run at once, and for as many streaming sessions, which keep one each."""
    return max_requests * (1 + (not args.disable_overlap_schedule) + args.enable_streaming_session)
