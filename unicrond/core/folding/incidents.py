"""Incidents: facts open them (`blame`), and only decisions close them (responses.py).

Rules
-----
* One incident per (task, generation): the first root cause names it. A break of the group in which its tasks have
  continued is another incident: the first may be about to be closed. So is a cause on another node that breaks a later
  group.
* A broken connection is a symptom, and gives way to the cause that explains it. So does any other cause to a worse one
  on another node: the response is then about that node.
* A lost node is one incident for all its tasks and takes over what it explains. So does a cause for which a member is
  given up: the break that its group reported is an echo, and what had resumed stands still again.
* A task falls back where its group goes on at an iteration that had been committed before: whichever way it came to
  that (`fall_back`), the newest incident that broke a group since those commits has lost them, be it closed by now (the
  plan had no workers for the task); NO_INCIDENT has what a person or a plan made it repeat.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec.structs import replace

from unicrond.core.faults.severity import severity_of
from unicrond.core.state.changes import with_incident
from unicrond.core.state.incident_lifecycle import IncidentTrigger, advance
from unicrond.core.state.state import ClusterState, Incident, Severity, Task, TaskStatus, Worker
from unicrond.events.vocabulary import StateSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """A failure that was observed. `generations`: per task, the one that it breaks. `occurred_us`: by the observer's
    clock. `place`: where in its work the worker was. `lost_peers`, `links`, `is_program_fault`, `nodes`: see
    Incident."""

    kind: str
    node: str
    worker: str
    generations: dict[str, int]
    message: str
    occurred_us: int
    log_tail: str = ""
    place: str = ""
    lost_peers: dict[str, str] = field(default_factory=dict)
    links: dict[str, tuple[str, ...]] = field(default_factory=dict)
    is_program_fault: bool = False
    nodes: tuple[str, ...] = ()


def is_symptom(incident: Incident) -> bool:
    """Return whether the incident may still turn out to be the consequence of a death or of a lost node."""
    return incident.severity is Severity.SEV3


def broken_generation(task: Task, workers: list[str]) -> int:
    """Return the generation that the loss of these workers breaks (see Incident.generations)."""
    return task.generation if any(task.is_member(worker) for worker in workers) else task.generation - 1


def blame(state: ClusterState, fact: Fact) -> ClusterState:
    """Open an incident for the fact, or add the fact to the open incident that it belongs to."""
    severity = severity_of(fact.kind, state.severity)

    def is_shared(incident: Incident) -> bool:
        return shares_generation(state, incident, fact)

    # The generation says more than the worker, which may have reported an older group's end too.
    for incident in sorted(state.incidents.values(), key=is_shared, reverse=True):
        if not is_shared(incident) and not (fact.worker and incident.worker == fact.worker):
            continue
        if _is_newer(fact, incident) and (incident.resumed_us or _is_another_cause(fact, severity, incident)):
            continue
        if severity < incident.severity and (is_symptom(incident) or fact.node != incident.node):
            # It is the root cause of what so far was only a broken connection, or worse than it and of another node.
            incident = advance(
                incident,
                IncidentTrigger.CAUSE_NAMES,
                kind=fact.kind,
                node=fact.node,
                worker=fact.worker,
                message=fact.message,
                log_tail=fact.log_tail,
                place=fact.place or incident.place,
                occurred_us=min(incident.occurred_us, fact.occurred_us),
                is_program_fault=fact.is_program_fault,
            )
        return with_incident(
            state,
            replace(
                incident,
                severity=min(severity, incident.severity),
                generations=incident.generations | fact.generations,
                lost_peers=fact.lost_peers if _is_newer(fact, incident) else incident.lost_peers | fact.lost_peers,
                links=fact.links if _is_newer(fact, incident) else _merge_links(incident.links, fact.links),
                log_tail=incident.log_tail or fact.log_tail,
                symptoms=incident.symptoms + 1,
                is_program_fault=incident.is_program_fault or (fact.is_program_fault and severity <= incident.severity),
            ),
        )
    return open_incident(state, fact)


def shares_generation(state: ClusterState, incident: Incident, fact: Fact) -> bool:
    """Return whether the fact breaks a generation that the incident has broken."""
    return any(
        name in incident.generations and is_same_break(state.tasks[name], incident.generations[name], broken)
        for name, broken in fact.generations.items()
    )


def _merge_links(
    links: dict[str, tuple[str, ...]], new_links: dict[str, tuple[str, ...]]
) -> dict[str, tuple[str, ...]]:
    """Merge the lost peers of each member: one that reports again has lost the peers of both reports."""
    return links | {name: tuple(sorted({*links.get(name, ()), *peers})) for name, peers in new_links.items()}


def is_same_break(task: Task, first: int, second: int) -> bool:
    """Return whether both generations are of one break: they are equal, or one is to be left at a boundary for the
    other."""
    return first == second or (first in task.in_use and second in task.in_use)


def _is_newer(fact: Fact, incident: Incident) -> bool:
    """Return whether the fact breaks a generation that the incident has not broken."""
    return any(broken > incident.generations.get(task, 0) for task, broken in fact.generations.items())


def _is_another_cause(fact: Fact, severity: Severity, incident: Incident) -> bool:
    """Return whether both are causes, of different nodes: the response to the incident does nothing about the fact."""
    return not is_symptom(incident) and severity is not Severity.SEV3 and fact.node != incident.node


def open_incident(state: ClusterState, fact: Fact) -> ClusterState:
    """Open an incident for the fact, whichever others are open."""
    incident = Incident(
        id=f"i{state.seq}",
        kind=fact.kind,
        severity=severity_of(fact.kind, state.severity),
        node=fact.node,
        worker=fact.worker,
        generations=fact.generations,
        message=fact.message,
        occurred_us=fact.occurred_us,
        detected_us=state.now_us,
        log_tail=fact.log_tail,
        place=fact.place,
        lost_peers=fact.lost_peers,
        links=fact.links,
        is_program_fault=fact.is_program_fault,
        nodes=fact.nodes,
    )
    return replace(with_incident(state, incident), incidents_total=state.incidents_total + 1)


def lose_workers_of(
    state: ClusterState,
    node: str,
    workers_by_task: dict[str, list[str]],
    *,
    kind: str,
    message: str,
    occurred_us: int,
    nodes: tuple[str, ...] = (),
    joins: Incident | None = None,
) -> ClusterState:
    """Open one incident for all workers that were lost with a node, or with many `nodes` (`node`: ""); it takes over
    the incidents that it explains. `joins`: the open one that they are added to instead."""
    generations = {
        task: broken_generation(state.tasks[task], workers)
        for task, workers in workers_by_task.items()
        if state.tasks[task].status is TaskStatus.ACTIVE
    }
    explained = [
        incident
        for incident in state.incidents.values()
        if incident.node in (nodes or (node,))
        or (is_symptom(incident) and any(task in generations for task in incident.tasks))
    ]
    for incident in explained:
        generations = incident.generations | generations
    if joins is not None:
        opened = _widened(joins, generations, nodes, message)
    else:
        fact = Fact(
            kind=kind,
            node=node,
            worker="",
            generations=generations,
            message=message,
            occurred_us=occurred_us,
            nodes=nodes,
        )
        state = open_incident(state, fact)
        opened = state.incidents[f"i{state.seq}"]
    return take_over(state, opened, explained)


def take_over(state: ClusterState, cause: Incident, echoes: list[Incident]) -> ClusterState:
    """Return the state with the incident `cause`, and without the open ones that it explains: what they have counted is
    its own, and it began when the first of them did."""
    cause = replace(
        cause,
        symptoms=cause.symptoms + sum(1 + echo.symptoms for echo in echoes),
        occurred_us=min([cause.occurred_us, *(echo.occurred_us for echo in echoes)]),
        detected_us=min([cause.detected_us, *(echo.detected_us for echo in echoes)]),
        micro_batches_repeated=cause.micro_batches_repeated + sum(echo.micro_batches_repeated for echo in echoes),
        micro_batches_finished=cause.micro_batches_finished
        | {key: value for echo in echoes for key, value in echo.micro_batches_finished.items()},
        micro_batches_lost=cause.micro_batches_lost + sum(echo.micro_batches_lost for echo in echoes),
    )
    ids = {echo.id for echo in echoes}
    state = replace(state, incidents={name: i for name, i in state.incidents.items() if name not in ids})
    return with_incident(state, cause)


def _widened(incident: Incident, generations: dict[str, int], nodes: tuple[str, ...], message: str) -> Incident:
    """Return the incident of nodes that were lost together, with more of them, whose workers broke `generations`."""
    return advance(
        incident,
        IncidentTrigger.FACT_JOINS,
        message=message,
        symptoms=incident.symptoms + 1,
        nodes=(*incident.nodes, *nodes),
        generations={
            name: max(incident.generations.get(name, 0), generations.get(name, 0))
            for name in incident.generations | generations
        },
        resumed_us=0 if generations else incident.resumed_us,
    )


#: What stands for the kind of incident where a task repeats iterations and none made it.
NO_INCIDENT = "no incident"


def fall_back(
    state: ClusterState, task: Task, first: int, generation: int, source: StateSource | None = None
) -> tuple[ClusterState, Task]:
    """Record that the group of `generation` goes on at iteration `first`, which had been committed. `source`: where its
    state came from, said by a member that joins; None: it has committed it, which counts what is repeated."""
    progress = task.progress
    count = progress.iteration - first + 1
    incident = _loser(state, task, generation)
    if incident is not None:
        state = _with_losses(state, incident, count, source)
    progress = replace(
        progress,
        iterations_repeated=progress.iterations_repeated + (count if source is None else 0),
        repeats_until=progress.best_iteration,
        repeats_for=incident.kind if incident else NO_INCIDENT,
    )
    return state, replace(task, progress=progress)


def _loser(state: ClusterState, task: Task, generation: int) -> Incident | None:
    """Return the newest incident that broke a group of the task which had committed what `generation` repeats."""
    for incident in (*reversed(state.incidents.values()), *reversed(state.closed_incidents)):
        if task.progress.committed_generation <= incident.generations.get(task.name, -1) < generation:
            return incident
    return None


def _with_losses(state: ClusterState, incident: Incident, count: int, source: StateSource | None) -> ClusterState:
    """Put the losses into the incident, open or closed. Of several sources the one that no member had counts."""
    is_nearer = source in (None, "own", "replica")
    state_from = incident.state_from or source or "" if is_nearer else source or ""
    more = replace(incident, iterations_lost=max(count, incident.iterations_lost), state_from=state_from)
    if more == incident:
        return state
    if incident.id in state.incidents:
        return with_incident(state, more)
    return replace(
        state,
        closed_incidents=tuple(
            more if closed_incident is incident else closed_incident for closed_incident in state.closed_incidents
        ),
    )


def record_lost_work(state: ClusterState, task: str, worker: Worker, iteration: int, finished: int) -> ClusterState:
    """Record that the worker has ended, and how many micro-batches of that iteration it had finished. All shards of a
    replica compute the same ones."""
    for incident in state.incidents.values():
        if task in incident.generations and finished:
            key = f"{task}/{worker.replica}"
            most = max(incident.micro_batches_finished.get(key, (0, 0)), (iteration, finished))
            state = with_incident(
                state, replace(incident, micro_batches_finished=incident.micro_batches_finished | {key: most})
            )
            break
    return state
