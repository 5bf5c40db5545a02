"""The messages between an agent, its fork server and its workers over Unix sockets.

Frames: 4 bytes big-endian length, then msgpack of one tagged struct; at most MAX_FRAME_BYTES.
Both directions are decoded strictly; a bad frame closes the connection and is logged, nothing more.

Rules
-----
* A worker sends the events of the log themselves where it knows all that they say (`WorkerReport`), and messages of
  its own where not.
* A worker connects, sends `Hello`, and may be asked anything at any time; it connects again when the
  agent restarts and then reports its position. It never acts on a membership of a lower generation.
* The fork server serves one agent at a time (the newest connection); without one for the lease time it
  kills its workers and ends.
* Nothing here may import torch: the agent uses this module as well.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias, TypedDict

import msgspec
from msgspec import Meta

from unicrond.events.queries.node_checks import Library, Pair, Seconds, Token
from unicrond.events.queries.worker_queries import COLLECTIVES_MAX, Collective
from unicrond.events.vocabulary import (
    CheckpointSaved,
    Checksums,
    CorruptionSuspected,
    Count,
    DegradationObserved,
    DivergenceObserved,
    ErrorReported,
    Fault,
    LongText,
    Member,
    MemoryService,
    Name,
    Positive,
    SamplesDigest,
    SaveFailed,
    SnapshotStored,
    StateLoaded,
    StopRequested,
    StoreAddress,
    StragglerObserved,
    StragglerRecovered,
    TaskCompleted,
    TaskSpec,
    Text,
    WorkerBusy,
    WorkerId,
    WorkerJoinedGroup,
    WorkerPaused,
    WorkerReady,
    WorkerWaiting,
)
from unicrond.events.vocabulary.stacks import StackText, Standings

#: Exit codes of workers on which worker and agent agree.
EXIT_NO_AGENT = 69
#: EX_TEMPFAIL: the trainer waited too long for a membership, saved its state and stopped.
EXIT_NO_MEMBERSHIP = 75
#: The advice to a person whose program ends before its training does.
LEFT_EARLY = "let hook.steps() run to its end, or call hook.stop(reason) first; `iterations` sets the task's length"


class Identity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A user of this node, as a task runs under it. `groups`: all of the user's."""

    name: Text
    uid: Positive
    gid: Count
    groups: tuple[Count, ...]
    home: Text


class WireMessage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, tag=True):
    """Base of all messages; the class name is the wire tag, unless `tag` names another. A field at its default is left
    out: processes of a version that lacks it may be at the other end (a fork server and its workers outlive their
    agent)."""


#: Room for a membership of as many workers as there can be, all of them joiners, with the longest names.
MAX_FRAME_BYTES = 40 * 1024 * 1024
#: What a worker says: an iteration's micro-batches, of as many ranks as there can be.
MAX_REPORT_BYTES = 1024 * 1024


class Reporter(TypedDict):
    """The fields by which the event of a worker names it: `WorkerReady(**launch.reporter)`."""

    node: Name
    task: Name
    worker: WorkerId


# --- worker -> agent -----------------------------------------------------------------------------


class Hello(WireMessage, frozen=True, kw_only=True):
    """The first message of every connection. `generation` 0: no membership yet."""

    worker: WorkerId
    task: Name
    pid: Positive
    generation: Count
    ready: bool
    #: It understands TellFlight; TellStacks; repeats their numbers in its answers.
    has_flight: bool = False
    has_stacks: bool = False
    repeats_numbers: bool = False


class IterationCommitted(WireMessage, frozen=True, kw_only=True):
    """An iteration was committed; sent by the leader (first member) alone, after every step.

    The agent sums these up to at most one StepCommitted a second and task: so this is no event. `checksums`: those that
    were made in this iteration. `is_plain`: no checkpoint was under way, nor any section that the program declares.
    """

    generation: Count
    iteration: Positive
    samples: Count
    samples_digest: SamplesDigest
    loss: float
    duration_us: Count
    micro_batches_by_rank: tuple[Count, ...]
    micro_batches_repeated: Count
    checksums: Checksums | None = None
    is_plain: bool = True


class Flight(WireMessage, frozen=True, kw_only=True):
    """(worker -> agent) the content of the flight recorder, the oldest first. `trouble`: why there is nothing.
    `question`: the number of the question. `standings`: in the process groups of its replica."""

    collectives: Annotated[tuple[Collective, ...], Meta(max_length=COLLECTIVES_MAX)] = ()
    trouble: Text = ""
    question: Count = 0
    standings: Standings = ()


