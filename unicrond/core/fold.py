"""The one door: `fold(state, entry) -> state` is the only way in which cluster state changes.

Rules
-----
* Total and pure: any valid event may come at any time, late, twice or from a dead process; the fold never
  raises, it ignores what no longer matters, and quarantines what must not be (admission.py).
* Time is the log's receive time, as a running maximum. The observer's clock only dates its own sighting.
* Fencing lives here: decisions and commands of another term than the newest claimed one are inert.
* De-duplication lives here: per producer, (boot, number) only grows.
* A report about a process that is gone, or a group that its reporter has left, changes nothing.
* Facts open incidents; only decisions close them (their rules: `folding/incidents.py`).

What each event does to the state lives in `folding/`, by subject; the table below names it.
What does not live here: severities (`severity.py`), what to do about anything (`decide.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from unicrond.core.folding import (
    accelerators,
    commands,
    deadlines,
    holds,
    injections,
    links,
    nodes,
    outages,
    plans,
    responses,
    silence,
    stacks,
    suspicions,
    tasks,
    training,
    workers,
)
from unicrond.core.folding import stored_states as kept_states
from unicrond.core.nodes import drains as departures
from unicrond.core.nodes import isolation
from unicrond.core.rules import admission
from unicrond.core.rules.invariants import newly_broken
from unicrond.core.state.ordered_map import put
from unicrond.core.state.policy import OBSERVES, brakes_among, quotas_among
from unicrond.core.state.state import ClusterState
from unicrond.core.worth.costs import with_costs
from unicrond.events import vocabulary as v
from unicrond.events.wire.envelope import Entry, Envelope, RecordedEvent
from unicrond.events.wire.schemas import spoken_schema

#: By how much the log's time may leap on the word of the log's server alone.
LEAP_MAX_US = 300_000_000


def fold(state: ClusterState, entry: Entry) -> ClusterState:
    """Return the state after `entry`. Entries come in sequence order; one already folded changes nothing."""
    if entry.seq <= state.seq:
        return state
    seq, now_us = entry.seq, max(state.now_us, entry.recorded_at_us)
    if now_us > state.now_us + LEAP_MAX_US:
        now_us = log_time_us(state.now_us, entry)
    if not isinstance(entry, RecordedEvent):
        return replace(state, seq=seq, now_us=now_us, quarantined_messages=state.quarantined_messages + 1)
    envelope = entry.envelope
    event = envelope.event
    if admission.is_repetition(state, envelope):
        return replace(state, seq=seq, now_us=now_us, duplicates=state.duplicates + 1)
    last_numbers = put(state.last_numbers, envelope.producer, (envelope.boot, envelope.number))
    base = replace(state, seq=seq, now_us=now_us, last_numbers=last_numbers)
    reason = admission.from_the_future(base, envelope)
    if reason:
        return admission.refuse(replace(base, last_numbers=state.last_numbers), envelope, reason)
    if event.is_decided:
        if isinstance(event, v.CoordinatorStarted):
            return _coordinator_started(base, event) if event.term > state.term else _inert(base)
        if envelope.term != state.term:
            return _inert(base)
    else:
        reason = admission.problem(base, event)
    if not reason:
        try:
            after = with_costs(base, event, FOLDS[type(event)](base, event, envelope))
            reason = newly_broken(base, after, event)
        except Exception as error:  # whatever it is, the next entries must still be folded
            reason = admission.raised(error)
    return admission.refuse(base, envelope, reason) if reason else after


def log_time_us(before_us: int, entry: Entry) -> int:
    """Return the log's time after `entry`, in microseconds since the epoch; it never goes back.

    It is the log's receive time. One that leaps is believed as far as the clock of whoever wrote the entry agrees: a
    server whose clock is years ahead would else stop the log's time for years.
    """
    if entry.recorded_at_us <= before_us + LEAP_MAX_US:
        return max(before_us, entry.recorded_at_us)
    witness_us = entry.envelope.observed_at_us if isinstance(entry, RecordedEvent) else before_us
    return max(before_us, min(entry.recorded_at_us, witness_us + LEAP_MAX_US))


def _coordinator_started(state: ClusterState, event: v.CoordinatorStarted) -> ClusterState:
    # A fault that the last coordinator did not inject must not happen now, unexpectedly.
    configured_mode: v.Mode = "observe" if event.policy.get(OBSERVES) else "heal"
    return replace(
        plans.drop_partial_memberships(state),
        term=event.term,
        severity=dict(event.severity),
        injections={},
        schema=spoken_schema(event.version),
        log_adopted_us=max(state.log_adopted_us, event.adopted_us),
        check_limit_us=isolation.limit_us(event.policy, "check_timeout_s"),
        repair_limit_us=isolation.limit_us(event.policy, "repair_timeout_s"),
        quotas=quotas_among(event.policy),
        brakes=brakes_among(event.policy),
        # What the configuration says anew counts more than what a person said before it.
        mode=state.mode if configured_mode == state.configured_mode else configured_mode,
        configured_mode=configured_mode,
        starvation_us=int(event.policy.get("starvation_s", 0.0) * 1e6),
    )


def _inert(state: ClusterState) -> ClusterState:
    return replace(state, inert=state.inert + 1)


def _ignore(state: ClusterState, _event: Any, _envelope: Envelope) -> ClusterState:
    return state


FOLDS: dict[type, Callable[[ClusterState, Any, Envelope], ClusterState]] = {
    v.NodeJoined: nodes.node_joined,
    v.NodeLeaving: nodes.node_leaving,
    v.NodeLeft: nodes.node_left,
    v.MachineReported: nodes.machine_reported,
    v.NodeLost: nodes.node_lost,
    v.NodesLost: outages.nodes_lost,
    v.NodeReturned: nodes.node_returned,
    v.SilenceHeld: silence.silence_held,
    v.SilenceEnded: silence.silence_ended,
    v.ForgetRequested: nodes.forget_requested,
    v.NodeForgotten: nodes.node_forgotten,
    v.NodeIsolated: nodes.node_isolated,
    v.NodeReadmitted: nodes.node_readmitted,
    v.ModeRequested: holds.mode_requested,
    v.DecisionHeld: holds.decision_held,
    v.HoldLifted: holds.hold_lifted,
    v.DrainStarted: lambda state, event, _: departures.drain_begun(state, event),
    v.RepairEnded: lambda state, event, _: isolation.repair_ended(state, event),
    v.NodeCordoned: nodes.node_cordoned,
    v.NodeUncordoned: nodes.node_uncordoned,
    v.MaintenancePlanned: lambda state, event, _: departures.maintenance_planned(state, event),
    v.MaintenanceCancelled: lambda state, event, _: departures.maintenance_cancelled(state, event),
    v.NodeEnrolled: nodes.node_enrolled,
    v.NodeRevoked: nodes.node_revoked,
    v.WorkerStarted: workers.worker_started,
    v.WorkerReady: workers.worker_ready,
    v.WorkerJoinedGroup: workers.worker_regrouped,
    v.WorkerPaused: workers.worker_parked,
    v.WorkerExited: workers.worker_exited,
    v.ErrorReported: workers.error_reported,
    v.StepCommitted: training.step_committed,
    v.CheckpointSaved: training.checkpoint_saved,
    v.SaveFailed: training.save_failed,
    v.TaskCompleted: tasks.task_completed,
    v.HangSuspected: suspicions.hang_suspected,
    v.StacksTaken: stacks.stacks_taken,
    v.WorkerBusy: workers.worker_busy,
    v.WorkerWaiting: workers.worker_waits,
    v.StopRequested: tasks.stop_asked,
    v.DegradationObserved: links.degradation_observed,
    v.StragglerObserved: suspicions.straggler_observed,
    v.StragglerRecovered: suspicions.straggler_recovered,
    v.CorruptionSuspected: suspicions.corruption_suspected,
    v.DivergenceObserved: suspicions.divergence_observed,
    v.AcceleratorReported: accelerators.accelerator_reported,
    v.NodeChecked: lambda state, event, _: isolation.node_checked(state, event),
    v.LinksProbed: links.links_probed,
    v.SnapshotStored: kept_states.state_kept,
    v.PeersRemembered: kept_states.peers_remembered,
    v.StateLoaded: _ignore,  # the fold takes it from the regrouping that follows
    v.CommandApplied: commands.command_applied,
    v.CommandFailed: commands.command_failed,
    v.TaskSubmitted: tasks.task_submitted,
    v.TaskCancelled: tasks.task_cancelled,
    v.TaskUpdated: tasks.task_updated,
    v.ProofRequested: tasks.proof_requested,
    v.ReshapeRequested: tasks.reshape_requested,
    v.Heartbeat: _ignore,  # stands on its own stream and is folded by liveness.py
    v.InjectionRequested: injections.injection_requested,
    v.AlarmAcknowledged: injections.alarm_acknowledged,
    v.AlarmSilenced: injections.alarm_silenced,
    v.AlarmAssigned: injections.alarm_assigned,
    v.AlarmEnded: injections.alarm_ended,
    v.IncidentEscalated: responses.incident_escalated,
    v.EntrySkipped: _ignore,  # read before the fold (events/log/skips.py)
    v.DeadlineExpired: deadlines.deadline_passed,
    v.PlanAdopted: plans.plan_adopted,
    v.MembershipPart: plans.membership_part,
    v.MembershipDecided: plans.membership_decided,
    v.PeersDecided: plans.peers_decided,
    v.WorkersWithdrawn: links.workers_withdrawn,
    v.TaskReshaped: tasks.task_reshaped,
    v.TaskFailed: tasks.task_failed,
    v.TransitionCompleted: responses.transition_completed,
    v.ThroughputCorrected: plans.throughput_corrected,
    v.FailureRateEstimated: plans.failure_rate_estimated,
    v.StartWorker: commands.start_worker,
    v.StartWorkers: commands.start_workers,
    v.StopWorker: commands.stop_worker,
    v.DropState: kept_states.drop_state,
    v.InjectFault: injections.inject_fault,
    v.ProbeLinks: links.probes_ordered,
    v.LeaveCluster: nodes.leave_commanded,
    v.CheckNode: lambda state, event, _: isolation.check_begun(commands.count_command(state, event.node), event),
}
