"""The last committed state on its way to memory and storage."""

from __future__ import annotations

from agents.trainer.lifecycle.books import Books
from agents.trainer.lifecycle.dividing import assemble
from agents.trainer.lifecycle.effects import Flow, Phase, Save, SaveAndWait, Say, TakeStock
from agents.trainer.lifecycle.results import NOTHING


def save(books: Books, iteration: int, duration_us: int) -> Flow[None]:
    """Save what is due after `iteration`, which took `duration_us`. Throws Broken, Superseded."""
    membership = books.membership
    assert membership is not None
    yield from Phase("checkpoint")
    due = None
    if books.shares is not None:
        due, books.due = books.due, NOTHING
        if due.anything or books.program_saves(iteration):
            yield from assemble(books, books.shares, at_boundary=True)
    yield from Save(iteration, duration_us, books.loss, membership, books.in_lead_replica, due)
    books.whole = False


def save_and_wait(books: Books, *, handover: bool = False) -> Flow[None]:
    """Have the last committed iteration on storage; all shards of the replica take part. `handover`: memory will do,
    where it has room. Not between its own step and the others' parameters: that is the state of no iteration."""
    if not books.last:
        return
    if books.stepped:
        yield from Say("this replica has stepped its own parts only: not saved")
        return
    yield from Phase("checkpoint")
    if books.shares is not None and not books.whole:
        held = (yield from TakeStock()).spans
        if not books.shares.are_whole([held]):
            yield from Say("this replica has parts of the state only: not saved")
            return
    yield from SaveAndWait(books.last, books.loss, handover)
