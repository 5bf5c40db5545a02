"""Which membership to follow, until a group has exchanged positions.

Rules
-----
* While the group is sound, an *urgent* membership is followed at once, a planned one at the boundary of an iteration
  whose agreement showed that all members hold it (the target).
* Without a sound group (none yet, a broken one, one that would not form), any membership newer than the one
  last tried is followed. Older ones never.
* A broken group is left before anything else. A sound one is kept until the next has formed: its peers may still be
  reading the end of the last agreement from it.
"""

from __future__ import annotations

from agents.protocol.messages import Membership
from agents.trainer.lifecycle import verdict
from agents.trainer.lifecycle.books import Books
from agents.trainer.lifecycle.effects import (
    AnyShard,
    At,
    AwaitMembership,
    Drop,
    Exchange,
    Flow,
    Follow,
    Form,
    Leave,
    Report,
    SetAside,
    TakeStock,
)
from agents.trainer.lifecycle.failures import Broken, QuitAsked, Stranded, Superseded
from agents.trainer.lifecycle.verdict import Position, Verdict
from agents.trainer.sharded.parts import covers


class LeftOut(Exception):
    """The membership to follow does not name this worker."""

    def __init__(self, membership: Membership) -> None:
        super().__init__(f"generation {membership.generation} does not name this worker")
        self.membership = membership


def join(books: Books, target: Membership | None) -> Flow[tuple[Membership, Verdict]]:
    """Follow the membership, and any newer one that comes meanwhile, until a group has drawn a verdict.

    `target`: leave a sound group for it. None: wait for one. Raises LeftOut (what was set aside stays open), Stranded.
    """
    position = books.position((yield from TakeStock()))
    yield from SetAside(keep=target is not None, bounded=position.has_state)
    try:
        while True:
            membership = target or (yield from AwaitMembership())
            target = None
            books.generation = membership.generation
            yield from Follow(membership)
            if all(member.worker != books.worker for member in membership.members):
                raise LeftOut(membership)
            failure = ""
            try:
                verdict = yield from _attempt(books, membership, position)
                break
            except Broken as broken:
                failure = str(broken)
            except Superseded:
                pass
            if failure:
                yield from Report(failure, position.iteration, "regroup")
            yield from Leave()
            yield from Drop()
    except (Stranded, QuitAsked):
        yield from Drop()
        raise
    return membership, verdict


def _attempt(books: Books, membership: Membership, position: Position) -> Flow[Verdict]:
    yield from At("forming", position.iteration)
    yield from Form(membership)
    yield from At("formed", position.iteration)
    shares = books.shares
    positions = yield from Exchange(position, shares is not None)
    whole = True
    if shares is not None:
        late = verdict.left_behind(positions, lanes=books.lanes is not None)
        able = [one for member, one in enumerate(positions) if one.has_state and member not in late]
        held = covers((one.spans for one in able), shares.total)
        whole = not (yield from AnyShard(not held))  # what one shard has lost counts as lost on all
    drawn = verdict.judge(positions, books.micro_batches, whole=whole, lanes=books.lanes)
    yield from At("exchanged", position.iteration)
    return drawn
