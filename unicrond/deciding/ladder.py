"""What cannot go on as it is: the ladder from a reattempt to a failed task (its steps: `unicrond/decide.py`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from events import vocabulary as v
from unicrond.deciding.batch import Batch
from unicrond.folding import incidents
from unicrond.plan_problems import active_tasks
from unicrond.policy import Policy
from unicrond.state import ClusterState, Incident, NodeStatus, Severity, Task, TaskStatus, Worker

_SECOND_US = 1_000_000
#: Of two ends the wrong one may have been isolated first, and then the other; a third says that it is the task.
_BROKEN_NODES_MAX = 3


def escalate(batch: Batch, incident: Incident, policy: Policy) -> None:
    """A reattempt that has failed, and a process that should have ended but has not: its worker is given up."""
    state = batch.state
    task = state.tasks.get(incident.worker.rpartition(".")[0])
    worker = task.workers.get(incident.worker) if task else None
    if not incident.ripe or task is None or worker is None or not worker.alive:
        return
    if task.status is not TaskStatus.ACTIVE:
        return
    if incident.severity is not Severity.SEV3:
        severity, reason = incident.severity, f"it has reported {incident.kind} and still runs"
    elif task.reattempts >= policy.reattempts_max and incident.generations.get(task.name) == task.generation:
        severity, worker = Severity.SEV2, _suspect(task, incident) or worker
        reason = f"the group broke again, reattempted in place {_times(task.reattempts)}; {_why(task, worker)}"
    else:
        return
    batch.add(
        v.IncidentEscalated(
            incident=incident.id,
            severity=cast(v.SeverityLevel, severity.value),
            worker=worker.worker,
            reason=f"{reason}: {incident.message}"[:1024],
        )
    )


def _suspect(task: Task, incident: Incident) -> Worker | None:
    """Which end of a broken connection is given up: the one whose node was an end more often, or was suspected before;
    else the older process, for a new one cannot have been there when others broke."""
    ends = [task.workers[name] for name in incidents.ends(task, incident) if name in task.workers]
    ends = [worker for worker in ends if worker.alive]
    return max(ends, key=lambda worker: (*_record(task, worker.node), -_number(worker)), default=None)


def _record(task: Task, node: str) -> tuple[int, int]:
    return task.ends.get(node, 0), task.breaks.get(node, 0)


def _why(task: Task, suspect: Worker) -> str:
    before = task.ends.get(suspect.node, 0)
    if before:
        return f"its node was one end {_times(before)} before"
    return "it is one end, and the older process"


def _number(worker: Worker) -> int:
    return int(worker.worker.rpartition(".")[2])


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _struck_nodes(task: Task, policy: Policy) -> list[str]:
    return [node for node, count in task.strikes.items() if count >= policy.strikes_max]


def _broken_nodes(state: ClusterState, task: Task, policy: Policy) -> list[str]:
    """Of those that are there: the others can be neither isolated nor acquitted."""
    count = {name: times for name, times in task.breaks.items() if times >= policy.strikes_max}
    return [name for name in count if name in state.nodes and state.nodes[name].status is NodeStatus.UP]


def fail_task(batch: Batch, task: Task, policy: Policy) -> None:
    """The same failure on two nodes is the task's, not the nodes'; and nothing restarts for ever."""
    struck, broken = _struck_nodes(task, policy), _broken_nodes(batch.state, task, policy)
    if len(struck) < 2 and len(broken) < _BROKEN_NODES_MAX and task.stuck < policy.stuck_max:
        return
    own = [incident for incident in batch.state.incidents.values() if task.name in incident.generations]
    last = own[-1] if own else None
    why = (
        f"its workers failed to restart on {' and '.join(struck)}"
        if len(struck) >= 2
        else f"its groups broke again and again on {', '.join(broken)}"
        if len(broken) >= _BROKEN_NODES_MAX
        else f"struck {task.stuck} times without a new iteration after {task.best_iteration}: its workers ended"
    )
    where = f" ({last.place})" if last and last.place else ""
    tail = f"; last: {last.kind}{where}: {last.message}\n{last.log_tail}" if last else ""
    batch.add(v.TaskFailed(task=task.name, reason=f"{why}{tail}"))


def _at_fault(state: ClusterState, task: Task, policy: Policy) -> Iterator[tuple[str, str]]:
    """Nodes that the task's failures accuse, and why; none where the task itself is to blame."""
    struck, broken = _struck_nodes(task, policy), _broken_nodes(state, task, policy)
    if len(struck) == 1:
        times = _times(task.strikes[struck[0]])
        yield struck[0], f"workers of {task.name} ended here {times} without a step between"
    if len(broken) < _BROKEN_NODES_MAX:
        for node in broken:
            given_up = _times(task.breaks[node])
            yield node, f"groups of {task.name} broke here again and again: workers given up for it {given_up}"


def isolate_nodes(batch: Batch, policy: Policy) -> None:
    state = batch.state
    struck = [found for task in active_tasks(state) for found in _at_fault(state, task, policy)]
    window_us = int(policy.flap_window_s * _SECOND_US)
    blamed = [i for i in state.incidents.values() if i.severity is Severity.SEV1 and i.kind != "node_lost"]
    accused = {node for node, _ in struck} | {incident.node for incident in blamed}
    flaps_max = policy.flaps_max
    suspects = [node for node in state.nodes.values() if len(node.returns_us) >= flaps_max or node.name in accused]
    for node in suspects:
        if node.isolated or node.status is not NodeStatus.UP:
            continue
        reasons = [reason for name, reason in struck if name == node.name]
        reasons += [incident.message for incident in blamed if incident.node == node.name]
        flaps = [at_us for at_us in node.returns_us if at_us > state.now_us - window_us]
        if len(flaps) >= flaps_max:
            reasons.append(f"flapping: lost and returned {_times(len(flaps))} within {policy.flap_window_s:g} s")
        if reasons:
            batch.add(v.NodeIsolated(node=node.name, until_us=None, reason=reasons[0][:1024]))


def readmit_nodes(batch: Batch) -> None:
    """Those whose time is over, and those that were not at fault. None while its incident is open: it would be isolated
    for that again."""
    state = batch.state
    blamed = {incident.node for incident in state.incidents.values() if incident.severity is Severity.SEV1}
    for node in state.nodes.values():
        if not node.isolated or node.name in blamed:
            continue
        strikers = [task for task in state.tasks.values() if node.name in task.strikes or node.name in task.breaks]
        if node.isolation_over:
            batch.add(v.NodeReadmitted(node=node.name, reason="its isolation is over"))
        elif strikers and all(task.status is TaskStatus.FAILED for task in strikers):
            batch.add(v.NodeReadmitted(node=node.name, reason=f"task {strikers[0].name} was at fault, not the node"))
