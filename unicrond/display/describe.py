"""All that a state knows of one task, node or incident, for people and for programs. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple, TypeAlias

from unicrond.core.faults.severity import RESPONSE
from unicrond.core.nodes.drains import departure_text
from unicrond.core.nodes.isolation import waits_for
from unicrond.core.state.state import ClusterState, Incident, Node, Task
from unicrond.core.state.state_bytes import to_json
from unicrond.core.state.work import achieved_waf
from unicrond.display.cluster_tables import (
    incidents_table,
    loss,
    milliseconds,
    node_status,
    planned_waf,
    si,
    task_workers,
    windows_of,
    workers_table,
)
from unicrond.display.event_lines import EventLine
from unicrond.display.tables import Table

Facts: TypeAlias = dict[str, str]
#: Incidents of a task or node that are shown; the log has them all.
INCIDENTS_SHOWN = 5


class Section(NamedTuple):
    """`body`: names and what they are, a table, or lines."""

    title: str
    body: Facts | Table | list[str]


class Unknown(LookupError):
    """The state knows nothing of that name; one line, with the fix."""


def described(state: ClusterState, kind: str, name: str, events: Sequence[EventLine] = ()) -> list[Section]:
    """`kind`: task, node or incident. `events`: the last ones about it. Raises Unknown."""
    sections = _SECTIONS[kind](state, name)
    lines = [f"{event.seq:>7}  {event.clock()}  {event.text}" for event in events]
    return [*sections, Section("last events", lines)] if lines else sections


def data_of(state: ClusterState, kind: str, name: str) -> dict[str, Any]:
    """The same as plain values: {kind: what the state holds}, and of a node its workers. Raises Unknown."""
    _SECTIONS[kind](state, name)
    whole = to_json(state)
    if kind == "incident":
        return {"incident": {**whole["incidents"], **{one["id"]: one for one in whole["closed"]}}[name]}
    workers = [
        {"task": task.name, **whole["tasks"][task.name]["workers"][worker.worker]}
        for task in state.tasks.values()
        for worker in task.workers.values()
        if name == (task.name if kind == "task" else worker.node)
    ]
    return {kind: whole[f"{kind}s"][name], "workers": workers}


def _task(state: ClusterState, name: str) -> list[Section]:
    task = _found(state.tasks, name, "task")
    spec, progress = task.spec, task.progress
    share = state.plan.assignments.get(name)
    facts = {
        "status": task.status.value + (f": {task.ending.reason}" if task.ending.reason else ""),
        "weight": f"{spec.weight:g}",
        "workers": f"{task_workers(task)}, {spec.shape}",
        "plan": _share(state, task) if share else "no slot",
        "iteration": f"{progress.iteration} of {spec.iterations}, loss {loss(progress.loss)}"
        + (f", {milliseconds(task.pace.iteration_us)} ms each" if task.pace.iteration_us else ""),
        "achieved": si(achieved_waf(task, state.now_us), "FLOP/s, weighted"),
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
        "in memory": ", ".join(sorted({kept.node for kept in task.copies.holdings.values()})) or "no copy",
        "submitted": f"{_when(task.submitted_us)}, entry {task.submitted_seq}",
    }
    if task.reshaping.reshape:
        facts["changes to"] = str(task.reshaping.reshape.shape)
    if task.troubles.strikes:
        facts["strikes"] = ", ".join(f"{node} {count}" for node, count in task.troubles.strikes.items())
    own = [one for one in _incidents(state) if name in one.generations]
    tail = next((one for one in reversed(own) if one.log_tail), None)
    sections = [Section(f"task {name}", facts), Section("workers", workers_table(state, task=name))]
    sections += _of_incidents(state, own)
    return sections + ([Section(f"last output of {tail.worker}", tail.log_tail.splitlines())] if tail else [])


def _share(state: ClusterState, task: Task) -> str:
    share = state.plan.assignments[task.name]
    worth = planned_waf(state, share.waf, {task.name: share.workers})
    return f"{share.workers} workers in {len(share.replicas)} replicas, worth {worth} (epoch {state.plan.epoch})"


def _node(state: ClusterState, name: str) -> list[Section]:
    node = _found(state.nodes, name, "node")
    used = len(state.by_node.on(name))
    facts = {
        "status": "; ".join(filter(None, (node_status(node), node.reason, waits_for(state, node)))),
        "slots": f"{used} of {node.slots} in use",
        "address": node.address,
        "store": f"{node.store.host}:{node.store.port}",
        "memory": f"{node.memory.host}:{node.memory.port}" if node.memory else "takes no copies of states",
        "agent": f"version {node.version or 'unknown'}, boot {node.agent_boot}, schema {node.schema}",
        "joined": _when(node.joined_us),
        "login": _login(state, node),
        "keeps states": ", ".join(_kept(state, name)) or "none",
    }
    if node.cordoned:
        until = ", until it returns" if node.until_return else ""
        what = departure_text(node) or ("to be empty" if node.draining else "no new workers")
        facts["cordoned"] = f"{what}{until}: {node.cordon_reason}"
    if windows := windows_of(state, name):
        facts["maintenance"] = "; ".join(windows)
    if node.foretold:
        facts["expected to fail"] = node.foretold
    if node.isolations:
        stay = node.isolation
        last = f", last: {stay.last} ({_when(stay.last_us)})" if stay and stay.last else ""
        facts["isolated"] = f"{node.isolations} times{last}"
    if node.needs:
        facts["needs"] = node.needs
    strikes = {task.name: task.troubles.strikes[name] for task in state.tasks.values() if name in task.troubles.strikes}
    if strikes:
        facts["strikes"] = ", ".join(f"{count} by {task}" for task, count in strikes.items())
    own = [one for one in _incidents(state) if one.node == name]
    sections = [Section(f"node {name}", facts), Section("workers", workers_table(state, node=name))]
    return sections + _of_incidents(state, own)


def _login(state: ClusterState, node: Node) -> str:
    login = state.logins.get(node.name)
    if login is None:
        return "the shared one, or another's rules (not enrolled)"
    ends = "" if login.is_used or not login.expires_us else f", ends unused {_when(login.expires_us)}"
    return f"key {login.key}{ends}"


def _kept(state: ClusterState, node: str) -> list[str]:
    return [
        f"{task.name} shard {kept.shard} of iteration {kept.iteration}"
        for task in state.tasks.values()
        for kept in task.copies.holdings.values()
        if kept.node == node
    ]


def _incident(state: ClusterState, name: str) -> list[Section]:
    one = next((one for one in _incidents(state) if one.id == name), None)
    if one is None:
        raise Unknown(_unknown("incident", name, [known.id for known in _incidents(state)]))
    broken = [f"{task} in generation {generation}" for task, generation in one.generations.items()]
    facts = {
        "status": f"closed {_when(one.closed_us)}" if one.closed_us else "open",
        "severity": f"{one.severity.name}, {RESPONSE[one.severity]}",
        "cause": one.kind,
        "where": ", ".join(filter(None, (one.worker and f"worker {one.worker}", one.node, one.place))),
        "what": one.message,
        "hit": ", ".join(broken) or "no task",
        "happened": f"{_when(one.occurred_us)} by the observer's clock",
        "detected": f"{_when(one.detected_us)}{_took(one.detection_us)}",
        "resumed": f"{_when(one.resumed_us)}{_took(one.transition_us)}" if one.resumed_us else "not yet",
        "symptoms": f"{one.symptoms} explained",
        "redone": f"{one.redone} micro-batches, {one.iterations_lost} iterations",
        **({"thrown away": f"{one.micro_batches_lost} finished micro-batches"} if one.micro_batches_lost else {}),
    }
    if one.state_from:
        facts["state from"] = one.state_from
    if one.response:
        facts["response"] = one.response
    if one.closed_us:
        facts["cost"] = f"{si(one.detection_flop, 'FLOP')} detection, {si(one.transition_flop, 'FLOP')} transition"
    sections = [Section(f"incident {name}", facts)]
    if one.log_tail:
        sections.append(Section(f"last output of {one.worker}", one.log_tail.splitlines()))
    return [*sections, Section("more", [f"unicronctl story {name}"])]


def _took(span_us: int) -> str:
    return f", {milliseconds(span_us)} ms later" if span_us else ""


def _of_incidents(state: ClusterState, own: list[Incident]) -> list[Section]:
    shown = {one.id for one in own[-INCIDENTS_SHOWN:]}
    if not shown:
        return []
    table = incidents_table(state, state.now_us)
    rows = tuple(row for row in table.rows if row[0] in shown)
    title = "incidents" if len(own) == len(shown) else f"incidents (the last {len(shown)} of {len(own)})"
    return [Section(title, Table(table.headers, rows, table.right))]


def _incidents(state: ClusterState) -> list[Incident]:
    return [*state.closed, *state.incidents.values()]


def _found(known: Mapping[str, Any], name: str, kind: str) -> Any:
    if name not in known:
        raise Unknown(_unknown(kind, name, list(known)))
    return known[name]


def _unknown(kind: str, name: str, known: Sequence[str]) -> str:
    shown = ", ".join(known[-8:]) or "none"
    return f"no {kind} {name}; known: {shown}{f' and {len(known) - 8} more' if len(known) > 8 else ''}"


def _when(time_us: int) -> str:
    """Local time."""
    return datetime.fromtimestamp(time_us / 1e6).isoformat(" ", "milliseconds") if time_us else "-"


_SECTIONS = {"task": _task, "node": _node, "incident": _incident}
