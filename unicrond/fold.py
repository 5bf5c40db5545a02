"""The one door: `fold(state, entry) -> state` is the only way in which cluster state changes.

Rules
-----
* Total and pure: any valid event may come at any time, late, twice or from the dead; the fold never
  raises on an observation, it ignores what no longer matters.
* Time is the log's receive time, as a running maximum. The observer's clock only dates its own sighting.
* Fencing lives here: decisions and commands of another term than the newest claimed one are inert.
* De-duplication lives here: per producer, (boot, number) only grows.
* A report about a process that is gone, or a group that its reporter has left, changes nothing.
* Facts open incidents (`_blame`); only decisions close them. One incident per (task, generation): the
  first root cause names it; a broken connection is a symptom, and gives its place to the cause that
  explains it. A lost node is one incident for all its tasks and takes over what it explains.

What does not live here: severities (`severity.py`), what to do about anything (`decide.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from events import vocabulary as v
from events.envelope import Entry, Envelope, Quarantined, Recorded
from unicrond.costs import accrue
from unicrond.hangs import judge
from unicrond.severity import severity_of
from unicrond.state import (
    CLOSED_INCIDENTS_MAX,
    RETURNS_MAX,
    TIMINGS_MAX,
    WARM_UP,
    ClusterState,
    Incident,
    Injection,
    KeptState,
    Membership,
    Node,
    NodeStatus,
    Plan,
    Severity,
    Task,
    TaskStatus,
    Worker,
    WorkerStatus,
)


def fold(state: ClusterState, entry: Entry) -> ClusterState:
    """The state after `entry`. Entries come in sequence order; one already folded changes nothing."""
    if entry.seq <= state.seq:
        return state
    seq, now_us = entry.seq, max(state.now_us, entry.recorded_at_us)
    if isinstance(entry, Quarantined):
        return replace(state, seq=seq, now_us=now_us, quarantined=state.quarantined + 1)
    envelope = entry.envelope
    identity = (envelope.boot, envelope.number)
    if identity <= state.seen.get(envelope.producer, (-1, 0)):
        return replace(state, seq=seq, now_us=now_us, duplicates=state.duplicates + 1)
    state = replace(state, seq=seq, now_us=now_us, seen=state.seen | {envelope.producer: identity})
    event = envelope.event
    if isinstance(event, v.CoordinatorStarted):
        return _coordinator_started(state, event) if event.term > state.term else _inert(state)
    if isinstance(event, (v.Decision, v.Command)) and envelope.term != state.term:
        return _inert(state)
    after = _FOLDS[type(event)](state, event, envelope)
    return accrue(state, after, event)


def fold_all(state: ClusterState, entries: list[Recorded]) -> ClusterState:
    """The state after all of `entries`."""
    for entry in entries:
        state = fold(state, entry)
    return state


def _coordinator_started(state: ClusterState, event: v.CoordinatorStarted) -> ClusterState:
    # A fault that the last coordinator did not get to is not to strike out of the blue.
    return replace(state, term=event.term, severity=dict(event.severity), injections={})


def _inert(state: ClusterState) -> ClusterState:
    return replace(state, inert=state.inert + 1)


# --- small steps ---------------------------------------------------------------------------------


def _with_node(state: ClusterState, node: Node) -> ClusterState:
    return replace(state, nodes=state.nodes | {node.name: node})


def _with_task(state: ClusterState, task: Task) -> ClusterState:
    return replace(state, tasks=state.tasks | {task.name: task})


def _with_worker(task: Task, worker: Worker) -> Task:
    return replace(task, workers=task.workers | {worker.worker: worker})


def _without_workers(task: Task, gone: list[str]) -> Task:
    return replace(task, workers={name: w for name, w in task.workers.items() if name not in gone})


def _with_incident(state: ClusterState, incident: Incident) -> ClusterState:
    return replace(state, incidents=state.incidents | {incident.id: incident})


def _known(state: ClusterState, task: str, worker: str) -> tuple[Task, Worker] | None:
    """The task and the worker, where both are known; a report about anything else is stale."""
    known_task = state.tasks.get(task)
    known_worker = known_task.workers.get(worker) if known_task else None
    return (known_task, known_worker) if known_task and known_worker else None


def _broken_generation(task: Task, workers: list[str]) -> int:
    """The generation that the loss of these workers breaks (see Incident.generations)."""
    return task.generation if any(task.is_member(worker) for worker in workers) else task.generation - 1


def _is_symptom(incident: Incident) -> bool:
    """It may still turn out to be the echo of a death or of a lost node."""
    return incident.severity is Severity.SEV3


# --- incidents -----------------------------------------------------------------------------------


def _blame(
    state: ClusterState,
    envelope: Envelope,
    *,
    kind: str,
    node: str,
    worker: str,
    generations: dict[str, int],
    message: str,
    log_tail: str = "",
    place: str = "",
) -> ClusterState:
    """Opens an incident, or gives the fact to the open one that it belongs to."""
    severity = severity_of(kind, state.severity)

    def shares_generation(incident: Incident) -> bool:
        return any(incident.generations.get(task) == broken for task, broken in generations.items())

    # The generation says more than the worker, who may have reported an older group's end as well.
    for incident in sorted(state.incidents.values(), key=shares_generation, reverse=True):
        if not shares_generation(incident) and not (worker and incident.worker == worker):
            continue
        if _is_symptom(incident) and severity < incident.severity:
            # The root cause of what so far was only a broken connection.
            return _with_incident(
                state,
                replace(
                    incident,
                    kind=kind,
                    severity=severity,
                    node=node,
                    worker=worker,
                    generations=incident.generations | generations,
                    message=message,
                    log_tail=log_tail,
                    place=place or incident.place,
                    ripe=False,
                    occurred_us=min(incident.occurred_us, envelope.observed_at_us),
                    symptoms=incident.symptoms + 1,
                ),
            )
        return _with_incident(
            state,
            replace(
                incident,
                severity=min(severity, incident.severity),
                generations=incident.generations | generations,
                log_tail=incident.log_tail or log_tail,
                symptoms=incident.symptoms + 1,
            ),
        )
    return _open_incident(
        state,
        envelope,
        kind=kind,
        node=node,
        worker=worker,
        generations=generations,
        message=message,
        log_tail=log_tail,
        place=place,
        occurred_us=envelope.observed_at_us,
    )


def _open_incident(
    state: ClusterState,
    envelope: Envelope,
    *,
    kind: str,
    node: str,
    worker: str,
    generations: dict[str, int],
    message: str,
    log_tail: str,
    place: str = "",
    occurred_us: int,
) -> ClusterState:
    incident = Incident(
        id=f"i{state.seq}",
        kind=kind,
        severity=severity_of(kind, state.severity),
        node=node,
        worker=worker,
        generations=generations,
        message=message,
        occurred_us=occurred_us,
        detected_us=state.now_us,
        log_tail=log_tail,
        place=place,
    )
    return replace(_with_incident(state, incident), incidents_total=state.incidents_total + 1)


def _lose_workers_of(
    state: ClusterState,
    envelope: Envelope,
    node: str,
    gone: dict[str, list[str]],
    *,
    kind: str,
    message: str,
    occurred_us: int,
) -> ClusterState:
    """One incident for all that was lost with a node; it takes over the incidents that it explains."""
    generations = {
        task: _broken_generation(state.tasks[task], workers)
        for task, workers in gone.items()
        if state.tasks[task].status is TaskStatus.ACTIVE
    }
    explained = [
        incident
        for incident in state.incidents.values()
        if incident.node == node or (_is_symptom(incident) and any(task in generations for task in incident.tasks))
    ]
    for incident in explained:
        generations = incident.generations | generations
        occurred_us = min(occurred_us, incident.occurred_us)
    state = replace(state, incidents={k: i for k, i in state.incidents.items() if i not in explained})
    state = _open_incident(
        state,
        envelope,
        kind=kind,
        node=node,
        worker="",
        generations=generations,
        message=message,
        log_tail="",
        occurred_us=occurred_us,
    )
    opened = state.incidents[f"i{state.seq}"]
    symptoms = sum(1 + incident.symptoms for incident in explained)
    detected_us = min([opened.detected_us, *(incident.detected_us for incident in explained)])
    redone = sum(incident.redone for incident in explained)
    return _with_incident(state, replace(opened, symptoms=symptoms, detected_us=detected_us, redone=redone))


# --- nodes ---------------------------------------------------------------------------------------


def _node_joined(state: ClusterState, event: v.NodeJoined, envelope: Envelope) -> ClusterState:
    old = state.nodes.get(event.node)
    node = Node(
        name=event.node,
        status=NodeStatus.UP,
        slots=event.slots,
        slots_max=max(event.slots, old.slots_max if old else 0),
        address=event.address,
        store=event.store,
        agent_boot=event.agent_boot,
        joined_us=state.now_us,
        version=event.version,
        isolated=old.isolated if old else False,
        isolation_over=old.isolation_over if old else False,
        isolations=old.isolations if old else 0,
        cordoned=old.cordoned if old else False,
        draining=old.draining if old else False,
        cordon_reason=old.cordon_reason if old else "",
        returns_us=old.returns_us if old else (),
        reason=old.reason if old and old.isolated else "",
        commands=old.commands if old else 0,
        memory=event.memory,
    )
    if old is not None and old.status is NodeStatus.LOST:
        node = _came_back(state, node)
    state = _forget_kept(_with_node(state, node), event.node)  # what it still holds it tells next
    return _reconcile_workers(state, event, envelope)


def _came_back(state: ClusterState, node: Node) -> Node:
    return replace(node, returns_us=(*node.returns_us, state.now_us)[-RETURNS_MAX:])


def _reconcile_workers(state: ClusterState, event: v.NodeJoined, envelope: Envelope) -> ClusterState:
    """What the agent found alive, against what the log believed of this node."""
    alive = {running.worker for running in event.workers}
    missing: dict[str, list[str]] = {}
    for task in state.tasks.values():
        dead = [
            w.worker
            for w in task.workers.values()
            # A worker without a pid was commanded only: the command still waits for the agent.
            if w.node == event.node and w.worker not in alive and (w.pid or w.status is WorkerStatus.LOST)
        ]
        expected = [name for name in dead if not task.workers[name].alive]
        if expected:
            state = _with_task(state, _without_workers(task, expected))
        if len(dead) > len(expected):
            missing[task.name] = [name for name in dead if name not in expected]
    if missing:
        if not alive:  # down and up again, quicker than its silence could tell
            state = _with_node(state, _came_back(state, state.nodes[event.node]))
        state = _lose_workers_of(
            state,
            envelope,
            event.node,
            missing,
            kind="process_exit" if alive else "node_lost",
            message=f"agent of {event.node} came back without {sum(map(len, missing.values()))} of its workers",
            occurred_us=envelope.observed_at_us,
        )
        for name, workers in missing.items():
            state = _with_task(state, _without_workers(state.tasks[name], workers))
    for running in event.workers:
        known = state.tasks.get(running.task)
        if known and running.worker not in known.workers:
            state = _with_task(state, _with_worker(known, _stray(running.worker, event.node, running.pid)))
    return state


def _stray(worker: str, node: str, pid: int) -> Worker:
    """A process that nobody wants; LOST workers on a node that is up are stopped by `decide`."""
    return Worker(worker=worker, node=node, replica=-1, shard=0, status=WorkerStatus.LOST, pid=pid)


def _node_left(state: ClusterState, event: v.NodeLeft, _: Envelope) -> ClusterState:
    node = state.nodes.get(event.node)
    if node is None:
        return state
    state = _forget_injections(state, event.node)
    state = _with_node(state, replace(node, status=NodeStatus.LEFT, reason=event.reason))
    state = _forget_kept(state, event.node)
    for task in state.tasks.values():
        ended = [w.worker for w in task.workers.values() if w.node == event.node]
        if ended:
            state = _with_task(state, _without_workers(task, ended))
    return state


def _node_lost(state: ClusterState, event: v.NodeLost, envelope: Envelope) -> ClusterState:
    node = state.nodes.get(event.node)
    if node is None or node.status is not NodeStatus.UP:
        return state
    state = _forget_injections(state, event.node)
    state = _with_node(state, replace(node, status=NodeStatus.LOST, reason=event.reason))
    gone = {
        task.name: [w.worker for w in task.workers.values() if w.node == event.node and w.alive]
        for task in state.tasks.values()
    }
    gone = {task: workers for task, workers in gone.items() if workers}
    state = _lose_workers_of(
        state,
        envelope,
        event.node,
        gone,
        kind="node_lost",
        message=event.reason,
        occurred_us=event.evidence.beat_at_us or envelope.observed_at_us,
    )
    for task in state.tasks.values():
        on_node = {
            w.worker: replace(w, status=WorkerStatus.LOST) for w in task.workers.values() if w.node == event.node
        }
        if on_node:
            state = _with_task(state, replace(task, workers=task.workers | on_node))
    return state


def _node_returned(state: ClusterState, event: v.NodeReturned, _: Envelope) -> ClusterState:
    node = state.nodes.get(event.node)
    if node is None or node.status is not NodeStatus.LOST:
        return state
    return _with_node(state, _came_back(state, replace(node, status=NodeStatus.UP, reason="")))


def _node_isolated(state: ClusterState, event: v.NodeIsolated, _: Envelope) -> ClusterState:
    node = state.nodes.get(event.node)
    if node is None:
        return state
    for incident in state.incidents.values():
        if incident.node == event.node:  # the restart has failed: its cure is another plan
            state = _with_incident(state, replace(incident, severity=Severity.SEV1))
    return _with_node(
        state,
        replace(
            node,
            isolated=True,
            isolation_over=False,
            isolations=node.isolations + 1,
            returns_us=(),
            reason=event.reason,
        ),
    )


def _node_readmitted(state: ClusterState, event: v.NodeReadmitted, _: Envelope) -> ClusterState:
    node = state.nodes.get(event.node)
    if node is None or not node.isolated:
        return state
    state = _with_node(state, replace(node, isolated=False, isolation_over=False, reason=""))
    for task in state.tasks.values():
        if event.node in task.strikes:
            state = _with_task(state, _acquit(task, {event.node}))
    return state


def _node_cordoned(state: ClusterState, event: v.NodeCordoned, _: Envelope) -> ClusterState:
    node = state.nodes.get(event.node)
    if node is None:
        return state
    return _with_node(state, replace(node, cordoned=True, draining=event.drain, cordon_reason=event.reason))


def _node_uncordoned(state: ClusterState, event: v.NodeUncordoned, _: Envelope) -> ClusterState:
    node = state.nodes.get(event.node)
    if node is None:
        return state
    return _with_node(state, replace(node, cordoned=False, draining=False, cordon_reason=""))


# --- workers -------------------------------------------------------------------------------------


def _worker_started(state: ClusterState, event: v.WorkerStarted, _: Envelope) -> ClusterState:
    task = state.tasks.get(event.task)
    if task is None:
        return state
    worker = task.workers.get(event.worker)
    if worker is None:
        return _with_task(state, _with_worker(task, _stray(event.worker, event.node, event.pid)))
    return _with_task(state, _with_worker(task, replace(worker, pid=event.pid)))


def _worker_ready(state: ClusterState, event: v.WorkerReady, _: Envelope) -> ClusterState:
    known = _known(state, event.task, event.worker)
    if known is None or known[1].status is not WorkerStatus.STARTING:
        return state
    task, worker = known
    return _with_task(state, _with_worker(task, replace(worker, status=WorkerStatus.READY)))


def _worker_regrouped(state: ClusterState, event: v.WorkerRegrouped, _: Envelope) -> ClusterState:
    known = _known(state, event.task, event.worker)
    if known is None or not known[1].can_train or event.generation > known[0].generation:
        return state
    task, worker = known
    if event.generation < worker.generation:
        return state
    worker = replace(worker, status=WorkerStatus.MEMBER, generation=event.generation)
    task = _with_worker(task, worker)
    state = _with_task(state, task)
    for incident in state.incidents.values():
        broken = incident.generations.get(task.name)
        if broken is None or broken >= event.generation or incident.resumed_us:
            continue
        incident = replace(incident, redone=incident.redone + event.dealt)
        if event.source not in ("own", "replica"):
            lost = max(0, task.iteration - event.iteration + 1)
            incident = replace(incident, iterations_lost=max(lost, incident.iterations_lost), state_from=event.source)
        if all(_regrouped(state.tasks.get(name), since) for name, since in incident.generations.items()):
            incident = replace(incident, resumed_us=state.now_us)
        state = _with_incident(state, incident)
    return state


def _regrouped(task: Task | None, broken: int) -> bool:
    """The task has left the broken generation behind, or no longer needs to."""
    if task is None or task.status is not TaskStatus.ACTIVE:
        return True
    return task.generation > broken and task.confirmed


def _worker_parked(state: ClusterState, event: v.WorkerParked, _: Envelope) -> ClusterState:
    known = _known(state, event.task, event.worker)
    if known is None or not known[1].alive:
        return state
    task, worker = known
    return _with_task(state, _with_worker(task, replace(worker, status=WorkerStatus.PARKED)))


def _worker_exited(state: ClusterState, event: v.WorkerExited, envelope: Envelope) -> ClusterState:
    known = _known(state, event.task, event.worker)
    if known is None:
        return state
    task, worker = known
    broken = _broken_generation(task, [event.worker])
    state = _with_task(state, _without_workers(task, [event.worker]))
    if event.expected or not worker.alive or worker.status is WorkerStatus.PARKED:
        return state
    if task.status is not TaskStatus.ACTIVE:
        return state
    how = f"signal {event.signal}" if event.signal is not None else f"exit code {event.exit_code}"
    starting = worker.status is WorkerStatus.STARTING
    return _strike(
        state,
        envelope,
        task=task.name,
        worker=worker,
        kind="start_failed" if starting else "process_exit",
        broken=broken,
        message=f"worker {event.worker} on {event.node} ended by {how}" + (" while it started" if starting else ""),
        log_tail=event.log_tail,
    )


def _strike(
    state: ClusterState,
    envelope: Envelope,
    *,
    task: str,
    worker: Worker,
    kind: str,
    broken: int,
    message: str,
    log_tail: str = "",
) -> ClusterState:
    """A worker is gone though nobody asked: count it against its node and its task, and open an incident."""
    state = _with_task(state, _struck(state.tasks[task], worker))
    return _blame(
        state,
        envelope,
        kind=kind,
        node=worker.node,
        worker=worker.worker,
        generations={task: broken},
        message=message,
        log_tail=log_tail,
    )


def _struck(task: Task, worker: Worker) -> Task:
    """The blow counted, unless it is the one that was counted last (see Task.strikes)."""
    number = int(worker.worker.rpartition(".")[2])
    if number >= task.struck_below.get(worker.node, 0):
        task = replace(
            task,
            strikes=task.strikes | {worker.node: task.strikes.get(worker.node, 0) + 1},
            struck_below=task.struck_below | {worker.node: task.next_worker},
        )
    if number >= task.struck_below.get("", 0):
        task = replace(task, stuck=task.stuck + 1, struck_below=task.struck_below | {"": task.next_worker})
    return task


def _acquit(task: Task, nodes: set[str]) -> Task:
    """The nodes have proven themselves: nothing is counted against them any more."""
    return replace(
        task,
        strikes={name: count for name, count in task.strikes.items() if name not in nodes},
        struck_below={name: number for name, number in task.struck_below.items() if name not in nodes},
    )


def _error_reported(state: ClusterState, event: v.ErrorReported, envelope: Envelope) -> ClusterState:
    known = _known(state, event.task, event.worker)
    if known is None or not known[1].alive or known[0].status is not TaskStatus.ACTIVE:
        return state
    task, worker = known
    if event.generation < worker.generation:
        return state  # the worker has trained on since
    severity = severity_of(event.kind, state.severity)
    if severity is Severity.SEV3 and (event.generation < task.generation or not task.is_member(worker.worker)):
        return state  # the group that broke has been left behind already
    return _blame(
        state,
        envelope,
        kind=event.kind,
        node=worker.node,
        worker=worker.worker,
        generations={task.name: _broken_generation(task, [worker.worker])},
        message=event.message,
        log_tail=event.detail,
        place=_place(task, event),
    )


def _place(task: Task, event: v.ErrorReported) -> str:
    members = task.membership.members if task.membership else ()
    rank = next((f"rank {rank}, " for rank, member in enumerate(members) if member.worker == event.worker), "")
    return f"{rank}iteration {event.iteration}, {event.phase}"


def _command_failed(state: ClusterState, event: v.CommandFailed, envelope: Envelope) -> ClusterState:
    for task in state.tasks.values():
        for worker in task.workers.values():
            if worker.command_id != event.command_id or worker.status is not WorkerStatus.STARTING:
                continue
            state = _with_task(state, _without_workers(task, [worker.worker]))
            return _strike(
                state,
                envelope,
                task=task.name,
                worker=worker,
                kind="start_failed",
                broken=task.generation - 1,
                message=f"{event.node} could not start {worker.worker}: {event.reason}",
            )
    return state


def _command_applied(state: ClusterState, event: v.CommandApplied, _: Envelope) -> ClusterState:
    """A stop is applied once the process is gone; of one that never was, nothing else is ever told."""
    for task in state.tasks.values():
        for worker in task.workers.values():
            if worker.status is WorkerStatus.STOPPING and worker.command_id == event.command_id:
                return _with_task(state, _without_workers(task, [worker.worker]))
    return state


# --- what statistics tell ------------------------------------------------------------------------


def _hang_suspected(state: ClusterState, event: v.HangSuspected, envelope: Envelope) -> ClusterState:
    known = _known(state, event.task, event.worker)
    if known is None or not known[1].alive or known[0].status is not TaskStatus.ACTIVE:
        return state
    task, worker = known
    if event.generation != task.generation or not task.is_member(worker.worker) or event.iteration <= task.iteration:
        return state
    task = replace(task, suspicions=task.suspicions | {worker.worker: event})
    verdict = judge(task)
    if verdict is None:
        return _with_task(state, task)
    state = _with_task(state, replace(task, suspicions={}))
    if verdict.stuck:
        return _blame(
            state,
            envelope,
            kind="collective_timeout",
            node=worker.node,
            worker=worker.worker,
            generations={task.name: task.generation},
            message=verdict.reason,
            place=f"iteration {event.iteration}, {event.phase}",
        )
    for culprit in verdict.culprits:
        since_us = max(0, envelope.observed_at_us - culprit.still_us)
        where = f"hangs in {culprit.phase} of iteration {culprit.iteration}"
        state = _give_up(
            state,
            replace(envelope, observed_at_us=since_us),
            task.name,
            task.workers[culprit.worker],
            "hang",
            f"{where}: {verdict.reason}",
        )
    return state


def _corruption_suspected(state: ClusterState, event: v.CorruptionSuspected, envelope: Envelope) -> ClusterState:
    """Parameters that differ from the majority's are no suspicion any more: who has them is given up."""
    known = _known(state, event.task, event.suspect)
    if event.sign != "checksum" or known is None or not known[1].alive or known[0].status is not TaskStatus.ACTIVE:
        return state
    task, worker = known
    if event.generation != task.generation or not task.is_member(worker.worker):
        return state
    what = f"has other parameters than the other replicas before iteration {event.iteration}"
    return _give_up(state, envelope, task.name, worker, "corruption", what)


