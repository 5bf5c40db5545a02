"""An iteration, from its micro-batches to the agreement of all."""

from __future__ import annotations

from agents.trainer.ledger import Total
from agents.trainer.lifecycle.books import Books, leave_broken
from agents.trainer.lifecycle.effects import (
    Agree,
    AnyShard,
    AskDue,
    At,
    Compute,
    Flow,
    LastStage,
    Pending,
    Phase,
    Reduce,
    Settle,
)
from agents.trainer.lifecycle.failures import Broken, Superseded
from agents.trainer.lifecycle.regrouping import regroup
from agents.trainer.lifecycle.results import NOTHING, Due

#: In the agreement that ends an iteration: this replica's program has said stop (beside Due.word).
_STOP_BIT = 4


def iterate(books: Books) -> Flow[float]:
    """Compute and reduce until all have agreed, in whichever group; the mean loss per token."""
    books.agreed = False
    yield from Phase("forward")
    while not books.agreed:
        books.enter("computing")
        failure = ""
        try:
            yield from Compute(books.ledger)
            yield from _reduce(books)
            books.agreed = True
            continue
        except Broken as broken:
            failure = str(broken)
        except Superseded:
            pass
        if failure:
            yield from leave_broken(books, failure, "reduce")
        books.agreed = yield from regroup(books)
    total = books.total
    assert total is not None
    yield from Settle(total)
    yield from Phase("step")
    yield from At("agreed", books.ledger.iteration, books.ledger.finished)
    return total.loss


def _reduce(books: Books) -> Flow[None]:
    """Bring this iteration from *computed* to *agreed*. Throws Broken, Superseded."""
    books.enter("reducing")
    yield from Phase("reduce")
    ledger, membership = books.ledger, books.membership
    assert membership is not None
    yield from At("computed", ledger.iteration, ledger.finished)
    ledger.loss_sum, ledger.tokens = yield from LastStage(*ledger.sums())
    if books.total is None:
        accounts = yield from Reduce(ledger)
        total = Total(membership.generation, tuple(accounts))
        total.check(ledger.iteration, books.micro_batches)
        books.total = total
    yield from At("reduced", ledger.iteration, ledger.finished)
    yield from _agree(books)


def _agree(books: Books) -> Flow[None]:
    """All have complete sums; which membership comes next, what is saved, and whether training ends."""
    books.enter("agreeing")
    ledger, membership = books.ledger, books.membership
    assert membership is not None
    pending = yield from Pending()
    stops = yield from AnyShard(bool(books.stop_reason))
    due = NOTHING
    if books.shares is not None:
        due = yield from AskDue(ledger.iteration, membership, books.in_lead_replica)
    rows = yield from Agree([ledger.iteration, pending, due.word() + _STOP_BIT * stops])
    books.target = pending if {row[1] for row in rows} == {pending} else 0
    books.due = Due.of(rows[0][2])
    if any(row[2] & _STOP_BIT for row in rows):
        books.stop_reason = books.stop_reason or "another replica's program asked for it"
        books.stopped, books.target = True, 0
