"""Who hangs, from what the agents read off their workers' phase marks: judge(task) -> verdict.

Rules
-----
* An agent tells of a worker whose iteration lasts longer than three times the usual (HangSuspected), and again while
  that lasts. One late iteration makes all members late: most of them are victims, who wait in a collective.
* A process that the kernel shows as stopped is a culprit by itself.
* Else nothing is judged before all members of the generation have been told of. Then
    who has not entered the collective that others wait in, and has stood still for a usual iteration -> hangs
    who has not entered it, but moves                                        -> is slow: nothing yet
    all wait in the same collective                                          -> it is the group: SEV3
    nobody waits for anybody                                                 -> hangs, after ALONE_LIMITS of it
* Who is still on the way into the group has no limit, and is not told of. Where all others have waited in a
  collective for ALONE_LIMITS, it has lost its peers without noticing: it is the group: SEV3.
* Of a replica of several workers the one that has stood still for longest is blamed; the replica falls as a whole.
* A committed step, and a new membership, make all earlier suspicions void. What is told of the iteration that was
  committed last is late itself, or of one that has agreed to its step and has stood still since, while the others
  wait in the next iteration: it is believed of a process that is stopped, and after ALONE_LIMITS without a move.

Pure. What does not live here: marks (agents/trainer/marks.py), limits (agents/trainer/baseline.py), the response
(severity.py, decide.py).
"""

from __future__ import annotations

from typing import NamedTuple

from events.vocabulary import HangSuspected
from unicrond.state import Task

#: A limit is three usual iterations, or more: who has not moved for a third of it does not move.
_STILL = 3
#: Where nobody waits, an iteration that is merely long looks like a hang: more patience, in limits.
ALONE_LIMITS = 3


class Verdict(NamedTuple):
    """`culprits`: one worker per replica that hangs. None, and `stuck`: the collective does not end for anybody."""

    culprits: tuple[HangSuspected, ...]
    stuck: bool
    reason: str


def is_stale(task: Task, told: HangSuspected) -> bool:
    """It tells of an iteration that its worker has left. A group that has committed nothing yet may have gone back."""
    if task.committed_generation < told.generation:
        return False
    if told.iteration == task.iteration:
        return not told.stopped and told.still_us < ALONE_LIMITS * told.limit_us
    return told.iteration < task.iteration


def judge(task: Task) -> Verdict | None:
    """The verdict on the task's present suspicions; None: not yet, or no hang."""
    living = {name: told for name, told in task.suspicions.items() if name in task.workers and task.workers[name].alive}
    stopped = [told for told in living.values() if told.stopped]
    if stopped:
        return Verdict(_one_per_replica(task, stopped), False, "its process is stopped")
    members = task.membership.members if task.membership else ()
    silent = [member.worker for member in members if member.worker not in living]
    if not living or not members:
        return None
    if silent:
        return _left_waiting(task, silent, list(living.values()))
    told = [living[member.worker] for member in members]
    top = max(one.entered for one in told)
    waiting = [one for one in told if one.waiting and one.entered == top]
    behind = [one for one in told if one.entered < top]
    if behind and waiting:
        hung = [one for one in behind if one.still_us * _STILL >= one.limit_us]
        if not hung:
            return None
        others = f"{len(waiting)} other{'s wait' if len(waiting) > 1 else ' waits'}"
        return Verdict(_one_per_replica(task, hung), False, f"{others} in collective {top}, which it has not entered")
    if len(waiting) == len(told):
        return Verdict((), True, f"all {len(told)} members wait in collective {top}")
    alone = [one for one in told if one.still_us >= ALONE_LIMITS * one.limit_us]
    if len(alone) < len(told):
        return None
    return Verdict(_one_per_replica(task, alone), False, f"it has not moved for {ALONE_LIMITS} times the limit")


def _left_waiting(task: Task, silent: list[str], told: list[HangSuspected]) -> Verdict | None:
    if any(name not in task.workers or task.workers[name].generation == task.generation for name in silent):
        return None  # it has joined, and will be told of
    if any(not one.waiting or one.still_us < ALONE_LIMITS * one.limit_us for one in told):
        return None
    return Verdict((), True, f"{' and '.join(silent)} did not come into the group, and all others wait in a collective")


def _one_per_replica(task: Task, told: list[HangSuspected]) -> tuple[HangSuspected, ...]:
    worst: dict[int, HangSuspected] = {}
    for one in told:
        replica = task.workers[one.worker].replica
        if replica not in worst or one.still_us > worst[replica].still_us:
            worst[replica] = one
    return tuple(worst.values())
