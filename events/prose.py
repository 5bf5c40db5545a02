"""Every event as one plain sentence, for people: headers, logs, stories."""

from __future__ import annotations

from typing import TypeAlias, assert_never

from events.phrases import count as _count
from events.phrases import fault as _fault
from events.phrases import nodes as _nodes
from events.phrases import seconds as _seconds
from events.phrases import settings as _settings
from events.point import to_the_second
from events.prose_words import CAUSES, NEEDS, SOURCES
from events.seats import workers_in
from events.vocabulary import (
    AcceleratorReported,
    AnyCommand,
    AnyEvent,
    AnyObservation,
    AnyRequest,
    CheckNode,
    CheckpointSaved,
    Command,
    CommandApplied,
    CommandFailed,
    CoordinatorStarted,
    CorruptionSuspected,
    DeadlinePassed,
    Decision,
    DegradationObserved,
    DrainBegun,
    DropState,
    EntrySkipped,
    ErrorReported,
    FailureRateEstimated,
    ForgetRequested,
    HangSuspected,
    Heartbeat,
    IncidentEscalated,
    InjectFault,
    InjectionRequested,
    LeaveCluster,
    MachineReported,
    MaintenanceCancelled,
    MaintenancePlanned,
    MembershipDecided,
    MembershipPart,
    NodeChecked,
    NodeCordoned,
    NodeEnrolled,
    NodeForgotten,
    NodeIsolated,
    NodeJoined,
    NodeLeaving,
    NodeLeft,
    NodeLost,
    NodeReadmitted,
    NodeReturned,
    NodeRevoked,
    NodeUncordoned,
    Observation,
    PeersDecided,
    PeersRemembered,
    PlanAdopted,
    RepairEnded,
    ReshapeRequested,
    SaveFailed,
    StartWorker,
    StartWorkers,
    StateKept,
    StateTaken,
    StepCommitted,
    StopAsked,
    StopWorker,
    StragglerObserved,
    StragglerRecovered,
    TaskCancelled,
    TaskCompleted,
    TaskFailed,
    TaskReshaped,
    TaskSubmitted,
    ThroughputCorrected,
    TransitionCompleted,
    WorkerBusy,
    WorkerExited,
    WorkerParked,
    WorkerReady,
    WorkerRegrouped,
    WorkerStarted,
    WorkerWaits,
)

#: The kinds by subject: each function below has the sentences of one.
_OfWorker: TypeAlias = (
    WorkerStarted | WorkerReady | WorkerRegrouped | WorkerParked | WorkerExited | WorkerBusy | WorkerWaits
    | StateTaken
)  # fmt: skip
_OfTraining: TypeAlias = (
    StepCommitted | CheckpointSaved | SaveFailed | TaskCompleted | ErrorReported | HangSuspected | StopAsked
    | DegradationObserved | StragglerObserved | StragglerRecovered | CorruptionSuspected
)  # fmt: skip
_OfNode: TypeAlias = (
    NodeJoined | NodeLeaving | NodeLeft | MachineReported | Heartbeat | AcceleratorReported | NodeChecked | StateKept
    | PeersRemembered
    | CommandApplied | CommandFailed
)  # fmt: skip
_Remedy: TypeAlias = (
    NodeLost | NodeReturned | NodeForgotten | NodeIsolated | DrainBegun | NodeReadmitted | RepairEnded
    | IncidentEscalated | TransitionCompleted
)  # fmt: skip
_Course: TypeAlias = (
    CoordinatorStarted | EntrySkipped | DeadlinePassed | PlanAdopted | MembershipPart | MembershipDecided | PeersDecided
    | TaskReshaped | TaskFailed | ThroughputCorrected | FailureRateEstimated
)  # fmt: skip


def summary(event: AnyEvent) -> str:
    """One sentence without a full stop. May hold any text that the event holds."""
    match event:
        case Observation():
            return _observed(event)
        case Decision():
            return _remedy(event) if isinstance(event, _Remedy) else _course(event)
        case Command():
            return _commanded(event)
        case _:
            assert_never(event)


def _observed(event: AnyObservation) -> str:
    if isinstance(event, _OfWorker):
        return _of_worker(event)
    if isinstance(event, _OfTraining):
        return _of_training(event)
    if isinstance(event, _OfNode):
        return _of_node(event)
    return f"{_asked(event)}{f' (asked by {event.by})' if event.by else ''}"