def _nothing(state: ClusterState, _event: Any, _envelope: Envelope) -> ClusterState:
    return state


# --- training ------------------------------------------------------------------------------------


def _step_committed(state: ClusterState, event: v.StepCommitted, _: Envelope) -> ClusterState:
    task = state.tasks.get(event.task)
    if task is None or not task.committed_generation <= event.generation <= task.generation:
        return state
    # Nine of ten events are steps: what rarely changes is looked at, and the task is made anew once.
    progressed = event.last > task.best_iteration
    newest = event.generation == task.generation and task.membership is not None
    if newest and task.strikes and task.membership is not None:
        task = _acquit(task, {member.node for member in task.membership.members})
    below, suspicions = task.struck_below, task.suspicions
    if progressed and below:
        below = {node: number for node, number in below.items() if node}
    if suspicions and any(told.iteration <= event.last for told in suspicions.values()):
        suspicions = {}
    task = replace(
        task,
        iteration=event.last,
        best_iteration=max(event.last, task.best_iteration),
        committed_generation=event.generation,
        loss=event.loss,
        first_loss=event.loss if task.first_loss is None else task.first_loss,
        first_commit_us=task.first_commit_us or state.now_us,
        last_commit_us=state.now_us,
        iteration_us=event.duration_us // max(1, event.last - event.first + 1),
        reattempts=0 if newest else task.reattempts,
        stuck=0 if progressed else task.stuck,
        struck_below=below,
        suspicions=suspicions,
    )
    return _with_task(state, _timed(task, event.generation))


