"""The silence of all nodes: one incident, in which nothing is lost that comes back (nodes/deafness.py).

Rules
-----
* The silence opens one incident, which hits no task: they train on unheard. It is closed once the silence is over.
* Nodes that are lost in it after all, and those whose agents come back without their workers, add what they carried to
  that incident and open none of their own. Their return is no flap: nothing says that their machines have failed.
* What is lost in it keeps its workers as they are: nobody can go on for them meanwhile, and those that are heard again
  train on. Only where the silence ends without the node are they lost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from unicrond.core.folding import incidents
from unicrond.core.state.changes import with_incident, with_node, with_task
from unicrond.core.state.incident_lifecycle import IncidentTrigger, advance
from unicrond.core.state.ordered_map import put_all
from unicrond.core.state.state import ClusterState, NodeStatus, Severity, Silence, TaskStatus
from unicrond.core.state.worker_lifecycle import status_after
from unicrond.events import vocabulary as v
from unicrond.events.wire.envelope import Envelope


def silence_held(state: ClusterState, event: v.SilenceHeld, envelope: Envelope) -> ClusterState:
    """Record that the head hears none of its nodes, and open the incident of that."""
    if state.silence is not None:
        return state
    fact = incidents.Fact(
        kind="head_deaf",
        node="",
        worker="",
        generations={},
        message=f"the head hears none of {event.nodes} nodes: {event.reason}"[:1024],
        occurred_us=envelope.observed_at_us,
    )
    state = incidents.open_incident(state, fact)
    return replace(state, silence=Silence(since_us=state.now_us, nodes=event.nodes, incident=f"i{state.seq}"))


def silence_ended(state: ClusterState, event: v.SilenceEnded, _: Envelope) -> ClusterState:
    """Record that the head hears its nodes again. The workers of those that are lost by now are lost with them."""
    if state.silence is None:
        return state
    away = [name for name, node in state.nodes.items() if node.status is NodeStatus.LOST]
    for name in away if state.silence.are_lost else ():
        state = lose_in_silence(state, live_workers(state, name))
        state = lose_workers(state, name, type(event))
    return replace(state, silence=None)


def node_lost_in_silence(state: ClusterState, name: str) -> ClusterState:
    """Record that the node is lost after all, as others are."""
    assert state.silence is not None
    state = replace(state, silence=replace(state.silence, are_lost=True))
    return lose_in_silence(excused(state, name), {})


def lose_in_silence(state: ClusterState, workers: Mapping[str, Sequence[str]]) -> ClusterState:
    """Add to the incident of the silence that nodes are lost, and these live workers of theirs, by task."""
    incident = state.incidents.get(state.silence.incident) if state.silence is not None else None
    if incident is None:
        return state
    hit = {
        name: max(incident.generations.get(name, 0), incidents.broken_generation(state.tasks[name], [*names]))
        for name, names in workers.items()
        if state.tasks[name].status is TaskStatus.ACTIVE
    }
    generations = incident.generations | hit
    severe = advance(incident, IncidentTrigger.CAUSE_NAMES, severity=Severity.SEV1, generations=generations)
    return with_incident(state, severe)


def excused(state: ClusterState, name: str) -> ClusterState:
    """Return the state in which the node's next return counts as no flap."""
    node = state.nodes[name]
    return with_node(state, replace(node, health=replace(node.health, is_loss_excused=True)))


def live_workers(state: ClusterState, node: str) -> dict[str, list[str]]:
    """Return the workers on the node that nobody has given up, by task."""
    index = state.by_node
    names = {
        task.name: [name for name in index.of_task(node, task.name) if task.workers[name].alive]
        for task in state.tasks.values()
    }
    return {task: workers for task, workers in names.items() if workers}


def lose_workers(state: ClusterState, node: str, event: type[v.AnyEvent]) -> ClusterState:
    """Return the state in which all workers on the node are lost to their tasks by `event`."""
    index = state.by_node
    for task in state.tasks.values():
        on_node = {
            worker.worker: replace(worker, status=status_after(worker.status, event))
            for worker in (task.workers[name] for name in index.of_task(node, task.name))
        }
        if on_node:
            state = with_task(state, replace(task, workers=put_all(task.workers, on_node)))
    return state
