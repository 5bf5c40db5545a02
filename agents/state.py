"""What the agent's core knows, its inputs and its actions. Rules: core.py.

`Memory` is the part that the next agent of this node must know as well: the shell writes it down before it
acts on it. The rest of `State` is found out anew: from the fork server's inventory and the workers' Hellos.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from agents.agent_config import Config
from agents.commit_sums import CommitSum, Position
from agents.protocol.marks import Mark
from agents.protocol.messages import (
    Busy,
    FromForkServer,
    FromWorker,
    Hello,
    Membership,
    ToForkServer,
    ToWorker,
)
from events.seats import Telling
from events.vocabulary import (
    AnyCommand,
    Decision,
    ErrorKind,
    ExitCause,
    Fault,
    MachineHold,
    MemoryService,
    Name,
    Observation,
    RepairNeed,
    StartWorker,
    WorkerId,
)


class _Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Immutable; written with field names, those at their defaults left out: an older agent may read it again."""


StopStage: TypeAlias = Literal["no", "quit", "term", "kill"]


class Order(_Part, frozen=True, kw_only=True):
    """A command that is still to be answered. `cause`: its event id in the log."""

    command_id: str
    cause: str


class Worker(_Part, frozen=True, kw_only=True):
    """A process that lives, or that the fork server was asked for (`pid` 0)."""

    worker: WorkerId
    task: Name
    slot: int
    pid: int = 0
    #: The command that it is being started by, until that is answered.
    starting: Waiting | None = None
    stop: StopStage = "no"
    stop_reason: str = ""
    stop_orders: tuple[Order, ...] = ()
    ready: bool = False
    #: It was given a membership that names it.
    member: bool = False
    #: The generation that it told last.
    generation: int = 0
    #: The newest generation and iteration that were told as WorkerRegrouped and CheckpointSaved.
    regrouped: int = 0
    saved: int = 0
    completed: bool = False
    #: Its program has asked to stop training, and may end with code 0 at any time.
    stopping: bool = False
    #: It has said itself why it is going to end.
    cause_told: bool = False
    #: The log that started it is gone.
    foreign: bool = False


class Waiting(_Part, frozen=True, kw_only=True):
    """A start that waits for a slot or for the fork server."""

    command: StartWorker
    order: Order


class Gone(_Part, frozen=True, kw_only=True):
    """A worker that has ended. `durable`: its WorkerExited is in the log."""

    expected: bool
    durable: bool


class Held(_Part, frozen=True, kw_only=True):
    """A state that the node's memory holds: captured here, or a copy of what `origin` captured."""

    task: Name
    shard: int
    iteration: int
    generation: int
    origin: Name
    size_bytes: int
    shards: int
    duration_us: int = 0


class Remembered(_Part, frozen=True, kw_only=True):
    """What one agent tells the next one of the same run directory."""

    #: The boot of the first agent of this run directory; the acts of earlier agents are unknown here.
    since_boot: int = 0
    #: The log that all this is about: its birth, its end when it was last asked, when a person took it (known_log.py).
    log: str = ""
    log_seq: int = 0
    log_taken_us: int = 0
    #: The highest (term, epoch) that a command came with.
    fence: tuple[int, int] = (0, 0)
    workers: dict[WorkerId, Worker] = {}
    waiting: tuple[Waiting, ...] = ()
    memberships: dict[Name, Membership] = {}
    #: Parts of memberships to come (events/seats.py).
    tellings: dict[Name, Telling] = {}
    #: Command id -> "" for applied, else the reason of failure; the newest MAX_ANSWERED.
    answered: dict[str, str] = {}
    #: The newest MAX_GONE workers that have ended.
    gone: dict[WorkerId, Gone] = {}
    #: Workers of a log that is gone, whose exits the fork server may still tell.
    foreign_gone: tuple[WorkerId, ...] = ()
    #: Per task, the last commit that the log holds from this node.
    reported: dict[Name, Position] = {}


MAX_ANSWERED = 256
MAX_GONE = 256
#: Memberships and reports are remembered for so many tasks.
MAX_TASKS = 64


class Link(_Part, frozen=True, kw_only=True):
    """What is known of a worker only as long as this agent lives."""

    connected: bool = True
    #: The newest generation that was sent on this connection.
    told: int = 0
    iteration: int = 0
    #: What its program has declared to be busy with, and whether the log was told.
    busy: Busy | None = None
    busy_told: bool = False


