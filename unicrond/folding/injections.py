"""Faults that people order."""

from __future__ import annotations

from msgspec.structs import replace

from events import vocabulary as v
from events.envelope import Envelope
from unicrond.folding import commands
from unicrond.state import ClusterState, Injection, NodeStatus


def injection_requested(state: ClusterState, event: v.InjectionRequested, _: Envelope) -> ClusterState:
    node = state.nodes.get(event.node)
    if node is None or node.status is not NodeStatus.UP:
        return state
    injection = Injection(node=event.node, fault=event.fault)
    return replace(state, injections=state.injections | {f"f{state.seq}": injection})


def inject_fault(state: ClusterState, event: v.InjectFault, _: Envelope) -> ClusterState:
    state = commands.count_command(state, event.node)
    return replace(state, injections={name: i for name, i in state.injections.items() if name != event.injection})


def forget_injections(state: ClusterState, node: str) -> ClusterState:
    return replace(state, injections={name: i for name, i in state.injections.items() if i.node != node})
