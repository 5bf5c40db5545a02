"""Nodes: which are up, lost, or out of use; which workers an agent that comes back still runs; and the keys with which
agents log in, as people have ordered it (the shell passes them to the NATS server)."""

from __future__ import annotations

from msgspec.structs import replace

from unicrond.core.faults import local_faults
from unicrond.core.folding import commands, holds, incidents, injections, links, outages, silence
from unicrond.core.folding import failure_counts as strikes
from unicrond.core.folding import stored_states as kept_states
from unicrond.core.folding.strays import strays_among
from unicrond.core.nodes import drains as departures
from unicrond.core.nodes import isolation
from unicrond.core.nodes import node_removal as forgetting
from unicrond.core.rules.requests import agent_mismatch
from unicrond.core.state.changes import with_incident, with_node, with_task, without_workers
from unicrond.core.state.incident_lifecycle import IncidentTrigger, advance
from unicrond.core.state.node_parts import AgentIdentity, Cordon, NodeDeparture, PreviousKey
from unicrond.core.state.ordered_map import without
from unicrond.core.state.state import (
    RETURNS_MAX,
    ClusterState,
    Node,
    NodeLogin,
    NodeStatus,
    Severity,
    TaskStatus,
)
from unicrond.events import vocabulary as v
from unicrond.events.wire.envelope import Envelope
from unicrond.events.wire.schemas import spoken_schema


def node_joined(state: ClusterState, event: v.NodeJoined, envelope: Envelope) -> ClusterState:
    """Record that a node is up, with what its agent reports of it; workers that the agent does not run any more are
    lost."""
    old = state.nodes.get(event.node)
    if old is not None and old.departure.removal and old.status is not NodeStatus.UP:
        state, old = _without(state, old.name), None
    agent = AgentIdentity(
        boot=event.agent_boot,
        version=event.version,
        schema=spoken_schema(event.version),
    )
    node = Node(
        name=event.node,
        status=NodeStatus.UP,
        slots=event.slots,
        slots_max=max(event.slots, old.slots_max if old else 0),
        address=event.address,
        store=event.store,
        agent=agent,
        joined_us=state.now_us,
        memory=event.memory,
        users=event.users,
        gpu=event.gpu,
        probe_port=event.probe_port,
        domain=event.domain,
        object_stores=event.object_stores,
    )
    if old is not None:
        node = replace(
            node,
            reason=old.reason if old.isolation.active else "",
            commands=old.commands,
            cordon=old.cordon,
            isolation=old.isolation,
            health=old.health,
            departure=NodeDeparture(removal=old.departure.removal),
        )
    if old is not None and old.cordon.until_return and old.agent.boot != event.agent_boot and not event.workers:
        node = departures.uncordoned(node)
    if old is None:
        node = departures.wanted_by_windows(state, node)
    if old is not None and old.status is NodeStatus.LOST and not old.may_go:
        node = _count_return(state, node)
    state = outages.node_back(with_node(state, node), event.node)
    state = kept_states.forget_kept(state, event.node)  # its agent reports next what it still holds
    if not node.probe_port:
        state = links.forget_links(state, event.node)  # nobody could find out that they are good again
    if old is not None and old.agent.boot != event.agent_boot:
        state = isolation.check_lost(state, event.node, "its agent was replaced")
        state = local_faults.forgiven(state, event.node)
    planned = old is not None and old.left_on_purpose
    void = old is not None and old.agent.boot != event.agent_boot
    state = _mark_used(_reconcile_workers(state, event, envelope, planned=planned, void=void), event.node)
    if old is not None and old.agent.schema > node.agent.schema:
        state = commands.resend_memberships(state, event.node)  # its new agent may not read what the old one was sent
    return state


def _count_return(state: ClusterState, node: Node) -> Node:
    """Note that the node has returned from a loss, unless the loss says nothing of it."""
    if node.health.is_loss_excused:
        return replace(node, health=replace(node.health, is_loss_excused=False))
    returns_us = (*node.health.returns_us, state.now_us)[-RETURNS_MAX:]
    return replace(node, health=replace(node.health, returns_us=returns_us))


