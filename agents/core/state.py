"""The state of the agent's core, its inputs and its actions. Rules: machine.py.

`Remembered` is the part that the next agent of this node must know as well: the shell writes it down before it
acts on it. The rest of `AgentState` is learned anew: from the fork server's inventory and the workers' Hellos.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from unicrond.agents.core.agent_config import AgentConfig
from unicrond.agents.core.commit_sums import CommitSum, Position
from unicrond.agents.core.worker_budgets import ReportDrops, WorkerBudget, WorkerHeldUp
from unicrond.agents.protocol.marks import Mark
from unicrond.agents.protocol.messages import FromForkServer, FromWorker, GroupMembership, Hello, ToForkServer, ToWorker
from unicrond.events.log.log_identity import LogMark
from unicrond.events.queries.worker_queries import WarrantRenewal
from unicrond.events.vocabulary import (
    AnyCommand,
    Decision,
    ErrorKind,
    ExitCause,
    Fault,
    LinksProbed,
    MachineHold,
    MemoryService,
    Name,
    Observation,
    ProbeLinks,
    RepairNeed,
    SnapshotStored,
    StacksTaken,
    StartWorker,
    WorkerBusy,
    WorkerId,
)
from unicrond.events.vocabulary.placements import PartialMembership


class _StateStruct(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The base of the core's values: immutable; written by field name without fields at their defaults, so that an
    older agent may read it."""


StopStage: TypeAlias = Literal["no", "quit", "term", "kill"]


class PendingCommand(_StateStruct, frozen=True, kw_only=True):
    """A command that is still to be answered. `cause`: its event id in the log."""

    command_id: str
    cause: str


class WorkerRecord(_StateStruct, frozen=True, kw_only=True):
    """A worker whose process lives, or that the fork server is to start (`pid` 0)."""

    worker: WorkerId
    task: Name
    slot: int
    pid: int = 0
    #: The command that starts it, until that is answered.
    starting: PendingStart | None = None
    stop: StopStage = "no"
    stop_reason: str = ""
    stop_orders: tuple[PendingCommand, ...] = ()
    ready: bool = False
    #: It has received a membership that names it.
    member: bool = False
    #: The generation that it reported last.
    generation: int = 0
    #: The newest generation and iteration that were reported as WorkerJoinedGroup and CheckpointSaved.
    regrouped: int = 0
    saved: int = 0
    completed: bool = False
    #: Its program has asked to stop training, and may end with code 0 at any time.
    stopping: bool = False
    #: It has reported itself why it is going to end.
    cause_told: bool = False
    #: The log that started it no longer exists.
    foreign: bool = False


class PendingStart(_StateStruct, frozen=True, kw_only=True):
    """A start that waits for a slot or for the fork server."""

    command: StartWorker
    order: PendingCommand


class EndedWorker(_StateStruct, frozen=True, kw_only=True):
    """A worker that has ended. `durable`: its WorkerExited is in the log."""

    expected: bool
    durable: bool


class Remembered(_StateStruct, frozen=True, kw_only=True):
    """The notes of one agent for the next one of the same run directory."""

    #: The boot of the first agent of this run directory; the acts of earlier agents are unknown here.
    since_boot: int = 0
    #: The log that all this is about: when its stream was made, its end at the last look, entries by which it is known,
    #: when a person adopted it (known_event_log.py).
    log: str = ""
    log_seq: int = 0
    log_marks: tuple[LogMark, ...] = ()
    log_adopted_us: int = 0
    #: The last entry of its feed that is handled, as far as it was written down; 0: not known.
    read_seq: int = 0
    #: The highest (term, epoch) that a command came with.
    fence: tuple[int, int] = (0, 0)
    workers: dict[WorkerId, WorkerRecord] = {}
    waiting_starts: tuple[PendingStart, ...] = ()
    memberships: dict[Name, GroupMembership] = {}
    #: Parts of memberships to come (events/vocabulary/placements.py).
    membership_parts: dict[Name, PartialMembership] = {}
    #: Command id -> "" for applied, else the reason of failure; the newest MAX_ANSWERED.
    answers: dict[str, str] = {}
    #: The newest MAX_GONE workers that have ended.
    ended_workers: dict[WorkerId, EndedWorker] = {}
    #: Workers of a log that no longer exists, whose exits the fork server may still report.
    foreign_workers: tuple[WorkerId, ...] = ()
    #: Per task, the last commit that the log holds from this node.
    reported_commits: dict[Name, Position] = {}


