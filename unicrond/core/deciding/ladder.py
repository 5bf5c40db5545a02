"""Escalation: the ladder from a reattempt to a failed task (its steps: `unicrond/core/decide.py`).

Rules (whose fault a broken connection is: `unicrond/core/faults/blame.py`)
-----
* A node on which members of the task train is not isolated for workers that end there: the members show that the
  node works. New workers there wait for the next step instead (`waits_for_step`).
* Nor is it isolated for broken connections while the task makes progress, unless the blame is clear, or one of two
  replicas can be tried on a node that is free of the task.
* Where a node is isolated, workers that only reported a broken connection leave it by the plan, with their state,
  once a newer group has replaced the broken one.
* The last node that a task could run on is not isolated for failures that may as well be the task's fault.
* Where probes say that nothing passes between two of the members, nobody is given up for broken connections: the task
  goes on without one end (faults/links.py).
* A task that makes progress is not failed, whichever workers end.
"""

from __future__ import annotations

from collections.abc import Iterator

from unicrond.core.deciding import drains as departing
from unicrond.core.deciding.batch import DecisionBatch
from unicrond.core.faults import blame, links
from unicrond.core.faults.severity import severity_of
from unicrond.core.state.ordered_map import in_order
from unicrond.core.state.policy import Policy
from unicrond.core.state.state import (
    ClusterState,
    Incident,
    NodeStatus,
    Severity,
    Task,
    TaskStatus,
    Worker,
    WorkerStatus,
)
from unicrond.events import vocabulary as v

_SECOND_US = 1_000_000
#: Of the two ends of a link the wrong one may have been isolated first, and then the other; a third isolation would
#: show that the fault is the task's.
_UNCLEAR_MAX = 3
#: How often a program may leave the loop in mid-training, on any node: one that does so does it again.
_EARLY_MAX = 3


def escalate(batch: DecisionBatch, incident: Incident, policy: Policy) -> None:
    """Give up the incident's worker after its grace: where a reattempt has failed, or where a process still runs that
    should have ended."""
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
            return  # it only reported a break that a newer group has replaced; the plan moves it off an isolated node
        _give_up(batch, incident, worker, incident.severity, f"it reported {incident.kind} and still runs")
    elif links.explain(state, task):
        return  # what the links' probes say is better evidence than who reported what
    elif task.group.reattempts >= policy.reattempts_max and incident.generations.get(task.name) == task.generation:
        again = f"the group broke again after reattempts in place: {_times(task.group.reattempts)}"
        suspects = list(_suspects(task, incident)) or [(worker, "cause unknown")]
        for suspect, cause in suspects:
            _give_up(batch, incident, suspect, Severity.SEV2, f"{again}; {cause}")


def _give_up(batch: DecisionBatch, incident: Incident, worker: Worker, severity: Severity, reason: str) -> None:
    batch.add(
        v.IncidentEscalated(
            incident=incident.id,
            severity=severity.value,
            worker=worker.worker,
            reason=f"{reason}: {incident.message}"[:1024],
        )
    )


def _suspects(task: Task, incident: Incident) -> Iterator[tuple[Worker, str]]:
    """Yield each worker to evict for a broken connection, and the reason. Of each node to blame it is the oldest
    process at an end of a broken link; where no node is to blame, the reporting worker that was suspected before, else
    the oldest."""
    reports = blame.reports(task, incident)
    ends = dict.fromkeys([*reports, *(name for peers in reports.values() for name in peers)])
    candidates = sorted((task.workers[name] for name in ends if name in task.workers), key=_number)
    candidates = [worker for worker in candidates if worker.alive]
    verdict, weights = blame.verdict(task, incident), blame.evidence(task, incident)
    for node in verdict.blamed:
        broken = f"{node} is an endpoint of {_links(weights[node] + task.troubles.ends.get(node, 0))} that broke"
        doubt = "" if node in verdict.clear else ", like others"
        yield from [(worker, broken + doubt) for worker in candidates if worker.node == node][:1]
    if not verdict.blamed and candidates:
        suspect = max(candidates, key=lambda worker: (task.troubles.breaks.get(worker.node, 0), -_number(worker)))
        yield suspect, "suspected before" if task.troubles.breaks.get(suspect.node) else "cause unknown"


def _links(weight: int) -> str:
    count = weight // blame.PLAIN
    return "1 connection" if count == 1 else f"{count} connections"


def _number(worker: Worker) -> int:
    return int(worker.worker.rpartition(".")[2])


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _failing_nodes(task: Task, policy: Policy) -> list[str]:
    """Return the nodes that have as many strikes for the task as the policy allows."""
    return [node for node, count in task.troubles.strikes.items() if count >= policy.strikes_max]


def _training_nodes(task: Task) -> set[str]:
    """Return the nodes of living members. The set is only for look-ups: its order is undefined."""
    return {worker.node for worker in task.workers.values() if worker.status is WorkerStatus.MEMBER}


