"""What a task has against what the plan gives it: pure arithmetic on replicas, used by `decide`.

A replica is as many workers as its layout says (`Shape.workers`); it lives or falls as a whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from unicrond.core.state.state import ClusterState, Node, Task, TaskStatus, Worker, WorkerStatus
from unicrond.events.vocabulary import Member, TaskAssignment

Nodes = tuple[str, ...]
#: A worker before and after; None: it was not there, or is not any more.
Change = tuple[Worker | None, Worker | None]


class Staffing(msgspec.Struct, frozen=True):
    """`replicas` (which the plan wants) and `surplus`: whole replicas, by replica number, workers in shard order.

    `broken`: replicas with a shard that is gone. `missing`: replicas to start, by their nodes. `starting`: how many
    workers of `replicas` are not ready yet.
    The workers may be as they were at an earlier look: node, seat and status hold, nothing else does.
    """

    replicas: dict[int, tuple[Worker, ...]]
    surplus: dict[int, tuple[Worker, ...]]
    broken: dict[int, tuple[Worker, ...]]
    missing: tuple[Nodes, ...]
    starting: int

    @property
    def fits(self) -> bool:
        """Return whether the replicas are those that the plan wants, all whole."""
        return not (self.missing or self.surplus or self.broken)

    @property
    def workers(self) -> frozenset[str]:
        """The workers of the replicas that the plan wants. Only to look up in: a set has no order."""
        return frozenset([w.worker for workers in self.replicas.values() for w in workers])


def staffing(task: Task, assignment: TaskAssignment | None) -> Staffing:
    """Match living replicas with the plan's. Members stay before others, older replicas before newer."""
    able = [worker for worker in task.workers.values() if worker.can_train]
    replicas: dict[int, list[Worker]] = {}
    for worker in sorted(able, key=_seat):
        replicas.setdefault(worker.replica, []).append(worker)
    size = task.spec.replica_workers
    whole = {number: tuple(workers) for number, workers in replicas.items() if len(workers) == size}
    broken = {number: tuple(workers) for number, workers in replicas.items() if len(workers) != size}

    demand = Counter(assignment.replicas if assignment else ())
    in_plan: dict[int, tuple[Worker, ...]] = {}
    surplus: dict[int, tuple[Worker, ...]] = {}
    members = task.member_names
    in_group = [number for number, workers in whole.items() if workers[0].worker in members]
    for number in in_group + [number for number, workers in whole.items() if workers[0].worker not in members]:
        nodes = tuple([worker.node for worker in whole[number]])
        if demand.get(nodes, 0) > 0:
            demand[nodes] -= 1
            in_plan[number] = whole[number]
        else:
            surplus[number] = whole[number]
    missing = tuple(sorted(demand.elements()))
    return Staffing(in_plan, surplus, broken, missing, sum(map(_starting, in_plan.values())))


def staffing_after(before: Staffing, changes: Iterable[Change], size: int) -> Staffing | None:
    """Return what `staffing` would say after `changes` of workers, at their cost; None where that takes a look at
    everything: a replica is one too many, before or now. `size`: workers of a replica. Which workers are members
    decides nothing as long as every whole replica is wanted."""
    if before.surplus:
        return None
    in_plan, broken, missing = dict(before.replicas), dict(before.broken), Counter(before.missing)
    starting = before.starting
    touched: dict[int, list[Change]] = {}
    for old, new in changes:
        for number in {worker.replica for worker in (old, new) if worker is not None}:
            touched.setdefault(number, []).append((old, new))
    for number, replica_changes in touched.items():
        was = in_plan.pop(number, None)
        if was is not None:
            missing[tuple([worker.node for worker in was])] += 1
            starting -= _starting(was)
        old_names = {old.worker for old, _ in replica_changes if old}
        able = [worker for worker in was or broken.pop(number, ()) if worker.worker not in old_names]
        able += [new for _, new in replica_changes if new and new.can_train and new.replica == number]
        workers = tuple(sorted(able, key=_seat))
        nodes = tuple([worker.node for worker in workers])
        if len(workers) == size:
            if missing[nodes] <= 0:
                return None
            missing[nodes] -= 1
            in_plan[number] = workers
            starting += _starting(workers)
        elif workers:
            broken[number] = workers
    return Staffing(in_plan, {}, broken, tuple(sorted(missing.elements())), starting)


def _starting(workers: Iterable[Worker]) -> int:
    return sum([worker.status is WorkerStatus.STARTING for worker in workers])


def seat(worker: Worker) -> tuple[object, ...]:
    """Return what `staffing` asks of a worker."""
    return worker.node, worker.replica, worker.shard, worker.status


def _seat(worker: Worker) -> tuple[int, int]:
    return worker.replica, worker.shard


def all_in(task: Task) -> bool:
    """Return whether all workers that there are stand in the group of the newest generation, and are all its
    members."""
    tally, count = task.tally, len(task.workers)
    settled = tally.settled + (tally.settled_vouched if task.group.lead_confirmed else 0)
    return not tally.strangers and settled == count == len(task.member_names)


def members_of(replicas: Mapping[int, tuple[Worker, ...]]) -> tuple[Member, ...]:
    """Return the members in replica order, shards in order within."""
    return tuple(
        [
            Member(worker=w.worker, node=w.node, replica=w.replica, shard=w.shard)
            for _, workers in sorted(replicas.items())
            for w in workers
        ]
    )


def living_members(task: Task) -> tuple[Member, ...]:
    """Return the members of the newest membership whose whole replica lives, in their order."""
    if task.membership is None:
        return ()
    if task.all_able:
        return task.membership.members
    missing = task.member_names.difference(task.workers)
    unable = {name for name in task.tally.apart if not task.workers[name].can_train}
    broken = {m.replica for m in task.membership.members if m.worker in missing or m.worker in unable}
    return tuple([member for member in task.membership.members if member.replica not in broken])


def leaving_members(task: Task) -> tuple[Member, ...]:
    """Return the members of whole living replicas that the newest membership leaves out, but that have not left yet."""
    replicas: dict[int, tuple[Worker, ...]] = {}
    for worker in sorted(task.leavers, key=lambda w: (w.replica, w.shard)):
        replicas[worker.replica] = (*replicas.get(worker.replica, ()), worker)
    return members_of({n: w for n, w in replicas.items() if len(w) == task.spec.replica_workers})


def has_state(task: Task) -> bool:
    """Return whether a member or leaver of a whole living replica is in a group: others can take its state over."""
    members = living_members(task) + leaving_members(task)
    return any(task.workers[member.worker].status is WorkerStatus.MEMBER for member in members)


def schedulable(nodes: Mapping[str, Node]) -> tuple[dict[str, int], list[str]]:
    """Return the slots of the nodes that may carry workers, and which of these nodes are cordoned."""
    usable = [node for node in nodes.values() if node.schedulable]
    return {node.name: node.slots for node in usable}, [node.name for node in usable if node.cordon.active]


def capacity(state: ClusterState, slots: Mapping[str, int], cordoned: Sequence[str]) -> Mapping[str, int]:
    """Return, of `schedulable` nodes, the slots that a plan may use: of a cordoned one no more than its workers
    hold."""
    if not cordoned:
        return slots
    return {**slots, **{name: min(slots[name], _workers_on(state, name)) for name in cordoned}}


def _workers_on(state: ClusterState, node: str) -> int:
    pairs = [(state.tasks[task], worker) for task, worker in state.by_node.on(node)]
    return sum(task.status is TaskStatus.ACTIVE and task.workers[worker].can_train for task, worker in pairs)
