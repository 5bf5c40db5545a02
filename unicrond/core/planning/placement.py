"""Placement: from counts to workers on nodes.

Rules
-----
* A replica is `Shape.workers` workers; shard s belongs to group s // tp. The tp workers of one group
  stand on one node.
* A replica whose nodes are all up stays where it is, as long as the task keeps that many replicas.
* A task that loses replicas gives up those on the nodes where it has fewest workers: it ends on fewer nodes.
* New replicas: big tensor-parallel groups first (they are hardest to place), then the task that needs
  most, then by name. Each goes to a node that the task is on already; else to the smallest gap (free slots of a
  node) that holds all that is still needed; else to the largest gap.
* If a replica cannot be placed without moving others, the cheapest replicas with smaller groups move away, if
  there is room for them elsewhere. If even that does not help, the task is `short` and the caller
  re-plans with the count that fits, or accepts.
* Nodes that cannot talk to each other (`apart`) do not carry the same task; the caller leaves out of `current` what has
  to go for that.
* Nodes that start no workers (`closed`) keep the replicas that stay there, and get none.
* Types of GPU are placed apart: a task has all its workers on nodes of one type (`place_apart`).
* Equal input gives equal output, whatever the order of the mappings.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

from unicrond.events.vocabulary.shape import Shape

#: The node of each of a replica's shards, in shard order.
Replica: TypeAlias = tuple[str, ...]


@dataclass(frozen=True)
class Placement:
    """Where all replicas stand. `replicas`: per task, those that stayed (in their old order), then new ones.

    `short`: task -> replicas that found no slots. `moves`: workers that had to make room for others.
    """

    replicas: Mapping[str, tuple[Replica, ...]]
    short: Mapping[str, int] = field(default_factory=dict)
    moves: int = 0


def place(
    counts: Mapping[str, int],
    shapes: Mapping[str, Shape],
    nodes: Mapping[str, int],
    current: Mapping[str, Sequence[Replica]],
    apart: Sequence[tuple[str, str]] = (),
    closed: Collection[str] = (),
) -> Placement:
    """Place `counts[task]` replicas of each task on `nodes` (name -> slots), starting from the present placement.

    Nodes that are lost are simply not in `nodes`; tasks that are not in `counts` end. Raise ValueError if a task has no
    shape or a negative count, or a present replica is not of its task's shape.
    """
    for task, count in sorted(counts.items()):
        if count < 0:
            raise ValueError(f"counts: {task} has {count} replicas; give a number >= 0")
        if task not in shapes:
            raise ValueError(f"shapes: {task} is missing; give its tp and pp")
        for replica in current.get(task, ()):
            if not shapes[task].fits(replica):
                raise ValueError(f"current: a replica of {task} is on {replica}, which does not have its shape")
    cluster = _ClusterSlots(
        shapes, nodes, {task: staying_replicas(current.get(task, ()), counts[task], nodes) for task in sorted(counts)}
    )
    cluster.set_apart(apart)
    cluster.close(closed)
    new_counts = {task: counts[task] - len(cluster.seated[task]) for task in counts}
    short: dict[str, int] = {}
    for task in sorted(counts, key=lambda t: (-shapes[t].tp, -new_counts[t] * shapes[t].workers, t)):
        missing = _seat_new(cluster, task, new_counts[task])
        while missing and not apart and _make_room(cluster, shapes[task].tp):
            missing = _seat_new(cluster, task, missing)
        if missing:
            short[task] = missing
    replicas = {task: tuple(replica for _, replica in sorted(cluster.seated[task].items())) for task in sorted(counts)}
    return Placement(replicas, dict(sorted(short.items())), cluster.moves)


def place_apart(
    counts: Mapping[str, int],
    shapes: Mapping[str, Shape],
    nodes: Mapping[str, int],
    current: Mapping[str, Sequence[Replica]],
    gpus: tuple[Mapping[str, str], Mapping[str, str]],
    apart: Sequence[tuple[str, str]] = (),
    closed: Collection[str] = (),
) -> Placement:
    """Place each task as `place` does, on nodes with its type of GPU. `gpus`: the types of the nodes and of the tasks;
    an empty first mapping means that all nodes are alike."""
    of_node, of_task = gpus
    if not of_node:
        return place(counts, shapes, nodes, current, apart, closed)
    parts = [
        place(
            {task: count for task, count in counts.items() if of_task[task] == gpu},
            shapes,
            {node: slots for node, slots in nodes.items() if of_node[node] == gpu},
            current,
            apart,
            closed,
        )
        for gpu in sorted({of_task[task] for task in counts})
    ]
    replicas = {task: placements for part in parts for task, placements in part.replicas.items()}
    short = {task: count for part in parts for task, count in part.short.items()}
    return Placement(replicas, dict(sorted(short.items())), sum(part.moves for part in parts))


class _ClusterSlots:
    """The slots of the cluster during placement: mutable, private to one call of `place`."""

    def __init__(
        self, shapes: Mapping[str, Shape], nodes: Mapping[str, int], staying: Mapping[str, Sequence[Replica]]
    ) -> None:
        """Put the replicas that stay on their nodes, as far as these have free slots."""
        self.shapes = shapes
        self.free = dict(nodes)
        self.seated: dict[str, dict[int, Replica]] = {task: {} for task in shapes}  # by ticket: order of coming
        self.of_task: dict[str, Counter[str]] = {task: Counter() for task in shapes}  # its workers per node
        self.on_node: dict[str, set[tuple[str, int]]] = {node: set() for node in nodes}
        self.by_gap: dict[int, list[str]] = {}  # nodes by free seats, names sorted
        self.tickets = 0
        self.moves = 0
        self.apart: dict[str, set[str]] = {}  # node -> those that it cannot talk to
        self.shut: frozenset[str] = frozenset()  # nodes that have no free seats, whoever leaves them
        for task, replicas in staying.items():
            for replica in replicas:
                self._stay(task, replica)
        for node, seats in sorted(self.free.items()):
            self.by_gap.setdefault(seats, []).append(node)

    def set_apart(self, pairs: Sequence[tuple[str, str]]) -> None:
        """Keep new replicas of a task off nodes that cannot talk to one of the task's nodes."""
        for first, second in pairs:
            self.apart.setdefault(first, set()).add(second)
            self.apart.setdefault(second, set()).add(first)

    def close(self, nodes: Collection[str]) -> None:
        """Keep new replicas off these nodes, also where one leaves."""
        for node in nodes:
            if node in self.free:
                self._set_free(node, 0)
        self.shut = frozenset(nodes)

    def _is_out_of_reach(self, task: str, node: str) -> bool:
        """Return whether a node of the task cannot talk to this one."""
        workers = self.of_task[task]
        return any(workers[other] > 0 for other in self.apart.get(node, ()))

    def _stay(self, task: str, replica: Replica) -> None:
        """Keep a replica in place, before gaps are indexed: nearly all replicas stay."""
        free = self.free
        for node in replica:
            free[node] -= 1
        if any(free[node] < 0 for node in replica):
            for node in replica:
                free[node] += 1
            return
        self.tickets += 1
        self.seated[task][self.tickets] = replica
        self.of_task[task].update(replica)
        for node in replica:
            self.on_node[node].add((task, self.tickets))

    def seat(self, task: str, replica: Replica, ticket: int | None = None) -> int:
        """Put a replica on its nodes and return its ticket. `ticket`: the one that it had, to restore its place in the
        order."""
        if ticket is None:
            ticket = self.tickets = self.tickets + 1
        self.seated[task][ticket] = replica
        for node, workers in Counter(replica).items():
            self._change(task, node, workers)
            self.on_node[node].add((task, ticket))
        return ticket

    def unseat(self, task: str, ticket: int) -> Replica:
        """Remove the replica of the ticket from its nodes and return it."""
        replica = self.seated[task].pop(ticket)
        for node, workers in Counter(replica).items():
            self._change(task, node, -workers)
            self.on_node[node].discard((task, ticket))
        return replica

    def _change(self, task: str, node: str, workers: int) -> None:
        self.of_task[task][node] += workers
        if node not in self.shut:
            self._set_free(node, self.free[node] - workers)

    def _set_free(self, node: str, seats: int) -> None:
        self.by_gap[self.free[node]].remove(node)
        insort(self.by_gap.setdefault(seats, []), node)
        self.free[node] = seats

    @contextmanager
    def closed(self, node: str) -> Iterator[None]:
        """Keep new replicas off the node while the context lasts."""
        seats = self.free[node]
        self._set_free(node, 0)
        yield
        self._set_free(node, seats)

    def find(self, task: str, missing: int) -> Replica | None:
        """Return the best nodes for one more replica of the task, which still needs `missing` of them; None if it does
        not fit."""
        shape = self.shapes[task]
        if (node := self._gap(task, shape.workers, missing * shape.workers)) is not None:
            return (node,) * shape.workers
        groups: list[str] = []
        while len(groups) < shape.groups:
            node = self._gap(task, shape.tp, (shape.groups - len(groups)) * shape.tp)
            if node is None:
                break
            groups.append(node)
            self._change(task, node, shape.tp)
        for node in groups:
            self._change(task, node, -shape.tp)
        if len(groups) < shape.groups:
            return None
        # Neighbouring groups talk to each other: those on one node stand together.
        return tuple(node for node in sorted(groups, key=groups.index) for _ in range(shape.tp))

    def _gap(self, task: str, least: int, demand: int) -> str | None:
        """Return a node with at least `least` free slots: one of the task's nodes, else one with room for `demand`,
        else the one with the largest gap."""
        task_nodes = [node for node, workers in self.of_task[task].items() if workers and self.free[node] >= least]
        if task_nodes:
            return min(task_nodes, key=lambda node: (_gap_rank(self.free[node], demand), node))
        if self.apart:
            nodes = [n for n, gap in self.free.items() if gap >= least and not self._is_out_of_reach(task, n)]
            return min(nodes, key=lambda node: (_gap_rank(self.free[node], demand), node), default=None)
        gaps = [gap for gap, names in self.by_gap.items() if gap >= least and names]
        return self.by_gap[min(gaps, key=lambda gap: _gap_rank(gap, demand))][0] if gaps else None


