"""What the coordinator believes about the cluster: frozen values, made by the fold alone.

Rules
-----
* Nothing here changes in place. `fold` builds the next state; every other module reads.
* Only what the log said is here: no clock, no connection, nothing that a replay could not rebuild.
* Collections iterate in insertion order, and insertion order is log order: no sets.
"""

from __future__ import annotations

import hashlib
from enum import IntEnum, StrEnum
from typing import Any, Literal

import msgspec

from events.fields import always
from events.vocabulary import (
    Fault,
    FaultKind,
    HangSuspected,
    Member,
    MemoryService,
    RepairNeed,
    ReshapeRequested,
    StoreAddress,
    TaskAssignment,
    TaskSpec,
)
from unicrond.ledger import Ledger


class Severity(IntEnum):
    """SEV1 is the worst (paper, section "error detection and response")."""

    SEV1 = 1
    SEV2 = 2
    SEV3 = 3


class NodeStatus(StrEnum):
    UP = "up"
    LOST = "lost"
    LEFT = "left"


class WorkerStatus(StrEnum):
    """starting -> ready -> member -> parked; stopping and lost can follow any of them.

    starting: commanded; ready: waits for a membership; member: is in the group of `generation`;
    parked: left a group at a boundary; stopping: told to end; lost: its node is gone, or nobody
    asked for it, so it must be stopped as soon as its node can be reached.
    """

    STARTING = "starting"
    READY = "ready"
    MEMBER = "member"
    PARKED = "parked"
    STOPPING = "stopping"
    LOST = "lost"


_ENDING = (WorkerStatus.STOPPING, WorkerStatus.LOST)
_NEVER_TO_TRAIN = (*_ENDING, WorkerStatus.PARKED)


class TaskStatus(StrEnum):
    ACTIVE = "active"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Isolation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an isolated node has been through (isolation.py). `cause`: "hardware", "strikes" (workers ended there); "":
    it is over after a time. `attempts`: checks and repairs that failed, or had no end.

    `command_id`: of the check under way. `repaired`: the repair command has done its work. `pardon`: why a person wants
    it back. `last`, `last_us`: the last outcome, in words, and when.
    """

    cause: str = ""
    attempts: int = 0
    command_id: str = ""
    passed: bool = False
    repaired: bool = False
    pardon: str = ""
    last: str = ""
    last_us: int = 0


class Node(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A host. `isolated`: gets no workers (SEV1, until readmitted). `slots_max`: the most it ever had.

    `cordoned`: people want no new workers on it; `draining`: nor those that it has. `cordon_reason`: why.
    `returns_us`: when it came back from the lost, since it was last isolated; the newest RETURNS_MAX.
    `schema`: what its agent reads (events/schemas.py). `unread`: commands that it could not, since it joined.
    `injected`: somebody has ordered its loss; its next return is none of these.
    """

    name: str
    status: NodeStatus
    slots: int
    slots_max: int
    address: str
    store: StoreAddress
    agent_boot: int
    joined_us: int
    version: str = always("")
    isolated: bool = always(False)
    isolation_over: bool = always(False)
    isolations: int = always(0)
    cordoned: bool = always(False)
    draining: bool = always(False)
    cordon_reason: str = always("")
    returns_us: tuple[int, ...] = always(())
    reason: str = always("")
    commands: int = always(0)
    memory: MemoryService | None = always(None)
    schema: int = 1
    unread: int = 0
    injected: bool = False
    isolation: Isolation | None = None
    needs: RepairNeed = ""

    @property
    def schedulable(self) -> bool:
        """May carry workers; a cordoned node those that it has (`reconcile.capacity`)."""
        return self.status is NodeStatus.UP and not self.isolated and not self.draining


