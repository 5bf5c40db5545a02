"""Authority: what a node's word may change, by its place in each task. Pure; the one door (admission.py) asks.

Rules
-----
* A node speaks for itself, and for its own workers. NATS and the fold see to it that an observation comes from the node
  that it names.
* Of a task it may say only what its workers' places in it allow:

| place | what it says |
|---|---|
| any worker | that it started, waits, is busy, hangs, fails, has ended; that its program asks for the end |
| member of the newest generation | that it has joined the group; that parameters differ, or the program diverges |
| member of any generation | that a checkpoint is saved, of an iteration that is committed |
| first replica, of the newest generation | that a checkpoint is saved; who is slow; whether links are to be probed |
| lead, the first of all members | steps and completion, of its generation and of those before it |
| carrier: has had a worker or taken copies, at any time | what its memory holds, and which peers it knows |

* A worker that the state does not know has no place. What it says changes nothing (`folding/`), and is refused where
  only a liar says it: honest agents fall silent about a worker before the state forgets it.
* A worker that is lost may have met its group, and trained on alone, while its node was not heard: its word is not
  refused, and counts where the state knows that it was in one (`has_trained`). No less once the node is back and the
  worker is ordered to end: what it said before comes after the order.
* A lead of which the state knows no longer, since LEADS_MAX have followed it without a commit, is not refused either,
  and what it says changes nothing: nobody can tell whether it was one.
* A first replica saves before the log holds the step: the lead's agent sums steps up, and a shard may be of another
  node. The save of a group that another has replaced may come late, and what it has committed last may be told by the
  next lead. Once that group has committed too, a save of a former member beyond all steps is taken for a lie. (It is
  none where all of its group were lost before the log had its last steps. Nobody can tell the two apart.)
* A process that no command has started stands beside the task, on its node (`Node.strays`): no word of it counts.
* One member's accusation convicts nobody (`folding/suspicions.py`): more than half of all replicas must say so, and so
  of a program that diverges.
* AUTHORITY has a rule for every type of observation but requests; a test holds it to that. What a rule refuses is
  counted by node (`ClusterState.refused_observations`) and is an alarm.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from unicrond.core.state.changes import has_trained
from unicrond.core.state.state import Task, TaskStatus
from unicrond.core.state.task_parts import LEADS_MAX
from unicrond.events import vocabulary as v

#: Returns why the observation about the task exceeds what its node may say; "" where it does not.
AuthorityRule: TypeAlias = Callable[[Task, Any], str]


def _own_word(_task: Task, _event: v.Observation) -> str:
    return ""


def _lead_of_steps(task: Task, event: v.StepCommitted) -> str:
    refusal = _unless_lead(task, event, event.generation)
    if not refusal:
        return ""
    is_current = task.progress.committed_generation <= event.generation <= task.generation
    return refusal if is_current and not is_forgotten(task, event) else ""  # outdated: without effect


def is_forgotten(task: Task, event: v.StepCommitted) -> bool:
    """Return whether the step is of a generation whose lead the state no longer knows: so many have followed it without
    a commit (LEADS_MAX). Whether its worker led it nobody can tell, so its word changes nothing and is no lie."""
    leads = task.group.leads
    return len(leads) == LEADS_MAX and event.generation < leads[0].generation


def _lead_of_end(task: Task, event: v.TaskCompleted) -> str:
    worker = task.workers.get(event.worker)
    if task.status is not TaskStatus.ACTIVE or (worker is not None and not worker.alive):
        return ""  # outdated, and without effect: see `leads_end`
    refusal = _unless_lead(task, event, task.progress.committed_generation)
    return "" if len(task.group.leads) == LEADS_MAX and not task.is_member(event.worker) else refusal


def leads_end(task: Task, event: v.TaskCompleted) -> bool:
    """Return whether the worker may complete the task: the lead of the newest generation that committed, or of a later
    one. One that was cut off may have done all iterations alone, after others went on without it."""
    return not _unless_lead(task, event, task.progress.committed_generation)


def _unless_lead(task: Task, event: v.WorkerObservation, since_generation: int) -> str:
    """Return why the worker does not report for all; "" for the lead of `since_generation` or of a later one, which
    tells what the one before it could not."""
    for lead in reversed(task.group.leads):
        if lead.generation < since_generation:
            break
        if lead.worker == event.worker and lead.node == event.node:
            return ""
    return f"$.event.worker: {event.worker} on {event.node} leads no group of {task.name}"


def _saver(task: Task, event: v.CheckpointSaved) -> str:
    worker = task.workers.get(event.worker)
    if worker is None or not worker.alive or task.is_member(event.worker):
        return ""
    progress = task.progress
    if progress.committed_generation == task.generation and event.iteration > progress.best_iteration:
        return (
            f"$.event.iteration: {event.worker} is no member of generation {task.generation} of {task.name}, "
            f"which has committed {progress.best_iteration} iterations, not {event.iteration}"
        )
    return _unless_past_member(task, event.worker)


def saves_newest(task: Task, event: v.CheckpointSaved) -> bool:
    """Return whether the checkpoint is the newest that storage holds. The first replica of the newest group may save
    an older one again, after a fall back; another worker's save may be late, or of nothing that is committed."""
    if not has_trained(task, event.worker):
        return False
    if in_first_replica(task, event.worker):
        return True
    return task.progress.checkpoint_iteration < event.iteration <= task.progress.best_iteration


