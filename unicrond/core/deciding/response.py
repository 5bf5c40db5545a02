"""The choice of a response to a failure, from a reattempt in place to a failed task: every such choice stands here.

The ladder, for one incident of a task; each step is a decision with its reason:
  SEV3  a new generation of the same members (`is_reattempted`); breaks it again before it is calm, `reattempts_max`
        times -> SEV2
  SEV2  the process ends by itself or is given up (`evictions`), another takes its place (`waits_for_step`: not yet);
        `strikes_max` times -> SEV1
  SEV1  the node is isolated (`isolations`), all tasks get a new plan
  `stuck_max` blows or faults of its program without a new iteration, or two nodes struck and no step: it is the task
   that fails (`failure_reason`), and the nodes are readmitted (`failed_tasks`).

Rules (how bad an error is: faults/severity.py; whose fault it is: faults/program_faults.py; whose a broken connection:
faults/blame.py)
-----
* Programs before nodes: a fault of the program is no strike. Its task waits before each next start
  (`waits_for_restart`).
* Ends of unknown cause speak against a node only if they follow the node and not the program: the task trains
  elsewhere, or members that stood elsewhere at that time still stand. Else the task is first tried on another node,
  where one has room (`program_faults.avoided_nodes`), and where none has, it goes on here until it fails. Though others
  train, a node is isolated only after that trial, where the plan has another one for it (`_is_tried_elsewhere`).
* What a program fails by on one node alone isolates the node only where other replicas have computed a finite loss in
  its place, twice (faults/local_faults.py).
* A node on which members of the task train is not isolated for workers that end there: the members show that the
  node works. New workers there wait for the next step instead.
* Nor is it isolated for broken connections while the task makes progress, unless the blame is clear, or one of two
  replicas can be tried on a node that is free of the task.
* Each break is answered once: a batch that gives up a member for its own fault gives up no other worker for the broken
  connections of that member's group.
* Where a node is isolated, workers that only reported a broken connection leave it by the plan, with their state,
  once a newer group has replaced the broken one.
* The last node that a task could run on is not isolated for failures that may as well be the task's fault.
* Where probes say that nothing passes between two of the members, nobody is given up for broken connections: the task
  goes on without one end (faults/links.py).
* A task that makes progress is not failed, whichever workers end; but one whose program diverges is, since it makes
  progress with something that its program alone would not train (`on_divergence: stop`). No worker is given up, and
  nothing is held against a node.
* Isolations, and evictions on suspicion, pass the brakes (nodes/brakes.py); what they hold is decided again each time.

What does not live here: the decisions that carry a response out (memberships.py, worker_placement.py, plans.py,
nodes.py), what it does to the state (folding/responses.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from unicrond.core.deciding.batch import DecisionBatch
from unicrond.core.faults import blame, links, local_faults
from unicrond.core.faults.program_faults import diverging_text, number_of, occurrences, training_nodes
from unicrond.core.faults.severity import severity_of
from unicrond.core.nodes import brakes
from unicrond.core.nodes.brakes import SUSPICIONS
from unicrond.core.rules.survey import Survey
from unicrond.core.state.ordered_map import in_order
from unicrond.core.state.policy import Policy
from unicrond.core.state.state import (
    ClusterState,
    Incident,
    Node,
    NodeStatus,
    Severity,
    Task,
    TaskStatus,
    Worker,
    WorkerStatus,
)
from unicrond.core.state.task_parts import Crashes
from unicrond.events import vocabulary as v

_SECOND_US = 1_000_000
#: Of the two ends of a link the wrong one may have been isolated first, and then the other; a third isolation would
#: show that the fault is the task's.
_UNCLEAR_MAX = 3
#: How often a program may leave the loop in mid-training, on any node: one that does so does it again.
_EARLY_MAX = 3
#: How often in a row the loss of one iteration may be no finite number: each time another process computes it.
_NAN_MAX = 3


class Eviction(NamedTuple):
    """A worker that is given up for an incident, which has this severity from then on."""

    worker: Worker
    severity: Severity
    reason: str


def respond(batch: DecisionBatch) -> None:
    """Decide the responses that change who may train where: evictions, ends of tasks, isolations."""
    survey = batch.survey
    state, policy = survey.state, survey.policy
    symptoms = [incident for incident in state.incidents.values() if incident.severity is Severity.SEV3]
    for incident in state.incidents.values():
        if incident.severity is not Severity.SEV3:
            _give_up(batch, incident)
    broken = _broken_generations(batch)
    for incident in symptoms:
        if not any(broken.get(task) == generation for task, generation in incident.generations.items()):
            _give_up(batch, incident)
    for task in survey.troubled:
        if reason := failure_reason(state, task, policy):
            batch.add(v.TaskFailed(task=task.name, reason=reason))
    for node, reason in isolations(survey):
        batch.add(v.NodeIsolated(node=node, until_us=None, reason=reason[:1024]))


def _give_up(batch: DecisionBatch, incident: Incident) -> None:
    """Add the evictions for the incident."""
    for worker, severity, reason in evictions(batch.state, incident, batch.survey.policy):
        text = f"{reason}: {incident.message}"[:1024]
        batch.add(v.IncidentEscalated(incident=incident.id, severity=severity.value, worker=worker.worker, reason=text))


def _broken_generations(batch: DecisionBatch) -> dict[str, int]:
    """Return, per task, the newest generation where the batch gives up one of its members."""
    workers = [event.worker for event in batch.events if isinstance(event, v.IncidentEscalated)]
    tasks = {worker: batch.state.tasks[worker.rpartition(".")[0]] for worker in workers}
    return {task.name: task.generation for worker, task in tasks.items() if task.is_member(worker)}


# --- SEV3: reattempt in place ----------------------------------------------------------------------


def is_reattempted(state: ClusterState, task: Task) -> bool:
    """Return whether the same members form the next group: the newest group broke, or the one that it follows, and no
    death has explained the break in time."""
    return any(incident.is_overdue for incident in breaks(state, task))


def breaks(state: ClusterState, task: Task) -> Iterator[Incident]:
    """Yield the incidents in which that group broke without a known cause."""
    for incident in state.incidents.values():
        if is_break(incident, task):
            yield incident


def is_break(incident: Incident, task: Task) -> bool:
    """Return whether a group of the task that is at work broke in the incident, without a known cause; or for a
    suspicion on which nobody was given up (a brake holds that), and by which its members have left it."""
    is_left = incident.severity is Severity.SEV3 or (incident.kind in SUSPICIONS and bool(incident.lost_peers))
    return is_left and incident.generations.get(task.name) in task.in_use


# --- SEV2: restart the worker ----------------------------------------------------------------------


def evictions(state: ClusterState, incident: Incident, policy: Policy) -> Iterator[Eviction]:
    """Yield the workers to give up for the incident after its grace: where a reattempt has failed, or where a process
    still runs that should have ended."""
    task = state.tasks.get(incident.worker.rpartition(".")[0])
    worker = task.workers.get(incident.worker) if task else None
    if not incident.is_overdue or task is None or worker is None or not worker.alive:
        return
    if task.status is not TaskStatus.ACTIVE:
        return
    if incident.severity is not Severity.SEV3:
        broke = severity_of(incident.kind, state.severity) is Severity.SEV3
        if broke and incident.generations.get(task.name) not in task.in_use:
            return  # it only reported a break that a newer group has replaced; the plan moves it off an isolated node
        if incident.kind not in SUSPICIONS:
            yield Eviction(worker, incident.severity, f"it reported {incident.kind} and still runs")
        elif not is_refuted(task, incident):
            yield Eviction(worker, incident.severity, "it still runs")
    elif links.explain(state, task):
        return  # what the links' probes say is better evidence than who reported what
    elif task.group.reattempts >= policy.reattempts_max and incident.generations.get(task.name) == task.generation:
        again = f"the group broke again after reattempts in place: {occurrences(task.group.reattempts)}"
        suspects = list(_suspects(task, incident)) or [(worker, "cause unknown")]
        for suspect, cause in suspects:
            yield Eviction(suspect, Severity.SEV2, f"{again}; {cause}")


def is_refuted(task: Task, incident: Incident) -> bool:
    """Return whether a worker that was suspected, and not given up, has gone on: its group has made a step since."""
    worker = task.workers.get(incident.worker)
    lives = worker is not None and worker.alive and task.progress.committed_generation == task.generation
    return incident.kind == "hang" and lives and task.progress.last_commit_us > incident.detected_us


def _suspects(task: Task, incident: Incident) -> Iterator[tuple[Worker, str]]:
    """Yield each worker to evict for a broken connection, and the reason. Of each node to blame it is the oldest
    process at an end of a broken link; where no node is to blame, the reporting worker that was suspected before, else
    the oldest."""
    reports = blame.reports(task, incident)
    ends = dict.fromkeys([*reports, *(name for peers in reports.values() for name in peers)])
    candidates = sorted((task.workers[name] for name in ends if name in task.workers), key=number_of)
    candidates = [worker for worker in candidates if worker.alive]
    verdict, weights = blame.verdict(task, incident), blame.evidence(task, incident)
    for node in verdict.blamed:
        broken = f"{node} is an endpoint of {_links(weights[node] + task.troubles.ends.get(node, 0))} that broke"
        doubt = "" if node in verdict.clear else ", like others"
        yield from [(worker, broken + doubt) for worker in candidates if worker.node == node][:1]
    if not verdict.blamed and candidates:
        suspect = max(candidates, key=lambda worker: (task.troubles.breaks.get(worker.node, 0), -number_of(worker)))
        yield suspect, "suspected before" if task.troubles.breaks.get(suspect.node) else "cause unknown"


def _links(weight: int) -> str:
    count = weight // blame.PLAIN
    return "1 connection" if count == 1 else f"{count} connections"


def waits_for_step(task: Task, node: str, policy: Policy) -> bool:
    """Return whether a new worker on the node must wait for the task's next step: workers ended there again and again,
    while others of the task train there."""
    return task.troubles.strikes.get(node, 0) >= policy.strikes_max and node in training_nodes(task)


def waits_for_restart(task: Task) -> bool:
    """Return whether no worker of the task is started now: its program has failed again and again."""
    crashes = task.troubles.crashes
    return crashes is not None and crashes.waits


# --- SEV1: isolate the node ------------------------------------------------------------------------


def isolations(survey: Survey) -> Iterator[tuple[str, str]]:
    """Yield the nodes to isolate, each with the reason: those that return from loss too often, have SEV1 incidents or
    are proven at fault, if others remain; and those that are expected to fail, if they can be spared."""
    state, policy = survey.state, survey.policy
    faults = [fault for task in survey.troubled for fault in _faulty_nodes(survey, task)]
    faults += local_faults.accused_nodes(state)
    if not _has_other_node(state, {node for node, _ in faults}):
        faults = []
    window_us = int(policy.flap_window_s * _SECOND_US)
    blamed = [i for i in state.incidents.values() if i.severity is Severity.SEV1 and i.kind != "node_lost"]
    holds = {node: hold for node in brakes.held_nodes(state) if (hold := brakes.isolation_hold(state, node))}
    broken_nodes = [node for node, hold in holds.items() if hold.cause == "hardware"]
    accused = {node for node, _ in faults} | {incident.node for incident in blamed} | {*broken_nodes}
    flaps_max = policy.flaps_max
    candidates = dict.fromkeys([*survey.nodes.returned, *survey.nodes.foretold, *accused])
    is_calm = True
    for name in in_order(state.nodes, [name for name in candidates if name in state.nodes]):
        node = state.nodes[name]
        if node.isolation.active or node.status is not NodeStatus.UP:
            continue
        reasons = [reason for name, reason in faults if name == node.name]
        reasons += [incident.message for incident in blamed if incident.node == node.name]
        flaps = [at_us for at_us in node.health.returns_us if at_us > state.now_us - window_us]
        if len(flaps) >= flaps_max:
            reasons.append(f"flapping: lost and returned {occurrences(len(flaps))} within {policy.flap_window_s:g} s")
        if node.health.failure_forecast and _can_spare(survey, node):
            reasons.append(f"its failure is expected: {node.health.failure_forecast}")
        elif node.name in broken_nodes:
            reasons.append(holds[node.name].reason)
        if reasons:
            is_calm = False
            yield node.name, reasons[0]
    if is_calm:
        yield from _node_to_check(survey)


def _node_to_check(survey: Survey) -> list[tuple[str, str]]:
    """Return the node, if there is one, that a conviction of other bits alone sends to its health check, and why: one
    at a time, and none with the last half of what the brakes allow."""
    state = survey.state
    for name, reason in local_faults.nodes_to_check(state):
        recent = len(brakes.within_hour(state.isolations_us, state.now_us))
        is_other_out = any(node.isolation.active for node in state.nodes.values())
        if not is_other_out and 2 * recent < state.brakes.isolations_per_hour and _can_spare(survey, state.nodes[name]):
            return [(name, reason)]
    return []


def _faulty_nodes(survey: Survey, task: Task) -> Iterator[tuple[str, str]]:
    """Yield the nodes that the task's failures accuse, and the reason; none that something else explains as well."""
    state, policy = survey.state, survey.policy
    failing, troubles = _failing_nodes(state, task, policy), task.troubles
    if failing and (len(failing) == 1 or _makes_progress(task)):
        training = training_nodes(task)
        for node in failing:
            stands = _makes_progress(task) or _has_witness(task, node)
            if node not in training and stands and _is_tried_elsewhere(survey, task, node):
                times_failed = occurrences(troubles.strikes[node])
                yield node, f"workers of {task.name} ended here {times_failed} without a committed step"
    unclear = [node for node, times in troubles.unclear_breaks.items() if times >= policy.strikes_max]
    for node, times in troubles.breaks.items():
        if times < policy.strikes_max:
            continue
        clear = times - troubles.unclear_breaks.get(node, 0) >= policy.strikes_max
        if clear or (
            len(unclear) < _UNCLEAR_MAX and (troubles.stuck >= policy.strikes_max or _can_try_elsewhere(state, task))
        ):
            given_up = f"workers evicted {occurrences(times)}"
            yield node, f"groups of {task.name} broke here again and again: {given_up}"


