"""Placement: from counts to workers on nodes.

Rules
-----
* A replica is tp * pp workers; shard s belongs to pipeline stage s // tp. The tp workers of one stage
  stand on one node.
* A replica whose nodes are all there stays where it is, as long as the task keeps that many.
* A task that loses replicas gives up those on the nodes where it has fewest: it ends on fewer nodes.
* New replicas: big tensor-parallel groups first (they are hardest to seat), then the task that needs
  most, then by name. Each goes to a node that the task is on already; else to the smallest gap that seats
  all that is still needed; else to the largest gap.
* What cannot be seated without moving somebody: the cheapest replicas with smaller groups move away, if
  there is room for them elsewhere. If even that does not help, the task is `short` and the caller
  re-plans with the count that fits, or accepts.
* Equal input, equal output, whatever the order of the mappings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

#: The node of each of a replica's shards, in shard order.
Replica: TypeAlias = tuple[str, ...]


@dataclass(frozen=True)
class Shape:
    """A replica's form: tensor-parallel groups of `tp` workers, `pp` of them."""

    tp: int = 1
    pp: int = 1

    @property
    def workers(self) -> int:
        """Workers in one replica."""
        return self.tp * self.pp


@dataclass(frozen=True)
class Placement:
    """Where everybody stands. `replicas`: per task, those that stayed (in their old order), then new ones.

    `short`: task -> replicas that could not be seated. `moved`: workers that stand where they did not
    stand before, beyond those of added replicas.
    """

    replicas: Mapping[str, tuple[Replica, ...]]
    short: Mapping[str, int] = field(default_factory=dict)
    moved: int = 0

    @property
    def fragments(self) -> int:
        """Pairs of a task and a node it has workers on: fewer is better connected."""
        return sum(len({node for replica in of_task for node in replica}) for of_task in self.replicas.values())


def place(
    counts: Mapping[str, int],
    shapes: Mapping[str, Shape],
    nodes: Mapping[str, int],
    current: Mapping[str, tuple[Replica, ...]],
) -> Placement:
    """Seat `counts[task]` replicas of each task on `nodes` (name -> slots), given who stands where now.

    Nodes that are lost are simply not in `nodes`; tasks that are not in `counts` end. Raises ValueError if
    a task has no shape or a negative count, or a present replica is not of its task's shape.
    """
    for task, count in counts.items():
        if count < 0:
            raise ValueError(f"counts: {task} has {count} replicas; give a number >= 0")
        if task not in shapes:
            raise ValueError(f"shapes: {task} is missing; give its tp and pp")
        for replica in current.get(task, ()):
            if not _fits_shape(replica, shapes[task]):
                raise ValueError(f"current: a replica of {task} stands on {replica}, which is not of its shape")
    hall = _Hall(shapes, nodes)
    for task in sorted(counts):
        for replica in _kept(current.get(task, ()), counts[task], nodes):
            if hall.room_for(replica):
                hall.seat(task, replica)
    wanted = {task: counts[task] - len(hall.seated[task]) for task in counts}
    order = sorted(counts, key=lambda t: (-shapes[t].tp, -wanted[t] * shapes[t].workers, t))
    short: dict[str, int] = {}
    for task in order:
        missing = _seat_new(hall, task, wanted[task])
        while missing and _make_room(hall, task):
            missing = _seat_new(hall, task, missing)
        if missing:
            short[task] = missing
    replicas = {task: tuple(hall.seated[task]) for task in sorted(counts)}
    return Placement(replicas, dict(sorted(short.items())), _moved(replicas, current, nodes))


class _Hall:
    """The seats while they are being given out: mutable, private to one call of `place`."""

    def __init__(self, shapes: Mapping[str, Shape], nodes: Mapping[str, int]) -> None:
        self.shapes = shapes
        self.free = dict(sorted(nodes.items()))
        self.seated: dict[str, list[Replica]] = {task: [] for task in shapes}

    def room_for(self, replica: Replica) -> bool:
        return all(self.free.get(node, 0) >= workers for node, workers in Counter(replica).items())

    def seat(self, task: str, replica: Replica) -> None:
        self.seated[task].append(replica)
        for node in replica:
            self.free[node] -= 1

    def unseat(self, task: str, replica: Replica) -> None:
        self.seated[task].remove(replica)
        for node in replica:
            self.free[node] += 1

    def find(self, task: str, wanted: int) -> Replica | None:
        """The best seat for one more replica of the task, which needs `wanted` more of them."""
        shape = self.shapes[task]
        here = {node for replica in self.seated[task] for node in replica}
        node = self._gap(here, shape.workers, wanted * shape.workers)
        if node is not None:
            return (node,) * shape.workers
        groups: list[str] = []
        taken: Counter[str] = Counter()
        while len(groups) < shape.pp:
            left = (shape.pp - len(groups)) * shape.tp
            node = self._gap(here | set(groups), shape.tp, left, taken)
            if node is None:
                return None
            groups.append(node)
            taken[node] += shape.tp
        # Neighbouring stages talk to each other: those on one node stand together.
        return tuple(node for node in sorted(groups, key=groups.index) for _ in range(shape.tp))

    def _gap(self, here: set[str], least: int, wanted: int, taken: Mapping[str, int] | None = None) -> str | None:
        gaps = {node: free - (taken or {}).get(node, 0) for node, free in self.free.items()}
        fitting = [node for node, gap in gaps.items() if gap >= least]
        if not fitting:
            return None
        return min(
            fitting,
            key=lambda n: (n not in here, gaps[n] < wanted, gaps[n] if gaps[n] >= wanted else -gaps[n], n),
        )


