"""Links between nodes: what probes found, and workers that a task goes on without for that."""

from __future__ import annotations

from statistics import median

from msgspec.structs import replace

from unicrond.core.faults.links import (
    AGAIN,
    ANSWERS,
    CALM_US,
    REPEAT_US,
    TIMINGS_MIN,
    WORSE,
    among,
    poor_pairs,
    probed_nodes,
)
from unicrond.core.faults.severity import severity_of
from unicrond.core.folding import commands, holds, incidents
from unicrond.core.folding.incidents import Fact, broken_generation
from unicrond.core.state.changes import with_incident, with_task, with_worker
from unicrond.core.state.incident_lifecycle import IncidentTrigger, advance
from unicrond.core.state.node_links import LinkProbing, NodeLink, link_key
from unicrond.core.state.state import ClusterState, Incident, Severity, Task
from unicrond.core.state.task_parts import Pace
from unicrond.core.state.worker_lifecycle import can_move, given_up
from unicrond.events import vocabulary as v
from unicrond.events.wire.envelope import Envelope

#: How many links the state remembers.
LINKS_MAX = 256


def probes_ordered(state: ClusterState, event: v.ProbeLinks, _: Envelope) -> ClusterState:
    """Note who is to answer for the group, or who watches a bad link."""
    state = commands.count_command(state, event.node)
    node, task = state.nodes.get(event.node), state.tasks.get(event.task)
    if task is not None and task.generation == event.generation:
        probing = task.group.probing
        first = not probing.orders
        orders = probing.orders | {event.node: event.command_id}
        ordered_us = state.now_us if first else probing.ordered_us
        rounds = probing.rounds + first
        probing = replace(
            probing,
            rounds=rounds,
            ordered_us=ordered_us,
            orders=orders,
            overdue=False,
            is_repeated=False,
            iteration=task.progress.iteration,
        )
        state = _with_probing(state, task, probing)
    links = dict(state.links)
    if event.task or node is None:
        return state
    for peer in event.peers:
        link, end = links.get(link_key(event.node, peer.node)), state.nodes.get(peer.node)
        if link is not None and end is not None:
            # An order may name the port of an agent that has been replaced since: nobody answers there.
            is_present = (peer.host, peer.port) == (end.address, end.probe_port)
            boots = node.agent.boot, end.agent.boot if is_present else 0
            watches = link.watches | {event.node: (*boots, event.patience_us)}
            links[link_key(*link.ends)] = replace(link, watches=watches)
    return replace(state, links=links)


def links_probed(state: ClusterState, event: v.LinksProbed, _: Envelope) -> ClusterState:
    """Record what an end says of its links, and that it has answered."""
    for task in state.tasks.values():
        orders = task.group.probing.orders
        if orders.get(event.node) == event.command_id:
            rest = {node: command for node, command in orders.items() if node != event.node}
            state = _with_probing(state, task, replace(task.group.probing, orders=rest))
    if event.node not in state.nodes:
        return state
    links = dict(state.links)
    for probe in event.probes:
        key = link_key(event.node, probe.peer)
        link = links.get(key)
        if probe.peer == event.node or probe.peer not in state.nodes or probe.condition == "unknown":
            continue
        if probe.condition != "good":
            links[key] = _worse(link, event.node, probe, state.now_us)
        elif link is not None:
            links[key] = _better(link, event.node, state.now_us)
    return _with_usual_times(replace(state, links=_newest(links, state.now_us)), event)


def _with_usual_times(state: ClusterState, event: v.LinksProbed) -> ClusterState:
    """Note how long iterations usually take in groups that have a link that has been found bad just now: what follows
    tells whether they would be faster without one end. A group that begins with such a link knows no better."""
    ends = {event.node} | {probe.peer for probe in event.probes if probe.condition in ("slow", "silent")}
    for task in state.active:
        probing, timings = task.group.probing, task.pace.timings
        if probing.usual_us or len(timings) < TIMINGS_MIN or task.membership is None:
            continue
        nodes = ends.intersection(member.node for member in task.membership.members)
        if among(poor_pairs(state), nodes):
            state = _with_probing(state, task, replace(probing, usual_us=int(median(timings))))
    return state


def _worse(link: NodeLink | None, end: str, probe: v.LinkProbe, now_us: int) -> NodeLink:
    """Return the link after an end has found it bad."""
    first, second = sorted((end, probe.peer))
    if link is None:
        link = NodeLink(first=first, second=second, since_us=now_us)
    elif link.restored_us:
        again = now_us - link.restored_us <= CALM_US
        times = link.times + 1 if again else 1
        link = NodeLink(first=first, second=second, since_us=now_us, times=times)
    conditions = link.conditions | {end: probe.condition}
    hears = {node: is_heard for node, is_heard in link.hears.items() if node != end}
    if probe.condition == "silent":
        hears[end] = probe.hears_peer
    return replace(link, conditions=conditions, took_us=link.took_us | {end: probe.took_us}, hears=hears)


def _better(link: NodeLink, end: str, now_us: int) -> NodeLink:
    """Return the link after an end has found it good."""
    conditions = {node: condition for node, condition in link.conditions.items() if node != end}
    took_us = {node: took for node, took in link.took_us.items() if node != end}
    hears = {node: is_heard for node, is_heard in link.hears.items() if node != end}
    watches = {node: watch for node, watch in link.watches.items() if node != end}
    link = replace(link, conditions=conditions, took_us=took_us, hears=hears, watches=watches)
    return link if link.is_barred else replace(link, restored_us=link.restored_us or now_us)


