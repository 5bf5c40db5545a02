"""The end of training: the last state is saved, the lead says so, and all leave together.

After the last iteration no member leaves before the lead has saved: if the lead dies, another member saves.
"""

from __future__ import annotations

from agents.protocol.messages import Completed, StopWanted
from agents.trainer.lifecycle.books import Books, leave_broken
from agents.trainer.lifecycle.boundary import commit, gathered
from agents.trainer.lifecycle.dividing import assemble
from agents.trainer.lifecycle.effects import AwaitUrgent, Ending, Flow, Flush, Leave, ParamsDigest, Phase, Rows, Tell
from agents.trainer.lifecycle.failures import Broken, Superseded
from agents.trainer.lifecycle.keeping import save_and_wait
from agents.trainer.lifecycle.regrouping import regroup

_FLUSH_S = 2.0
_COMPLETED_FLUSH_S = 5.0
#: How long the others may take to leave as well, before they are left: this, or two iterations.
_PARTING_S = 5.0


def complete(books: Books) -> Flow[bool]:
    """Let the lead save and say that the task is complete; leave together. False: the live state was lost before that,
    and iterations are left."""
    told = False
    stores = bool(books.launch.spec.checkpoint.dir)
    while True:
        books.enter("ending")
        yield from Ending(books.ledger.iteration, books.in_lead_replica and stores)
        failure = ""
        try:
            if books.shares is not None and (stores or books.saves is not None):
                yield from assemble(books, books.shares)
            if books.in_lead_replica and not told:
                yield from save_and_wait(books)
                told = True
                if books.is_lead:
                    yield from _tell(books)
            yield from Rows([books.ledger.iteration])
            return True
        except Broken as broken:
            failure = str(broken)
        except Superseded:
            pass
        if failure:
            yield from leave_broken(books, failure, "checkpoint")
        else:
            yield from Leave()
        yield from regroup(books)
        if books.goes_on:
            return False


def _tell(books: Books) -> Flow[None]:
    digest = yield from ParamsDigest()
    yield from Tell(Completed(iteration=books.last, loss=books.loss, params_digest=digest))
    yield from Flush(_COMPLETED_FLUSH_S)


def leave_as_said(books: Books) -> Flow[None]:
    """The program has said `stop`, and does not come back for the end of training: commit what it has stepped. If all
    have agreed on the end by then, they go it together. Else the others wait for this one in the next iteration; where
    they all have left as well, the log knows, and asks all to end; where not, they go on without it and end after their
    next. (A part of sharded optimizer state is not saved alone: newer processes train on from the last that was.)"""
    if books.agreed and (yield from gathered(books)):
        yield from commit(books)
    if books.stopped and (yield from complete(books)):
        yield from Phase("done")
        return
    books.enter("ending")
    yield from Ending(books.ledger.iteration, True)
    if books.shares is None:
        if books.in_lead_replica:
            yield from save_and_wait(books)
        yield from Tell(StopWanted(iteration=books.last, reason=books.stop_reason, left=True))
        yield from AwaitUrgent(max(_PARTING_S, 2.0 * books.pace_s))
    yield from Phase("done")
    yield from Flush(_FLUSH_S)
    yield from Leave()
