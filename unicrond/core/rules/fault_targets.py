"""A person's order of a fault, made exact: which worker of which node it is for. Pure.

Rules
-----
* Nothing is ordered unless the coordinator was started for it (`injection: true`).
* A worker is named by its task and its rank in the present membership (default 0), or by its task and node.
* A node's fault (drop_network; kill without a task) happens at once; an xid is a node's, its worker says which GPU.
* What cannot happen is refused in one line: an iteration that is past, a node that is away, a rank that does not exist.
"""

from __future__ import annotations

import msgspec

from unicrond.core.rules.requests import NODE_FAULTS, fault_problem
from unicrond.core.state.state import ClusterState, NodeStatus, TaskStatus
from unicrond.events.vocabulary import Count, Fault, FaultKind, FaultPhase, InjectionRequested, Name

#: Stands for the worker before it is known which one is meant.
ANY_WORKER = "a.1"


class FaultOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/faults. Empty names, and a rank of None, are not given. `counts`: what follows is held against node
    and task, like an unordered fault. See unicrond.events.vocabulary.Fault."""

    kind: FaultKind
    task: Name | None = None
    node: Name | None = None
    rank: Count | None = None
    at_iteration: Count = 0
    phase: FaultPhase = ""
    seconds: float = 0.0
    xid: Count = 0
    counts: bool = False


class OrderRefused(ValueError):
    """The order cannot be carried out; the message names the field and the fix. `status` is HTTP's."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


def injection_request(order: FaultOrder, state: ClusterState, *, allowed: bool) -> InjectionRequested:
    """Return the event that orders the fault. Raise OrderRefused."""
    if not allowed:
        raise OrderRefused(
            409,
            "injection: this coordinator accepts no ordered faults; start it with `unicrond run --allow-injection` "
            "(configuration: injection: true)",
        )
    if not 0.0 <= order.seconds <= 86400.0:
        raise OrderRefused(400, f"seconds: must be a number from 0 to 86400, got {order.seconds:g}")
    _check_fields(order)
    if order.task is None:
        node, worker = order.node or "", ""
    else:
        node, worker = _member(order, state)
    target = state.nodes.get(node)
    if target is None:
        raise OrderRefused(404, f"node: no node {node}; see `unicronctl nodes`")
    if target.status is not NodeStatus.UP:
        raise OrderRefused(409, f"node: {node} is {target.status.value}; only a node that is up can have a fault")
    fault = Fault(
        kind=order.kind,
        worker="" if order.kind == "drop_network" else worker,
        at_iteration=order.at_iteration,
        phase=order.phase,
        seconds=order.seconds,
        xid=order.xid,
        excluded_from_blame=not order.counts,
    )
    return InjectionRequested(node=node, fault=fault)


def _check_fields(order: FaultOrder) -> None:
    is_of_node = order.kind in NODE_FAULTS or (order.kind == "kill" and order.task is None)
    if order.task is None and order.node is None:
        raise OrderRefused(400, f"{'node' if is_of_node else 'task'}: name the fault's target; give --task or --node")
    if order.task is None and not is_of_node:
        raise OrderRefused(400, f"task: {order.kind} is a worker's fault; give --task (and --rank)")
    if order.rank is not None and order.task is None:
        raise OrderRefused(400, "rank: belongs to a task; give --task too")
    problem = fault_problem(
        Fault(
            kind=order.kind,
            worker="" if order.task is None else ANY_WORKER,
            at_iteration=order.at_iteration,
            phase=order.phase,
            seconds=order.seconds,
            xid=order.xid,
        )
    )
    if problem:
        raise OrderRefused(400, problem)


def _member(order: FaultOrder, state: ClusterState) -> tuple[str, str]:
    """Return the node and the id of the worker that is meant. Raise OrderRefused."""
    task = state.tasks.get(order.task or "")
    if task is None or task.status is not TaskStatus.ACTIVE:
        raise OrderRefused(404, f"task: {order.task} is not active; see `unicronctl tasks`")
    members = task.membership.members if task.membership else ()
    matches = [
        member
        for rank, member in enumerate(members)
        if (order.rank is None or rank == order.rank) and (order.node is None or member.node == order.node)
    ]
    if not matches:
        place = f" of rank {order.rank}" if order.rank is not None else ""
        place += f" on {order.node}" if order.node else ""
        raise OrderRefused(404, f"rank: task {task.name} has no member{place}; it has {len(members)}")
    if order.at_iteration and order.at_iteration <= task.progress.iteration:
        raise OrderRefused(
            409,
            f"at_iteration: {order.at_iteration} has passed, {task.name} has committed {task.progress.iteration};"
            " give a later one",
        )
    return matches[0].node, matches[0].worker