def _timed(task: Task, generation: int) -> Task:
    """Keep the time of what was just committed, if the newest group did it and has warmed up."""
    if generation != task.generation or not task.iteration_us:
        return task
    if task.warm < WARM_UP:
        return replace(task, warm=task.warm + 1)
    return replace(task, timings=(*task.timings, task.iteration_us)[-TIMINGS_MAX:])


def _checkpoint_saved(state: ClusterState, event: v.CheckpointSaved, _: Envelope) -> ClusterState:
    task = state.tasks.get(event.task)
    return _with_task(state, replace(task, checkpoint_iteration=event.iteration)) if task else state


def _state_kept(state: ClusterState, event: v.StateKept, _: Envelope) -> ClusterState:
    task = state.tasks.get(event.task)
    if task is None or event.node not in state.nodes:
        return state
    kept = KeptState(
        node=event.node,
        shard=event.shard,
        iteration=event.iteration,
        generation=event.generation,
        origin=event.origin,
        size_bytes=event.size_bytes,
    )
    return _with_task(state, replace(task, kept=task.kept | {f"{event.node}/{event.shard}": kept}))


def _forget_kept(state: ClusterState, node: str, tasks: tuple[str, ...] | None = None) -> ClusterState:
    """The node keeps nothing more of these tasks, or of any."""
    for task in state.tasks.values():
        if (tasks is None or task.name in tasks) and any(kept.node == node for kept in task.kept.values()):
            kept = {place: kept for place, kept in task.kept.items() if kept.node != node}
            state = _with_task(state, replace(task, kept=kept))
    return state


