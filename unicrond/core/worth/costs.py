"""Costs: every microsecond of the failure-free cluster's work is either delivered or lost to something.

    failure-free = delivered + lost to detection, transition, repetition, sub-health    (exactly, and none negative)

Rules
-----
* *Failure-free* runs at the healthy WAF: what the last plan would give the active tasks, were every node that
  ever joined and has not left on purpose in health (`PlanAdopted.healthy`): what should run counts, though it waits.
  Tasks that still run on what a newer plan takes from them can achieve more than that: then it runs at what they do.
* *Delivered*: F(t, members) while the task's group stands. A planned change does not break the group before it:
  that one trains on up to the iteration at which all switch.
* *Repeated*: F while the group trains iterations that had been committed before, whatever made it fall back, from the
  first that it joins at to the newest ever committed. The time is that of the repetition: what was delivered stays.
* *Transition*: from when an incident opens until the task's next group stands, what the task achieved before.
* *Detection*: the time before the incident opened, back to when the fault occurred by the observer's clock, is
  taken out of what had been counted as delivered or repeated; never from before the present group stood.
* *Sub-health*: all the rest: fewer workers than a healthy cluster would give, starting, waiting. It is never negative:
  what one task still has, of what a newer plan gives to another, the other does not lack.
* Two incidents that keep one task from training charge its loss once: to the first. An incident that takes over
  others takes their charges over.
* *Failures of hardware* are counted, not those of programs, and the newer weigh more: at each day's end (log time) the
  count and the time that workers have run both shrink, such that they weigh half after a week. A program that fails all
  day tells nothing of how long a plan will stand, and a bad week is not held against the cluster for ever.
* Rates change by events alone, and only then is anything added up: `with_costs` is a pass of its own after each
  entry's fold, looks at the states before and after it, and alone writes the ledger; `costs_at` adds what has come
  since. The ledger stands in the state, since decisions read it: the summary of an incident, the rate of failures.

What does not live here: where F and the healthy plan come from (`waf.py`, `plan_problems.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from functools import cache
from typing import NamedTuple, TypedDict

from msgspec.structs import replace

from unicrond.core.nodes.gpu_types import on_type
from unicrond.core.state.state import ClusterState, Incident, Plan, Severity, Task
from unicrond.core.state.work_ledger import Account, Charge, Ledger
from unicrond.core.worth.waf import best_waf, has_scale, linear_flops, waf, worth_stays
from unicrond.events import vocabulary as v
from unicrond.events.vocabulary.shape import Shape

_SECOND_US = 1_000_000
_DAY_US = 86_400 * _SECOND_US
#: What a day leaves of the weight of the past, in millionths: half after a week. What is older than _DAYS_MAX has none.
MILLION = 1_000_000
_DAY_WEIGHT = 905_724
_DAYS_MAX = 400
#: Events that change no rate, most of the log among them: nothing to add up.
_FREE = frozenset(
    (
        v.CheckpointSaved,
        v.SaveFailed,
        v.StartWorker,
        v.StartWorkers,
        v.WorkerStarted,
        v.WorkerReady,
        v.MembershipPart,
        v.PeersDecided,
        v.CommandApplied,
        v.SnapshotStored,
        v.PeersRemembered,
    )
)


class Costs(NamedTuple):
    """Totals in whole weighted FLOP. `sub_health_flop` is the rest, so that the sum holds in these as well."""

    failure_free_flop: int
    delivered_flop: int
    detection_flop: int
    transition_flop: int
    repeated_flop: int
    sub_health_flop: int


def costs_at(state: ClusterState, now_us: int) -> Costs:
    """Return the cluster's costs from its first plan to `now_us` (log time; the state's own time if that is later)."""
    ledger = settle(state.ledger, max(now_us, state.now_us))
    parts = (ledger.failure_free, ledger.delivered, ledger.detection, ledger.transition, ledger.repeated)
    free, delivered, detection, transition, repeated = (int(part) // _SECOND_US for part in parts)
    return Costs(
        failure_free_flop=free,
        delivered_flop=delivered,
        detection_flop=detection,
        transition_flop=transition,
        repeated_flop=repeated,
        sub_health_flop=free - delivered - detection - transition - repeated,
    )


def charge_of(state: ClusterState, incident: str) -> tuple[float, float]:
    """Return what the open incident has cost until now: detection and transition, weighted FLOP."""
    charge = settle(state.ledger, state.now_us).charges.get(incident, Charge())
    return int(charge.detection) / _SECOND_US, int(charge.transition) / _SECOND_US


def sub_health_flops(state: ClusterState) -> int:
    """Return by how much the tasks that stand achieve less than the healthy cluster would, weighted FLOP/s."""
    return state.ledger.failure_free_rate - state.ledger.achieved


def settle(ledger: Ledger, now_us: int) -> Ledger:
    """Return the ledger with everything added up to `now_us` at the rates that held."""
    lasted_us = now_us - ledger.until_us
    if lasted_us <= 0:
        return ledger
    accounts = ledger.accounts.values()
    delivered = sum(account.rate for account in accounts if not account.repeats) * lasted_us
    repeated = sum(account.rate for account in accounts if account.repeats) * lasted_us
    in_transition = sum(account.had for account in accounts) * lasted_us
    free = ledger.failure_free_rate * lasted_us
    charges = ledger.charges
    for account in accounts:
        if account.had:
            charges = _charged(charges, account.incident, transition=account.had * lasted_us)
    return replace(
        ledger,
        until_us=now_us,
        failure_free=plus(ledger.failure_free, free),
        delivered=plus(ledger.delivered, delivered),
        transition=plus(ledger.transition, in_transition),
        repeated=plus(ledger.repeated, repeated) if repeated else ledger.repeated,
        sub_health=plus(ledger.sub_health, free - delivered - repeated - in_transition),
        charges=charges,
        exposed_us=ledger.exposed_us + sum(account.workers for account in accounts) * lasted_us,
        **_recent(ledger, now_us, sum(account.workers for account in accounts)),
    )


class _Recent(TypedDict):
    recent_exposed_us: int
    recent_failures: int


def _recent(ledger: Ledger, now_us: int, workers: int) -> _Recent:
    """Return exposure and failures up to `now_us`, the older the lighter: the same at whatever times it is asked."""
    since_us, exposed_us, failures = ledger.until_us, ledger.recent_exposed_us, ledger.recent_failures
    first_day = since_us // _DAY_US + 1
    if now_us // _DAY_US - first_day > _DAYS_MAX:
        first_day, exposed_us, failures = now_us // _DAY_US - _DAYS_MAX, 0, 0
        since_us = (first_day - 1) * _DAY_US
    for day in range(first_day, now_us // _DAY_US + 1):
        exposed_us = (exposed_us + (day * _DAY_US - since_us) * workers) * _DAY_WEIGHT // MILLION
        failures = failures * _DAY_WEIGHT // MILLION
        since_us = day * _DAY_US
    return {"recent_exposed_us": exposed_us + (now_us - since_us) * workers, "recent_failures": failures}


def with_costs(before: ClusterState, event: v.AnyEvent, after: ClusterState) -> ClusterState:
    """Return `after`, into which the event has led from `before`, with its ledger carried on; the same object where no
    rate has changed."""
    if type(event) in _FREE or (isinstance(event, v.WorkerJoinedGroup) and not _completes(after, event)):
        return after
    if isinstance(event, v.StepCommitted) and _repeats_as_before(before, after, event.task):
        return after
    if before.tasks is after.tasks and before.incidents is after.incidents and before.plan is after.plan:
        return after
    same_worth = worth_stays(before, after)

    @cache
    def linear() -> int:
        """Return FLOP/s of one worker of a task without a scale of its own."""
        return linear_flops(after)

    as_before = same_worth or linear() == linear_flops(before)
    hit = {name for incident in after.incidents.values() for name in incident.generations}
    accounts = {}
    for task in after.active:
        name, old = task.name, after.ledger.accounts.get(task.name)
        stays = as_before and old is not None and not old.incident and name not in hit
        if not (stays and before.tasks.get(name) is task):
            old = _account(after, task, old or Account(since_us=after.now_us), linear)
        accounts[name] = old
    healthy = after.ledger.healthy
    if not same_worth or before.plan is not after.plan:
        healthy = sum(worth_in_health(after.plan, after.tasks[name], linear) for name in accounts)
    if accounts == after.ledger.accounts and healthy == after.ledger.healthy and before.incidents is after.incidents:
        return after
    failures, settled = _failures(before, event), settle(after.ledger, after.now_us)
    ledger = replace(
        settled,
        accounts=accounts,
        healthy=healthy,
        failures=settled.failures + failures,
        recent_failures=settled.recent_failures + failures * MILLION,
    )
    return replace(after, ledger=_date_back(_hand_over(ledger, before, after), after))


def _failures(before: ClusterState, event: v.AnyEvent) -> int:
    """Return 1 where the event closes an incident in which hardware failed, else 0."""
    if not isinstance(event, v.TransitionCompleted) or event.incident not in before.incidents:
        return 0
    return int(is_hardware_failure(before.incidents[event.incident]))


def is_hardware_failure(incident: Incident) -> bool:
    """Return whether the incident took a process or a node, and no program is known to have done it
    (faults/program_faults.py)."""
    return incident.severity < Severity.SEV3 and not incident.is_program_fault


def _repeats_as_before(before: ClusterState, after: ClusterState, name: str) -> bool:
    """Return whether the task trains again what had been committed before, in both states or in neither."""
    old, new = before.tasks.get(name), after.tasks.get(name)
    return old is new or (bool(old and old.progress.repeats_until) == bool(new and new.progress.repeats_until))


def _completes(state: ClusterState, event: v.WorkerJoinedGroup) -> bool:
    """Return whether the join changes what trains: before the last one, the previous group trains on, or none does."""
    task = state.tasks.get(event.task)
    return task is not None and task.confirmed


# --- one task --------------------------------------------------------------------------------------


def _account(state: ClusterState, task: Task, old: Account, linear: Callable[[], int]) -> Account:
    """Return the task's account from now on."""
    incident = _kept_from_training_by(state, task)
    if incident is not None:
        if old.incident:
            return replace(old, incident=incident.id)
        return Account(
            had=old.rate,
            had_repeats=old.repeats,
            had_since_us=old.since_us,
            lost_from_us=state.now_us,
            incident=incident.id,
        )
    rate, workers = _rate(task, old, linear)
    repeats = task.progress.repeats_for if workers and task.progress.repeats_until else ""
    if rate == old.rate and repeats == old.repeats and not old.incident:
        return old if workers == old.workers else replace(old, workers=workers)
    return Account(rate=rate, since_us=state.now_us, workers=workers, repeats=repeats)


