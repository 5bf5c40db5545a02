"""A task's processes, and who trains together: frozen values, made by the fold alone; and how many are what."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from functools import cached_property
from operator import add, sub
from typing import Literal

import msgspec

from events.fields import always
from events.vocabulary import FaultKind, Member, StoreAddress
from unicrond.core.ordered_map import changed


class WorkerStatus(StrEnum):
    """What may follow what: worker_life.py.

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


class Worker(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One process of a task. `generation`: the last membership whose group it has joined, 0 = none.

    `injected`: the fault ordered for it, which is not a strike. `answered`: the last membership that it
    said to wait in for the others. `busy`: with what its program has declared, for at most `busy_us`; "" = nothing.
    """

    worker: str
    node: str
    replica: int
    shard: int
    status: WorkerStatus
    command_id: str = always("")
    pid: int = always(0)
    generation: int = always(0)
    injected: FaultKind | Literal[""] = ""
    answered: int = 0
    busy: str = ""
    busy_us: int = 0

    @property
    def alive(self) -> bool:
        """Runs, or will, without an order to end."""
        return self.status not in _ENDING

    @property
    def can_train(self) -> bool:
        """Can be, or become, part of a group; a parked worker never comes back."""
        return self.status not in _NEVER_TO_TRAIN


class Membership(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, dict=True):
    """The workers that train a task, as the log holds them (see events.vocabulary.MembershipDecided)."""

    generation: int
    members: tuple[Member, ...]
    joiners: tuple[str, ...]
    urgent: bool
    store: StoreAddress
    decided_us: int

    @cached_property
    def names(self) -> frozenset[str]:
        """The workers. Only to look up in: a set has no order."""
        return frozenset([member.worker for member in self.members])


NOBODY: frozenset[str] = frozenset()


class Tally:
    """How many of a task's workers are what, against its newest membership. Counted once, then at the cost of changes.

    `joined`: members in the group of the newest generation; `able`: members that can train.
    `settled`: workers of status MEMBER in that generation; `leavers`: of status MEMBER, but not members.
    `strangers`: workers of any status that are not members. `starting`, `parked`, `lost`: workers of that status.
    `busy`: with what their program has declared.
    """

    _COUNTS = ("joined", "able", "settled", "leavers", "strangers", "starting", "parked", "lost", "busy")
    __slots__ = (*_COUNTS, "membership", "workers")
    joined: int
    able: int
    settled: int
    leavers: int
    strangers: int
    starting: int
    parked: int
    lost: int
    busy: int

    def __init__(self, workers: Mapping[str, Worker], membership: Membership | None, before: Tally | None) -> None:
        self.workers = workers
        self.membership = membership
        if before is None or before.membership is not membership:
            counts = [0] * len(self._COUNTS)
            for worker in workers.values():
                counts = list(map(add, counts, self._what(worker)))
        else:
            counts = [getattr(before, name) for name in self._COUNTS]
            for old, new in changed(before.workers, workers).values():
                if old is not None:
                    counts = list(map(sub, counts, self._what(old)))
                if new is not None:
                    counts = list(map(add, counts, self._what(new)))
        for name, count in zip(self._COUNTS, counts, strict=True):
            setattr(self, name, count)

    def _what(self, worker: Worker) -> tuple[bool, ...]:
        """Of each count, whether the worker is one."""
        membership, status = self.membership, worker.status
        newest = worker.generation == (membership.generation if membership else 0)
        in_group = status is WorkerStatus.MEMBER
        is_member = membership is not None and worker.worker in membership.names
        return (
            is_member and newest,
            is_member and status not in _NEVER_TO_TRAIN,
            in_group and newest,
            in_group and not is_member,
            not is_member,
            status is WorkerStatus.STARTING,
            status is WorkerStatus.PARKED,
            status is WorkerStatus.LOST,
            bool(worker.busy_us),
        )

    def __eq__(self, other: object) -> bool:
        """It follows from the rest of its task, and says nothing that the rest does not."""
        return True

    def __repr__(self) -> str:
        return "None"  # as where it has not been asked for yet

    __hash__ = None  # type: ignore[assignment]
