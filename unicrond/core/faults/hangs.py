"""Which worker hangs, from the agents' reports of phase marks: judge(task) -> verdict.

Rules
-----
* An agent reports a worker whose iteration lasts longer than three times the usual (HangSuspected), and again while
  that lasts. One late iteration makes all members late: most of them are victims, which wait in a collective.
* A process that the kernel shows as stopped is a culprit by itself.
* A program that is busy for longer than it has declared (hook.section) is a culprit by itself, too; one that is not
  late by that is not reported, and workers that wait for it are no victims.
* Who has not moved in a section of the program for SECTION_LIMITS of that section's calculated limit is a culprit by
  itself, too: its agent watches no section while the worker waits in a collective. Where half of the replicas or more
  are late in the same section, it is what they share (a file system), and the section says nothing; nor does it where
  there is one replica. Of a replica of several workers, which wait for each other unseen, all must have been reported.
* Else the reported workers are compared with each other; the rest may be silent (an agent is away, a limit
  is longer). Only in logs older than `HangSuspected.report_number` nothing is judged before all members have been
  reported.
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

from collections.abc import Mapping
from typing import NamedTuple

from unicrond.core.state.hang_tally import ALONE_LIMITS, STILL, hangs_in_section
from unicrond.core.state.state import Task
from unicrond.events.vocabulary import HangSuspected
from unicrond.events.vocabulary.phrases import seconds


class HangVerdict(NamedTuple):
    """`culprits`: one worker per replica that hangs. None, and `stuck`: the collective does not end for anybody."""

    culprits: tuple[HangSuspected, ...]
    stuck: bool
    reason: str


def is_stale(task: Task, suspicion: HangSuspected) -> bool:
    """Return whether the report is about an iteration that its worker has left. A group that has committed nothing yet
    may have gone back."""
    if task.progress.committed_generation < suspicion.generation:
        return False
    if suspicion.iteration == task.progress.iteration:
        return (
            not suspicion.is_stopped
            and not suspicion.section
            and not suspicion.slow_section
            and suspicion.still_us < ALONE_LIMITS * suspicion.limit_us
        )
    return suspicion.iteration < task.progress.iteration


def judge(task: Task, generation: int = 0) -> HangVerdict | None:
    """Return the verdict on the task's present suspicions of `generation` (0: the newest); None: not yet, or no
    hang."""
    generation = generation or task.generation
    if generation == task.generation and not _is_ripe(task):
        return None
    return judge_all(task, generation)


def _is_ripe(task: Task) -> bool:
    """Return whether there may be a verdict on the newest group, by what the reports add up to: in a large group nearly
    every report changes nothing, and costs a look at itself alone."""
    late = task.lateness
    count = late.counts
    if count["stopped", -1] or count["busy", -1] or count["slow", -1] or count["unnumbered", -1]:
        return True
    reports, collectives = count["all", -1], late.collectives()
    if reports and count["waits at", collectives[-1]] and any(count["hangs at", at] for at in collectives[:-1]):
        return True
    if reports < len(task.member_names):
        return count["patient", -1] == reports and not _is_report_pending(task)
    return reports in (count["waits", -1], count["long", -1])


def _is_report_pending(task: Task) -> bool:
    """Return whether a report on some member is still to come. The member that was found last is looked at first."""
    late = task.lateness
    members = task.membership.members if task.membership else ()
    for name in (late.silent, *(member.worker for member in members)):
        if name and name not in late.suspicions and _may_be_reported(task, name):
            late.silent = name  # a cache, not a change
            return True
    return False


def judge_all(task: Task, generation: int) -> HangVerdict | None:
    """Return the verdict as `judge` does, by a look at all reports."""
    living = {
        name: report
        for name, report in task.group.suspicions.items()
        if report.generation == generation and name in task.workers and task.workers[name].alive
    }
    stopped_processes = [report for report in living.values() if report.is_stopped]
    if stopped_processes:
        return HangVerdict(_one_per_replica(task, stopped_processes), False, "its process is stopped")
    overdue = [report for report in living.values() if report.section]
    if overdue:
        reason = f"it is busy with {overdue[0].section} for longer than it has declared (hook.section, timeout_s)"
        return HangVerdict(_one_per_replica(task, overdue), False, reason)
    members = _members(task, generation)
    if slow := _slow_in_section(task, members, living):
        reason = f"it has not moved in {slow[0].slow_section} for {seconds(slow[0].still_us)}"
        reason += f" (limit {seconds(slow[0].slow_limit_us)}, by what it took before)"
        return HangVerdict(_one_per_replica(task, slow), False, reason)
    silent = [name for name in members if name not in living]
    if not living or not members:
        return None
    reports = list(living.values())
    #: Agents of today report each late worker at its limit: a worker that is late by its own mark needs no other's
    #: report.
    suffices_alone = all(report.report_number for report in reports)
    if silent and not suffices_alone:
        return _left_waiting(task, silent, reports)
    top = max(report.collectives_entered for report in reports)
    waiting = [report for report in reports if report.is_waiting and report.collectives_entered == top]
    behind = [
        report for report in reports if report.collectives_entered < top and not (suffices_alone and report.is_waiting)
    ]
    if behind and waiting:
        hung = [report for report in behind if report.still_us * STILL >= report.limit_us]
        if hung:
            waiters = f"{len(waiting)} other{'s wait' if len(waiting) > 1 else ' waits'}"
            reason = f"{waiters} in collective {top}, which it has not entered"
            return HangVerdict(_one_per_replica(task, hung), False, reason)
        return None
    if silent:
        return _left_waiting(task, silent, reports)
    if all(report.is_waiting for report in reports):
        where = f"collective {top}" if len(waiting) == len(reports) else "two collectives, one behind the other"
        return HangVerdict((), True, f"all {len(reports)} members wait in {where}")
    alone = [report for report in reports if report.still_us >= ALONE_LIMITS * report.limit_us]
    if len(alone) < len(reports):
        return None
    return HangVerdict(_one_per_replica(task, alone), False, f"it has not moved for {ALONE_LIMITS} times the limit")


def _slow_in_section(task: Task, members: list[str], living: Mapping[str, HangSuspected]) -> list[HangSuspected]:
    """Return the reports of those that hang in a section of their own, and that not as most others do."""
    replica_of = {name: task.workers[name].replica for name in members if name in task.workers}
    late: dict[str, set[int]] = {}
    for name, report in living.items():
        if report.slow_section and name in replica_of:
            late.setdefault(report.slow_section, set()).add(replica_of[name])
    silent = {replica for name, replica in replica_of.items() if name not in living}
    replicas = len(set(replica_of.values()))
    return [
        report
        for name, report in living.items()
        if hangs_in_section(report)
        and name in replica_of
        and replica_of[name] not in silent
        and 2 * len(late[report.slow_section]) < max(replicas, 3)
        and replicas > 1
    ]


def _members(task: Task, generation: int) -> list[str]:
    """Return the workers of that generation: the newest membership, or those still in the group before it."""
    if generation == task.generation:
        return [member.worker for member in task.membership.members] if task.membership else []
    return [
        worker.worker for worker in task.workers.values() if task.generation_of(worker) == generation and worker.alive
    ]


def _left_waiting(task: Task, silent: list[str], reports: list[HangSuspected]) -> HangVerdict | None:
    if any(_may_be_reported(task, name) for name in silent):
        return None
    if any(not report.is_waiting or report.still_us < ALONE_LIMITS * report.limit_us for report in reports):
        return None
    return HangVerdict(
        (), True, f"{' and '.join(silent)} did not come into the group, and all others wait in a collective"
    )


def _may_be_reported(task: Task, name: str) -> bool:
    """Return whether a report on the member may still come: it is gone, or has joined the group. Where only its lead
    has said that, a member may still stand in the exchange that the others have left, until all have made a step."""
    worker = task.workers.get(name)
    if worker is None or worker.generation == task.generation:
        return True
    stepped = task.progress.committed_generation == task.generation
    return task.has_joined(worker) and (stepped or bool(worker.section))


def _one_per_replica(task: Task, reports: list[HangSuspected]) -> tuple[HangSuspected, ...]:
    worst: dict[int, HangSuspected] = {}
    for report in reports:
        replica = task.workers[report.worker].replica
        if replica not in worst or report.still_us > worst[replica].still_us:
            worst[replica] = report
    return tuple(worst.values())
