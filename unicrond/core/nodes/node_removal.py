"""Nodes that go for good. Pure.

Rules
-----
* A node that has left in order is forgotten `forget_s` later; so is one that has left or is lost, when a person asks
  (`unicronctl forget`). One that is up is commanded to leave first (`forget --leave`): drained, its agent ends with 0.
* Time alone forgets no node that a person has cordoned or that is isolated: its return must find that again.
* All that is held against the name, or kept for it, is forgotten. Its login stays (`unicrond revoke`), and so do the
  numbers that its agents have used: nothing of theirs is read twice.
* A node that is lost may come back from where it was cut off: a command informs it that it was forgotten, so that its
  agent ends what runs there, and the next one joins anew.
* A name that joins again before it is forgotten is a new node as well.
* No plan names a forgotten node: the next plan does not, and is waited for.

What does not live here: what becomes of its workers (folding/nodes.py), when the agent ends (agents/handling).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from unicrond.core.state.state import ClusterState, Node, NodeStatus

_HOUR_US = 3_600_000_000


def refusal(node: Node, *, leave: bool) -> str:
    """Return why the node cannot be forgotten, as "field: what is wrong; the fix"; "" where it can."""
    name = node.name
    if node.status is NodeStatus.UP and not leave:
        return f"node: {name} is up; unicronctl forget --leave {name} has it leave for good first"
    return ""


def is_planned_for(state: ClusterState, name: str) -> bool:
    """Return whether the plan gives the node workers."""
    replicas = (nodes for assignment in state.plan.assignments.values() for nodes in assignment.replicas)
    return any(name in nodes for nodes in replicas)


def is_due_by_time(node: Node) -> bool:
    """Return whether nothing but time keeps the node from being forgotten."""
    is_blocked = (
        node.isolation.active or node.health.repair_need or (node.cordon.active and not node.cordon.until_return)
    )
    return node.status is NodeStatus.LEFT and not (is_blocked or node.departure.removal)


def age(node: Node, now_us: int) -> str:
    """Say in words for how long the node has been away."""
    return f"it left {max(0, now_us - node.departure.left_us) // _HOUR_US} h ago"


def deadlines(state: ClusterState, names: Iterable[str], forget_s: float) -> Iterator[tuple[str, int]]:
    """Yield (id, length in microseconds). `names`: the nodes that have left in order."""
    for name in names if forget_s else ():
        node = state.nodes[name]
        if is_due_by_time(node):
            away_us = state.now_us - node.departure.left_us if node.departure.left_us else 0
            yield f"forget:{name}#{node.departure.left_us}", max(1, int(forget_s * 1e6) - away_us)
