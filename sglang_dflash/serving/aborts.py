"""What an id means that a client aborts: all that was asked under it, and nothing else.

SGLang runs a batch under ids of its own where the client gave one id for all of it, and each copy of a
request with `n` above 1 always. Its scheduler matches ids exactly (patch 0022), so whoever aborts the
client's id must know what came of it. That is kept here while the batch is answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager


@dataclass
class Family:
    """What runs under an id."""

    members: list[str] = field(default_factory=list)
    aborted: bool = False


@contextmanager
def standing_for(
    manager: TokenizerManager, given: str | list[str] | None, received: Any
) -> Iterator[None]:
    """While a batch is answered its ids mean what is run for it.

    Copies that still run when nobody waits for them any more, because the client went away, are aborted.

    Args:
        given: `rid` as the client sent it.
        received: SGLang's `GenerateReqInput` of a batch, normalised: its `rid` is a list.
    """
    known = _families(manager)
    prompts = {rid: Family() for rid in received.rid}
    mine = dict(prompts)
    if isinstance(given, str):
        mine[given] = Family(members=list(received.rid))
    known.update(mine)
    try:
        yield
    finally:
        for rid, family in mine.items():
            if known.get(rid) is family:  # the id may have a new owner
                del known[rid]
        for family in prompts.values():
            for copy in family.members:
                manager.abort_request(copy)


def made_of(manager: TokenizerManager, rid: str, copy: str) -> None:
    """Notes that a prompt with the id `rid` is about to be run as `copy`.

    SGLang makes the copies of a prompt after it has run the prompt; who aborted it until then
    meant them, too.
    """
    family = family_of(manager, rid) or Family()
    family.members.append(copy)
    if family.aborted:  # once the copy is sent, which is before anything else can happen
        asyncio.get_running_loop().call_soon(manager.abort_request, copy)


def abort_family(manager: TokenizerManager, rid: str) -> None:
    """Aborts what runs under an id other than that of its own."""
    family = family_of(manager, rid)
    if family is not None:
        family.aborted = True
        for member in family.members:
            manager.abort_request(member)


def family_of(manager: TokenizerManager, rid: str) -> Family | None:
    """What runs under the id of a batch or a prompt that is being answered."""
    return _families(manager).get(rid)


def _families(manager: TokenizerManager) -> dict[str, Family]:
    return manager.__dict__.setdefault("families_by_rid", {})
