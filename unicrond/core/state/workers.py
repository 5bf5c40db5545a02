"""A task's processes, and who trains together: frozen values, made by the fold alone; and how many are what."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from enum import StrEnum
from functools import cache, cached_property
from operator import add, sub
from typing import Literal, NamedTuple

import msgspec

from unicrond.core.state.ordered_map import changed
from unicrond.events.vocabulary import FaultKind, Member, StoreAddress
from unicrond.events.vocabulary.field_defaults import always


class WorkerStatus(StrEnum):
    """What may follow what: worker_lifecycle.py.

    starting: commanded; ready: waits for a membership; member: is in the group of `generation`;
    parked: left a group at a boundary; stopping: ordered to end; lost: its node is gone, or it is
    unwanted, so it must be stopped as soon as its node can be reached.
    """

    STARTING = "starting"
    READY = "ready"
    MEMBER = "member"
    PARKED = "parked"
    STOPPING = "stopping"
    LOST = "lost"


_ENDING = (WorkerStatus.STOPPING, WorkerStatus.LOST)
_NEVER_TO_TRAIN = (*_ENDING, WorkerStatus.PARKED)


class WorkerError(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The last error that a worker has reported, or that was found of it (faults/program_faults.py)."""

    kind: str
    text: str
    iteration: int = 0


