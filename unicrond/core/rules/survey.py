"""A survey: one look at a state under a policy, in which whatever several rules ask is found out once. Read-only.

Rules
-----
* `deadlines`, `needed_solves` and `decide` of one step are given the same survey. Nothing in it ever changes.
* A survey may be made after another one, of any state: what rests on the very same parts of both states is taken over.
  In a large cluster that is nearly everything, and the answers are the same without it.
* What one rule alone asks stays a function of that rule's module.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple, TypeAlias

from unicrond.core.faults.links import Pair, barred_pairs
from unicrond.core.faults.local_faults import nodes_to_leave
from unicrond.core.faults.program_faults import CLAIM_US, avoided_nodes, is_claimed_soon, is_failing
from unicrond.core.nodes import brakes, gpu_types, outages
from unicrond.core.planning.problem import Curve
from unicrond.core.state.ordered_map import changed
from unicrond.core.state.policy import Policy
from unicrond.core.state.state import ClusterState, Membership, Node, NodeStatus, Task, Worker
from unicrond.core.state.task_parts import NO_TROUBLES, Pace
from unicrond.core.tasks import memory_places, reconcile
from unicrond.core.tasks import starvation as turns
from unicrond.core.tasks.quotas import over_quota
from unicrond.core.tasks.reconcile import Staffing, seat
from unicrond.core.tasks.reshaping import layouts_of
from unicrond.core.worth.waf import has_scale, linear_flops, throughput, worth_stays
from unicrond.events.vocabulary import MemoryService, TaskAssignment, TaskSpec
from unicrond.events.vocabulary.shape import Shape

_SECOND_US = 1_000_000
#: The parts of a task that its curves were made of, and a curve for each layout.
_Curves: TypeAlias = tuple[TaskSpec, Pace, int, Mapping[Shape, Curve]]


class Nodes(NamedTuple):
    """What the rules ask of all nodes at once. `of`: the nodes.

    `slots`: of each that may carry workers; `cordoned`: those of them that are. `isolated`: those that are isolated;
    `returned`: those that have come back from the lost, since they last were. `left_nodes`: those that have left in
    order; `forgetting`: those that are to be forgotten, `departing`: those that have announced when they end.
    `services`: see memory_places.py.
    `with_strays`: those on which processes live that are no workers (folding/strays.py).
    `dated`: those that are to be empty by a time; `foretold`: those that are expected to fail (drains.py).
    `gpu`, `gpus`: the one type of GPU; or of each that has not left, where there are several (gpu_types.py).
    """

    of: Mapping[str, Node]
    slots: Mapping[str, int]
    cordoned: Sequence[str]
    isolated: Sequence[str]
    returned: Sequence[str]
    left_nodes: Sequence[str]
    forgetting: Sequence[str]
    departing: Sequence[str]
    services: tuple[MemoryService, ...]
    with_strays: Sequence[str]
    dated: Sequence[str]
    foretold: Sequence[str]
    gpu: str
    gpus: Mapping[str, str]


def of_nodes(nodes: Mapping[str, Node], before: Nodes | None = None) -> Nodes:
    """Return what the rules ask of `nodes`. `before`: the same of other nodes, whose answers hold where these differ in
    nothing that is asked."""
    if before is not None:
        if before.of is nodes:
            return before
        if all(old and new and _plan_facts(old) == _plan_facts(new) for old, new in changed(before.of, nodes).values()):
            return before._replace(of=nodes)
    every = nodes.values()
    slots, cordoned = reconcile.schedulable(nodes)
    gpu, gpus = gpu_types.node_types(every)
    return Nodes(
        of=nodes,
        slots=slots,
        cordoned=cordoned,
        isolated=[node.name for node in every if node.isolation.active],
        returned=[node.name for node in every if node.health.returns_us],
        left_nodes=[node.name for node in every if node.status is NodeStatus.LEFT],
        forgetting=[node.name for node in every if node.departure.removal],
        departing=[node.name for node in every if node.departure.ends_us],
        services=memory_places.services(every),
        with_strays=[node.name for node in every if node.strays],
        dated=[node.name for node in every if node.cordon.empty_by_us],
        foretold=[node.name for node in every if node.health.failure_forecast],
        gpu=gpu,
        gpus=gpus,
    )


def _plan_facts(node: Node) -> tuple[object, ...]:
    dates = bool(node.cordon.empty_by_us), bool(node.health.failure_forecast)
    departure = bool(node.departure.removal), bool(node.departure.ends_us)
    use = (
        node.schedulable,
        node.slots,
        node.cordon.active,
        node.isolation.active,
        bool(node.health.returns_us),
        node.status,
        node.memory,
        node.gpu,
    )
    return *use, *dates, *departure, bool(node.strays)


class Survey:
    """What the rules want to know of `state`. Several threads may ask.

    `capacity`: slots that a plan may use, per schedulable node. `basis`: digest of the nodes and tasks that a plan
    depends on. `turns`: tasks whose floors go first (starvation.py). `over_quota`: see quotas.py.
    `held_nodes`: those whose isolation is held (nodes/brakes.py). `troubled`: active tasks that have troubles, which
    alone can be at fault or accuse nodes. `failing`: tasks whose programs fail, `avoided`: nodes that tasks are kept
    off, if there is room elsewhere (faults/program_faults.py). `fresh`: the adopted plan was made for the present
    nodes and tasks. `absence`: who is away for a time (nodes/outages.py); of an awaited node the capacity is what the
    plan has there. `gpus`: the type of GPU of each node, `types`: the types, both empty where there is one.
    `barred_pairs`: nodes that no task may be on both of (faults/links.py).
    """

    def __init__(self, state: ClusterState, policy: Policy, before: Survey | None = None) -> None:
        self.state = state
        self.policy = policy
        self.active = state.active
        self.nodes: Nodes = of_nodes(state.nodes, before.nodes if before else None)
        self._plan_slots, self.capacity, self.absence = self._slots(before)
        self.gpus: Mapping[str, str] = self.nodes.gpus
        self.types: tuple[str, ...] = tuple(sorted(set(self.gpus.values())))
        self.turns: Mapping[str, int] = turns.ranks(state)
        self.over_quota = over_quota(state)
        self.barred_pairs: tuple[Pair, ...] = barred_pairs(state)
        self.troubled = [task for task in self.active if task.troubles != NO_TROUBLES]
        self.failing = frozenset([task.name for task in self.troubled if is_failing(task)])
        avoided = {task.name: avoided_nodes(task, policy.strikes_max, self._may_leave) for task in self.troubled}
        self.avoided: Mapping[str, tuple[str, ...]] = {name: nodes for name, nodes in avoided.items() if nodes}
        #: Per task, the last answer and the parts that it was made of.
        self._staffing: dict[str, tuple[Mapping[str, Worker], Membership | None, TaskAssignment | None, Staffing]] = (
            before._staffing if before else {}
        )
        self.held_nodes: tuple[str, ...] = brakes.held_nodes(state)
        #: Per task, the held nodes on which the plan wants workers that are not there; not those that are away.
        held_nodes = [name for name in self.held_nodes if name not in self.absence.absentees]
        self._starts = {
            task.name: brakes.start_nodes(self.staffing(task).missing, held_nodes) if held_nodes else ()
            for task in self.active
        }
        self._planned = tuple(
            [
                (
                    task.name,
                    task.submitted_seq,
                    *(("turn",) * (task.name in self.turns)),
                    *(("over quota",) * (task.name in self.over_quota)),
                    *((self._failure_fact(task),) * (task.name in self.failing)),
                    *self.avoided.get(task.name, ()),
                    *(("observed",) * brakes.observes(state, task)),
                    *(f"starts on {node}" for node in self._starts[task.name]),
                )
                for task in self.active
            ]
        )
        #: What a plan is made for: slots, tasks, types of GPU, nodes to keep apart.
        self._facts = self._plan_slots, self._planned, self.gpus, self.barred_pairs
        self.basis: str = before.basis if before and before._facts == self._facts else _digest(*self._facts)
        self.short_basis = self._short_basis(self._plan_slots)
        is_new = not (state.plan.epoch or state.nodes or state.tasks)
        self.fresh = state.plan.basis in (self.basis, self.short_basis) or is_new
        alike = before is not None and before.nodes.services == self.nodes.services
        self._targets: dict[str, tuple[MemoryService, ...]] = before._targets if before and alike else {}
        self._curves: dict[tuple[str, str], _Curves] = before._curves if before else {}
        #: Per task, whether the members stand where the plan wants them, once they all do.
        self._seated: dict[str, tuple[Membership | None, TaskAssignment | None, bool]] = (
            before._seated if before else {}
        )
        #: What `linear` was last, and of which state.
        self._linear = _last_linear(before)
        #: Per node, whether the plan would have room without it, with the plan and what it was made for.
        self._room: dict[str, tuple[tuple[int, str], bool]] = before._room if before else {}

    def _slots(self, before: Survey | None) -> tuple[Mapping[str, int], Mapping[str, int], outages.Absence]:
        """Return the slots that the plan counts on and those that it may use, per node, and who is away for a time."""
        state, cordoned = self.state, self.nodes.cordoned
        slots = reconcile.capacity(state, self.nodes.slots, cordoned)
        if not state.outages:
            return slots, slots, outages.NOBODY
        if before is not None and not cordoned and before.policy is self.policy:
            old = before.state
            is_alike = old.outages is state.outages and old.nodes is state.nodes and old.plan is state.plan
            if is_alike and [task.name for task in before.active] == [task.name for task in self.active]:
                return before._facts[0], before.capacity, before.absence
        absence = outages.absence(state, self.policy)
        slots = {name: count for name, count in slots.items() if name not in absence.arrivals}
        slots |= {name: state.nodes[name].slots for name in sorted(absence.absentees)}
        return slots, self._with_seats(slots, absence.absentees), absence

    def _short_basis(self, plan_slots: Mapping[str, int]) -> str:
        """Return the basis of a plan that gives a task less than it would have if no node were away, and every node
        started workers: once that is so, it differs from `basis`, and so asks for another plan."""
        closed = sorted(name for name in self.nodes.cordoned if plan_slots.get(name))
        aside = f" beside {hashlib.blake2b(repr(closed).encode(), digest_size=4).hexdigest()}" if closed else ""
        return f"{self.basis}{' in an outage' if self.absence.absentees else ''}{aside}"

    def _with_seats(self, plan_slots: Mapping[str, int], absentees: frozenset[str]) -> Mapping[str, int]:
        """Return the slots that a plan may use: of an awaited node those of the tasks that it has there."""
        if not absentees:
            return plan_slots
        assignments = [self.state.plan.assignments.get(task.name) for task in self.active]
        seats = Counter(node for share in assignments if share for nodes in share.replicas for node in nodes)
        slots = {name: min(count, seats[name]) if name in absentees else count for name, count in plan_slots.items()}
        return {name: count for name, count in slots.items() if count or name not in absentees}

    def pending(self, task: Task) -> list[tuple[str, ...]]:
        """Return the replicas that are missing, by their nodes, and about to start: not those on awaited nodes, until
        they come."""
        away = self.absence.absentees - self.absence.incoming
        missing = self.staffing(task).missing
        return [nodes for nodes in missing if away.isdisjoint(nodes)] if away else list(missing)

    @cached_property
    def plan_seats(self) -> Counter[str]:
        """The number of workers that the plan has on each node."""
        assignments = self.state.plan.assignments.values()
        return Counter(name for share in assignments for nodes in share.replicas for name in nodes)

    def _may_leave(self, task: Task, node: str) -> bool:
        """Return whether the plan in force has the task off the node, or all seats that it has there would be free on
        others that it may have, in whole tensor-parallel groups."""
        assignments = self.state.plan.assignments
        assignment = assignments.get(task.name)
        if assignment is None or not any(node in nodes for nodes in assignment.replicas):
            return True
        # A task of an outage stays in any case: that nodes go and come then is no reason for another plan.
        absentees = self.absence.absentees
        is_hit = any(not absentees.isdisjoint(nodes) for nodes in assignment.replicas)
        slots = self._plan_slots if is_hit else self.capacity
        seats = self.plan_seats
        barred, gpu = {node, *nodes_to_leave(task)}, self.type_of(task)
        open_nodes = [name for name in slots if name not in barred and (not self.types or self.gpus.get(name) == gpu)]
        tp = assignment.tp or task.spec.tp
        free = sum(max(0, slots[name] - seats[name]) // tp * tp for name in open_nodes)
        return free >= sum(nodes.count(node) for nodes in assignment.replicas)

    def room_without(self, node: str, look: Callable[[Survey, str], bool]) -> bool:
        """Return what `look` says of the plan without the node; it is called once for each plan, nodes and tasks."""
        key = self.state.plan.epoch, self.basis
        entry = self._room.get(node)
        if entry is None or entry[0] != key:
            entry = self._room[node] = key, look(self, node)
        return entry[1]

    def staffing(self, task: Task) -> Staffing:
        """Return what the task has against what the plan gives it."""
        name, workers, membership = task.spec.name, task.workers, task.membership
        assignment = self.state.plan.assignments.get(name)
        entry = self._staffing.get(name)
        staffing = None
        if entry is not None and entry[2] is assignment:
            if entry[0] is workers and entry[1] is membership:
                return entry[3]
            changes = [(old, new) for old, new in changed(entry[0], workers).values() if not _alike(old, new)]
            is_unchanged = entry[1] is membership and not changes
            staffing = (
                entry[3] if is_unchanged else reconcile.staffing_after(entry[3], changes, task.spec.replica_workers)
            )
        if staffing is None:
            staffing = reconcile.staffing(task, assignment)
        self._staffing[name] = (workers, membership, assignment, staffing)
        return staffing

    def settled(self, task: Task) -> bool:
        """Return whether the group is whole, is what the plan wants, and no other worker is there: nothing to do,
        unless it breaks."""
        if not reconcile.all_in(task):
            return False
        name, membership, assignment = task.name, task.membership, self.state.plan.assignments.get(task.name)
        entry = self._seated.get(name)
        if entry is None or entry[0] is not membership or entry[1] is not assignment:
            self._seated[name] = entry = (membership, assignment, self.staffing(task).fits)
        return entry[2]

    def targets(self, task: Task) -> tuple[MemoryService, ...]:
        """Return the nodes to copy the task's state to, in the order in which they are tried."""
        name = task.spec.name
        nodes = self._targets.get(name)
        if nodes is None:
            nodes = self._targets[name] = memory_places.targets(self.nodes.services, name)
        return nodes

    @cached_property
    def stands_us(self) -> int:
        """Return for how long a plan stands at most, microseconds: CLAIM_US while the place of a failing program is
        claimed anew soon; 0: without such a bound."""
        tasks, now_us = self.state.tasks.values(), self.state.now_us
        return CLAIM_US if any(is_claimed_soon(task, now_us) for task in tasks) else 0

    def _failure_fact(self, task: Task) -> str:
        return "fails" if is_claimed_soon(task, self.state.now_us) else "fails for long"

    @property
    def worker_mtbf_us(self) -> int:
        """Mean time between failures of one worker."""
        return worker_mtbf_us(self.state, self.policy)

    @property
    def points_to_make(self) -> int:
        """The number of points that `make_curves` would compute: all of them after a restart."""
        unknown = [
            task.spec for task in self.active for gpu in self._gpu_types(task) if self._cached_curves(task, gpu) is None
        ]
        return sum(spec.max_workers // shape.workers for spec in unknown for shape in layouts_of(spec))

    def make_curves(self) -> None:
        """Make the curves that are not there yet: of a large cluster that takes most of a second."""
        for task in self.active:
            for gpu in self._gpu_types(task):
                self.curves(task, gpu)

    def throughput(self, task: Task) -> Curve:
        """Return T(0..max_workers) of the task in its present layout, where it is, as far as it is known today,
        FLOP/s."""
        return self.curves(task, task.pace.gpu)[task.spec.shape]

    def curves(self, task: Task, gpu: str) -> Mapping[Shape, Curve]:
        """Return the layouts that a plan may give the task, each with T on this type of GPU as far as it is known
        today."""
        curves = self._cached_curves(task, gpu)
        if curves is None:
            on_type = gpu_types.on_type(task, gpu)
            curves = {shape: throughput(on_type, self.linear, shape) for shape in layouts_of(task.spec)}
            self._curves[task.name, gpu] = (task.spec, task.pace, 0 if has_scale(on_type) else self.linear, curves)
        return curves

    def _cached_curves(self, task: Task, gpu: str) -> Mapping[Shape, Curve] | None:
        entry = self._curves.get((task.name, gpu))
        if entry is None or entry[0] is not task.spec or not _as_measured(entry[1], task.pace):
            return None
        return entry[3] if entry[2] == (0 if has_scale(gpu_types.on_type(task, gpu)) else self.linear) else None

    def type_of(self, task: Task) -> str:
        """Return the type of GPU that the plan has the task on; where it has none, that of its last group, else the
        first."""
        if not self.types:
            return self.nodes.gpu or task.pace.gpu
        planned = gpu_types.of_assignment(self.state.nodes, self.state.plan.assignments.get(task.name))
        candidates = [gpu for gpu in (planned, task.pace.gpu) if gpu in self.types]
        return candidates[0] if candidates else self.types[0]

    def _gpu_types(self, task: Task) -> tuple[str, ...]:
        return self.types or (self.type_of(task),)

    @cached_property
    def linear(self) -> int:
        """FLOP/s of one worker of a task of which nothing is known."""
        if self._linear is not None and worth_stays(self._linear[0], self.state):
            return self._linear[1]
        return linear_flops(self.state)

    @cached_property
    def largest(self) -> int:
        """The most slots of a node that is there or may come back: a larger tensor-parallel group finds no seat."""
        slots = [node.slots for node in self.state.nodes.values() if node.status is not NodeStatus.LEFT]
        return max(slots, default=0)


def _last_linear(before: Survey | None) -> tuple[ClusterState, int] | None:
    """Return the newest state of which `linear` was asked for, and the answer."""
    if before is None:
        return None
    linear = before.__dict__.get("linear")
    return before._linear if linear is None else (before.state, linear)


def _alike(before: Worker | None, after: Worker | None) -> bool:
    """Return whether the worker has not come or gone, nor sits elsewhere."""
    return before is not None and after is not None and seat(before) == seat(after)


def _as_measured(before: Pace, after: Pace) -> bool:
    """Return whether what was measured is the very same."""
    if before is after:
        return True
    is_same = before.measurements is after.measurements and before.other_layouts is after.other_layouts
    return is_same and before.on_gpus is after.on_gpus and before.gpu == after.gpu


def worker_mtbf_us(state: ClusterState, policy: Policy) -> int:
    """Return the mean time between failures of one worker: learnt from the log, else configured."""
    return state.worker_mtbf_us or int(policy.worker_mtbf_s * _SECOND_US)


def _digest(
    nodes: Mapping[str, int], tasks: tuple[tuple[object, ...], ...], gpus: Mapping[str, str], pairs: tuple[Pair, ...]
) -> str:
    """Return a digest that does not depend on the order of nodes and tasks."""
    types = [(name, gpus[name]) for name in sorted(nodes)] if gpus else []
    text = repr((sorted(nodes.items()), sorted(tasks), *([types] if types else []), *([pairs] if pairs else [])))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
