"""Between two iterations: the loop has stepped; gather, commit, save, and go where the next iteration is to happen."""

from __future__ import annotations

from agents.protocol.messages import Committed, Membership
from agents.trainer.ledger import Total
from agents.trainer.lifecycle.books import Books, Turn, begin, leave_broken, start_clock, tell_committed
from agents.trainer.lifecycle.dividing import gather, leave_parts
from agents.trainer.lifecycle.effects import At, Flow, MembershipOf, Observe, StandBy
from agents.trainer.lifecycle.failures import Broken, Superseded
from agents.trainer.lifecycle.keeping import save
from agents.trainer.lifecycle.regrouping import regroup, transfer


def gathered(books: Books) -> Flow[bool]:
    """Have all parameters that other replicas have stepped. False: the live state was lost meanwhile, another
    iteration begins instead."""
    books.trained = True
    shares = books.shares
    if shares is None:
        return True
    books.stepped = True
    yield from At("stepped", books.ledger.iteration, books.ledger.finished)
    while True:
        books.enter("gathering")
        failure = ""
        try:
            yield from gather(shares)
            books.stepped = False
            return True
        except Broken as broken:
            failure = str(broken)
        except Superseded:
            pass
        if failure:
            yield from leave_broken(books, failure, "step")
        if not (yield from regroup(books)):
            return False


def commit(books: Books) -> Flow[None]:
    """The step is made, on all replicas: report, save, and go to the next iteration's group."""
    books.enter("committing")
    membership, total, iteration = books.membership, books.total, books.ledger.iteration
    assert membership is not None and total is not None
    duration_us = yield from _tell(books, total)
    yield from Observe(iteration, total, duration_us, membership)
    turn, books.turn = books.turn, None
    yield from begin(books, iteration + 1)
    yield from start_clock(books)
    yield from At("committed", books.ledger.iteration)
    target = (yield from MembershipOf(books.target)) if books.target else None
    failure = ""
    try:
        yield from save(books, iteration, duration_us)
        if (yield from _stay(books, membership, turn, target)):
            return
    except Broken as broken:
        failure, target = str(broken), None
    except Superseded:
        target = None
    if failure:
        yield from leave_broken(books, failure, "regroup")
    yield from regroup(books, target)


def _tell(books: Books, total: Total) -> Flow[int]:
    """The iteration is committed; its duration in microseconds."""
    now_s = books.clock()
    duration_us = int((now_s - books.boundary_s) * 1e6)
    books.loss = total.loss
    books.committed = Committed(
        generation=total.generation,
        iteration=books.ledger.iteration,
        samples=total.samples,
        samples_digest=total.samples_digest,
        loss=total.loss,
        duration_us=duration_us,
        micro_batches_by_rank=total.micro_batches_by_rank,
        redone=total.redone,
    )
    books.committed_told = False
    books.boundary_s = now_s
    books.total = None
    yield from tell_committed(books)
    return duration_us


def _stay(books: Books, present: Membership, turn: Turn | None, target: Membership | None) -> Flow[bool]:
    """Get ready for the next iteration in this group, with what the last verdict left to do. False: it is to happen in
    the target's. Throws Broken, Superseded."""
    verdict = turn.verdict if turn is not None and turn.deals_next else None
    if turn is not None and turn.transfer_owed:
        books.hold(turn.verdict)
        yield from transfer(books, turn)
        return True
    if target is None:
        books.hold(verdict)
        yield from StandBy(present)
        return True
    if books.shares is not None:
        yield from leave_parts(books, books.shares, present, target)
    return False
