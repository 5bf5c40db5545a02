"""Commits: the sums that become StepCommitted. Rules: core.py."""

from __future__ import annotations

from msgspec.structs import replace

from agents import commit_sums
from agents.handling.turn import Turn
from agents.protocol.messages import Committed
from agents.state import ArmTimer, Worker


def committed(turn: Turn, record: Worker, commit: Committed) -> None:
    """Add a worker's commit to its task's sum; close the sum where it cannot grow, or may not wait."""
    task = record.task
    here = commit_sums.position(commit)
    if here <= turn.state.summed.get(task, (0, 0)):
        return  # told again to a new agent
    turn.reached(record.worker, commit.iteration)
    before = turn.state.sums.get(task)
    if before and not commit_sums.continues(before, record.worker, commit):
        close_sum(turn, task)
        before = None
    total = commit_sums.add(before, record.worker, commit)
    state = turn.state
    turn.state = replace(state, sums={**state.sums, task: total}, summed={**state.summed, task: here})
    if commit_sums.urgent(commit):
        close_sum(turn, task)
    if task not in state.paced:
        close_sum(turn, task)
        pace(turn, task)


def pace(turn: Turn, task: str) -> None:
    """Close the task's sum at most `commit_interval_s` seconds from now."""
    turn.state = replace(turn.state, paced=turn.state.paced | {task})
    turn.actions.append(ArmTimer(name="commits", key=task, after_s=turn.config.commit_interval_s))


def close_sum(turn: Turn, task: str) -> None:
    """Append the task's sum, if it has one, as StepCommitted."""
    total = turn.state.sums.get(task)
    if total:
        turn.state = replace(turn.state, sums={t: s for t, s in turn.state.sums.items() if t != task})
        turn.append(total.event(turn.config.node, task), confirm=True)


def close_all_sums(turn: Turn) -> None:
    """Append every task's sum."""
    for task in sorted(turn.state.sums):
        close_sum(turn, task)
