"""All facts in a state about one task, node or incident, for people and for programs. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple, TypeAlias

from unicrond.core.faults.local_faults import fault_text
from unicrond.core.faults.program_faults import diverging_text, looping_text, occurrences
from unicrond.core.faults.severity import RESPONSE
from unicrond.core.folding.stacks import slowest_sections
from unicrond.core.nodes.brakes import hold_lines
from unicrond.core.nodes.drains import departure_text
from unicrond.core.nodes.isolation import waits_for
from unicrond.core.nodes.outages import outcome
from unicrond.core.rules.healing_proofs import proof_text
from unicrond.core.state.state import ClusterState, Incident, Node, Task, TaskStatus
from unicrond.core.state.state_bytes import to_json
from unicrond.display.cluster_tables import (
    incidents_table,
    loss,
    milliseconds,
    node_status,
    task_workers,
    windows_of,
    workers_table,
)
from unicrond.display.event_lines import EventLine
from unicrond.display.tables import Table
from unicrond.display.worth import achieved_now, planned_wafs, si, waf_in
from unicrond.events.vocabulary.phrases import abridge, clean

Facts: TypeAlias = dict[str, str]
#: Incidents of a task or node that are shown; the log has them all.
INCIDENTS_SHOWN = 5


class Section(NamedTuple):
    """One part of a description. `body`: facts by name, a table, or lines."""

    title: str
    body: Facts | Table | list[str]


class UnknownName(LookupError):
    """The state has no object of that name; the message is one line, with the fix."""


def describe_object(state: ClusterState, kind: str, name: str, events: Sequence[EventLine] = ()) -> list[Section]:
    """Return the sections about a task, node or incident (`kind`). `events`: the last ones about it. Raise
    UnknownName."""
    sections = _SECTIONS[kind](state, name)
    lines = [f"{event.seq:>7}  {event.clock()}  {event.text}" for event in events]
    return [*sections, Section("last events", lines)] if lines else sections


def data_of(state: ClusterState, kind: str, name: str) -> dict[str, Any]:
    """Return the same as plain values: {kind: its part of the state}, and of a task or node its workers. Raise
    UnknownName."""
    _SECTIONS[kind](state, name)
    whole = to_json(state)
    if kind == "incident":
        return {
            "incident": {**whole["incidents"], **{incident["id"]: incident for incident in whole["closed_incidents"]}}[
                name
            ]
        }
    workers = [
        {"task": task.name, **whole["tasks"][task.name]["workers"][worker.worker]}
        for task in state.tasks.values()
        for worker in task.workers.values()
        if name == (task.name if kind == "task" else worker.node)
    ]
    return {kind: whole[f"{kind}s"][name], "workers": workers}


def _task(state: ClusterState, name: str) -> list[Section]:
    task = _require(state.tasks, name, "task")
    spec, progress = task.spec, task.progress
    share = state.plan.assignments.get(name)
    facts = {
        "status": task.status.value + (f": {task.ending.reason}" if task.ending.reason else ""),
        "weight": f"{spec.weight:g}",
        "workers": f"{task_workers(task)}, {spec.shape}",
        "plan": _share(state, task) if share else "no slot",
        "iteration": f"{progress.iteration} of {spec.iterations}, loss {loss(progress.loss)}"
        + (f", {milliseconds(task.pace.iteration_us)} ms each" if task.pace.iteration_us else ""),
        "achieved": waf_in(state, achieved_now(state, task)),
        "generation": f"{task.generation}, {'met' if task.confirmed else 'forming'}" if task.generation else "none yet",
        "program": " ".join((spec.entry, *spec.args)),
        "data": spec.data or "-",
        "checkpoint": ", ".join(
            (
                spec.checkpoint.dir or "the coordinator's directory",
                f"every {spec.checkpoint.interval} iterations" if spec.checkpoint.interval else "at its own intervals",
                f"newest of iteration {progress.checkpoint_iteration}" if progress.checkpoint_iteration else "none yet",
            )
        ),
        "in memory": ", ".join(sorted({copy.node for copy in task.copies.holdings.values()})) or "no copy",
        "submitted": f"{_when(task.submitted_us)}, entry {task.submitted_seq}",
    }
    if task.reshaping.reshape:
        facts["changes to"] = str(task.reshaping.reshape.shape)
    if proof := proof_text(state, task):
        facts["healing"] = proof
    if diverging := diverging_text(task):
        facts["program"] += f"; {diverging}"
    crashes = task.troubles.crashes
    if crashes is not None and task.status is TaskStatus.ACTIVE:
        facts["program"] += f"; {looping_text(task)}"
        facts["failed on"] = (
            f"{', '.join(crashes.nodes)}, first {_when(crashes.first_us)}, last {_when(crashes.last_us)};"
            f" {occurrences(crashes.fruitless)} without a new iteration"
        )
    if holds := hold_lines(state, task=name):
        facts["held"] = "; ".join(holds)
    if task.troubles.local_faults:
        facts["avoids"] = "; ".join(fault_text(task, node) for node in task.troubles.local_faults)
    if task.troubles.strikes:
        facts["strikes"] = ", ".join(f"{node} {count}" for node, count in task.troubles.strikes.items())
    incidents = [incident for incident in _incidents(state) if name in incident.generations]
    tail = next((incident for incident in reversed(incidents) if incident.log_tail), None)
    sections = [Section(f"task {name}", facts), Section("workers", workers_table(state, task=name))]
    sections += _incidents_section(state, incidents)
    return sections + ([Section(f"last output of {tail.worker}", tail.log_tail.splitlines())] if tail else [])


def _share(state: ClusterState, task: Task) -> str:
    share = state.plan.assignments[task.name]
    worth = waf_in(state, planned_wafs(state)[task.name])
    return f"{share.workers} workers in {len(share.replicas)} replicas, worth {worth} (epoch {state.plan.epoch})"


def _node(state: ClusterState, name: str) -> list[Section]:
    node: Node = _require(state.nodes, name, "node")
    slots_in_use = len(state.by_node.on(name))
    facts = {
        "status": "; ".join(filter(None, (node_status(node), node.reason, waits_for(state, node)))),
        "slots": f"{slots_in_use} of {node.slots} in use",
        "address": node.address,
        "store": f"{node.store.host}:{node.store.port}",
        "memory": f"{node.memory.host}:{node.memory.port}" if node.memory else "takes no copies of states",
        "agent": f"version {node.agent.version or 'unknown'}, boot {node.agent.boot}, schema {node.agent.schema}",
        "joined": _when(node.joined_us),
        "login": _login(state, node),
        "keeps states": ", ".join(_stored_copies(state, name)) or "none",
    }
    if node.domain:
        facts["domain"] = node.domain
    if node.cordon.active:
        until = ", until it returns" if node.cordon.until_return else ""
        plan = departure_text(node) or ("to be empty" if node.cordon.draining else "no new workers")
        facts["cordoned"] = f"{plan}{until}: {node.cordon.reason}"
    if windows := windows_of(state, name):
        facts["maintenance"] = "; ".join(windows)
    if node.health.failure_forecast:
        facts["expected to fail"] = node.health.failure_forecast
    if node.isolation.count:
        probation = node.isolation.probation
        last = f", last: {probation.last} ({_when(probation.last_us)})" if probation and probation.last else ""
        facts["isolated"] = f"{node.isolation.count} times{last}"
    if holds := hold_lines(state, node=name):
        facts["held"] = "; ".join(holds)
    if suspicion := node.health.suspicion:
        facts["suspected"] = f"{occurrences(suspicion.count)} since {_when(suspicion.since_us)}: {suspicion.cause}"
    if node.health.repair_need:
        facts["needs"] = node.health.repair_need
    strikes = {task.name: task.troubles.strikes[name] for task in state.tasks.values() if name in task.troubles.strikes}
    if strikes:
        facts["strikes"] = ", ".join(f"{count} by {task}" for task, count in strikes.items())
    accusers = [task for task in state.tasks.values() if name in task.troubles.local_faults]
    if accusers:
        facts["local faults"] = "; ".join(f"{task.name} {fault_text(task, name)}" for task in accusers)
    incidents = [incident for incident in _incidents(state) if incident.node == name]
    sections = [Section(f"node {name}", facts), Section("workers", workers_table(state, node=name))]
    return sections + _incidents_section(state, incidents)


def _login(state: ClusterState, node: Node) -> str:
    login = state.logins.get(node.name)
    if login is None:
        return "the shared one, or another's rules (not enrolled)"
    ends = "" if login.is_used or not login.expires_us else f", ends unused {_when(login.expires_us)}"
    return f"key {login.key}{ends}"


def _stored_copies(state: ClusterState, node: str) -> list[str]:
    return [
        f"{task.name} shard {copy.shard} of iteration {copy.iteration}"
        for task in state.tasks.values()
        for copy in task.copies.holdings.values()
        if copy.node == node
    ]


def _incident(state: ClusterState, name: str) -> list[Section]:
    incident = next((incident for incident in _incidents(state) if incident.id == name), None)
    if incident is None:
        raise UnknownName(_unknown_name("incident", name, [other_incident.id for other_incident in _incidents(state)]))
    broken = [f"{task} in generation {generation}" for task, generation in incident.generations.items()]
    facts = {
        "status": f"closed {_when(incident.closed_us)}" if incident.closed_us else "open",
        "severity": f"{incident.severity.name}, {RESPONSE[incident.severity]}",
        "cause": incident.kind,
        "where": ", ".join(
            filter(
                None,
                (incident.worker and f"worker {incident.worker}", incident.node or incident.location, incident.place),
            )
        ),
        "what": incident.message,
        "hit": ", ".join(broken) or "no task",
        "happened": f"{_when(incident.occurred_us)} by the observer's clock",
        "detected": f"{_when(incident.detected_us)}{_later(incident.detection_us)}",
        "resumed": f"{_when(incident.resumed_us)}{_later(incident.transition_us)}"
        if incident.resumed_us
        else "not yet",
        "symptoms": f"{incident.symptoms} explained",
        "repeated": f"{incident.micro_batches_repeated} micro-batches, {incident.iterations_lost} iterations",
        **(
            {"discarded": f"{incident.micro_batches_lost} finished micro-batches"}
            if incident.micro_batches_lost
            else {}
        ),
    }
    if incident.nodes:
        facts["back"] = outcome(incident)
    if incident.state_from:
        facts["state from"] = incident.state_from
    if incident.response:
        facts["response"] = incident.response
    if incident.closed_us:
        facts["cost"] = (
            f"{si(incident.detection_flop, 'FLOP')} detection, {si(incident.transition_flop, 'FLOP')} transition"
        )
    sections = [Section(f"incident {name}", facts)]
    if incident.stacks:
        places = [f"{abridge(workers)}: {clean(place)}" for place, workers in incident.stacks.items()]
        sections.append(Section("where the workers stood", [*places, slowest_sections(incident)]))
    if incident.log_tail:
        sections.append(Section(f"last output of {incident.worker}", incident.log_tail.splitlines()))
    return [*sections, Section("more", [f"unicronctl story incident {name}"])]


def _later(span_us: int) -> str:
    return f", {milliseconds(span_us)} ms later" if span_us else ""


def _incidents_section(state: ClusterState, incidents: list[Incident]) -> list[Section]:
    ids = {incident.id for incident in incidents[-INCIDENTS_SHOWN:]}
    if not ids:
        return []
    table = incidents_table(state, state.now_us)
    rows = tuple(row for row in table.rows if row[0] in ids)
    title = "incidents" if len(incidents) == len(ids) else f"incidents (the last {len(ids)} of {len(incidents)})"
    return [Section(title, Table(table.headers, rows, table.right))]


def _incidents(state: ClusterState) -> list[Incident]:
    return [*state.closed_incidents, *state.incidents.values()]


def _require(by_name: Mapping[str, Any], name: str, kind: str) -> Any:
    if name not in by_name:
        raise UnknownName(_unknown_name(kind, name, list(by_name)))
    return by_name[name]


def _unknown_name(kind: str, name: str, names: Sequence[str]) -> str:
    examples = ", ".join(names[-8:]) or "none"
    return f"no {kind} {name}; known: {examples}{f' and {len(names) - 8} more' if len(names) > 8 else ''}"


def _when(time_us: int) -> str:
    """Return the time as local time, "-" for 0."""
    return datetime.fromtimestamp(time_us / 1e6).isoformat(" ", "milliseconds") if time_us else "-"


_SECTIONS = {"task": _task, "node": _node, "incident": _incident}
