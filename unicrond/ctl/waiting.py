"""`unicronctl wait`: until tasks have come to a status, for scripts."""

from __future__ import annotations

import argparse
import sys
import time

from unicrond.core.state.state import ClusterState, Task, TaskStatus
from unicrond.ctl.client import ApiRefused
from unicrond.ctl.client_options import client_of, print_json
from unicrond.ctl.streams import states
from unicrond.events.cli.exit_codes import DONE, FAILED, TIMEOUT

POLL_S = 0.5
TRAINING, ENDED = "training", "ended"


def wait(options: argparse.Namespace) -> int:
    """Wait until the tasks have the status; return the exit code."""
    ends_s = None if options.timeout_s is None else time.monotonic() + options.timeout_s
    for state in states(client_of(options), POLL_S):
        tasks = _tasks(state, options)
        is_over = ends_s is not None and time.monotonic() >= ends_s
        pending = [task for task in tasks if not has_reached(task, options.until)]
        ended = [task for task in pending if task.status is not TaskStatus.ACTIVE]
        if not pending or ended or is_over:
            break
    code = FAILED if ended else TIMEOUT if pending else DONE
    _tell(options, tasks, ended or pending, code)
    return code


def has_reached(task: Task, status: str) -> bool:
    """Say whether the task has the status that is waited for.

    Training: its newest group has committed a step, and all members are in it.
    """
    if status == TRAINING:
        committed = task.progress.committed_generation == task.generation > 0
        return task.status is TaskStatus.ACTIVE and task.confirmed and committed
    return task.status.value == status or (status == ENDED and task.status is not TaskStatus.ACTIVE)


def _tasks(state: ClusterState, options: argparse.Namespace) -> list[Task]:
    if options.all:
        return list(state.tasks.values())
    if options.task not in state.tasks:
        raise ApiRefused(f"task: no task {options.task}; see `unicronctl tasks`", 404)
    return [state.tasks[options.task]]


def _tell(options: argparse.Namespace, tasks: list[Task], pending: list[Task], code: int) -> None:
    if options.json:
        rows = [(task.name, task.status.value, has_reached(task, options.until)) for task in tasks]
        print_json([{"task": name, "status": status, "reached": reached} for name, status, reached in rows])
    elif code == DONE:
        print("\n".join(f"task {task.name}: {options.until}" for task in tasks) or "no tasks")
    else:
        for task in pending:
            reason = f" ({task.ending.reason.partition(chr(10))[0]})" if task.ending.reason else ""
            after = "" if code == FAILED else f" after {options.timeout_s:g} s"
            print(
                f"unicronctl: task {task.name} is {task.status.value}{reason}, not {options.until}{after}",
                file=sys.stderr,
            )
