"""Faults that people order."""

from __future__ import annotations

from msgspec.structs import replace

from events import vocabulary as v
from events.envelope import Envelope
from unicrond.core.changes import with_node, with_task, with_worker, worker_known
from unicrond.core.folding import commands
from unicrond.core.state import ClusterState, Injection, NodeStatus


def injection_requested(state: ClusterState, event: v.InjectionRequested, _: Envelope) -> ClusterState:
    """Keeps the order, under the number of its entry, for a node that is up."""
    node = state.nodes.get(event.node)
    if node is None or node.status is not NodeStatus.UP:
        return state
    injection = Injection(node=event.node, fault=event.fault)
    return replace(state, injections=state.injections | {f"f{state.seq}": injection})


def inject_fault(state: ClusterState, event: v.InjectFault, _: Envelope) -> ClusterState:
    """The order has gone out to its node: it is no longer pending."""
    state = commands.count_command(state, event.node)
    if event.fault.spared:
        state = _spared(state, event.node, event.fault)
    return replace(state, injections={name: i for name, i in state.injections.items() if name != event.injection})


#: What ends a worker, and what ends a node's presence.
_ENDS = ("kill", "stop", "exception", "nan", "hang", "exit", "oom")
_LOSES = ("kill", "drop_network")


def _spared(state: ClusterState, name: str, fault: v.Fault) -> ClusterState:
    """Its target is known from now on: strikes.py and nodes.py count nothing for it."""
    node, known = state.nodes.get(name), worker_known(state, fault.worker.rpartition(".")[0], fault.worker)
    if known is not None and fault.kind in _ENDS:
        task, worker = known
        return with_task(state, with_worker(task, replace(worker, injected=fault.kind)))
    if node is not None and not fault.worker and fault.kind in _LOSES:
        return with_node(state, replace(node, injected=True))
    return state


def forget_injections(state: ClusterState, node: str) -> ClusterState:
    """The state without pending injections into `node`."""
    return replace(state, injections={name: i for name, i in state.injections.items() if i.node != node})
