"""Which deadlines stand, as data: the shell arms them on its monotonic clock and appends DeadlineExpired.

Ids name their subject so exactly that one which comes late means nothing any more:
`start:<worker>`, `meet:<task>#<generation>.<nth>`, `regroup:<task>#<generation>` (all leave; in older logs any),
`symptom:<incident>`, `exit:<incident>`, `isolation:<node>#<nth>`, `check:<node>#<nth>` (after failed attempts
`#<nth>.<attempts>`), `drain:<node>#<us>.<lead>` and `empty:<node>#<us>` (near that time, and then),
`window:<id>#near.<lead>` and `window:<id>#end`, `forget:<node>#<when it left>`, `wait:<task>#<us>` and
`turn:<task>#<us>` (since then), `restart:<task>#<us>` (the back-off after a fault of its program then),
`links:<task>#<generation>.<rounds>` (a meeting, or probes of links, take long), `hold:<key>#<blows>` (the back-off on a
node whose isolation is held) and `brake:<task>#<us>` (what was taken out then counts no more; "": a node),
`outage:<incident>` (nodes that were lost together are awaited) and `return:<incident>#<us>` (the last came back then).
"""

from __future__ import annotations

from unicrond.core.faults import links, program_faults
from unicrond.core.nodes import brakes, isolation, outages
from unicrond.core.nodes import drains as departures
from unicrond.core.nodes import node_removal as forgetting
from unicrond.core.rules.survey import Survey
from unicrond.core.state.state import ClusterState, Severity, WorkerStatus
from unicrond.core.tasks import starvation as turns

_SECOND_US = 1_000_000


def deadlines(survey: Survey) -> dict[str, int]:
    """Return id -> length in microseconds, from the moment the shell first sees the id; none while the head hears no
    node: what is to happen in time it would not hear, and each begins anew when it does."""
    return {} if survey.state.silence is not None else _standing(survey)


def _standing(survey: Survey) -> dict[str, int]:
    state, policy = survey.state, survey.policy
    standing: dict[str, int] = {}
    for incident in state.incidents.values():
        if incident.is_overdue:
            continue
        if incident.severity is Severity.SEV3:
            probes_us = links.answers_in_us(state, incident)
            standing[f"symptom:{incident.id}"] = int(policy.symptom_window_s * _SECOND_US) + probes_us
        elif _lives(state, incident.worker):
            # A worker with an error ends by itself, and tells more by that; a hanging one does not.
            length_s = policy.symptom_window_s if incident.kind == "hang" else policy.exit_s
            standing[f"exit:{incident.id}"] = int(length_s * _SECOND_US)
    standing.update(isolation.deadlines(state, survey.nodes.isolated, policy.isolation_s))
    standing.update(turns.deadlines(state))
    standing.update(program_faults.deadlines(state))
    standing.update(brakes.deadlines(state))
    standing.update(outages.deadlines(state, policy))
    standing.update(departures.deadlines(state, policy, survey.nodes.dated))
    standing.update(forgetting.deadlines(state, survey.nodes.left_nodes, policy.forget_s))
    for task in survey.active:
        standing.update(links.deadlines(state, task))
        if survey.settled(task):
            continue
        apart = [task.workers[name] for name in task.tally.apart]
        for worker in apart:
            if worker.status is WorkerStatus.STARTING:
                length_s = task.spec.start_timeout_s or policy.worker_start_s
                standing[f"start:{worker.worker}"] = int(length_s * _SECOND_US)
        if task.membership is not None and (task.leavers or not task.confirmed):
            length_us = max(int(policy.regroup_s * _SECOND_US), 4 * task.pace.iteration_us)
            if task.membership.members:
                busy_us = max((worker.section_limit_us for worker in apart), default=0)
                name = f"meet:{task.name}#{task.generation}.{task.group.meetings}"
                standing[name] = max(length_us, busy_us)
            else:
                standing[f"regroup:{task.name}#{task.generation}"] = length_us * departures.LAST_OUT
    return standing


def _lives(state: ClusterState, worker: str) -> bool:
    task = state.tasks.get(worker.rpartition(".")[0])
    return task is not None and worker in task.workers and task.workers[worker].alive