def _of_worker(event: _OfWorker) -> str:
    match event:
        case WorkerStarted():
            return f"worker {event.worker} started on {event.node} as process {event.pid}"
        case WorkerReady():
            return f"worker {event.worker} on {event.node} is ready for a membership"
        case WorkerRegrouped():
            shares = [(event.dealt, "it"), (event.others_dealt, "the others")]
            dealt = [f", {_count(n, 'micro-batch', 'micro-batches')} assigned to {whom}" for n, whom in shares if n]
            where = f"generation {event.generation} at iteration {event.iteration} after {_seconds(event.duration_us)}"
            return f"worker {event.worker} is in {where}, state from {event.source}{''.join(dealt)}"
        case WorkerParked():
            return (
                f"worker {event.worker} on {event.node} left its group for generation {event.generation}"
                f" after iteration {event.iteration}"
            )
        case WorkerExited():
            how = f"exit code {event.exit_code}" if event.signal is None else f"signal {event.signal}"
            how += CAUSES[event.cause]
            expected = ", as expected" if event.expected else ""
            return f"worker {event.worker} on {event.node} ended by {how}{expected}"
        case WorkerBusy(what=""):
            return f"worker {event.worker} on {event.node} is no longer busy"
        case WorkerBusy():
            return (
                f"worker {event.worker} on {event.node} is busy with {event.what}, for at most"
                f" {_seconds(event.at_most_us)}"
            )
        case WorkerWaits():
            return f"worker {event.worker} on {event.node} waits for the others of generation {event.generation}"
        case StateTaken():
            anew = f", reassembled from shards of {event.resharded_from}" if event.resharded_from else ""
            tried = f", after {_count(len(event.tried), 'source')} that failed" if event.tried else ""
            saved = (
                f"; storage has {event.storage_iteration}, {_seconds(event.saved_us)} saved" if event.saved_us else ""
            )
            return (
                f"worker {event.worker} on {event.node} took the state after iteration {event.iteration} from"
                f" {SOURCES[event.source]} ({event.size_bytes} bytes in {_seconds(event.duration_us)})"
                f"{anew}{tried}{saved}"
            )
        case _:
            assert_never(event)


def _of_saving(event: CheckpointSaved | SaveFailed) -> str:
    if isinstance(event, CheckpointSaved):
        return f"task {event.task} saved iteration {event.iteration} to {event.path} ({event.size_bytes} bytes)"
    whose = "a checkpoint" if event.by == "unicron" else "its program's checkpoint"
    if not event.reason:
        return f"task {event.task} saved {whose} again, of iteration {event.iteration}"
    return f"task {event.task} could not save {whose} of iteration {event.iteration}: {event.reason}"


def _of_training(event: _OfTraining) -> str:
    match event:
        case StepCommitted():
            span = f"iteration {event.last}" if event.first == event.last else f"iterations {event.first}-{event.last}"
            redone = f", {_count(event.redone, 'micro-batch', 'micro-batches')} redone" if event.redone else ""
            return f"task {event.task} committed {span}, loss {event.loss:.4g}{redone}"
        case CheckpointSaved() | SaveFailed():
            return _of_saving(event)
        case TaskCompleted():
            return f"task {event.task} completed after iteration {event.iteration}, loss {event.loss:.4g}"
        case ErrorReported():
            lost = f", its connection to {event.peer}" if event.peer else ""
            return (
                f"worker {event.worker} on {event.node} reports {event.kind} in {event.phase}"
                f" of iteration {event.iteration}{lost}: {event.message}"
            )
        case HangSuspected():
            place = f"{'waits in' if event.waiting else 'has left'} collective {event.entered}"
            stopped = ", its process is stopped" if event.stopped else ""
            stopped += f", busy with {event.busy}" if event.busy else ""
            return (
                f"iteration {event.iteration} takes longer than {_seconds(event.limit_us)}: worker {event.worker} on"
                f" {event.node} last moved {_seconds(event.still_us)} ago, in {event.phase}; it {place}{stopped}"
            )
        case StopAsked():
            left = f", and has left the loop after iteration {event.iteration}" if event.left else ""
            return f"the program of worker {event.worker} on {event.node} asks to stop training{left}: {event.reason}"
        case DegradationObserved():
            slowest = (
                f"{event.slowest} is slowest, {_seconds(event.compute_us)} per micro-batch"
                + (f" against {_seconds(event.others_us)}" if event.others_us else "")
                if event.slowest
                else "no worker stands out"
            )
            return (
                f"task {event.task} is slow: iterations take {_seconds(event.iteration_us)}"
                f" instead of {_seconds(event.usual_us)}; {slowest}"
            )
        case StragglerObserved():
            return (
                f"worker {event.straggler} (rank {event.rank}) on {event.straggler_node} is a straggler: it takes"
                f" {event.factor:.2f} times as long as the other replicas since iteration {event.since_iteration},"
                f" {_seconds(event.compute_us)} per micro-batch against {_seconds(event.others_us)}"
            )
        case StragglerRecovered():
            return (
                f"worker {event.straggler} (rank {event.rank}) on {event.straggler_node} no longer straggles, as of"
                f" iteration {event.iteration}: {event.factor:.2f} times the time of the other replicas"
            )
        case CorruptionSuspected():
            who = event.suspect or "an unknown worker"
            if event.sign == "checksum":
                return f"parameters of {who} differ from other replicas' before iteration {event.iteration}"
            return (
                f"{who} has a {event.sign.replace('_', ' ')} of {event.value:.4g} in iteration {event.iteration},"
                f" usual is {event.usual:.4g}"
            )
        case _:
            assert_never(event)