def _task_completed(state: ClusterState, event: v.TaskCompleted, _: Envelope) -> ClusterState:
    task = state.tasks.get(event.task)
    if task is None or task.status is not TaskStatus.ACTIVE or event.worker not in task.workers:
        return state
    return _with_task(
        state,
        replace(
            task,
            status=TaskStatus.COMPLETED,
            iteration=event.iteration,
            best_iteration=max(event.iteration, task.best_iteration),
            loss=event.loss,
            params_digest=event.params_digest,
            reason=f"all {event.iteration} iterations are committed",
        ),
    )


def _task_submitted(state: ClusterState, event: v.TaskSubmitted, _: Envelope) -> ClusterState:
    old = state.tasks.get(event.spec.name)
    if old is not None and (old.status is TaskStatus.ACTIVE or not old.at_rest):
        return state
    return _with_task(
        state,
        Task(
            spec=event.spec,
            status=TaskStatus.ACTIVE,
            submitted_seq=state.seq,
            submitted_us=state.now_us,
            # Worker ids and generations never repeat, not even in the next life of a name.
            next_worker=old.next_worker if old else 1,
            next_replica=old.next_replica if old else 0,
            membership=replace(old.membership, members=(), joiners=()) if old and old.membership else None,
        ),
    )


def _end_task(state: ClusterState, name: str, status: TaskStatus, reason: str) -> ClusterState:
    task = state.tasks.get(name)
    if task is None or task.status is not TaskStatus.ACTIVE:
        return state
    return _with_task(state, replace(task, status=status, reason=reason))


