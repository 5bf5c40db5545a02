"""What a task has against what the plan gives it: pure arithmetic on replicas, used by `decide`.

A replica is tp * pp workers; it lives or falls as a whole.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from events.vocabulary import Member, TaskAssignment
from unicrond.state import ClusterState, Membership, Task, TaskStatus, Worker, WorkerStatus

Nodes = tuple[str, ...]


class Staffing(msgspec.Struct, frozen=True):
    """`kept` and `surplus`: whole replicas, by replica number, workers in shard order.

    `broken`: replicas with a shard that is gone. `missing`: replicas to start, by their nodes.
    `settled`: the group is whole, is what the plan wants, and nobody else is there: nothing to do, unless it breaks.
    """

    kept: dict[int, tuple[Worker, ...]]
    surplus: dict[int, tuple[Worker, ...]]
    broken: dict[int, tuple[Worker, ...]]
    missing: tuple[Nodes, ...]
    settled: bool

    @property
    def starting(self) -> bool:
        """A kept replica is not ready yet."""
        return any(w.status is WorkerStatus.STARTING for workers in self.kept.values() for w in workers)


#: Per task, the last answer and what it was made of. These parts never change in place, so the very same ones
#: have the very same answer: in a large cluster nearly every task is as it was a moment ago.
_answers: dict[str, tuple[dict[str, Worker], Membership | None, TaskAssignment | None, Staffing]] = {}
_ANSWERS_MAX = 4096


def staffing(state: ClusterState, task: Task) -> Staffing:
    """Matches living replicas with the plan's. Members stay before others, older replicas before newer."""
    assignment = state.plan.assignments.get(task.name)
    known = _answers.get(task.name)
    if known is None or any(
        before is not now for before, now in zip(known, (task.workers, task.membership, assignment), strict=False)
    ):
        if len(_answers) >= _ANSWERS_MAX:
            _answers.clear()
        answer = _staffing(task, assignment)
        _answers[task.name] = known = (task.workers, task.membership, assignment, answer)
    return known[3]


def _staffing(task: Task, assignment: TaskAssignment | None) -> Staffing:
    replicas: dict[int, list[Worker]] = {}
    for worker in task.workers.values():
        if worker.can_train:
            replicas.setdefault(worker.replica, []).append(worker)
    whole: dict[int, tuple[Worker, ...]] = {}
    broken: dict[int, tuple[Worker, ...]] = {}
    for number, workers in sorted(replicas.items()):
        ordered = tuple(sorted(workers, key=lambda w: w.shard))
        (whole if len(ordered) == task.spec.replica_workers else broken)[number] = ordered

    wanted = Counter(assignment.replicas if assignment else ())
    kept: dict[int, tuple[Worker, ...]] = {}
    surplus: dict[int, tuple[Worker, ...]] = {}
    members = {member.worker for member in task.membership.members} if task.membership else set()
    for number in sorted(whole, key=lambda n: (whole[n][0].worker not in members, n)):
        nodes = tuple(worker.node for worker in whole[number])
        if wanted[nodes] > 0:
            wanted[nodes] -= 1
            kept[number] = whole[number]
        else:
            surplus[number] = whole[number]
    missing = tuple(sorted(wanted.elements()))
    in_group = all(w.status is WorkerStatus.MEMBER and w.generation == task.generation for w in task.workers.values())
    settled = in_group and members == task.workers.keys() and not (missing or surplus or broken)
    return Staffing(kept, surplus, broken, missing, settled)


def members_of(replicas: dict[int, tuple[Worker, ...]]) -> tuple[Member, ...]:
    """Members in replica order, shards in order within."""
    return tuple(
        Member(worker=w.worker, node=w.node, replica=w.replica, shard=w.shard)
        for _, workers in sorted(replicas.items())
        for w in workers
    )


def living_members(task: Task) -> tuple[Member, ...]:
    """The members of the newest membership whose whole replica lives, in their order."""
    if task.membership is None:
        return ()
    fallen = {
        member.replica
        for member in task.membership.members
        if member.worker not in task.workers or not task.workers[member.worker].can_train
    }
    return tuple(member for member in task.membership.members if member.replica not in fallen)


def leaving_members(task: Task) -> tuple[Member, ...]:
    """Whole living replicas that the newest membership leaves out, but that have not left yet."""
    replicas: dict[int, tuple[Worker, ...]] = {}
    for worker in sorted(task.leavers, key=lambda w: (w.replica, w.shard)):
        replicas[worker.replica] = (*replicas.get(worker.replica, ()), worker)
    return members_of({n: w for n, w in replicas.items() if len(w) == task.spec.replica_workers})


def capacity(state: ClusterState) -> dict[str, int]:
    """Slots that a plan may use, per schedulable node: of a cordoned one no more than its workers hold."""
    nodes = [node for node in state.nodes.values() if node.schedulable]
    held: Counter[str] = Counter()
    if any(node.cordoned for node in nodes):
        held.update(
            worker.node
            for task in state.tasks.values()
            if task.status is TaskStatus.ACTIVE
            for worker in task.workers.values()
            if worker.can_train
        )
    return {node.name: min(node.slots, held[node.name]) if node.cordoned else node.slots for node in nodes}


def occupied(state: ClusterState) -> Counter[str]:
    """Slots in use per node, by every process that is not known to be gone."""
    return Counter(w.node for task in state.tasks.values() for w in task.workers.values())