MAX_ANSWERED = MAX_GONE = 256
#: For how many tasks memberships and reports are remembered.
MAX_TASKS = 64


class WorkerLink(_StateStruct, frozen=True, kw_only=True):
    """A worker as its connection to this agent shows it; the next agent begins anew."""

    connected: bool = True
    #: The newest generation that was sent on this connection.
    sent_generation: int = 0
    iteration: int = 0
    #: The work that its program has declared to be busy with, and whether that was reported to the log.
    busy: WorkerBusy | None = None
    busy_told: bool = False


class AgentState(_StateStruct, frozen=True, kw_only=True):
    """The whole state of `machine.handle`."""

    config: AgentConfig
    memory: Remembered = Remembered()
    #: adopting: the inventory is not known, or Hellos are still awaited; nothing was appended for the node yet.
    #: draining: the coordinator moves its workers away, and after the last one's end the node leaves.
    phase: Literal["adopting", "up", "draining", "leaving", "left"] = "adopting"
    log_seen: bool = False
    #: The port of the node's rendezvous store (0: no fork server runs now), and the one in the newest NodeJoined.
    store_port: int = 0
    joined_port: int = 0
    #: Whether the fork server can run workers as other users, and the degrees of a layout that its hook knows.
    separates: bool = False
    degrees: tuple[Name, ...] = ()
    links: dict[WorkerId, WorkerLink] = {}
    #: Adopted workers that have not sent Hello yet.
    unheard: frozenset[WorkerId] = frozenset()
    #: Ended workers whose WorkerExited is in the outbox.
    confirming: frozenset[WorkerId] = frozenset()
    sums: dict[Name, CommitSum] = {}
    #: Per task, the last commit that entered a sum.
    summed: dict[Name, Position] = {}
    #: Task -> the newest generation, where its leader confirms for all (MembershipDecided.leader_confirms). The next
    #: agent need not know: its additional reports do no harm.
    leader_confirms: dict[Name, int] = {}
    #: Tasks whose commit timer runs.
    paced: frozenset[Name] = frozenset()
    #: "task/shard" of all that the node's memory is known to hold.
    holds: frozenset[str] = frozenset()
    #: By "task/shard": a state in the node's memory that is not reported yet, while the timer of the last report runs.
    untold: dict[str, SnapshotStored | None] = {}
    #: What each worker has said lately; of one that has ended, until all is said of it.
    budgets: dict[WorkerId, WorkerBudget] = {}
    leave_reason: str = ""
    #: Why it ends by the coordinator's order: for good, or since the node was forgotten while it was away.
    ends: Literal["", "for good", "forgotten"] = ""
    #: How long the drain may take, ordered before or after the node had joined; None: there is none.
    drain_s: float | None = None
    #: What the machine's keeper demands of the node; None: it has demanded nothing yet.
    machine: MachineSaw | None = None
    #: Worker -> the generation that it was in when its stacks were ordered; the newest MAX_GONE.
    stack_generations: dict[WorkerId, int] = {}
    #: Commands whose fault the shell is about to inject.
    injecting: dict[str, PendingCommand] = {}
    #: The command whose health check the shell runs.
    checking: PendingCommand | None = None


