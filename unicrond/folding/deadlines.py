"""Deadlines that have passed (see `unicrond/deadlines.py` for their ids)."""

from __future__ import annotations

from msgspec.structs import replace

from events import vocabulary as v
from events.envelope import Envelope
from unicrond import isolation
from unicrond.folding import incidents, strikes
from unicrond.folding.changes import with_incident
from unicrond.state import ClusterState, WorkerStatus


def deadline_passed(state: ClusterState, event: v.DeadlinePassed, envelope: Envelope) -> ClusterState:
    """One that no longer applies changes nothing."""
    kind, _, subject = event.deadline_id.partition(":")
    if kind in ("symptom", "exit") and subject in state.incidents:
        incident = state.incidents[subject]
        meant = (kind == "symptom") == incidents.is_symptom(incident)
        return with_incident(state, replace(incident, ripe=True)) if meant else state
    if kind in ("isolation", "check"):
        return isolation.deadline_passed(state, kind, subject)
    if kind == "regroup":
        name, _, generation = subject.partition("#")
        task = state.tasks.get(name)
        if task is not None and task.membership is not None and str(task.generation) == generation:
            for worker in task.workers.values():
                late = task.is_member(worker.worker) and worker.alive and worker.generation != task.generation
                if late or worker in task.leavers:
                    what = f"did not {'join' if late else 'leave for'} generation {generation} in time"
                    state = strikes.give_up(state, name, worker, "hang", what, envelope.observed_at_us)
    if kind == "start":
        for task in state.tasks.values():
            late_starter = task.workers.get(subject)
            if late_starter is not None and late_starter.status is WorkerStatus.STARTING:
                what = "did not become ready in time"
                return strikes.give_up(state, task.name, late_starter, "start_failed", what, envelope.observed_at_us)
    return state
