"""From one group to the next: which membership to follow, and the exchange that every new group begins with.

Rules
-----
* While the group is sound, an *urgent* membership is followed at once, a planned one at the boundary of an iteration
  whose agreement showed that all members hold it (`hook.py` decides that, and names it as the target).
* While there is no sound group (none yet, a broken one, one that would not form), any membership newer than the one
  last tried is followed. Older ones never.
* A broken group is left before anything else. A sound one is kept until the next has formed: its peers may still be
  reading the end of the last agreement from it.
* With their positions the members of a small group exchange the ports of their connections, so that who loses one can
  say whose the other end is: of two ends one is at fault, and often only the other notices.
* Whatever a shard finds out from its own messages or its own group is put to the vote of its replica, so that all
  shards take the same turn. Every wait is bounded for a worker with state: after `fault_wait_s` it is stranded.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from agents.trainer.channel import QuitAsked
from agents.trainer.context import Context
from agents.trainer.faults import classify_broken
from agents.trainer.forming import Place, ports_named
from agents.trainer.group import Broken, Group, Superseded, form
from agents.trainer.messages import Membership, Trouble, Waits
from agents.trainer.parts import covers
from agents.trainer.regrouping import Position, Verdict, judge, span_row, spans_of
from agents.trainer.standby import Standby
from events.vocabulary import Phase

T = TypeVar("T")
_MESSAGE_CHARS = 1024
#: The largest group whose members tell each other their ports: as many numbers from each to each as it has members.
_PORTS_MAX = 64


class LeftOut(Exception):
    """The membership to follow does not name this worker."""

    def __init__(self, membership: Membership) -> None:
        super().__init__(f"generation {membership.generation} does not name this worker")
        self.membership = membership


class Stranded(Exception):
    """No membership came in time."""


@dataclass(frozen=True, slots=True)
class Seat:
    """A place in a new group: its membership, and what all agreed on by exchanging their positions."""

    membership: Membership
    verdict: Verdict
    duration_us: int


class Rendezvous:
    """Holds this shard's group. `generation`: of the membership last tried, 0 before the first."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._channel = context.channel
        self._replica = context.replica
        self._standby = Standby(context.channel, context.patience.standby_max)
        self.group: Group | None = None
        self.generation = 0
        #: Whose connections have these ports on their side.
        self._owners: dict[int, str] = {}
        #: To whom the connections were dead when the last group was left.
        self._lost: tuple[str, ...] = ()

    def look(self) -> None:
        """Raise Superseded if an urgent membership has come, QuitAsked if the agent wants the worker to end."""
        urgent = self._channel.newest(self.generation, urgent_only=True)
        (newest,) = self._replica.highest(0 if urgent is None else urgent.generation)
        if self._channel.quit_asked():
            raise QuitAsked
        if newest:
            raise Superseded(f"generation {newest} is urgent")

    def pending(self) -> int:
        """The newest membership that every shard of this replica holds and that is not followed yet; else 0."""
        newest = self._channel.newest(self.generation)
        mine = 0 if newest is None else newest.generation
        highest, lowest = self._replica.highest(mine, -mine)
        return mine if highest == -lowest else 0

    def together(self, attempt: Callable[[], T]) -> T:
        """Do something with this shard's group; raises Broken or Superseded if it failed for any shard."""
        failure: Broken | Superseded | None = None
        try:
            result = attempt()
        except (Broken, Superseded) as error:
            failure = error.with_traceback(None)
        if not self._replica.all_true(failure is None):
            raise failure or Superseded("another shard of this replica has left its group")
        return result

    def leave(self) -> None:
        """Leave the group at once."""
        if self.group is not None:
            self._note_losses(self.group)
            self.group.close()
            self.group = None

    def stand_by(self, membership: Membership) -> None:
        """Prepare for the next loss, once in each generation; called where an iteration has been committed in it."""
        if self.group is not None and self._standby.generation != self.generation == membership.generation:
            launch = self._context.launch
            workers = [member.worker for member in membership.members if member.shard == launch.shard]
            prefix = f"standby/{launch.task}/{self.generation}/{launch.shard}"
            self._standby.prepare(self.generation, workers, self._place(membership, workers, prefix))

    def _place(self, membership: Membership, workers: list[str], prefix: str) -> Place:
        launch = self._context.launch
        return Place(
            store=membership.store,
            prefix=prefix,
            rank=workers.index(launch.worker),
            size=len(workers),
            address=launch.address,
            device=self._replica.device,
            collective_timeout_s=self._context.patience.collective_timeout_s,
        )

    def report(self, failure: Broken, iteration: int, phase: Phase) -> None:
        """Tell the agent of a broken group, unless the answer is already here. A planned membership is none: who has
        not noticed waits in this group for a boundary that nobody reaches."""
        if self.group is not None:
            self._note_losses(self.group)
        kind = classify_broken(str(failure))
        if self._channel.newest(self.generation, urgent_only=True) is None:
            self._channel.send(
                Trouble(
                    kind=kind,
                    generation=self.generation,
                    iteration=iteration,
                    phase=phase,
                    message=str(failure)[:_MESSAGE_CHARS],
                    detail="",
                    peer=next((self._owners[port] for port in ports_named(str(failure)) if port in self._owners), ""),
                    lost=self._lost if kind == "connection_broken" else (),  # a time-out ends them all
                )
            )

    def _note_losses(self, group: Group) -> None:
        """Before it is left: that ends them all."""
        owners = {self._owners[port] for port in group.lost_ports() if port in self._owners}
        self._lost = tuple(sorted(owners - {self._context.launch.worker}))

    def join(
        self, position: Position, micro_batches: int, buckets: int, target: Membership | None, total: int = 0
    ) -> Seat:
        """Follow the membership, and any newer one that comes meanwhile, until a group has exchanged positions.

        `target`: leave a sound group for it. None: wait for one. `total`: elements of the sharded optimizer state, 0:
        it is not sharded. Raises LeftOut, Stranded, QuitAsked.
        """
        sound, self.group = self.group, None
        if target is None and sound is not None:
            sound.close()
        wait_s = self._context.patience.fault_wait_s if position.has_state else None
        deadline = None if wait_s is None else time.monotonic() + wait_s
        try:
            while True:
                membership = target or self._await_membership(deadline)
                target = None
                self.generation = self._context.generation = membership.generation
                if all(member.worker != self._context.launch.worker for member in membership.members):
                    sound = None  # kept open: see the rules
                    raise LeftOut(membership)
                try:
                    verdict = self._attempt(membership, position, micro_batches, buckets, total, deadline)
                except Broken as failure:
                    self.report(failure, position.iteration, "regroup")
                except Superseded:
                    pass
                else:
                    received_s = self._channel.received_at(membership.generation)
                    return Seat(membership, verdict, int((time.monotonic() - received_s) * 1e6))
                self.leave()
                if sound is not None:
                    sound.close()
                    sound = None
        finally:
            if sound is not None:
                sound.close()

    def _attempt(
        self, membership: Membership, position: Position, micro_batches: int, buckets: int, total: int,
        deadline: float | None,
    ) -> Verdict:  # fmt: skip
        launch, injection = self._context.launch, self._context.injection
        mine = [member for member in membership.members if member.shard == launch.shard]
        injection.fire("forming", position.iteration, self.generation)

        workers = [member.worker for member in mine]
        place = self._place(membership, workers, f"gen/{launch.task}/{membership.generation}/{launch.shard}")

        self._owners, self._lost = {}, ()

        def meet() -> None:
            timeout_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            self.group = form(place, membership.generation, self._channel, timeout_s, self._standby.offer(workers))

        self.together(meet)
        group = self.group
        assert group is not None
        group.waits = partial(self._channel.send, Waits(generation=membership.generation))
        injection.fire("formed", position.iteration, self.generation)

        def exchange() -> list[Position]:
            ports = _padded(group.ports(), len(workers)) if len(workers) <= _PORTS_MAX else []
            rows = group.all_gather([len(position.spans), *ports, *position.row(micro_batches, buckets)])
            group.finish()
            told = rows.read()
            self._owners = _owners(workers, [row[1 : 1 + len(ports)] for row in told])
            positions = [Position.from_row(row[1 + len(ports) :], micro_batches) for row in told]
            if not total:
                return positions
            length = max(row[0] for row in told)
            spans = group.all_gather(span_row(position.spans, length))
            group.finish()
            return [replace(one, spans=spans_of(row)) for one, row in zip(positions, spans.read(), strict=True)]

        positions = self.together(exchange)
        held = (one.spans for one in positions if one.has_state)
        whole = not total or self._replica.all_true(covers(held, total))  # 0 on one shard is 0 on all
        verdict = judge(positions, micro_batches, whole=whole)
        injection.fire("exchanged", position.iteration, self.generation)
        return verdict

    def _await_membership(self, deadline: float | None) -> Membership:
        """The newest membership that any shard of this replica knows, newer than the one last tried."""

        def await_shared(known: Callable[[], Membership | None]) -> int:
            remaining_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            self._channel.wait(lambda: known() is not None, remaining_s)
            membership = known()
            mine = 0 if membership is None else membership.generation
            newest, missing = self._replica.highest(mine, int(membership is None))
            if missing:
                raise Stranded(f"no membership after generation {self.generation} came in time")
            return newest

        newest = await_shared(lambda: self._channel.newest(self.generation))
        await_shared(lambda: self._channel.membership(newest))
        membership = self._channel.membership(newest)
        assert membership is not None
        return membership


def _padded(ports: list[int], length: int) -> list[int]:
    return (ports + [0] * length)[:length]


def _owners(workers: Sequence[str], ports: Sequence[Sequence[int]]) -> dict[int, str]:
    """Port -> who has it; not those that two of them have, on two hosts."""
    every = [(port, worker) for worker, own in zip(workers, ports, strict=True) for port in own if port]
    count = Counter(port for port, _ in every)
    return {port: worker for port, worker in every if count[port] == 1}
