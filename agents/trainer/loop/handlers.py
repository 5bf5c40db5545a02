"""Carries out the lifecycle's effects (`lifecycle/effects.py`) in a training process; all of it may block.

Rules
-----
* `HANDLERS` names one method for each effect; what that returns or raises is what the lifecycle gets.
* Whatever touches this shard's group goes through `Rendezvous.together`: a failure of one shard is one of all.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from unicrond.agents.protocol.injection import Point
from unicrond.agents.protocol.messages import GroupMembership, IterationCommitted
from unicrond.agents.protocol.sampling import Sampling
from unicrond.agents.trainer.detection.checksum import checksum_of_pieces
from unicrond.agents.trainer.detection.observing import Detection
from unicrond.agents.trainer.gradients.accumulation import Accumulation
from unicrond.agents.trainer.gradients.reduction import Reduction
from unicrond.agents.trainer.gradients.runs import LaneRuns
from unicrond.agents.trainer.groups.group import PendingRows, ShardGroup
from unicrond.agents.trainer.groups.shard_group import Rendezvous
from unicrond.agents.trainer.lifecycle import MemberState
from unicrond.agents.trainer.lifecycle import effects as e
from unicrond.agents.trainer.lifecycle.ledger import ReplicaAccount
from unicrond.agents.trainer.lifecycle.results import Holdings, LoadedState, QuitRequested, ReplicaWord, SaveSchedule
from unicrond.agents.trainer.lifecycle.verdict import Position
from unicrond.agents.trainer.loop.comparison import ReplicaComparison
from unicrond.agents.trainer.process.context import Context, show_as
from unicrond.agents.trainer.sharded.optimizer import Rows as OptimizerRows
from unicrond.agents.trainer.sharded.sharing import Sharing
from unicrond.agents.trainer.states import transfer
from unicrond.agents.trainer.states.resharding import reshard
from unicrond.agents.trainer.states.saving import AssembledState, Saving
from unicrond.agents.trainer.states.sources import Sources, Tree
from unicrond.agents.trainer.states.state import BadState, StateRefused, TrainingState
from unicrond.events.vocabulary import StateSource


@dataclass(slots=True)
class EffectHandlers:
    """What one worker's effects act on, and a method for each. `sharing`: None where the optimizer's state is not
    sharded; `runs`: None where the sum of a step follows the assignment. `on_finish`: the program's own function,
    called after the last iteration. `finalize_gradients`: adds up what the shards of a replica share
    (`finishing.py`)."""

    member: MemberState
    context: Context
    state: TrainingState
    saving: Saving
    sampling: Sampling
    accumulation: Accumulation
    reduction: Reduction
    rendezvous: Rendezvous
    detection: Detection
    comparison: ReplicaComparison
    sharing: Sharing | None
    runs: LaneRuns | None = None
    _sources: Sources | None = None
    on_finish: Callable[[], None] | None = None
    finalize_gradients: Callable[[], None] | None = None

    @property
    def group(self) -> ShardGroup:
        """Return the present group."""
        group = self.rendezvous.group
        assert group is not None
        return group

    def fire(self, point: Point) -> None:
        """Pass a point of the loop's own, for which a fault may have been ordered."""
        ledger = self.member.ledger
        self.context.injection.fire(point, ledger.iteration, self.rendezvous.generation, ledger.finished)

    def check_bits(self, numbers: Sequence[int]) -> None:
        """Compare what one micro-batch has come to, each time, with the other replicas' (`gradients_number`). Raises
        what `ReplicaComparison.compare_gradients` and `ShardGroup.finish` raise."""
        assert self.member.pending_work is not None
        self.member.pending_work.bits_tested = True
        self.comparison.compare_gradients(self._collect_rows(numbers))

    def audit(self, numbers: Sequence[int]) -> bool:
        """Compare an audited micro-batch's numbers; return and raise what `ReplicaComparison.compare_audit` does."""
        return self.comparison.compare_audit(self._collect_rows([*numbers, self.detection.audits.passed]))

    def _collect_rows(
        self, row: Sequence[int], point: Point | None = None, callback: Callable[[], None] | None = None
    ) -> list[list[int]]:
        """Return every member's row. Meanwhile pass the fault point `point` and call `callback`."""
        group = self.group

        def gather() -> list[list[int]]:
            rows = group.all_gather(row)
            if point is not None:
                self.fire(point)
            if callback is not None:
                callback()
            group.finish()
            return rows.read()

        return self.rendezvous.together(gather)

    # --- noting ----------------------------------------------------------------------------------

    def _send(self, effect: e.Send) -> None:
        message = effect.message
        if isinstance(message, IterationCommitted):
            message = self.detection.complete(message, is_writing=self.saving.has_written())
        self.context.channel.send(message)

    def _log(self, effect: e.Log) -> None:
        print(f"{self.context.launch.worker}: {effect.text}", flush=True)

    def _set_phase(self, effect: e.SetPhase) -> None:
        self.context.phase = effect.phase

    def _fault_point(self, effect: e.FaultPoint) -> None:
        self.context.injection.fire(effect.point, effect.iteration, self.rendezvous.generation, effect.finished)

    def _idle(self, effect: e.Idle) -> None:
        self.context.mark.idle()

    def _start_clock(self, effect: e.StartClock) -> None:
        self.detection.start_iteration(effect.iteration)
        self.group.on_wait = None  # the members have met; slow collectives from now on are training

    def _begin_final_save(self, effect: e.BeginFinalSave) -> None:
        longest_s = self.saving.longest_write_s if effect.is_writer else None
        self.detection.start_final_save(effect.iteration, self.group, longest_s)

    def _observe(self, effect: e.Observe) -> None:
        membership, group = effect.membership, self.group
        self.detection.commit(effect.iteration, effect.duration_us, group)
        self.saving.duration_words = self.detection.words()
        member, rank = self.member, group.rank
        self.detection.judge(effect.iteration, effect.total, membership, member.launch.shard, rank, member.dealing.deal)

    def _flush(self, effect: e.Flush) -> None:
        self.context.channel.flush(effect.timeout_s)

    # --- from group to group ---------------------------------------------------------------------

    def _report_holdings(self, effect: e.ReportHoldings) -> Holdings:
        spans = () if self.sharing is None else tuple(self.sharing.optimizer.spans())
        return Holdings(tuple(self.reduction.complete()), spans)

    def _keep_old_group(self, effect: e.KeepOldGroup) -> None:
        self.rendezvous.keep_old_group(is_sound=effect.is_sound, bounded=effect.bounded)

    def _await_membership(self, effect: e.AwaitMembership) -> GroupMembership:
        return self.rendezvous.await_membership()

    def _follow_membership(self, effect: e.FollowMembership) -> None:
        self.rendezvous.follow(effect.membership)

    def _form_group(self, effect: e.FormGroup) -> None:
        self.rendezvous.form(effect.membership)

    def _exchange_positions(self, effect: e.ExchangePositions) -> list[Position]:
        member, rendezvous = self.member, self.rendezvous
        positions = rendezvous.exchange(effect.position, member.micro_batches, member.buckets, sharded=effect.sharded)
        self.comparison.compare_environments(max(position.iteration for position in positions))
        return positions

    def _drop_old_group(self, effect: e.DropOldGroup) -> None:
        self.rendezvous.drop_old_group()

    def _group_ready(self, effect: e.GroupReady) -> int:
        generation, channel = effect.membership.generation, self.context.channel
        duration_us = int((time.monotonic() - channel.received_at(generation)) * 1e6)
        self.rendezvous.drop_old_group()
        self.saving.assembled = None
        self.detection.start_generation(self.group, share=effect.share, joins=bool(effect.membership.joiners))
        channel.drop_below(generation)
        launch, names = self.context.launch, [member.worker for member in effect.membership.members]
        show_as(f"unicrond: {launch.task} rank {names.index(launch.worker)}")
        return duration_us

    def _leave_group(self, effect: e.LeaveGroup) -> None:
        self.rendezvous.leave()

    def _report_failure(self, effect: e.ReportFailure) -> None:
        self.rendezvous.report(effect.failure, effect.iteration, effect.phase)

    def _prepare_standby(self, effect: e.PrepareStandby) -> None:
        self.rendezvous.prepare_standby(effect.membership)

    def _await_quit(self, effect: e.AwaitQuit) -> None:
        self.context.channel.wait(lambda: False)

    def _await_urgent(self, effect: e.AwaitUrgent) -> None:
        channel, generation = self.context.channel, self.rendezvous.generation
        with contextlib.suppress(QuitRequested):
            channel.wait(lambda: channel.newest(generation, urgent_only=True) is not None, effect.timeout_s)

    # --- agreeing --------------------------------------------------------------------------------

    def _any_shard(self, effect: e.AnyShard) -> bool:
        return not self.context.replica.all_true(not effect.holds)

    def _agree_in_replica(self, effect: e.AgreeInReplica) -> ReplicaWord:
        pace_us = self.accumulation.has_had_room() and self.detection.compute_time.pace_us(self.member.dealing.fill)
        return self.context.replica.agree(ReplicaWord(effect.stop, pace_us, effect.number))

    def _gather_rows(self, effect: e.GatherRows) -> list[list[int]]:
        return self._collect_rows(effect.row)

    def _pending_generation(self, effect: e.PendingGeneration) -> int:
        return self.rendezvous.pending()

    def _get_membership(self, effect: e.GetMembership) -> GroupMembership | None:
        return self.context.channel.membership(effect.generation)

    def _agree(self, effect: e.Agree) -> list[list[int]]:
        """Gather the members' rows, each with its shard's sighting of the iteration appended."""
        ledger, width, audits = self.member.ledger, len(effect.row), self.detection.audits
        generation, (*row, word) = self.rendezvous.generation, effect.row
        word |= audits.word(ledger.iteration, generation, self.member.micro_batches, self.group.size)
        sighting = self.detection.observe(ledger.iteration, ledger.finished, self.reduction.norm())
        tells = self.member.is_leader and self.detection.checksums_due(ledger.iteration)
        rows = self._collect_rows([*row, word, *sighting.row()], "agreeing", self._check_sums if tells else None)
        audits.agree([row[width - 1] for row in rows], ledger.iteration, generation)
        self.detection.record_agreement([row[width:] for row in rows])
        self.comparison.compare_parameters(ledger.iteration)
        return [row[:width] for row in rows]

    def _check_sums(self) -> None:
        """Record the checksum of the sums, at the leader, while the agreement is under way."""
        complete = self.reduction.complete()
        pieces = [[piece for _, piece in complete[bucket]] for bucket in range(self.member.buckets)]
        self.detection.record_sums(checksum_of_pieces(pieces))

    # --- gradients -------------------------------------------------------------------------------

    def _clear(self, effect: e.Clear) -> None:
        self.accumulation.clear()
        self.reduction.begin()
        if self.sharing is not None:
            self.sharing.optimizer.assembled = None
        self.context.iteration = effect.iteration

    def _keep_sums(self, effect: e.KeepSums) -> None:
        if self.runs is not None:
            self.runs.log_discarded()
        self.reduction.keep(effect.final)
        self.accumulation.keep(effect.valid)

    def _last_stage(self, effect: e.LastStage) -> tuple[float, int]:
        loss_sum, tokens = self.context.replica.from_last_stage(effect.loss_sum, effect.tokens)
        return loss_sum, int(tokens)

    def _reduce(self, effect: e.Reduce) -> list[ReplicaAccount]:
        group = self.group

        def complete() -> list[list[int]]:
            account = effect.ledger.account(self.sampling.of_replica, self.accumulation.surplus)
            rows: list[PendingRows] = []
            self.reduction.start(group, lambda: rows.append(group.all_gather(account.row())))
            self.fire("reducing")
            group.finish()
            return rows[0].read()

        return [ReplicaAccount.from_row(row) for row in self.rendezvous.together(complete)]

    def _settle(self, effect: e.Settle) -> None:
        self.accumulation.settle(self.reduction.sums(), effect.total.tokens)
        if self.finalize_gradients is not None:
            self.finalize_gradients()

    # --- state -----------------------------------------------------------------------------------

    def _check_peers(self, effect: e.CheckPeers) -> list[int]:
        saving = self.saving
        self._sources = Sources(self.context, saving.memory, effect.membership, self._resharded, saving.origin)
        return self._sources.row(
            is_first=effect.is_first, must_see_storage=effect.must_see_storage, last_write=saving.last_write
        )

    def _load_state(self, effect: e.LoadState) -> LoadedState | str:
        """Load the candidate's state here; return it, or why some shard could not. Raises StateRefused: nobody has
        ordered to throw the training away and to begin from the seed."""
        sources, candidate = self._sources, effect.candidate
        assert sources is not None
        tree: Tree | None = None
        size_bytes, reason = 0, "another shard of the replica could not load it"
        try:
            candidate_tree, size_bytes = sources.load(candidate)
            self.state.require_fitting(candidate_tree)
            tree = candidate_tree
        except StateRefused:
            raise
        except BadState as error:
            reason = str(error)
        if self.context.replica.all_true(tree is not None) and tree is not None:
            return self._adopt_state(tree, size_bytes, candidate.kind, sources.resharded_from)
        return reason

    def _resharded(self, shards: Iterable[Tree]) -> Tree:
        """Return this shard's state, made from all shards of another layout."""
        return reshard(self.state.capture(0, 0.0), shards)

    def _adopt_state(self, tree: Tree, size_bytes: int, origin: StateSource, resharded_from: str = "") -> LoadedState:
        iteration, loss = self.state.restore(tree)
        self.detection.inherit(tree)
        return LoadedState(iteration, loss, size_bytes, origin, float(tree.get("pace_s", 0.0)), resharded_from)

    def _broadcast_state(self, effect: e.BroadcastState) -> None:
        state = {**self.state.capture(effect.iteration, effect.loss), **self.detection.words()}
        group, tree = self.group, {"origin": effect.origin, "state": state}
        self.rendezvous.together(lambda: transfer.send_state(group, tree))

    def _receive_state(self, effect: e.ReceiveState) -> LoadedState | None:
        group, source, keep = self.group, effect.source, effect.keep
        message, size_bytes = self.rendezvous.together(lambda: transfer.receive_state(group, source, keep))
        if not keep:
            return None
        pending_work = self.member.pending_work
        if pending_work is not None and not pending_work.verdict.fresh:
            self.detection.receive_state()
        return self._adopt_state(message["state"], size_bytes, message["origin"])

    def _params_digest(self, effect: e.ParamsDigest) -> str:
        return self.state.params_digest()

    # --- saving ----------------------------------------------------------------------------------

    def _ask_save_schedule(self, effect: e.AskSaveSchedule) -> SaveSchedule:
        with self.detection.saving():
            return self.saving.schedule(effect.iteration, effect.membership, leads=effect.in_leader_replica)

    def _save(self, effect: e.Save) -> None:
        duration_s = effect.duration_us / 1e6
        with self.detection.saving():
            self.saving.boundary(
                effect.iteration, duration_s, effect.loss, effect.membership,
                leads=effect.in_leader_replica, schedule=effect.schedule,
            )  # fmt: skip
        self.saving.assembled = None
        if self.sharing is not None and not self.member.program_saves(effect.iteration):
            self.sharing.optimizer.assembled = None

    def _save_and_wait(self, effect: e.SaveAndWait) -> None:
        if self.sharing is not None and self.saving.assembled is None:
            self._set_assembled(self.sharing, self.sharing.copy_rows(), 0.0)
        last = effect.iteration, self.context.generation, effect.loss
        if not (effect.handover and self.saving.capture_and_wait(*last)):
            self.saving.save_and_wait(*last)
        if self.on_finish is not None:
            self.on_finish()

    # --- sharded optimizer state -----------------------------------------------------------------

    @property
    def _shared(self) -> Sharing:
        assert self.sharing is not None
        return self.sharing

    def _gather_parameters(self, effect: e.GatherParameters) -> None:
        sharing = self._shared

        def gather() -> None:
            group = self.group
            arriving = sharing.gather(group, effect.moves)
            self.fire("gathering")
            group.finish()
            sharing.land(arriving)

        self.rendezvous.together(gather)

    def _stage_first(self, effect: e.StageFirst) -> None:
        self._shared.stage_first(effect.parts)

    def _stage(self, effect: e.Stage) -> int:
        group, sharing = self.group, self._shared
        return self.rendezvous.together(lambda: sharing.stage(group, effect.parts, effect.moves))

    def _adopt(self, effect: e.Adopt) -> None:
        self._shared.optimizer.adopt()

    def _drop_parts(self, effect: e.DropParts) -> None:
        if self.sharing is not None:
            self.sharing.optimizer.drop_parts()

    def _assemble(self, effect: e.Assemble) -> None:
        group, sharing, started_s = self.group, self._shared, time.monotonic()
        with self.detection.saving() if effect.at_boundary else contextlib.nullcontext():
            rows = self.rendezvous.together(lambda: sharing.assemble(group, effect.moves))
            if rows is not None:
                self._set_assembled(sharing, rows, time.monotonic() - started_s)

    def _set_assembled(self, sharing: Sharing, rows: OptimizerRows, cost_s: float) -> None:
        sharing.optimizer.assembled = rows
        self.saving.assembled = AssembledState(sharing.optimizer.whole_tree(rows), cost_s)


