"""What is counted when a worker ends unexpectedly: faults of the task's program, and strikes against nodes.

Whose fault an end is: faults/program_faults.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec.structs import replace

from unicrond.core.faults import blame, local_faults, program_faults
from unicrond.core.faults.program_faults import FaultVerdict, Guilt
from unicrond.core.folding import incidents
from unicrond.core.folding.incidents import Fact
from unicrond.core.state.changes import with_task, with_worker
from unicrond.core.state.state import ClusterState, Task, Worker
from unicrond.core.state.task_parts import Crashes, Troubles
from unicrond.core.state.worker_lifecycle import given_up
from unicrond.core.state.workers import WorkerError

#: The nodes that a record of the last fault names.
_NODES_MAX = 4


def strike(
    state: ClusterState,
    *,
    task: str,
    worker: Worker,
    kind: str,
    broken: int,
    message: str,
    occurred_us: int,
    verdict: FaultVerdict,
    log_tail: str = "",
) -> ClusterState:
    """Count an unexpected end of a worker against its program or its node, and open an incident."""
    ordered = is_ordered(worker, kind)
    after = count_failure(
        state.tasks[task], worker, verdict, now_us=state.now_us, log_tail=log_tail, excluded_from_blame=ordered
    )
    is_program_fault = not ordered and program_faults.is_part_of_last(after, worker, verdict)
    state = with_task(state, after)
    fact = Fact(
        kind=kind,
        node=worker.node,
        worker=worker.worker,
        generations={task: broken},
        message=message,
        occurred_us=occurred_us,
        log_tail=log_tail,
        is_program_fault=is_program_fault,
    )
    return incidents.blame(state, fact)


def give_up(state: ClusterState, name: str, worker: Worker, kind: str, failure: str, occurred_us: int) -> ClusterState:
    """Give the worker up as lost, though its process may run; `decide` has the process ended. `failure` says in the
    message what the worker did."""
    task = state.tasks[name]
    broken = incidents.broken_generation(task, [worker.worker])
    state = with_task(state, with_worker(task, given_up(worker)))
    message = f"worker {worker.worker} on {worker.node} {failure}"
    error = worker.error or WorkerError(kind=kind, text=failure)
    if kind in ("hang", "start_failed") and worker.error is None:
        verdict = program_faults.judge_silence(kind, failure)
    else:
        verdict = program_faults.judge_report(error)
    return strike(
        state,
        task=name,
        worker=worker,
        kind=kind,
        broken=broken,
        message=message,
        occurred_us=occurred_us,
        verdict=verdict,
    )


def is_ordered(worker: Worker, kind: str) -> bool:
    """Return whether the worker's end is the fault that somebody injected, and counts against nobody."""
    return bool(worker.ordered_fault) and (kind == "hang") == (worker.ordered_fault in ("hang", "stop"))


def count_ends(task: Task, evidence: Mapping[str, int]) -> Task:
    """Add the evidence of a break to the record of the nodes at the ends of its links."""
    ends = task.troubles.ends
    ends = ends | {node: ends.get(node, 0) + weight for node, weight in evidence.items()}
    return replace(task, troubles=replace(task.troubles, ends=ends))


def count_failure(
    task: Task,
    worker: Worker,
    verdict: FaultVerdict,
    *,
    now_us: int,
    log_tail: str = "",
    excluded_from_blame: bool = False,
) -> Task:
    """Count an unexpected end: a fault of the program for the task alone, any other against the node. An end that
    belongs to the last fault of the program counts no more; one of unknown cause that is known of the program counts as
    the program's, and what was held against other nodes for it is taken back."""
    if excluded_from_blame:
        return count_strike(task, worker, excluded_from_blame=True)
    if program_faults.is_part_of_last(task, worker, verdict):
        return _with_node_of_last(task, worker.node, verdict)
    alike: set[str] = set()
    if program_faults.is_known_of_program(task, worker.node, verdict):
        alike = {node for node, signature in task.troubles.deaths.items() if signature == verdict.signature}
        strikes = _without(task.troubles.strikes, alike)
        deaths = {node: text for node, text in task.troubles.deaths.items() if node not in alike}
        task = replace(task, troubles=replace(task.troubles, strikes=strikes, deaths=deaths))
        verdict = verdict._replace(guilt=Guilt.PROGRAM)
    if verdict.guilt is Guilt.PROGRAM:
        return count_crash(task, worker, verdict, now_us=now_us, log_tail=log_tail, nodes=alike)
    deaths = task.troubles.deaths | {worker.node: verdict.signature}
    task = count_strike(task, worker)
    return replace(task, troubles=replace(task.troubles, deaths=deaths))