class Commanded(_StateStruct, frozen=True, kw_only=True):
    """A command from the log. `cause`: its event id. `age_s`: seconds since the log received it. `warrant`: the
    signature that came beside it."""

    command: AnyCommand
    term: int
    cause: str
    age_s: float = 0.0
    warrant: str = ""


class LogDecision(_StateStruct, frozen=True, kw_only=True):
    """A membership, a part of one, or a list of peers from the log, of a task that this node follows
    (events/log/event_log.py). `warrant`: the signature that came beside it; `seq`: its number in the log."""

    event: Decision
    term: int
    warrant: str = ""
    seq: int = 0


class WorkerConnected(_StateStruct, frozen=True, kw_only=True):
    """A worker has a new connection, which replaces its older one."""

    hello: Hello


class WorkerSaid(_StateStruct, frozen=True, kw_only=True):
    """A connected worker has sent a message, which was read at `now_us` of the machine's monotonic clock."""

    worker: WorkerId
    message: FromWorker
    now_us: int


class WorkerDisconnected(_StateStruct, frozen=True, kw_only=True):
    """The worker's newest connection is broken."""

    worker: WorkerId


class ForkServerSaid(_StateStruct, frozen=True, kw_only=True):
    """The fork server has sent a message. With ProcessExited, `log_tail`: the last bytes of the worker's log; `mark`:
    its last phase mark."""

    message: FromForkServer
    log_tail: str = ""
    mark: Mark | None = None


class Stalled(_StateStruct, frozen=True, kw_only=True):
    """A worker's iteration takes too long. `mark`: its phase mark, unchanged for `still_us`. `is_stopped`: the kernel
    says that its process is stopped. `times`: how often this iteration has been reported."""

    worker: WorkerId
    mark: Mark
    still_us: int
    is_stopped: bool
    times: int = 1


class ForkServerDied(_StateStruct, frozen=True, kw_only=True):
    """The fork server's process has ended, and the kernel has killed its workers with it. `cause`: what ended it."""

    cause: ExitCause = "signalled"


TimerName: TypeAlias = Literal["adopt", "commits", "stop", "wait", "held", "busy", "drain", "save", "budget", "floods"]


class TimerFired(_StateStruct, frozen=True, kw_only=True):
    """A timer has fired. `key`: as in its ArmTimer: a worker, a task, a worker and a kind of message, a stage of
    last_saves.py, or ""."""

    name: TimerName
    key: str


class StateHeld(_StateStruct, frozen=True, kw_only=True):
    """The node's memory holds a state that no worker here has reported: a peer's copy, or one from before this agent's
    start."""

    snapshot: SnapshotStored


class AcceleratorSaw(_StateStruct, frozen=True, kw_only=True):
    """The watch over the node's GPUs has found something (agents/accelerators/). `worker`: runs on that GPU, "" =
    none."""

    accelerator: str
    worker: str
    kind: ErrorKind | None
    xid: int
    message: str
    repair_need: RepairNeed = ""
    predicts_failure: bool = False


class MachineSaw(_StateStruct, frozen=True, kw_only=True):
    """Kubernetes demands another hold of the node than before (agents/kubernetes/)."""

    hold: MachineHold
    reason: str


class LogSeen(_StateStruct, frozen=True, kw_only=True):
    """The event log answers. `created`: when its stream was made, "" where nothing can be known. `last_seq`: of its
    last entry. `marks`: entries by which it is known. `term`: its newest, 0: unknown. `adopted_us`: when a person last
    adopted a log by name, according to this log."""

    created: str
    last_seq: int = 0
    marks: tuple[LogMark, ...] = ()
    term: int = 0
    adopted_us: int = 0


class Appended(_StateStruct, frozen=True, kw_only=True):
    """The log holds an observation that was appended with `confirm`."""

    event: Observation


class NodeFaultInjected(_StateStruct, frozen=True, kw_only=True):
    """The shell has carried out an InjectIntoNode, or `reason` says why it could not."""

    command_id: str
    reason: str


