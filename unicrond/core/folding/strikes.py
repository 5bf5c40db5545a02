"""Strikes: what is counted against a node and a task when a worker ends unasked."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from unicrond.core import blame
from unicrond.core.changes import with_task, with_worker
from unicrond.core.folding import incidents
from unicrond.core.folding.incidents import Fact
from unicrond.core.state import ClusterState, Task, Worker
from unicrond.core.task_parts import Troubles
from unicrond.core.worker_life import given_up


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
    """A worker ended unasked: count it against its node and its task, and open an incident."""
    state = with_task(state, struck(state.tasks[task], worker, spared=is_ordered(worker, kind)))
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


def give_up(state: ClusterState, name: str, worker: Worker, kind: str, what: str, occurred_us: int) -> ClusterState:
    """The worker is lost, though it may run; `decide` has its process ended."""
    task = state.tasks[name]
    broken = incidents.broken_generation(task, [worker.worker])
    state = with_task(state, with_worker(task, given_up(worker)))
    message = f"worker {worker.worker} on {worker.node} {what}"
    return strike(state, task=name, worker=worker, kind=kind, broken=broken, message=message, occurred_us=occurred_us)


def is_ordered(worker: Worker, kind: str) -> bool:
    """The worker's end is what somebody has ordered, and is not to be held against anybody."""
    return bool(worker.injected) and (kind == "hang") == (worker.injected in ("hang", "stop"))


def ends_counted(task: Task, evidence: Mapping[str, int]) -> Task:
    """What a break says of the nodes is remembered."""
    ends = task.troubles.ends
    ends = ends | {node: ends.get(node, 0) + weight for node, weight in evidence.items()}
    return replace(task, troubles=replace(task.troubles, ends=ends))


def struck(task: Task, worker: Worker, *, broke: bool = False, unclear: bool = False, spared: bool = False) -> Task:
    """The blow counted, unless it is the one that was counted last (see Troubles). `broke`: the worker was given up
    since its group broke; that may be any member's fault, and is counted apart. `unclear`: another was as likely at
    fault. `spared`: an ordered fault; it is not a blow, nor are ends together with it."""
    held, next_worker = task.troubles, task.numbers.next_worker
    below = held.struck_below
    if spared:
        mates = {mate.node for mate in task.workers.values() if mate.replica == worker.replica} | {worker.node, ""}
        below = below | dict.fromkeys(sorted(mates), next_worker)
        return replace(task, troubles=replace(held, struck_below=below))
    number = int(worker.worker.rpartition(".")[2])
    programs = bool(held.early) and number < held.early_below  # its program has left: no node can help that
    if number >= below.get(worker.node, 0) and not programs:
        if broke:
            held = replace(held, breaks=_one_more(held.breaks, worker.node))
        else:
            held = replace(held, strikes=_one_more(held.strikes, worker.node))
        if unclear:
            held = replace(held, unclear=_one_more(held.unclear, worker.node))
        below = below | {worker.node: next_worker}
    if number >= below.get("", 0):
        below = below | {"": next_worker}
        held = replace(held, stuck=held.stuck + 1)
    return replace(task, troubles=replace(held, struck_below=below))


def _one_more(counts: dict[str, int], node: str) -> dict[str, int]:
    return counts | {node: counts.get(node, 0) + 1}


def left_early(task: Task, worker: Worker) -> Task:
    """Its program has ended in mid-training without a reason: counted once for all workers that do so together."""
    held = task.troubles
    if int(worker.worker.rpartition(".")[2]) < held.early_below:
        return task
    return replace(task, troubles=replace(held, early=held.early + 1, early_below=task.numbers.next_worker))


def acquit(held: Troubles, nodes: set[str], *, calm: bool = False) -> Troubles:
    """The nodes have proven themselves: nothing is held against them any more. `calm`: their connections have,
    too."""
    gone = nodes if calm else set()
    return replace(
        held,
        strikes=_without(held.strikes, nodes),
        ends=_without(held.ends, gone),
        breaks=_without(held.breaks, gone),
        unclear=_without(held.unclear, gone),
        struck_below=_without(held.struck_below, nodes),
    )


def readmitted(held: Troubles, node: str) -> Troubles:
    """Nothing is held against the node any more. The other ends of its broken links keep no more than what decides
    between equals: their record was its record, and beside a node without one they would seem clearly at fault."""
    forgiven = acquit(held, {node}, calm=True)
    if node not in held.ends:
        return forgiven
    return replace(forgiven, ends={other: min(weight, blame.ECHO) for other, weight in forgiven.ends.items()})


def _without(counts: dict[str, int], nodes: set[str]) -> dict[str, int]:
    return {name: count for name, count in counts.items() if name not in nodes}
