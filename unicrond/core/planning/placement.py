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
* Types of GPU are placed apart: a task has all its workers on nodes of one (`place_apart`).
* Equal input, equal output, whatever the order of the mappings.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

from events.shape import Shape

#: The node of each of a replica's shards, in shard order.
Replica: TypeAlias = tuple[str, ...]


@dataclass(frozen=True)
class Placement:
    """Where everybody stands. `replicas`: per task, those that stayed (in their old order), then new ones.

    `short`: task -> replicas that could not be seated. `moved`: workers that had to make room for others.
    """

    replicas: Mapping[str, tuple[Replica, ...]]
    short: Mapping[str, int] = field(default_factory=dict)
    moved: int = 0


def place(
    counts: Mapping[str, int],
    shapes: Mapping[str, Shape],
    nodes: Mapping[str, int],
    current: Mapping[str, Sequence[Replica]],
) -> Placement:
    """Seat `counts[task]` replicas of each task on `nodes` (name -> slots), given the present places.

    Nodes that are lost are simply not in `nodes`; tasks that are not in `counts` end. Raises ValueError if
    a task has no shape or a negative count, or a present replica is not of its task's shape.
    """
    for task, count in sorted(counts.items()):
        if count < 0:
            raise ValueError(f"counts: {task} has {count} replicas; give a number >= 0")
        if task not in shapes:
            raise ValueError(f"shapes: {task} is missing; give its tp and pp")
        for replica in current.get(task, ()):
            if not shapes[task].fits(replica):
                raise ValueError(f"current: a replica of {task} is on {replica}, which does not have its shape")
    hall = _Hall(shapes, nodes, {task: _kept(current.get(task, ()), counts[task], nodes) for task in sorted(counts)})
    wanted = {task: counts[task] - len(hall.seated[task]) for task in counts}
    short: dict[str, int] = {}
    for task in sorted(counts, key=lambda t: (-shapes[t].tp, -wanted[t] * shapes[t].workers, t)):
        missing = _seat_new(hall, task, wanted[task])
        while missing and _make_room(hall, shapes[task].tp):
            missing = _seat_new(hall, task, missing)
        if missing:
            short[task] = missing
    replicas = {task: tuple(replica for _, replica in sorted(hall.seated[task].items())) for task in sorted(counts)}
    return Placement(replicas, dict(sorted(short.items())), hall.moved)


def place_apart(
    counts: Mapping[str, int],
    shapes: Mapping[str, Shape],
    nodes: Mapping[str, int],
    current: Mapping[str, Sequence[Replica]],
    gpus: tuple[Mapping[str, str], Mapping[str, str]],
) -> Placement:
    """`place`, each task on nodes with its type of GPU. `gpus`: of each node and of each task; of no node: all same."""
    of_node, of_task = gpus
    if not of_node:
        return place(counts, shapes, nodes, current)
    parts = [
        place(
            {task: count for task, count in counts.items() if of_task[task] == gpu},
            shapes,
            {node: slots for node, slots in nodes.items() if of_node[node] == gpu},
            current,
        )
        for gpu in sorted({of_task[task] for task in counts})
    ]
    replicas = {task: there for part in parts for task, there in part.replicas.items()}
    short = {task: count for part in parts for task, count in part.short.items()}
    return Placement(replicas, dict(sorted(short.items())), sum(part.moved for part in parts))


class _Hall:
    """The seats while they are being given out: mutable, private to one call of `place`."""

    def __init__(
        self, shapes: Mapping[str, Shape], nodes: Mapping[str, int], staying: Mapping[str, Sequence[Replica]]
    ) -> None:
        """With those that stay in their seats, as far as they have room."""
        self.shapes = shapes
        self.free = dict(nodes)
        self.seated: dict[str, dict[int, Replica]] = {task: {} for task in shapes}  # by ticket: order of coming
        self.of_task: dict[str, Counter[str]] = {task: Counter() for task in shapes}  # its workers per node
        self.on_node: dict[str, set[tuple[str, int]]] = {node: set() for node in nodes}
        self.by_gap: dict[int, list[str]] = {}  # nodes by free seats, names sorted
        self.tickets = 0
        self.moved = 0
        for task, replicas in staying.items():
            for replica in replicas:
                self._stay(task, replica)
        for node, seats in sorted(self.free.items()):
            self.by_gap.setdefault(seats, []).append(node)

    def _stay(self, task: str, replica: Replica) -> None:
        """Before there are gaps to keep account of: nearly everybody stays."""
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
        """`ticket`: to come back to an old place in the order."""
        if ticket is None:
            ticket = self.tickets = self.tickets + 1
        self.seated[task][ticket] = replica
        for node, workers in Counter(replica).items():
            self._change(task, node, workers)
            self.on_node[node].add((task, ticket))
        return ticket

    def unseat(self, task: str, ticket: int) -> Replica:
        replica = self.seated[task].pop(ticket)
        for node, workers in Counter(replica).items():
            self._change(task, node, -workers)
            self.on_node[node].discard((task, ticket))
        return replica

    def _change(self, task: str, node: str, workers: int) -> None:
        self.of_task[task][node] += workers
        self._set_free(node, self.free[node] - workers)

    def _set_free(self, node: str, seats: int) -> None:
        self.by_gap[self.free[node]].remove(node)
        insort(self.by_gap.setdefault(seats, []), node)
        self.free[node] = seats

    @contextmanager
    def closed(self, node: str) -> Iterator[None]:
        """No replica is seated on the node meanwhile."""
        seats = self.free[node]
        self._set_free(node, 0)
        yield
        self._set_free(node, seats)

    def find(self, task: str, wanted: int) -> Replica | None:
        """The best seat for one more replica of the task, which needs `wanted` more of them."""
        shape = self.shapes[task]
        if (node := self._gap(task, shape.workers, wanted * shape.workers)) is not None:
            return (node,) * shape.workers
        groups: list[str] = []
        while len(groups) < shape.pp:
            node = self._gap(task, shape.tp, (shape.pp - len(groups)) * shape.tp)
            if node is None:
                break
            groups.append(node)
            self._change(task, node, shape.tp)
        for node in groups:
            self._change(task, node, -shape.tp)
        if len(groups) < shape.pp:
            return None
        # Neighbouring stages talk to each other: those on one node stand together.
        return tuple(node for node in sorted(groups, key=groups.index) for _ in range(shape.tp))

    def _gap(self, task: str, least: int, wanted: int) -> str | None:
        """A node with at least that many free seats: one of the task's, else one for all, else the largest."""
        own = [node for node, workers in self.of_task[task].items() if workers and self.free[node] >= least]
        if own:
            return min(own, key=lambda node: (_misfit(self.free[node], wanted), node))
        gaps = [gap for gap, names in self.by_gap.items() if gap >= least and names]
        return self.by_gap[min(gaps, key=lambda gap: _misfit(gap, wanted))][0] if gaps else None