def _of_node(event: _OfNode) -> str:
    match event:
        case NodeJoined():
            adopted = f", adopting {_count(len(event.workers), 'worker')}" if event.workers else ""
            return f"node {event.node} joined with {_count(event.slots, 'slot')} at {event.address}{adopted}"
        case NodeLeaving():
            return f"node {event.node} is drained and leaves within {event.grace_us / 1e6:g} s: {event.reason}"
        case NodeLeft():
            return f"node {event.node} left: {event.reason}"
        case MachineReported():
            return f"machine of node {event.node}: {event.hold or 'in use'}{': ' if event.reason else ''}{event.reason}"
        case Heartbeat():
            return f"node {event.node} is alive, beat {event.beat}, {_count(event.workers, 'worker')}"
        case AcceleratorReported():
            what = f" reports {event.kind}" if event.kind else " foretells a failure" if event.foretells else ""
            who = f" (worker {event.worker})" if event.worker else ""
            return f"accelerator {event.accelerator} of {event.node}{who}{what}: {event.message}{NEEDS[event.needs]}"
        case NodeChecked():
            how = "passed" if event.passed else "failed"
            return f"node {event.node} {how} its health check in {_seconds(event.duration_us)}: {event.detail}"
        case StateKept():
            copied = f", a copy from {event.origin}" if event.origin != event.node else ""
            return (
                f"node {event.node} keeps the state of task {event.task} after iteration {event.iteration} in memory"
                f" ({event.size_bytes} bytes{copied}, {_seconds(event.duration_us)})"
            )
        case PeersRemembered():
            peers = ", ".join(event.peers) or "no node"
            return f"node {event.node} knows {peers} as peers of task {event.task}"
        case CommandApplied():
            return f"node {event.node} applied command {event.command_id}"
        case CommandFailed():
            return f"node {event.node} did not apply command {event.command_id}: {event.reason}"
        case _:
            assert_never(event)


def _asked(event: AnyRequest) -> str:
    match event:
        case TaskSubmitted():
            spec = event.spec
            return (
                f"task {spec.name} submitted: weight {spec.weight:g}, {spec.min_workers} to {spec.max_workers}"
                f" workers, {_count(spec.iterations, 'iteration')}"
            )
        case ReshapeRequested():
            return (
                f"task {event.task} is to continue with {event.shape}{_settings(event)} and"
                f" {event.min_workers} to {event.max_workers} workers: {event.reason}"
            )
        case TaskCancelled():
            return f"task {event.task} cancelled: {event.reason}"
        case NodeCordoned():
            until = " until it returns" if event.until_return else ""
            by = f" by {to_the_second(event.empty_by_us)}" if event.drain and event.empty_by_us else ""
            return f"node {event.node} {'drained' if event.drain else 'cordoned'}{by}{until}: {event.reason}"
        case NodeUncordoned():
            return f"node {event.node} uncordoned: {event.reason}"
        case MaintenancePlanned():
            window = f"{to_the_second(event.from_us)} to {to_the_second(event.until_us)}"
            return f"maintenance of {', '.join(event.nodes)} from {window}: {event.reason}"
        case MaintenanceCancelled():
            return f"maintenance {event.window} cancelled: {event.reason}"
        case ForgetRequested():
            return f"node {event.node} is to {'leave for good and ' if event.leave else ''}be forgotten: {event.reason}"
        case NodeEnrolled():
            return f"node {event.node} enrolled with key {event.key[:12]}..."
        case NodeRevoked():
            return f"login of node {event.node} revoked: {event.reason}"
        case InjectionRequested():
            return f"fault ordered: {_fault(event.fault, event.node)}"
        case _:
            assert_never(event)


