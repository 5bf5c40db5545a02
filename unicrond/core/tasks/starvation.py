"""Turns: how long a task may wait without workers while others have some (`policy.starvation_s`; 0: without end). Pure.

Rules
-----
* A task that no plan has given workers for `starvation_s` is overdue: the next plan meets its floor (`min_workers`)
  before the floors of all tasks of its priority that have no turn, whatever it costs those. One that waits longer goes
  first.
* With its workers its turn begins. For `starvation_s` its floor keeps that rank, then it is a task like the others: it
  may lose them, wait, and be overdue again.
* One that a plan has passed over for one behind it, or for none (no node is large enough for it), goes to the end of
  the queue; the others keep their places.
* At most TURNS_MAX tasks are overdue or in a turn at a time for the plan, those in a turn first. So with n tasks that
  cannot run beside each other each has a turn of `starvation_s` at least once in n of them.
* The rank is part of the plan problem (`TaskProblem.turn`), so the plan is exact with it. Workers that a turn takes
  leave at an iteration boundary; a task that loses all of them saves its state first.

What does not live here: how ranks enter the plan (planning/points.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from msgspec.structs import replace

from unicrond.core.planning.problem import TURNS_MAX
from unicrond.core.state.changes import with_task
from unicrond.core.state.state import ClusterState, Task, TaskStatus
from unicrond.core.state.task_parts import StarvationState
from unicrond.events.vocabulary import PlanAdopted


def ranks(state: ClusterState) -> dict[str, int]:
    """Return the tasks whose floors go before others', with their ranks; the highest first."""
    if not state.starvation_us:
        return {}
    active = state.active
    served = sorted((task for task in active if task.turn.turn_since_us), key=lambda task: task.turn.turn_since_us)
    overdue = sorted((task for task in active if task.turn.overdue_us), key=lambda task: task.turn.waits_since_us)
    return {task.name: TURNS_MAX - place for place, task in enumerate([*served, *overdue][:TURNS_MAX])}


def deadlines(state: ClusterState) -> Iterator[tuple[str, int]]:
    """Yield (id, length in microseconds): `wait:` and `turn:`, each with its beginning in the id."""
    for task in state.active if state.starvation_us else ():
        turn = task.turn
        if turn.waits_since_us and not turn.overdue_us:
            yield f"wait:{task.name}#{turn.waits_since_us}", _left_us(state, turn.waits_since_us)
        if turn.turn_since_us:
            yield f"turn:{task.name}#{turn.turn_since_us}", _left_us(state, turn.turn_since_us)


def _left_us(state: ClusterState, since_us: int) -> int:
    return max(0, since_us + state.starvation_us - state.now_us)


def deadline_passed(state: ClusterState, kind: str, subject: str) -> ClusterState:
    """Fold the end of `wait:` or `turn:`; one that no longer stands changes nothing."""
    name, _, since = subject.partition("#")
    task = state.tasks.get(name)
    if task is None or task.status is not TaskStatus.ACTIVE:
        return state
    turn = task.turn
    if kind == "wait" and since == str(turn.waits_since_us):
        return with_task(state, replace(task, turn=replace(turn, overdue_us=state.now_us)))
    if kind == "turn" and since == str(turn.turn_since_us):
        return with_task(state, replace(task, turn=replace(turn, turn_since_us=0, turn_over_us=state.now_us)))
    return state


def plan_adopted(state: ClusterState, event: PlanAdopted) -> ClusterState:
    """Fold a plan that is in force: note who waits from now on, and whose turn has begun."""
    if not state.starvation_us:
        return state
    shares = {assignment.task: assignment.workers for assignment in event.assignments if assignment.task in state.tasks}
    passed_over = _passed_over(state, shares)
    for name, workers in shares.items():
        task = state.tasks[name]
        if task.status is TaskStatus.ACTIVE:
            turn = _after(task.turn, workers, state.now_us, passed_over=name in passed_over)
            if turn != task.turn:
                state = with_task(state, replace(task, turn=turn))
    return state


def _passed_over(state: ClusterState, shares: Mapping[str, int]) -> set[str]:
    """Return, of the overdue tasks, those that got nothing and stood before one that got workers; all, if none has any
    of those whose floors went first. Only to look up in."""
    first = list(ranks(state))
    served = [place for place, name in enumerate(first) if shares.get(name)]
    behind = first[: served[-1]] if served else first
    return {name for name in behind if not shares.get(name) and state.tasks[name].turn.overdue_us}


def _after(turn: StarvationState, workers: int, now_us: int, *, passed_over: bool) -> StarvationState:
    if workers:
        began_us = now_us if turn.overdue_us else turn.turn_since_us
        return replace(turn, waits_since_us=0, overdue_us=0, turn_since_us=began_us)
    if turn.overdue_us and not passed_over:
        return turn
    begins_anew = passed_over or not turn.waits_since_us
    return replace(turn, waits_since_us=now_us if begins_anew else turn.waits_since_us, overdue_us=0, turn_since_us=0)


def changed_since(state: ClusterState, task: Task, since_us: int) -> str:
    """Return what has become of the task's turn since then, for a plan's trigger; "": nothing."""
    if not state.starvation_us:
        return ""
    if task.turn.overdue_us > since_us:
        return f"task {task.name} has waited for {state.starvation_us / 1e6:g} s"
    return f"the turn of task {task.name} is over" if task.turn.turn_over_us > since_us else ""
