"""A replica's seat: which membership it follows, its end of that group, and what it says there.

After agents/trainer/groups/rendezvous.py; how a group meets and what becomes of its collectives: `group.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from msgspec.structs import replace as struct_replace

from agents.protocol.messages import Membership, Waits
from agents.trainer.lifecycle import effects as e
from agents.trainer.lifecycle.failures import Broken, Stranded, Superseded
from agents.trainer.lifecycle.verdict import Position, span_row, spans_of
from replay.simulation.buckets import BUCKETS
from replay.simulation.group import End, Result, Row

if TYPE_CHECKING:
    from replay.simulation.replica import Replica

#: See agents/trainer/groups/group.py, which would bring torch.
WAITS_S = 2.0


class Seat:
    """`generation`: of the membership last tried. `end`: the replica's end of its group."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.training = replica.training
        self.generation = 0
        self.end: End | None = None
        self._aside: End | None = None
        self._until_s: float | None = None
        #: What its last group has lost: for each of its shards, the workers of the other replicas.
        self._lost: dict[int, list[str]] = {}

    def close(self, *, silently: bool = False) -> None:
        """The process ends: its connections do."""
        for end in (self.end, self._aside):
            if end is not None:
                end.leave(silently=silently)
        self.end = self._aside = None

    @property
    def superseded(self) -> bool:
        """An urgent membership has come."""
        return bool(self.replica.newest(self.generation, urgent_only=True))

    def drop(self) -> None:
        """Leave the group that was set aside."""
        if self._aside is not None:
            self._aside.leave()
            self._aside = None

    # --- from group to group ---------------------------------------------------------------------

    async def _set_aside(self, effect: e.SetAside) -> None:
        self._aside, self.end = self.end, None
        if not effect.keep:
            self.drop()
        self._until_s = self.training.loop.time() + self.training.fault_wait_s if effect.bounded else None

    async def _drop(self, effect: e.Drop) -> None:
        self.drop()

    async def _await_membership(self, effect: e.AwaitMembership) -> Membership:
        """See Rendezvous.await_membership."""
        replica = self.replica
        if not await replica.wait(lambda: bool(replica.newest(self.generation)), self._left_s()):
            raise Stranded
        newest = replica.newest(self.generation)
        known = [shard.memberships for shard in replica.shards]
        if not await replica.wait(lambda: all(newest in memberships for memberships in known), self._left_s()):
            raise Stranded
        return known[0][newest]

    def _left_s(self) -> float | None:
        return None if self._until_s is None else max(0.0, self._until_s - self.training.loop.time())

    async def _follow(self, effect: e.Follow) -> None:
        self.generation = effect.membership.generation

    async def _form(self, effect: e.Form) -> None:
        group = self.training.group(self.replica.task, effect.membership)
        self._lost = {}
        self.end = group.enter(self.replica)
        if group.size > 1:
            await self._meet(effect.membership, self.end)

    async def _meet(self, membership: Membership, end: End) -> None:
        loop, store, replica = self.training.loop, membership.store, self.replica
        home = self.training.hosts[store.host]
        since_s, told = loop.time(), False

        def superseded() -> bool:
            return bool(replica.newest(membership.generation))

        while not end.all_keys:
            if not self.training.reach.reaches(replica.shards[0].host.name, store.host):
                await replica.wait(superseded, 5.0)
                raise Broken(f"the store on {store.host} does not answer")
            if not home.store_serves(store.port):
                raise Broken(f"the store on {store.host} is gone")
            await replica.wait(lambda: end.all_keys or superseded(), 0.5)
            if not end.all_keys and not told and loop.time() >= since_s + WAITS_S:
                told = True
                replica.say_all(Waits(generation=membership.generation))
            if superseded():
                raise Superseded
            if self._until_s is not None and loop.time() >= self._until_s:
                raise Broken("not all members came in time")
        await replica.work(self.training.drawn.uniform(0.005, 0.03))
        if not end.connects():
            await replica.wait(superseded, self.training.drawn.choice((0.01, 0.1, 1.0)))
            raise Superseded if superseded() else Broken("a member could not be connected to")

    async def _exchange(self, effect: e.Exchange) -> list[Position]:
        position, micro_batches = effect.position, self.replica.spec.micro_batches
        lanes = self.replica.spec.lanes > 0
        told = await self.gathered([len(position.spans), *position.row(micro_batches, BUCKETS, lanes=lanes)])
        positions = [Position.from_row(row[1:], micro_batches, lanes=lanes) for row in told]
        if not effect.sharded:
            return positions
        spans = await self.gathered(span_row(position.spans, max(row[0] for row in told)))
        return [replace(one, spans=spans_of(row)) for one, row in zip(positions, spans, strict=True)]

    async def _leave(self, effect: e.Leave) -> None:
        self.note_losses()
        if self.end is not None:
            self.end.leave()
            self.end = None

    async def _report(self, effect: e.Report) -> None:
        self.note_losses()
        replica = self.replica
        if not replica.newest(self.generation, urgent_only=True):
            trouble = replica.trouble("connection_broken", effect.failure, effect.phase)
            for number, shard in enumerate(replica.shards):
                shard.say(struct_replace(trouble, lost=tuple(sorted(self._lost.get(number, ())))))

    def note_losses(self) -> None:
        """Before it leaves the group, for that ends all connections."""
        if self.end is not None:
            members = self.end.group.membership.members
            places = {member.worker: member.replica for member in members}
            self._lost = {}
            for rank, shards in self.end.lost.items():
                mates = [m.worker for m in members if m.replica == places[self.end.group.leads[rank]]]
                for shard in shards:
                    self._lost.setdefault(shard, []).append(mates[shard])

    async def _stand_by(self, effect: e.StandBy) -> None:
        pass

    async def _await_quit(self, effect: e.AwaitQuit) -> None:
        await self.replica.wait(lambda: False)

    async def _await_urgent(self, effect: e.AwaitUrgent) -> None:
        """No program leaves its loop here."""

    # --- speaking in it ----------------------------------------------------------------------

    async def gathered(self, row: Row) -> list[Row]:
        """A collective of the present group, and the wait for it. Raises Broken, Superseded, QuitAsked."""
        self.replica.progress.entering()
        rows = await self.come(row)
        self.replica.progress.leaving()
        return rows

    async def come(self, row: Row) -> list[Row]:
        """As `gathered`, without a mark."""
        end = self.end
        assert end is not None
        return await self.over(end.gather(row, self.training.collective_timeout_s))

    async def over(self, result: Result) -> list[Row]:
        """What has come of it. Raises Broken, Superseded, QuitAsked."""
        await self.replica.wait(lambda: result.over or self.superseded)
        if result.error:
            raise Broken(result.error)
        if result.rows is None:
            raise Superseded
        return result.rows

    async def _any_shard(self, effect: e.AnyShard) -> bool:
        return effect.value

    async def _rows(self, effect: e.Rows) -> list[Row]:
        return await self.gathered(effect.row)

    async def _pending(self, effect: e.Pending) -> int:
        known = {shard.newest(self.generation) for shard in self.replica.shards}
        return known.pop() if len(known) == 1 else 0

    async def _membership_of(self, effect: e.MembershipOf) -> Membership | None:
        return self.replica.shards[0].memberships.get(effect.generation)

    async def _agree(self, effect: e.Agree) -> list[Row]:
        self.replica.reached("agreeing")
        return await self.gathered(effect.row)