def _gap_rank(gap: int, demand: int) -> tuple[bool, int]:
    """Return the rank of a gap, smaller is better: the smallest gap that holds the demand, else the largest gap."""
    return gap < demand, gap if gap >= demand else -gap


def staying_replicas(replicas: Sequence[Replica], count: int, nodes: Mapping[str, int]) -> list[Replica]:
    """Return the up to `count` replicas that stay, in their old order."""
    staying = [replica for replica in replicas if all(node in nodes for node in replica)]
    if len(staying) <= count:
        return staying
    on_node = Counter(node for replica in staying for node in replica)
    while len(staying) > count:
        loneliest = min(range(len(staying)), key=lambda i: (min(on_node[node] for node in staying[i]), -i))
        on_node.subtract(staying.pop(loneliest))
    return staying


def _seat_new(cluster: _ClusterSlots, task: str, count: int) -> int:
    """Place up to `count` new replicas; return how many found no slots."""
    for missing in range(count, 0, -1):
        replica = cluster.find(task, missing)
        if replica is None:
            return missing
        cluster.seat(task, replica)
    return 0


def _make_room(cluster: _ClusterSlots, tp: int) -> bool:
    """Free slots for one more group of `tp` on some node, moving the fewest workers; return False if that is
    impossible.

    Only replicas of smaller groups move, and only if the whole cluster then holds one group more: so a loop of
    `_make_room` ends.
    """
    best: tuple[int, str] | None = None
    for at_least, node in sorted((_lacking(gap, tp), node) for node, gap in cluster.free.items()):
        if node in cluster.shut:
            continue
        if best is not None and best[0] <= at_least:
            break
        cost = _clear(cluster, tp, node, keep=False)
        if cost is not None and (best is None or cost < best[0]):
            best = (cost, node)
    if best is None:
        return False
    _clear(cluster, tp, best[1], keep=True)
    cluster.moves += best[0]
    return True