class Worker(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One process of a task. `generation`: the last membership whose group it has joined, 0 = none.

    `injected`: the fault that somebody ordered for it, and that is no strike. `answered`: the last membership that it
    said to wait in for the others. `busy`: with what its program has declared, for at most `busy_us`; "" = nothing.
    """

    worker: str
    node: str
    replica: int
    shard: int
    status: WorkerStatus
    command_id: str = always("")
    pid: int = always(0)
    generation: int = always(0)
    injected: FaultKind | Literal[""] = ""
    answered: int = 0
    busy: str = ""
    busy_us: int = 0

    @property
    def alive(self) -> bool:
        """Runs, or will, and nobody has ordered its end."""
        return self.status not in _ENDING

    @property
    def can_train(self) -> bool:
        """Can be, or become, part of a group; who has parked never comes back."""
        return self.status not in _NEVER_TO_TRAIN


class Membership(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Who trains a task, as the log holds it (see events.vocabulary.MembershipDecided)."""

    generation: int
    members: tuple[Member, ...]
    joiners: tuple[str, ...]
    urgent: bool
    store: StoreAddress
    decided_us: int


class KeptState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a node has last told of the task's state in its memory (see events.vocabulary.StateKept)."""

    node: str
    shard: int
    iteration: int
    generation: int
    origin: str
    size_bytes: int
    shards: int = always(0)


class Straggler(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A member that takes `factor` times as long as the other replicas (see events.vocabulary.StragglerObserved)."""

    worker: str
    node: str
    factor: float
    compute_us: int
    others_us: int
    since_iteration: int
    since_us: int


class Task(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A training job.

    `iteration`: the last one committed; it falls back when the last replica was lost. `best_iteration` never does.
    `strikes`: per node, blows to the task there since it last committed a step there. Workers that end
    together are one blow; a worker that was started after it makes the next.
    `stuck`: blows anywhere since the task last committed a new iteration.
    `struck_below`: per node, and "" for the task: workers of lower numbers belong to the last blow counted.
    `reattempts`: generations of the same members, one after the other, none of which has been calm (CALM_ITERATIONS).
    `ends`: per node, of how many broken links it was an end, since the task last was calm there with others (in units
    of blame.py); `breaks`: how often a worker there was given up for that; `unclear`: how often of these another was as
    likely at fault. `formed_after`: the iteration at which the newest membership was decided.
    `peers`: where copies of its state go, as its nodes were told last.
    `kept`: by "node/shard", what nodes keep of the state in memory; they may hold newer by now.
    `suspicions`: per member, the last that was told of its standing still in the present generation (hangs.py).
    `stragglers`: members that are slower than the other replicas, by worker.
    `timings`: microseconds per iteration by the last TIMINGS_MAX reports of the present generation, its first
    WARM_UP left out (`warm`: how many have come). `measured`: workers -> FLOP/s that were measured (waf.py).
    `transition_us`: D_transition, a moving average over the task's transitions; 0 = none yet.
    `unread`: the newest generation whose command a node could not read (folding/commands.py); 0 = none.
    `stop`: why its program wants it to end before its last iteration; `left`: who has left the training loop for that,
    and after which iteration. `early`: how often its program has ended in mid-training without a word (`left_early`),
    since it last was calm; workers of numbers below `early_below` belong to the last time.
    `meetings`: deadlines for a meeting that have passed and ended nobody.
    `reshape`: the layout that it is asked to have (reshaping.py); `reshaped_us`: when it last got another; then
    `submitted_seq` is the number of that event, since when it is what it is.
    """

    spec: TaskSpec
    status: TaskStatus
    submitted_seq: int
    submitted_us: int
    workers: dict[str, Worker] = always({})
    membership: Membership | None = always(None)
    next_worker: int = always(1)
    next_replica: int = always(0)
    iteration: int = always(0)
    best_iteration: int = always(0)
    committed_generation: int = always(0)
    loss: float | None = always(None)
    first_loss: float | None = always(None)
    first_commit_us: int = always(0)
    last_commit_us: int = always(0)
    iteration_us: int = always(0)
    checkpoint_iteration: int = always(0)
    strikes: dict[str, int] = always({})
    stuck: int = always(0)
    struck_below: dict[str, int] = always({})
    reattempts: int = always(0)
    ends: dict[str, int] = always({})
    breaks: dict[str, int] = always({})
    formed_after: int = always(0)
    suspicions: dict[str, HangSuspected] = always({})
    timings: tuple[int, ...] = always(())
    warm: int = always(0)
    measured: dict[str, int] = always({})
    transition_us: int = always(0)
    reshape: ReshapeRequested | None = always(None)
    reshaped_us: int = always(0)
    peers: tuple[MemoryService, ...] = always(())
    kept: dict[str, KeptState] = always({})
    params_digest: str = always("")
    reason: str = always("")
    unclear: dict[str, int] = {}
    unread: int = 0
    stragglers: dict[str, Straggler] = {}
    stop: str = ""
    left: dict[str, int] = {}
    early: int = 0
    early_below: int = 0
    meetings: int = 0

    @property
    def name(self) -> str:
        """The task's name."""
        return self.spec.name

    @property
    def generation(self) -> int:
        """The newest generation decided, 0 = none yet."""
        return self.membership.generation if self.membership else 0

    @property
    def confirmed(self) -> bool:
        """Every member of the newest generation has said that it is in the group."""
        if self.membership is None:
            return False
        generation, workers = self.membership.generation, self.workers
        for member in self.membership.members:
            worker = workers.get(member.worker)
            if worker is None or worker.generation != generation:
                return False
        return True

    @property
    def in_use(self) -> tuple[int, ...]:
        """Generations whose groups may be at work: the newest, and the one before it until a planned one has formed."""
        planned = self.membership is not None and not self.membership.urgent and not self.confirmed
        return (self.generation - 1, self.generation) if planned else (self.generation,)

    @property
    def leavers(self) -> list[Worker]:
        """Workers still in an older group that the newest membership leaves out; they park at a boundary."""
        workers = [worker for worker in self.workers.values() if worker.status is WorkerStatus.MEMBER]
        members = self.member_names if workers else ()
        return [worker for worker in workers if worker.worker not in members]

    @property
    def member_names(self) -> frozenset[str]:
        """Workers of the newest membership. Only to look up in: a set has no order."""
        return frozenset(member.worker for member in self.membership.members) if self.membership else frozenset()

    @property
    def at_rest(self) -> bool:
        """No process of the task can be running on a node that is reachable."""
        return all(worker.status is WorkerStatus.LOST for worker in self.workers.values())

    def is_member(self, worker: str) -> bool:
        """The worker stands in the newest membership."""
        return self.membership is not None and any(m.worker == worker for m in self.membership.members)


class Incident(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A root cause and what was done about it.

    `generations`: per task hit, the newest generation that the fault broke; the incident is healed there
    once a later one has formed. A worker that was no member broke none: the present one less 1.
    `ripe`: the time to wait is over: for a better explanation (SEV3), or for the process to end by itself.
    `place`: where in the training it happened, in words.
    `lost`: who has reported that the newest group broke -> to whom its connection was lost, "" where it does not know;
    `links`: to whom else, as far as it tells (see events.vocabulary.ErrorReported.lost).
    `occurred_us` is by the observer's clock; the other times are by the log's.
    `iterations_lost`: committed ones that had to be trained again, since no live replica was left; `state_from`:
    where the state came from then.
    `resumed_us`: when the last task hit went on training, 0 = not yet.
    """

    id: str
    kind: str
    severity: Severity
    node: str
    worker: str
    generations: dict[str, int]
    message: str
    occurred_us: int
    detected_us: int
    log_tail: str = always("")
    place: str = always("")
    lost: dict[str, str] = always({})
    symptoms: int = always(0)
    ripe: bool = always(False)
    response: str = always("")
    resumed_us: int = always(0)
    redone: int = always(0)
    iterations_lost: int = always(0)
    state_from: str = always("")
    closed_us: int = always(0)
    detection_us: int = always(0)
    transition_us: int = always(0)
    detection_flop: float = always(0.0)
    transition_flop: float = always(0.0)
    sub_health_flops: int = always(0)
    links: dict[str, tuple[str, ...]] = {}

    @property
    def tasks(self) -> tuple[str, ...]:
        """The tasks that were hit."""
        return tuple(self.generations)


class Plan(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Who gets what (see events.vocabulary.PlanAdopted). Epoch 0 is the empty plan of an empty cluster."""

    epoch: int = always(0)
    assignments: dict[str, TaskAssignment] = always({})
    waf: int = always(0)
    basis: str = always("")
    trigger: str = always("")
    reason: str = always("")
    adopted_us: int = always(0)
    healthy: dict[str, int] = always({})
    healthy_waf: int = always(0)
    transition_flop: float = always(0.0)
    way: str = always("")
    took_us: int = always(0)
    rows_reused: int = always(0)

    @property
    def workers(self) -> dict[str, int]:
        """Per task."""
        return {name: assignment.workers for name, assignment in self.assignments.items()}


class Refusal(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A valid event that was not folded, and why (admission.py)."""

    seq: int
    event_id: str
    reason: str


class Injection(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A fault that somebody ordered, and that no command carries yet."""

    node: str
    fault: Fault


class ClusterState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Everything. `seen`: per producer, the last (boot, number) that was folded (de-duplication).

    `severity`: what the configuration of the present coordinator sets (severity.py). `injections`: by id.
    `refused`: the newest REFUSED_MAX of the quarantined that were valid events.
    `ledger`: what was achieved and lost (costs.py). `worker_mtbf_us`: as learnt from the log; 0 = not yet.
    `schema`: what the coordinator of the present term reads and writes (events/schemas.py).
    `check_limit_us`, `repair_limit_us`: how long its health checks and repairs may take; 0: it has none (isolation.py).
    """

    seq: int = always(0)
    now_us: int = always(0)
    term: int = always(0)
    severity: dict[str, int] = always({})
    nodes: dict[str, Node] = always({})
    tasks: dict[str, Task] = always({})
    incidents: dict[str, Incident] = always({})
    closed: tuple[Incident, ...] = always(())
    incidents_total: int = always(0)
    plan: Plan = always(Plan())
    injections: dict[str, Injection] = always({})
    ledger: Ledger = always(Ledger())
    worker_mtbf_us: int = always(0)
    seen: dict[str, tuple[int, int]] = always({})
    quarantined: int = always(0)
    duplicates: int = always(0)
    inert: int = always(0)
    refused: tuple[Refusal, ...] = ()
    schema: int = 1
    check_limit_us: int = 0
    repair_limit_us: int = 0


#: How many closed incidents the state remembers; the log has them all.
CLOSED_INCIDENTS_MAX = 200
#: How many timings of a task's iterations it remembers, and how many of a group's first it leaves out.
TIMINGS_MAX = 15
WARM_UP = 2
#: Iterations of one generation after which a broken connection before it is forgotten.
CALM_ITERATIONS = 10
#: After how many commands that an agent could not read, since it joined, one more is a failure like any other.
UNREAD_MAX = 3
#: How many refused events it remembers.
REFUSED_MAX = 16
#: How many returns of a node it remembers.
RETURNS_MAX = 16


def digest(state: ClusterState) -> str:
    """16 bytes of BLAKE2b, in hex, over the state's canonical msgpack: equal states, equal digests."""
    encoded = msgspec.msgpack.encode(state, order="deterministic")
    return hashlib.blake2b(encoded, digest_size=16).hexdigest()


def to_json(state: ClusterState) -> Any:
    """The state as plain JSON types."""
    return msgspec.to_builtins(state)
