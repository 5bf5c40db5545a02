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

from unicrond.events.vocabulary.base import *
from unicrond.events.vocabulary.commands import *
from unicrond.events.vocabulary.decisions import *
from unicrond.events.vocabulary.faults import *
from unicrond.events.vocabulary.field_types import *
from unicrond.events.vocabulary.links import *
from unicrond.events.vocabulary.memberships import *
from unicrond.events.vocabulary.node_decisions import *
from unicrond.events.vocabulary.node_requests import *
from unicrond.events.vocabulary.nodes import *
from unicrond.events.vocabulary.plans import *
from unicrond.events.vocabulary.runs import *
from unicrond.events.vocabulary.services import *
from unicrond.events.vocabulary.states import *
from unicrond.events.vocabulary.task_events import *
from unicrond.events.vocabulary.tasks import *
from unicrond.events.vocabulary.training import *
from unicrond.events.vocabulary.workers import *

AnyRequest: TypeAlias = (
    TaskSubmitted | TaskCancelled | ReshapeRequested | NodeCordoned | NodeUncordoned | ForgetRequested | NodeEnrolled
    | NodeRevoked | MaintenancePlanned | MaintenanceCancelled | InjectionRequested
)  # fmt: skip
AnyObservation: TypeAlias = (
    NodeJoined | NodeLeaving | NodeLeft | MachineReported | WorkerStarted | WorkerReady | WorkerJoinedGroup
    | WorkerPaused | WorkerExited
    | ErrorReported | StepCommitted | CheckpointSaved | SaveFailed | TaskCompleted
    | HangSuspected | WorkerBusy | WorkerWaiting | StopRequested
    | DegradationObserved | StragglerObserved | StragglerRecovered
    | CorruptionSuspected | AcceleratorReported | SnapshotStored | StateLoaded
    | PeersRemembered | NodeChecked | LinksProbed
    | CommandApplied | CommandFailed | AnyRequest | Heartbeat
)  # fmt: skip
AnyDecision: TypeAlias = (
    CoordinatorStarted | NodeLost | NodeReturned | NodeForgotten | NodeIsolated | NodeReadmitted | DrainStarted
    | RepairEnded | IncidentEscalated | DeadlineExpired | EntrySkipped | PlanAdopted | MembershipPart
    | MembershipDecided | PeersDecided | WorkersWithdrawn | TaskReshaped | TaskFailed
    | TransitionCompleted
    | ThroughputCorrected | FailureRateEstimated
)  # fmt: skip
AnyCommand: TypeAlias = (
    StartWorker | StartWorkers | StopWorker | DropState | InjectFault | CheckNode | ProbeLinks | LeaveCluster
)  # fmt: skip
AnyEvent: TypeAlias = AnyObservation | AnyDecision | AnyCommand