def _kept_from_training_by(state: ClusterState, task: Task) -> Incident | None:
    """Return the first open incident that broke the newest group; else the first that broke an earlier one, if none has
    stood since."""
    hit = [incident for incident in state.incidents.values() if task.name in incident.generations]
    for incident in hit:
        if task.generation <= incident.generations[task.name]:
            return incident
    return hit[0] if hit and not _stands(task) else None


def _stands(task: Task) -> bool:
    """Return whether a group trains: the newest, or the one before it while all that a planned change needs are
    alive."""
    if task.membership is None or not task.membership.members:
        return False
    return (task.confirmed or not task.membership.urgent) and task.all_able


def _rate(task: Task, old: Account, linear: Callable[[], int]) -> tuple[int, int]:
    """Return what the task achieves now (weighted FLOP/s), and how many workers achieve it."""
    if not _stands(task) or task.membership is None:
        return 0, 0
    members = len(task.membership.members)
    return (worth(task, members, linear), members) if task.confirmed else (old.rate, old.workers)


def worth(task: Task, workers: int, linear: Callable[[], int], shape: Shape | None = None) -> int:
    """Return F(t, workers), in its present layout or in another; `linear` is called where its T has no scale of its
    own."""
    return waf(task, workers, shape=shape) if has_scale(task) else waf(task, workers, linear(), shape)


