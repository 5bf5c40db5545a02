"""Links: which pairs of nodes cannot talk to each other, and which end a task goes on without. Pure.

Rules
-----
* Where a group stands still and no death explains it (a collective that does not end for anybody, a break that stays
  unexplained, a meeting that does not come about, two ranks of one replica late on two nodes), the agents of its nodes
  probe each other: a few kilobytes there and back, within a second (agents/health/link_probe.py). In a large task each
  probes its neighbours at distances of powers of two, and the peers that reports name: NEIGHBOURS_MAX at most.
* A link is silent if *both* ends say so. One probe that succeeds has gone both ways, so it acquits; an end that had no
  time for its own probe says nothing. Firewalls that let one end connect are no silent link.
* One silent pair is the link's fault: nothing is held against either node, both may work for others, and for this task
  wherever the pair does not matter. A node that is silent to several others is an end of each of these links, and so
  the one that costs less (the next rule says it): the node's fault, but no more is known than that.
* A task goes on without the ends that cost it least: of all sets of nodes with an end in every silent pair, the one
  with the fewest workers (whole replicas). Of equal ones: those that more links are bad of, even by one end's word
  alone; then those without the lead; then the later by name.
* No plan puts both ends of a silent pair into one task (planning/placement.py). So no end is evicted twice.
* The pair is watched by both agents, which say when it is good again: for two probes, and after each time that it was
  bad again within CALM_US of its return for twice as long (PATIENCE_US; at most PATIENCE_MAX_US). Then plans use it,
  once both ends say so if a task went on without one of them: a link that loses packets lets one end's probes pass now
  and then, and the end that returned for that would be evicted again.
* So are those of a task that has become slow while no worker explains half of it (DegradationObserved): after
  REPEAT_US where they were probed just now, at once where it has become WORSE times slower since. A link that is
  slow by both ends' word (it loses or delays) is told. It is barred like a silent one until it is good where the
  task's iterations take more than WORTH times as long as they usually would without the cheaper end, the others taking
  its work over; or where a group has stood still twice in a row and no link is silent: the slow one has stopped it.

What does not live here: probes (the agents), when they are ordered and what follows (deciding/links.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import TypeAlias

from unicrond.core.state.node_links import NodeLink, link_key
from unicrond.core.state.state import ClusterState, Incident, NodeStatus, Severity, Task

#: Two nodes, the first by name first.
Pair: TypeAlias = tuple[str, str]
#: How soon after its return a link that is bad again counts as the same trouble.
CALM_US = 600_000_000
#: For how long a link must be good to be believed, after its second time; and at most.
PATIENCE_US, PATIENCE_MAX_US = 10_000_000, 600_000_000
#: From the order to probe to the last answer; a probe takes a second at most.
ANSWERS_US = 2_000_000
#: A group that has not met for so long has its links probed; again after twice as long.
MEETING_US, MEETING_MAX_US = 3_000_000, 60_000_000
#: Tasks on no more nodes than this have all their links probed.
MESH_MAX = 16
NEIGHBOURS_MAX = 32
#: By how much the rest must be faster than all with the slow link.
WORTH = 1.1
#: A slow group is probed again after so long, or once it has become so many times slower: whoever reports it fills
#: the log with orders and answers.
REPEAT_US, WORSE = 60_000_000, 2
#: The ends of names of deadlines: of answers, and of another round in a group that has met. One that stands already
#: goes on, so those that are about something else must not be called the same.
ANSWERS, AGAIN = ".answers", ".again"
TIMINGS_MIN = 5
#: Steps in search of the cheapest ends.
_LOOKS_MAX = 4096


def barred_pairs(state: ClusterState) -> tuple[Pair, ...]:
    """Return the pairs that no task may be on both of, sorted."""
    pairs = [link.ends for link in state.links.values() if link.is_barred]
    return tuple(sorted(pair for pair in pairs if all(_is_there(state, node) for node in pair)))


def poor_pairs(state: ClusterState) -> tuple[Pair, ...]:
    """Return the pairs whose link is slow or silent by both ends' word, sorted."""
    return tuple(sorted(link.ends for link in state.links.values() if link.is_poor))


