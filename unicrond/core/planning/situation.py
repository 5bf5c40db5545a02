"""The situation before an event, every event that may come next, and the problem that each one poses.

Only this module defines the effect of an event on the problem. The table answers the problems stated
here, the coordinator asks for them, the tests solve them afresh: all three mean the same by construction.

Rules
-----
* n' = the slots of the remaining nodes. D_running = the mean time between failures of one worker / n'.
* *Worker loss*: one slot less, its task is faulty. *Node loss*: all its slots less, every task with a
  worker there is faulty (none on an idle node). *Node arrival*: more slots. *Task end*: the task is
  removed. *Task launch*: the next queued task is present, with no workers yet.
* Problems have *seats*, which name the sizes of the nodes, where a task may have a layout of tp > 1. A lost slot is one
  of the first node that carries its task.
* With several types of GPU the problems have a pool for each.
* Tasks keep one order throughout (the coordinator's: as they were submitted), the queued one last: that
  order decides ties.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, TypeAlias

import msgspec

from unicrond.core.planning.feasibility import Seats
from unicrond.core.planning.problem import Number, Pool, Problem, ProblemError, TaskProblem


class WorkerLoss(msgspec.Struct, frozen=True):
    """The loss of a slot with one worker of the task."""

    task: str


class NodeLoss(msgspec.Struct, frozen=True):
    """The loss of a node with all its slots."""

    node: str


class NodeArrival(msgspec.Struct, frozen=True):
    """A node with that many slots joins (again). `gpu`: its type of GPU, where there are several."""

    slots: int
    gpu: str = ""


class TaskEnd(msgspec.Struct, frozen=True):
    """The end of a task: it needs its workers no longer."""

    task: str


class TaskLaunch(msgspec.Struct, frozen=True):
    """The launch of a queued task."""

    task: str


NextEvent: TypeAlias = WorkerLoss | NodeLoss | NodeArrival | TaskEnd | TaskLaunch


class Change(NamedTuple):
    """The effect of an event: n' after it, and tasks by name. At most one of the three is not empty."""

    workers: int
    faulty: frozenset[str] = frozenset()
    finished: str = ""
    launched: str = ""


@dataclass(frozen=True)
class NodeLoad:
    """A node that may carry workers, and the tasks that have a worker on it. `gpu`: its type, if there are several."""

    name: str
    slots: int
    tasks: frozenset[str] = frozenset()
    gpu: str = ""

    @property
    def load(self) -> tuple[int, frozenset[str], str]:
        """Return all that the loss of the node would change."""
        return self.slots, self.tasks, self.gpu


def d_running_us(mtbf_us: int, workers: int, stands_us: int) -> int:
    """Return D_running, microseconds: the expected time to the next failure among so many workers, at most `stands_us`
    (0: without a bound)."""
    next_failure_us = mtbf_us // max(1, workers)
    return min(next_failure_us, stands_us) if stands_us else next_failure_us


