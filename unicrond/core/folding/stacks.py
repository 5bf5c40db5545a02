"""Where the workers of a group that hung stood, by incident.

Rules
-----
* The stacks come after the decision that had them taken, so that the incident may be closed by then.
* They belong to the incident of one of these workers, open or closed, else to the first that broke their group.
* The state keeps one line per place with its workers, and the section of its program that each was in and for how long
  (hook.section; its phase where it named none), the slowest first; both bounded. The stacks themselves stand in the
  log, and in the incident's account (views/accounts.py). Nothing is decided by them.
"""

from __future__ import annotations

from msgspec.structs import replace

from unicrond.core.state.changes import with_incident
from unicrond.core.state.state import ClusterState, Incident
from unicrond.events import vocabulary as v
from unicrond.events.vocabulary.phrases import abridge, clean, seconds
from unicrond.events.vocabulary.stacks import place_in_program
from unicrond.events.wire.envelope import Envelope

#: Of one incident.
PLACES_MAX = 8
WORKERS_MAX = 64


def stacks_taken(state: ClusterState, event: v.StacksTaken, _: Envelope) -> ClusterState:
    """Record in the incident where these workers stood."""
    incident = incident_of(state, event)
    if incident is None:
        return state
    places = dict(incident.stacks)
    for worker in event.workers:
        place = place_of(worker, event.stacks)
        workers = places.get(place, ())
        has_room = len(workers) < WORKERS_MAX if workers else len(places) < PLACES_MAX
        if has_room and worker.worker not in workers:
            places[place] = (*workers, worker.worker)
    sections = dict(incident.sections)
    for worker in event.workers:
        span = (worker.section, worker.section_us) if worker.section else (worker.phase, worker.still_us)
        sections.setdefault(worker.worker, span)
    slowest = sorted(sections.items(), key=lambda entry: (-entry[1][1], entry[0]))
    after = replace(incident, stacks=places, sections=dict(slowest[:WORKERS_MAX]))
    return _with_closed(state, incident, after)


def incident_of(state: ClusterState, event: v.StacksTaken) -> Incident | None:
    """Return the incident that the stacks belong to; None where the state has none."""
    names = {worker.worker for worker in event.workers}
    incidents = [
        incident
        for incident in (*state.closed_incidents, *state.incidents.values())
        if incident.generations.get(event.task, -1) >= event.generation
    ]
    return next((incident for incident in incidents if incident.worker in names), next(iter(incidents), None))


def place_of(worker: v.WorkerStack, stacks: tuple[str, ...]) -> str:
    """Say where the worker stood, without its name: the same for all that wait for the same."""
    line = place_in_program(stacks[worker.stack - 1]) if 0 < worker.stack <= len(stacks) else ""
    where = f"waits in collective {worker.collectives_entered}" if worker.is_waiting else f"in {worker.phase}"
    collective = f" ({worker.collective})" if worker.is_waiting and worker.collective else ""
    process = ", its process is stopped" if worker.is_stopped else ""
    return f"{where} of iteration {worker.iteration}{collective}{f', at {line}' if line else ''}{process}"[:400]


def slowest_sections(incident: Incident) -> str:
    """Say who stood longest in a section, the slowest first; "" where no stack was taken."""
    spans = [f"{worker} in {clean(name)} for {seconds(us)}" for worker, (name, us) in incident.sections.items()]
    return f"longest: {abridge(spans)}" if spans else ""


def _with_closed(state: ClusterState, before: Incident, after: Incident) -> ClusterState:
    if before.id in state.incidents:
        return with_incident(state, after)
    closed = tuple(after if incident is before else incident for incident in state.closed_incidents)
    return replace(state, closed_incidents=closed)