def in_first_replica(task: Task, name: str) -> bool:
    """Return whether the worker is of the first replica of the newest generation."""
    members = () if task.membership is None else task.membership.members
    return any(member.worker == name and member.replica == members[0].replica for member in members)


def _unless_past_member(task: Task, name: str) -> str:
    if not task.workers[name].alive or has_trained(task, name):
        return ""
    return f"$.event.worker: {name} has been in no group of {task.name}"


def _newest_member(task: Task, event: v.WorkerJoinedGroup | v.CorruptionSuspected | v.DivergenceObserved) -> str:
    if event.generation != task.generation or task.is_member(event.worker):
        return ""
    if event.worker not in task.workers and isinstance(event, v.WorkerJoinedGroup):
        return ""
    return f"$.event.worker: {event.worker} is no member of generation {event.generation} of {task.name}"


def _first_replica(task: Task, event: v.StragglerObserved | v.StragglerRecovered | v.DegradationObserved) -> str:
    if task.membership is None or event.worker not in task.workers:
        return ""
    if event.generation != task.generation:
        return _unless_past_member(task, event.worker)
    if in_first_replica(task, event.worker):
        return ""
    return f"$.event.worker: {event.worker} is not of the first replica of {task.name}"


def _holder(task: Task, event: v.SnapshotStored | v.PeersRemembered) -> str:
    if event.node in task.copies.carriers:
        return ""
    return f"$.event.node: {event.node} has never carried a worker of {task.name}, nor copies of its state"


def _stacks(task: Task, event: v.StacksTaken) -> str:
    for stack in event.workers:
        owner = task.workers.get(stack.worker)
        if owner is not None and owner.node != event.node:
            return f"$.event.workers: {stack.worker} runs on {owner.node}"
    return ""


AUTHORITY: Mapping[type[v.Observation], AuthorityRule] = {
    v.NodeJoined: _own_word,
    v.NodeLeaving: _own_word,
    v.NodeLeft: _own_word,
    v.MachineReported: _own_word,
    v.AcceleratorReported: _own_word,
    v.NodeChecked: _own_word,
    v.LinksProbed: _own_word,
    v.Heartbeat: _own_word,
    v.CommandApplied: _own_word,
    v.CommandFailed: _own_word,
    v.WorkerStarted: _own_word,
    v.WorkerReady: _own_word,
    v.WorkerPaused: _own_word,
    v.WorkerExited: _own_word,
    v.WorkerBusy: _own_word,
    v.WorkerWaiting: _own_word,
    v.ErrorReported: _own_word,
    v.HangSuspected: _own_word,
    v.SaveFailed: _own_word,
    v.StateLoaded: _own_word,
    v.StopRequested: _own_word,
    v.WorkerJoinedGroup: _newest_member,
    v.CorruptionSuspected: _newest_member,
    v.DivergenceObserved: _newest_member,
    v.CheckpointSaved: _saver,
    v.StragglerObserved: _first_replica,
    v.StragglerRecovered: _first_replica,
    v.DegradationObserved: _first_replica,
    v.StepCommitted: _lead_of_steps,
    v.TaskCompleted: _lead_of_end,
    v.SnapshotStored: _holder,
    v.PeersRemembered: _holder,
    v.StacksTaken: _stacks,
}
