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
* ETTR counts as productive neither what a fault dates back nor the time to train lost iterations again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from unicrond.core.state.state import ClusterState, Task
from unicrond.core.state.work import iteration_flop
from unicrond.core.worth.costs import Costs, costs_at
from unicrond.views import lemons
from unicrond.views.goodput import PRODUCTIVE, SUB_HEALTH, TIMES, GoodputTotals, Hit, kinds_of, settle_totals

_SECOND_US = 1_000_000
DETECTION, TRANSITION, SUB_HEALTHY = "detection", "transition", "sub-health"


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
    if costs is None:
        delivered_flop, detection_flop, transition_flop = (
            work // _SECOND_US for work in (delivered, sum(detection.values()), sum(transition.values()))
        )
        free = (delivered + sum(detection.values()) + sum(transition.values()) + sum(short.values())) // _SECOND_US
        costs = Costs(
            free,
            delivered_flop,
            detection_flop,
            transition_flop,
            free - delivered_flop - detection_flop - transition_flop,
        )
    free = costs.failure_free_flop
    badput = [
        {"group": group, "cause": cause, "flop": flop, "share": _share(flop, free)}
        for group, parts, total in (
            (DETECTION, detection, costs.detection_flop),
            (TRANSITION, transition, costs.transition_flop),
            (SUB_HEALTHY, short, costs.sub_health_flop),
        )
        for cause, flop in whole(parts, total).items()
        if flop
    ]
    return {
        "failure_free_flop": free,
        "goodput_flop": costs.delivered_flop,
        "goodput": _share(costs.delivered_flop, free),
        "badput": badput,
    }


def whole(parts: Mapping[str, int], total_flop: int) -> dict[str, int]:
    """Round parts of work (FLOP x microseconds per second) to whole FLOP that add up to `total_flop`."""
    rounded, before, so_far = {}, 0, 0
    names = list(parts)
    for name in names:
        so_far += parts[name]
        upto = so_far // _SECOND_US
        rounded[name], before = upto - before, upto
    if names and before != total_flop:
        largest = max(names, key=lambda name: abs(parts[name]))
        rounded[largest] += total_flop - before
    return rounded


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
    lost_us = sum(hit.lost_us for hit in kinds.values())
    wall_us, productive_us = sum(times.values()), max(0, times[PRODUCTIVE] - lost_us)
    interruptions = sum(hit.interruptions for hit in kinds.values())
    iterations = now.iterations.get(name, 0) - since.iterations.get(name, 0)
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
        "lost_work_us": lost_us,
        "micro_batches_repeated": sum(hit.micro_batches_repeated for hit in kinds.values()),
        "micro_batches_lost": sum(hit.micro_batches_lost for hit in kinds.values()),
        "committed_flop": committed_flop,
        "worker_s": workers_s,
        "flops_per_worker": per_worker,
        "mfu": per_worker / peak_flops if peak_flops else None,
    }


def _difference(now: Mapping[str, Hit], since: Mapping[str, Hit]) -> dict[str, Hit]:
    names: Iterable[str] = dict.fromkeys([*now, *since])
    rest = {kind: now.get(kind, Hit()).plus(since.get(kind, Hit()), -1) for kind in names}
    return {kind: hit for kind, hit in sorted(rest.items()) if hit != Hit()}


def _share(part: int, of: int) -> float | None:
    return part / of if of else None