class Unreadable(_StateStruct, frozen=True, kw_only=True):
    """The log has a command that this version cannot read; `reason`: why. `cause`: its event id."""

    command_id: str
    cause: str
    reason: str


class Checked(_StateStruct, frozen=True, kw_only=True):
    """A health check has ended. `detail`: its last output."""

    command_id: str
    has_passed: bool
    duration_us: int
    detail: str


class Drain(_StateStruct, frozen=True, kw_only=True):
    """The node leaves as soon as the coordinator has moved its workers away, and within `limit_s` seconds in any
    case. `has_log`: the log is in reach."""

    reason: str
    limit_s: float
    has_log: bool = True


class LeaveNow(_StateStruct, frozen=True, kw_only=True):
    """The node leaves the cluster now, with all its workers stopped."""

    reason: str


class HandOver(_StateStruct, frozen=True, kw_only=True):
    """This agent ends; its workers go on for the next one."""


Input: TypeAlias = (
    Commanded | LogDecision | WorkerConnected | WorkerSaid | WorkerHeldUp | WorkerDisconnected | ForkServerSaid
    | ForkServerDied | Stalled | AcceleratorSaw | MachineSaw | TimerFired | LogSeen | Appended | StateHeld | Drain
    | NodeFaultInjected | Checked | LinksProbed | StacksTaken | Unreadable | LeaveNow | HandOver | WarrantRenewal
)  # fmt: skip


class Append(_StateStruct, frozen=True, kw_only=True):
    """Put an observation into the outbox. `confirm`: answer with Appended once the log holds it."""

    event: Observation
    caused_by: str = ""
    confirm: bool = False


class TellWorker(_StateStruct, frozen=True, kw_only=True):
    """Send a worker a message."""

    worker: WorkerId
    message: ToWorker


class TellForkServer(_StateStruct, frozen=True, kw_only=True):
    """Send the fork server a message."""

    message: ToForkServer


class ArmTimer(_StateStruct, frozen=True, kw_only=True):
    """Send TimerFired(name, key) after `after_s` seconds; replaces a running timer of the same name and key."""

    name: TimerName
    key: str
    after_s: float


class InjectIntoNode(_StateStruct, frozen=True, kw_only=True):
    """Inject an ordered fault into this node (node_faults.py), and answer with NodeFaultInjected."""

    fault: Fault
    command_id: str


class RunCheck(_StateStruct, frozen=True, kw_only=True):
    """Check the node's health (health_check.py) by the command `argv` (empty: the self-test); answer with Checked
    within `limit_s` seconds."""

    command_id: str
    argv: tuple[str, ...]
    limit_s: float
    reason: str


class TakeStacks(_StateStruct, frozen=True, kw_only=True):
    """Read the stacks of these workers and answer with StacksTaken, within a bounded time (stack_keeper.py).
    `processes`: worker -> pid. A SIGKILL to one of them waits until its stack is read."""

    task: Name
    generation: int
    processes: dict[WorkerId, int]


class Disconnect(_StateStruct, frozen=True, kw_only=True):
    """Close the connection of a worker that this agent did not start. `reason`: for the agent's log."""

    worker: WorkerId
    reason: str


class CopyState(_StateStruct, frozen=True, kw_only=True):
    """Copy the newest state of the shard to the first of `peers` that accepts it."""

    task: Name
    shard: int
    peers: tuple[MemoryService, ...]


class ForgetLog(_StateStruct, frozen=True, kw_only=True):
    """Discard what was read of the log before, and the observations that it has not received."""


class Finish(_StateStruct, frozen=True, kw_only=True):
    """The node has left: send what the outbox holds, retire the fork server, end the agent."""


Action: TypeAlias = (
    Append | TellWorker | TellForkServer | ArmTimer | CopyState | InjectIntoNode | RunCheck | Disconnect | ForgetLog
    | ProbeLinks | TakeStacks | ReportDrops | Finish
)  # fmt: skip
