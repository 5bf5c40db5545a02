"""Decides when a task's sum of committed iterations goes to the log as StepCommitted. Rules: machine.py."""

from __future__ import annotations

from msgspec.structs import replace

from unicrond.agents.core import commit_sums, floods
from unicrond.agents.core.state import ArmTimer, WorkerRecord
from unicrond.agents.core.transaction import Transition
from unicrond.agents.protocol.messages import IterationCommitted


def committed(transition: Transition, record: WorkerRecord, commit: IterationCommitted, now_us: int) -> None:
    """Add a worker's commit to its task's sum; close the sum where it cannot grow, or may not wait. Of a worker that
    closes it again and again the next commit is dropped, or waits for the sum's time."""
    task = record.task
    position = commit_sums.position(commit)
    if position <= transition.state.summed.get(task, (0, 0)):
        return  # repeated to a new agent
    before = transition.state.sums.get(task)
    is_gap = before is not None and not commit_sums.continues(before, record.worker, commit)
    if is_gap and not floods.may_close_sum(transition, record.worker, now_us):
        floods.drop(transition, record.worker, type(commit).__name__)
        return
    transition.reached(record.worker, commit.iteration)
    if is_gap:
        close_sum(transition, task)
        before = None
    total = commit_sums.add(before, record.worker, commit)
    state = transition.state
    transition.state = replace(state, sums={**state.sums, task: total}, summed={**state.summed, task: position})
    if commit_sums.urgent(commit) and floods.may_close_sum(transition, record.worker, now_us):
        close_sum(transition, task)
    if task not in state.paced:
        close_sum(transition, task)
        pace(transition, task)


def pace(transition: Transition, task: str) -> None:
    """Set the timer that closes the task's sum, at most `commit_interval_s` seconds from now."""
    transition.state = replace(transition.state, paced=transition.state.paced | {task})
    transition.actions.append(ArmTimer(name="commits", key=task, after_s=transition.config.commit_interval_s))


def close_sum(transition: Transition, task: str) -> None:
    """Append the task's sum, if it has one, as StepCommitted."""
    total = transition.state.sums.get(task)
    if total:
        transition.state = replace(transition.state, sums={t: s for t, s in transition.state.sums.items() if t != task})
        transition.append(total.event(transition.config.node, task), confirm=True)


def close_all_sums(transition: Transition) -> None:
    """Append every task's sum."""
    for task in sorted(transition.state.sums):
        close_sum(transition, task)