def _reconcile_workers(
    state: ClusterState, event: v.NodeJoined, envelope: Envelope, *, planned: bool, void: bool
) -> ClusterState:
    """Compare the workers that the agent runs with those that the log expects on this node, and settle the difference.
    `planned`: the agent before it has ended on purpose, and its workers with it. `void`: it is another agent, which
    starts nothing that was ordered from the one before."""
    alive = {running.worker for running in event.workers}
    missing: dict[str, list[str]] = {}
    before = state.by_node
    for task in state.tasks.values():
        dead = [
            w.worker
            for w in (task.workers[name] for name in before.of_task(event.node, task.name))
            # A worker without a pid was commanded only: the command still waits for the agent, if it is the same one.
            if w.worker not in alive and (w.pid or void)
        ]
        never = [name for name in dead if not task.workers[name].pid]
        expected = [name for name in dead if planned or name in never or not task.workers[name].alive]
        if expected:
            state = with_task(state, without_workers(task, expected))
        if len(dead) > len(expected):
            missing[task.name] = [name for name in dead if name not in expected]
    if missing and not alive and state.silence is not None:
        state = silence.lose_in_silence(state, missing)
    elif missing:
        if not alive:  # the node was down and up again before its silence could show it
            state = with_node(state, _count_return(state, state.nodes[event.node]))
        state = incidents.lose_workers_of(
            state,
            event.node,
            missing,
            kind="process_exit" if alive else "node_lost",
            message=f"agent of {event.node} came back without {sum(map(len, missing.values()))} of its workers",
            occurred_us=envelope.observed_at_us,
        )
    for name, workers in missing.items():
        state = with_task(state, without_workers(state.tasks[name], workers))
    return with_node(state, replace(state.nodes[event.node], strays=strays_among(state, event)))


def node_leaving(state: ClusterState, event: v.NodeLeaving, _: Envelope) -> ClusterState:
    """Record that the agent has announced its end, and when that is over: the node is drained."""
    node = state.nodes.get(event.node)
    if node is None or node.status is NodeStatus.LEFT:
        return state
    departure = replace(node.departure, announced=True, ends_us=state.now_us + event.grace_us)
    return with_node(state, replace(node, departure=departure))


def node_left(state: ClusterState, event: v.NodeLeft, _: Envelope) -> ClusterState:
    """Record that the node has left in order: its workers have ended, and it holds no state."""
    node = state.nodes.get(event.node)
    if node is None:
        return state
    state = injections.forget_injections(state, event.node)
    departure = replace(node.departure, left_us=state.now_us)
    state = outages.forget(state, [event.node])
    node = replace(node, status=NodeStatus.LEFT, reason=event.reason, departure=departure, strays={})
    state = with_node(state, node)
    state = isolation.check_lost(state, event.node, "the node left")
    state = kept_states.forget_kept(state, event.node)
    before = state.by_node
    for task in state.tasks.values():
        ended = before.of_task(event.node, task.name)
        if ended:
            state = with_task(state, without_workers(task, ended))
    return state


def node_lost(state: ClusterState, event: v.NodeLost, envelope: Envelope) -> ClusterState:
    """Record that the node is lost, and each of its live workers with it: an incident, unless its agent has announced
    its end."""
    node = state.nodes.get(event.node)
    if node is None or node.status is not NodeStatus.UP:
        return state
    state = outages.forget(injections.forget_injections(state, event.node), [event.node])
    state = with_node(state, replace(node, status=NodeStatus.LOST, reason=event.reason))
    state = isolation.check_lost(state, event.node, "the node was lost")
    if state.silence is not None:
        return silence.node_lost_in_silence(state, event.node)
    if not node.may_go:
        state = incidents.lose_workers_of(
            state,
            event.node,
            silence.live_workers(state, event.node),
            kind="node_lost",
            message=event.reason,
            occurred_us=event.evidence.beat_at_us or envelope.observed_at_us,
        )
    return silence.lose_workers(state, event.node, v.NodeLost)