def _lacking(gap: int, tp: int) -> int:
    """Return how many slots must become free for one more group: moving fewer workers cannot suffice."""
    return tp - gap % tp


def _clear(cluster: _ClusterSlots, tp: int, node: str, *, keep: bool) -> int | None:
    """Move small replicas off `node` until one more group of `tp` fits there; return the workers moved, or None if that
    is impossible.

    With `keep` False all replicas are put back.
    """
    need = cluster.free[node] + _lacking(cluster.free[node], tp)
    movable = sorted(
        (cluster.shapes[task].workers, task, ticket)
        for task, ticket in cluster.on_node[node]
        if cluster.shapes[task].tp < tp
    )
    if cluster.free[node] + sum(cluster.seated[t][i].count(node) for _, t, i in movable) < need:
        return None
    groups = _groups(cluster, tp)
    removed: list[tuple[str, int, Replica]] = []
    for _, task, ticket in movable:
        if cluster.free[node] >= need:
            break
        removed.append((task, ticket, cluster.unseat(task, ticket)))
    placements: list[tuple[str, int]] = []
    with cluster.closed(node):
        for task, _, _ in sorted(removed, key=lambda entry: (-cluster.shapes[entry[0]].tp, entry[:2])):
            seat = cluster.find(task, 1)
            if seat is None:
                break
            placements.append((task, cluster.seat(task, seat)))
    success = len(placements) == len(removed) and _groups(cluster, tp) > groups
    if not (success and keep):
        for task, ticket in placements:
            cluster.unseat(task, ticket)
        for task, ticket, replica in removed:
            cluster.seat(task, replica, ticket)
    return sum(len(replica) for _, _, replica in removed) if success else None


def _groups(cluster: _ClusterSlots, tp: int) -> int:
    return sum((gap // tp) * len(names) for gap, names in cluster.by_gap.items())