def _misfit(gap: int, wanted: int) -> tuple[bool, int]:
    """Smaller is better: the smallest gap that holds all, else the largest gap."""
    return gap < wanted, gap if gap >= wanted else -gap


def _kept(replicas: Sequence[Replica], count: int, nodes: Mapping[str, int]) -> list[Replica]:
    """The replicas that stay, in their old order."""
    kept = [replica for replica in replicas if all(node in nodes for node in replica)]
    if len(kept) <= count:
        return kept
    on_node = Counter(node for replica in kept for node in replica)
    while len(kept) > count:
        loneliest = min(range(len(kept)), key=lambda i: (min(on_node[node] for node in kept[i]), -i))
        on_node.subtract(kept.pop(loneliest))
    return kept


def _seat_new(hall: _Hall, task: str, wanted: int) -> int:
    """Seat up to `wanted` replicas; returns how many found no seat."""
    for missing in range(wanted, 0, -1):
        replica = hall.find(task, missing)
        if replica is None:
            return missing
        hall.seat(task, replica)
    return 0


def _make_room(hall: _Hall, tp: int) -> bool:
    """Free seats for one more group of `tp` on some node, moving the fewest workers. False: impossible.

    Only replicas of smaller groups move, and only if the whole cluster then holds one group more: so a
    loop of `_make_room` ends.
    """
    best: tuple[int, str] | None = None
    for at_least, node in sorted((_lacking(gap, tp), node) for node, gap in hall.free.items()):
        if best is not None and best[0] <= at_least:
            break
        cost = _clear(hall, tp, node, keep=False)
        if cost is not None and (best is None or cost < best[0]):
            best = (cost, node)
    if best is None:
        return False
    _clear(hall, tp, best[1], keep=True)
    hall.moved += best[0]
    return True


def _lacking(gap: int, tp: int) -> int:
    """Seats that must become free for one more group: moving fewer workers cannot do."""
    return tp - gap % tp


def _clear(hall: _Hall, tp: int, node: str, *, keep: bool) -> int | None:
    """Move small replicas off `node` until one more group of `tp` fits there; the workers moved, None: cannot.

    With `keep` False everybody is put back.
    """
    need = hall.free[node] + _lacking(hall.free[node], tp)
    movable = sorted(
        (hall.shapes[task].workers, task, ticket) for task, ticket in hall.on_node[node] if hall.shapes[task].tp < tp
    )
    if hall.free[node] + sum(hall.seated[t][i].count(node) for _, t, i in movable) < need:
        return None
    groups = _groups(hall, tp)
    out: list[tuple[str, int, Replica]] = []
    for _, task, ticket in movable:
        if hall.free[node] >= need:
            break
        out.append((task, ticket, hall.unseat(task, ticket)))
    back: list[tuple[str, int]] = []
    with hall.closed(node):
        for task, _, _ in sorted(out, key=lambda gone: (-hall.shapes[gone[0]].tp, gone[:2])):
            seat = hall.find(task, 1)
            if seat is None:
                break
            back.append((task, hall.seat(task, seat)))
    success = len(back) == len(out) and _groups(hall, tp) > groups
    if not (success and keep):
        for task, ticket in back:
            hall.unseat(task, ticket)
        for task, ticket, replica in out:
            hall.seat(task, replica, ticket)
    return sum(len(replica) for _, _, replica in out) if success else None


def _groups(hall: _Hall, tp: int) -> int:
    return sum((gap // tp) * len(names) for gap, names in hall.by_gap.items())
