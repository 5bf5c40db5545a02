"""The vocabulary: every fact, decision and command that may stand in the log.

Rules
-----
* Every type is immutable and says what *was observed*, *was decided* or *is commanded*; never how.
* Observations come from agents (producer = node name) or from people (producer = "api").
  Decisions and commands come from the coordinator alone, under its term.
* Times are integers in microseconds since the epoch, work is integer FLOP, losses are floats.
* A field is never renamed or given another meaning: a new schema number and an upcaster are the way.
* All that is known of an event stands on its class: its sentence, whether it is noteworthy, whom it names, and since
  which schema it is there. So does, in a field's annotation, what came to it later (`Since`), so that older readers are
  spared it (`schemas.py`).

What does not live here: the envelope (`envelope.py`), bytes and rules that concern several fields (`codec.py`),
subjects and headers (`subjects.py`).
"""

from __future__ import annotations

from typing import TypeAlias

# isort: off
# fmt: off
from unicrond.events.vocabulary.alarms import AlarmAcknowledged, AlarmAssigned, AlarmEnded, AlarmSilenced
from unicrond.events.vocabulary.base import (
    BroadcastDecision, Command, Decision, Event, Observation, PlacedObservation, Request, Value, WorkerObservation,
)
from unicrond.events.vocabulary.commands import (
    CheckNode, DropState, LeaveCluster, Start, StartWorker, StartWorkers, StopWorker,
)
from unicrond.events.vocabulary.decisions import (
    CoordinatorStarted, DeadlineExpired, EntrySkipped, IncidentEscalated, TransitionCompleted,
)
from unicrond.events.vocabulary.faults import Fault, InjectFault, InjectionRequested
from unicrond.events.vocabulary.field_types import (
    Boot, CorruptionSign, Count, DivergenceSign, ErrorKind, ExitCause, Factor, FaultKind, FaultPhase, FirstIteration,
    Gpu, LearningRate, LongText, MachineHold, Micros, NAME_PATTERN, Name, Phase, PlanMethod, Positive, PublicKey,
    RepairNeed, SERIAL_MAX, SOURCES_MAX, SamplesDigest, Saver, Serial, SeverityLevel, SomeWorkers, StateSource, Text,
    USER_PATTERN, WORKERS_MAX, WorkerId, WorkerOrNone,
)
from unicrond.events.vocabulary.holds import (
    DecisionHeld, HeldAction, HoldDecision, HoldLifted, HoldLimit, Mode, ModeRequested, held_action, hold_key,
)
from unicrond.events.vocabulary.links import (
    LinkCondition, LinkProbe, LinksProbed, ProbeLinks, ProbedPeer, WorkersWithdrawn,
)
from unicrond.events.vocabulary.memberships import (
    Member, MembershipDecided, MembershipPart, PeersDecided, PeersRemembered, SeatRun, workers_in,
)
from unicrond.events.vocabulary.node_decisions import (
    DrainStarted, Evidence, NodeForgotten, NodeIsolated, NodeLost, NodeReadmitted, NodeReturned, NodesLost, RepairEnded,
    SilenceEnded, SilenceHeld,
)
from unicrond.events.vocabulary.node_requests import (
    ForgetRequested, MaintenanceCancelled, MaintenancePlanned, NodeCordoned, NodeEnrolled, NodeRevoked,
    NodeUncordoned,
)
from unicrond.events.vocabulary.nodes import (
    AcceleratorReported, CommandApplied, CommandFailed, Heartbeat, MachineReported, MemoryService, NodeChecked,
    NodeJoined, NodeLeaving, NodeLeft, RunningWorker, StoreAddress,
)
from unicrond.events.vocabulary.plans import (
    FailureRateEstimated, NodeRun, PlanAdopted, TaskAssignment, ThroughputCorrected,
)
from unicrond.events.vocabulary.stacks import GroupStanding, StackReader, StacksTaken, WorkerStack
from unicrond.events.vocabulary.states import CheckpointSaved, SaveFailed, SnapshotStored, StateLoaded
from unicrond.events.vocabulary.task_events import (
    ProofRequested, ReshapeRequested, TaskCancelled, TaskCompleted, TaskFailed, TaskReshaped, TaskSubmitted,
    TaskUpdated,
)
from unicrond.events.vocabulary.tasks import (
    CheckpointSpec, DETERMINISM, DETERMINISTIC, GpuSpec, LANES, LayoutSpec, ModelSpec, OptimizerSpec, TaskSpec,
    TaskStart,
)
from unicrond.events.vocabulary.training import (
    Checksums, CorruptionSuspected, DegradationObserved, DivergenceObserved, HangSuspected, ReplicaDeal, StepCommitted,
    StragglerObserved, StragglerRecovered, StragglerSeen, divergence_text,
)
from unicrond.events.vocabulary.workers import (
    ErrorReported, StopRequested, WorkerBusy, WorkerExited, WorkerJoinedGroup, WorkerPaused, WorkerReady,
    WorkerStarted, WorkerWaiting,
)
# fmt: on
# isort: on