def _makes_progress(task: Task) -> bool:
    """Return whether the newest group is complete and has committed a step."""
    return task.confirmed and task.progress.committed_generation == task.generation


def waits_for_step(task: Task, node: str, policy: Policy) -> bool:
    """Return whether a new worker on the node must wait for the task's next step: workers ended there again and again,
    while others of the task train there."""
    return task.troubles.strikes.get(node, 0) >= policy.strikes_max and node in _training_nodes(task)


def fail_task(batch: DecisionBatch, task: Task, policy: Policy) -> None:
    """Fail the task where the same failure on two nodes shows that it is the task's own, or where it restarts without
    end."""
    failing = _failing_nodes(task, policy)
    early = task.troubles.early >= _EARLY_MAX
    if (len(failing) < 2 or _makes_progress(task)) and task.troubles.stuck < policy.stuck_max and not early:
        return
    incidents = [incident for incident in batch.state.incidents.values() if task.name in incident.generations]
    last = incidents[-1] if incidents else None
    stuck = f"failed {task.troubles.stuck} times without a new iteration after {task.progress.best_iteration}"
    cause = (
        f"its program ended {_times(task.troubles.early)} in mid-training without hook.stop(reason)"
        if early
        else f"its workers failed to restart on {' and '.join(failing)}"
        if len(failing) >= 2
        else f"{stuck}: its workers ended"
    )
    where = f" ({last.place})" if last and last.place else ""
    tail = f"; last: {last.kind}{where}: {last.message}\n{last.log_tail}" if last else ""
    batch.add(v.TaskFailed(task=task.name, reason=f"{cause}{tail}"))


def _faulty_nodes(state: ClusterState, task: Task, policy: Policy) -> Iterator[tuple[str, str]]:
    """Yield the nodes that the task's failures accuse, and the reason; none that something else explains as well."""
    failing, troubles = _failing_nodes(task, policy), task.troubles
    if failing and (len(failing) == 1 or _makes_progress(task)):
        training = _training_nodes(task)
        for node in failing:
            if node not in training:
                times_failed = _times(troubles.strikes[node])
                yield node, f"workers of {task.name} ended here {times_failed} without a committed step"
    unclear = [node for node, times in troubles.unclear.items() if times >= policy.strikes_max]
    for node, times in troubles.breaks.items():
        if times < policy.strikes_max:
            continue
        clear = times - troubles.unclear.get(node, 0) >= policy.strikes_max
        if clear or (
            len(unclear) < _UNCLEAR_MAX and (troubles.stuck >= policy.strikes_max or _can_try_elsewhere(state, task))
        ):
            given_up = f"workers evicted {_times(times)}"
            yield node, f"groups of {task.name} broke here again and again: {given_up}"


def _can_try_elsewhere(state: ClusterState, task: Task) -> bool:
    """Return whether one of the task's two replicas can move to another node. Either may be at fault, and without a
    third node that stays unclear; the task keeps its size."""
    assignment = state.plan.assignments.get(task.name)
    accused = {worker.node for worker in task.workers.values()} | {*task.troubles.breaks, *task.troubles.ends}
    return assignment is not None and len(assignment.replicas) == 2 and _has_other_node(state, accused)


def _has_other_node(state: ClusterState, accused: set[str]) -> bool:
    """Return whether a node that is not accused could carry workers."""
    return any(node.schedulable and not node.cordoned and node.name not in accused for node in state.nodes.values())


def isolate_nodes(batch: DecisionBatch, policy: Policy) -> None:
    """Isolate nodes that return from loss too often, have SEV1 incidents or are proven at fault, if others remain; and
    those that are expected to fail, if they can be spared."""
    state = batch.state
    faults = [fault for task in state.active for fault in _faulty_nodes(state, task, policy)]
    if not _has_other_node(state, {node for node, _ in faults}):
        faults = []
    window_us = int(policy.flap_window_s * _SECOND_US)
    blamed = [i for i in state.incidents.values() if i.severity is Severity.SEV1 and i.kind != "node_lost"]
    accused = {node for node, _ in faults} | {incident.node for incident in blamed}
    flaps_max = policy.flaps_max
    candidates = dict.fromkeys([*batch.survey.nodes.returned, *batch.survey.nodes.foretold, *accused])
    for name in in_order(state.nodes, [name for name in candidates if name in state.nodes]):
        node = state.nodes[name]
        if node.isolated or node.status is not NodeStatus.UP:
            continue
        reasons = [reason for name, reason in faults if name == node.name]
        reasons += [incident.message for incident in blamed if incident.node == node.name]
        flaps = [at_us for at_us in node.returns_us if at_us > state.now_us - window_us]
        if len(flaps) >= flaps_max:
            reasons.append(f"flapping: lost and returned {_times(len(flaps))} within {policy.flap_window_s:g} s")
        if node.foretold and departing.can_spare(batch, node):
            reasons.append(f"its failure is expected: {node.foretold}")
        if reasons:
            batch.add(v.NodeIsolated(node=node.name, until_us=None, reason=reasons[0][:1024]))
