"""Outages: nodes that are lost together, who of them is back, and when their hold is over (rules: nodes/outages.py)."""

from __future__ import annotations

from collections.abc import Collection

from msgspec.structs import replace

from unicrond.core.folding import incidents, injections, silence
from unicrond.core.nodes import isolation
from unicrond.core.state.changes import with_incident, with_node
from unicrond.core.state.holds import Outage
from unicrond.core.state.state import ClusterState, Incident, NodeStatus
from unicrond.events import vocabulary as v
from unicrond.events.wire.envelope import Envelope


def nodes_lost(state: ClusterState, event: v.NodesLost, envelope: Envelope) -> ClusterState:
    """Record that these nodes are lost together, and each of their live workers with them: one incident, no flap."""
    names = [name for name in event.nodes if name in state.nodes and state.nodes[name].status is NodeStatus.UP]
    workers: dict[str, list[str]] = {}
    for name in names:
        state = silence.excused(injections.forget_injections(state, name), name)
        state = with_node(state, replace(state.nodes[name], status=NodeStatus.LOST, reason=event.reason))
        state = isolation.check_lost(state, name, "the node was lost")
        if not state.nodes[name].may_go:
            for task, live in silence.live_workers(state, name).items():
                workers[task] = [*workers.get(task, []), *live]
    state = forget(state, names)
    unforeseen = tuple([name for name in names if not state.nodes[name].may_go])
    if unforeseen:
        outage = _standing(state, event) if event.joins else None
        nodes = (*outage.nodes, *unforeseen) if outage else unforeseen
        state = incidents.lose_workers_of(
            state,
            "",
            workers,
            kind="domain_lost",
            message=f"{len(nodes)} nodes were lost together: {event.reason}"[:1024],
            occurred_us=envelope.observed_at_us,
            nodes=unforeseen,
            joins=outage,
        )
        state = _with_away(state, outage.id if outage else f"i{state.seq}", unforeseen, event.domain)
    for name in names:
        state = silence.lose_workers(state, name, type(event))
    return state


def _standing(state: ClusterState, event: v.NodesLost) -> Incident | None:
    """Return the newest open incident that the nodes belong to: of their domain, where they have one."""
    for incident in reversed(state.incidents.values()):
        is_same = not event.domain or any(
            name in state.nodes and state.nodes[name].domain == event.domain for name in incident.nodes
        )
        if incident.kind == "domain_lost" and is_same:
            return incident
    return None


def _with_away(state: ClusterState, incident: str, names: tuple[str, ...], domain: str) -> ClusterState:
    old = state.outages.get(incident)
    if old is None:
        outage = Outage(since_us=state.now_us, domain=domain, away=names)
    else:
        outage = replace(old, away=(*old.away, *names))
    return replace(state, outages=state.outages | {incident: outage})


def node_back(state: ClusterState, name: str) -> ClusterState:
    """Record that a node of an outage is back; with the last one the outage is over."""
    for incident, outage in state.outages.items():
        if name not in outage.away:
            continue
        open_incident = state.incidents.get(incident)
        if open_incident is not None:
            state = with_incident(
                state, replace(open_incident, nodes_back=open_incident.nodes_back + 1, back_us=state.now_us)
            )
        away = tuple([peer for peer in outage.away if peer != name])
        back = replace(
            outage,
            away=away,
            back=(*outage.back, name),
            first_back_us=outage.first_back_us or state.now_us,
            last_back_us=state.now_us,
        )
        return _with(state, incident, back)
    return state


def forget(state: ClusterState, names: Collection[str]) -> ClusterState:
    """Return the state in which no outage waits for these nodes, nor with them."""
    for incident, outage in state.outages.items() if names else ():
        if not {*outage.away, *outage.back}.isdisjoint(names):
            away = tuple([name for name in outage.away if name not in names])
            back = tuple([name for name in outage.back if name not in names])
            state = _with(state, incident, replace(outage, away=away, back=back))
    return state


def deadline_passed(state: ClusterState, kind: str, subject: str) -> ClusterState:
    """Apply an expired `outage:` or `return:` deadline; one that no longer applies changes nothing."""
    incident, _, last_back_us = subject.partition("#")
    outage = state.outages.get(incident)
    if outage is None:
        return state
    if kind == "outage":
        return _with(state, incident, replace(outage, is_over=True, back=(), first_back_us=0, last_back_us=0))
    if last_back_us != str(outage.last_back_us):
        return state
    return _with(state, incident, replace(outage, back=(), first_back_us=0, last_back_us=0))


def _with(state: ClusterState, incident: str, outage: Outage) -> ClusterState:
    rest = {name: each for name, each in state.outages.items() if name != incident}
    return replace(state, outages={**rest, incident: outage} if outage.away else rest)
