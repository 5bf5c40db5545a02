"""Expired deadlines (see `unicrond/core/rules/deadlines.py` for their ids)."""

from __future__ import annotations

from msgspec.structs import replace

from unicrond.core.folding import failure_counts as strikes
from unicrond.core.folding import holds, incidents, links, nodes, outages
from unicrond.core.folding.incidents import Fact, is_symptom
from unicrond.core.nodes import drains as departures
from unicrond.core.nodes import isolation
from unicrond.core.state.changes import with_incident, with_task
from unicrond.core.state.incident_lifecycle import IncidentTrigger, advance
from unicrond.core.state.state import ClusterState, Task, Worker, WorkerStatus
from unicrond.core.tasks import starvation as turns
from unicrond.events import vocabulary as v
from unicrond.events.wire.envelope import Envelope

_HANDLERS = {
    **dict.fromkeys(("isolation", "check"), isolation.deadline_passed),
    **dict.fromkeys(("drain", "empty", "window"), departures.deadline_passed),
    "forget": nodes.forget_deadline_passed,
    "links": links.meeting_is_long,
    **dict.fromkeys(("wait", "turn"), turns.deadline_passed),
    "restart": strikes.restart_due,
    **dict.fromkeys(("hold", "brake"), holds.deadline_passed),
    **dict.fromkeys(("outage", "return"), outages.deadline_passed),
}


def deadline_passed(state: ClusterState, event: v.DeadlineExpired, envelope: Envelope) -> ClusterState:
    """Apply an expired deadline; one that no longer applies changes nothing."""
    kind, _, subject = event.deadline_id.partition(":")
    if kind in ("symptom", "exit") and subject in state.incidents:
        incident = state.incidents[subject]
        applies = (kind == "symptom") == incidents.is_symptom(incident)
        return with_incident(state, advance(incident, IncidentTrigger.TIME_IS_UP)) if applies else state
    if kind in _HANDLERS:
        return _HANDLERS[kind](state, kind, subject)
    if kind == "regroup":
        name, _, generation = subject.partition("#")
        task = state.tasks.get(name)
        if task is not None and task.membership is not None and str(task.generation) == generation:
            for worker in task.workers.values():
                late = task.is_member(worker.worker) and worker.alive and not task.has_joined(worker)
                if late or worker in task.leavers:
                    failure = f"did not {'join' if late else 'leave for'} generation {generation} in time"
                    state = strikes.give_up(state, name, worker, "hang", failure, envelope.observed_at_us)
    if kind == "meet":
        name, _, meeting = subject.partition("#")
        task = state.tasks.get(name)
        if task is not None and meeting == f"{task.generation}.{task.group.meetings}":
            return _meeting_missed(state, task, envelope.observed_at_us)
    if kind == "start":
        for task in state.tasks.values():
            late_starter = task.workers.get(subject)
            if late_starter is not None and late_starter.status is WorkerStatus.STARTING:
                failure = "did not become ready in time"
                return strikes.give_up(state, task.name, late_starter, "start_failed", failure, envelope.observed_at_us)
    return state


def _meeting_missed(state: ClusterState, task: Task, observed_at_us: int) -> ClusterState:
    """Handle that the members of the newest membership have not formed its group in time.

    Only workers that do not answer are ended: one that waits for the others keeps its state, and so does one that has
    declared itself busy. Where all have answered, the group is at fault, and all meet again. A planned membership is
    answered at a boundary, where a late member may wait for another; only an urgent one shows which member does not
    answer. Where the lead should confirm for all and has not, that does not show either: all meet again, and each
    member confirms for itself.
    """
    late = [worker for worker in task.workers.values() if worker.alive and _is_late(task, worker)]
    if not late:
        return state
    if any(worker.section for worker in late):
        return _next_meeting(state, task)
    silent = [worker for worker in late if worker.answered_generation < task.generation]
    assert task.membership is not None
    urgent, lead_silent = task.membership.urgent, task.awaits_lead
    if urgent and silent and not lead_silent:
        for worker in silent:
            failure = f"did not come into generation {task.generation} in time"
            state = strikes.give_up(state, task.name, worker, "hang", failure, observed_at_us)
        return state
    problem = "all have come, and do not meet" if urgent else "did not come to the boundary in time"
    if urgent and lead_silent:
        problem = "their lead has not said that they have met"
    fact = Fact(
        kind="collective_timeout",
        node=late[0].node,
        worker=late[0].worker,
        generations={task.name: task.generation},
        message=f"generation {task.generation} of {task.name}: {', '.join(worker.worker for worker in late)} {problem}"[
            :1024
        ],
        occurred_us=observed_at_us,
        lost_peers={late[0].worker: ""},
    )
    state = incidents.blame(_next_meeting(state, task), fact)
    answered = any(is_symptom(i) and i.generations.get(task.name) in task.in_use for i in state.incidents.values())
    if answered or (urgent and not lead_silent):
        return state
    # An open incident of another cause has taken the fact over, and its response is about other workers.
    task = state.tasks[task.name]
    return with_task(state, replace(task, group=replace(task.group, overdue_generation=task.generation)))


def _next_meeting(state: ClusterState, task: Task) -> ClusterState:
    """Start the next deadline of the meeting: this one has passed and ended no process."""
    return with_task(state, replace(task, group=replace(task.group, meetings=task.group.meetings + 1)))


def _is_late(task: Task, worker: Worker) -> bool:
    return worker in task.leavers or (task.is_member(worker.worker) and not task.has_joined(worker))
