"""What the log teaches about the cluster, as decisions: how fast tasks really are, how often workers fail.

Rules
-----
* *Throughput.* The median time of an iteration over the last reports of the present group (at least REPORTS_MIN,
  the first ones left out as warm-up, so that single hiccups do not count) gives T at the group's size. Iterations
  during which a checkpoint was under way, or a section that the program declares, are no such reports: they say nothing
  of healthy nodes (`StepCommitted.not_plain`). Where there are no others for UNPLAIN_MAX reports, they count.
  Where it differs by more than a twentieth from what is believed, or nothing was known of the task at all,
  `ThroughputCorrected` says so: on the same nodes at most once in CALM_US, unless it asks for a plan.
* *What was measured stands with its circumstances* (worth/evidence.py). Where these are gone, or long ago, the belief
  goes back to what the other measurements and the model say: `ThroughputCorrected` with 0 reports.
* *Failure rate.* The configured mean time between failures counts as one failure seen in that time; what all
  workers together have run, and the failures of hardware among them, are added (a gamma prior), the newer the heavier
  (costs.py). Where that differs by more than a tenth from what is believed, `FailureRateEstimated` says so.
* Nothing is learnt while a plan or a recovery is under way: the table that was built for the next fault stays
  the one that is looked up.
* What is learnt moves no worker, with one exception: the task itself would gain more than a tenth, with slots that
  nobody uses (then it has more workers), or without its newest (a try that failed gives them back). Then the correction
  asks for one plan. It never takes another task's workers: the next event's plan may. The first kind comes at most once
  in CALM_US for each task; the second only right after a group was formed, on nodes on which so many had not been
  measured since the belief last faded. So a try and its end are one pair, and the next comes with another node or after
  the half-life, which doubles: plans do not swing.
* Once folded, the belief is what was measured: asked again, both are quiet.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from statistics import median_low

from msgspec.structs import replace

from unicrond.core.planning.problem import Curve
from unicrond.core.rules.survey import Survey
from unicrond.core.state.state import Task
from unicrond.core.state.task_parts import TIMINGS_MAX
from unicrond.core.state.work import iteration_flop
from unicrond.core.worth import evidence
from unicrond.core.worth.costs import MILLION, settle
from unicrond.core.worth.evidence import REPORTS_MIN
from unicrond.core.worth.waf import has_scale, throughput
from unicrond.events.vocabulary import FailureRateEstimated, ThroughputCorrected

_SECOND_US = 1_000_000
#: Between two corrections of one measurement on the same nodes, and between two plans that a task's measurements ask
#: for.
CALM_US = 600 * _SECOND_US
#: What the log's integers hold.
_FLOPS_MAX = 2**63 - 1


def corrections(survey: Survey) -> list[ThroughputCorrected]:
    """Return what is to be believed of T from now on, where that differs by more than 5 %, at most once for a task."""
    if survey.state.incidents:
        return []
    standing = [task for task in survey.active if task.membership is not None and task.confirmed and not task.leavers]
    candidates = [_correction(task, survey) or _retraction(task, survey) for task in standing]
    return [correction for correction in candidates if correction is not None]


def _correction(task: Task, survey: Survey) -> ThroughputCorrected | None:
    """Return T at the running size, as it is measured."""
    if len(task.pace.timings) < REPORTS_MIN or task.membership is None:
        return None
    workers, nodes = len(task.membership.members), survey.state.nodes
    if len({nodes[member.node].gpu for member in task.membership.members if member.node in nodes}) > 1:
        return None  # some have yet to leave another type of GPU
    iteration_us = median_low(task.pace.timings)
    flops = min(iteration_flop(task.spec) * _SECOND_US // iteration_us, _FLOPS_MAX)
    believed = int(survey.throughput(task)(workers))
    if not flops or not believed or (has_scale(task) and evidence.is_near(flops, believed)):
        return None
    correction = ThroughputCorrected(
        task=task.name,
        workers=workers,
        flops=flops,
        iteration_us=iteration_us,
        reports=len(task.pace.timings),
        reason=f"an iteration takes {iteration_us / 1e6:.4g} s, not {_expected_s(task, believed):.4g} s",
    )
    correction = replace(correction, asks_for_plan=_asks_for_plan(task, correction, survey))
    old = task.pace.circumstances.get(str(workers))
    is_calm = old is None or old.has_faded or old.nodes != evidence.member_nodes(task)
    is_calm = is_calm or survey.state.now_us - (old.measured_us if old else 0) >= CALM_US
    return correction if is_calm or correction.asks_for_plan else None


def _retraction(task: Task, survey: Survey) -> ThroughputCorrected | None:
    """Return the first measurement at another size that no longer counts, or counts less (evidence.py)."""
    running = len(task.membership.members) if task.membership else 0
    for number, believed in task.pace.measurements.items():
        workers, circumstances = int(number), task.pace.circumstances.get(number)
        if workers == running or circumstances is None:
            continue
        expected = evidence.expectation(task, workers)
        if not expected or evidence.is_near(believed, expected):
            continue
        reason = evidence.doubt(task, workers, survey.state.nodes) if believed < expected else ""
        flops = 0
        if not reason:
            age_us = survey.state.now_us - circumstances.measured_us
            if age_us < evidence.half_life_us(circumstances):
                continue
            reason = f"measured {age_us / 3.6e9:.3g} h ago"
            halfway = (believed + expected) // 2
            flops = 0 if evidence.is_near(halfway, expected) else halfway
        correction = ThroughputCorrected(
            task=task.name,
            workers=workers,
            flops=flops,
            iteration_us=max(1, iteration_flop(task.spec) * _SECOND_US // believed),
            reports=0,
            reason=reason,
        )
        return replace(correction, asks_for_plan=_asks_for_plan(task, correction, survey))
    return None


def _asks_for_plan(task: Task, correction: ThroughputCorrected, survey: Survey) -> bool:
    """Return whether the task gains more than a tenth by what is now believed, at nobody's cost, and did not by what
    was."""
    now_us, present = survey.state.now_us, len(task.membership.members) if task.membership else 0
    assignment = survey.state.plan.assignments.get(task.name)
    if assignment is None or assignment.workers != present:
        return False
    is_due = now_us - task.pace.revised_us >= CALM_US
    fewer = _tries(task, present) if correction.reports else []
    if not is_due and not fewer:
        return False
    most = present + _free_slots(survey, task) if task.spec.max_workers > present else present
    more = range(present + 1, min(task.spec.max_workers, most) + 1)

    @cache
    def measured() -> Curve:
        """Return T with what is now believed: of a large task it takes a while, and is mostly not asked for."""
        return throughput(replace(task, pace=evidence.pace_after(task, correction, now_us)), survey.linear)

    for numbers, verdict in ((more, is_due), (fewer, True)):
        if not numbers or _gains(task, survey.throughput(task), numbers, present):
            continue
        if _gains(task, measured(), numbers, present):
            return verdict
    return False


def _tries(task: Task, present: int) -> list[int]:
    """Return the smaller numbers of workers that were measured, where the present one is tried for the first time."""
    old = task.pace.circumstances.get(str(present))
    is_new = old is None or old.has_faded or old.nodes != evidence.member_nodes(task)
    if not is_new or len(task.pace.timings) >= TIMINGS_MAX or task.group.stragglers:
        return []
    return [int(number) for number in task.pace.measurements if task.spec.min_workers <= int(number) < present]


def _gains(task: Task, curve: Curve, numbers: Iterable[int], present: int) -> bool:
    """Return whether the task achieves more than a tenth more with one of these numbers of workers."""
    unit, here = task.spec.replica_workers, int(curve(present))
    return any(not workers % unit and 10 * int(curve(workers)) > 11 * here for workers in numbers)


def _free_slots(survey: Survey, task: Task) -> int:
    """Return the slots that the plan gives nobody, on nodes of the task's type of GPU."""
    planned = survey.plan_seats
    return sum(
        max(0, slots - planned[node])
        for node, slots in survey.capacity.items()
        if not survey.types or survey.gpus.get(node) == task.pace.gpu
    )


def _expected_s(task: Task, believed: int) -> float:
    return iteration_flop(task.spec) / believed


def failure_rate(survey: Survey) -> FailureRateEstimated | None:
    """Return one worker's mean time between failures, where it differs from what is believed by more than 10 %."""
    state = survey.state
    if state.incidents:
        return None
    ledger = settle(state.ledger, state.now_us)
    configured_us = int(survey.policy.worker_mtbf_s * _SECOND_US)
    weight = MILLION + ledger.recent_failures
    estimate_us = max(1, (configured_us + ledger.recent_exposed_us) * MILLION // weight)
    believed_us = survey.worker_mtbf_us
    if 10 * abs(estimate_us - believed_us) <= believed_us:
        return None
    return FailureRateEstimated(
        worker_mtbf_us=estimate_us, failures=ledger.failures, exposed_us=min(ledger.exposed_us, 2**62 - 1)
    )
