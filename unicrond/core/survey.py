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
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple, TypeAlias

from events.shape import Shape
from events.vocabulary import MemoryService, TaskAssignment, TaskSpec
from unicrond.core import gpu_types, memory_places, reconcile, turns
from unicrond.core.ordered_map import changed
from unicrond.core.planning.problem import Curve
from unicrond.core.policy import Policy
from unicrond.core.reconcile import Staffing, seat
from unicrond.core.reshaping import layouts_of
from unicrond.core.state import ClusterState, Membership, Node, NodeStatus, Task, Worker
from unicrond.core.task_parts import Pace
from unicrond.core.waf import has_scale, linear_flops, throughput

_SECOND_US = 1_000_000
#: Of a task the parts that its curves were made of, and a curve for each layout.
_Curves: TypeAlias = tuple[TaskSpec, Pace, int, Mapping[Shape, Curve]]


class Nodes(NamedTuple):
    """What the rules ask of all nodes at once. `of`: the nodes.

    `slots`: of each that may carry workers; `cordoned`: those of them that are. `isolated`: those that are isolated;
    `returned`: those that have come back from the lost, since they last were. `left`: those that have left in order;
    `forgetting`: those that are to be forgotten. `services`: see memory_places.py.
    `dated`: those that are to be empty by a time; `foretold`: those that are expected to fail (departures.py).
    `gpu`, `gpus`: the one type of GPU; or of each that has not left, where there are several (gpu_types.py).
    """

    of: Mapping[str, Node]
    slots: Mapping[str, int]
    cordoned: Sequence[str]
    isolated: Sequence[str]
    returned: Sequence[str]
    left: Sequence[str]
    forgetting: Sequence[str]
    services: tuple[MemoryService, ...]
    dated: Sequence[str]
    foretold: Sequence[str]
    gpu: str
    gpus: Mapping[str, str]


def of_nodes(nodes: Mapping[str, Node], before: Nodes | None = None) -> Nodes:
    """What the rules ask of `nodes`; `before`: the same of others. Where these differ in nothing that is asked, its
    answers hold."""
    if before is not None:
        if before.of is nodes:
            return before
        if all(old and new and _asked(old) == _asked(new) for old, new in changed(before.of, nodes).values()):
            return before._replace(of=nodes)
    every = nodes.values()
    slots, cordoned = reconcile.schedulable(nodes)
    gpu, gpus = gpu_types.told_types(every)
    return Nodes(
        of=nodes,
        slots=slots,
        cordoned=cordoned,
        isolated=[node.name for node in every if node.isolated],
        returned=[node.name for node in every if node.returns_us],
        left=[node.name for node in every if node.status is NodeStatus.LEFT],
        forgetting=[node.name for node in every if node.forgetting],
        services=memory_places.services(every),
        dated=[node.name for node in every if node.empty_by_us],
        foretold=[node.name for node in every if node.foretold],
        gpu=gpu,
        gpus=gpus,
    )


def _asked(node: Node) -> tuple[object, ...]:
    planned = bool(node.empty_by_us), bool(node.foretold), bool(node.forgetting)
    known = (
        node.schedulable,
        node.slots,
        node.cordoned,
        node.isolated,
        bool(node.returns_us),
        node.status,
        node.memory,
        node.gpu,
    )
    return *known, *planned