def node_returned(state: ClusterState, event: v.NodeReturned, _: Envelope) -> ClusterState:
    """Record that a lost node is up again."""
    node = state.nodes.get(event.node)
    if node is None or node.status is not NodeStatus.LOST:
        return state
    # It lives past the end that it has announced: only its silence counts from now on.
    node = replace(node, status=NodeStatus.UP, reason="", departure=replace(node.departure, ends_us=0))
    return outages.node_back(with_node(state, node if node.may_go else _count_return(state, node)), event.node)


def node_isolated(state: ClusterState, event: v.NodeIsolated, _: Envelope) -> ClusterState:
    """Isolate the node; its incidents become SEV1."""
    node = state.nodes.get(event.node)
    if node is None:
        return state
    node = isolation.begin(state, node, event.reason)
    state = holds.count_isolation(state, event.node)
    for incident in state.incidents.values():
        if incident.node == event.node:  # the restart has failed: another plan is needed
            state = with_incident(state, advance(incident, IncidentTrigger.NODE_ISOLATED, severity=Severity.SEV1))
    for task in state.tasks.values():
        troubles = task.troubles
        if troubles.breaks.get(event.node, 0) > troubles.unclear_breaks.get(
            event.node, 0
        ):  # that explains its peers' losses
            state = with_task(state, replace(task, troubles=replace(troubles, ends={})))
    return with_node(state, node)


def node_readmitted(state: ClusterState, event: v.NodeReadmitted, _: Envelope) -> ClusterState:
    """End the node's isolation, and what tasks count against it; see `strikes.readmit`. Its suspicion stays, unless all
    tasks that it was suspected for have failed."""
    node = state.nodes.get(event.node)
    if node is None or not node.isolation.active:
        return state
    node = isolation.end(node)
    suspicion = node.health.suspicion
    named = [state.tasks.get(name) for name in suspicion.tasks] if suspicion else []
    if all(task is None or task.status is TaskStatus.FAILED for task in named):
        node = isolation.without_suspicion(node)
    state = with_node(state, node)
    for task in state.tasks.values():
        if task.troubles.names(event.node) or event.node in task.troubles.ends:
            troubles = strikes.readmit(task.troubles, event.node)
            state = with_task(state, replace(task, troubles=troubles))
    return state


def node_cordoned(state: ClusterState, event: v.NodeCordoned, _: Envelope) -> ClusterState:
    """Mark the node as cordoned by a person; with `drain` its workers are to move away."""
    node = state.nodes.get(event.node)
    if node is None or agent_mismatch(state, event):
        return state
    return with_node(state, departures.cordoned(node, event))


def node_uncordoned(state: ClusterState, event: v.NodeUncordoned, _: Envelope) -> ClusterState:
    """Lift the cordon for a person: the past of the node's isolation is forgiven too."""
    node = state.nodes.get(event.node)
    if node is None or agent_mismatch(state, event):
        return state
    state = holds.acquit_node(state, event.node)
    node = departures.uncordoned(isolation.pardon(state, node, event.reason))
    node = replace(node, health=replace(node.health, failure_forecast=""))
    return with_node(local_faults.forgiven(state, event.node), node)


#: Prefix of a cordon's reason where the machine's operator wants the cordon, and no person of this cluster.
OF_MACHINE = "machine: "


def machine_reported(state: ClusterState, event: v.MachineReported, _: Envelope) -> ClusterState:
    """Apply the wish of the machine's operator: cordoned, drained, or in use. A person's cordon takes precedence."""
    node = state.nodes.get(event.node)
    if node is None or (node.cordon.active and not node.cordon.reason.startswith(OF_MACHINE)):
        return state
    if not event.hold:
        free = departures.wanted_by_windows(state, departures.uncordoned(node))
        return with_node(state, free) if node.cordon.active else state
    reason = f"{OF_MACHINE}{event.reason}"[:1024]
    cordon = replace(node.cordon, active=True, draining=event.hold == "drain", reason=reason)
    return with_node(state, replace(node, cordon=cordon))


