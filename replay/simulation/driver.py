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
from agents.trainer.gradients.lanes import Run
from agents.trainer.ledger import Account, LaneLedger, Ledger, Running
from agents.trainer.lifecycle import Books, run
from agents.trainer.lifecycle import effects as e
from agents.trainer.lifecycle.failures import Broken, QuitAsked, Stranded, Superseded
from agents.trainer.lifecycle.results import Stock
from replay.simulation.buckets import BUCKETS, Buckets, LaneBuckets
from replay.simulation.group import Result, Row
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
        lanes = self.books.lanes
        self._buckets = Buckets(spec.micro_batches) if lanes is None else LaneBuckets(lanes)
        #: By lane, running sums that others will give.
        self._coming: dict[int, Result] = {}
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
        self._begin_runs(ledger)
        while (run := ledger.run) is not None:
            if not self._goes_ahead(ledger, run):
                await self._enter_run(ledger, run)
            todo = ledger.todo()[:1]
            if todo:
                await self._micro_batch(ledger, run, todo[0])
            if ledger.finish(len(todo)):
                self._end_run(ledger, run)
            self._look()

    def _look(self) -> None:
        self.replica.look()
        if self.seat.superseded:
            raise Superseded

    async def _micro_batch(self, ledger: Ledger, run: Run, micro_batch: int) -> None:
        """Inside the last backward the reduction of the buckets begins, one after the other."""
        replica, took_s = self.replica, self.training.micro_batch_s
        replica.progress.working(ledger.finished)
        replica.reached("micro_batch")
        await replica.work_slowly()
        end = self.seat.end
        if ledger.is_last([micro_batch]) and end is not None:
            await replica.work(took_s * 0.4)
            self._buckets.add(micro_batch, run.lane)
            while self._buckets.start_next(end, self.training.collective_timeout_s):
                await replica.work(took_s * 0.2)
        else:
            await replica.work(took_s)
            self._buckets.add(micro_batch, run.lane)
        replica.fail_if_asked()
        ledger.add(1.0, replica.spec.micro_batch)

    # --- runs of a fixed sum: as in agents/trainer/driver.py and gradients/passing.py --------------

    def _begin_runs(self, ledger: Ledger) -> None:
        if isinstance(ledger, LaneLedger) and isinstance(self._buckets, LaneBuckets):
            assert ledger.the_deal is not None
            self._buckets.ends = ledger.the_deal.ends
            self._coming = {
                run.lane: self._pass(ledger, run.lane, run.source, ledger.rank, ())
                for run in ledger.runs
                if run.source is not None
            }

    def _pass(self, ledger: Ledger, lane: int, source: int, target: int, row: Row) -> Result:
        assert self.seat.end is not None
        tag = ledger.iteration, lane, source, target
        return self.seat.end.passing(tag, row, self.training.collective_timeout_s)

    def _goes_ahead(self, ledger: Ledger, run: Run) -> bool:
        if not isinstance(ledger, LaneLedger) or not isinstance(self._buckets, LaneBuckets):
            return False
        if not ledger.may_go_ahead(run) or self._coming[run.lane].over:
            return False
        ledger.go_ahead()
        self._buckets.go_ahead()
        return True

    async def _enter_run(self, ledger: Ledger, run: Run) -> None:
        if isinstance(ledger, LaneLedger) and isinstance(self._buckets, LaneBuckets):
            if run.source is not None and run.lane not in ledger.taken:
                self.replica.progress.entering()
                rows = await self.seat.over(self._coming[run.lane])
                self.replica.progress.leaving()
                length, loss_sum, tokens, *symbols = rows[run.source > ledger.rank]
                self._buckets.go_on(run.lane, tuple(symbols))
                ledger.take(run.lane, Running(length, float(loss_sum), tokens))
            self._buckets.turn(run.lane)

    def _end_run(self, ledger: Ledger, run: Run) -> None:
        ledger.end_run()
        if isinstance(ledger, LaneLedger) and isinstance(self._buckets, LaneBuckets):
            if run.target is not None:
                own, symbols = ledger.running[run.lane], self._buckets.sums.running[run.lane]
                row = own.length, int(own.loss_sum), own.tokens, *symbols
                self._pass(ledger, run.lane, ledger.rank, run.target, row)
            else:
                self._buckets.end(run.lane)

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
        self._buckets.keep(effect.final, effect.kept)

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
        is_right = self._buckets.are_right()
        self._gradient = effect.total.samples_digest if is_right else -1
        self.training.witness.summed(self.replica, effect.total, is_right=is_right)