def _has_witness(task: Task, node: str) -> bool:
    """Return whether a member trains elsewhere that was there when the last worker ended here: the program works there,
    at the same time and in the same iterations."""
    below = task.troubles.struck_below.get(node, 0)
    return any(
        worker.status is WorkerStatus.MEMBER and worker.node != node and number_of(worker) < below
        for worker in task.workers.values()
    )


def _is_tried_elsewhere(survey: Survey, task: Task, node: str) -> bool:
    """Return whether a worker that was started after the last one ended here trains elsewhere, or no other node has
    room for it: then the plan, which avoids the node, has it here still."""
    below = task.troubles.struck_below.get(node, 0)
    if any(worker.status is WorkerStatus.MEMBER and number_of(worker) >= below for worker in task.workers.values()):
        return True
    assignment = survey.state.plan.assignments.get(task.name)
    return survey.fresh and (assignment is None or any(node in nodes for nodes in assignment.replicas))


def _can_try_elsewhere(state: ClusterState, task: Task) -> bool:
    """Return whether one of the task's two replicas can move to another node. Either may be at fault, and without a
    third node that stays unclear; the task keeps its size."""
    assignment = state.plan.assignments.get(task.name)
    accused = {worker.node for worker in task.workers.values()} | {*task.troubles.breaks, *task.troubles.ends}
    return assignment is not None and len(assignment.replicas) == 2 and _has_other_node(state, accused)