def forget_requested(state: ClusterState, event: v.ForgetRequested, _: Envelope) -> ClusterState:
    """Note that a person wants the node forgotten; one that is up is drained, and will be commanded to leave."""
    node = state.nodes.get(event.node)
    if node is None or agent_mismatch(state, event) or forgetting.refusal(node, leave=event.leave):
        return state
    reason = event.reason or "a person asked for it"
    node = replace(node, departure=replace(node.departure, removal=reason))
    if node.status is NodeStatus.UP:
        cordon = Cordon(active=True, draining=True, reason=f"it leaves for good: {reason}"[:1024])
        node = replace(node, cordon=cordon)
    return with_node(state, node)


def forget_deadline_passed(state: ClusterState, _: str, subject: str) -> ClusterState:
    """Apply an expired `forget:` deadline; one that no longer applies changes nothing."""
    name, _, left_us = subject.partition("#")
    node = state.nodes.get(name)
    if node is None or not forgetting.is_due_by_time(node) or left_us != str(node.departure.left_us):
        return state
    departure = replace(node.departure, removal=forgetting.age(node, state.now_us))
    return with_node(state, replace(node, departure=departure))


def leave_commanded(state: ClusterState, event: v.LeaveCluster, _: Envelope) -> ClusterState:
    """Count the command to leave, which a node's agent gets once."""
    state = commands.count_command(state, event.node)
    node = state.nodes.get(event.node)
    if node is None:
        return state
    return with_node(state, replace(node, departure=replace(node.departure, leave_ordered=True)))


def node_forgotten(state: ClusterState, event: v.NodeForgotten, _: Envelope) -> ClusterState:
    """Remove the node and all that is known of it."""
    node = state.nodes.get(event.node)
    if node is None or node.status is NodeStatus.UP or forgetting.is_planned_for(state, event.node):
        return state
    return _without(state, event.node)


def _without(state: ClusterState, name: str) -> ClusterState:
    """Return the state without the node, its workers and its record."""
    state = outages.forget(holds.without_node(state, name), [name])
    state = kept_states.forget_kept(injections.forget_injections(state, name), name)
    before = state.by_node
    for task in state.tasks.values():
        workers = before.of_task(name, task.name)
        troubles = local_faults.without(strikes.acquit(task.troubles, {name}, calm=True), name)
        if workers or troubles != task.troubles:
            state = with_task(state, replace(without_workers(task, list(workers)), troubles=troubles))
    return links.forget_links(replace(state, nodes=without(state.nodes, [name])), name)


#: So many keys of a node hold beside the newest; the oldest end first.
_PREVIOUS_KEYS_MAX = 3


def node_enrolled(state: ClusterState, event: v.NodeEnrolled, _: Envelope) -> ClusterState:
    """Store the node's key, in place of any earlier one, or beside those that hold on. A key that is in use stays so
    when it is enrolled again; so does a login whose earlier keys hold."""
    old = state.logins.get(event.node)
    previous: tuple[PreviousKey, ...] = ()
    if old is not None and event.previous_until_us:
        latest = PreviousKey(old.key, event.previous_until_us)
        keys = (latest, *old.previous) if old.key != event.key else old.previous
        keys = tuple(key for key in keys if key.until_us > state.now_us and key.key != event.key)
        previous = keys[:_PREVIOUS_KEYS_MAX]
    is_used = old is not None and old.is_used and (old.key == event.key or bool(previous))
    login = NodeLogin(key=event.key, expires_us=event.expires_us, is_used=is_used, previous=previous)
    return replace(state, logins={**state.logins, event.node: login})


def node_revoked(state: ClusterState, event: v.NodeRevoked, _: Envelope) -> ClusterState:
    """Remove the node's key. Once it is silent, the node is lost by its missing beats."""
    return replace(state, logins={node: login for node, login in state.logins.items() if node != event.node})


def _mark_used(state: ClusterState, node: str) -> ClusterState:
    """Record that the node has joined with its login."""
    login = state.logins.get(node)
    if login is None or login.is_used:
        return state
    return replace(state, logins={**state.logins, node: replace(login, is_used=True)})