def _fits_shape(replica: Replica, shape: Shape) -> bool:
    stages = [replica[start : start + shape.tp] for start in range(0, len(replica), shape.tp)]
    return len(replica) == shape.workers and all(len(set(stage)) == 1 for stage in stages)


def _kept(replicas: tuple[Replica, ...], count: int, nodes: Mapping[str, int]) -> list[Replica]:
    """The replicas that stay, in their old order."""
    kept = [replica for replica in replicas if all(node in nodes for node in replica)]
    while len(kept) > count:
        on_node = Counter(node for replica in kept for node in replica)
        loneliest = min(
            range(len(kept)), key=lambda i: (min(on_node[node] for node in kept[i]), -len(set(kept[i])), -i)
        )
        del kept[loneliest]
    return kept


def _seat_new(hall: _Hall, task: str, wanted: int) -> int:
    """Seat up to `wanted` replicas; returns how many found no seat."""
    for missing in range(wanted, 0, -1):
        replica = hall.find(task, missing)
        if replica is None:
            return missing
        hall.seat(task, replica)
    return 0


def _make_room(hall: _Hall, task: str) -> bool:
    """Free one more group's worth of seats on one node by moving the fewest workers. False: impossible.

    Only replicas of smaller groups move, so this ends: each success seats one more big group.
    """
    tp = hall.shapes[task].tp
    best: tuple[int, str] | None = None
    for node in hall.free:
        cost = _evict(hall, tp, node, keep=False)
        if cost is not None and (best is None or (cost, node) < best):
            best = (cost, node)
    return best is not None and _evict(hall, tp, best[1], keep=True) is not None


def _evict(hall: _Hall, tp: int, node: str, *, keep: bool) -> int | None:
    """Move small replicas off `node` until one more group of `tp` fits there; the workers moved, None: cannot.

    With `keep` False everything is put back. The cluster must have room for more such groups afterwards.
    """
    need = (hall.free[node] // tp + 1) * tp
    groups_before = sum(free // tp for free in hall.free.values())
    before = {name: list(replicas) for name, replicas in hall.seated.items()}
    free_before = dict(hall.free)
    moved = 0
    movable = sorted(
        (hall.shapes[other].workers, other, replica)
        for other, replicas in hall.seated.items()
        if hall.shapes[other].tp < tp
        for replica in replicas
        if node in replica
    )
    evicted: list[tuple[str, Replica]] = []
    for workers, other, replica in movable:
        if hall.free[node] >= need:
            break
        hall.unseat(other, replica)
        evicted.append((other, replica))
        moved += workers
    success = hall.free[node] >= need
    if success:
        reserved, hall.free[node] = hall.free[node], 0
        for other, _ in sorted(evicted, key=lambda e: (-hall.shapes[e[0]].tp, e[0])):
            seat = hall.find(other, 1)
            if seat is None:
                success = False
                break
            hall.seat(other, seat)
        hall.free[node] += reserved
        success = success and sum(free // tp for free in hall.free.values()) > groups_before
    if not (success and keep):
        hall.seated, hall.free = before, free_before
    return moved if success else None


def _moved(
    replicas: Mapping[str, tuple[Replica, ...]], current: Mapping[str, tuple[Replica, ...]], nodes: Mapping[str, int]
) -> int:
    moved = 0
    for task, now in replicas.items():
        healthy = [r for r in current.get(task, ()) if all(node in nodes for node in r)]
        stayed = (Counter(now) & Counter(healthy)).total()
        moved += sum(len(r) for r in now[:1]) * max(0, min(len(now), len(healthy)) - stayed)
    return moved