def _task_cancelled(state: ClusterState, event: v.TaskCancelled, _: Envelope) -> ClusterState:
    return _end_task(state, event.task, TaskStatus.CANCELLED, event.reason)


def _task_failed(state: ClusterState, event: v.TaskFailed, _: Envelope) -> ClusterState:
    return _end_task(state, event.task, TaskStatus.FAILED, event.reason)


# --- decisions and commands ----------------------------------------------------------------------


def _deadline_passed(state: ClusterState, event: v.DeadlinePassed, envelope: Envelope) -> ClusterState:
    """See `deadlines.py` for the ids; one that no longer applies changes nothing."""
    kind, _, subject = event.deadline_id.partition(":")
    if kind in ("symptom", "exit") and subject in state.incidents:
        incident = state.incidents[subject]
        meant = (kind == "symptom") == _is_symptom(incident)
        return _with_incident(state, replace(incident, ripe=True)) if meant else state
    if kind == "isolation":
        name, _, nth = subject.partition("#")
        node = state.nodes.get(name)
        if node is not None and node.isolated and str(node.isolations) == nth:
            return _with_node(state, replace(node, isolation_over=True))
    if kind == "regroup":
        name, _, generation = subject.partition("#")
        task = state.tasks.get(name)
        if task is not None and task.membership is not None and str(task.generation) == generation:
            for worker in task.workers.values():
                late = task.is_member(worker.worker) and worker.alive and worker.generation != task.generation
                if late or worker in task.leavers:
                    what = f"did not {'join' if late else 'leave for'} generation {generation} in time"
                    state = _give_up(state, envelope, name, worker, "hang", what)
    if kind == "start":
        for task in state.tasks.values():
            late_starter = task.workers.get(subject)
            if late_starter is not None and late_starter.status is WorkerStatus.STARTING:
                what = "did not become ready in time"
                return _give_up(state, envelope, task.name, late_starter, "start_failed", what)
    return state


