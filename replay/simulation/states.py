"""A replica's state: taken, given, saved; and its part of a sharded optimizer's, staged and assembled.

After the same parts of agents/trainer/driver.py, `sources.py`, `saving.py` and `sharing.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, get_args

from agents.protocol.messages import Captured, Saved
from agents.trainer.lifecycle import Books
from agents.trainer.lifecycle import effects as e
from agents.trainer.lifecycle.candidates import KINDS, Kind, row_of
from agents.trainer.lifecycle.results import NOTHING, Due, Loaded
from events import vocabulary as v
from replay.simulation.group import Row
from replay.simulation.memory import Copy, in_memory, layout_of
from replay.simulation.seat import Seat
from replay.simulation.weights import State, Weights

if TYPE_CHECKING:
    from replay.simulation.replica import Replica

_ORIGINS: tuple[v.StateSource, ...] = get_args(v.StateSource)


class States:
    """`lineage`: the number of the training that the state is of."""

    def __init__(self, replica: Replica, books: Books, seat: Seat) -> None:
        self.replica = replica
        self.training = replica.training
        self.weights = Weights(sharded=replica.spec.optimizer.distributed)
        self.lineage = 0
        self._books = books
        self._seat = seat
        self._peers: tuple[v.MemoryService, ...] = ()

    # --- taking and giving -----------------------------------------------------------------------

    async def _look_around(self, effect: e.LookAround) -> Row:
        self._peers = effect.membership.peers
        self.lineage = self.training.witness.new_lineage(self.replica.task)
        kinds = KINDS if effect.is_first else KINDS[:1]
        return row_of({kind: list(self._found(kind)) for kind in kinds})

    def _found(self, kind: Kind) -> Mapping[int, State]:
        """By iteration, what this replica could take now."""
        task, shards = self.replica.task, self.replica.shards
        match kind:
            case "memory":
                return in_memory(task, shards)
            case "peer":
                return self.training.in_peers(task, shards, self._peers)
            case "checkpoint":
                return self.training.checkpoints(task)

    async def _take(self, effect: e.Take) -> Loaded | str:
        kind, iteration = effect.candidate.kind, effect.candidate.iteration
        state = self._found(kind).get(iteration)
        if state is None:
            return "it has been overwritten"
        self.training.witness.state_used(self.replica, f"takes from {kind}", iteration, state)
        self.weights.restore(state)
        return Loaded(iteration, 1.0, 1, kind)

    async def _give(self, effect: e.Give) -> None:
        """Parameters, lineage, and what is known of the iterations' times."""
        origin, usual = _ORIGINS.index(effect.origin), self.replica.progress.usual()
        await self._transfer([effect.iteration, self.lineage, origin, len(usual), *usual, *self.weights.params])

    async def _receive(self, effect: e.Receive) -> Loaded | None:
        told = (await self._transfer([]))[effect.source]
        if not effect.keep:
            return None
        iteration, self.lineage, origin, words, *rest = told
        self.replica.progress.inherit(list(rest[:words]))
        self.weights.receive(tuple(rest[words:]))
        return Loaded(iteration, 1.0, 1, _ORIGINS[origin])

    async def _transfer(self, row: Row) -> list[Row]:
        await self.replica.work(self.training.drawn.uniform(0.01, 0.1))
        return await self._seat.gathered(row)

    async def _params_digest(self, effect: e.ParamsDigest) -> str:
        return f"{hash(self.weights.params):x}"

    # --- saving ----------------------------------------------------------------------------------

    async def _ask_due(self, effect: e.AskDue) -> Due:
        return self._due(effect.iteration, leads=effect.leads)

    def _due(self, iteration: int, *, leads: bool) -> Due:
        spec = self.replica.spec
        if not leads or iteration >= spec.iterations:
            return NOTHING
        interval = spec.checkpoint.interval or 0
        return Due(iteration % self.training.capture_every == 0, bool(interval) and iteration % interval == 0)

    async def _save(self, effect: e.Save) -> None:
        due = effect.due or self._due(effect.iteration, leads=effect.leads)
        if effect.leads and due.to_memory:
            await self._capture(effect.iteration)
        if effect.leads and due.to_storage:
            await self._store(effect.iteration)
        self.weights.whole = None

    async def _save_and_wait(self, effect: e.SaveAndWait) -> None:
        if effect.handover:
            await self.replica.work(0.01)
            if all(self._seal(number, copy) for number, copy in self._copies(effect.iteration)):
                return
        await self._store(effect.iteration)

    async def _store(self, iteration: int) -> None:
        state = self._saved("writes", iteration)
        await self.replica.work(self.training.drawn.uniform(0.01, 0.2))
        self.replica.reached("saving")
        self.training.save(self.replica.task, iteration, state)
        path = f"/checkpoints/{iteration}"
        self.replica.shards[0].say(Saved(iteration=iteration, path=path, size_bytes=1, duration_us=1))

    async def _capture(self, iteration: int) -> None:
        """Training waits for the copy; a thread of each shard seals it in its node's memory."""
        await self.replica.work(0.002)
        for number, copy in self._copies(iteration):
            self.training.loop.call_later(self.training.drawn.uniform(0.002, 0.05), self._seal, number, copy)

    def _saved(self, what: str, iteration: int) -> State:
        state = self.weights.saved()
        self.training.witness.state_used(self.replica, what, iteration, state)
        return state

    def _copies(self, iteration: int) -> list[tuple[int, Copy]]:
        """Of each shard."""
        state = self._saved("captures", iteration)
        return [
            (number, Copy(iteration, self._seat.generation, state, shard.host.name, layout_of(shard)))
            for number, shard in enumerate(self.replica.shards)
        ]

    def _seal(self, number: int, copy: Copy) -> bool:
        shard, spec = self.replica.shards[number], self.replica.spec
        server = shard.host.fork_server
        if not shard.alive or shard.hung or server is None or shard.worker not in server.processes:
            return False
        server.memory.keep(self.replica.task, number, copy)
        captured = Captured(
            shard=number, iteration=copy.iteration, generation=copy.generation, size_bytes=1,
            shards=spec.replica_workers, duration_us=2000,
        )  # fmt: skip
        shard.say(captured)
        return True

    # --- sharded optimizer state -----------------------------------------------------------------

    async def _gather(self, effect: e.Gather) -> None:
        self.replica.reached("gathering")
        self.weights.gathered(await self._seat.gathered(self.weights.params), effect.moves)

    async def _stage_first(self, effect: e.StageFirst) -> None:
        self.weights.stage_first(effect.parts)
        self.training.witness.parts_staged(self.replica, self._books.rank, effect.parts)

    async def _stage(self, effect: e.Stage) -> int:
        rows = await self._seat.gathered(self.weights.row())
        self.weights.stage(effect.parts, rows, effect.moves, self._books.rank)
        self.training.witness.parts_staged(self.replica, self._books.rank, effect.parts)
        return sum(move.size for move in effect.moves if move.target == self._books.rank)

    async def _adopt(self, effect: e.Adopt) -> None:
        self.weights.adopt()
        books, held = self._books, self.weights.held()
        self.training.witness.parts_adopted(self.replica, books.rank, len(books.peers), books.last, held)

    async def _forget(self, effect: e.Forget) -> None:
        self.weights.forget()

    async def _assemble(self, effect: e.Assemble) -> None:
        rows = await self._seat.gathered(self.weights.row())
        if self._books.rank == 0:
            self.weights.assembled(rows, effect.moves)
