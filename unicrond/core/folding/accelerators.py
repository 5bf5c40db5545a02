"""Accelerators: what their driver reports, beside the reports of the processes on them.

Rules
-----
* A fault belongs to the incident of the worker on the accelerator, as if the worker had reported it
  (`incidents.blame`).
* Without a worker there, a fault that would restart a process has no effect; one that takes the node out of
  service does so before a worker is started there.
* An error that predicts a failure is an incident of no worker: the node is emptied and checked (drains.py).
* The repair that the hardware needs is remembered until the node is readmitted; isolation.py says what it requires.
* A node that is isolated already is not isolated again by an unused accelerator.
"""

from __future__ import annotations

from msgspec.structs import replace

from unicrond.core.faults.severity import severity_of
from unicrond.core.folding import incidents
from unicrond.core.folding.incidents import Fact
from unicrond.core.nodes import isolation
from unicrond.core.state.changes import find_worker, with_incident, with_node
from unicrond.core.state.state import ClusterState, NodeStatus, Severity, TaskStatus
from unicrond.events import vocabulary as v
from unicrond.events.wire.envelope import Envelope


def accelerator_reported(state: ClusterState, event: v.AcceleratorReported, envelope: Envelope) -> ClusterState:
    """Record a driver's error: an incident of the worker on the accelerator or, at SEV1 without one, of the node."""
    node = state.nodes.get(event.node)
    if node is None or node.status is not NodeStatus.UP:
        return state
    if event.kind is None:
        expected = event.predicts_failure and not node.isolation.active
        message = f"{event.accelerator}: {event.message}"[:1024]
        if not expected:
            return state
        return with_node(state, replace(node, health=replace(node.health, failure_forecast=message)))
    if severity_of(event.kind, state.severity) is Severity.SEV1:
        node = isolation.with_repair_need(node, event.repair_need)
        state = with_node(state, node)
    message = f"{event.accelerator}: {event.message}"[:1024]
    pair = find_worker(state, event.worker.rpartition(".")[0], event.worker)
    if pair is not None and pair[1].alive and pair[0].status is TaskStatus.ACTIVE and pair[1].node == event.node:
        task, worker = pair
        fact = Fact(
            kind=event.kind,
            node=event.node,
            worker=worker.worker,
            generations={task.name: incidents.broken_generation(task, [worker.worker])},
            message=message,
            occurred_us=envelope.observed_at_us,
        )
        return incidents.blame(state, fact)
    if severity_of(event.kind, state.severity) is not Severity.SEV1 or node.isolation.active:
        return state
    for incident in state.incidents.values():
        if incident.node == event.node and incident.severity is Severity.SEV1:
            return with_incident(state, replace(incident, symptoms=incident.symptoms + 1))
    fact = Fact(
        kind=event.kind,
        node=event.node,
        worker="",
        generations={},
        message=message,
        occurred_us=envelope.observed_at_us,
    )
    return incidents.open_incident(state, fact)
