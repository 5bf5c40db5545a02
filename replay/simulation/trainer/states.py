"""A replica's state: loaded, broadcast, saved; and its part of a sharded optimizer's, staged and assembled.

After the same parts of agents/trainer/loop/driver.py, `sources.py`, `saving.py` and `sharing.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

from unicrond.agents.trainer.lifecycle import MemberState
from unicrond.agents.trainer.lifecycle import effects as e
from unicrond.agents.trainer.lifecycle.candidates import KINDS, Kind, row_of
from unicrond.agents.trainer.lifecycle.results import NO_SAVE, LoadedState, SaveSchedule
from unicrond.events import vocabulary as v
from unicrond.events.vocabulary import CheckpointSaved, SnapshotStored
from unicrond.replay.simulation.models.memory import Copy, layout_of, states_in_memory
from unicrond.replay.simulation.models.weights import Weights, WeightsState
from unicrond.replay.simulation.trainer.group import Row
from unicrond.replay.simulation.trainer.ports import ReplicaThread
from unicrond.replay.simulation.trainer.replica_stub import RendezvousStub
from unicrond.replay.simulation.trainer.training import Training

_ORIGINS: tuple[v.StateSource, ...] = get_args(v.StateSource)


class States:
    """Carries out the effects on a replica's state. `lineage`: the number of the training that the state is of."""

    def __init__(
        self, replica: ReplicaThread, training: Training, member: MemberState, rendezvous: RendezvousStub
    ) -> None:
        self.replica = replica
        self.training = training
        self.weights = Weights(sharded=replica.spec.optimizer.distributed)
        self.lineage = 0
        self._member = member
        self._rendezvous = rendezvous
        self._peers: tuple[v.MemoryService, ...] = ()

    # --- taking and giving -----------------------------------------------------------------------

    async def _check_peers(self, effect: e.CheckPeers) -> Row:
        self._peers = effect.membership.peers
        self.lineage = self.training.checker.new_lineage(self.replica.task)
        kinds = KINDS if effect.is_first else KINDS[:1]
        return row_of({kind: list(self._available(kind)) for kind in kinds})

    def _available(self, kind: Kind) -> Mapping[int, WeightsState]:
        """Return, by iteration, the states that this replica could load now."""
        task, shards = self.replica.task, self.replica.shards
        match kind:
            case "memory":
                return states_in_memory(task, shards)
            case "peer":
                return self.training.in_peers(task, shards, self._peers)
            case "checkpoint":
                return self.training.checkpoints(task)

    async def _load_state(self, effect: e.LoadState) -> LoadedState | str:
        kind, iteration = effect.candidate.kind, effect.candidate.iteration
        state = self._available(kind).get(iteration)
        if state is None:
            return "it has been overwritten"
        self.training.checker.state_used(self.replica, f"takes from {kind}", iteration, state)
        self.weights.restore(state)
        return LoadedState(iteration, 1.0, 1, kind)

    async def _broadcast_state(self, effect: e.BroadcastState) -> None:
        """Broadcast parameters, lineage, and the baseline of the iterations' times."""
        origin, usual = _ORIGINS.index(effect.origin), self.replica.progress.baseline_words()
        await self._transfer([effect.iteration, self.lineage, origin, len(usual), *usual, *self.weights.params])

    async def _receive_state(self, effect: e.ReceiveState) -> LoadedState | None:
        row = (await self._transfer([]))[effect.source]
        if not effect.keep:
            return None
        iteration, self.lineage, origin, words, *rest = row
        self.replica.progress.inherit(list(rest[:words]))
        self.weights.receive(tuple(rest[words:]))
        return LoadedState(iteration, 1.0, 1, _ORIGINS[origin])

    async def _transfer(self, row: Row) -> list[Row]:
        await self.replica.work(self.training.rng.uniform(0.01, 0.1))
        return await self._rendezvous.all_gather(row)

    async def _params_digest(self, effect: e.ParamsDigest) -> str:
        return f"{hash(self.weights.params):x}"

    # --- saving ----------------------------------------------------------------------------------

    async def _ask_save_schedule(self, effect: e.AskSaveSchedule) -> SaveSchedule:
        return self._schedule(effect.iteration, leads=effect.in_leader_replica)

    def _schedule(self, iteration: int, *, leads: bool) -> SaveSchedule:
        spec = self.replica.spec
        if not leads or iteration >= spec.iterations:
            return NO_SAVE
        interval = spec.checkpoint.interval or 0
        return SaveSchedule(iteration % self.training.capture_every == 0, bool(interval) and iteration % interval == 0)

    async def _save(self, effect: e.Save) -> None:
        schedule = effect.schedule or self._schedule(effect.iteration, leads=effect.in_leader_replica)
        if effect.in_leader_replica and schedule.to_memory:
            await self._capture(effect.iteration)
        if effect.in_leader_replica and schedule.to_storage:
            await self._store(effect.iteration)
        self.weights.whole = None

    async def _save_and_wait(self, effect: e.SaveAndWait) -> None:
        if effect.handover:
            await self.replica.work(0.01)
            if all(self._seal(number, copy) for number, copy in self._copies(effect.iteration)):
                return
        await self._store(effect.iteration)

    async def _store(self, iteration: int) -> None:
        state = self._state_to_save("writes", iteration)
        await self.replica.work(self.training.rng.uniform(0.01, 0.2))
        self.replica.on_moment("saving")
        self.training.save(self.replica.task, iteration, state)
        path, shard = f"/checkpoints/{iteration}", self.replica.shards[0]
        shard.send(CheckpointSaved(**shard.reporter, iteration=iteration, path=path, size_bytes=1, duration_us=1))

    async def _capture(self, iteration: int) -> None:
        """Capture the state: training waits for the copy; a thread of each shard seals it in its node's memory."""
        await self.replica.work(0.002)
        for number, copy in self._copies(iteration):
            self.training.loop.call_later(self.training.rng.uniform(0.002, 0.05), self._seal, number, copy)

    def _state_to_save(self, action: str, iteration: int) -> WeightsState:
        state = self.weights.state_to_save()
        self.training.checker.state_used(self.replica, action, iteration, state)
        return state

    def _copies(self, iteration: int) -> list[tuple[int, Copy]]:
        """Return the copy of each shard, with its number."""
        state = self._state_to_save("captures", iteration)
        return [
            (number, Copy(iteration, self._rendezvous.generation, state, shard.host.name, layout_of(shard)))
            for number, shard in enumerate(self.replica.shards)
        ]

    def _seal(self, number: int, copy: Copy) -> bool:
        shard, spec = self.replica.shards[number], self.replica.spec
        if not shard.alive or shard.hung or not shard.host.keep_copy(shard.worker, self.replica.task, number, copy):
            return False
        snapshot = SnapshotStored(
            node=shard.host.name, origin=shard.host.name, task=self.replica.task, shard=number,
            iteration=copy.iteration, generation=copy.generation, size_bytes=1,
            shards=spec.replica_workers, duration_us=2000,
        )  # fmt: skip
        shard.send(snapshot)
        return True

    # --- sharded optimizer state -----------------------------------------------------------------

    async def _gather_parameters(self, effect: e.GatherParameters) -> None:
        self.replica.on_moment("gathering")
        self.weights.take_gathered(await self._rendezvous.all_gather(self.weights.params), effect.moves)

    async def _stage_first(self, effect: e.StageFirst) -> None:
        self.weights.stage_first(effect.parts)
        self.training.checker.parts_staged(self.replica, self._member.rank, effect.parts)

    async def _stage(self, effect: e.Stage) -> int:
        rows = await self._rendezvous.all_gather(self.weights.row())
        self.weights.stage(effect.parts, rows, effect.moves, self._member.rank)
        self.training.checker.parts_staged(self.replica, self._member.rank, effect.parts)
        return sum(move.size for move in effect.moves if move.target == self._member.rank)

    async def _adopt(self, effect: e.Adopt) -> None:
        self.weights.adopt()
        member, blocks = self._member, self.weights.active_blocks()
        self.training.checker.parts_adopted(self.replica, member.rank, len(member.peers), member.last_iteration, blocks)

    async def _drop_parts(self, effect: e.DropParts) -> None:
        self.weights.forget()

    async def _assemble(self, effect: e.Assemble) -> None:
        rows = await self._rendezvous.all_gather(self.weights.row())
        if self._member.rank == 0:
            self.weights.assemble(rows, effect.moves)