@dataclass(frozen=True)
class Situation:
    """The present shares. `tasks` run (their `workers` = now, none faulty); `queued` waits to be launched.

    `mtbf_us`: mean time between failures of a single worker. `join_slots`: sizes of nodes that may join.
    `seats_matter`: the problems name the sizes of the nodes (problem.Problem.seats).
    `gpus`: the types of GPU that are present, or may be again, where these are several. `stands_us`: for how long a
    plan stands at most, whatever fails; 0: without such a bound.
    Raises ProblemError for tasks that are faulty, appear twice, or are on a node without running.
    """

    nodes: tuple[NodeLoad, ...]
    tasks: tuple[TaskProblem, ...]
    mtbf_us: int
    d_transition_us: Number
    churn_us: Number = 0
    queued: TaskProblem | None = None
    join_slots: tuple[int, ...] = ()
    seats_matter: bool = False
    gpus: tuple[str, ...] = ()
    stands_us: int = 0

    def __post_init__(self) -> None:
        names = [task.name for task in self.lineup]
        if len(set(names)) != len(names):
            raise ProblemError("tasks: a name appears twice; give each task its own name")
        if any(task.faulty for task in self.lineup):
            raise ProblemError("tasks: one is faulty; a situation describes the time before the fault")
        for node in self.nodes:
            if strangers := node.tasks - self._running.keys():
                raise ProblemError(f"nodes: {node.name} carries {min(strangers)}, which is not a running task")

    @cached_property
    def workers(self) -> int:
        """Count all slots."""
        return sum(node.slots for node in self.nodes)

    @cached_property
    def lineup(self) -> tuple[TaskProblem, ...]:
        """Return the running tasks, then the queued one, in canonical order."""
        return (*self.tasks, self.queued) if self.queued else self.tasks

    @cached_property
    def load_of(self) -> dict[str, NodeLoad]:
        """Map names to nodes."""
        return {node.name: node for node in self.nodes}

    @cached_property
    def _running(self) -> dict[str, str]:
        """Map the names of running tasks to themselves: a look-up's KeyError names the task that is not running."""
        return {task.name: task.name for task in self.tasks}

    def expected(self, *, distinct: bool = False) -> Iterator[NextEvent]:
        """Yield every event that may come next. `distinct`: only one of the nodes with the same load."""
        for task in self.tasks:
            if task.workers and self.workers:
                yield WorkerLoss(task.name)
        for name in {n.load: n.name for n in self.nodes}.values() if distinct else self.load_of:
            yield NodeLoss(name)
        for slots in sorted(set(self.join_slots)):
            for gpu in self.gpus or ("",):
                yield NodeArrival(slots, gpu)
        for task in self.tasks:
            yield TaskEnd(task.name)
        if self.queued:
            yield TaskLaunch(self.queued.name)

    def change(self, event: NextEvent) -> Change:
        """Return the effect of the event. Raise KeyError for a node or task that is not there."""
        match event:
            case WorkerLoss(task):
                return Change(self.workers - 1, frozenset((self._running[task],)))
            case NodeLoss(node):
                load = self.load_of[node]
                return Change(self.workers - load.slots, load.tasks)
            case NodeArrival(slots, _):
                return Change(self.workers + slots)
            case TaskEnd(task):
                return Change(self.workers, finished=self._running[task])
            case TaskLaunch(task):
                if self.queued is None or self.queued.name != task:
                    raise KeyError(task)
                return Change(self.workers, launched=task)

    def d_running_us(self, workers: int) -> int:
        """Return for how long a plan for that many workers is expected to stand, in microseconds."""
        return d_running_us(self.mtbf_us, workers, self.stands_us)

    def after(self, event: NextEvent) -> Problem:
        """Return the problem that the event poses. Raise KeyError for a node or task that is not there."""
        workers, faulty, finished, launched = self.change(event)
        tasks = self.lineup if launched else self.tasks
        if finished:
            tasks = tuple(task for task in tasks if task.name != finished)
        elif faulty:
            tasks = tuple(replace(task, faulty=True) if task.name in faulty else task for task in tasks)
        slots = self._slots_after(event) if self.seats_matter or self.gpus else Counter()
        seats = _seats(slots) if self.seats_matter and not self.gpus else ()
        pools = tuple([_pool(gpu, slots, seats=self.seats_matter) for gpu in self.gpus])
        return Problem(workers, self.d_running_us(workers), self.d_transition_us, tasks, self.churn_us, seats, pools)

    @cached_property
    def _slots(self) -> Counter[tuple[str, int]]:
        return Counter((node.gpu, node.slots) for node in self.nodes)

    def _slots_after(self, event: NextEvent) -> Counter[tuple[str, int]]:
        """Count the nodes per type and slots after the event."""
        slots = self._slots.copy()
        match event:
            case WorkerLoss(task):
                of_task = ((node.gpu, node.slots) for node in self.nodes if task in node.tasks)
                gpu, hit = next(of_task, min(slots, key=lambda load: (load[1], load[0]), default=("", 0)))
                slots[gpu, hit] -= 1
                slots[gpu, hit - 1] += 1
            case NodeLoss(node):
                slots[self.load_of[node].gpu, self.load_of[node].slots] -= 1
            case NodeArrival(more, gpu):
                slots[gpu, more] += 1
            case _:
                pass
        return slots


def _pool(gpu: str, slots: Counter[tuple[str, int]], *, seats: bool) -> Pool:
    pool_slots = Counter(
        {
            (node_gpu, size): nodes
            for (node_gpu, size), nodes in slots.items()
            if node_gpu == gpu and size > 0 and nodes > 0
        }
    )
    workers = sum(size * nodes for (_, size), nodes in pool_slots.items())
    return Pool(gpu, workers, _seats(pool_slots) if seats else ())


def _seats(slots: Counter[tuple[str, int]]) -> Seats:
    return tuple(sorted((size, nodes) for (_, size), nodes in slots.items() if size > 0 and nodes > 0))
