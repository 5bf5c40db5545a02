"""What the coordinator believes about the cluster: frozen values, made by the fold alone.

Rules
-----
* Nothing here changes in place. `fold` builds the next state; every other module reads.
* Only what the log said is here: no clock, no connection, nothing that a replay could not rebuild.
* Collections iterate in insertion order, and insertion order is log order: no sets. Those that grow with the cluster
  change at the cost of the change (ordered_map.py).
* What follows from the rest and is asked for often is carried along: `Task.tally`, `ClusterState.by_node` and
  `open_tasks`. It is in no bytes, and makes no two states differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum, StrEnum

import msgspec
from msgspec.structs import force_setattr

from unicrond.core.state.alarms import AlarmHandling
from unicrond.core.state.hang_tally import Lateness
from unicrond.core.state.holds import Brakes, Outage, StandingHold
from unicrond.core.state.holds import Silence as Silence
from unicrond.core.state.node_links import NodeLink
from unicrond.core.state.node_parts import AgentIdentity, Cordon, Isolation, NodeDeparture, NodeHealth, Stray
from unicrond.core.state.node_parts import NodeLogin as NodeLogin
from unicrond.core.state.node_parts import Window as Window
from unicrond.core.state.open_tasks import OpenTasks
from unicrond.core.state.ordered_map import in_order
from unicrond.core.state.refusals import Refusal, RefusalTally
from unicrond.core.state.task_parts import (
    NO_TROUBLES,
    Copies,
    Ending,
    GroupHealth,
    Numbers,
    Pace,
    Reshaping,
    StarvationState,
    TaskProgress,
    Troubles,
)
from unicrond.core.state.work_ledger import Ledger
from unicrond.core.state.workers import NO_WORKERS, Tally
from unicrond.core.state.workers import Membership as Membership
from unicrond.core.state.workers import Worker as Worker
from unicrond.core.state.workers import WorkerStatus as WorkerStatus
from unicrond.core.state.workers_by_node import ByNode
from unicrond.events.vocabulary import Fault, MemoryService, Mode, StoreAddress, TaskAssignment, TaskSpec
from unicrond.events.vocabulary.field_defaults import always
from unicrond.events.vocabulary.phrases import abridge


class Severity(IntEnum):
    """SEV1 is the worst (paper, section "error detection and response")."""

    SEV1 = 1
    SEV2 = 2
    SEV3 = 3


class NodeStatus(StrEnum):
    """Whether the node's agent is there."""

    UP = "up"
    LOST = "lost"
    LEFT = "left"