def worth_in_health(plan: Plan, task: Task, linear: Callable[[], int]) -> int:
    """Return F in the best of the task's layouts, with the workers that the plan would give it in health."""
    workers, task = plan.healthy.get(task.name, 0), on_type(task, plan.healthy_gpus.get(task.name, task.pace.gpu))
    return best_waf(task, workers) if has_scale(task) else best_waf(task, workers, linear())


# --- incidents -------------------------------------------------------------------------------------


def _hand_over(ledger: Ledger, before: ClusterState, after: ClusterState) -> Ledger:
    """Pass the charges of incidents that are no more to the one that took them over; else drop them: the event that
    closed them has them."""
    charges = ledger.charges
    old_names = [name for name in before.incidents if name not in after.incidents]
    successor = next((name for name in after.incidents if name not in before.incidents), "")
    for name in old_names:
        if name in charges:
            old_charge = charges[name]
            charges = {key: charge for key, charge in charges.items() if key != name}
            if successor:
                charges = _charged(
                    charges, successor, detection=int(old_charge.detection), transition=int(old_charge.transition)
                )
    return ledger if charges is ledger.charges else replace(ledger, charges=charges)


def _date_back(ledger: Ledger, state: ClusterState) -> Ledger:
    """Move what a task had achieved since its fault occurred, delivered or repeated, to detection."""
    for name, account in ledger.accounts.items():
        if not account.had:
            continue
        hit = [i for i in state.incidents.values() if name in i.generations]
        # Of one from which the task has gone on, all that there was to account for has been.
        occurred_us = min(i.occurred_us for i in [i for i in hit if not i.resumed_us] or hit)
        from_us = max(occurred_us, account.had_since_us)
        if from_us >= account.lost_from_us:
            continue
        work = account.had * (account.lost_from_us - from_us)
        source = "repeated" if account.had_repeats else "delivered"
        ledger = replace(
            ledger,
            **{source: plus(getattr(ledger, source), -work)},
            detection=plus(ledger.detection, work),
            charges=_charged(ledger.charges, account.incident, detection=work),
            accounts=ledger.accounts | {name: replace(account, lost_from_us=from_us)},
        )
    return ledger


def _charged(
    charges: dict[str, Charge], incident: str, *, detection: int = 0, transition: int = 0
) -> dict[str, Charge]:
    old = charges.get(incident, Charge())
    charge = Charge(detection=plus(old.detection, detection), transition=plus(old.transition, transition))
    return charges | {incident: charge}


def plus(total: Decimal, work: int) -> Decimal:
    """Return their sum, exact at any size: a Decimal's own addition rounds to 28 digits."""
    return Decimal(int(total) + work)