#: The method that carries out each effect; a seam is the training loop's turn and has none.
HANDLERS: dict[type[e.Effect[Any]], Callable[[EffectHandlers, Any], object]] = {
    e.Send: EffectHandlers._send,
    e.Log: EffectHandlers._log,
    e.SetPhase: EffectHandlers._set_phase,
    e.FaultPoint: EffectHandlers._fault_point,
    e.Idle: EffectHandlers._idle,
    e.StartClock: EffectHandlers._start_clock,
    e.BeginFinalSave: EffectHandlers._begin_final_save,
    e.Observe: EffectHandlers._observe,
    e.Flush: EffectHandlers._flush,
    e.ReportHoldings: EffectHandlers._report_holdings,
    e.KeepOldGroup: EffectHandlers._keep_old_group,
    e.AwaitMembership: EffectHandlers._await_membership,
    e.FollowMembership: EffectHandlers._follow_membership,
    e.FormGroup: EffectHandlers._form_group,
    e.ExchangePositions: EffectHandlers._exchange_positions,
    e.DropOldGroup: EffectHandlers._drop_old_group,
    e.GroupReady: EffectHandlers._group_ready,
    e.LeaveGroup: EffectHandlers._leave_group,
    e.ReportFailure: EffectHandlers._report_failure,
    e.PrepareStandby: EffectHandlers._prepare_standby,
    e.AwaitQuit: EffectHandlers._await_quit,
    e.AwaitUrgent: EffectHandlers._await_urgent,
    e.AnyShard: EffectHandlers._any_shard,
    e.AgreeInReplica: EffectHandlers._agree_in_replica,
    e.GatherRows: EffectHandlers._gather_rows,
    e.PendingGeneration: EffectHandlers._pending_generation,
    e.GetMembership: EffectHandlers._get_membership,
    e.Agree: EffectHandlers._agree,
    e.Clear: EffectHandlers._clear,
    e.KeepSums: EffectHandlers._keep_sums,
    e.LastStage: EffectHandlers._last_stage,
    e.Reduce: EffectHandlers._reduce,
    e.Settle: EffectHandlers._settle,
    e.CheckPeers: EffectHandlers._check_peers,
    e.LoadState: EffectHandlers._load_state,
    e.BroadcastState: EffectHandlers._broadcast_state,
    e.ReceiveState: EffectHandlers._receive_state,
    e.ParamsDigest: EffectHandlers._params_digest,
    e.AskSaveSchedule: EffectHandlers._ask_save_schedule,
    e.Save: EffectHandlers._save,
    e.SaveAndWait: EffectHandlers._save_and_wait,
    e.GatherParameters: EffectHandlers._gather_parameters,
    e.StageFirst: EffectHandlers._stage_first,
    e.Stage: EffectHandlers._stage,
    e.Adopt: EffectHandlers._adopt,
    e.DropParts: EffectHandlers._drop_parts,
    e.Assemble: EffectHandlers._assemble,
}
