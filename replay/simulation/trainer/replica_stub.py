"""A replica's rendezvous: which membership it follows, its end of that group, and its messages there.

After agents/trainer/groups/shard_group.py; how a group meets and what becomes of its collectives: `group.py`."""

from __future__ import annotations

from dataclasses import replace

from msgspec.structs import replace as struct_replace

from unicrond.agents.protocol.messages import GroupMembership
from unicrond.agents.trainer.lifecycle import effects as e
from unicrond.agents.trainer.lifecycle.results import GroupBroken, MembershipSuperseded, RendezvousTimedOut
from unicrond.agents.trainer.lifecycle.verdict import Position, span_row, spans_of
from unicrond.events.vocabulary import WorkerWaiting
from unicrond.replay.simulation.trainer.buckets import BUCKETS
from unicrond.replay.simulation.trainer.group import End, Result, Row
from unicrond.replay.simulation.trainer.ports import ReplicaThread
from unicrond.replay.simulation.trainer.training import Training

#: See agents/trainer/groups/group.py, which would bring torch.
WAITS_S = 2.0


class RendezvousStub:
    """A replica's way from group to group. `generation`: that of the membership last tried. `end`: the replica's end of
    its group."""

    def __init__(self, replica: ReplicaThread, training: Training) -> None:
        self.replica = replica
        self.training = training
        self.generation = 0
        self.end: End | None = None
        self._old_group: End | None = None
        self._until_s: float | None = None
        #: What its last group has lost: for each of its shards, the workers of the other replicas.
        self._lost_peers: dict[int, list[str]] = {}

    def close(self, *, silently: bool = False) -> None:
        """Close the connections, as the process ends."""
        for end in (self.end, self._old_group):
            if end is not None:
                end.leave(silently=silently)
        self.end = self._old_group = None

    @property
    def superseded(self) -> bool:
        """Check whether an urgent membership has come."""
        return bool(self.replica.newest(self.generation, urgent_only=True))

    def drop(self) -> None:
        """Leave the old group."""
        if self._old_group is not None:
            self._old_group.leave()
            self._old_group = None

    # --- from group to group ---------------------------------------------------------------------

    async def _keep_old_group(self, effect: e.KeepOldGroup) -> None:
        self._old_group, self.end = self.end, None
        if not effect.is_sound:
            self.drop()
        self._until_s = self.training.loop.time() + self.training.fault_wait_s if effect.bounded else None

    async def _drop_old_group(self, effect: e.DropOldGroup) -> None:
        self.drop()

    async def _await_membership(self, effect: e.AwaitMembership) -> GroupMembership:
        """Wait for the newest membership; see Rendezvous.await_membership."""
        replica = self.replica
        if not await replica.wait(lambda: bool(replica.newest(self.generation)), self._remaining_s()):
            raise RendezvousTimedOut
        newest = replica.newest(self.generation)
        by_shard = [shard.memberships for shard in replica.shards]
        if not await replica.wait(lambda: all(newest in memberships for memberships in by_shard), self._remaining_s()):
            raise RendezvousTimedOut
        return by_shard[0][newest]

    def _remaining_s(self) -> float | None:
        return None if self._until_s is None else max(0.0, self._until_s - self.training.loop.time())

    async def _follow_membership(self, effect: e.FollowMembership) -> None:
        self.generation = effect.membership.generation

    async def _form_group(self, effect: e.FormGroup) -> None:
        group = self.training.group(self.replica.task, effect.membership)
        self._lost_peers = {}
        self.end = group.enter(self.replica)
        if group.size > 1:
            await self._meet(effect.membership, self.end)

    async def _meet(self, membership: GroupMembership, end: End) -> None:
        loop, store, replica = self.training.loop, membership.store, self.replica
        home = self.training.hosts[store.host]
        since_s, has_reported = loop.time(), False

        def superseded() -> bool:
            """Return whether there is a newer membership."""
            return bool(replica.newest(membership.generation))

        while not end.all_keys:
            if not self.training.reach.reaches(replica.shards[0].host.name, store.host):
                await replica.wait(superseded, 5.0)
                raise GroupBroken(f"the store on {store.host} does not answer")
            if not home.store_serves(store.port):
                raise GroupBroken(f"the store on {store.host} is gone")
            await replica.wait(lambda: end.all_keys or superseded(), 0.5)
            if not end.all_keys and not has_reported and loop.time() >= since_s + WAITS_S:
                has_reported = True
                replica.send_all(WorkerWaiting(**replica.shards[0].reporter, generation=membership.generation))
            if superseded():
                raise MembershipSuperseded
            if self._until_s is not None and loop.time() >= self._until_s:
                raise GroupBroken("not all members came in time")
        await replica.work(self.training.rng.uniform(0.005, 0.03))
        if not end.connects():
            await replica.wait(superseded, self.training.rng.choice((0.01, 0.1, 1.0)))
            raise MembershipSuperseded if superseded() else GroupBroken("a member could not be connected to")

    async def _exchange_positions(self, effect: e.ExchangePositions) -> list[Position]:
        position, micro_batches = effect.position, self.replica.spec.micro_batches
        lanes = self.replica.spec.lanes > 0
        rows = await self.all_gather([len(position.spans), *position.row(micro_batches, BUCKETS, lanes=lanes)])
        positions = [Position.from_row(row[1:], micro_batches, lanes=lanes) for row in rows]
        if not effect.sharded:
            return positions
        spans = await self.all_gather(span_row(position.spans, max(row[0] for row in rows)))
        return [replace(unspanned, spans=spans_of(row)) for unspanned, row in zip(positions, spans, strict=True)]

    async def _leave_group(self, effect: e.LeaveGroup) -> None:
        self.note_losses()
        if self.end is not None:
            self.end.leave()
            self.end = None

    async def _report_failure(self, effect: e.ReportFailure) -> None:
        self.note_losses()
        replica = self.replica
        if not replica.newest(self.generation, urgent_only=True):
            error_report = replica.error_report("connection_broken", effect.failure, effect.phase)
            for number, shard in enumerate(replica.shards):
                shard.send(struct_replace(error_report, lost_peers=tuple(sorted(self._lost_peers.get(number, ())))))

    def note_losses(self) -> None:
        """Note the lost connections before leaving the group, since that ends all of them."""
        if self.end is not None:
            members = self.end.group.membership.members
            places = {member.worker: member.replica for member in members}
            self._lost_peers = {}
            for rank, shards in self.end.lost_shards.items():
                mates = [m.worker for m in members if m.replica == places[self.end.group.leads[rank]]]
                for shard in shards:
                    self._lost_peers.setdefault(shard, []).append(mates[shard])

    async def _prepare_standby(self, effect: e.PrepareStandby) -> None:
        pass

    async def _await_quit(self, effect: e.AwaitQuit) -> None:
        await self.replica.wait(lambda: False)

    async def _await_urgent(self, effect: e.AwaitUrgent) -> None:
        """Return at once: no program leaves its loop here."""

    # --- speaking in it ----------------------------------------------------------------------

    async def all_gather(self, row: Row) -> list[Row]:
        """Enter a collective of the present group, and wait for it. Raises GroupBroken, MembershipSuperseded,
        QuitRequested."""
        self.replica.progress.entering()
        rows = await self.collect(row)
        self.replica.progress.leaving()
        return rows

    async def collect(self, row: Row) -> list[Row]:
        """Gather as `all_gather` does, without a progress mark."""
        end = self.end
        assert end is not None
        return await self.wait_for(end.gather(row, self.training.collective_timeout_s))

    async def wait_for(self, result: Result) -> list[Row]:
        """Wait for the result. Raises GroupBroken, MembershipSuperseded, QuitRequested."""
        await self.replica.wait(lambda: result.is_settled or self.superseded)
        if result.error:
            raise GroupBroken(result.error)
        if result.rows is None:
            raise MembershipSuperseded
        return result.rows

    async def _any_shard(self, effect: e.AnyShard) -> bool:
        return effect.holds

    async def _gather_rows(self, effect: e.GatherRows) -> list[Row]:
        return await self.all_gather(effect.row)

    async def _pending_generation(self, effect: e.PendingGeneration) -> int:
        generations = {shard.newest(self.generation) for shard in self.replica.shards}
        return generations.pop() if len(generations) == 1 else 0

    async def _get_membership(self, effect: e.GetMembership) -> GroupMembership | None:
        return self.replica.shards[0].memberships.get(effect.generation)

    async def _agree(self, effect: e.Agree) -> list[Row]:
        self.replica.on_moment("agreeing")
        return await self.all_gather(effect.row)