def _newest(links: dict[str, NodeLink], now_us: int) -> dict[str, NodeLink]:
    """Return the links without those that have been good for long, the newest LINKS_MAX."""
    recent = {key: link for key, link in links.items() if link.conditions or now_us - link.restored_us <= CALM_US}
    return dict(list(recent.items())[-LINKS_MAX:])


def forget_links(state: ClusterState, node: str) -> ClusterState:
    """Return the state without the links of a node that is no more."""
    if not any(node in link.ends for link in state.links.values()):
        return state
    return replace(state, links={key: link for key, link in state.links.items() if node not in link.ends})


def meeting_is_long(state: ClusterState, _kind: str, subject: str) -> ClusterState:
    """Fold the end of `links:`: no answer comes any more; a group that has not met for so long, or is slow again, has
    its links probed."""
    name, _, round_name = subject.partition("#")
    task = state.tasks.get(name)
    number = round_name.removesuffix(AGAIN).removesuffix(ANSWERS)
    if task is None or number != f"{task.generation}.{task.group.probing.rounds}":
        return state
    probing = replace(task.group.probing, orders={})
    if not round_name.endswith(ANSWERS):
        probing = replace(probing, overdue=not task.confirmed or round_name.endswith(AGAIN))
    return _with_probing(state, task, probing)


def degradation_observed(state: ClusterState, event: v.DegradationObserved, _: Envelope) -> ClusterState:
    """Have the links of a task probed that is slow, though no worker explains it: a link may. At once, unless they were
    probed just now and it has not become twice as slow since; then when it is time."""
    task = state.tasks.get(event.task)
    if task is None or event.generation != task.generation or event.worker not in task.member_names:
        return state
    if event.slowest and _explains_slowdown(task, event):
        return state
    if len(probed_nodes(state, task)) < 2:
        return state
    probing = replace(task.group.probing, usual_us=event.usual_us)
    is_soon = bool(probing.ordered_us) and state.now_us < probing.ordered_us + REPEAT_US
    if is_soon and event.iteration_us < WORSE * max(probing.slow_us, event.usual_us):
        return _with_probing(state, task, replace(probing, is_repeated=True))
    slow_us = max(probing.slow_us, event.iteration_us)
    return _with_probing(state, task, replace(probing, overdue=True, slow_us=slow_us))


def _explains_slowdown(task: Task, event: v.DegradationObserved) -> bool:
    """Return whether what the slowest worker takes longer than the others makes up half of the slowdown: on a busy
    machine somebody always stands out a little."""
    replicas = max(1, len(task.member_names) // task.spec.replica_workers)
    share = -(-task.spec.micro_batches // replicas)
    return 2 * (event.compute_us - event.others_us) * share >= event.iteration_us - event.usual_us


def workers_withdrawn(state: ClusterState, event: v.WorkersWithdrawn, envelope: Envelope) -> ClusterState:
    """Give the task's workers on the node up; that is held against nobody."""
    task = state.tasks.get(event.task)
    if task is None:
        return state
    names = state.by_node.of_task(event.node, event.task)
    workers = [task.workers[name] for name in names if can_move(task.workers[name], v.WorkersWithdrawn)]
    if not workers:
        return state
    state = holds.without_hold(
        holds.count_eviction(state, task.name), v.hold_key("withdrawal", task=task.name, node=event.node)
    )
    task = state.tasks[task.name]
    broken = broken_generation(task, [worker.worker for worker in workers])
    for worker in workers:
        task = with_worker(task, given_up(worker))
    task = replace(task, pace=_without_measurement(task.pace, str(len(task.member_names))))
    links = dict(state.links)
    for peer in event.peers:
        if (link := links.get(link_key(event.node, peer))) is not None:
            links[link_key(*link.ends)] = replace(link, has_stopped_task=True)
    state = replace(with_task(state, task), links=links)
    incident = _incident_of(state, task)
    if incident is None:
        fact = Fact(
            kind="link_fault",
            node=event.node,
            worker=workers[0].worker,
            generations={task.name: broken},
            message=event.reason,
            occurred_us=envelope.observed_at_us,
        )
        return incidents.open_incident(state, fact)
    return with_incident(
        state,
        advance(
            incident,
            IncidentTrigger.WORKER_GIVEN_UP,
            kind="link_fault",
            severity=min(incident.severity, severity_of("link_fault", state.severity)),
            node=event.node,
            worker=workers[0].worker,
            message=event.reason,
            generations=incident.generations | {task.name: broken},
        ),
    )


def _without_measurement(pace: Pace, workers: str) -> Pace:
    """Return the pace without what was measured over the bad link: it says nothing of so many workers without it."""
    measurements = {number: flops for number, flops in pace.measurements.items() if number != workers}
    circumstances = {number: facts for number, facts in pace.circumstances.items() if number != workers}
    return replace(pace, measurements=measurements, circumstances=circumstances)


def _incident_of(state: ClusterState, task: Task) -> Incident | None:
    """Return the incident that the bad link explains: the newest break without a known cause, or of another end of bad
    links."""
    explained = [
        incident
        for incident in state.incidents.values()
        if (incident.severity is Severity.SEV3 or incident.kind == "link_fault")
        and incident.generations.get(task.name) in (*task.in_use, task.generation - 1)
    ]
    return max(explained, key=lambda incident: incident.generations[task.name], default=None)


def _with_probing(state: ClusterState, task: Task, probing: LinkProbing) -> ClusterState:
    return with_task(state, replace(task, group=replace(task.group, probing=probing)))
