"""The messages between an agent, its fork server and its workers over Unix sockets.

Frames: 4 bytes big-endian length, then msgpack of one tagged struct; at most MAX_FRAME_BYTES.
Both directions are decoded strictly; a bad frame closes the connection and is logged, nothing more.

Rules
-----
* A worker connects, sends `Hello`, and may be asked anything at any time; it connects again when the
  agent restarts and then reports its position. It never acts on a membership of a lower generation.
* The fork server serves one agent at a time (the newest connection); without one for the lease time it
  kills its workers and ends.
* Nothing here may import torch: the agent uses this module as well.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from unicrond.agents.protocol.flight import Flight, TellFlight
from unicrond.agents.protocol.identity import Identity
from unicrond.agents.protocol.message import WireMessage
from unicrond.agents.protocol.sum_order import Sum
from unicrond.events.vocabulary import (
    CorruptionSign,
    Count,
    ErrorKind,
    Factor,
    Fault,
    LongText,
    Member,
    MemoryService,
    Name,
    Phase,
    Positive,
    SamplesDigest,
    Saver,
    StateSource,
    StoreAddress,
    TaskSpec,
    Text,
    WorkerId,
    WorkerOrNone,
)

#: Room for a membership of as many workers as there can be, all of them joiners, with the longest names.
MAX_FRAME_BYTES = 40 * 1024 * 1024


class GroupMessage(WireMessage, frozen=True, kw_only=True):
    """Base: an event at an iteration of a group."""

    generation: Count
    iteration: Count


class StragglerMessage(GroupMessage, frozen=True, kw_only=True):
    """See unicrond.events.vocabulary.StragglerSeen."""

    straggler: WorkerId
    straggler_node: Name
    rank: Count
    factor: Factor


# --- worker -> agent -----------------------------------------------------------------------------


class Hello(WireMessage, frozen=True, kw_only=True):
    """First message of every connection. `generation` 0: no membership yet."""

    worker: WorkerId
    task: Name
    pid: Positive
    generation: Count
    ready: bool
    #: It understands TellFlight.
    has_flight: bool = False


class Ready(WireMessage, frozen=True, kw_only=True):
    """The model is built (and the replica's own group is up): waiting for a membership."""


class Regrouped(GroupMessage, frozen=True, kw_only=True):
    """See unicrond.events.vocabulary.WorkerJoinedGroup."""

    micro_batches_assigned: Count
    duration_us: Count
    source: StateSource
    micro_batches_assigned_elsewhere: Count = 0


class Parked(GroupMessage, frozen=True, kw_only=True):
    """The worker has left the group at an iteration boundary, for a membership without it, and waits for Quit.

    Where no present member stays in the new membership, the leader saves before it parks: to storage, or with the
    membership's `handover`, to the nodes' memory.
    """


class IterationCommitted(WireMessage, frozen=True, kw_only=True):
    """One iteration was committed; sent by the leader (first member) alone, after every step.

    The agent sums these up to at most one StepCommitted a second and task. `checksum`: of the parameters after
    iteration `checked`, `sums`: of the gradients' sums of the next (Checksums); 0: there is none.
    """

    generation: Count
    iteration: Positive
    samples: Count
    samples_digest: SamplesDigest
    loss: float
    duration_us: Count
    micro_batches_by_rank: tuple[Count, ...]
    micro_batches_repeated: Count
    checked: Count = 0
    checksum: SamplesDigest = 0
    sums: SamplesDigest = 0


class ErrorReport(WireMessage, frozen=True, kw_only=True):
    """An exception or a broken collective, reported before anything else is done about it. `peer`: the other end of the
    broken connection, where that is known; `lost_peers`: all members of the group to whom the connection was dead by
    then."""

    kind: ErrorKind
    generation: Count
    iteration: Count
    phase: Phase
    message: Text
    detail: LongText
    peer: WorkerOrNone = ""
    lost_peers: tuple[WorkerId, ...] = ()


class Degraded(GroupMessage, frozen=True, kw_only=True):
    """See unicrond.events.vocabulary.DegradationObserved; sent by the leader alone."""

    iteration_us: Count
    usual_us: Count
    slowest: WorkerOrNone
    compute_us: Count
    others_us: Count


class StragglerReport(StragglerMessage, frozen=True, kw_only=True):
    """See unicrond.events.vocabulary.StragglerObserved; sent by the first replica's worker of each shard."""

    compute_us: Count
    others_us: Count
    since_iteration: Count
    since_us: Count


class StragglerCleared(StragglerMessage, frozen=True, kw_only=True):
    """See unicrond.events.vocabulary.StragglerRecovered."""


class Suspected(GroupMessage, frozen=True, kw_only=True):
    """See unicrond.events.vocabulary.CorruptionSuspected."""

    sign: CorruptionSign
    suspect: WorkerOrNone
    value: float
    usual: float


class Busy(WireMessage, frozen=True, kw_only=True):
    """The program has begun the declared work `section`, for at most `limit_us`; "": that work is over."""

    section: Text
    limit_us: Count


class MembershipWait(WireMessage, frozen=True, kw_only=True):
    """The worker follows the membership of `generation`, and has waited for the others for a while."""

    generation: Count


class StopRequest(WireMessage, frozen=True, kw_only=True):
    """See unicrond.events.vocabulary.StopRequested."""

    iteration: Count
    reason: Text
    has_left_loop: bool = False


class SaveFinished(WireMessage, frozen=True, kw_only=True):
    """A checkpoint of `iteration` is on storage."""

    iteration: Count
    path: Text
    size_bytes: Count
    duration_us: Count


class SaveError(WireMessage, frozen=True, kw_only=True):
    """See unicrond.events.vocabulary.SaveFailed."""

    iteration: Count
    saver: Saver
    reason: Text


class Captured(WireMessage, frozen=True, kw_only=True):
    """The node's memory holds the state after `iteration`; training was halted for `duration_us`.

    `shards`: how many make up a replica of this layout.
    """

    shard: Count
    iteration: Count
    generation: Count
    size_bytes: Count
    shards: Count
    duration_us: Count


class StateLoadReport(WireMessage, frozen=True, kw_only=True):
    """See unicrond.events.vocabulary.StateLoaded."""

    generation: Count
    source: StateSource
    iteration: Count
    size_bytes: Count
    duration_us: Count
    failed_sources: tuple[Text, ...]
    storage_iteration: Count
    saved_us: Count
    resharded_from: Text


class Completed(WireMessage, frozen=True, kw_only=True):
    """All iterations are done; sent by the leader alone. The process exits 0 afterwards."""

    iteration: Count
    loss: float
    params_digest: Text


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
    """See unicrond.events.vocabulary.MembershipDecided: the members in rank order, the new group's store.

    `passes`: None: states travel in clear. `warrant`: only between the agents of a run directory: that of the newest
    membership with this node, with its place there (events/trust/membership_certificates.py); "": none.
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


class Quit(WireMessage, frozen=True, kw_only=True):
    """End yourself in good order (exit code 0), soon. The agent kills a worker that does not."""

    reason: Text


class InjectIntoWorker(WireMessage, frozen=True, kw_only=True):
    """Inject the ordered fault into this process (injection.py)."""

    fault: Fault


# --- agent -> fork server ------------------------------------------------------------------------


class Spawn(WireMessage, frozen=True, kw_only=True):
    """Fork a worker. `log_path`: its stdout and stderr. `slot`: its GPU (CUDA_VISIBLE_DEVICES). `user`: whom the
    worker becomes first; None: it keeps the fork server's user."""

    launch: Launch
    log_path: Text
    slot: Count
    user: Identity | None = None


class Launch(WireMessage, frozen=True, kw_only=True):
    """All that a worker process needs to know at its start. `agent_socket`: for fork servers of older versions."""

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
    workers as other users, and runs none as its own.
    """

    store_port: Annotated[int, Meta(ge=1, le=65535)]
    workers: tuple[InventoryWorker, ...]
    reserved_memory: tuple[MemoryReserved, ...] = ()
    schema: Positive = 1
    separates: bool = False


class InventoryWorker(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One live worker of the fork server."""

    worker: WorkerId
    task: Name
    pid: Positive
    slot: Count


FromWorker: TypeAlias = (
    Hello | Ready | Regrouped | Parked | IterationCommitted | ErrorReport | Degraded | StragglerReport | StragglerCleared
    | Suspected | SaveFinished | SaveError | Captured | StateLoadReport | Completed | Busy | MembershipWait
    | StopRequest | Flight
)  # fmt: skip
ToWorker: TypeAlias = GroupMembership | Quit | InjectIntoWorker | TellFlight
ToForkServer: TypeAlias = Spawn | Kill | ReserveMemory | ReleaseMemory | Retire | ProcessExitAck | Sum
FromForkServer: TypeAlias = ProcessForked | SpawnFailed | ProcessExited | MemoryReserved | ReserveFailed | Inventory
