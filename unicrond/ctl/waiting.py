"""`unicronctl wait`: until tasks have come to a status, for scripts."""

from __future__ import annotations

import argparse
import sys
import time

from unicrond.core.state import ClusterState, Task, TaskStatus
from unicrond.ctl.asking import client_of, print_json
from unicrond.ctl.client import Refused
from unicrond.ctl.reading import states

POLL_S = 0.5
#: Exit codes: reached; one of the tasks has ended otherwise; the time is over.
REACHED, OTHERWISE, TIME_IS_OVER = 0, 1, 3
TRAINING, ENDED = "training", "ended"


def wait(options: argparse.Namespace) -> int:
    """Wait; the exit code."""
    ends_s = None if options.timeout_s is None else time.monotonic() + options.timeout_s
    for state in states(client_of(options), POLL_S):
        tasks = _tasks(state, options)
        is_over = ends_s is not None and time.monotonic() >= ends_s
        lacking = [task for task in tasks if not is_there(task, options.until)]
        lost = [task for task in lacking if task.status is not TaskStatus.ACTIVE]
        if not lacking or lost or is_over:
            break
    code = OTHERWISE if lost else TIME_IS_OVER if lacking else REACHED
    _tell(options, tasks, lost or lacking, code)
    return code


def is_there(task: Task, wanted: str) -> bool:
    """Whether the task has what is waited for. Training: its newest group has committed a step, and all are in it."""
    if wanted == TRAINING:
        committed = task.progress.committed_generation == task.generation > 0
        return task.status is TaskStatus.ACTIVE and task.confirmed and committed
    return task.status.value == wanted or (wanted == ENDED and task.status is not TaskStatus.ACTIVE)


def _tasks(state: ClusterState, options: argparse.Namespace) -> list[Task]:
    if options.all:
        return list(state.tasks.values())
    if options.task not in state.tasks:
        raise Refused(f"task: no task {options.task}; see `unicronctl tasks`", 404)
    return [state.tasks[options.task]]


def _tell(options: argparse.Namespace, tasks: list[Task], lacking: list[Task], code: int) -> None:
    if options.json:
        print_json({"reached": code == REACHED, "tasks": {task.name: task.status.value for task in tasks}})
    elif code == REACHED:
        print("\n".join(f"task {task.name}: {options.until}" for task in tasks) or "no tasks")
    else:
        for task in lacking:
            reason = f" ({task.ending.reason.partition(chr(10))[0]})" if task.ending.reason else ""
            after = "" if code == OTHERWISE else f" after {options.timeout_s:g} s"
            print(
                f"unicronctl: task {task.name} is {task.status.value}{reason}, not {options.until}{after}",
                file=sys.stderr,
            )
