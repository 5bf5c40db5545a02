"""Drives the lifecycle (agents/trainer/lifecycle) of a simulated replica under virtual time.

Real here: the lifecycle itself, and with it `judge` and `assign`, positions, ledgers, accounts, totals, sampling, the
order of candidates, which part of sharded state travels where. Modelled: gradients (`buckets.py`), parameters and
optimizer state (`weights.py`), time, collectives (`group.py`). All shards of a replica act in lockstep, as they do
after their vote: one coroutine, and one lifecycle.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeAlias

from unicrond.agents.protocol.messages import FromWorker, IterationCommitted
from unicrond.agents.protocol.sampling import Sampling
from unicrond.agents.trainer.lifecycle import MemberState, run
from unicrond.agents.trainer.lifecycle import effects as e
from unicrond.agents.trainer.lifecycle.ledger import IterationLedger, LaneLedger, ReplicaAccount, RunningSum
from unicrond.agents.trainer.lifecycle.micro_batch_assignment import Run
from unicrond.agents.trainer.lifecycle.results import (
    GroupBroken,
    Holdings,
    MembershipSuperseded,
    QuitRequested,
    RendezvousTimedOut,
    ReplicaWord,
)
from unicrond.events.vocabulary import TaskCompleted, WorkerJoinedGroup
from unicrond.replay.simulation.models.weights import EXTENTS
from unicrond.replay.simulation.trainer.buckets import BUCKETS, Buckets, LaneBuckets
from unicrond.replay.simulation.trainer.group import Result, Row
from unicrond.replay.simulation.trainer.ports import ReplicaThread
from unicrond.replay.simulation.trainer.replica_stub import RendezvousStub
from unicrond.replay.simulation.trainer.states import States
from unicrond.replay.simulation.trainer.training import Training

Handlers: TypeAlias = "dict[type[e.Effect[Any]], Callable[..., Awaitable[Any]]]"
#: The exceptions that the lifecycle handles; all others end the process.
_LIFECYCLE_ERRORS = (GroupBroken, MembershipSuperseded, RendezvousTimedOut, QuitRequested)


class SimulatedDriver:
    """Carries out the effects of one replica's lifecycle. `member`: the lifecycle's state. `rendezvous`: its place in a
    group."""

    def __init__(self, replica: ReplicaThread, training: Training) -> None:
        spec, sharded = replica.spec, replica.spec.optimizer.distributed
        self.replica = replica
        self.training = training
        self.member = MemberState(replica.shards[0].launch, BUCKETS, training.loop.time, EXTENTS if sharded else ())
        self.rendezvous = RendezvousStub(replica, training)
        self._states = States(replica, training, self.member, self.rendezvous)
        self._sampling = Sampling(spec.seed, spec.global_batch, spec.micro_batch, None)
        lanes = self.member.lanes
        self._buckets = Buckets(spec.micro_batches) if lanes is None else LaneBuckets(lanes)
        #: By lane, running sums that other members will send.
        self._incoming: dict[int, Result] = {}
        self._gradient = 0
        #: Of the present iteration: virtual seconds that micro-batches took here, and how many they were.
        self._compute_s, self._computed = 0.0, 0
        self._handlers: dict[type[e.Effect[Any]], Callable[[Any], Awaitable[Any]]] = {
            effect: partial(method, owner)
            for owner, methods in (
                (self, OWN_HANDLERS),
                (self.rendezvous, RENDEZVOUS_HANDLERS),
                (self._states, STATES_HANDLERS),
            )
            for effect, method in methods.items()
        }

    async def train(self) -> None:
        """Run the lifecycle to its end. Raises what ends the process."""
        flow = run(self.member)
        try:
            effect = next(flow)
            while True:
                try:
                    result = await self._handlers[type(effect)](effect)
                except _LIFECYCLE_ERRORS as failure:
                    effect = flow.throw(failure)
                else:
                    effect = flow.send(result)
        except StopIteration:
            return

    # --- seams -----------------------------------------------------------------------------------

    async def _compute(self, effect: e.Compute) -> None:
        ledger = effect.ledger
        self._check_quit()
        self._begin_runs(ledger)
        while (run := ledger.run) is not None:
            if not self._goes_ahead(ledger, run):
                await self._enter_run(ledger, run)
            todo = ledger.todo()[:1]
            if todo:
                await self._micro_batch(ledger, run, todo[0])
            if ledger.finish(len(todo)):
                self._end_run(ledger, run)
            self._check_quit()

    def _check_quit(self) -> None:
        self.replica.check_quit()
        if self.rendezvous.superseded:
            raise MembershipSuperseded

    async def _micro_batch(self, ledger: IterationLedger, run: Run, micro_batch: int) -> None:
        """Compute a micro-batch; inside the last backward pass the reduction of the buckets begins, one after the
        other."""
        replica, took_s = self.replica, self.training.micro_batch_s
        began_s = self.training.loop.time()
        replica.progress.working(ledger.finished)
        replica.on_moment("micro_batch")
        await replica.work_slowly()
        end = self.rendezvous.end
        if ledger.is_last([micro_batch]) and end is not None:
            await replica.work(took_s * 0.4)
            self._buckets.add(micro_batch, run.lane)
            while self._buckets.start_next(end, self.training.collective_timeout_s):
                await replica.work(took_s * 0.2)
        else:
            await replica.work(took_s)
            self._buckets.add(micro_batch, run.lane)
        self._compute_s += self.training.loop.time() - began_s
        self._computed += 1
        replica.raise_injected()
        replica.run_program(ledger.iteration, micro_batch)
        ledger.add(1.0, replica.spec.micro_batch)

    # --- runs of a fixed sum: as in agents/trainer/loop/driver.py and gradients/passing.py --------------

    def _begin_runs(self, ledger: IterationLedger) -> None:
        if isinstance(ledger, LaneLedger) and isinstance(self._buckets, LaneBuckets):
            assert ledger.lane_assignment is not None
            self._buckets.ends = ledger.lane_assignment.ends
            self._incoming = {
                run.lane: self._pass(ledger, run.lane, run.source, ledger.rank, ())
                for run in ledger.runs
                if run.source is not None
            }

    def _pass(self, ledger: IterationLedger, lane: int, source: int, target: int, row: Row) -> Result:
        assert self.rendezvous.end is not None
        tag = ledger.iteration, lane, source, target
        return self.rendezvous.end.send_row(tag, row, self.training.collective_timeout_s)

    def _goes_ahead(self, ledger: IterationLedger, run: Run) -> bool:
        if not isinstance(ledger, LaneLedger) or not isinstance(self._buckets, LaneBuckets):
            return False
        if not ledger.may_go_ahead(run) or self._incoming[run.lane].is_settled:
            return False
        ledger.go_ahead()
        self._buckets.go_ahead()
        return True

    async def _enter_run(self, ledger: IterationLedger, run: Run) -> None:
        if isinstance(ledger, LaneLedger) and isinstance(self._buckets, LaneBuckets):
            if run.source is not None and run.lane not in ledger.from_peers:
                self.replica.progress.entering()
                rows = await self.rendezvous.wait_for(self._incoming[run.lane])
                self.replica.progress.leaving()
                length, loss_sum, tokens, *symbols = rows[run.source > ledger.rank]
                self._buckets.continue_lane(run.lane, tuple(symbols))
                ledger.receive(run.lane, RunningSum(length, float(loss_sum), tokens))
            self._buckets.enter_lane(run.lane)

    def _end_run(self, ledger: IterationLedger, run: Run) -> None:
        ledger.end_run()
        if isinstance(ledger, LaneLedger) and isinstance(self._buckets, LaneBuckets):
            if run.target is not None:
                running_sum, symbols = ledger.running[run.lane], self._buckets.sums.running[run.lane]
                row = running_sum.length, int(running_sum.loss_sum), running_sum.tokens, *symbols
                self._pass(ledger, run.lane, ledger.rank, run.target, row)
            else:
                self._buckets.end(run.lane)

    async def _optimize(self, effect: e.Optimize) -> None:
        await self.replica.work(0.002)
        self._states.weights.step(effect.iteration, self._gradient)

    # --- noting ----------------------------------------------------------------------------------

    async def _send(self, effect: e.Send) -> None:
        message: FromWorker = effect.message
        if isinstance(message, WorkerJoinedGroup):
            self._regrouped(message)
        shards = self.replica.shards
        for shard in shards[:1] if isinstance(message, IterationCommitted | TaskCompleted) else shards:
            shard.send(message)

    def _regrouped(self, message: WorkerJoinedGroup) -> None:
        membership = self.member.membership
        assert membership is not None
        self.training.checker.regrouped(self.replica, membership)
        self.replica.on_moment("regrouped")
        if message.source == "replica":
            self.training.on_join(self.replica.shards)

    async def _log(self, effect: e.Log) -> None:
        pass

    async def _set_phase(self, effect: e.SetPhase) -> None:
        self.replica.progress.phase(effect.phase)

    async def _fault_point(self, effect: e.FaultPoint) -> None:
        self.replica.on_moment(effect.point)

    async def _idle(self, effect: e.Idle) -> None:
        self.replica.progress.idle()

    async def _start_clock(self, effect: e.StartClock) -> None:
        self.replica.progress.begin_iteration(effect.iteration)

    async def _begin_final_save(self, effect: e.BeginFinalSave) -> None:
        self.replica.progress.ending(effect.iteration, writes=effect.is_writer)

    async def _observe(self, effect: e.Observe) -> None:
        states, checker = self._states, self.training.checker
        checker.step_committed(self.replica, effect.iteration, states.lineage, effect.total, states.weights.params)
        self.replica.progress.committed(effect.iteration)
        if self.member.is_leader and not self.member.dealing.fill:
            paces_s = self.training.paces_s(self.replica.task, effect.membership)
            counts = effect.total.micro_batches_by_rank
            checker.check_deal(self.replica, counts, paces_s, self.training.loop.time())

    async def _flush(self, effect: e.Flush) -> None:
        await self.replica.work(0.005)

    # --- from group to group ---------------------------------------------------------------------

    async def _report_holdings(self, effect: e.ReportHoldings) -> Holdings:
        return Holdings(tuple(self._buckets.complete()), self._states.weights.spans())

    async def _group_ready(self, effect: e.GroupReady) -> int:
        self.rendezvous.drop()
        self._states.weights.whole = None
        generation = effect.membership.generation
        self.replica.progress.regrouped(generation, share=effect.share, joins=bool(effect.membership.joiners))
        return 1000

    async def _agree_in_replica(self, effect: e.AgreeInReplica) -> ReplicaWord:
        pace_us = int(self._compute_s * 1e6) // self._computed if self._computed else 0
        return ReplicaWord(effect.stop, pace_us, effect.number)

    # --- gradients -------------------------------------------------------------------------------

    async def _clear(self, effect: e.Clear) -> None:
        self._compute_s, self._computed = 0.0, 0
        replica = self.replica
        breakers = self.training.link_breakers
        if shard_numbers := [number for number, shard in enumerate(replica.shards) if shard.host.name in breakers]:
            self.training.loop.call_later(self.training.rng.uniform(0.0, 0.05), replica.reset, shard_numbers)
        self._buckets.begin()

    async def _keep_sums(self, effect: e.KeepSums) -> None:
        self._buckets.keep(effect.final, effect.valid)

    async def _last_stage(self, effect: e.LastStage) -> tuple[float, int]:
        return effect.loss_sum, effect.tokens

    async def _reduce(self, effect: e.Reduce) -> list[ReplicaAccount]:
        end, buckets, progress = self.rendezvous.end, self._buckets, self.replica.progress
        assert end is not None
        while buckets.start_next(end, self.training.collective_timeout_s):
            pass
        self.replica.on_moment("reducing")
        progress.entering()
        rows = await self.rendezvous.collect(effect.ledger.account(self._sampling).row())
        await self.replica.wait(lambda: buckets.settled or self.rendezvous.superseded)
        if buckets.error:
            raise GroupBroken(buckets.error)
        if not buckets.settled:
            raise MembershipSuperseded
        progress.leaving()
        return [ReplicaAccount.from_row(row) for row in rows]

    async def _settle(self, effect: e.Settle) -> None:
        """Settle the sums: where a micro-batch is missing in a bucket, or in it twice, the parameters stay
        different."""
        is_right = self._buckets.are_right()
        self._gradient = effect.total.samples_digest if is_right else -1
        self.training.checker.summed(self.replica, effect.total, is_right=is_right)


#: The method that carries out each effect: of the driver itself, of its seat, of its states.
OWN_HANDLERS: Handlers = {
    e.Compute: SimulatedDriver._compute,
    e.Optimize: SimulatedDriver._optimize,
    e.Send: SimulatedDriver._send,
    e.Log: SimulatedDriver._log,
    e.SetPhase: SimulatedDriver._set_phase,
    e.FaultPoint: SimulatedDriver._fault_point,
    e.Idle: SimulatedDriver._idle,
    e.StartClock: SimulatedDriver._start_clock,
    e.BeginFinalSave: SimulatedDriver._begin_final_save,
    e.Observe: SimulatedDriver._observe,
    e.Flush: SimulatedDriver._flush,
    e.ReportHoldings: SimulatedDriver._report_holdings,
    e.GroupReady: SimulatedDriver._group_ready,
    e.AgreeInReplica: SimulatedDriver._agree_in_replica,
    e.Clear: SimulatedDriver._clear,
    e.KeepSums: SimulatedDriver._keep_sums,
    e.LastStage: SimulatedDriver._last_stage,
    e.Reduce: SimulatedDriver._reduce,
    e.Settle: SimulatedDriver._settle,
}
RENDEZVOUS_HANDLERS: Handlers = {
    e.KeepOldGroup: RendezvousStub._keep_old_group,
    e.DropOldGroup: RendezvousStub._drop_old_group,
    e.AwaitMembership: RendezvousStub._await_membership,
    e.FollowMembership: RendezvousStub._follow_membership,
    e.FormGroup: RendezvousStub._form_group,
    e.ExchangePositions: RendezvousStub._exchange_positions,
    e.LeaveGroup: RendezvousStub._leave_group,
    e.ReportFailure: RendezvousStub._report_failure,
    e.PrepareStandby: RendezvousStub._prepare_standby,
    e.AwaitQuit: RendezvousStub._await_quit,
    e.AwaitUrgent: RendezvousStub._await_urgent,
    e.AnyShard: RendezvousStub._any_shard,
    e.GatherRows: RendezvousStub._gather_rows,
    e.PendingGeneration: RendezvousStub._pending_generation,
    e.GetMembership: RendezvousStub._get_membership,
    e.Agree: RendezvousStub._agree,
}
STATES_HANDLERS: Handlers = {
    e.CheckPeers: States._check_peers,
    e.LoadState: States._load_state,
    e.BroadcastState: States._broadcast_state,
    e.ReceiveState: States._receive_state,
    e.ParamsDigest: States._params_digest,
    e.AskSaveSchedule: States._ask_save_schedule,
    e.Save: States._save,
    e.SaveAndWait: States._save_and_wait,
    e.GatherParameters: States._gather_parameters,
    e.StageFirst: States._stage_first,
    e.Stage: States._stage,
    e.Adopt: States._adopt,
    e.DropParts: States._drop_parts,
    e.Assemble: States._assemble,
}