def _is_there(state: ClusterState, node: str) -> bool:
    return node in state.nodes and state.nodes[node].status is not NodeStatus.LEFT


def patience_us(link: NodeLink) -> int:
    """Return for how long the link must be good to be believed."""
    return 0 if link.times < 2 else min(PATIENCE_MAX_US, PATIENCE_US << min(link.times - 2, 16))


def among(pairs: Iterable[Pair], nodes: Iterable[str]) -> list[Pair]:
    """Return the pairs with both ends among the nodes."""
    present = set(nodes)
    return [pair for pair in pairs if present.issuperset(pair)]


def ends_to_leave(pairs: Sequence[Pair], costs: Mapping[str, tuple[int, ...]]) -> tuple[str, ...]:
    """Return the cheapest set of nodes with an end in every pair, sorted. `costs`: of each end, compared in order and
    added up; of equal sets the one with the later names."""
    best: tuple[tuple[int, ...], list[int], tuple[str, ...]] | None = None
    ranks = {node: rank for rank, node in enumerate(sorted({end for pair in pairs for end in pair}, reverse=True))}
    open_ways: list[tuple[frozenset[str], tuple[Pair, ...]]] = [(frozenset(), tuple(pairs))]
    for _ in range(_LOOKS_MAX):
        if not open_ways:
            break
        cover, rest = open_ways.pop()
        if not rest:
            total = tuple(map(sum, zip(*(costs[node] for node in cover), strict=True)))
            way = (total, sorted(ranks[node] for node in cover), tuple(sorted(cover)))
            best = way if best is None or way < best else best
            continue
        degrees = {end: sum(end in pair for pair in rest) for pair in rest for end in pair}
        busiest = max(degrees, key=lambda node: (degrees[node], node))
        peers = {end for pair in rest if busiest in pair for end in pair} - {busiest}
        open_ways += [
            (cover | choice, tuple(pair for pair in rest if choice.isdisjoint(pair))) for choice in (peers, {busiest})
        ]
    return best[2] if best else ()


def costs_of_ends(state: ClusterState, task: Task, replicas: Iterable[Sequence[str]]) -> dict[str, tuple[int, ...]]:
    """Return what it costs the task to go on without each node that its replicas stand on: the workers of these
    replicas, fewer for more bad links, more for the lead."""
    suspects = [end for link in state.links.values() if link.conditions for end in link.ends]
    lead = task.membership.members[0].node if task.membership and task.membership.members else ""
    workers: dict[str, int] = {}
    for nodes in replicas:
        for node in set(nodes):
            workers[node] = workers.get(node, 0) + len(nodes)
    return {node: (count, -suspects.count(node), int(node == lead)) for node, count in workers.items()}


def probed_nodes(state: ClusterState, task: Task) -> list[str]:
    """Return the nodes whose links are probed for the task's newest group: its members', as far as their agents
    answer probes."""
    members = task.membership.members if task.membership else ()
    names = dict.fromkeys(member.node for member in members)
    return [name for name in names if name in state.nodes and _answers(state, name)]


def _answers(state: ClusterState, name: str) -> bool:
    return bool(state.nodes[name].probe_port) and state.nodes[name].status is NodeStatus.UP


