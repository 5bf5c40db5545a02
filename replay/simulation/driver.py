"""Drives the lifecycle (agents/trainer/lifecycle) of a simulated replica under virtual time.

Real here: the lifecycle itself, and with it `judge` and `deal`, positions, ledgers, accounts, totals, sampling, the
order of candidates, which part of sharded state travels where. Modelled: gradients (`buckets.py`), parameters and
optimizer state (`weights.py`), time, collectives (`group.py`). All shards of a replica take the same turns, as their
vote makes them: one coroutine, and one lifecycle.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agents.protocol.messages import Committed, Completed, FromWorker, Regrouped
from agents.protocol.sampling import Sampling
from agents.trainer.ledger import Account, Ledger
from agents.trainer.lifecycle import Books, run
from agents.trainer.lifecycle import effects as e
from agents.trainer.lifecycle.failures import Broken, QuitAsked, Stranded, Superseded
from agents.trainer.lifecycle.results import Stock
from replay.simulation.buckets import BUCKETS, Buckets
from replay.simulation.seat import Seat
from replay.simulation.states import States
from replay.simulation.weights import EXTENTS

if TYPE_CHECKING:
    from replay.simulation.replica import Replica

#: What the lifecycle answers; all else ends the process.
_THROWN = (Broken, Superseded, Stranded, QuitAsked)


class Driver:
    """One replica's. `books`: what the lifecycle knows. `seat`: its place in a group."""

    def __init__(self, replica: Replica) -> None:
        spec, sharded = replica.spec, replica.spec.optimizer.distributed
        self.replica = replica
        self.training = replica.training
        self.books = Books(replica.shards[0].launch, BUCKETS, replica.training.loop.time, EXTENTS if sharded else ())
        self.seat = Seat(replica)
        self._states = States(replica, self.books, self.seat)
        self._sampling = Sampling(spec.seed, spec.global_batch, spec.micro_batch, None)
        self._buckets = Buckets(spec.micro_batches)
        self._gradient = 0
        self._handlers = e.handlers(self, self.seat, self._states) | {
            e.Compute: self._compute,
            e.Optimize: self._optimize,
        }

    async def train(self) -> None:
        """To the end of the lifecycle. Raises what ends the process."""
        flow = run(self.books)
        try:
            effect = next(flow)
            while True:
                try:
                    result = await self._handlers[type(effect)](effect)
                except _THROWN as failure:
                    effect = flow.throw(failure)
                else:
                    effect = flow.send(result)
        except StopIteration:
            return

    # --- seams -----------------------------------------------------------------------------------

    async def _compute(self, effect: e.Compute) -> None:
        ledger = effect.ledger
        self._look()
        while todo := ledger.todo():
            await self._micro_batch(ledger, todo[0], is_last=len(todo) == 1)
            self._look()

    def _look(self) -> None:
        self.replica.look()
        if self.seat.superseded:
            raise Superseded

    async def _micro_batch(self, ledger: Ledger, micro_batch: int, *, is_last: bool) -> None:
        """Inside the last backward the reduction of the buckets begins, one after the other."""
        replica, took_s = self.replica, self.training.micro_batch_s
        replica.progress.working(ledger.finished)
        replica.reached("micro_batch")
        await replica.work_slowly()
        end = self.seat.end
        if is_last and end is not None:
            await replica.work(took_s * 0.4)
            self._buckets.add(micro_batch)
            while self._buckets.start_next(end, self.training.collective_timeout_s):
                await replica.work(took_s * 0.2)
        else:
            await replica.work(took_s)
            self._buckets.add(micro_batch)
        replica.fail_if_asked()
        ledger.finished += 1
        ledger.add(1.0, replica.spec.micro_batch)

    async def _optimize(self, effect: e.Optimize) -> None:
        await self.replica.work(0.002)
        self._states.weights.step(effect.iteration, self._gradient)

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
        states, witness = self._states, self.training.witness
        witness.step_committed(self.replica, effect.iteration, states.lineage, effect.total, states.weights.params)
        self.replica.progress.committed(effect.iteration)

    async def _flush(self, effect: e.Flush) -> None:
        await self.replica.work(0.005)

    # --- from group to group ---------------------------------------------------------------------

    async def _take_stock(self, effect: e.TakeStock) -> Stock:
        return Stock(tuple(self._buckets.complete()), self._states.weights.spans())

    async def _sit(self, effect: e.Sit) -> int:
        self.seat.drop()
        self._states.weights.whole = None
        generation = effect.membership.generation
        self.replica.progress.regrouped(generation, share=effect.share, joins=effect.joins)
        return 1000

    # --- gradients -------------------------------------------------------------------------------

    async def _clear(self, effect: e.Clear) -> None:
        replica = self.replica
        breakers = self.training.link_breakers
        if broken := [number for number, shard in enumerate(replica.shards) if shard.host.name in breakers]:
            self.training.loop.call_later(self.training.drawn.uniform(0.0, 0.05), replica.reset, broken)
        self._buckets.begin()

    async def _keep_sums(self, effect: e.KeepSums) -> None:
        self._buckets.keep(effect.final)

    async def _last_stage(self, effect: e.LastStage) -> tuple[float, int]:
        return effect.loss_sum, effect.tokens

    async def _reduce(self, effect: e.Reduce) -> list[Account]:
        end, buckets, progress = self.seat.end, self._buckets, self.replica.progress
        assert end is not None
        while buckets.start_next(end, self.training.collective_timeout_s):
            pass
        self.replica.reached("reducing")
        progress.entering()
        rows = await self.seat.come(effect.ledger.account(self._sampling).row())
        await self.replica.wait(lambda: buckets.settled or self.seat.superseded)
        if buckets.error:
            raise Broken(buckets.error)
        if not buckets.settled:
            raise Superseded
        progress.leaving()
        return [Account.from_row(row) for row in rows]

    async def _settle(self, effect: e.Settle) -> None:
        """Where a micro-batch is missing in a bucket, or twice, the parameters stay different."""
        self._gradient = effect.total.samples_digest if self._buckets.are_right() else -1