__all__ = [
    "DETERMINISM",
    "DETERMINISTIC",
    "LANES",
    "NAME_PATTERN",
    "SERIAL_MAX",
    "SOURCES_MAX",
    "USER_PATTERN",
    "WORKERS_MAX",
    "AcceleratorReported",
    "AlarmAcknowledged",
    "AlarmAssigned",
    "AlarmEnded",
    "AlarmSilenced",
    "AnyCommand",
    "AnyDecision",
    "AnyEvent",
    "AnyObservation",
    "AnyRequest",
    "Boot",
    "BroadcastDecision",
    "CheckNode",
    "CheckpointSaved",
    "CheckpointSpec",
    "Checksums",
    "Command",
    "CommandApplied",
    "CommandFailed",
    "CoordinatorStarted",
    "CorruptionSign",
    "CorruptionSuspected",
    "Count",
    "DeadlineExpired",
    "Decision",
    "DecisionHeld",
    "DegradationObserved",
    "DivergenceObserved",
    "DivergenceSign",
    "DrainStarted",
    "DropState",
    "EntrySkipped",
    "ErrorKind",
    "ErrorReported",
    "Event",
    "Evidence",
    "ExitCause",
    "Factor",
    "FailureRateEstimated",
    "Fault",
    "FaultKind",
    "FaultPhase",
    "FirstIteration",
    "ForgetRequested",
    "Gpu",
    "GpuSpec",
    "GroupStanding",
    "HangSuspected",
    "Heartbeat",
    "HeldAction",
    "HoldDecision",
    "HoldLifted",
    "HoldLimit",
    "IncidentEscalated",
    "InjectFault",
    "InjectionRequested",
    "LayoutSpec",
    "LearningRate",
    "LeaveCluster",
    "LinkCondition",
    "LinkProbe",
    "LinksProbed",
    "LongText",
    "MachineHold",
    "MachineReported",
    "MaintenanceCancelled",
    "MaintenancePlanned",
    "Member",
    "MembershipDecided",
    "MembershipPart",
    "MemoryService",
    "Micros",
    "Mode",
    "ModeRequested",
    "ModelSpec",
    "Name",
    "NodeChecked",
    "NodeCordoned",
    "NodeEnrolled",
    "NodeForgotten",
    "NodeIsolated",
    "NodeJoined",
    "NodeLeaving",
    "NodeLeft",
    "NodeLost",
    "NodeReadmitted",
    "NodeReturned",
    "NodeRevoked",
    "NodeRun",
    "NodeUncordoned",
    "NodesLost",
    "Observation",
    "OptimizerSpec",
    "PeersDecided",
    "PeersRemembered",
    "Phase",
    "PlacedObservation",
    "PlanAdopted",
    "PlanMethod",
    "Positive",
    "ProbeLinks",
    "ProbedPeer",
    "ProofRequested",
    "PublicKey",
    "RepairEnded",
    "RepairNeed",
    "ReplicaDeal",
    "Request",
    "ReshapeRequested",
    "RunningWorker",
    "SamplesDigest",
    "SaveFailed",
    "Saver",
    "SeatRun",
    "Serial",
    "SeverityLevel",
    "SilenceEnded",
    "SilenceHeld",
    "SnapshotStored",
    "SomeWorkers",
    "StackReader",
    "StacksTaken",
    "Start",
    "StartWorker",
    "StartWorkers",
    "StateLoaded",
    "StateSource",
    "StepCommitted",
    "StopRequested",
    "StopWorker",
    "StoreAddress",
    "StragglerObserved",
    "StragglerRecovered",
    "StragglerSeen",
    "TaskAssignment",
    "TaskCancelled",
    "TaskCompleted",
    "TaskFailed",
    "TaskReshaped",
    "TaskSpec",
    "TaskStart",
    "TaskSubmitted",
    "TaskUpdated",
    "Text",
    "ThroughputCorrected",
    "TransitionCompleted",
    "Value",
    "WorkerBusy",
    "WorkerExited",
    "WorkerId",
    "WorkerJoinedGroup",
    "WorkerObservation",
    "WorkerOrNone",
    "WorkerPaused",
    "WorkerReady",
    "WorkerStack",
    "WorkerStarted",
    "WorkerWaiting",
    "WorkersWithdrawn",
    "divergence_text",
    "held_action",
    "hold_key",
    "workers_in",
]  # fmt: skip

AnyRequest: TypeAlias = (
    TaskSubmitted | TaskUpdated | TaskCancelled | ProofRequested | ReshapeRequested
    | NodeCordoned | NodeUncordoned | ForgetRequested | NodeEnrolled | NodeRevoked
    | MaintenancePlanned | MaintenanceCancelled | InjectionRequested
    | AlarmAcknowledged | AlarmSilenced | AlarmAssigned | ModeRequested
)  # fmt: skip
AnyObservation: TypeAlias = (
    NodeJoined | NodeLeaving | NodeLeft | MachineReported | WorkerStarted | WorkerReady | WorkerJoinedGroup
    | WorkerPaused | WorkerExited
    | ErrorReported | StepCommitted | CheckpointSaved | SaveFailed | TaskCompleted
    | HangSuspected | StacksTaken | WorkerBusy | WorkerWaiting | StopRequested
    | DegradationObserved | StragglerObserved | StragglerRecovered
    | CorruptionSuspected | DivergenceObserved | AcceleratorReported | SnapshotStored | StateLoaded
    | PeersRemembered | NodeChecked | LinksProbed
    | CommandApplied | CommandFailed | AnyRequest | Heartbeat
)  # fmt: skip
AnyDecision: TypeAlias = (
    CoordinatorStarted | NodeLost | NodeReturned | NodeForgotten | NodeIsolated | NodeReadmitted | DrainStarted
    | SilenceHeld | SilenceEnded | NodesLost
    | DecisionHeld | HoldLifted
    | RepairEnded | AlarmEnded | IncidentEscalated | DeadlineExpired | EntrySkipped | PlanAdopted | MembershipPart
    | MembershipDecided | PeersDecided | WorkersWithdrawn | TaskReshaped | TaskFailed
    | TransitionCompleted
    | ThroughputCorrected | FailureRateEstimated
)  # fmt: skip
AnyCommand: TypeAlias = (
    StartWorker | StartWorkers | StopWorker | DropState | InjectFault | CheckNode | ProbeLinks | LeaveCluster
)  # fmt: skip
AnyEvent: TypeAlias = AnyObservation | AnyDecision | AnyCommand