class Survey:
    """What the rules want to know of `state`. Several threads may ask.

    `capacity`: slots that a plan may use, per schedulable node. `basis`: digest of the nodes and tasks that a plan
    depends on. `turns`: tasks whose floors go first (turns.py). `fresh`: the adopted plan was made for the present
    nodes and tasks. `gpus`: the type of GPU of each node, `types`: the types, both empty where there is one.
    """

    def __init__(self, state: ClusterState, policy: Policy, before: Survey | None = None) -> None:
        self.state = state
        self.policy = policy
        self.active = state.active
        self.nodes: Nodes = of_nodes(state.nodes, before.nodes if before else None)
        self.capacity: Mapping[str, int] = reconcile.capacity(state, self.nodes.slots, self.nodes.cordoned)
        self.gpus: Mapping[str, str] = self.nodes.gpus
        self.types: tuple[str, ...] = tuple(sorted(set(self.gpus.values())))
        self.turns: Mapping[str, int] = turns.ranks(state)
        self._planned = tuple(
            [(task.name, task.submitted_seq, *(("turn",) * (task.name in self.turns))) for task in self.active]
        )
        same = before is not None and before._planned == self._planned
        same = same and before is not None and (before.capacity is self.capacity or before.capacity == self.capacity)
        same = same and before is not None and before.gpus == self.gpus
        self.basis: str = before.basis if before and same else _digest(self.capacity, self._planned, self.gpus)
        self.fresh = state.plan.basis == self.basis or not (state.plan.epoch or state.nodes or state.tasks)
        alike = before is not None and before.nodes.services == self.nodes.services
        self._targets: dict[str, tuple[MemoryService, ...]] = before._targets if before and alike else {}
        self._curves: dict[tuple[str, str], _Curves] = before._curves if before else {}
        #: Per task, whether the members stand where the plan wants them, once they all do.
        self._seated: dict[str, tuple[Membership | None, TaskAssignment | None, bool]] = (
            before._seated if before else {}
        )
        #: Per node, whether the plan would have room without it, with the plan and what it was made for.
        self._room: dict[str, tuple[tuple[int, str], bool]] = before._room if before else {}
        #: Per task, the last answer and the parts that it was made of.
        self._staffing: dict[str, tuple[Mapping[str, Worker], Membership | None, TaskAssignment | None, Staffing]] = (
            before._staffing if before else {}
        )

    def room_without(self, node: str, look: Callable[[Survey, str], bool]) -> bool:
        """What `look` says of the plan without the node; asked once for each plan, nodes and tasks."""
        key = self.state.plan.epoch, self.basis
        known = self._room.get(node)
        if known is None or known[0] != key:
            known = self._room[node] = key, look(self, node)
        return known[1]

    def staffing(self, task: Task) -> Staffing:
        """What the task has against what the plan gives it."""
        name, workers, membership = task.spec.name, task.workers, task.membership
        assignment = self.state.plan.assignments.get(name)
        known = self._staffing.get(name)
        told = None
        if known is not None and known[2] is assignment:
            if known[0] is workers and known[1] is membership:
                return known[3]
            changes = [(old, new) for old, new in changed(known[0], workers).values() if not _alike(old, new)]
            same = known[1] is membership and not changes
            told = known[3] if same else reconcile.staffing_after(known[3], changes, task.spec.replica_workers)
        if told is None:
            told = reconcile.staffing(task, assignment)
        self._staffing[name] = (workers, membership, assignment, told)
        return told

    def settled(self, task: Task) -> bool:
        """The group is whole, is what the plan wants, and no other worker is there: nothing to do, unless it breaks."""
        if not reconcile.all_in(task):
            return False
        name, membership, assignment = task.name, task.membership, self.state.plan.assignments.get(task.name)
        known = self._seated.get(name)
        if known is None or known[0] is not membership or known[1] is not assignment:
            self._seated[name] = known = (membership, assignment, self.staffing(task).fits)
        return known[2]

    def targets(self, task: Task) -> tuple[MemoryService, ...]:
        """The nodes to copy the task's state to, in the order in which they are tried."""
        name = task.spec.name
        known = self._targets.get(name)
        if known is None:
            known = self._targets[name] = memory_places.targets(self.nodes.services, name)
        return known

    @property
    def worker_mtbf_us(self) -> int:
        """Mean time between failures of one worker."""
        return worker_mtbf_us(self.state, self.policy)

    @property
    def points_to_make(self) -> int:
        """How many points `make_curves` would compute: all of them after a restart."""
        unknown = [task.spec for task in self.active for gpu in self._asked(task) if self._known(task, gpu) is None]
        return sum(spec.max_workers // shape.workers for spec in unknown for shape in layouts_of(spec))

    def make_curves(self) -> None:
        """Make the curves that are not there yet: of a large cluster that takes most of a second."""
        for task in self.active:
            for gpu in self._asked(task):
                self.curves(task, gpu)

    def throughput(self, task: Task) -> Curve:
        """T(0..max_workers) of the task in its present layout, where it is, as far as it is known today, FLOP/s."""
        return self.curves(task, task.pace.gpu)[task.spec.shape]

    def curves(self, task: Task, gpu: str) -> Mapping[Shape, Curve]:
        """The layouts that a plan may give the task, each with T on this type of GPU as far as it is known today."""
        known = self._known(task, gpu)
        if known is None:
            there = gpu_types.on_type(task, gpu)
            known = {shape: throughput(there, self.linear, shape) for shape in layouts_of(task.spec)}
            self._curves[task.name, gpu] = (task.spec, task.pace, 0 if has_scale(there) else self.linear, known)
        return known

    def _known(self, task: Task, gpu: str) -> Mapping[Shape, Curve] | None:
        known = self._curves.get((task.name, gpu))
        if known is None or known[0] is not task.spec or not _as_measured(known[1], task.pace):
            return None
        return known[3] if known[2] == (0 if has_scale(gpu_types.on_type(task, gpu)) else self.linear) else None

    def type_of(self, task: Task) -> str:
        """The type of GPU that the plan has the task on; where it has none, that of its last group, else the first."""
        if not self.types:
            return self.nodes.gpu or task.pace.gpu
        planned = gpu_types.of_assignment(self.state.nodes, self.state.plan.assignments.get(task.name))
        known = [gpu for gpu in (planned, task.pace.gpu) if gpu in self.types]
        return known[0] if known else self.types[0]

    def _asked(self, task: Task) -> tuple[str, ...]:
        return self.types or (self.type_of(task),)

    @cached_property
    def linear(self) -> int:
        """FLOP/s of one worker of a task of which nothing is known."""
        return linear_flops(self.state)

    @cached_property
    def largest(self) -> int:
        """The most slots of a node that is there or may come back: a larger tensor-parallel group finds no seat."""
        there = [node.slots for node in self.state.nodes.values() if node.status is not NodeStatus.LEFT]
        return max(there, default=0)


def _alike(before: Worker | None, after: Worker | None) -> bool:
    """The worker has not come or gone, nor sits elsewhere."""
    return before is not None and after is not None and seat(before) == seat(after)


def _as_measured(before: Pace, after: Pace) -> bool:
    """What was measured is the very same."""
    if before is after:
        return True
    same = before.measured is after.measured and before.elsewhere is after.elsewhere
    return same and before.on_gpus is after.on_gpus and before.gpu == after.gpu


def worker_mtbf_us(state: ClusterState, policy: Policy) -> int:
    """Mean time between failures of one worker: learnt from the log, else configured."""
    return state.worker_mtbf_us or int(policy.worker_mtbf_s * _SECOND_US)


def _digest(nodes: Mapping[str, int], tasks: tuple[tuple[object, ...], ...], gpus: Mapping[str, str]) -> str:
    """In no order of theirs."""
    types = [(name, gpus[name]) for name in sorted(nodes)] if gpus else []
    told = repr((sorted(nodes.items()), sorted(tasks), *([types] if types else [])))
    return hashlib.blake2b(told.encode(), digest_size=8).hexdigest()
