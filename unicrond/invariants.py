"""What must hold in every state; checked after every fold in the daemon and in tests.

An observation can never break one of these; if one breaks, our own code is wrong, and saying so at
once, with the story, is worth more than going on.
"""

from __future__ import annotations

from collections import Counter
from typing import NoReturn

from unicrond.last_answer import kept_while_equal
from unicrond.state import ClusterState, NodeStatus, Plan


class InvariantError(AssertionError):
    """The coordinator's own logic is wrong. Carries the sequence number and the broken rule."""


def check(state: ClusterState) -> None:
    """Raises InvariantError if a rule is broken."""
    seats: list[str] = []
    for task in state.tasks.values():
        seats += [worker.node for worker in task.workers.values() if worker.replica >= 0]
        if task.membership is not None and len(task.member_names) != len(task.membership.members):
            _fail(state, f"{task.name}: a worker is a member twice")
        if task.iteration > task.best_iteration:
            _fail(state, f"{task.name}: best iteration is behind")
    for name in {worker.node for task in state.tasks.values() for worker in task.workers.values()}:
        if name not in state.nodes:
            _fail(state, f"a worker runs on unknown node {name}")
    for name, count in Counter(seats).items():
        node = state.nodes[name]
        if count > node.slots_max and node.status is NodeStatus.UP:
            _fail(state, f"{name}: {count} workers on {node.slots_max} slots")
    for name, count in _planned(state.plan).items():
        if name not in state.nodes:
            _fail(state, f"plan {state.plan.epoch} uses unknown node {name}")
        if count > state.nodes[name].slots_max:
            _fail(state, f"plan {state.plan.epoch} puts {count} workers on {name}")


@kept_while_equal
def _planned(plan: Plan) -> Counter[str]:
    """Workers per node."""
    return Counter([node for a in plan.assignments.values() for nodes in a.replicas for node in nodes])


def _fail(state: ClusterState, story: str) -> NoReturn:
    raise InvariantError(f"at sequence {state.seq}, term {state.term}: {story}")