class Worker(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One process of a task. `generation`: the last membership whose group it has joined, 0 = none.

    `ordered_fault`: the fault ordered for it, which is not a strike. `answered_generation`: the last membership that it
    said to wait in for the others. `section`: with what its program has declared, for at most `section_limit_us`; "" =
    nothing.
    """

    worker: str
    node: str
    replica: int
    shard: int
    status: WorkerStatus
    command_id: str = always("")
    pid: int = always(0)
    generation: int = always(0)
    ordered_fault: FaultKind | Literal[""] = ""
    answered_generation: int = 0
    section: str = ""
    section_limit_us: int = 0
    error: WorkerError | None = None

    @property
    def alive(self) -> bool:
        """Return whether it runs, or will, without an order to end."""
        return self.status not in _ENDING

    @property
    def can_train(self) -> bool:
        """Return whether it is, or can become, part of a group; a parked worker never comes back."""
        return self.status not in _NEVER_TO_TRAIN


class Membership(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, dict=True):
    """The workers that train a task, as the log holds them (see unicrond.events.vocabulary.MembershipDecided).

    `leader_confirms`: see unicrond.events.vocabulary.MembershipDecided.
    """

    generation: int
    members: tuple[Member, ...]
    joiners: tuple[str, ...]
    urgent: bool
    store: StoreAddress
    decided_us: int
    leader_confirms: bool = False

    @property
    def lead(self) -> str:
        """The first member, "" where there is none."""
        return self.members[0].worker if self.members else ""

    @cached_property
    def names(self) -> frozenset[str]:
        """The workers. Only to look up in: a set has no order."""
        return frozenset([member.worker for member in self.members])

    @cached_property
    def replica_count(self) -> int:
        """Count the replicas that they are."""
        return len({member.replica for member in self.members})

    @cached_property
    def spoken_for(self) -> frozenset[str]:
        """The workers that are in the group once its lead has said that it has met. Only to look up in."""
        return self.names.difference(self.joiners) if self.leader_confirms else NO_WORKERS


NO_WORKERS: frozenset[str] = frozenset()


class Kind(NamedTuple):
    """What a tally asks of a worker. `newest`: it has said itself that it is in the newest group."""

    status: WorkerStatus
    newest: bool
    member: bool
    spoken_for: bool
    busy: bool


class Tally:
    """How many of a task's workers are what, against its newest membership. Counted once, then at the cost of changes.

    `joined`: members that have said themselves that they are in the newest group; `vouched`: the other members that are
    once its lead says so. `settled`, `settled_vouched`: those of either that are of status MEMBER.
    `able`: members that can train. `leavers`: of status MEMBER, but not members.
    `strangers`: workers of any status that are not members. `starting`, `parked`, `lost_workers`: workers of that
    status.
    `busy`: with what their program has declared.

    `apart`: the workers of another status than MEMBER, and those that are busy. Only to look up in.
    """

    _COUNTS = (
        "joined", "vouched", "able", "settled", "settled_vouched", "leavers", "strangers", "starting", "parked",
        "lost_workers", "busy",
    )  # fmt: skip
    __slots__ = (*_COUNTS, "_kinds", "apart", "membership", "workers")
    joined: int
    vouched: int
    able: int
    settled: int
    settled_vouched: int
    leavers: int
    strangers: int
    starting: int
    parked: int
    lost_workers: int
    busy: int

    def __init__(self, workers: Mapping[str, Worker], membership: Membership | None, before: Tally | None) -> None:
        self.workers = workers
        self.membership = membership
        if before is None:
            self.apart = frozenset([worker.worker for worker in workers.values() if _is_apart(worker)])
            self._kinds = _kinds(workers.values(), membership)
            changes: Mapping[str, tuple[Worker | None, Worker | None]] = {}
        else:
            changes = changed(before.workers, workers)
            now = [name for name, (_, new) in changes.items() if new and _is_apart(new)]
            self.apart = before.apart.difference(changes).union(now) if changes else before.apart
            self._kinds = before._under(membership)
        if before is not None and before.membership is membership:
            counts = [getattr(before, name) for name in self._COUNTS]
        else:
            counts = [0] * len(self._COUNTS)
            for kind, count in self._kinds.items():
                counts = [total + count * is_so for total, is_so in zip(counts, _count_flags(kind), strict=True)]
        for old, new in changes.values():
            if old is not None:
                kind = _kind(old, membership)
                self._kinds[kind] -= 1
                counts = list(map(sub, counts, _count_flags(kind)))
            if new is not None:
                kind = _kind(new, membership)
                self._kinds[kind] += 1
                counts = list(map(add, counts, _count_flags(kind)))
        for name, count in zip(self._COUNTS, counts, strict=True):
            setattr(self, name, count)

    def _under(self, membership: Membership | None) -> Counter[Kind]:
        """Return what the same workers are against another membership. Against the next one nearly all are what they
        were, but have not joined yet."""
        was = self.membership
        if was is membership:
            return self._kinds.copy()
        if was is None or membership is None or membership.generation <= was.generation:
            return _kinds(self.workers.values(), membership)
        movers = [self.workers[name] for name in _differing(was, membership) if name in self.workers]
        kinds: Counter[Kind] = Counter()
        for kind, count in (self._kinds - _kinds(movers, was)).items():
            kinds[kind._replace(newest=False, spoken_for=kind.member and membership.leader_confirms)] += count
        return kinds + _kinds(movers, membership)

    def __eq__(self, _: object) -> bool:
        """Say that it equals any other: it follows from the rest of its task, which is compared anyway."""
        return True

    def __repr__(self) -> str:
        return "None"  # as where it has not been computed yet

    __hash__ = None  # type: ignore[assignment]


@cache
def _count_flags(kind: Kind) -> tuple[bool, ...]:
    """Return, for each count of a tally, whether such a worker is one."""
    status, in_group, vouched = kind.status, kind.status is WorkerStatus.MEMBER, kind.spoken_for and not kind.newest
    return (
        kind.member and kind.newest,
        vouched,
        kind.member and status not in _NEVER_TO_TRAIN,
        in_group and kind.newest,
        in_group and vouched,
        in_group and not kind.member,
        not kind.member,
        status is WorkerStatus.STARTING,
        status is WorkerStatus.PARKED,
        status is WorkerStatus.LOST,
        kind.busy,
    )


def _is_apart(worker: Worker) -> bool:
    return worker.status is not WorkerStatus.MEMBER or bool(worker.section_limit_us)


def _kinds(workers: Iterable[Worker], membership: Membership | None) -> Counter[Kind]:
    return Counter([_kind(worker, membership) for worker in workers])


def _kind(worker: Worker, membership: Membership | None) -> Kind:
    if membership is None:
        return Kind(worker.status, worker.generation == 0, False, False, bool(worker.section_limit_us))
    name = worker.worker
    newest, member = worker.generation == membership.generation, name in membership.names
    return Kind(worker.status, newest, member, name in membership.spoken_for, bool(worker.section_limit_us))


def _differing(before: Membership, after: Membership) -> set[str]:
    """Return the workers that only one of two memberships has, and those that join with the later one."""
    return {*(before.names ^ after.names), *after.joiners}
