"""Drives the lifecycle (agents/trainer/lifecycle) of a simulated replica under virtual time.

Real here: the lifecycle itself, and with it `judge` and `deal`, positions, ledgers, accounts, totals, sampling, the
order of candidates, which part of sharded state travels where. Modelled: gradients (`buckets.py`), parameters and
optimizer state (`weights.py`), time, collectives (`group.py`). All shards of a replica take the same turns, as their
vote makes them: one coroutine, and one lifecycle.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, get_args

from msgspec.structs import replace as struct_replace

from agents.trainer.candidates import KINDS, Kind, row_of
from agents.trainer.ledger import Account, Ledger
from agents.trainer.lifecycle import Books, run
from agents.trainer.lifecycle import effects as e
from agents.trainer.lifecycle.failures import Broken, QuitAsked, Stranded, Superseded
from agents.trainer.lifecycle.results import NOTHING, Due, Loaded, Stock
from agents.trainer.messages import Captured, Committed, Completed, FromWorker, Membership, Regrouped, Saved, Waits
from agents.trainer.regrouping import Position, span_row, spans_of
from agents.trainer.sampling import Sampling
from events import vocabulary as v
from replay.simulation.buckets import BUCKETS, Buckets
from replay.simulation.group import End, Row
from replay.simulation.memory import Copy, in_memory, layout_of
from replay.simulation.weights import EXTENTS, State, Weights

if TYPE_CHECKING:
    from replay.simulation.replica import Replica

#: What the lifecycle answers; all else ends the process.
_THROWN = (Broken, Superseded, Stranded, QuitAsked)
_ORIGINS: tuple[v.StateSource, ...] = get_args(v.StateSource)
#: See agents/trainer/group.py, which would bring torch.
WAITS_S = 2.0


class Driver:
    """`end`: the replica's end of its group. `lost`: whom its last group has lost, the workers of each replica."""

    def __init__(self, replica: Replica) -> None:
        spec, sharded = replica.spec, replica.spec.optimizer.distributed
        self.replica = replica
        self.training = replica.training
        self.books = Books(replica.shards[0].launch, BUCKETS, replica.training.loop.time, EXTENTS if sharded else ())
        self.end: End | None = None
        self.generation = 0
        self._sampling = Sampling(spec.seed, spec.global_batch, spec.micro_batch, None)
        self._weights = Weights(sharded=sharded)
        self._buckets = Buckets(spec.micro_batches)
        self._gradient = 0
        self._lineage = 0
        self._aside: End | None = None
        self._until_s: float | None = None
        self._lost: list[list[str]] = []
        self._peers: tuple[v.MemoryService, ...] = ()

    async def train(self) -> None:
        """To the end of the lifecycle. Raises what ends the process."""
        flow = run(self.books)
        try:
            effect = next(flow)
            while True:
                try:
                    result = await _HANDLERS[type(effect)](self, effect)
                except _THROWN as failure:
                    effect = flow.throw(failure)
                else:
                    effect = flow.send(result)
        except StopIteration:
            return

    def close(self, *, silently: bool = False) -> None:
        """The process ends: its connections do."""
        for end in (self.end, self._aside):
            if end is not None:
                end.leave(silently=silently)
        self.end = self._aside = None

    # --- seams -----------------------------------------------------------------------------------

    async def _compute(self, effect: e.Compute) -> None:
        ledger = effect.ledger
        self._look()
        while todo := ledger.todo():
            await self._micro_batch(ledger, todo[0], is_last=len(todo) == 1)
            self._look()

    def _look(self) -> None:
        self.replica.look()
        if self.replica.newest(self.generation, urgent_only=True):
            raise Superseded

    async def _micro_batch(self, ledger: Ledger, micro_batch: int, *, is_last: bool) -> None:
        """Inside the last backward the reduction of the buckets begins, one after the other."""
        replica, took_s = self.replica, self.training.micro_batch_s
        replica.progress.working(ledger.finished)
        replica.reached("micro_batch")
        await replica.work_slowly()
        if is_last and self.end is not None:
            await replica.work(took_s * 0.4)
            self._buckets.add(micro_batch)
            while self.end is not None and self._buckets.start_next(self.end, self.training.collective_timeout_s):
                await replica.work(took_s * 0.2)
        else:
            await replica.work(took_s)
            self._buckets.add(micro_batch)
        replica.fail_if_asked()
        ledger.finished += 1
        ledger.add(1.0, replica.spec.micro_batch)

    async def _optimize(self, effect: e.Optimize) -> None:
        await self.replica.work(0.002)
        self._weights.step(effect.iteration, self._gradient)

    # --- noting ----------------------------------------------------------------------------------

    async def _tell(self, effect: e.Tell) -> None:
        message: FromWorker = effect.message
        if isinstance(message, Regrouped):
            self._regrouped(message)
        shards = self.replica.shards
        for shard in shards[:1] if isinstance(message, Committed | Completed) else shards:
            shard.say(message)

    def _regrouped(self, message: Regrouped) -> None:
        membership = self.books.membership
        assert membership is not None
        self.training.witness.regrouped(self.replica, membership)
        self.replica.reached("regrouped")
        if message.source == "replica":
            self.training.joined(self.replica)

    async def _say(self, effect: e.Say) -> None:
        pass

    async def _phase(self, effect: e.Phase) -> None:
        self.replica.progress.phase(effect.phase)

    async def _at(self, effect: e.At) -> None:
        self.replica.reached(effect.point)

    async def _idle(self, effect: e.Idle) -> None:
        self.replica.progress.idle()

    async def _begun(self, effect: e.Begun) -> None:
        self.replica.progress.begun(effect.iteration)

    async def _ending(self, effect: e.Ending) -> None:
        self.replica.progress.ending(effect.iteration, writes=effect.writes)

    async def _observe(self, effect: e.Observe) -> None:
        params = self._weights.params
        self.training.witness.step_committed(self.replica, effect.iteration, self._lineage, effect.total, params)
        self.replica.progress.committed(effect.iteration)

    async def _flush(self, effect: e.Flush) -> None:
        await self.replica.work(0.005)

    # --- from group to group ---------------------------------------------------------------------

    async def _take_stock(self, effect: e.TakeStock) -> Stock:
        return Stock(tuple(self._buckets.complete()), self._weights.spans() if self._weights.sharded else ())

    async def _set_aside(self, effect: e.SetAside) -> None:
        self._aside, self.end = self.end, None
        if not effect.keep:
            await self._drop(e.Drop())
        self._until_s = self.training.loop.time() + self.training.fault_wait_s if effect.bounded else None

    async def _drop(self, effect: e.Drop) -> None:
        if self._aside is not None:
            self._aside.leave()
            self._aside = None

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
        self._lost = []
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
        position, micro_batches = effect.position, self.books.micro_batches
        told = await self._gathered([len(position.spans), *position.row(micro_batches, BUCKETS)])
        positions = [Position.from_row(row[1:], micro_batches) for row in told]
        if not effect.sharded:
            return positions
        spans = await self._gathered(span_row(position.spans, max(row[0] for row in told)))
        return [replace(one, spans=spans_of(row)) for one, row in zip(positions, spans, strict=True)]

    async def _sit(self, effect: e.Sit) -> int:
        await self._drop(e.Drop())
        self._weights.whole = None
        generation = effect.membership.generation
        self.replica.progress.regrouped(generation, share=effect.share, joins=effect.joins)
        return 1000

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
                shard.say(struct_replace(trouble, lost=tuple(sorted(mates[number] for mates in self._lost))))

    def note_losses(self) -> None:
        """Before it leaves the group, for that ends all connections."""
        if self.end is not None:
            members = self.end.group.membership.members
            places = {member.worker: member.replica for member in members}
            replicas = [places[lead] for number, lead in enumerate(self.end.group.leads) if number in self.end.lost]
            self._lost = [[m.worker for m in members if m.replica == replica] for replica in replicas]

    async def _stand_by(self, effect: e.StandBy) -> None:
        pass

    async def _await_quit(self, effect: e.AwaitQuit) -> None:
        await self.replica.wait(lambda: False)

    async def _await_urgent(self, effect: e.AwaitUrgent) -> None:
        """Nobody leaves a loop here."""

    # --- agreeing --------------------------------------------------------------------------------

    async def _gathered(self, row: Row) -> list[Row]:
        """A collective of the present group, and the wait for it. Raises Broken, Superseded, QuitAsked."""
        self.replica.progress.entering()
        rows = await self._come(row)
        self.replica.progress.leaving()
        return rows

    async def _come(self, row: Row) -> list[Row]:
        end = self.end
        assert end is not None
        result = end.gather(row, self.training.collective_timeout_s)
        await self.replica.wait(lambda: result.over or self._is_superseded())
        if result.error:
            raise Broken(result.error)
        if result.rows is None:
            raise Superseded
        return result.rows

    def _is_superseded(self) -> bool:
        return bool(self.replica.newest(self.generation, urgent_only=True))

    async def _any_shard(self, effect: e.AnyShard) -> bool:
        return effect.value

    async def _rows(self, effect: e.Rows) -> list[Row]:
        return await self._gathered(effect.row)

    async def _pending(self, effect: e.Pending) -> int:
        known = {shard.newest(self.generation) for shard in self.replica.shards}
        return known.pop() if len(known) == 1 else 0

    async def _membership_of(self, effect: e.MembershipOf) -> Membership | None:
        return self.replica.shards[0].memberships.get(effect.generation)

    async def _agree(self, effect: e.Agree) -> list[Row]:
        self.replica.reached("agreeing")
        return await self._gathered(effect.row)

    # --- gradients -------------------------------------------------------------------------------

    async def _clear(self, effect: e.Clear) -> None:
        replica = self.replica
        if any(shard.host.name in self.training.link_breakers for shard in replica.shards):
            self.training.loop.call_later(self.training.drawn.uniform(0.0, 0.05), replica.reset)
        self._buckets.begin()

    async def _keep_sums(self, effect: e.KeepSums) -> None:
        self._buckets.keep(effect.final)

    async def _last_stage(self, effect: e.LastStage) -> tuple[float, int]:
        return effect.loss_sum, effect.tokens

    async def _reduce(self, effect: e.Reduce) -> list[Account]:
        end, buckets, progress = self.end, self._buckets, self.replica.progress
        assert end is not None
        while buckets.start_next(end, self.training.collective_timeout_s):
            pass
        self.replica.reached("reducing")
        progress.entering()
        rows = await self._come(effect.ledger.account(self._sampling).row())
        await self.replica.wait(lambda: buckets.settled or self._is_superseded())
        if buckets.error:
            raise Broken(buckets.error)
        if not buckets.settled:
            raise Superseded
        progress.leaving()
        return [Account.from_row(row) for row in rows]

    async def _settle(self, effect: e.Settle) -> None:
        """Where a micro-batch is missing in a bucket, or twice, the parameters are other ones for ever."""
        self._gradient = effect.total.samples_digest if self._buckets.are_right() else -1

    # --- state -----------------------------------------------------------------------------------

    async def _look_around(self, effect: e.LookAround) -> Row:
        self._peers = effect.membership.peers
        self._lineage = self.training.witness.new_lineage(self.replica.task)
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
        self._weights.restore(state)
        return Loaded(iteration, 1.0, 1, kind)

    async def _give(self, effect: e.Give) -> None:
        """Parameters, lineage, and what is known of the iterations' times."""
        origin, usual = _ORIGINS.index(effect.origin), self.replica.progress.usual()
        await self._transfer([effect.iteration, self._lineage, origin, len(usual), *usual, *self._weights.params])

    async def _receive(self, effect: e.Receive) -> Loaded | None:
        told = (await self._transfer([]))[effect.source]
        if not effect.keep:
            return None
        iteration, self._lineage, origin, words, *rest = told
        self.replica.progress.inherit(list(rest[:words]))
        self._weights.receive(tuple(rest[words:]))
        return Loaded(iteration, 1.0, 1, _ORIGINS[origin])

    async def _transfer(self, row: Row) -> list[Row]:
        await self.replica.work(self.training.drawn.uniform(0.01, 0.1))
        return await self._gathered(row)

    async def _params_digest(self, effect: e.ParamsDigest) -> str:
        return f"{hash(self._weights.params):x}"

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
        self._weights.whole = None

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
        state = self._weights.saved()
        self.training.witness.state_used(self.replica, what, iteration, state)
        return state

    def _copies(self, iteration: int) -> list[tuple[int, Copy]]:
        """Of each shard."""
        state = self._saved("captures", iteration)
        return [
            (number, Copy(iteration, self.generation, state, shard.host.name, layout_of(shard)))
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
        self._weights.gathered(await self._gathered(self._weights.params), effect.moves)

    async def _stage_first(self, effect: e.StageFirst) -> None:
        self._weights.stage_first(effect.parts)
        self.training.witness.parts_staged(self.replica, self.books.rank, effect.parts)

    async def _stage(self, effect: e.Stage) -> int:
        rows = await self._gathered(self._weights.row())
        self._weights.stage(effect.parts, rows, effect.moves, self.books.rank)
        self.training.witness.parts_staged(self.replica, self.books.rank, effect.parts)
        return sum(move.size for move in effect.moves if move.target == self.books.rank)

    async def _adopt(self, effect: e.Adopt) -> None:
        self._weights.adopt()
        books, held = self.books, self._weights.held()
        self.training.witness.parts_adopted(self.replica, books.rank, len(books.peers), books.last, held)

    async def _forget(self, effect: e.Forget) -> None:
        self._weights.forget()

    async def _assemble(self, effect: e.Assemble) -> None:
        rows = await self._gathered(self._weights.row())
        if self.books.rank == 0:
            self._weights.assembled(rows, effect.moves)


_HANDLERS = e.handlers(Driver) | {e.Compute: Driver._compute, e.Optimize: Driver._optimize}
