"""Which worker hangs, from the agents' reports of phase marks: judge(task) -> verdict.

Rules
-----
* An agent tells of a worker whose iteration lasts longer than three times the usual (HangSuspected), and again while
  that lasts. One late iteration makes all members late: most of them are victims, which wait in a collective.
* A process that the kernel shows as stopped is a culprit by itself.
* A program that is busy for longer than it has declared (hook.busy) is a culprit by itself, too; one that is not late
  by that is not reported, and workers that wait for it are no victims.
* Else the reported workers are compared with each other; the rest may be silent (an agent is away, a limit
  is longer). Only in logs older than `HangSuspected.told` nothing is judged before all members have been told of.
    a worker outside the collective of the others, still for an iteration   -> hangs
    a worker outside it, but moving                                         -> is slow: nothing yet
    all wait in a collective, and all are reported                          -> it is the group: SEV3
    no worker waits for another                                             -> hangs, after ALONE_LIMITS of it
* A worker on its way into the group has no limit, and is not reported. Where all others have waited in a
  collective for ALONE_LIMITS, it has lost its peers without noticing: it is the group: SEV3.
* Of a replica of several workers the one that has stood still for longest is blamed; the replica falls as a whole.
* A committed step, and a new membership, make all earlier suspicions void. A report of the iteration that was
  committed last is late itself, or of one that has agreed to its step and has stood still since, while the others
  wait in the next iteration: it is believed of a process that is stopped, and after ALONE_LIMITS without a move.

Pure. What does not live here: marks (agents/protocol/marks.py), limits
(agents/trainer/detection/baseline.py), the response (severity.py, decide.py).
"""

from __future__ import annotations

from typing import NamedTuple

from events.vocabulary import HangSuspected
from unicrond.core.lateness import ALONE_LIMITS, STILL
from unicrond.core.state import Task


class Verdict(NamedTuple):
    """`culprits`: one worker per replica that hangs. None, and `stuck`: the collective does not end for anybody."""

    culprits: tuple[HangSuspected, ...]
    stuck: bool
    reason: str


def is_stale(task: Task, told: HangSuspected) -> bool:
    """Say whether the report is about an iteration that its worker has left. A group that has committed nothing yet may
    have gone back."""
    if task.progress.committed_generation < told.generation:
        return False
    if told.iteration == task.progress.iteration:
        return not told.stopped and not told.busy and told.still_us < ALONE_LIMITS * told.limit_us
    return told.iteration < task.progress.iteration


def judge(task: Task, generation: int = 0) -> Verdict | None:
    """Return the verdict on the task's present suspicions of `generation` (0: the newest); None: not yet, or no hang."""
    generation = generation or task.generation
    if generation == task.generation and not _is_ripe(task):
        return None
    return judge_all(task, generation)


def _is_ripe(task: Task) -> bool:
    """Say whether there may be a verdict on the newest group, by what the reports add up to: in a large group nearly
    every report changes nothing, and costs a look at itself alone."""
    late = task.lateness
    count = late.counts
    if count["stopped", -1] or count["busy", -1] or count["unnumbered", -1]:
        return True
    told, collectives = count["told", -1], late.collectives()
    if told and count["waits at", collectives[-1]] and any(count["hangs at", at] for at in collectives[:-1]):
        return True
    if told < len(task.member_names):
        return count["patient", -1] == told and not _is_one_to_be_told_of(task)
    return told in (count["waits", -1], count["long", -1])


def _is_one_to_be_told_of(task: Task) -> bool:
    """Say whether a report on some member is still to come. The member that was found last is looked at first."""
    late = task.lateness
    members = task.membership.members if task.membership else ()
    for name in (late.silent, *(member.worker for member in members)):
        if name and name not in late.suspicions and _will_be_told_of(task, name):
            late.silent = name  # an answer that is kept, not a change
            return True
    return False


def judge_all(task: Task, generation: int) -> Verdict | None:
    """Return the verdict as `judge` does, by a look at all reports."""
    living = {
        name: told
        for name, told in task.group.suspicions.items()
        if told.generation == generation and name in task.workers and task.workers[name].alive
    }
    stopped = [told for told in living.values() if told.stopped]
    if stopped:
        return Verdict(_one_per_replica(task, stopped), False, "its process is stopped")
    overdue = [told for told in living.values() if told.busy]
    if overdue:
        reason = f"it is busy with {overdue[0].busy} for longer than it has declared (hook.busy, at_most_s)"
        return Verdict(_one_per_replica(task, overdue), False, reason)
    members = _members(task, generation)
    silent = [name for name in members if name not in living]
    if not living or not members:
        return None
    told = list(living.values())
    #: Agents of today tell of each late worker at its limit: a worker that is late by its own mark needs no other's
    #: report.
    alone_will_do = all(one.told for one in told)
    if silent and not alone_will_do:
        return _left_waiting(task, silent, told)
    top = max(one.entered for one in told)
    waiting = [one for one in told if one.waiting and one.entered == top]
    behind = [one for one in told if one.entered < top and not (alone_will_do and one.waiting)]
    if behind and waiting:
        hung = [one for one in behind if one.still_us * STILL >= one.limit_us]
        if hung:
            others = f"{len(waiting)} other{'s wait' if len(waiting) > 1 else ' waits'}"
            reason = f"{others} in collective {top}, which it has not entered"
            return Verdict(_one_per_replica(task, hung), False, reason)
        return None
    if silent:
        return _left_waiting(task, silent, told)
    if all(one.waiting for one in told):
        where = f"collective {top}" if len(waiting) == len(told) else "two collectives, one behind the other"
        return Verdict((), True, f"all {len(told)} members wait in {where}")
    alone = [one for one in told if one.still_us >= ALONE_LIMITS * one.limit_us]
    if len(alone) < len(told):
        return None
    return Verdict(_one_per_replica(task, alone), False, f"it has not moved for {ALONE_LIMITS} times the limit")


def _members(task: Task, generation: int) -> list[str]:
    """Return the workers of that generation: the newest membership, or those still in the group before it."""
    if generation == task.generation:
        return [member.worker for member in task.membership.members] if task.membership else []
    return [
        worker.worker for worker in task.workers.values() if task.generation_of(worker) == generation and worker.alive
    ]


def _left_waiting(task: Task, silent: list[str], told: list[HangSuspected]) -> Verdict | None:
    if any(_will_be_told_of(task, name) for name in silent):
        return None
    if any(not one.waiting or one.still_us < ALONE_LIMITS * one.limit_us for one in told):
        return None
    return Verdict((), True, f"{' and '.join(silent)} did not come into the group, and all others wait in a collective")


def _will_be_told_of(task: Task, name: str) -> bool:
    """Say whether a report on the member may still come: it is gone, or has joined the group. Where only its lead has
    said that, a member may still stand in the exchange that the others have left, until all have made a step."""
    worker = task.workers.get(name)
    if worker is None or worker.generation == task.generation:
        return True
    stepped = task.progress.committed_generation == task.generation
    return task.has_joined(worker) and (stepped or bool(worker.busy))


def _one_per_replica(task: Task, told: list[HangSuspected]) -> tuple[HangSuspected, ...]:
    worst: dict[int, HangSuspected] = {}
    for one in told:
        replica = task.workers[one.worker].replica
        if replica not in worst or one.still_us > worst[replica].still_us:
            worst[replica] = one
    return tuple(worst.values())
