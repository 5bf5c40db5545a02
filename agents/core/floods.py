"""Holds each worker to its budgets (worker_budgets.py): lets its messages through, keeps those that wait, sets the
timers, and has it said what did not go on."""

from __future__ import annotations

from msgspec.structs import replace

from unicrond.agents.core import worker_budgets as budgets
from unicrond.agents.core.state import AgentState, ArmTimer
from unicrond.agents.core.transaction import Transition
from unicrond.agents.core.worker_budgets import BUDGETS, SAID_EVERY_S, ReportDrops, WorkerBudget, WorkerHeldUp
from unicrond.agents.protocol.messages import FromWorker
from unicrond.events.vocabulary import SnapshotStored, WorkerId

#: How the agent's log calls what the socket read late.
LATE = "read late"


def admits(transition: Transition, worker: WorkerId, message: FromWorker, now_us: int) -> bool:
    """Return whether the message goes on now; else it waits, or is dropped and counted."""
    kind = budgets.kind_of(message)
    if kind not in BUDGETS or (isinstance(message, SnapshotStored) and is_kept(transition, message)):
        return True
    before = budget_of(transition, worker)
    link = transition.state.links.get(worker)
    budget, verdict = budgets.judge(before, message, now_us, link.sent_generation if link else 0)
    if verdict == "wait" and not budgets.is_waiting(before, kind):
        pause_us = BUDGETS[kind].pause_us(budget.paid_us.get(kind, 0), now_us)
        transition.actions.append(ArmTimer(name="budget", key=f"{worker}/{kind}", after_s=pause_us / 1e6))
    change(transition, worker, budget)
    return verdict == "pass"


def is_kept(transition: Transition, snapshot: SnapshotStored) -> bool:
    """Return whether the next report of that shard waits anyway (stored_states.py)."""
    return f"{snapshot.task}/{snapshot.shard}" in transition.state.untold


def may_close_sum(transition: Transition, worker: WorkerId, now_us: int) -> bool:
    """Return whether a commit of the worker may close its task's sum before the sum's time."""
    budget, has_one = budgets.spend(budget_of(transition, worker), "StepCommitted", now_us)
    if has_one:
        change(transition, worker, budget)
    return has_one


def drop(transition: Transition, worker: WorkerId, kind: str, count: int = 1) -> None:
    """Count messages that do not go on."""
    change(transition, worker, budgets.count_dropped(budget_of(transition, worker), kind, count))


def held_up(transition: Transition, late: WorkerHeldUp) -> None:
    """Count what the socket has read late; a worker that is unknown here has no budget."""
    if late.worker in transition.memory.workers:
        drop(transition, late.worker, LATE, late.frames)


def due_message(transition: Transition, key: str) -> tuple[WorkerId, FromWorker | None]:
    """Return the worker whose timer "budget" has fired, and what goes on now; set the timer of the next one."""
    worker, _, kind = key.partition("/")
    budget, message = budgets.release(budget_of(transition, worker), kind)
    if message is not None:
        change(transition, worker, budget)
        if budgets.is_waiting(budget, kind):
            transition.actions.append(ArmTimer(name="budget", key=key, after_s=BUDGETS[kind].every_us / 1e6))
    return worker, message


def take_waiting(transition: Transition, worker: WorkerId) -> list[FromWorker]:
    """Return all that waits, which waits no longer."""
    budget = budget_of(transition, worker)
    if budget.waiting:
        change(transition, worker, replace(budget, waiting={}))
    return list(budget.waiting.values())


def tell_drops(transition: Transition, worker: WorkerId) -> None:
    """Say what did not go on within the last minute (timer "floods"); a worker that has ended is forgotten after
    that."""
    budget = replace(budget_of(transition, worker), is_timed=False, said_count=0)
    if budget.unsaid or worker in transition.memory.workers:
        change(transition, worker, budget)
    else:
        _remove(transition, worker)


def forget(transition: Transition, worker: WorkerId) -> None:
    """Forget a worker that has ended, at once or when all is said."""
    if worker in transition.state.budgets and not budget_of(transition, worker).is_timed:
        _remove(transition, worker)


def worst(state: AgentState) -> tuple[int, WorkerId]:
    """Return how many messages of all workers did not go on within the last minute or two, and whose are most."""
    counts = {worker: count for worker, budget in state.budgets.items() if (count := budget.dropped_count)}
    return sum(counts.values()), max(counts, key=counts.__getitem__, default="")


def budget_of(transition: Transition, worker: WorkerId) -> WorkerBudget:
    """Return the worker's budget."""
    return transition.state.budgets.get(worker) or WorkerBudget()


def change(transition: Transition, worker: WorkerId, budget: WorkerBudget) -> None:
    """Replace the worker's budget; say what did not go on, where the last line is a minute ago."""
    if budget.unsaid and not budget.is_timed:
        transition.actions.append(ReportDrops(worker=worker, counts=budget.unsaid))
        transition.actions.append(ArmTimer(name="floods", key=worker, after_s=SAID_EVERY_S))
        budget = replace(budgets.say(budget), is_timed=True)
    state = transition.state
    transition.state = replace(state, budgets={**state.budgets, worker: budget})


def _remove(transition: Transition, worker: WorkerId) -> None:
    state = transition.state
    transition.state = replace(state, budgets={w: budget for w, budget in state.budgets.items() if w != worker})