def _with_node_of_last(task: Task, node: str, verdict: FaultVerdict) -> Task:
    """Return the task, of which it is known that the last fault of its program came on this node too."""
    crashes = task.troubles.crashes
    if crashes is None or verdict.signature != crashes.signature or node in crashes.nodes:
        return task
    crashes = replace(crashes, nodes=(*crashes.nodes, node)[:_NODES_MAX])
    return replace(task, troubles=replace(task.troubles, crashes=crashes))


def count_crash(
    task: Task, worker: Worker, verdict: FaultVerdict, *, now_us: int, log_tail: str, nodes: Iterable[str] = ()
) -> Task:
    """Count a fault of the task's program. From the second on no worker is started before the back-off is over.
    `nodes`: others on which the same has happened."""
    troubles, best, below = task.troubles, task.progress.best_iteration, task.numbers.next_worker
    last = troubles.crashes or Crashes()
    again = verdict.kind == "nan_loss" and last.same_nan and verdict.iteration == last.iteration
    alike = last.nodes if last.signature == verdict.signature and (again or verdict.kind != "nan_loss") else ()
    crashes = Crashes(
        count=last.count + 1,
        fruitless=last.fruitless + (best <= last.best and not verdict.is_refusal),
        early=last.early + (verdict.kind == "left_early"),
        same_nan=(last.same_nan + 1 if again else 1) if verdict.kind == "nan_loss" else 0,
        text=verdict.text,
        signature=verdict.signature,
        iteration=verdict.iteration,
        nodes=tuple(dict.fromkeys((worker.node, *alike, *sorted(nodes))))[:_NODES_MAX],
        refusals=tuple(dict.fromkeys((*last.refusals, *[worker.node] * verdict.is_refusal)))[-_NODES_MAX:],
        tail=program_faults.last_lines(log_tail) or last.tail,
        best=best,
        below=below,
        generation=task.generation,
        first_us=last.first_us or now_us,
        last_us=now_us,
    )
    crashes = replace(crashes, waits=program_faults.back_off_us(crashes) > 0)
    struck_below = troubles.struck_below | {"": below}
    troubles = replace(troubles, crashes=crashes, stuck=troubles.stuck + 1, struck_below=struck_below)
    return replace(task, troubles=troubles)


def restart_due(state: ClusterState, _: str, subject: str) -> ClusterState:
    """Fold the end of `restart:`; one that no longer stands changes nothing."""
    name, _, last_us = subject.partition("#")
    task = state.tasks.get(name)
    crashes = task.troubles.crashes if task else None
    if task is None or crashes is None or str(crashes.last_us) != last_us:
        return state
    return with_task(state, replace(task, troubles=replace(task.troubles, crashes=replace(crashes, waits=False))))


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
    if number >= below.get(worker.node, 0):
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
    forgiven = local_faults.without(acquit(troubles, {node}, calm=True), node)
    if node not in troubles.ends:
        return forgiven
    return replace(forgiven, ends={peer: min(weight, blame.ECHO) for peer, weight in forgiven.ends.items()})


def _without(counts: dict[str, int], nodes: set[str]) -> dict[str, int]:
    return {name: count for name, count in counts.items() if name not in nodes}
