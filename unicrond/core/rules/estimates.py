"""What the log teaches about the cluster, as decisions: how fast tasks really are, how often workers fail.

Rules
-----
* *Throughput.* The median time of an iteration over the last reports of the present group (at least REPORTS_MIN,
  the first ones left out as warm-up) gives T at the group's size. Where it differs by more than a twentieth from
  what is believed, or nothing was known of the task at all, `ThroughputCorrected` says so.
* *Failure rate.* The configured mean time between failures counts as one failure seen in that time; what all
  workers together have run, and the failures among them, are added (a gamma prior). Where that differs by more
  than a tenth from what is believed, `FailureRateEstimated` says so.
* Nothing is learnt while a plan or a recovery is under way: the table that was built for the next fault stays
  the one that is looked up. Nothing that is learnt makes a plan by itself.
* Once folded, the belief is what was measured: asked again, both are quiet.
"""

from __future__ import annotations

from statistics import median_low

from unicrond.core.rules.survey import Survey
from unicrond.core.state.state import Task
from unicrond.core.state.work import iteration_flop
from unicrond.core.worth.costs import settle
from unicrond.core.worth.waf import has_scale
from unicrond.events.vocabulary import FailureRateEstimated, ThroughputCorrected

_SECOND_US = 1_000_000
#: Reports of a group before its time per iteration is believed.
REPORTS_MIN = 8
#: What the log's integers hold.
_FLOPS_MAX = 2**63 - 1


def corrections(survey: Survey) -> list[ThroughputCorrected]:
    """Return T at the running sizes, where what was measured differs from what is believed by more than 5 %."""
    if survey.state.incidents:
        return []
    candidates = [_correction(task, survey) for task in survey.active]
    return [correction for correction in candidates if correction is not None]


def _correction(task: Task, survey: Survey) -> ThroughputCorrected | None:
    if len(task.pace.timings) < REPORTS_MIN or task.membership is None or not task.confirmed or task.leavers:
        return None
    workers, nodes = len(task.membership.members), survey.state.nodes
    if len({nodes[member.node].gpu for member in task.membership.members if member.node in nodes}) > 1:
        return None  # some have yet to leave another type of GPU
    iteration_us = median_low(task.pace.timings)
    flops = min(iteration_flop(task.spec) * _SECOND_US // iteration_us, _FLOPS_MAX)
    believed = int(survey.throughput(task)(workers))
    if not flops or not believed or (has_scale(task) and 20 * abs(flops - believed) <= believed):
        return None
    return ThroughputCorrected(
        task=task.name,
        workers=workers,
        flops=flops,
        iteration_us=iteration_us,
        reports=len(task.pace.timings),
        reason=f"an iteration takes {iteration_us / 1e6:.4g} s, not {_expected_s(task, believed):.4g} s",
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
    estimate_us = (configured_us + ledger.exposed_us) // (1 + ledger.failures)
    believed_us = survey.worker_mtbf_us
    if 10 * abs(estimate_us - believed_us) <= believed_us:
        return None
    return FailureRateEstimated(
        worker_mtbf_us=estimate_us, failures=ledger.failures, exposed_us=min(ledger.exposed_us, 2**62 - 1)
    )
