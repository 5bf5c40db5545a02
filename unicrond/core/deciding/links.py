"""Links between nodes: when they are probed, and which workers a task goes on without. The rules: faults/links.py."""

from __future__ import annotations

from unicrond.core.deciding.batch import DecisionBatch
from unicrond.core.faults import links
from unicrond.core.rules.survey import Survey
from unicrond.core.state.state import ClusterState, NodeStatus, Task
from unicrond.events import vocabulary as v


def withdraw_workers(batch: DecisionBatch) -> None:
    """Have tasks go on without the cheaper ends of the bad links between their members."""
    for task in batch.survey.active if batch.state.links else ():
        _withdraw_workers(batch, task)


def _withdraw_workers(batch: DecisionBatch, task: Task) -> None:
    """Have the task go on without the cheaper ends of the silent links between its members."""
    state, poor = batch.state, links.poor_pairs(batch.state)
    if not any(all(state.by_node.of_task(end, task.name) for end in pair) for pair in poor) or links.is_awaited(task):
        return  # who else is an end of how many bad links is known in a moment
    living: dict[int, list[str]] = {}
    for worker in task.workers.values():
        if worker.alive:
            living.setdefault(worker.replica, []).append(worker.node)
    nodes = [node for replica in living.values() for node in replica]
    pairs = links.among(batch.survey.barred_pairs, nodes)
    costs = links.costs_of_ends(state, task, living.values())
    if not pairs:
        pairs = links.among(poor, nodes)
        if not pairs:
            return
        has_stopped = bool(task.group.reattempts) and links.standstill(state, task) is not None
        workers = sum(costs[end][0] for end in links.ends_to_leave(pairs, costs))
        if not (has_stopped or links.goes_better_without(task, workers)):
            return
    ends = links.ends_to_leave(pairs, costs)
    for node in ends:
        peers = sorted({end for pair in pairs if node in pair for end in pair} - {node})
        troubles = [links.pair_text(state, pair) for pair in pairs if node in pair]
        batch.add(v.WorkersWithdrawn(task=task.name, node=node, peers=tuple(peers), reason="; ".join(troubles)[:1024]))


def together(survey: Survey, task: Task, replicas: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Return those of a task's replicas that stand on nodes of which all can talk to each other: without the ends that
    have no workers any more, or cost least."""
    pairs = links.among(survey.barred_pairs, [node for nodes in replicas for node in nodes])
    if not pairs:
        return replicas
    alive = {worker.node for worker in task.workers.values() if worker.alive}
    costs = links.costs_of_ends(survey.state, task, replicas)
    costs = {node: cost if node in alive else (0, *cost[1:]) for node, cost in costs.items()}
    departures = links.ends_to_leave(pairs, costs)
    return [nodes for nodes in replicas if not set(nodes).intersection(departures)]


def changes_since(state: ClusterState, since_us: int) -> list[str]:
    """Say, for people, which links have changed since."""
    changes = []
    for link in state.links.values():
        if link.is_barred and link.since_us >= since_us:
            changes.append(f"link {link.first}-{link.second} {'silent' if link.is_silent else 'slow'}")
        elif link.restored_us >= since_us > 0 and not link.is_barred:
            changes.append(f"link {link.first}-{link.second} is back")
    return changes


def probe_groups(batch: DecisionBatch) -> None:
    """Have the links within each group probed that stands still for no known reason."""
    for task in batch.survey.active:
        _probe_group(batch, task)


def _probe_group(batch: DecisionBatch, task: Task) -> None:
    state, probing = batch.state, task.group.probing
    incident = links.standstill(state, task)
    is_due = probing.overdue or (incident is not None and incident.detected_us > probing.ordered_us)
    if probing.orders or not (is_due or links.replica_stands_still(task)):
        return
    nodes = links.probed_nodes(state, task)
    for node, peers in links.peers_to_probe(task, incident, nodes).items():
        _order(batch, node, peers, task=task.name, generation=task.generation)


def watch_links(batch: DecisionBatch) -> None:
    """Have each bad link watched by the ends that find it so, with the patience that it has earned. An
    agent that starts answers probes at another port than the one before it: then the other end is told anew."""
    state = batch.state
    for link in state.links.values():
        for end in link.conditions:
            node, peer = state.nodes.get(end), state.nodes.get(link.opposite(end))
            patience_us = links.patience_us(link)
            if node is None or peer is None or node.status is not NodeStatus.UP or not peer.probe_port:
                continue
            if link.watches.get(end) != (node.agent.boot, peer.agent.boot, patience_us):
                _order(batch, end, (peer.name,), patience_us=patience_us)


def _order(
    batch: DecisionBatch,
    node: str,
    peers: tuple[str, ...],
    *,
    patience_us: int = 0,
    task: str = "",
    generation: int = 0,
) -> None:
    nodes = [batch.state.nodes[peer] for peer in peers]
    batch.add(
        v.ProbeLinks(
            command_id=batch.command_id(node),
            node=node,
            epoch=batch.state.plan.epoch,
            peers=tuple([v.ProbedPeer(node=peer.name, host=peer.address, port=peer.probe_port) for peer in nodes]),
            patience_us=patience_us,
            task=task,
            generation=generation,
        )
    )