class Stacks(WireMessage, frozen=True, kw_only=True):
    """(worker -> agent) where its threads stand, the main thread first. `question`: the number of the question."""

    text: StackText
    question: Count = 0


# --- fork server -> agent, on a worker's connection ----------------------------------------------


class ConnectionOwner(WireMessage, frozen=True, kw_only=True):
    """The fork server has made this connection and handed it to this worker: all further messages are the worker's."""

    worker: WorkerId
    task: Name
    pid: Positive


# --- agent -> worker -----------------------------------------------------------------------------


#: A warrant and a node's place; the place grows with the square root of the number of nodes
#: (events/trust/membership_digest.py).
Warrant: TypeAlias = Annotated[str, Meta(max_length=56 * 1024)]


class Passes(msgspec.Struct, frozen=True, kw_only=True):
    """A node's credentials for peers of a membership that serve states over TLS alone (agents/memory/peer_tokens.py):
    `by_node`, a pass for each, and the membership's `warrant` with the node's place. `ca`: the authority that has
    signed the peers' certificates, in PEM.
    """

    ca: LongText
    by_node: tuple[tuple[Name, LongText], ...]
    warrant: Warrant = ""

    def of(self, node: str) -> str:
        """Return the credential to show to this node, "" for none."""
        return next((f"{text}.{self.warrant}" for name, text in self.by_node if name == node), "")


class GroupMembership(WireMessage, frozen=True, kw_only=True):
    """The membership that a MembershipDecided and its parts tell: the members in rank order, the new group's store.

    `passes`: None: states travel in clear. `warrant`: only between the agents of a run directory: that of the newest
    membership with this node, with its place there (events/trust/membership_certificates.py); "": none.
    `storage_iteration`: as in MembershipDecided; None where the head is older.
    """

    generation: Positive
    members: tuple[Member, ...]
    joiners: tuple[WorkerId, ...]
    urgent: bool
    store: StoreAddress
    peers: tuple[MemoryService, ...] = ()
    mtbf_us: Count = 0
    handover: bool = False
    stop: Text = ""
    passes: Passes | None = None
    warrant: Warrant = ""
    storage_iteration: Count | None = None


class Quit(WireMessage, frozen=True, kw_only=True):
    """End yourself in good order (exit code 0), soon. The agent kills a worker that does not."""

    reason: Text


class InjectIntoWorker(WireMessage, frozen=True, kw_only=True):
    """Inject the ordered fault into this process (injection.py)."""

    fault: Fault


class TellFlight(WireMessage, frozen=True, kw_only=True):
    """(agent -> worker) send the content of the flight recorder. Only to a worker whose Hello says that it can.
    `number`: to be repeated in the answer; 0: the worker cannot."""

    number: Count = 0


class TellStacks(WireMessage, frozen=True, kw_only=True):
    """(agent -> worker) send the threads' stacks as they are before any later message takes effect. Only to a worker
    whose Hello says that it can. `number`: as in TellFlight."""

    number: Count = 0


# --- agent -> fork server ------------------------------------------------------------------------


class Spawn(WireMessage, frozen=True, kw_only=True):
    """Fork a worker. `log_path`: its stdout and stderr. `slot`: its GPU (CUDA_VISIBLE_DEVICES). `user`: whom the
    worker becomes first; None: it keeps the fork server's user."""

    launch: Launch
    log_path: Text
    slot: Count
    user: Identity | None = None


class Launch(WireMessage, frozen=True, kw_only=True):
    """Everything that a worker process needs to know at its start. `agent_socket`: for fork servers of older
    versions."""

    worker: WorkerId
    task: Name
    node: Name
    address: Text
    agent_socket: Text
    replica: Count
    shard: Count
    store: StoreAddress
    spec: TaskSpec
    #: Filled in by the fork server, for descriptors that the worker inherits: the node's memory of this shard's state
    #: (memory.py) with its bound, and the worker's mark (marks.py), as paths to be opened; its line (worker_line.py).
    memory: Text = ""
    memory_max_bytes: Count = 0
    mark: Text = ""
    line_fd: Annotated[int, Meta(ge=-1)] = -1

    @property
    def reporter(self) -> Reporter:
        """Return the fields by which an event names this worker."""
        return Reporter(node=self.node, task=self.task, worker=self.worker)