def _has_other_node(state: ClusterState, accused: set[str]) -> bool:
    """Return whether a node that is not accused could carry workers."""
    return any(
        node.schedulable and not node.cordon.active and node.name not in accused for node in state.nodes.values()
    )


def _can_spare(survey: Survey, node: Node) -> bool:
    """Return whether the slots of the other nodes suffice for the minimum of every task that has workers. Only numbers
    are compared."""
    assignments = survey.state.plan.assignments
    out = {node.name, *survey.absence.absentees}
    slots = sum(count for name, count in survey.capacity.items() if name not in out)
    need = sum(
        task.spec.min_workers for task in survey.active if task.name in assignments and assignments[task.name].workers
    )
    return slots > 0 and need <= slots


# --- the end of the ladder: the task is at fault ---------------------------------------------------


def failure_reason(state: ClusterState, task: Task, policy: Policy) -> str:
    """Return why the task fails: its program diverges, the same failure on two nodes shows that it is the task's own,
    or it restarts without end; "" where it goes on."""
    if task.spec.on_divergence == "stop" and task.troubles.program_diverges:
        return f"{diverging_text(task)} (on_divergence: stop)"
    failing = _failing_nodes(state, task, policy)
    crashes = task.troubles.crashes or Crashes()
    early, is_nan = crashes.early >= _EARLY_MAX, crashes.same_nan >= _NAN_MAX
    restarts = (len(failing) < 2 or _makes_progress(task)) and task.troubles.stuck < policy.stuck_max
    if restarts and not early and not is_nan:
        return ""
    incidents = [incident for incident in state.incidents.values() if task.name in incident.generations]
    last = incidents[-1] if incidents else None
    stuck = f"failed {task.troubles.stuck} times without a new iteration after {task.progress.best_iteration}"
    cause = (
        f"its program ended {occurrences(crashes.early)} in mid-training without hook.stop(reason)"
        if early
        else f"its loss in iteration {crashes.iteration} was no finite number {occurrences(crashes.same_nan)} in a row"
        if is_nan
        else f"{stuck}: its program ended by {crashes.text}"
        if crashes.count and len(failing) < 2
        else f"its workers failed to restart on {' and '.join(failing)}"
        if len(failing) >= 2
        else f"{stuck}: its workers ended"
    )
    where = f" ({last.place})" if last and last.place else ""
    output = crashes.tail or (last.log_tail if last else "")
    tail = f"; last: {last.kind}{where}: {last.message}" if last else ""
    return f"{cause}{tail}" + (f"\n{output}" if output or tail else "")