class State(_Part, frozen=True, kw_only=True):
    """Everything that `core.handle` knows."""

    config: Config
    memory: Remembered = Remembered()
    #: adopting: the inventory is not known, or Hellos are still awaited; nothing was appended for the node yet.
    #: draining: the coordinator moves its workers away, and when the last is gone the node leaves.
    phase: Literal["adopting", "up", "draining", "leaving", "left"] = "adopting"
    log_seen: bool = False
    #: The port of the node's rendezvous store; 0: no fork server runs now.
    store_port: int = 0
    #: The port that the newest NodeJoined told.
    joined_port: int = 0
    #: The fork server can run workers as other users.
    separates: bool = False
    links: dict[WorkerId, Link] = {}
    #: Adopted workers that have not said Hello yet.
    unheard: frozenset[WorkerId] = frozenset()
    #: Ended workers whose WorkerExited is in the outbox.
    confirming: frozenset[WorkerId] = frozenset()
    sums: dict[Name, CommitSum] = {}
    #: Per task, the last commit that entered a sum.
    summed: dict[Name, Position] = {}
    #: Task -> the newest generation, where its lead tells for all (MembershipDecided.lead_tells). The next agent need
    #: not know: what it tells besides does no harm.
    lead_tells: dict[Name, int] = {}
    #: Tasks whose commit timer runs.
    paced: frozenset[Name] = frozenset()
    #: "task/shard" of all that the node's memory is known to hold.
    holds: frozenset[str] = frozenset()
    #: By "task/shard": what the node's memory holds and is not told yet, while the timer of the last telling runs.
    untold: dict[str, Held | None] = {}
    leave_reason: str = ""
    #: Who has told it to leave: the coordinator, for good, or since the node was forgotten while it was away.
    ends: Literal["", "for good", "forgotten"] = ""
    #: How long the drain may take that was asked for before or after the node had joined; None: none was.
    drain_s: float | None = None
    #: What the machine's keeper wants of it; None: nothing was heard yet.
    machine: MachineSaw | None = None
    #: Commands whose fault the shell is about to let happen.
    injecting: dict[str, Order] = {}
    #: The command whose health check the shell runs.
    checking: Order | None = None


class Commanded(_Part, frozen=True, kw_only=True):
    """A command of the log. `cause`: its event id. `age_s`: since the log received it. `warrant`: beside it."""

    command: AnyCommand
    term: int
    cause: str
    age_s: float = 0.0
    warrant: str = ""


class Told(_Part, frozen=True, kw_only=True):
    """A membership, a part of one, or peers, read in the log: of a task that this node follows (events/log.py).
    `warrant`: beside it."""

    event: Decision
    term: int
    warrant: str = ""


class WorkerConnected(_Part, frozen=True, kw_only=True):
    """A worker has a (new) connection; it replaces the worker's older one."""

    hello: Hello


class WorkerSaid(_Part, frozen=True, kw_only=True):
    """A message from a connected worker."""

    worker: WorkerId
    message: FromWorker


class WorkerDisconnected(_Part, frozen=True, kw_only=True):
    """The worker's newest connection is broken."""

    worker: WorkerId


class ForkServerSaid(_Part, frozen=True, kw_only=True):
    """With Exited, `log_tail`: the last bytes of the worker's log; `mark`: its last phase mark."""

    message: FromForkServer
    log_tail: str = ""
    mark: Mark | None = None


class Stalled(_Part, frozen=True, kw_only=True):
    """The worker's iteration is late: `mark`, and for how long it has not changed. `stopped`: the kernel's word.
    `times`: how often that was said of this iteration."""

    worker: WorkerId
    mark: Mark
    still_us: int
    stopped: bool
    times: int = 1


class ForkServerDied(_Part, frozen=True, kw_only=True):
    """Its process is known to have ended; the kernel has ended its workers with it. `cause`: what ended it."""

    cause: ExitCause = "signalled"


TimerName: TypeAlias = Literal["adopt", "commits", "stop", "wait", "held", "busy", "drain"]


class TimerFired(_Part, frozen=True, kw_only=True):
    """`key`: what ArmTimer named: a worker, a task, or ""."""

    name: TimerName
    key: str


class StateHeld(_Part, frozen=True, kw_only=True):
    """The node's memory holds a state that no worker here has told of: a copy has come, or it was there before us."""

    held: Held