class Kill(WireMessage, frozen=True, kw_only=True):
    """Signal a worker's process group. By worker, not pid: the pid may belong to another process by now."""

    worker: WorkerId
    signal: Annotated[int, Meta(ge=1, le=64)]


class ReserveMemory(WireMessage, frozen=True, kw_only=True):
    """Reserve memory for a shard's state; answered with MemoryReserved, whether it was there before or not."""

    task: Name
    shard: Count


class ReleaseMemory(WireMessage, frozen=True, kw_only=True):
    """Release the memory of the task's states; of all tasks' where `task` is ""."""

    task: Annotated[str, Meta(max_length=63)]


class Retire(WireMessage, frozen=True, kw_only=True):
    """Kill all workers and end (the agent ends for good)."""


class Sum(WireMessage, frozen=True, kw_only=True):
    """(agent -> fork server) fork a process that sums with other nodes (pair_sum.py; see LinksCheck). `address`: this
    node's. `answer`: the Unix socket to which the process sends the outcome. `gpu`: the one that NCCL sums on.
    `asked_s`: the time of the request, by the machine's monotonic clock."""

    address: Text
    token: Token
    pairs: tuple[Pair, ...]
    library: Library
    limit_s: Seconds
    answer: Text
    asked_s: float
    gpu: Text = ""


# --- fork server -> agent ------------------------------------------------------------------------


class ProcessForked(WireMessage, frozen=True, kw_only=True):
    """The fork server has started the worker's process."""

    worker: WorkerId
    pid: Positive


class SpawnFailed(WireMessage, frozen=True, kw_only=True):
    """The fork server could not start the worker's process."""

    worker: WorkerId
    reason: Text


#: Whether the kernel's OOM killer ended the process.
OomKill: TypeAlias = Literal["yes", "no", "maybe"]


class ProcessExited(WireMessage, frozen=True, kw_only=True):
    """A worker's process has ended. `status`: as from os.waitpid. Repeated to a new agent until it is acknowledged."""

    worker: WorkerId
    pid: Positive
    status: int
    oom: OomKill = "no"


class ProcessExitAck(WireMessage, frozen=True, kw_only=True):
    """(agent -> fork server) the exit is known and in the outbox."""

    worker: WorkerId


class MemoryReserved(WireMessage, frozen=True, kw_only=True):
    """The fork server holds memory for the shard's state: its descriptor `fd`, at most `max_bytes` long."""

    task: Name
    shard: Count
    fd: Count
    max_bytes: Count


class ReserveFailed(WireMessage, frozen=True, kw_only=True):
    """The fork server could not reserve the memory of this shard."""

    task: Name
    shard: Count
    reason: Text


class Inventory(WireMessage, frozen=True, kw_only=True):
    """Greets every new agent: the store's port, the live workers with their launches' task, the memory held.

    `schema`: the one of the log's vocabulary that the fork server reads. `separates`: it has the privilege to run
    workers as other users, and runs none as its own. `degrees`: those of a layout that its hook knows; one of a version
    before cp says none.
    """

    store_port: Annotated[int, Meta(ge=1, le=65535)]
    workers: tuple[InventoryWorker, ...]
    reserved_memory: tuple[MemoryReserved, ...] = ()
    schema: Positive = 1
    separates: bool = False
    degrees: tuple[Name, ...] = ()


class InventoryWorker(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A live worker of the fork server."""

    worker: WorkerId
    task: Name
    pid: Positive
    slot: Count


#: The events that a worker may send, about itself alone: the agent refuses others, and appends these as they are.
WorkerReport: TypeAlias = (
    WorkerReady | WorkerJoinedGroup | WorkerPaused | ErrorReported | DegradationObserved | StragglerObserved
    | StragglerRecovered | CorruptionSuspected | DivergenceObserved | CheckpointSaved | SaveFailed | SnapshotStored
    | StateLoaded | TaskCompleted | WorkerBusy | WorkerWaiting | StopRequested
)  # fmt: skip
FromWorker: TypeAlias = Hello | IterationCommitted | WorkerReport | Flight | Stacks
ToWorker: TypeAlias = GroupMembership | Quit | InjectIntoWorker | TellFlight | TellStacks
ToForkServer: TypeAlias = Spawn | Kill | ReserveMemory | ReleaseMemory | Retire | ProcessExitAck | Sum
FromForkServer: TypeAlias = ProcessForked | SpawnFailed | ProcessExited | MemoryReserved | ReserveFailed | Inventory
