"""Strikes: the failures that are counted against a node and a task when a worker ends unexpectedly."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from unicrond.core.faults import blame
from unicrond.core.folding import incidents
from unicrond.core.folding.incidents import Fact
from unicrond.core.state.changes import with_task, with_worker
from unicrond.core.state.state import ClusterState, Task, Worker
from unicrond.core.state.task_parts import Troubles
from unicrond.core.state.worker_lifecycle import given_up


def strike(
    state: ClusterState,
    *,
    task: str,
    worker: Worker,
    kind: str,
    broken: int,
    message: str,
    occurred_us: int,
    log_tail: str = "",
) -> ClusterState:
    """Count an unexpected end of a worker against its node and its task, and open an incident."""
    state = with_task(state, count_strike(state.tasks[task], worker, excluded_from_blame=is_ordered(worker, kind)))
    fact = Fact(
        kind=kind,
        node=worker.node,
        worker=worker.worker,
        generations={task: broken},
        message=message,
        occurred_us=occurred_us,
        log_tail=log_tail,
    )
    return incidents.blame(state, fact)


def give_up(state: ClusterState, name: str, worker: Worker, kind: str, failure: str, occurred_us: int) -> ClusterState:
    """Give the worker up as lost, though its process may run; `decide` has the process ended. `failure` says in the
    message what the worker did."""
    task = state.tasks[name]
    broken = incidents.broken_generation(task, [worker.worker])
    state = with_task(state, with_worker(task, given_up(worker)))
    message = f"worker {worker.worker} on {worker.node} {failure}"
    return strike(state, task=name, worker=worker, kind=kind, broken=broken, message=message, occurred_us=occurred_us)


def is_ordered(worker: Worker, kind: str) -> bool:
    """Return whether the worker's end is the fault that somebody injected, and counts against nobody."""
    return bool(worker.ordered_fault) and (kind == "hang") == (worker.ordered_fault in ("hang", "stop"))


def count_ends(task: Task, evidence: Mapping[str, int]) -> Task:
    """Add the evidence of a break to the record of the nodes at the ends of its links."""
    ends = task.troubles.ends
    ends = ends | {node: ends.get(node, 0) + weight for node, weight in evidence.items()}
    return replace(task, troubles=replace(task.troubles, ends=ends))


def count_strike(
    task: Task, worker: Worker, *, broke: bool = False, unclear: bool = False, excluded_from_blame: bool = False
) -> Task:
    """Count a failure of the worker, unless it is the one that was counted last (see Troubles). `broke`: the worker was
    given up since its group broke; that may be any member's fault, and is counted apart. `unclear`: another was as
    likely at fault. `spared`: an injected fault; neither it nor ends together with it count."""
    troubles, next_worker = task.troubles, task.numbers.next_worker
    below = troubles.struck_below
    if excluded_from_blame:
        mates = {mate.node for mate in task.workers.values() if mate.replica == worker.replica} | {worker.node, ""}
        below = below | dict.fromkeys(sorted(mates), next_worker)
        return replace(task, troubles=replace(troubles, struck_below=below))
    number = int(worker.worker.rpartition(".")[2])
    programs = (
        bool(troubles.early_ends) and number < troubles.early_below
    )  # its program has left the loop: no node is to blame
    if number >= below.get(worker.node, 0) and not programs:
        if broke:
            troubles = replace(troubles, breaks=_increment(troubles.breaks, worker.node))
        else:
            troubles = replace(troubles, strikes=_increment(troubles.strikes, worker.node))
        if unclear:
            troubles = replace(troubles, unclear_breaks=_increment(troubles.unclear_breaks, worker.node))
        below = below | {worker.node: next_worker}
    if number >= below.get("", 0):
        below = below | {"": next_worker}
        troubles = replace(troubles, stuck=troubles.stuck + 1)
    return replace(task, troubles=replace(troubles, struck_below=below))


def _increment(counts: dict[str, int], node: str) -> dict[str, int]:
    return counts | {node: counts.get(node, 0) + 1}


def count_early_exit(task: Task, worker: Worker) -> Task:
    """Count that the worker's program has ended in mid-training without a reason: once for all workers that do so
    together."""
    troubles = task.troubles
    if int(worker.worker.rpartition(".")[2]) < troubles.early_below:
        return task
    return replace(
        task, troubles=replace(troubles, early_ends=troubles.early_ends + 1, early_below=task.numbers.next_worker)
    )


def acquit(troubles: Troubles, nodes: set[str], *, calm: bool = False) -> Troubles:
    """Return the record without anything against the nodes, which have proven themselves. `calm`: so have their
    connections."""
    stable_nodes = nodes if calm else set()
    return replace(
        troubles,
        strikes=_without(troubles.strikes, nodes),
        ends=_without(troubles.ends, stable_nodes),
        breaks=_without(troubles.breaks, stable_nodes),
        unclear_breaks=_without(troubles.unclear_breaks, stable_nodes),
        struck_below=_without(troubles.struck_below, nodes),
    )


def readmit(troubles: Troubles, node: str) -> Troubles:
    """Return the record without anything against the node. The other ends of its broken links keep no more than what
    decides between equals: their record was its record, and beside a node without one they would seem clearly at fault.
    """
    forgiven = acquit(troubles, {node}, calm=True)
    if node not in troubles.ends:
        return forgiven
    return replace(forgiven, ends={peer: min(weight, blame.ECHO) for peer, weight in forgiven.ends.items()})


def _without(counts: dict[str, int], nodes: set[str]) -> dict[str, int]:
    return {name: count for name, count in counts.items() if name not in nodes}
