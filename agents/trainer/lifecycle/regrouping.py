"""From one group to the next, state included; or out of training.

What the verdict says (`verdict.py`) is carried out here: which members step first, who gives state to whom, what is
computed again, and which parts of sharded optimizer state each member holds from now on.
"""

from __future__ import annotations

from typing import NoReturn

from agents.protocol.messages import Membership, Parked, Regrouped
from agents.trainer.lifecycle.books import Books, Turn, begin, leave_broken, start_clock, tell_committed
from agents.trainer.lifecycle.dividing import divide, gather
from agents.trainer.lifecycle.effects import (
    At,
    AwaitQuit,
    Flow,
    Forget,
    Give,
    Idle,
    KeepSums,
    Phase,
    Receive,
    Say,
    Sit,
    Tell,
)
from agents.trainer.lifecycle.failures import Broken, QuitAsked, Stranded, Superseded
from agents.trainer.lifecycle.finding import find_state, live_in, tell_taken
from agents.trainer.lifecycle.keeping import save_and_wait
from agents.trainer.lifecycle.meeting import LeftOut, join
from agents.trainer.lifecycle.results import NOTHING
from agents.trainer.lifecycle.shares import Shares, cut, nodes_of
from agents.trainer.lifecycle.verdict import Verdict
from events.vocabulary import StateSource


def regroup(books: Books, target: Membership | None = None) -> Flow[bool]:
    """Take a seat in the next group, state included. True: step first, with the sums that are complete."""
    while True:
        books.enter("regrouping")
        yield from Phase("regroup")
        yield from Idle()
        books.turn, books.target, books.due = None, 0, NOTHING
        books.stopped = False  # the next group agrees on it anew
        try:
            membership, verdict = yield from join(books, target)
        except LeftOut as left_out:
            yield from _park(books, left_out.membership)
        except Stranded as stranded:
            yield from _give_up(books, stranded)
        target = None
        duration_us = yield from _sit(books, membership)
        books.turn = turn = Turn(verdict, transfer_owed=bool(verdict.receivers) or books.shares is not None)
        if (yield from _apply(books, turn)):
            yield from _tell_regrouped(books, verdict, duration_us, "own")
            return True
        origin: StateSource = "own"
        failure = ""
        try:
            if turn.transfer_owed:
                origin = yield from transfer(books, turn)
        except Superseded:
            continue
        except Broken as broken:
            failure = str(broken)
        if failure:
            yield from leave_broken(books, failure, "regroup")
            continue
        yield from _tell_regrouped(books, verdict, duration_us, origin)
        return False


def _sit(books: Books, membership: Membership) -> Flow[int]:
    books.membership = membership
    books.whole = False  # what was assembled was for saving in the group before
    books.stop_reason = books.stop_reason or membership.stop
    replicas = len({member.replica for member in membership.members})
    return (yield from Sit(membership, -(-books.micro_batches // replicas), bool(membership.joiners)))


def _apply(books: Books, turn: Turn) -> Flow[bool]:
    """Act on the verdict as far as this member's own books go; the transfer comes later. True: step first."""
    verdict, rank = turn.verdict, books.rank
    if books.shares is not None:
        books.shares.layout = list(verdict.shares)
        if verdict.fresh:
            yield from _lose(books)
    if rank in verdict.step_first:
        turn.deals_next = True
        return True
    books.total = None
    if rank in verdict.receivers:
        books.has_state = books.stepped = False  # the others have gone on without it, if it had any
        yield from begin(books, verdict.iteration)
        books.hold(verdict)
    else:
        yield from KeepSums(verdict.final, verdict.kept(rank))
        if verdict.final:
            kept = f"{len(verdict.final)} of {books.buckets} buckets are final"
            yield from Say(f"iteration {verdict.iteration} goes on, {kept}")
        books.hold(verdict, redone=bool(books.ledger.held))
    return False


def _lose(books: Books) -> Flow[None]:
    """All members have lost their state; this member's, if it had any, is only a part."""
    if books.has_state:
        yield from Say("all holders of a part of the state are lost")
    yield from Forget()
    books.has_state = books.stepped = False


# --- bringing everybody to the verdict's iteration -----------------------------------------------


def transfer(books: Books, turn: Turn) -> Flow[StateSource]:
    """Parameters that others have stepped, state for members without any, and its parts for each. Throws Broken,
    Superseded."""
    books.enter("transferring")
    verdict, shares = turn.verdict, books.shares
    if shares is not None and verdict.step_first and books.rank not in verdict.step_first:
        yield from gather(shares)
    origin: StateSource = "own"
    if verdict.receivers:
        origin = yield from _give_or_take(books, verdict)
    if shares is not None and books.membership is not None:
        wanted = cut(nodes_of(books.membership))
        yield from divide(books, shares, wanted, first=verdict.fresh and books.origin == "init")
    turn.transfer_owed = False
    return origin


def _give_or_take(books: Books, verdict: Verdict) -> Flow[StateSource]:
    """Give, take, or stand by while the source's state is broadcast."""
    rank, started_s = books.rank, books.clock()
    source = (yield from find_state(books)) if verdict.fresh else verdict.source
    yield from At("giving", books.ledger.iteration, books.ledger.finished)
    if rank == source:
        yield from Give(books.last, books.loss, books.origin)
    else:
        loaded = yield from Receive(source, rank in verdict.receivers)
        if loaded is not None:
            yield from live_in(books, loaded)
            books.origin = loaded.origin if verdict.fresh else "replica"
            if not verdict.fresh:
                yield from tell_taken(books, "replica", loaded, started_s)
    if books.shares is not None and verdict.fresh:
        _source_has_all(books.shares, source, len(books.peers))
    return books.origin if rank in verdict.receivers or verdict.fresh else "own"


def _source_has_all(shares: Shares, source: int, size: int) -> None:
    shares.layout = [()] * size
    shares.layout[source] = [(0, shares.total)]


def _tell_regrouped(books: Books, verdict: Verdict, duration_us: int, source: StateSource) -> Flow[None]:
    if source != "own":
        books.boundary_s = books.clock()
    yield from start_clock(books)
    yield from Tell(
        Regrouped(
            generation=books.generation,
            iteration=books.ledger.iteration,
            dealt=books.ledger.redone,
            duration_us=duration_us,
            source=source,
            others_dealt=sum(verdict.redone) - verdict.redone[books.rank] if verdict.redone else 0,
        )
    )
    yield from tell_committed(books)


# --- out of training -----------------------------------------------------------------------------


def _park(books: Books, target: Membership) -> Flow[NoReturn]:
    """This worker is no longer a member: say so, and wait to be ended. Its last group stays open (`meeting.py`). Where
    no member stays, the lead's replica is the last that can save the state: to memory, where others are about to take
    it from there, else to storage."""
    books.enter("parked")
    present = () if books.membership is None else books.membership.members
    staying = {member.worker for member in present}.intersection(member.worker for member in target.members)
    if books.has_state and not staying and books.in_lead_replica:
        yield from save_and_wait(books, handover=target.handover)
    yield from Tell(Parked(generation=target.generation, iteration=books.last))
    yield from AwaitQuit()
    raise QuitAsked


def _give_up(books: Books, stranded: Stranded) -> Flow[NoReturn]:
    """No membership came: save what there is, and end."""
    books.enter("stranded")
    yield from Say(f"{stranded}; saving and ending")
    if books.has_state:
        yield from save_and_wait(books)
    raise stranded