def _is_suspect(state: ClusterState, name: str, task: Task) -> bool:
    """Return whether the node has been isolated for ends of the task, and nothing has cleared it since."""
    suspicion = state.nodes[name].health.suspicion if name in state.nodes else None
    return suspicion is not None and task.name in suspicion.tasks


def failed_tasks(state: ClusterState, node: Node) -> list[str]:
    """Return the tasks that were at fault since they failed on other nodes too; none where the node itself is
    blamed, or one has trained without it alone: such a task may have failed by something else since."""
    if node.isolation.probation is not None and node.isolation.probation.cause == "hardware":
        return []
    strikers = [task for task in state.tasks.values() if task.troubles.names(node.name)]
    failed = strikers and all(task.status is TaskStatus.FAILED for task in strikers)
    is_local = any(node.name in task.troubles.local_faults for task in strikers)
    return [task.name for task in strikers] if failed and not is_local else []


# --- parts --------------------------------------------------------------------------------------


def _failing_nodes(state: ClusterState, task: Task, policy: Policy) -> list[str]:
    """Return the nodes that have as many strikes for the task as the policy allows; of a suspect, one is enough."""
    strikes = task.troubles.strikes
    return [node for node, n in strikes.items() if n >= policy.strikes_max or _is_suspect(state, node, task)]


def _makes_progress(task: Task) -> bool:
    """Return whether the newest group is complete and has committed a step."""
    return task.confirmed and task.progress.committed_generation == task.generation