def peers_to_probe(task: Task, incident: Incident | None, nodes: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return which of the others each node probes. Both ends of a pair probe it."""
    count = len(nodes)
    distances = range(1, count) if count <= MESH_MAX else [1 << power for power in range((count - 1).bit_length())]
    pairs = {tuple(sorted((nodes[i], nodes[(i + d) % count]))) for i in range(count) for d in distances}
    if incident is not None:
        of = {name: worker.node for name, worker in task.workers.items()}
        reports = {**{name: (peer,) for name, peer in incident.lost_peers.items()}, **incident.links}
        reported_pairs = [(of.get(name, ""), of.get(peer, "")) for name, peers in reports.items() for peer in peers]
        pairs |= {tuple(sorted(ends)) for ends in reported_pairs if all(end in nodes for end in ends)}
    peers: dict[str, list[str]] = {node: [] for node in nodes}
    for first, second in sorted(pairs):
        if first != second and max(len(peers[first]), len(peers[second])) < NEIGHBOURS_MAX:
            peers[first].append(second)
            peers[second].append(first)
    return {node: tuple(neighbours) for node, neighbours in peers.items() if neighbours}


def standstill(state: ClusterState, task: Task) -> Incident | None:
    """Return the incident in which the task's group stands still, or broke, without a known cause."""
    for incident in state.incidents.values():
        if incident.severity is not Severity.SEV3 or incident.generations.get(task.name) not in task.in_use:
            continue
        if incident.kind == "collective_timeout" or incident.is_overdue:
            return incident
    return None


def explain(state: ClusterState, task: Task) -> bool:
    """Return whether members of the task cannot talk to each other, or that is being found out."""
    if is_awaited(task):
        return True
    nodes = [worker.node for worker in task.workers.values() if worker.alive]
    return bool(state.links) and bool(among(poor_pairs(state), nodes))


def answers_in_us(state: ClusterState, incident: Incident) -> int:
    """Return how long the incident's deadline is to wait for probes of links besides."""
    tasks = [state.tasks[name] for name in incident.generations if name in state.tasks]
    probed = incident.kind == "collective_timeout" and any(len(probed_nodes(state, task)) > 1 for task in tasks)
    return ANSWERS_US if probed else 0


def deadlines(state: ClusterState, task: Task) -> Iterator[tuple[str, int]]:
    """Yield `links:` (id, length in microseconds): where answers of probes are to come, the group is to meet, or it is
    time for another round."""
    probing, unmet = task.group.probing, task.membership is not None and not task.confirmed
    if not probing.orders and (not (unmet or probing.is_repeated) or len(probed_nodes(state, task)) < 2):
        return
    name = f"links:{task.name}#{task.generation}.{probing.rounds}"
    if probing.orders:
        yield f"{name}{ANSWERS}", ANSWERS_US
    elif unmet:
        yield name, min(MEETING_US << min(probing.rounds, 16), MEETING_MAX_US)
    else:
        yield f"{name}{AGAIN}", max(0, probing.ordered_us + REPEAT_US - state.now_us)


def replica_stands_still(task: Task) -> bool:
    """Return whether ranks of one replica are late on several nodes, none of them stopped or busy, and the links were
    not probed since the last step: they wait for each other where nobody counts collectives."""
    suspicions, probing, membership = task.group.suspicions, task.group.probing, task.membership
    if not suspicions or membership is None or probing.iteration == task.progress.iteration:
        return False  # by iterations, for the log's clock may stand still
    nodes: dict[int, set[str]] = {}
    for name, report in suspicions.items():
        if report.is_stopped or report.section:
            return False
        if name in task.workers and not report.is_waiting:
            nodes.setdefault(task.workers[name].replica, set()).add(task.workers[name].node)
    return any(len(ends) > 1 for ends in nodes.values())


def goes_better_without(task: Task, workers: int) -> bool:
    """Return whether the task would be faster without so many of its workers, whose work the others take over."""
    usual_us, members = task.group.probing.usual_us, len(task.member_names)
    timings = task.pace.timings[-TIMINGS_MIN:]
    if not usual_us or len(timings) < TIMINGS_MIN or members <= workers:
        return False
    return median(timings) > WORTH * usual_us * members / (members - workers)


def is_awaited(task: Task) -> bool:
    """Return whether answers of probes are still to come."""
    return bool(task.group.probing.orders)


def pair_text(state: ClusterState, pair: Pair) -> str:
    """Say, for people, what is wrong between two nodes."""
    link = state.links.get(link_key(*pair))
    if link is not None and (way := link.cut_way) is not None:
        return f"{way[0]} -> {way[1]} is cut; the other way works"
    if link is None or link.is_silent:
        return f"nothing passes between {pair[0]} and {pair[1]}"
    took_us = max(link.took_us.values(), default=0)
    return f"the link between {pair[0]} and {pair[1]} is bad: a probe there and back takes {took_us / 1e6:.2g} s"