class TaskStatus(StrEnum):
    """Whether the task goes on, and how it ended."""

    ACTIVE = "active"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Node(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A host; its subjects stand in node_parts.py. In bytes and in JSON it is flat (state_bytes.py).

    `slots_max`: the most it ever had. `commands`: how many it was sent. `users`: that tasks may run as; empty: its own.
    `gpu`: the type of its GPUs (gpu_types.py). `probe_port`: where its agent answers probes; 0: nowhere. `domain`:
    what fails with it (nodes/outages.py). `object_stores`: schemes that checkpoints can go to. `strays`: by worker id.
    """

    name: str
    status: NodeStatus
    slots: int
    slots_max: int
    address: str
    store: StoreAddress
    agent: AgentIdentity
    joined_us: int
    reason: str = always("")
    commands: int = always(0)
    memory: MemoryService | None = always(None)
    users: tuple[str, ...] = ()
    gpu: str = ""
    probe_port: int = 0
    domain: str = ""
    object_stores: tuple[str, ...] = ()
    cordon: Cordon = Cordon()
    isolation: Isolation = Isolation()
    health: NodeHealth = NodeHealth()
    departure: NodeDeparture = NodeDeparture()
    strays: dict[str, Stray] = {}

    @property
    def schedulable(self) -> bool:
        """Return whether it may carry workers; a cordoned node may carry those that it has (`reconcile.capacity`)."""
        is_closed = self.isolation.active or self.cordon.draining or self.departure.announced
        return self.status is NodeStatus.UP and not is_closed

    @property
    def may_go(self) -> bool:
        """Return whether its agent has announced its end, or its maintenance has begun: then its loss is no failure."""
        return self.departure.announced or (bool(self.cordon.window) and self.cordon.overdue)

    @property
    def left_on_purpose(self) -> bool:
        """Return whether it may go, or has ended in order: then its return without workers is no failure."""
        return self.may_go or self.status is NodeStatus.LEFT


class Task(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A training job; its subjects stand in task_parts.py. In bytes and in JSON it is flat (state_bytes.py).

    `submitted_seq`: the event since which it is what it is: its submission, or its last change. `owner`: whose token
    submitted it. `updated_us`: when a person last gave it other settings. `mode`: see nodes/brakes.py.
    """

    spec: TaskSpec
    status: TaskStatus
    submitted_seq: int
    submitted_us: int
    workers: Mapping[str, Worker] = always({})
    membership: Membership | None = always(None)
    numbers: Numbers = Numbers()
    progress: TaskProgress = TaskProgress()
    pace: Pace = Pace()
    group: GroupHealth = GroupHealth()
    troubles: Troubles = NO_TROUBLES
    copies: Copies = Copies()
    reshaping: Reshaping = Reshaping()
    ending: Ending = Ending()
    turn: StarvationState = StarvationState()
    owner: str = ""
    updated_us: int = 0
    mode: Mode = "heal"
    tally_cache: Tally | None = None
    lateness_cache: Lateness | None = None

    @property
    def tally(self) -> Tally:
        """Count how many of its workers are what; cached."""
        tally = self.tally_cache
        if tally is None or tally.workers is not self.workers or tally.membership is not self.membership:
            tally = Tally(self.workers, self.membership, tally)
            force_setattr(self, "tally_cache", tally)  # a cache, not a change
        return tally

    @property
    def lateness(self) -> Lateness:
        """Add up the suspicions of its newest group; cached."""
        lateness, suspicions = self.lateness_cache, self.group.suspicions
        is_current = lateness is not None and lateness.suspicions is suspicions and lateness.workers is self.workers
        if lateness is None or not is_current or lateness.generation != self.generation:
            lateness = Lateness(suspicions, self.workers, self.generation, lateness)
            force_setattr(self, "lateness_cache", lateness)  # a cache, not a change
        return lateness

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
        """Return whether every member of the newest generation is in the group, by its own word or its lead's."""
        if self.membership is None:
            return False
        return self._joined == len(self.membership.names)

    @property
    def _joined(self) -> int:
        """The number of members that are in the newest group."""
        return self.tally.joined + (self.tally.vouched if self.group.lead_confirmed else 0)

    def generation_of(self, worker: Worker) -> int:
        """Return the newest generation whose group the worker has joined, by its own word or by that group's lead's."""
        membership = self.membership if self.group.lead_confirmed else self.group.last_membership
        spoken_for = membership is not None and worker.worker in membership.spoken_for
        return max(worker.generation, membership.generation) if membership and spoken_for else worker.generation

    def has_joined(self, worker: Worker) -> bool:
        """Return whether the worker is in the newest group."""
        return self.generation_of(worker) == self.generation

    @property
    def awaits_lead(self) -> bool:
        """Return whether the lead of the newest group is to say that it has met, and has not yet."""
        return self.membership is not None and self.membership.leader_confirms and not self.group.lead_confirmed

    @property
    def rest_joined(self) -> bool:
        """Return whether every member that still has a worker is in the newest group."""
        return self.membership is not None and self._joined == len(self.workers) - self.tally.strangers

    @property
    def in_use(self) -> tuple[int, ...]:
        """The generations whose groups may be at work: the newest, and until a planned one forms the one before."""
        planned = self.membership is not None and not self.membership.urgent and not self.confirmed
        return (self.generation - 1, self.generation) if planned else (self.generation,)

    @property
    def apart(self) -> list[Worker]:
        """The workers of another status than MEMBER, and those that are busy, in their order."""
        return [self.workers[name] for name in in_order(self.workers, list(self.tally.apart))]

    @property
    def leavers(self) -> list[Worker]:
        """The workers still in an older group that the newest membership leaves out; they park at a boundary."""
        if not self.tally.leavers:
            return []
        members = self.member_names
        workers = [worker for worker in self.workers.values() if worker.status is WorkerStatus.MEMBER]
        return [worker for worker in workers if worker.worker not in members]

    @property
    def member_names(self) -> frozenset[str]:
        """The workers of the newest membership. Only to look up in: a set has no order."""
        return self.membership.names if self.membership else NO_WORKERS

    @property
    def all_able(self) -> bool:
        """Return whether every member can train."""
        return self.tally.able == len(self.member_names)

    @property
    def is_open(self) -> bool:
        """Return whether something may be left to do for it."""
        is_remembered = bool(self.workers or self.copies.holdings or self.troubles.local_faults)
        return self.status is TaskStatus.ACTIVE or is_remembered

    @property
    def at_rest(self) -> bool:
        """Return whether no process of the task can be running on a node that is reachable."""
        return self.tally.lost_workers == len(self.workers)

    def is_member(self, worker: str) -> bool:
        """Return whether the worker stands in the newest membership."""
        return worker in self.member_names


class Incident(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A root cause and what was done about it.

    `generations`: per task hit, the newest generation that the fault broke; the incident is healed there once a later
    one has formed. A worker that was no member broke none: the present one less 1. `is_overdue`: the time to wait is
    over: for a better explanation (SEV3), or for the process to end by itself. `place`: where in the training it
    happened, in words. `lost_peers`: member that reported the newest group's break -> the peer that it lost, "" where
    it does not know; `links`: to whom else, as far as it tells (see unicrond.events.vocabulary.ErrorReported.lost).
    `occurred_us` is by the observer's clock; the other times are by the log's. `iterations_lost`: committed ones that
    had to be trained again, since no live replica was left; `state_from`: where the state came from then. `resumed_us`:
    when the last task hit went on training, 0 = not yet. `micro_batches_finished`: by "task/replica", in which
    iteration workers of the broken generation ended, and with how many micro-batches of it; `micro_batches_lost`: those
    that no survivor could keep. `is_program_fault`: the task's own program is at fault, and no node pays for it.
    `stacks`, `sections`: of a group that hung, who stood where (folding/stacks.py). `nodes`: those that were lost
    together (nodes/outages.py); `nodes_back`: how many came back before it was closed, `back_us`: when the last did.
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
    lost_peers: dict[str, str] = always({})
    symptoms: int = always(0)
    is_overdue: bool = always(False)
    response: str = always("")
    resumed_us: int = always(0)
    micro_batches_repeated: int = always(0)
    iterations_lost: int = always(0)
    state_from: str = always("")
    closed_us: int = always(0)
    detection_us: int = always(0)
    transition_us: int = always(0)
    detection_flop: float = always(0.0)
    transition_flop: float = always(0.0)
    sub_health_flops: int = always(0)
    links: dict[str, tuple[str, ...]] = {}
    micro_batches_finished: dict[str, tuple[int, int]] = {}
    micro_batches_lost: int = 0
    is_program_fault: bool = False
    stacks: dict[str, tuple[str, ...]] = {}
    sections: dict[str, tuple[str, int]] = {}
    nodes: tuple[str, ...] = ()
    nodes_back: int = 0
    back_us: int = 0

    @property
    def tasks(self) -> tuple[str, ...]:
        """The tasks that were hit."""
        return tuple(self.generations)

    @property
    def location(self) -> str:
        """Say where it happened: on a worker, on a node, or between the head and all of them."""
        if self.worker:
            return f"worker {self.worker} on {self.node}"
        if self.nodes:
            return f"nodes {abridge(self.nodes)}"
        return f"node {self.node}" if self.node else "the head"


class Plan(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Each task's share (see unicrond.events.vocabulary.PlanAdopted). Epoch 0 is the empty plan of an empty cluster.
    `revised_for`: the task whose measured throughput asks for the next plan, "" = none does."""

    epoch: int = always(0)
    assignments: dict[str, TaskAssignment] = always({})
    waf: int = always(0)
    basis: str = always("")
    trigger: str = always("")
    reason: str = always("")
    adopted_us: int = always(0)
    healthy: dict[str, int] = always({})
    waf_if_healthy: int = always(0)
    transition_flop: float = always(0.0)
    method: str = always("")
    duration_us: int = always(0)
    rows_reused: int = always(0)
    healthy_gpus: dict[str, str] = {}
    gap_ppm: int = 0
    revised_for: str = ""

    @property
    def workers(self) -> dict[str, int]:
        """The number of workers per task."""
        return {name: assignment.workers for name, assignment in self.assignments.items()}


class Injection(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A fault that somebody ordered, and that no command carries yet."""

    node: str
    fault: Fault


class ClusterState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Everything. `last_numbers`: per producer, the last (boot, number) that was folded (de-duplication).

    `severity`: what the configuration of the present coordinator sets (severity.py). `injections`: by id.
    `refusals`: the newest REFUSED_MAX of the quarantined that were valid events. `ledger`: what was achieved and
    lost (costs.py). `worker_mtbf_us`: as learnt from the log; 0 = not yet. `schema`: what the coordinator of the
    present term reads and writes (events/wire/schemas.py). `check_limit_us`, `repair_limit_us`: how long its health
    checks and repairs may take; 0: it has none (isolation.py). `logins`: of nodes that were enrolled, by name.
    `log_adopted_us`: when a person last took a log by name, 0: never. `windows`: of maintenance, by id, until they
    are over. `starvation_us`: how long a task may wait without workers, as the present coordinator has it; 0:
    without end. `links`: those that are bad, or were of late (faults/links.py). `alarms`: what people did about them,
    by key (alarms.py). `brakes`: of the present coordinator; `holds`: decisions that are not carried out, by
    `hold_key`; `isolations_us`: of the last hour (nodes/brakes.py). `silence`: the one that stands (deafness.py).
    `mode`: what was said last of it, by a person or by the configuration, whose word is `configured_mode`. `outages`:
    nodes that were lost together, by incident (nodes/outages.py).
    `refused_observations`: by producer, the REFUSED_NODES_MAX that were refused last (admission.py).
    """

    seq: int = always(0)
    now_us: int = always(0)
    term: int = always(0)
    severity: dict[str, int] = always({})
    nodes: Mapping[str, Node] = always({})
    tasks: Mapping[str, Task] = always({})
    incidents: dict[str, Incident] = always({})
    closed_incidents: tuple[Incident, ...] = always(())
    incidents_total: int = always(0)
    plan: Plan = always(Plan())
    injections: dict[str, Injection] = always({})
    ledger: Ledger = always(Ledger())
    worker_mtbf_us: int = always(0)
    last_numbers: Mapping[str, tuple[int, int]] = always({})
    quarantined_messages: int = always(0)
    duplicates: int = always(0)
    inert: int = always(0)
    refusals: tuple[Refusal, ...] = ()
    schema: int = 1
    check_limit_us: int = 0
    repair_limit_us: int = 0
    logins: dict[str, NodeLogin] = {}
    log_adopted_us: int = 0
    windows: dict[str, Window] = {}
    quotas: Mapping[str, int] = {}
    starvation_us: int = 0
    links: dict[str, NodeLink] = {}
    alarms: dict[str, AlarmHandling] = {}
    brakes: Brakes = Brakes()
    holds: dict[str, StandingHold] = {}
    isolations_us: tuple[int, ...] = ()
    silence: Silence | None = None
    outages: dict[str, Outage] = {}
    mode: Mode = "heal"
    configured_mode: Mode = "heal"
    refused_observations: dict[str, RefusalTally] = {}
    by_node_cache: ByNode | None = None
    open_tasks_cache: OpenTasks | None = None

    @property
    def by_node(self) -> ByNode:
        """Index the workers by their node; cached."""
        index = self.by_node_cache
        if index is None or index.tasks is not self.tasks:
            index = ByNode(self.tasks, index)
            force_setattr(self, "by_node_cache", index)  # a cache, not a change
        return index

    @property
    def open_tasks(self) -> list[Task]:
        """Return the tasks for which something may be left to do (open_tasks.py), in their order; cached."""
        index = self.open_tasks_cache
        if index is None or index.tasks is not self.tasks:
            index = OpenTasks(self.tasks, index)
            force_setattr(self, "open_tasks_cache", index)  # a cache, not a change
        return [self.tasks[name] for name in index.names]

    @property
    def active(self) -> list[Task]:
        """The tasks to plan for, in the order that decides ties."""
        return [task for task in self.open_tasks if task.status is TaskStatus.ACTIVE]


#: Fields that follow from the others.
DERIVED = ("tally_cache", "lateness_cache", "by_node_cache", "open_tasks_cache")
#: How many closed incidents the state remembers, and how many returns of a node; the log has all.
CLOSED_INCIDENTS_MAX, RETURNS_MAX = 200, 16
#: After how many commands that an agent could not read, since it joined, one more is a failure like any other.
UNREAD_MAX = 3
