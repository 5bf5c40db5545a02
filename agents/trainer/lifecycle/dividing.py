"""Sharded optimizer state: gathered after each step, divided in each group, assembled to be saved.

Rules
-----
* A group that breaks while parameters are gathered has harmed nothing: what has arrived is what would have arrived, and
  the next group gathers again, from the members that hold the parts then.
* Parts are staged, all say that they have staged theirs, and only then (`Adopt`) is dropped what was held before: a
  member that has heard from all knows that all have theirs, and one that has not still has both. No step happens in
  between.
"""

from __future__ import annotations

from collections.abc import Sequence

from agents.protocol.messages import Membership
from agents.trainer.lifecycle.books import Books
from agents.trainer.lifecycle.effects import Adopt, Assemble, At, Flow, Gather, Rows, Say, Stage, StageFirst
from agents.trainer.lifecycle.shares import Shares, cut, nodes_of
from agents.trainer.sharded.parts import Part


def gather(shares: Shares) -> Flow[None]:
    """All members have all parameters that any of them has stepped. Throws Broken, Superseded."""
    yield from Gather(shares.gathering())


def divide(books: Books, shares: Shares, wanted: Sequence[Sequence[Part]], *, first: bool = False) -> Flow[None]:
    """Have each member hold its parts, `wanted[rank]`, and nothing else. `first`: training begins, nothing is held
    yet. Throws Broken, Superseded."""
    started_s, parts, received_bytes = books.clock(), wanted[books.rank], 0
    if first:
        yield from StageFirst(parts)
    else:
        received_bytes = yield from Stage(parts, shares.dividing(wanted))
    yield from At("dividing", books.ledger.iteration, books.ledger.finished)
    yield from Rows([1])
    yield from Adopt()
    shares.layout = shares.layout_of(wanted)
    held = ", ".join(f"{part.index + 1} of {part.count}" for part in parts) or "none"
    took = f"{received_bytes} bytes of them from other replicas, {(books.clock() - started_s) * 1e3:.0f} ms"
    yield from Say(f"holds parts {held}; {took}")


def assemble(books: Books, shares: Shares, *, at_boundary: bool = False) -> Flow[None]:
    """Have the lead's replica hold the whole state, to be saved; all take part. Throws Broken, Superseded."""
    yield from Assemble(shares.assembling(), at_boundary)
    books.whole = books.rank == 0


def leave_parts(books: Books, shares: Shares, present: Membership, target: Membership) -> Flow[None]:
    """Before leaving for a planned membership: have those that stay hold every part, or, if none stays, the lead hold
    everything, to be saved. Throws Broken, Superseded."""
    named = {member.worker for member in target.members}
    staying = [rank for rank, member in enumerate(books.peers) if member.worker in named]
    if not staying:
        yield from assemble(books, shares)
    elif not shares.are_whole([shares.layout[rank] for rank in staying]):
        yield from divide(books, shares, cut(nodes_of(present), staying))
