"""Strikes: what is counted against a node and a task when a worker is gone though nobody asked."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from unicrond.folding import incidents
from unicrond.folding.changes import with_task, with_worker
from unicrond.folding.incidents import Fact
from unicrond.state import ClusterState, Task, Worker, WorkerStatus


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
    """A worker is gone though nobody asked: count it against its node and its task, and open an incident."""
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
    state = with_task(state, with_worker(task, replace(worker, status=WorkerStatus.LOST)))
    message = f"worker {worker.worker} on {worker.node} {what}"
    return strike(state, task=name, worker=worker, kind=kind, broken=broken, message=message, occurred_us=occurred_us)


def is_ordered(worker: Worker, kind: str) -> bool:
    """The worker's end is what somebody has ordered, and is not to be held against anybody."""
    return bool(worker.injected) and (kind == "hang") == (worker.injected in ("hang", "stop"))


def ends_counted(task: Task, evidence: Mapping[str, int]) -> Task:
    """What a break says of the nodes is remembered."""
    return replace(task, ends=task.ends | {node: task.ends.get(node, 0) + weight for node, weight in evidence.items()})


def struck(task: Task, worker: Worker, *, broke: bool = False, unclear: bool = False, spared: bool = False) -> Task:
    """The blow counted, unless it is the one that was counted last (see Task.strikes). `broke`: the worker was given
    up since its group broke; that may be any member's fault, and is counted apart (see Task.breaks). `unclear`: another
    was as likely at fault. `spared`: somebody has ordered it; it is no blow, nor is what ends together with it."""
    if spared:
        mates = {mate.node for mate in task.workers.values() if mate.replica == worker.replica} | {worker.node, ""}
        return replace(task, struck_below=task.struck_below | dict.fromkeys(sorted(mates), task.next_worker))
    number = int(worker.worker.rpartition(".")[2])
    programs = bool(task.early) and number < task.early_below  # its program has left: no node can help that
    if number >= task.struck_below.get(worker.node, 0) and not programs:
        counts = task.breaks if broke else task.strikes
        counts = counts | {worker.node: counts.get(worker.node, 0) + 1}
        task = replace(task, breaks=counts) if broke else replace(task, strikes=counts)
        if unclear:
            task = replace(task, unclear=task.unclear | {worker.node: task.unclear.get(worker.node, 0) + 1})
        task = replace(task, struck_below=task.struck_below | {worker.node: task.next_worker})
    if number >= task.struck_below.get("", 0):
        task = replace(task, stuck=task.stuck + 1, struck_below=task.struck_below | {"": task.next_worker})
    return task


def left_early(task: Task, worker: Worker) -> Task:
    """Its program has ended in mid-training without a word: counted once for all who do so together."""
    if int(worker.worker.rpartition(".")[2]) < task.early_below:
        return task
    return replace(task, early=task.early + 1, early_below=task.next_worker)


def acquit(task: Task, nodes: set[str], *, calm: bool = False) -> Task:
    """The nodes have proven themselves: nothing is counted against them any more. `calm`: their connections have,
    too."""
    return replace(
        task,
        strikes={name: count for name, count in task.strikes.items() if name not in nodes},
        ends={name: count for name, count in task.ends.items() if not calm or name not in nodes},
        breaks={name: count for name, count in task.breaks.items() if not calm or name not in nodes},
        unclear={name: count for name, count in task.unclear.items() if not calm or name not in nodes},
        struck_below={name: number for name, number in task.struck_below.items() if name not in nodes},
    )
