"""A name submitted again: what becomes of the states that its last run has saved, said before it happens. Pure.

Rules
-----
* Without a word the task goes on from them, where all settings that decide what is trained are those they were made
  with (events/megatron/training_settings.py), and is refused otherwise, by a sentence that names the difference.
* `--resume`: it goes on from them in any case. `--restart`: it begins from the seed, or from what its program loads;
  they are kept under another name. `--fork NAME`: another task begins from the newest of them on storage, with whatever
  settings; they stay as they are. So do Megatron-LM's own: a fork that saves them in the same directory is refused.
* The log knows what the last run was made with, changes of the running task included; so the workers take its states,
  which may be of before such a change (`continues`). What the log does not know (states of another log, a checkpoint of
  the program's own that was rolled back) is for the workers (agents/trainer/states/origins.py).
"""

from __future__ import annotations

from posixpath import normpath
from typing import NamedTuple

from unicrond.core.state.state import ClusterState, Task, TaskStatus
from unicrond.events.megatron.command_line import ENTRY, BadFlags, CommandLine
from unicrond.events.megatron.training_settings import differences, listed, refusal, settings_of
from unicrond.events.vocabulary import TaskSpec, TaskStart

#: Earlier runs whose states a run takes, at most: of so many none has a state left on storage, which keeps a few.
CONTINUED_MAX = 16
_UNKNOWN_RUN = (
    "no run of its name is known here: it goes on from the newest state in {directory}, whatever that was made with"
)
_NO_STATE = "its last run has saved no state: it begins as if that had not been"


class Resubmission(NamedTuple):
    """Say what becomes of a task whose name, or whose source, has states. `problem`: why it is refused, "" where it is
    not; `outlook`: what it begins from, "" where there is nothing to say; `continues`: the runs whose states it takes,
    newest first."""

    problem: str = ""
    outlook: str = ""
    continues: tuple[str, ...] = ()


def resubmission(state: ClusterState, spec: TaskSpec, start: TaskStart) -> Resubmission:
    """Return what becomes of the task, which is submitted with `start`. Its name is free."""
    if sharer := _sharer(state, spec):
        problem = (
            f"checkpoint.dir: {spec.checkpoint.dir} is that of task {sharer}, which trains; give another directory"
        )
        return Resubmission(problem=problem)
    previous = state.tasks.get(spec.name)
    if start.mode == "fork":
        outcome = _fork(state.tasks.get(start.source), spec, start)
        return outcome._replace(outlook=outcome.outlook + _archive(spec, start)) if previous else outcome
    if start.mode == "restart":
        return Resubmission(outlook=f"it begins from its seed, or from what its program loads{_archive(spec, start)}")
    if previous is None:
        return Resubmission(
            outlook=_UNKNOWN_RUN.format(directory=spec.checkpoint.dir) if start.mode == "resume" else ""
        )
    changes = differences(settings_of(previous.spec), settings_of(spec))
    continues = () if changes and start.mode != "resume" else _runs(previous)
    directory, earlier = (normpath(part.checkpoint.dir or spec.checkpoint.dir) for part in (spec, previous.spec))
    stored = previous.progress.checkpoint_iteration if directory == earlier else 0
    if not stored and not previous.copies.holdings and directory == earlier:
        return Resubmission(outlook=_NO_STATE, continues=continues)
    if changes and start.mode != "resume" and (stored or previous.copies.holdings):
        return Resubmission(problem=f"name: {refusal(spec.name, changes)}")
    if directory == earlier:
        outlook = f"it goes on from the newest state of the last run of its name{_iteration(previous)}"
    else:
        memory = " and in the memory of its nodes" if previous.copies.holdings else ""
        places = spec.checkpoint.dir, previous.spec.checkpoint.dir
        outlook = f"it looks for states in {places[0]}{memory}, not in {places[1]}, the checkpoint.dir of its last run"
    if changes and start.mode == "resume":
        outlook += f", with other settings ({listed(changes)})"
    return Resubmission(outlook=outlook + _rest(stored, spec), continues=continues)


def _sharer(state: ClusterState, spec: TaskSpec) -> str:
    """Return the task whose workers write states where those of this one would; "" for none."""
    directory = normpath(spec.checkpoint.dir)
    return next(
        (
            task.name
            for task in state.tasks.values()
            if task.status is TaskStatus.ACTIVE or not task.at_rest
            if task.spec.checkpoint.dir and normpath(task.spec.checkpoint.dir) == directory
        ),
        "",
    )


def _runs(previous: Task) -> tuple[str, ...]:
    """Return the last run of the name, and those whose states it took."""
    start = previous.spec.start
    return (start.run_id, *start.continues)[:CONTINUED_MAX] if start is not None else ()


def _archive(spec: TaskSpec, start: TaskStart) -> str:
    """Say what becomes of states that a run which begins anew finds in its directory."""
    directory = spec.checkpoint.dir
    return f"; what {directory} holds of earlier runs is kept in {directory}/before-{start.run_id}"


def _rest(iteration: int, spec: TaskSpec) -> str:
    """Say so where a task that goes on after `iteration` has nothing to do; else ""."""
    if iteration < spec.iterations:
        return ""
    return f"; nothing is left to train: give more iterations than {iteration}, or --restart"


def _fork(source: Task | None, spec: TaskSpec, start: TaskStart) -> Resubmission:
    origin = f"it begins from the newest state of task {start.source} in {start.source_dir}"
    if source is None:
        return Resubmission(outlook=origin)
    stored, continues = source.progress.checkpoint_iteration, source.spec.start and source.spec.start.continues
    if not stored and not source.progress.best_iteration and not continues:
        problem = f"start: task {start.source} has saved no state yet; wait for one (`unicronctl describe task"
        return Resubmission(problem=f"{problem} {start.source}`)")
    directory = _program_directory(spec)
    if directory and directory == _program_directory(source.spec):
        text = f"args: --save names the directory of task {start.source} ({directory}); give the fork another"
        return Resubmission(problem=f"{text}, it would overwrite the checkpoints there")
    if not stored:
        return Resubmission(outlook=f"{origin}, which that has reported none in yet: without one the fork fails")
    return Resubmission(outlook=f"{origin}{_iteration(source)}{_rest(stored, spec)}")


def _program_directory(spec: TaskSpec) -> str:
    """Return where Megatron-LM itself saves its checkpoints; "" for nowhere."""
    if spec.entry != ENTRY:
        return ""
    try:
        directory = CommandLine.parse(spec.args).text("--save")
    except BadFlags:  # other code says so
        return ""
    if not directory:
        return ""
    return normpath(directory if directory.startswith("/") else f"{spec.cwd}/{directory}")


def _iteration(task: Task) -> str:
    iteration = task.progress.checkpoint_iteration
    return f", after iteration {iteration} or later" if iteration else ""