def _give_up(state: ClusterState, envelope: Envelope, name: str, worker: Worker, kind: str, what: str) -> ClusterState:
    """The worker is lost, though it may run; `decide` has its process ended."""
    task = state.tasks[name]
    broken = _broken_generation(task, [worker.worker])
    state = _with_task(state, _with_worker(task, replace(worker, status=WorkerStatus.LOST)))
    message = f"worker {worker.worker} on {worker.node} {what}"
    return _strike(state, envelope, task=name, worker=worker, kind=kind, broken=broken, message=message)


def _incident_escalated(state: ClusterState, event: v.IncidentEscalated, _: Envelope) -> ClusterState:
    incident = state.incidents.get(event.incident)
    known = _known(state, event.worker.rpartition(".")[0], event.worker)
    if incident is None or known is None or not known[1].alive:
        return state
    task, worker = known
    broken = _broken_generation(task, [worker.worker])
    incident = replace(
        incident,
        severity=min(Severity(event.severity), incident.severity),
        node=worker.node,
        worker=worker.worker,
        generations=incident.generations | {task.name: broken},
        ripe=True,
    )
    task = _struck(_with_worker(task, replace(worker, status=WorkerStatus.LOST)), worker)
    return _with_incident(_with_task(state, task), incident)


def _plan_adopted(state: ClusterState, event: v.PlanAdopted, _: Envelope) -> ClusterState:
    if event.epoch != state.plan.epoch + 1:
        return state
    plan = Plan(
        epoch=event.epoch,
        assignments={assignment.task: assignment for assignment in event.assignments},
        waf=event.waf,
        basis=event.basis,
        trigger=event.trigger,
        reason=event.reason,
        adopted_us=state.now_us,
        healthy=event.healthy,
        healthy_waf=event.healthy_waf,
        transition_flop=event.transition_flop,
        way=event.way,
        took_us=event.took_us,
        rows_reused=event.rows_reused,
    )
    return replace(state, plan=plan)


