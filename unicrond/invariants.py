"""What must hold in every state; checked after every fold in the daemon and in tests.

An observation can never break one of these; if one breaks, our own code is wrong, and saying so at
once, with the story, is worth more than going on.
"""

from __future__ import annotations

from collections import Counter

from unicrond.state import ClusterState, NodeStatus


class InvariantError(AssertionError):
    """The coordinator's own logic is wrong. Carries the sequence number and the broken rule."""


def check(state: ClusterState) -> None:
    """Raises InvariantError if a rule is broken."""
    used: Counter[str] = Counter()
    for task in state.tasks.values():
        for worker in task.workers.values():
            _require(state, worker.node in state.nodes, f"{worker.worker} runs on unknown node {worker.node}")
            if worker.replica >= 0:
                used[worker.node] += 1
        if task.membership is not None:
            names = [member.worker for member in task.membership.members]
            _require(state, len(names) == len(set(names)), f"{task.name}: a worker is a member twice")
        _require(state, task.iteration <= task.best_iteration, f"{task.name}: best iteration is behind")
    for name, count in used.items():
        node = state.nodes[name]
        if node.status is NodeStatus.UP:
            _require(state, count <= node.slots_max, f"{name}: {count} workers on {node.slots_max} slots")
    planned: Counter[str] = Counter()
    for assignment in state.plan.assignments.values():
        for nodes in assignment.replicas:
            planned.update(nodes)
    for name, count in planned.items():
        _require(state, name in state.nodes, f"plan {state.plan.epoch} uses unknown node {name}")
        _require(state, count <= state.nodes[name].slots_max, f"plan {state.plan.epoch} puts {count} workers on {name}")


def _require(state: ClusterState, holds: bool, story: str) -> None:
    if not holds:
        raise InvariantError(f"at sequence {state.seq}, term {state.term}: {story}")
