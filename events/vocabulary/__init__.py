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

from events.vocabulary.base import *
from events.vocabulary.commands import *
from events.vocabulary.decisions import *
from events.vocabulary.faults import *
from events.vocabulary.field_types import *
from events.vocabulary.memberships import *
from events.vocabulary.node_decisions import *
from events.vocabulary.node_requests import *
from events.vocabulary.nodes import *
from events.vocabulary.plans import *
from events.vocabulary.runs import *
from events.vocabulary.services import *
from events.vocabulary.states import *
from events.vocabulary.task_events import *
from events.vocabulary.tasks import *
from events.vocabulary.training import *
from events.vocabulary.workers import *

AnyRequest: TypeAlias = (
    TaskSubmitted | TaskCancelled | ReshapeRequested | NodeCordoned | NodeUncordoned | ForgetRequested | NodeEnrolled
    | NodeRevoked | MaintenancePlanned | MaintenanceCancelled | InjectionRequested
)  # fmt: skip
AnyObservation: TypeAlias = (
    NodeJoined | NodeLeaving | NodeLeft | MachineReported | WorkerStarted | WorkerReady | WorkerRegrouped | WorkerParked
    | WorkerExited
    | ErrorReported | StepCommitted | CheckpointSaved | SaveFailed | TaskCompleted
    | HangSuspected | WorkerBusy | WorkerWaits | StopAsked
    | DegradationObserved | StragglerObserved | StragglerRecovered
    | CorruptionSuspected | AcceleratorReported | StateKept | StateTaken
    | PeersRemembered | NodeChecked
    | CommandApplied | CommandFailed | AnyRequest | Heartbeat
)  # fmt: skip
AnyDecision: TypeAlias = (
    CoordinatorStarted | NodeLost | NodeReturned | NodeForgotten | NodeIsolated | NodeReadmitted | DrainBegun
    | RepairEnded | IncidentEscalated | DeadlinePassed | EntrySkipped | PlanAdopted | MembershipPart | MembershipDecided
    | PeersDecided | TaskReshaped | TaskFailed
    | TransitionCompleted
    | ThroughputCorrected | FailureRateEstimated
)  # fmt: skip
AnyCommand: TypeAlias = StartWorker | StartWorkers | StopWorker | DropState | InjectFault | CheckNode | LeaveCluster
AnyEvent: TypeAlias = AnyObservation | AnyDecision | AnyCommand