class AcceleratorSaw(_Part, frozen=True, kw_only=True):
    """What was found about an accelerator (accelerators/); `worker` runs on it, "" = none."""

    accelerator: str
    worker: str
    kind: ErrorKind | None
    xid: int
    message: str
    needs: RepairNeed = ""
    foretells: bool = False


class MachineSaw(_Part, frozen=True, kw_only=True):
    """The keeper of the machine wants this of it now (agents/kubernetes/)."""

    hold: MachineHold
    reason: str


class LogSeen(_Part, frozen=True, kw_only=True):
    """The log can be reached. `identity`: its stream's birth, "" where it cannot be told which one it is. `last_seq`:
    its end. `term`: its newest, 0: not known. `taken_us`: when a person last took a log by name, as it says."""

    identity: str
    last_seq: int = 0
    term: int = 0
    taken_us: int = 0


class Appended(_Part, frozen=True, kw_only=True):
    """The log holds an observation that was appended with `confirm`."""

    event: Observation


class NodeFaultInjected(_Part, frozen=True, kw_only=True):
    """An InjectIntoNode was done, or (`reason`) could not be."""

    command_id: str
    reason: str


class Unreadable(_Part, frozen=True, kw_only=True):
    """A command came that this version cannot read; `reason`: why. `cause`: its event id."""

    command_id: str
    cause: str
    reason: str


class Checked(_Part, frozen=True, kw_only=True):
    """A RunCheck has ended. `detail`: what was found."""

    command_id: str
    passed: bool
    duration_us: int
    detail: str


class Drain(_Part, frozen=True, kw_only=True):
    """The node is to leave as soon as the coordinator has moved its workers away, and within `limit_s` anyhow."""

    reason: str
    limit_s: float


class Leave(_Part, frozen=True, kw_only=True):
    """Stop everything: the node is to leave the cluster."""

    reason: str


class HandOver(_Part, frozen=True, kw_only=True):
    """This agent ends, its workers stay for the next one."""


Input: TypeAlias = (
    Commanded | Told | WorkerConnected | WorkerSaid | WorkerDisconnected | ForkServerSaid | ForkServerDied | Stalled
    | AcceleratorSaw | MachineSaw | TimerFired | LogSeen | Appended | StateHeld | NodeFaultInjected | Checked
    | Unreadable | Drain | Leave | HandOver
)  # fmt: skip


class Append(_Part, frozen=True, kw_only=True):
    """Put an observation into the outbox. `confirm`: feed back Appended once the log holds it."""

    event: Observation
    caused_by: str = ""
    confirm: bool = False


class TellWorker(_Part, frozen=True, kw_only=True):
    """Send a worker a message."""

    worker: WorkerId
    message: ToWorker


class TellForkServer(_Part, frozen=True, kw_only=True):
    """Send the fork server a message."""

    message: ToForkServer


class ArmTimer(_Part, frozen=True, kw_only=True):
    """Feed TimerFired(name, key) after `after_s`; replaces a running timer of the same name and key."""

    name: TimerName
    key: str
    after_s: float


class InjectIntoNode(_Part, frozen=True, kw_only=True):
    """Inject an ordered fault into this node (node_faults.py), and feed NodeFaultInjected."""

    fault: Fault
    command_id: str


class RunCheck(_Part, frozen=True, kw_only=True):
    """Check the node's health (health.py) by `argv`, empty: by the self-test, and feed Checked within `limit_s`."""

    command_id: str
    argv: tuple[str, ...]
    limit_s: float
    reason: str


class Disconnect(_Part, frozen=True, kw_only=True):
    """Close the connection of a worker that this agent did not start. `why` is for the log of the agent."""

    worker: WorkerId
    why: str


class CopyState(_Part, frozen=True, kw_only=True):
    """Copy the newest state of the shard to the first of `peers` that takes it."""

    task: Name
    shard: int
    peers: tuple[MemoryService, ...]


class ForgetLog(_Part, frozen=True, kw_only=True):
    """What was read of the log before, and what is still to be told to it, is void."""


class Finish(_Part, frozen=True, kw_only=True):
    """The node has left: send what the outbox holds, retire the fork server, end the agent."""


Action: TypeAlias = (
    Append | TellWorker | TellForkServer | ArmTimer | CopyState | InjectIntoNode | RunCheck | Disconnect | ForgetLog
    | Finish
)  # fmt: skip