def _membership_decided(state: ClusterState, event: v.MembershipDecided, _: Envelope) -> ClusterState:
    task = state.tasks.get(event.task)
    if task is None or event.generation != task.generation + 1:
        return state
    membership = Membership(
        generation=event.generation,
        members=event.members,
        joiners=event.joiners,
        urgent=event.urgent,
        store=event.store,
        decided_us=state.now_us,
    )
    again = event.urgent and task.membership is not None and task.membership.members == event.members
    task = replace(task, membership=membership, reattempts=task.reattempts + 1 if again else 0, suspicions={})
    task = replace(task, timings=(), warm=0)
    return _with_task(state, task)


def _transition_completed(state: ClusterState, event: v.TransitionCompleted, _: Envelope) -> ClusterState:
    incident = state.incidents.get(event.incident)
    if incident is None:
        return state
    closed = replace(
        incident,
        response=event.response,
        closed_us=state.now_us,
        detection_us=event.detection_us,
        transition_us=event.transition_us,
        detection_flop=event.detection_flop,
        transition_flop=event.transition_flop,
        sub_health_flops=event.sub_health_flops,
    )
    if incident.severity < Severity.SEV3:
        state = replace(state, ledger=replace(state.ledger, failures=state.ledger.failures + 1))
    for name in incident.tasks if incident.resumed_us else ():
        task = state.tasks.get(name)
        if task is not None and task.status is TaskStatus.ACTIVE:
            state = _with_task(state, replace(task, transition_us=_averaged(task.transition_us, event.transition_us)))
    return replace(
        state,
        incidents={name: i for name, i in state.incidents.items() if name != event.incident},
        closed=(*state.closed, closed)[-CLOSED_INCIDENTS_MAX:],
    )


