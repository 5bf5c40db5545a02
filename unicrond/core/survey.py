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
from collections.abc import Mapping
from functools import cached_property

from events.vocabulary import MemoryService, TaskAssignment, TaskSpec
from unicrond.core import memory_places, reconcile
from unicrond.core.planning.problem import Curve
from unicrond.core.policy import Policy
from unicrond.core.reconcile import Staffing
from unicrond.core.state import ClusterState, Membership, NodeStatus, Task, Worker
from unicrond.core.waf import has_scale, linear_flops, throughput

_SECOND_US = 1_000_000


class Survey:
    """What the rules want to know of `state`. Several threads may ask.

    `capacity`: slots that a plan may use, per schedulable node. `basis`: digest of the nodes and tasks that a plan
    depends on. `fresh`: the adopted plan was made for the present nodes and tasks.
    """

    def __init__(self, state: ClusterState, policy: Policy, before: Survey | None = None) -> None:
        self.state = state
        self.policy = policy
        self.active = state.active
        self._schedulable: tuple[dict[str, int], list[str]] = (
            before._schedulable if before and before.state.nodes is state.nodes else reconcile.schedulable(state.nodes)
        )
        self.capacity: Mapping[str, int] = reconcile.capacity(state, *self._schedulable)
        self._planned = tuple([(task.spec.name, task.submitted_seq) for task in self.active])
        same = before is not None and before.capacity == self.capacity and before._planned == self._planned
        self.basis: str = before.basis if before and same else _digest(self.capacity, self._planned)
        self.fresh = state.plan.basis == self.basis or not (state.plan.epoch or state.nodes or state.tasks)
        self._services = memory_places.services(state)
        alike = before is not None and before._services == self._services
        self._targets: dict[str, tuple[MemoryService, ...]] = before._targets if before and alike else {}
        #: Per task, the last answer and the parts that it was made of.
        self._throughput: dict[str, tuple[TaskSpec, dict[str, int], int, Curve]] = before._throughput if before else {}
        #: Per task, the last answer and the parts that it was made of.
        self._staffing: dict[str, tuple[dict[str, Worker], Membership | None, TaskAssignment | None, Staffing]] = (
            before._staffing if before else {}
        )

    def staffing(self, task: Task) -> Staffing:
        """What the task has against what the plan gives it."""
        name, workers, membership = task.spec.name, task.workers, task.membership
        assignment = self.state.plan.assignments.get(name)
        known = self._staffing.get(name)
        if known is None or known[0] is not workers or known[1] is not membership or known[2] is not assignment:
            known = (workers, membership, assignment, reconcile.staffing(task, assignment))
            self._staffing[name] = known
        return known[3]

    def targets(self, task: Task) -> tuple[MemoryService, ...]:
        """The nodes to copy the task's state to, in the order in which they are tried."""
        name = task.spec.name
        known = self._targets.get(name)
        if known is None:
            known = self._targets[name] = memory_places.targets(self._services, name)
        return known

    @property
    def worker_mtbf_us(self) -> int:
        """Mean time between failures of one worker."""
        return worker_mtbf_us(self.state, self.policy)

    def throughput(self, task: Task) -> Curve:
        """T(0..max_workers) of the task as far as it is known today, FLOP/s."""
        name, linear = task.spec.name, 0 if has_scale(task) else self.linear
        known = self._throughput.get(name)
        if known is None or known[0] is not task.spec or known[1] is not task.pace.measured or known[2] != linear:
            known = (task.spec, task.pace.measured, linear, throughput(task, self.linear))
            self._throughput[name] = known
        return known[3]

    @cached_property
    def linear(self) -> int:
        """FLOP/s of one worker of a task of which nothing is known."""
        return linear_flops(self.state)

    @cached_property
    def largest(self) -> int:
        """The most slots of a node that is there or may come back: a larger tensor-parallel group finds no seat."""
        there = [node.slots for node in self.state.nodes.values() if node.status is not NodeStatus.LEFT]
        return max(there, default=0)


def worker_mtbf_us(state: ClusterState, policy: Policy) -> int:
    """Mean time between failures of one worker: learnt from the log, else configured."""
    return state.worker_mtbf_us or int(policy.worker_mtbf_s * _SECOND_US)


def _digest(nodes: Mapping[str, int], tasks: tuple[tuple[str, int], ...]) -> str:
    """In no order of theirs."""
    told = repr((sorted(nodes.items()), sorted(tasks)))
    return hashlib.blake2b(told.encode(), digest_size=8).hexdigest()
