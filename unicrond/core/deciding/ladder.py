"""What cannot go on as it is: the ladder from a reattempt to a failed task (its steps: `unicrond/core/decide.py`).

Rules (whose fault a broken connection is: `unicrond/core/blame.py`)
-----
* A node on which members of the task train is not isolated for workers that end there: what works there says that the
  node does. New workers there wait for the next step instead (`waits_for_a_step`).
* Nor is it isolated for broken connections while the task gets on, unless the blame is clear; or of two replicas one
  can be tried elsewhere, on a node that is free of the task.
* Where a node is isolated, workers that only reported a broken connection leave it by the plan, with their state,
  once a newer group has answered the break.
* The last node that a task could run on is not isolated for what may as well be the task's fault.
* A task that gets on is not failed, whatever ends where.
"""

from __future__ import annotations

from collections.abc import Iterator

from events import vocabulary as v
from unicrond.core import blame
from unicrond.core.deciding import departing
from unicrond.core.deciding.batch import Batch
from unicrond.core.ordered_map import in_order
from unicrond.core.policy import Policy
from unicrond.core.severity import severity_of
from unicrond.core.state import ClusterState, Incident, NodeStatus, Severity, Task, TaskStatus, Worker, WorkerStatus

_SECOND_US = 1_000_000
#: Of two ends the wrong one may have been isolated first, and then the other; a third says that it is the task.
_UNCLEAR_MAX = 3
#: A program that leaves the loop in mid-training does so again: it gets so many chances, wherever it runs.
_EARLY_MAX = 3


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
        broke = severity_of(incident.kind, state.severity) is Severity.SEV3
        if broke and incident.generations.get(task.name) not in task.in_use:
            return  # it only told of a break that a newer group has answered; off an isolated node the plan moves it
        _give_up(batch, incident, worker, incident.severity, f"it reported {incident.kind} and still runs")
    elif task.group.reattempts >= policy.reattempts_max and incident.generations.get(task.name) == task.generation:
        again = f"the group broke again after reattempts in place: {_times(task.group.reattempts)}"
        found = list(_suspects(task, incident)) or [(worker, "cause unknown")]
        for suspect, why in found:
            _give_up(batch, incident, suspect, Severity.SEV2, f"{again}; {why}")


def _give_up(batch: Batch, incident: Incident, worker: Worker, severity: Severity, reason: str) -> None:
    batch.add(
        v.IncidentEscalated(
            incident=incident.id,
            severity=severity.value,
            worker=worker.worker,
            reason=f"{reason}: {incident.message}"[:1024],
        )
    )


def _suspects(task: Task, incident: Incident) -> Iterator[tuple[Worker, str]]:
    """Which worker to evict for a broken connection, and why: of each node to blame the oldest process that has an
    end; where no node is, of the reporting workers the one that was suspected before, else the oldest process."""
    told = blame.reports(task, incident)
    ends = dict.fromkeys([*told, *(name for lost in told.values() for name in lost)])
    able = sorted((task.workers[name] for name in ends if name in task.workers), key=_number)
    able = [worker for worker in able if worker.alive]
    verdict, weights = blame.verdict(task, incident), blame.evidence(task, incident)
    for node in verdict.blamed:
        broken = f"{node} is an endpoint of {_links(weights[node] + task.troubles.ends.get(node, 0))} that broke"
        doubt = "" if node in verdict.clear else ", like others"
        yield from [(worker, broken + doubt) for worker in able if worker.node == node][:1]
    if not verdict.blamed and able:
        suspect = max(able, key=lambda worker: (task.troubles.breaks.get(worker.node, 0), -_number(worker)))
        yield suspect, "suspected before" if task.troubles.breaks.get(suspect.node) else "cause unknown"


def _links(weight: int) -> str:
    count = weight // blame.PLAIN
    return "1 connection" if count == 1 else f"{count} connections"


def _number(worker: Worker) -> int:
    return int(worker.worker.rpartition(".")[2])


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _struck_nodes(task: Task, policy: Policy) -> list[str]:
    return [node for node, count in task.troubles.strikes.items() if count >= policy.strikes_max]


def _training_on(task: Task) -> set[str]:
    """The nodes of living members. Only to look up in."""
    return {worker.node for worker in task.workers.values() if worker.status is WorkerStatus.MEMBER}


def _gets_on(task: Task) -> bool:
    """The newest group is whole and has made a step."""
    return task.confirmed and task.progress.committed_generation == task.generation