def _averaged(before_us: int, measured_us: int) -> int:
    """D_transition of a task: the newest transition counts a quarter."""
    return max(1, (3 * before_us + measured_us) // 4 if before_us else measured_us)


def _throughput_corrected(state: ClusterState, event: v.ThroughputCorrected, _: Envelope) -> ClusterState:
    task = state.tasks.get(event.task)
    if task is None or task.status is not TaskStatus.ACTIVE:
        return state
    return _with_task(state, replace(task, measured=task.measured | {str(event.workers): event.flops}))


def _failure_rate_estimated(state: ClusterState, event: v.FailureRateEstimated, _: Envelope) -> ClusterState:
    return replace(state, worker_mtbf_us=event.worker_mtbf_us)


def _count_command(state: ClusterState, node: str) -> ClusterState:
    known = state.nodes.get(node)
    return _with_node(state, replace(known, commands=known.commands + 1)) if known else state


def _start_worker(state: ClusterState, event: v.StartWorker, _: Envelope) -> ClusterState:
    state = _count_command(state, event.node)
    task = state.tasks.get(event.spec.name)
    if task is None or event.worker in task.workers:
        return state
    worker = Worker(
        worker=event.worker,
        node=event.node,
        replica=event.replica,
        shard=event.shard,
        status=WorkerStatus.STARTING,
        command_id=event.command_id,
    )
    number = int(event.worker.rpartition(".")[2])
    task = replace(
        task,
        next_worker=max(task.next_worker, number + 1),
        next_replica=max(task.next_replica, event.replica + 1),
    )
    return _with_task(state, _with_worker(task, worker))


def _stop_worker(state: ClusterState, event: v.StopWorker, _: Envelope) -> ClusterState:
    state = _count_command(state, event.node)
    known = _known(state, event.task, event.worker)
    if known is None:
        return state
    task, worker = known
    stopping = replace(worker, status=WorkerStatus.STOPPING, command_id=event.command_id)
    return _with_task(state, _with_worker(task, stopping))


def _drop_state(state: ClusterState, event: v.DropState, _: Envelope) -> ClusterState:
    return _forget_kept(_count_command(state, event.node), event.node, (event.task,))


def _set_membership(state: ClusterState, event: v.SetMembership, _: Envelope) -> ClusterState:
    return _with_peers(_count_command(state, event.node), event.task, event.peers)


def _set_peers(state: ClusterState, event: v.SetPeers, _: Envelope) -> ClusterState:
    return _with_peers(_count_command(state, event.node), event.task, event.peers)


def _with_peers(state: ClusterState, name: str, peers: tuple[v.MemoryService, ...]) -> ClusterState:
    task = state.tasks.get(name)
    return _with_task(state, replace(task, peers=peers)) if task and task.peers != peers else state


# --- faults that people order --------------------------------------------------------------------


def _injection_requested(state: ClusterState, event: v.InjectionRequested, _: Envelope) -> ClusterState:
    node = state.nodes.get(event.node)
    if node is None or node.status is not NodeStatus.UP:
        return state
    injection = Injection(node=event.node, fault=event.fault)
    return replace(state, injections=state.injections | {f"f{state.seq}": injection})


def _inject_fault(state: ClusterState, event: v.InjectFault, _: Envelope) -> ClusterState:
    state = _count_command(state, event.node)
    return replace(state, injections={name: i for name, i in state.injections.items() if name != event.injection})


def _forget_injections(state: ClusterState, node: str) -> ClusterState:
    return replace(state, injections={name: i for name, i in state.injections.items() if i.node != node})


_FOLDS: dict[type, Callable[[ClusterState, Any, Envelope], ClusterState]] = {
    v.NodeJoined: _node_joined,
    v.NodeLeft: _node_left,
    v.NodeLost: _node_lost,
    v.NodeReturned: _node_returned,
    v.NodeIsolated: _node_isolated,
    v.NodeReadmitted: _node_readmitted,
    v.NodeCordoned: _node_cordoned,
    v.NodeUncordoned: _node_uncordoned,
    v.WorkerStarted: _worker_started,
    v.WorkerReady: _worker_ready,
    v.WorkerRegrouped: _worker_regrouped,
    v.WorkerParked: _worker_parked,
    v.WorkerExited: _worker_exited,
    v.ErrorReported: _error_reported,
    v.StepCommitted: _step_committed,
    v.CheckpointSaved: _checkpoint_saved,
    v.TaskCompleted: _task_completed,
    v.HangSuspected: _hang_suspected,
    v.DegradationObserved: _nothing,  # news for people
    v.CorruptionSuspected: _corruption_suspected,
    v.StateKept: _state_kept,
    v.StateTaken: _nothing,  # the regrouping that follows says what the fold must know
    v.CommandApplied: _command_applied,
    v.CommandFailed: _command_failed,
    v.TaskSubmitted: _task_submitted,
    v.TaskCancelled: _task_cancelled,
    v.Heartbeat: _nothing,  # stands on its own stream and is folded by liveness.py
    v.InjectionRequested: _injection_requested,
    v.IncidentEscalated: _incident_escalated,
    v.DeadlinePassed: _deadline_passed,
    v.PlanAdopted: _plan_adopted,
    v.MembershipDecided: _membership_decided,
    v.TaskFailed: _task_failed,
    v.TransitionCompleted: _transition_completed,
    v.ThroughputCorrected: _throughput_corrected,
    v.FailureRateEstimated: _failure_rate_estimated,
    v.StartWorker: _start_worker,
    v.StopWorker: _stop_worker,
    v.SetMembership: _set_membership,
    v.SetPeers: _set_peers,
    v.DropState: _drop_state,
    v.InjectFault: _inject_fault,
}
