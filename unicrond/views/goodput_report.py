"""Goodput as people read it: FLOP, shares, ETTR, MFU, interruptions, lost work; of cluster and tasks. Pure.

| figure | definition | published in |
|---|---|---|
| goodput | delivered / failure-free work; badput: the rest, by cause | Google, ml-goodput-measurement (there of time) |
| ETTR | productive time / time since submission | Meta, arXiv 2410.21680; ByteRobust, arXiv 2509.16293 |
| interruptions, highest step, lost work time, FLOP/s per worker | counted from the log | NVIDIA, GoodputMeasurement |
| MFU | committed model FLOP / (worker time x peak), no recomputation counted | PaLM, arXiv 2204.02311 |

Rules
-----
* A report covers the log from one reading to another; without the first, from its beginning.
* FLOP are whole, and add up: parts are rounded so that their sum is their total's, and the totals are the ledger's
  (costs.py: what is left is sub-health). All is up to the newest entry of the log, so that a replay says the same.
* No part is negative and none above its whole (`open_report`). What an incident of the interval dates back to before
  the interval is no loss of the interval.
* ETTR counts as productive neither what a fault dates back nor the time in which iterations are trained again, nor
  what discarded micro-batches had taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from unicrond.core.state.state import ClusterState, Task
from unicrond.core.state.work import iteration_flop
from unicrond.core.worth.costs import Costs, costs_at
from unicrond.views import lemons
from unicrond.views.goodput import (
    PRODUCTIVE,
    REPEATING,
    SUB_HEALTH,
    TIMES,
    GoodputTotals,
    Hit,
    kinds_of,
    settle_totals,
)

_SECOND_US = 1_000_000
DETECTION, TRANSITION, REPEATED, SUB_HEALTHY = "detection", "transition", "repeated", "sub-health"


class GoodputReading(NamedTuple):
    """The sums at one entry. `kinds`: by task and kind of incident. `iterations`: committed, by task."""

    seq: int
    at_us: int
    books: GoodputTotals
    kinds: Mapping[str, Mapping[str, Hit]]
    costs: Costs
    iterations: Mapping[str, int]


def reading(totals: GoodputTotals, state: ClusterState) -> GoodputReading:
    """Return what the totals say at the state that they go with."""
    totals = settle_totals(totals, state.now_us)
    iterations = {name: task.progress.best_iteration for name, task in state.tasks.items()}
    costs = costs_at(state, state.now_us)
    return GoodputReading(state.seq, state.now_us, totals, kinds_of(totals, state), costs, iterations)


EMPTY_READING = reading(GoodputTotals(), ClusterState())


def report(
    now: GoodputReading, state: ClusterState, since: GoodputReading = EMPTY_READING, peak_flops: float = 0.0
) -> dict[str, Any]:
    """Report on the log from `since` to `now`, where the cluster is in `state`. `peak_flops`: of one worker, for MFU;
    0: not known.

    Plain JSON types, but integers of any size.
    """
    tasks = [name for name in state.tasks if name in now.books.times_us or name in now.kinds or name in now.books.short]
    kinds = {name: _difference(now.kinds.get(name, {}), since.kinds.get(name, {})) for name in tasks}
    free, *parts = [new - old for new, old in zip(now.costs, since.costs, strict=True)]
    closed = {kind: n - since.books.closed.get(kind, 0) for kind, n in now.books.closed.items()}
    signals = {
        node: {name: n - since.books.signals.get(node, {}).get(name, 0) for name, n in counts.items()}
        for node, counts in now.books.signals.items()
    }
    return {
        "seq": now.seq,
        "since_seq": since.seq,
        "from_us": since.at_us or now.books.from_us,
        "until_us": now.at_us,
        "cluster": _work(now.books, since.books, kinds, tasks, Costs(free, *parts)),
        "tasks": [_task(now, since, state.tasks[name], kinds[name], peak_flops) for name in tasks],
        "incidents": {kind: n for kind, n in sorted(closed.items()) if n},
        "open_incidents": len(state.incidents),
        "lemons": [
            {
                "node": score.node,
                "score": score.score,
                "is_lemon": score.is_lemon,
                "reason": score.reason,
                "parts": score.parts,
            }
            for score in lemons.scores(signals)
        ],
    }


# --- work ------------------------------------------------------------------------------------------


def _work(
    totals: GoodputTotals,
    since: GoodputTotals,
    kinds: Mapping[str, Mapping[str, Hit]],
    tasks: Sequence[str],
    costs: Costs | None = None,
) -> dict[str, Any]:
    """Return work delivered and lost, by cause, of some tasks together. `costs`: what they must add up to."""
    hits: dict[str, Hit] = {}
    for name in tasks:
        for kind, hit in kinds[name].items():
            hits[kind] = hits.get(kind, Hit()).plus(hit)
    short = {
        cause: sum(_part(totals.short, name, cause) - _part(since.short, name, cause) for name in tasks)
        for cause in SUB_HEALTH
    }
    delivered = sum(int(totals.delivered.get(name, 0)) - int(since.delivered.get(name, 0)) for name in tasks)
    detection = {kind: int(hit.detection) for kind, hit in hits.items()}
    transition = {kind: int(hit.transition) for kind, hit in hits.items()}
    repeated = {kind: int(hit.repeated) for kind, hit in hits.items()}
    if costs is None:
        parts = [delivered, *(sum(part.values()) for part in (detection, transition, repeated))]
        costs = _whole_costs(parts, sum(parts) + sum(short.values()))
    costs = _within(costs)
    free = costs.failure_free_flop
    badput = [
        {"group": group, "cause": cause, "flop": flop, "share": _share(flop, free)}
        for group, parts_of, total in (
            (DETECTION, detection, costs.detection_flop),
            (TRANSITION, transition, costs.transition_flop),
            (REPEATED, repeated, costs.repeated_flop),
            (SUB_HEALTHY, short, costs.sub_health_flop),
        )
        for cause, flop in whole(parts_of, total).items()
        if flop
    ]
    return {
        "failure_free_flop": free,
        "goodput_flop": costs.delivered_flop,
        "goodput": _share(costs.delivered_flop, free),
        "badput": badput,
    }


def _whole_costs(parts: Sequence[int], free: int) -> Costs:
    """Round to whole FLOP: delivered, detection, transition, repeated, and what is left."""
    delivered, detection, transition, repeated = (part // _SECOND_US for part in parts)
    free //= _SECOND_US
    rest = free - delivered - detection - transition - repeated
    return Costs(free, delivered, detection, transition, repeated, rest)


def _within(costs: Costs) -> Costs:
    """Return the costs of an interval without what was dated back to before it: then detection has more, and what was
    delivered or repeated less, than the interval had room for. The last FLOP of each may be due to rounding."""
    delivered, repeated = max(0, costs.delivered_flop), max(0, costs.repeated_flop)
    before = delivered - costs.delivered_flop + repeated - costs.repeated_flop
    short = max(0, costs.sub_health_flop)
    return costs._replace(
        delivered_flop=delivered,
        repeated_flop=repeated,
        detection_flop=costs.detection_flop - before - (short - costs.sub_health_flop),
        sub_health_flop=short,
    )


def whole(parts: Mapping[str, int], total_flop: int) -> dict[str, int]:
    """Round parts of work (FLOP x microseconds per second) to whole FLOP that add up to `total_flop`. A negative part
    (an incident has had another kind before) is taken off the largest."""
    rounded, before, so_far = {}, 0, 0
    names = list(parts)
    for name in names:
        so_far += parts[name]
        upto = so_far // _SECOND_US
        rounded[name], before = upto - before, upto
    if names and before != total_flop:
        rounded[names[0]] += total_flop - before
    return _without_negatives(rounded)


def _without_negatives(parts: dict[str, int], donors: Iterable[str] | None = None) -> dict[str, int]:
    """Return the parts with 0 for each negative one, which the largest of `donors` (None: of all) make up for."""
    debt = -sum(part for part in parts.values() if part < 0)
    if not debt:
        return parts
    rest = {name: max(0, part) for name, part in parts.items()}
    for name in sorted(donors or rest, key=lambda name: -rest[name]):
        paid = min(debt, rest[name])
        rest[name], debt = rest[name] - paid, debt - paid
    return rest


def _part(short: Mapping[str, Mapping[str, Any]], task: str, cause: str) -> int:
    return int(short.get(task, {}).get(cause, 0))


# --- a task ----------------------------------------------------------------------------------------


def _task(
    now: GoodputReading, since: GoodputReading, task: Task, kinds: Mapping[str, Hit], peak_flops: float
) -> dict[str, Any]:
    name = task.name
    current = now.books.times_us.get(name, {})
    before = since.books.times_us.get(name, {})
    times = {activity: current.get(activity, 0) - before.get(activity, 0) for activity in TIMES}
    for kind, hit in kinds.items():
        times[f"{DETECTION}: {kind}"], times[f"{TRANSITION}: {kind}"] = hit.detection_us, hit.transition_us
    times = _without_negatives(times, [activity for activity in times if activity.startswith(f"{DETECTION}: ")])
    discarded_us = sum(hit.discarded_us for hit in kinds.values())
    wall_us, productive_us = sum(times.values()), max(0, times[PRODUCTIVE] - discarded_us)
    interruptions = sum(hit.interruptions for hit in kinds.values())
    iterations = now.iterations.get(name, 0)
    if task.submitted_us < since.at_us:  # else it has begun anew
        iterations -= since.iterations.get(name, 0)
    committed_flop = iterations * iteration_flop(task.spec)
    workers_s = (now.books.workers_us.get(name, 0) - since.books.workers_us.get(name, 0)) / 1e6
    per_worker = committed_flop / workers_s if workers_s else 0.0
    return {
        "task": name,
        "status": task.status.value,
        **_work(now.books, since.books, {name: kinds}, [name]),
        "wall_us": wall_us,
        "productive_us": productive_us,
        "ettr": _share(productive_us, wall_us),
        "times_us": {activity: time_us for activity, time_us in times.items() if time_us},
        "interruptions": interruptions,
        "interruptions_by_kind": {kind: hit.interruptions for kind, hit in kinds.items() if hit.interruptions},
        "mtti_us": wall_us // interruptions if interruptions else None,
        "highest_step": task.progress.best_iteration,
        "iterations": iterations,
        "iterations_lost": sum(hit.iterations_lost for hit in kinds.values()),
        "lost_work_us": times[REPEATING] + discarded_us,
        "micro_batches_repeated": sum(hit.micro_batches_repeated for hit in kinds.values()),
        "micro_batches_lost": sum(hit.micro_batches_lost for hit in kinds.values()),
        "committed_flop": committed_flop,
        "worker_s": workers_s,
        "flops_per_worker": per_worker,
        "mfu": per_worker / peak_flops if peak_flops else None,
    }


def open_report(told: Mapping[str, Any]) -> str:
    """Describe why a report does not close: a share is not within 0 and 100 %, or the shares do not add up; "" where it
    closes."""
    for name, work in [("the cluster", told["cluster"]), *((task["task"], task) for task in told["tasks"])]:
        flops = {"goodput": work["goodput_flop"]}
        flops |= {f"{part['group']}: {part['cause']}": part["flop"] for part in work["badput"]}
        free = work["failure_free_flop"]
        for part, flop in flops.items():
            if not 0 <= flop <= free:
                return f"{part} of {name} is {flop} of {free} FLOP"
        if sum(flops.values()) != free:
            return f"parts of {sum(flops.values())} FLOP in {free} of {name}: {flops}"
        times_us = work.get("times_us", {})
        if any(time_us < 0 for time_us in times_us.values()) or sum(times_us.values()) != work.get("wall_us", 0):
            return f"the time of {name} is {work['wall_us']} us, and its parts {times_us}"
        if not 0 <= (work.get("ettr") or 0) <= 1:
            return f"ETTR of {name} is {work['ettr']}"
    return ""


def _difference(now: Mapping[str, Hit], since: Mapping[str, Hit]) -> dict[str, Hit]:
    names: Iterable[str] = dict.fromkeys([*now, *since])
    rest = {kind: now.get(kind, Hit()).plus(since.get(kind, Hit()), -1) for kind in names}
    return {kind: hit for kind, hit in sorted(rest.items()) if hit != Hit()}


def _share(part: int, of: int) -> float | None:
    return part / of if of else None
