"""Goodput: the ledger taken apart, by task and by cause; and the time of each task, by what it did. Pure.

    failure-free = goodput + badput
    badput = detection + transition + repeated (by kind of incident) + sub-health (by cause)

Rules
-----
* These are the ledger's own numbers (costs.py): at every entry the parts here add up to the ledger's totals, exactly.
  Nothing is decided from them, so they stand beside the state and not in it.
* Work is in weighted FLOP/s x microseconds, as in the ledger. Rates hold from one change of the ledger to the next.
* What an incident costs is of its kind when it is closed, or when it is asked for; one that takes others over takes
  their costs over.
* Sub-health of a task: what it has less in the plan than in the healthy cluster is because of nodes that are lost or
  isolated, in proportion to their slots ("plan": there are none); all else is "starting" (no step yet) or "changing"
  (its group is not what the plan gives it). While a task runs on what a newer plan takes from it, the others lack so
  much less: first what is changing or starting, then the rest, each in proportion. No part is ever negative.
* Repeated is what a group achieves while it trains iterations that had been committed before, for whatever reason.
* A task's time is productive while a group of it stands, less what a fault dates back, repeating, else in transition,
  waiting (the plan has no workers for it), starting or changing. It counts from its submission, and ends with the task.
* An interruption is an incident that stopped a group of the task.

What does not live here: how it is shown, ratios (goodput_report.py); what nodes are suspected of (lemons.py).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from decimal import Decimal
from typing import Any

import msgspec
from msgspec.structs import replace

from unicrond.core.replayer import LogStep
from unicrond.core.state.ordered_map import changed
from unicrond.core.state.state import ClusterState, Node, NodeStatus, Task
from unicrond.core.state.work_ledger import ZERO, Account
from unicrond.core.tasks.reshaping import planned_shape
from unicrond.core.worth.costs import plus, worth, worth_in_health
from unicrond.core.worth.waf import linear_flops, worth_stays
from unicrond.events import vocabulary as v
from unicrond.views import lemons

PRODUCTIVE, REPEATING, STARTING, WAITING, CHANGING = "productive", "repeating", "starting", "waiting", "changing"
NODES_LOST, NODES_ISOLATED, PLAN = "nodes lost", "nodes isolated", "plan"
#: In the order in which they are shown.
SUB_HEALTH = (NODES_LOST, NODES_ISOLATED, PLAN, STARTING, CHANGING)
TIMES = (PRODUCTIVE, REPEATING, STARTING, WAITING, CHANGING)

#: Events that change a task's F, and perhaps no total of the ledger.
_WORTH = (v.ThroughputCorrected, v.TaskReshaped)


class Hit(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What incidents have cost one task. `detection`, `transition`, `repeated`: work, weighted FLOP; with `_us`: the
    time of it. `discarded_us`: the time that the discarded micro-batches had taken."""

    detection: Decimal = ZERO
    transition: Decimal = ZERO
    repeated: Decimal = ZERO
    detection_us: int = 0
    transition_us: int = 0
    interruptions: int = 0
    iterations_lost: int = 0
    discarded_us: int = 0
    micro_batches_repeated: int = 0
    micro_batches_lost: int = msgspec.field(default=0, name="thrown")

    def plus(self, hit: Hit, sign: int = 1) -> Hit:
        """Return both together; with `sign` -1, this one less the other."""
        sums: dict[str, Any] = {}
        for name in self.__struct_fields__:
            amount, addition = getattr(self, name), sign * int(getattr(hit, name))
            sums[name] = plus(amount, addition) if isinstance(amount, Decimal) else amount + addition
        return Hit(**sums)