def waits_for_a_step(task: Task, node: str, policy: Policy) -> bool:
    """Workers ended there again and again, and others of the task train there: no new one before their next step."""
    return task.troubles.strikes.get(node, 0) >= policy.strikes_max and node in _training_on(task)


def fail_task(batch: Batch, task: Task, policy: Policy) -> None:
    """The same failure on two nodes is the task's, not the nodes'; and nothing restarts without end."""
    struck = _struck_nodes(task, policy)
    early = task.troubles.early >= _EARLY_MAX
    if (len(struck) < 2 or _gets_on(task)) and task.troubles.stuck < policy.stuck_max and not early:
        return
    own = [incident for incident in batch.state.incidents.values() if task.name in incident.generations]
    last = own[-1] if own else None
    stuck = f"failed {task.troubles.stuck} times without a new iteration after {task.progress.best_iteration}"
    why = (
        f"its program ended {_times(task.troubles.early)} in mid-training without hook.stop(reason)"
        if early
        else f"its workers failed to restart on {' and '.join(struck)}"
        if len(struck) >= 2
        else f"{stuck}: its workers ended"
    )
    where = f" ({last.place})" if last and last.place else ""
    tail = f"; last: {last.kind}{where}: {last.message}\n{last.log_tail}" if last else ""
    batch.add(v.TaskFailed(task=task.name, reason=f"{why}{tail}"))


def _at_fault(state: ClusterState, task: Task, policy: Policy) -> Iterator[tuple[str, str]]:
    """Nodes that the task's failures accuse, and why; none where something else explains them as well."""
    struck, held = _struck_nodes(task, policy), task.troubles
    if struck and (len(struck) == 1 or _gets_on(task)):
        training = _training_on(task)
        for node in struck:
            if node not in training:
                ended = _times(held.strikes[node])
                yield node, f"workers of {task.name} ended here {ended} without a committed step"
    unclear = [node for node, times in held.unclear.items() if times >= policy.strikes_max]
    for node, times in held.breaks.items():
        if times < policy.strikes_max:
            continue
        clear = times - held.unclear.get(node, 0) >= policy.strikes_max
        if clear or (len(unclear) < _UNCLEAR_MAX and (held.stuck >= policy.strikes_max or _can_be_tried(state, task))):
            given_up = f"workers evicted {_times(times)}"
            yield node, f"groups of {task.name} broke here again and again: {given_up}"


def _can_be_tried(state: ClusterState, task: Task) -> bool:
    """Of two replicas either may be at fault, and stays so; another node can show which, and the task keeps its
    size."""
    assignment = state.plan.assignments.get(task.name)
    used = {worker.node for worker in task.workers.values()} | {*task.troubles.breaks, *task.troubles.ends}
    return assignment is not None and len(assignment.replicas) == 2 and _others_left(state, used)


def _others_left(state: ClusterState, accused: set[str]) -> bool:
    """There is a node that could carry workers beside those."""
    return any(node.schedulable and not node.cordoned and node.name not in accused for node in state.nodes.values())


def isolate_nodes(batch: Batch, policy: Policy) -> None:
    """Isolate nodes that return from loss too often, have SEV1 incidents or are proven at fault, if others are left;
    and those that are expected to fail, if they can be spared."""
    state = batch.state
    struck = [found for task in state.active for found in _at_fault(state, task, policy)]
    if not _others_left(state, {node for node, _ in struck}):
        struck = []
    window_us = int(policy.flap_window_s * _SECOND_US)
    blamed = [i for i in state.incidents.values() if i.severity is Severity.SEV1 and i.kind != "node_lost"]
    accused = {node for node, _ in struck} | {incident.node for incident in blamed}
    flaps_max = policy.flaps_max
    named = dict.fromkeys([*batch.survey.nodes.returned, *batch.survey.nodes.foretold, *accused])
    for name in in_order(state.nodes, [name for name in named if name in state.nodes]):
        node = state.nodes[name]
        if node.isolated or node.status is not NodeStatus.UP:
            continue
        reasons = [reason for name, reason in struck if name == node.name]
        reasons += [incident.message for incident in blamed if incident.node == node.name]
        flaps = [at_us for at_us in node.returns_us if at_us > state.now_us - window_us]
        if len(flaps) >= flaps_max:
            reasons.append(f"flapping: lost and returned {_times(len(flaps))} within {policy.flap_window_s:g} s")
        if node.foretold and departing.can_spare(batch, node):
            reasons.append(f"its failure is expected: {node.foretold}")
        if reasons:
            batch.add(v.NodeIsolated(node=node.name, until_us=None, reason=reasons[0][:1024]))
