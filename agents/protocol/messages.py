"""What an agent, its fork server and its workers say to each other over Unix sockets.

Frames: 4 bytes big-endian length, then msgpack of one tagged struct; at most MAX_FRAME_BYTES.
Both directions are decoded strictly; a bad frame closes the connection and is logged, nothing more.

Rules
-----
* A worker connects, says `Hello`, and may be asked anything at any time; it connects again when the
  agent restarts and then says where it stands. It never acts on a membership of a lower generation.
* The fork server obeys one agent at a time (the newest connection); without one for the lease time it
  kills its workers and ends.
* Nothing here may import torch: the agent uses this module as well.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from agents.protocol.flight import Flight, TellFlight
from agents.protocol.identity import Identity
from agents.protocol.message import Message
from agents.protocol.sum_order import Sum
from events.vocabulary import (
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


class Placed(Message, frozen=True, kw_only=True):
    """What happened at an iteration of a group."""

    generation: Count
    iteration: Count


class Slower(Placed, frozen=True, kw_only=True):
    """See events.vocabulary.StragglerSeen."""

    straggler: WorkerId
    straggler_node: Name
    rank: Count
    factor: Factor


# --- worker -> agent -----------------------------------------------------------------------------


class Hello(Message, frozen=True, kw_only=True):
    """First message of every connection. `generation` 0: no membership yet."""

    worker: WorkerId
    task: Name
    pid: Positive
    generation: Count
    ready: bool
    #: It understands TellFlight.
    has_flight: bool = False


class Ready(Message, frozen=True, kw_only=True):
    """The model is built (and the replica's own group is up): waiting for a membership."""


class Regrouped(Placed, frozen=True, kw_only=True):
    """See events.vocabulary.WorkerRegrouped."""

    dealt: Count
    duration_us: Count
    source: StateSource
    others_dealt: Count = 0


class Parked(Placed, frozen=True, kw_only=True):
    """Left the group at an iteration boundary for a membership without this worker; waits for Quit.

    Where no present member stays in the new membership, the lead saves before it parks: to storage, or where the
    membership says `handover`, to the nodes' memory.
    """


class Committed(Message, frozen=True, kw_only=True):
    """One iteration was committed; sent by the lead (first member) alone, after every step.

    The agent sums these up to at most one StepCommitted a second and task. `checksum`: of the parameters after
    iteration `checked`, `sums`: of the gradients' sums of the next (Checksums); 0: none was made.
    """

    generation: Count
    iteration: Positive
    samples: Count
    samples_digest: SamplesDigest
    loss: float
    duration_us: Count
    micro_batches_by_rank: tuple[Count, ...]
    redone: Count
    checked: Count = 0
    checksum: SamplesDigest = 0
    sums: SamplesDigest = 0


class Trouble(Message, frozen=True, kw_only=True):
    """An exception or a broken collective, told before anything else is done about it. `peer`: the other end of the
    connection that broke, where that is known; `lost`: all members of the group to whom it was dead by then."""

    kind: ErrorKind
    generation: Count
    iteration: Count
    phase: Phase
    message: Text
    detail: LongText
    peer: WorkerOrNone = ""
    lost: tuple[WorkerId, ...] = ()


class Degraded(Placed, frozen=True, kw_only=True):
    """See events.vocabulary.DegradationObserved; sent by the lead alone."""

    iteration_us: Count
    usual_us: Count
    slowest: WorkerOrNone
    compute_us: Count
    others_us: Count


class Straggles(Slower, frozen=True, kw_only=True):
    """See events.vocabulary.StragglerObserved; sent by the first replica's worker of each shard."""

    compute_us: Count
    others_us: Count
    since_iteration: Count
    since_us: Count


class CaughtUp(Slower, frozen=True, kw_only=True):
    """See events.vocabulary.StragglerRecovered."""


class Suspected(Placed, frozen=True, kw_only=True):
    """See events.vocabulary.CorruptionSuspected."""

    sign: CorruptionSign
    suspect: WorkerOrNone
    value: float
    usual: float


class Busy(Message, frozen=True, kw_only=True):
    """The program has begun what it declares, for `at_most_us`; `what` "": it is over."""

    what: Text
    at_most_us: Count


class Waits(Message, frozen=True, kw_only=True):
    """The worker follows the membership of `generation`, and has waited for the others for a while."""

    generation: Count


class StopWanted(Message, frozen=True, kw_only=True):
    """See events.vocabulary.StopAsked."""

    iteration: Count
    reason: Text
    left: bool = False


class Saved(Message, frozen=True, kw_only=True):
    """A checkpoint of `iteration` is on storage."""

    iteration: Count
    path: Text
    size_bytes: Count
    duration_us: Count


class Unsaved(Message, frozen=True, kw_only=True):
    """See events.vocabulary.SaveFailed."""

    iteration: Count
    by: Saver
    reason: Text


class Captured(Message, frozen=True, kw_only=True):
    """The node's memory holds the state after `iteration`; training stood still for `duration_us`.

    `shards`: how many make up a replica of this layout.
    """

    shard: Count
    iteration: Count
    generation: Count
    size_bytes: Count
    shards: Count
    duration_us: Count


class Taken(Message, frozen=True, kw_only=True):
    """See events.vocabulary.StateTaken."""

    generation: Count
    source: StateSource
    iteration: Count
    size_bytes: Count
    duration_us: Count
    tried: tuple[Text, ...]
    storage_iteration: Count
    saved_us: Count
    resharded_from: Text


class Completed(Message, frozen=True, kw_only=True):
    """All iterations are done; sent by the lead alone. The process exits 0 afterwards."""

    iteration: Count
    loss: float
    params_digest: Text


# --- fork server -> agent, on a worker's connection ----------------------------------------------


class Connected(Message, frozen=True, kw_only=True):
    """The fork server has made this connection and handed it to this worker: what follows is the worker's own word."""

    worker: WorkerId
    task: Name
    pid: Positive


# --- agent -> worker -----------------------------------------------------------------------------


#: A warrant and a node's place; the place grows with the square root of the number of nodes (events/roster.py).
Warrant: TypeAlias = Annotated[str, Meta(max_length=56 * 1024)]


class Passes(msgspec.Struct, frozen=True, kw_only=True):
    """What a node shows to peers of a membership that give states over TLS alone (agents/passes.py): `by_node`, a pass
    for each, and the membership's `warrant` with the node's place. `ca`: who has signed the peers' certificates, in
    PEM."""

    ca: LongText
    by_node: tuple[tuple[Name, LongText], ...]
    warrant: Warrant = ""

    def of(self, node: str) -> str:
        """What is shown to this node, "" for nothing."""
        return next((f"{text}.{self.warrant}" for name, text in self.by_node if name == node), "")


class Membership(Message, frozen=True, kw_only=True):
    """See events.vocabulary.MembershipDecided: the members in rank order, the new group's store.

    `passes`: None: states travel in clear.
    `warrant`: between the agents of a run directory alone: of the newest membership that has this node, with its place
    there (events/warrants.py); "": none.
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


class Quit(Message, frozen=True, kw_only=True):
    """End yourself in good order (exit code 0), soon. The agent kills what does not listen."""

    reason: Text


class Inject(Message, frozen=True, kw_only=True):
    """Let the ordered fault happen in this process (injection.py)."""

    fault: Fault


# --- agent -> fork server ------------------------------------------------------------------------


class Spawn(Message, frozen=True, kw_only=True):
    """Fork a worker. `log_path`: its stdout and stderr. `slot`: its GPU (CUDA_VISIBLE_DEVICES). `user`: what the
    worker becomes first; None: it stays what the fork server is."""

    launch: Launch
    log_path: Text
    slot: Count
    user: Identity | None = None


class Launch(Message, frozen=True, kw_only=True):
    """All that a worker process needs to know at birth. `agent_socket`: for fork servers of older versions."""

    worker: WorkerId
    task: Name
    node: Name
    address: Text
    agent_socket: Text
    replica: Count
    shard: Count
    store: StoreAddress
    spec: TaskSpec
    #: What the fork server fills in, of descriptors that the worker is born with: the node's memory of this shard's
    #: state (memory.py) with its bound, and the worker's mark (marks.py), as paths to be opened; its line (line.py).
    memory: Text = ""
    memory_max_bytes: Count = 0
    mark: Text = ""
    line_fd: Annotated[int, Meta(ge=-1)] = -1


class Kill(Message, frozen=True, kw_only=True):
    """Signal a worker's process group. By worker, not pid: a pid may be another's by now."""

    worker: WorkerId
    signal: Annotated[int, Meta(ge=1, le=64)]


class Keep(Message, frozen=True, kw_only=True):
    """Hold memory for a shard's state; answered with Kept, whether it was there before or not."""

    task: Name
    shard: Count


class Forget(Message, frozen=True, kw_only=True):
    """Give up the memory of the task's states; of all tasks' where `task` is ""."""

    task: Annotated[str, Meta(max_length=63)]


class Retire(Message, frozen=True, kw_only=True):
    """Kill all workers and end (the agent is going away for good)."""


# --- fork server -> agent ------------------------------------------------------------------------


class Forked(Message, frozen=True, kw_only=True):
    """The fork server has started the worker's process."""

    worker: WorkerId
    pid: Positive


class SpawnFailed(Message, frozen=True, kw_only=True):
    """The fork server could not start the worker's process."""

    worker: WorkerId
    reason: Text


#: Whether the kernel's OOM killer did it.
OomKill: TypeAlias = Literal["yes", "no", "maybe"]


class Exited(Message, frozen=True, kw_only=True):
    """`status` as os.waitpid gives it. Repeated to a new agent until it is acknowledged."""

    worker: WorkerId
    pid: Positive
    status: int
    oom: OomKill = "no"


class ExitedAck(Message, frozen=True, kw_only=True):
    """(agent -> fork server) the exit is known and in the outbox."""

    worker: WorkerId


class Kept(Message, frozen=True, kw_only=True):
    """The fork server holds memory for the shard's state: its descriptor `fd`, at most `max_bytes` long."""

    task: Name
    shard: Count
    fd: Count
    max_bytes: Count


class KeepFailed(Message, frozen=True, kw_only=True):
    """The fork server could not keep the memory of this shard."""

    task: Name
    shard: Count
    reason: Text


class Inventory(Message, frozen=True, kw_only=True):
    """Greets every new agent: the store's port, the live workers with their launches' task, the memory held.

    `schema`: what the fork server reads of the log's vocabulary. `separates`: it has the privilege to run workers as
    other users, and runs none as its own.
    """

    store_port: Annotated[int, Meta(ge=1, le=65535)]
    workers: tuple[InventoryWorker, ...]
    kept: tuple[Kept, ...] = ()
    schema: Positive = 1
    separates: bool = False


class InventoryWorker(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One live worker of the fork server."""

    worker: WorkerId
    task: Name
    pid: Positive
    slot: Count


FromWorker: TypeAlias = (
    Hello | Ready | Regrouped | Parked | Committed | Trouble | Degraded | Straggles | CaughtUp
    | Suspected | Saved | Unsaved | Captured | Taken | Completed | Busy | Waits | StopWanted | Flight
)  # fmt: skip
ToWorker: TypeAlias = Membership | Quit | Inject | TellFlight
ToForkServer: TypeAlias = Spawn | Kill | Keep | Forget | Retire | ExitedAck | Sum
FromForkServer: TypeAlias = Forked | SpawnFailed | Exited | Kept | KeepFailed | Inventory
