"""What people do beside the work itself: faults that they inject, alarms that they handle (state/alarms.py)."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from unicrond.core.folding import commands
from unicrond.core.rules import healing_proofs as proofs
from unicrond.core.state.alarms import ALARMS_MAX, AlarmHandling
from unicrond.core.state.changes import find_worker, with_node, with_task, with_worker
from unicrond.core.state.state import ClusterState, Injection, NodeStatus
from unicrond.events import vocabulary as v
from unicrond.events.wire.envelope import Envelope

_NOBODY = "-"


def injection_requested(state: ClusterState, event: v.InjectionRequested, _: Envelope) -> ClusterState:
    """Store the requested fault, under the number of its entry, for a node that is up."""
    node = state.nodes.get(event.node)
    if node is None or node.status is not NodeStatus.UP:
        return state
    injection = Injection(node=event.node, fault=event.fault)
    return replace(state, injections=state.injections | {f"f{state.seq}": injection})


def inject_fault(state: ClusterState, event: v.InjectFault, _: Envelope) -> ClusterState:
    """Remove the request from the pending ones: its command has gone out to the node."""
    state = commands.count_command(state, event.node)
    if event.fault.excluded_from_blame:
        state = proofs.ordered(_mark_injected(state, event.node, event.fault), event)
    return replace(state, injections={name: i for name, i in state.injections.items() if name != event.injection})


#: The kinds of faults that end a worker, and those after which a node counts as lost.
_ENDS = ("kill", "stop", "exception", "nan", "hang", "exit", "oom")
_LOSES = ("kill", "drop_network")


def _mark_injected(state: ClusterState, name: str, fault: v.Fault) -> ClusterState:
    """Mark the target of the fault, so that failure_counts.py and nodes.py count nothing against it."""
    node, pair = state.nodes.get(name), find_worker(state, fault.worker.rpartition(".")[0], fault.worker)
    if pair is not None and fault.kind in _ENDS:
        task, worker = pair
        return with_task(state, with_worker(task, replace(worker, ordered_fault=fault.kind)))
    if node is not None and not fault.worker and fault.kind in _LOSES:
        return with_node(state, replace(node, health=replace(node.health, is_loss_excused=True)))
    return state


def forget_injections(state: ClusterState, node: str) -> ClusterState:
    """Return the state without pending injections into `node`."""
    return replace(state, injections={name: i for name, i in state.injections.items() if i.node != node})


def alarm_acknowledged(state: ClusterState, event: v.AlarmAcknowledged, _: Envelope) -> ClusterState:
    """Record who has seen the alarm, and when."""
    return _with(state, event, acknowledged_by=event.requester or _NOBODY, acknowledged_us=state.now_us)


def alarm_silenced(state: ClusterState, event: v.AlarmSilenced, _: Envelope) -> ClusterState:
    """Record until when the alarm is to notify nobody."""
    return _with(state, event, silenced_by=event.requester or _NOBODY, silenced_until_us=state.now_us + event.for_us)


def alarm_assigned(state: ClusterState, event: v.AlarmAssigned, _: Envelope) -> ClusterState:
    """Record whose the alarm is."""
    return _with(state, event, assigned_by=event.requester or _NOBODY, person=event.person)


def alarm_ended(state: ClusterState, event: v.AlarmEnded, _: Envelope) -> ClusterState:
    """Forget what people did about the alarm."""
    if event.alarm not in state.alarms:
        return state
    return replace(state, alarms={key: rest for key, rest in state.alarms.items() if key != event.alarm})


def _with(
    state: ClusterState, event: v.AlarmAcknowledged | v.AlarmSilenced | v.AlarmAssigned, **fields: Any
) -> ClusterState:
    handling = replace(state.alarms.get(event.alarm, AlarmHandling()), reason=event.reason, **fields)
    alarms = {key: rest for key, rest in state.alarms.items() if key != event.alarm} | {event.alarm: handling}
    return replace(state, alarms=dict(list(alarms.items())[-ALARMS_MAX:]))
