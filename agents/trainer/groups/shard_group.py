"""Forms this shard's group for each membership that comes, and exchanges the members' first words in it.

Rules
-----
* Which membership is followed when, and what becomes of the group before: `lifecycle/membership_choice.py`.
* With their positions the members tell each other which ends of their connections are theirs (`socket_peers.py`), so
  that a member that loses one can say whose the other end is.
* A report names the losses that say something: where more than LOST_MAX connections have ended, nearly all of them are
  those of members that have left since, and it names the one that broke its own collective.
* Blame rests on all these reports (unicrond/core/faults/blame.py), so in a small group all members report at once. Of
  a larger group a few words will do: a few members report at once, far from each other, so that they are on different
  nodes; the others only where no urgent membership comes of that (`report_after_s`).
* Whatever a shard finds out from its own messages or its own group is put to the vote of its replica, so that all
  shards take the same turn. Every wait is bounded for a worker with state: after `fault_wait_s` it is stranded.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar

from unicrond.agents.protocol.messages import GroupMembership
from unicrond.agents.trainer.groups.forming import GroupPlacement
from unicrond.agents.trainer.groups.group import ShardGroup, form
from unicrond.agents.trainer.groups.rendezvous_store import StoreConnections
from unicrond.agents.trainer.groups.socket_peers import ConnectionEnds
from unicrond.agents.trainer.groups.standby import Standby
from unicrond.agents.trainer.lifecycle.results import (
    GroupBroken,
    MembershipSuperseded,
    QuitRequested,
    RendezvousTimedOut,
)
from unicrond.agents.trainer.lifecycle.verdict import Position, span_row, spans_of
from unicrond.agents.trainer.process.context import Context
from unicrond.agents.trainer.process.determinism import environment, environment_number
from unicrond.agents.trainer.process.faults import classify_broken
from unicrond.events.vocabulary import ErrorReported, Phase, WorkerWaiting

T = TypeVar("T")
_MESSAGE_CHARS = 1024
#: So many losses a report can name (unicrond.events.vocabulary.ErrorReported.lost).
LOST_MAX = 64
#: In groups of at most so many, older hooks expect a number for each member in the row of a position. They look at that
#: of a member for itself never: where no sum is fixed it holds what the member computes on.
_NUMBERS_MAX = 64
#: The largest group whose members all report at once.
ALL_REPORT_MAX = 64
_FIRST_REPORTERS = 8
_REPORT_AFTER_S = 1.0


class Rendezvous:
    """Forms and holds this shard's group. `generation`: of the membership tried last, 0 before the first."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._channel = context.channel
        self._replica = context.replica
        self._stores = StoreConnections()
        self._standby = Standby(context.channel, context.settings.standby_max, self._stores)
        self.group: ShardGroup | None = None
        self.generation = 0
        #: The group before, sound, until the next one stands.
        self._old_group: ShardGroup | None = None
        #: Monotonic seconds by which a membership must have led to a group; None: whenever.
        self._deadline_s: float | None = None
        #: The present group's, of this shard, in rank order.
        self._workers: list[str] = []
        #: Of the last group's connections, also when it is left.
        self._ends = ConnectionEnds({})
        #: What each member of the present group computes on, as a number; () or 0: unknown.
        self.environments: tuple[int, ...] = ()
        #: To whom the connections were dead when the last group was left.
        self._lost_workers: tuple[str, ...] = ()

    def look(self) -> None:
        """Raise MembershipSuperseded if an urgent membership has come, QuitRequested if the agent wants the worker to
        end."""
        urgent = self._channel.newest(self.generation, urgent_only=True)
        (newest,) = self._replica.highest(0 if urgent is None else urgent.generation)
        if self._channel.quit_requested():
            raise QuitRequested
        if newest:
            raise MembershipSuperseded(f"generation {newest} is urgent")

    def pending(self) -> int:
        """Return the newest membership that every shard of this replica has and that is not followed yet; else 0."""
        newest = self._channel.newest(self.generation)
        generation = 0 if newest is None else newest.generation
        highest, lowest = self._replica.highest(generation, -generation)
        return generation if highest == -lowest else 0

    def together(self, attempt: Callable[[], T]) -> T:
        """Run `attempt` on this shard's group; raise GroupBroken or MembershipSuperseded if it failed for any shard."""
        failure: GroupBroken | MembershipSuperseded | None = None
        try:
            result = attempt()
        except (GroupBroken, MembershipSuperseded) as error:
            failure = error.with_traceback(None)
        if not self._replica.all_true(failure is None):
            raise failure or MembershipSuperseded("another shard of this replica has left its group")
        return result

    def leave(self) -> None:
        """Leave the group at once."""
        if self.group is not None:
            self._note_losses()
            self.group.close()
            self.group = None

    def prepare_standby(self, membership: GroupMembership) -> None:
        """Prepare for the next loss, once in each generation; called where an iteration has been committed in it."""
        if self.group is not None and self._standby.generation != self.generation == membership.generation:
            launch = self._context.launch
            workers = [member.worker for member in membership.members if member.shard == launch.shard]
            prefix = f"standby/{launch.task}/{self.generation}/{launch.shard}"
            self._standby.prepare(self.generation, workers, self._placement(membership, workers, prefix))

    def _placement(self, membership: GroupMembership, workers: list[str], prefix: str) -> GroupPlacement:
        launch = self._context.launch
        return GroupPlacement(
            store=membership.store,
            prefix=prefix,
            rank=workers.index(launch.worker),
            size=len(workers),
            address=launch.address,
            device=self._replica.device,
            collective_timeout_s=self._context.settings.collective_timeout_s,
            lanes=launch.spec.lanes > 0,
            divided=self._context.divided_by > 1,
        )

    def report(self, failure: str, iteration: int, phase: Phase) -> None:
        """Tell the agent of a broken group, unless the answer is already here. A planned membership is not an answer:
        a member that has not noticed waits in this group for a boundary that no member reaches."""
        if self.group is not None:
            self._note_losses()
        peer = self._ends.find_member(failure)
        kind = classify_broken(failure)
        if self.group is None and kind in ("connection_broken", "collective_timeout"):
            self._wait_for_peer_reports()  # one that is still open is left first: others may wait in it
        if self._channel.newest(self.generation, urgent_only=True) is None:
            self._channel.send(
                ErrorReported(
                    **self._context.launch.reporter,
                    kind=kind,
                    generation=self.generation,
                    iteration=iteration,
                    phase=phase,
                    message=failure[:_MESSAGE_CHARS],
                    detail="",
                    peer="" if peer is None else self._workers[peer],
                    lost_peers=self._lost_workers if kind == "connection_broken" else (),  # a time-out ends them all
                )
            )

    def _wait_for_peer_reports(self) -> None:
        if self._workers:
            after_s = report_after_s(self._workers.index(self._context.launch.worker), len(self._workers))
            with contextlib.suppress(QuitRequested):  # the wait for a membership raises it again
                self._channel.wait(lambda: self._channel.newest(self.generation, urgent_only=True) is not None, after_s)

    def _note_losses(self) -> None:
        """Note the losses before the group is left: that ends all connections."""
        workers = {self._workers[rank] for rank in self._ends.lost_members()} - {self._context.launch.worker}
        self._lost_workers = tuple(sorted(workers)) if len(workers) <= LOST_MAX else ()

    # --- the way to the next group ----------------------------------------------------------------

    def keep_old_group(self, *, is_sound: bool, bounded: bool) -> None:
        """Look for another group. `is_sound`: the present one stays open until `drop_old_group`. `bounded`: see the
        rules."""
        self._old_group, self.group = self.group, None
        if not is_sound:
            self.drop_old_group()
        self._deadline_s = time.monotonic() + self._context.settings.fault_wait_s if bounded else None

    def drop_old_group(self) -> None:
        """Close the group before."""
        if self._old_group is not None:
            self._old_group.close()
            self._old_group = None

    def follow(self, membership: GroupMembership) -> None:
        """Try this membership now, and older ones never again."""
        self.generation = self._context.generation = membership.generation

    def form(self, membership: GroupMembership) -> None:
        """Form the membership's group. Raises GroupBroken, MembershipSuperseded, QuitRequested."""
        launch = self._context.launch
        workers = [member.worker for member in membership.members if member.shard == launch.shard]
        place = self._placement(membership, workers, f"gen/{launch.task}/{membership.generation}/{launch.shard}")
        self._ends, self._lost_workers = ConnectionEnds({}), ()

        def meet() -> None:
            """Form the group of this shard."""
            left_s = self._remaining_s()
            standby = self._standby.offer(workers)
            self.group = form(place, membership.generation, self._channel, left_s, standby, self._stores)

        self.together(meet)
        group = self.group
        assert group is not None
        group.on_wait = partial(self._channel.send, WorkerWaiting(**launch.reporter, generation=membership.generation))
        self._workers = workers

    def exchange(self, position: Position, micro_batches: int, buckets: int, *, sharded: bool) -> list[Position]:
        """Return all members' positions, in rank order. Raises GroupBroken, MembershipSuperseded, QuitRequested."""
        return self.together(lambda: self._exchange(position, micro_batches, buckets, sharded))

    def _exchange(self, position: Position, micro_batches: int, buckets: int, sharded: bool) -> list[Position]:
        group, workers = self.group, self._workers
        assert group is not None
        lanes = self._context.launch.spec.lanes > 0
        unused = [0] * (len(workers) if len(workers) <= _NUMBERS_MAX and not lanes else 0)
        ends = group.exchange_ends()
        number = environment_number(environment())
        environment_row = [number] if lanes else []
        if unused:
            unused[group.rank] = number
        own_position = position if self._replica.can_agree else replace(position, factor=0)
        row = own_position.row(micro_batches, buckets, lanes=lanes)
        rows = group.all_gather([len(position.spans), *environment_row, *unused, *row])
        group.finish()
        group.learn_ends(ends)
        self._ends = group.ends
        gathered_rows = rows.read()
        first = 1 + len(environment_row) + len(unused)
        positions = [Position.from_row(row[first:], micro_batches, lanes=lanes) for row in gathered_rows]
        if lanes or unused:
            self.environments = tuple(row[1 if lanes else 1 + rank] for rank, row in enumerate(gathered_rows))
        else:
            self.environments = ()
        if not sharded:
            return positions
        length = max(row[0] for row in gathered_rows)
        spans = group.all_gather(span_row(position.spans, length))
        group.finish()
        return [
            replace(peer_position, spans=spans_of(row))
            for peer_position, row in zip(positions, spans.read(), strict=True)
        ]

    def _remaining_s(self) -> float | None:
        return None if self._deadline_s is None else max(0.0, self._deadline_s - time.monotonic())

    def await_membership(self) -> GroupMembership:
        """Return the newest membership that any shard of this replica has, newer than the one last tried. Raises
        RendezvousTimedOut, QuitRequested."""

        def await_shared(find: Callable[[], GroupMembership | None]) -> int:
            """Wait until all shards find a membership; return the newest generation."""
            self._channel.wait(lambda: find() is not None, self._remaining_s())
            membership = find()
            generation = 0 if membership is None else membership.generation
            newest, missing = self._replica.highest(generation, int(membership is None))
            if missing:
                raise RendezvousTimedOut(f"no membership after generation {self.generation} arrived in time")
            return newest

        newest = await_shared(lambda: self._channel.newest(self.generation))
        await_shared(lambda: self._channel.membership(newest))
        membership = self._channel.membership(newest)
        assert membership is not None
        return membership


def report_after_s(rank: int, size: int) -> float:
    """Return how long the member `rank` of `size` waits for the answer to others' reports before it reports itself;
    seconds, some later than others."""
    if size <= ALL_REPORT_MAX or rank % (size // _FIRST_REPORTERS) == 0:
        return 0.0
    return _REPORT_AFTER_S * (1 + rank / size)