class Rate(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one task gains and loses per second at the moment, weighted FLOP/s. `short`: by cause. `over`: what it
    achieves beyond what the plan would give it in health. `doing`: where its time goes; "" while an `incident` keeps it
    from training, which `had` is charged to. `repeats`: it delivers nothing, since it repeats, for this kind of
    incident. `is_new`: it has made no step. `workers`: that train."""

    delivered: int = 0
    over: int = 0
    repeats: str = ""
    had: int = 0
    incident: str = ""
    short: dict[str, int] = {}
    doing: str = ""
    is_new: bool = False
    workers: int = 0


class GoodputTotals(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sums up to `until_us`, by task, and the rates that hold from there on. `open`: by incident and task. `losses`: of
    closed incidents, by task and kind. `closed`: how many, by "kind SEVn". `signals`: see lemons.py, by node.
    `lost_slots`, `isolated_slots`: of nodes that are out now, and that no person has taken out."""

    from_us: int = 0
    until_us: int = 0
    delivered: dict[str, Decimal] = {}
    short: dict[str, dict[str, Decimal]] = {}
    times_us: dict[str, dict[str, int]] = {}
    workers_us: dict[str, int] = {}
    losses: dict[str, dict[str, Hit]] = {}
    open: dict[str, dict[str, Hit]] = {}
    closed: dict[str, int] = {}
    rates: dict[str, Rate] = {}
    signals: dict[str, dict[str, int]] = {}
    lost_slots: int = 0
    isolated_slots: int = 0


def account_step(totals: GoodputTotals, step: LogStep) -> GoodputTotals:
    """Return the totals after a step; the same object where it changes none."""
    before, _, after = step
    event = step.event
    if event is None:
        return totals
    with_slots = _with_slots_out(totals, before, after) if after.nodes is not before.nodes else totals
    if (
        after.ledger is not before.ledger
        or after.plan is not before.plan
        or with_slots is not totals
        or type(event) in _WORTH
    ):
        totals = _accrued(settle_totals(totals, after.now_us), with_slots, before, after)
    if isinstance(event, v.WorkerJoinedGroup) and after.incidents is not before.incidents:
        totals = _lost_work(totals, before, after, event)
    elif isinstance(event, v.StepCommitted) and event.task in before.tasks:
        totals = _count_repeated(totals, before.tasks[event.task], after.tasks[event.task])
    signals = lemons.count_signals(totals.signals, step)
    return totals if signals is totals.signals else replace(totals, signals=signals)


def settle_totals(totals: GoodputTotals, now_us: int) -> GoodputTotals:
    """Return the totals with everything added up to `now_us` at the rates that held."""
    lasted_us = now_us - totals.until_us
    if lasted_us <= 0 or not totals.rates:
        return replace(totals, until_us=max(now_us, totals.until_us))
    delivered, short, times_us, opened = dict(totals.delivered), dict(totals.short), dict(totals.times_us), totals.open
    workers_us, losses = dict(totals.workers_us), totals.losses
    for (name, rate), lacks in zip(totals.rates.items(), _lacks(totals.rates.values()), strict=True):
        if rate.repeats:
            losses = _add_hits(losses, {name: Hit(repeated=Decimal(rate.delivered * lasted_us))}, rate.repeats)
        elif rate.delivered:
            delivered[name] = plus(delivered.get(name, ZERO), rate.delivered * lasted_us)
        if rate.workers:
            workers_us[name] = workers_us.get(name, 0) + rate.workers * lasted_us
        if lacks:
            causes = dict(short.get(name, {}))
            for cause, flops in lacks.items():
                causes[cause] = plus(causes.get(cause, ZERO), flops * lasted_us)
            short[name] = causes
        if rate.doing:
            times = times_us.get(name, {})
            times_us[name] = times | {rate.doing: times.get(rate.doing, 0) + lasted_us}
        else:
            charge = Hit(transition=Decimal(rate.had * lasted_us), transition_us=lasted_us)
            opened = _charged(opened, rate.incident, name, charge)
    sums = {"delivered": delivered, "short": short, "times_us": times_us, "workers_us": workers_us, "open": opened}
    sums["losses"] = losses
    return replace(totals, until_us=now_us, **sums)


def kinds_of(totals: GoodputTotals, state: ClusterState) -> dict[str, dict[str, Hit]]:
    """Return costs by task and kind of incident, open incidents among them."""
    losses = totals.losses
    for name, hits in totals.open.items():
        incident = state.incidents.get(name)
        losses = _add_hits(losses, hits, incident.kind if incident else "unknown")
    return losses


# --- the ledger's changes --------------------------------------------------------------------------


def _accrued(
    totals: GoodputTotals, with_slots: GoodputTotals, before: ClusterState, after: ClusterState
) -> GoodputTotals:
    slots = (with_slots.lost_slots, with_slots.isolated_slots)
    is_unchanged = after.plan is before.plan and slots == (totals.lost_slots, totals.isolated_slots)
    is_unchanged = is_unchanged and worth_stays(before, after)
    totals = replace(totals, from_us=totals.from_us or after.now_us, lost_slots=slots[0], isolated_slots=slots[1])
    was, now = before.ledger.accounts, after.ledger.accounts
    for name, account in now.items():
        if account.incident:
            totals = _interrupt(totals, name, was.get(name), account, after.now_us)
    if before.incidents is not after.incidents:
        totals = _hand_over(totals, before, after)
    rates = {}
    for name, account in now.items():
        task, old = after.tasks[name], totals.rates.get(name)
        is_new = not task.progress.first_commit_us
        if old is not None and is_unchanged and was.get(name) is account and old.is_new is is_new:
            rates[name] = old
        else:
            rates[name] = _rate(totals, after, task, account)
    return replace(totals, rates=rates)


def _with_slots_out(totals: GoodputTotals, before: ClusterState, after: ClusterState) -> GoodputTotals:
    """Count the slots of nodes that are out, after some nodes have changed."""
    lost_slots, isolated_slots = totals.lost_slots, totals.isolated_slots
    for pair in changed(before.nodes, after.nodes).values():
        for sign, node in zip((-1, 1), pair, strict=True):
            if node is not None and not (node.cordon.active or node.departure.announced):
                lost_slots += sign * _slots(node) * (node.status is NodeStatus.LOST)
                isolated_slots += sign * _slots(node) * (node.status is NodeStatus.UP and node.isolation.active)
    if (lost_slots, isolated_slots) == (totals.lost_slots, totals.isolated_slots):
        return totals
    return replace(totals, lost_slots=lost_slots, isolated_slots=isolated_slots)


def _slots(node: Node) -> int:
    return max(node.slots, node.slots_max)


def _interrupt(totals: GoodputTotals, name: str, was: Account | None, account: Account, now_us: int) -> GoodputTotals:
    """Charge the incident what the task had achieved since the fault occurred; and an interruption, if it is a new
    one."""
    is_new = was is None or not was.incident
    moved_us = (now_us if is_new or was is None else was.lost_from_us) - account.lost_from_us if account.had else 0
    hit = Hit(interruptions=int(is_new and bool(was and was.rate)))
    if moved_us > 0:
        work = account.had * moved_us
        hit = replace(hit, detection=Decimal(work), detection_us=moved_us)
        activity = REPEATING if account.had_repeats else PRODUCTIVE
        times = totals.times_us.get(name, {})
        times = times | {activity: times.get(activity, 0) - moved_us}
        totals = replace(totals, times_us=totals.times_us | {name: times})
        if account.had_repeats:
            losses = _add_hits(totals.losses, {name: Hit(repeated=Decimal(-work))}, account.had_repeats)
            totals = replace(totals, losses=losses)
        else:
            delivered = totals.delivered | {name: plus(totals.delivered.get(name, ZERO), -work)}
            totals = replace(totals, delivered=delivered)
    if hit == Hit():
        return totals
    return replace(totals, open=_charged(totals.open, account.incident, name, hit))


def _hand_over(totals: GoodputTotals, before: ClusterState, after: ClusterState) -> GoodputTotals:
    """Pass the costs of incidents that are no more to the one that took them over, or else to their kind."""
    old_names = [name for name in before.incidents if name not in after.incidents]
    successor = next((name for name in after.incidents if name not in before.incidents), "")
    for name in old_names:
        hits, incident = totals.open.get(name, {}), before.incidents[name]
        rest = {key: value for key, value in totals.open.items() if key != name}
        if successor:
            for task, hit in hits.items():
                rest = _charged(rest, successor, task, hit)
            totals = replace(totals, open=rest)
        else:
            kind = f"{incident.kind} {incident.severity.name}"
            closed = totals.closed | {kind: totals.closed.get(kind, 0) + 1}
            totals = replace(totals, open=rest, losses=_add_hits(totals.losses, hits, incident.kind), closed=closed)
    return totals


def _lost_work(
    totals: GoodputTotals, before: ClusterState, after: ClusterState, event: v.WorkerJoinedGroup
) -> GoodputTotals:
    """Charge the incident what a worker that goes on has to do once more."""
    task = before.tasks[event.task]
    for name, incident in after.incidents.items():
        old = before.incidents.get(name)
        if old is None or old is incident or event.task not in incident.generations:
            continue
        hit = Hit(micro_batches_repeated=incident.micro_batches_repeated - old.micro_batches_repeated)
        if event.source not in ("own", "replica"):
            micro_batches_lost = incident.micro_batches_lost - old.micro_batches_lost
            discarded_us = micro_batches_lost * task.pace.iteration_us // task.spec.micro_batches
            hit = replace(hit, discarded_us=discarded_us, micro_batches_lost=micro_batches_lost)
        if hit != Hit():
            totals = replace(totals, open=_charged(totals.open, name, event.task, hit))
        break
    return totals


def _count_repeated(totals: GoodputTotals, before: Task, after: Task) -> GoodputTotals:
    """Count the committed iterations that a task has fallen back by."""
    lost = after.progress.iterations_repeated - before.progress.iterations_repeated
    if not lost:
        return totals
    hit = {after.name: Hit(iterations_lost=lost)}
    return replace(totals, losses=_add_hits(totals.losses, hit, after.progress.repeats_for))


# --- rates -----------------------------------------------------------------------------------------


def _rate(totals: GoodputTotals, state: ClusterState, task: Task, account: Account) -> Rate:
    def linear() -> int:
        """Return FLOP/s of one worker of a task without a scale of its own."""
        return linear_flops(state)

    assignment = state.plan.assignments.get(task.name)
    planned_workers = assignment.workers if assignment else 0
    in_health = worth_in_health(state.plan, task, linear)
    short = max(0, in_health - account.achieved)
    over = max(0, account.achieved - in_health)
    causes: dict[str, int] = {}
    is_new = not task.progress.first_commit_us
    if short:
        missing = in_health - worth(task, planned_workers, linear, planned_shape(task.spec, assignment))
        fewer = min(max(missing, 0), short)
        causes = _by_nodes(totals, fewer) if fewer else {}
        if short != fewer:
            causes[STARTING if is_new else CHANGING] = short - fewer
    if account.incident:
        return Rate(had=account.had, incident=account.incident, short=causes, over=over, is_new=is_new)
    standing = account.workers or account.rate
    doing = PRODUCTIVE if standing else WAITING if not planned_workers else STARTING if is_new else CHANGING
    return Rate(
        delivered=account.rate,
        over=over,
        repeats=account.repeats,
        short=causes,
        doing=REPEATING if account.repeats else doing,
        is_new=is_new,
        workers=account.workers,
    )


def _lacks(rates: Collection[Rate]) -> list[dict[str, int]]:
    """Return what each task lacks, by cause, less what others achieve beyond what they would have in health."""
    over = sum(rate.over for rate in rates)
    if not over:
        return [rate.short for rate in rates]
    lacks: list[dict[str, int]] = [{} for _ in rates]
    for causes in ((STARTING, CHANGING), (NODES_LOST, NODES_ISOLATED, PLAN)):
        parts = [(n, cause, rate.short.get(cause, 0)) for n, rate in enumerate(rates) for cause in causes]
        total = sum(part for _, _, part in parts)
        rest = total - min(over, total)
        over -= total - rest
        upto = 0
        for n, cause, part in parts:
            share = (upto + part) * rest // max(1, total) - upto * rest // max(1, total)
            upto += part
            if share:
                lacks[n][cause] = share
    return lacks


def _by_nodes(totals: GoodputTotals, flops: int) -> dict[str, int]:
    lost_slots, isolated_slots = totals.lost_slots, totals.isolated_slots
    if not lost_slots + isolated_slots:
        return {PLAN: flops}
    to_lost = flops * lost_slots // (lost_slots + isolated_slots)
    return {cause: part for cause, part in ((NODES_LOST, to_lost), (NODES_ISOLATED, flops - to_lost)) if part}


# --- sums ------------------------------------------------------------------------------------------


def _charged(opened: dict[str, dict[str, Hit]], incident: str, task: str, hit: Hit) -> dict[str, dict[str, Hit]]:
    hits = opened.get(incident, {})
    return opened | {incident: hits | {task: hits[task].plus(hit) if task in hits else hit}}


def _add_hits(losses: dict[str, dict[str, Hit]], hits: Mapping[str, Hit], kind: str) -> dict[str, dict[str, Hit]]:
    for task, hit in hits.items():
        by_kind = losses.get(task, {})
        losses = losses | {task: by_kind | {kind: by_kind[kind].plus(hit) if kind in by_kind else hit}}
    return losses