def _remedy(event: _Remedy) -> str:
    match event:
        case NodeLost():
            return f"node {event.node} lost: {event.reason}"
        case NodeReturned():
            return f"node {event.node} returned, beat {event.evidence.beat_seq}"
        case NodeForgotten():
            return f"node {event.node} forgotten: {event.reason}"
        case NodeIsolated():
            until = "" if event.until_us is None else f" until {event.until_us} us"
            return f"node {event.node} isolated{until}: {event.reason}"
        case DrainBegun():
            return f"workers leave node {event.node} now: {event.reason}"
        case NodeReadmitted():
            return f"node {event.node} readmitted: {event.reason}"
        case RepairEnded():
            how = "succeeded" if event.passed else "failed"
            return f"the repair of node {event.node} {how} after {_seconds(event.duration_us)}: {event.detail}"
        case IncidentEscalated():
            return (
                f"incident {event.incident} escalated to SEV{event.severity}, worker {event.worker} evicted:"
                f" {event.reason}"
            )
        case TransitionCompleted():
            return (
                f"incident {event.incident} closed by {event.response}: detected in {_seconds(event.detection_us)},"
                f" transition {_seconds(event.transition_us)},"
                f" {_count(event.micro_batches_redone, 'micro-batch', 'micro-batches')} redone{_lost(event)}"
            )
        case _:
            assert_never(event)


def _course(event: _Course) -> str:
    match event:
        case CoordinatorStarted():
            where = f" in {event.process}" if event.process else ""
            return f"coordinator started term {event.term}{where}, version {event.version}"
        case EntrySkipped():
            return f"entry {event.seq} is skipped: {event.reason}"
        case DeadlinePassed():
            return f"deadline {event.deadline_id} passed"
        case PlanAdopted():
            shares = ", ".join(f"{a.task} {_count(a.workers, 'worker')}" for a in event.assignments) or "no task runs"
            took = f", {event.way} in {event.took_us} us" if event.took_us else ""
            return f"plan {event.epoch} ({event.trigger}{took}): {shares}; {event.reason}"
        case MembershipDecided():
            members, joining = workers_in(event.seats), workers_in(run for run in event.seats if run.joins)
            joiners = f", {joining} joining" if joining else ""
            parts = f" and those of {_count(event.parts, 'part')}" if event.parts else ""
            urgent = "at once" if event.urgent else "at the next iteration"
            return (
                f"task {event.task} generation {event.generation}: {_count(members, 'member')}{joiners}{parts},"
                f" {urgent}; {event.reason}"
            )
        case MembershipPart():
            some = _count(workers_in(event.seats), "member")
            return f"task {event.task} generation {event.generation}: {some} in part {event.part}"
        case PeersDecided():
            return f"the state of task {event.task} is copied to {_nodes(event.peers)}"
        case TaskReshaped():
            return (
                f"task {event.task} has {event.shape}{_settings(event)} and {event.min_workers} to"
                f" {event.max_workers} workers from now on: {event.reason}"
            )
        case TaskFailed():
            return f"task {event.task} failed: {event.reason}"
        case ThroughputCorrected():
            return (
                f"task {event.task} achieves {event.flops:.3g} FLOP/s on {_count(event.workers, 'worker')}:"
                f" {event.reason}"
            )
        case FailureRateEstimated():
            hours = event.worker_mtbf_us / 3.6e9
            return f"a worker fails every {hours:.4g} h, after {_count(event.failures, 'failure')}"
        case _:
            assert_never(event)


def _commanded(event: AnyCommand) -> str:
    match event:
        case StartWorker():
            return (
                f"start worker {event.worker} of task {event.spec.name} on {event.node}"
                f" as replica {event.replica}, shard {event.shard}"
            )
        case StartWorkers():
            return f"start {_count(len(event.starts), 'worker')} of task {event.spec.name} on {event.node}"
        case StopWorker():
            return f"stop worker {event.worker} of task {event.task} on {event.node}: {event.reason}"
        case DropState():
            return f"drop the state of task {event.task} on {event.node}"
        case InjectFault():
            return f"inject {_fault(event.fault, event.node)}, ordered by {event.injection}"
        case CheckNode():
            what = " ".join(event.argv) if event.argv else "its self-test"
            return f"check node {event.node} by {what}, isolated because: {event.reason}"
        case LeaveCluster():
            return f"node {event.node} is to leave{' for good' if event.for_good else ''}: {event.reason}"
        case _:
            assert_never(event)


def _lost(event: TransitionCompleted) -> str:
    return f", {event.micro_batches_lost} finished ones thrown away" if event.micro_batches_lost else ""
