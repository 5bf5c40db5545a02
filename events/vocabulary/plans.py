"""Plans: how many workers each task has, on which nodes, and the figures that plans are made from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar

from msgspec import Meta

from unicrond.events.vocabulary.base import Decision, Value
from unicrond.events.vocabulary.field_defaults import always
from unicrond.events.vocabulary.field_types import (
    Count,
    Duration,
    FirstSerial,
    Flops,
    Gpu,
    Micros,
    Name,
    PlanMethod,
    Slots,
    Small,
    SomeDuration,
    SomeWorkers,
    Text,
    Work,
    Workers,
)
from unicrond.events.vocabulary.phrases import count
from unicrond.events.vocabulary.shape import Shape


class NodeRun(Value, frozen=True, kw_only=True, array_like=True):
    """The next `count` workers of a plan run on `node`. On the wire a bare array: it gets no further field."""

    node: Name
    count: Slots


class TaskAssignment(Value, frozen=True, kw_only=True):
    """The share of one task in a plan. `waf`: weighted achieved FLOP/s, F(t, workers).

    `replicas`: per replica, the node of each of its shards. On the wire it is empty, and `nodes` and
    `replica_workers` say the same: runs over all shards of all replicas, and how many there are in one
    (events/vocabulary/placements.py).
    `tp`, `pp`, `vpp`, `ep`, `micro_batch`, `cp`, `etp`: the layout that the plan has chosen, of a task that has a
    choice; `tp` 0: the task's own.
    """

    task: Name
    workers: Workers
    replicas: tuple[tuple[Name, ...], ...]
    waf: Flops
    nodes: tuple[NodeRun, ...] = ()
    replica_workers: Workers = 0
    tp: Workers = 0
    pp: Workers = 0
    vpp: SomeWorkers = 1
    ep: SomeWorkers = 1
    micro_batch: Small = 0
    cp: SomeWorkers = 1
    etp: Workers = 0

    @property
    def shape(self) -> Shape | None:
        """Return the layout that the plan has chosen; None: the task's own."""
        return Shape(self.tp, self.pp, self.vpp, self.ep, self.micro_batch, self.cp, self.etp) if self.tp else None


class PlanAdopted(Decision, frozen=True, kw_only=True):
    """The cluster has this plan from now on. `waf` = sum of the assignments' waf, FLOP/s.

    `basis`: digest of the nodes and tasks that the plan was made for; another basis asks for a new plan.
    `healthy`, `waf_if_healthy`: workers per task, and their WAF, were every node that has not left healthy.
    `healthy_gpus`: the type of GPU that each of these would be on, where there are several.
    `transition_flop`: what the change is expected to cost, sum of F(t, x) * D_transition over the tasks it moves.
    `gap_ppm`: with several types of GPU, how much better another plan might be at most, in parts per million of the
    plan's objective; 0: none is, which is proven.
    `way`, `duration_us`, `rows_reused`: how the plan was computed; the plan does not depend on it.
    """

    is_noteworthy: ClassVar[bool] = True

    epoch: FirstSerial
    assignments: tuple[TaskAssignment, ...]
    waf: Flops
    basis: Text
    trigger: Text
    reason: Text
    healthy: dict[Name, Workers] = always({})
    waf_if_healthy: Flops = always(0)
    transition_flop: Work = always(0.0)
    method: PlanMethod = always("fresh")
    duration_us: Duration = always(0)
    rows_reused: Small = always(0)
    healthy_gpus: dict[Name, Gpu] = {}
    gap_ppm: Small = 0

    def sentence(self) -> str:
        """Say it in one sentence."""
        shares = ", ".join(f"{a.task} {count(a.workers, 'worker')}" for a in self.assignments) or "no task runs"
        took = f", {self.method} in {self.duration_us} us" if self.duration_us else ""
        return f"plan {self.epoch} ({self.trigger}{took}): {shares}; {self.reason}"

    def nodes_named(self) -> Iterator[str]:
        """Yield the nodes that it names."""
        for assignment in self.assignments:
            for replica in assignment.replicas:
                yield from replica
            for node_run in assignment.nodes:
                yield node_run.node

    def tasks_named(self) -> Iterator[str]:
        """Yield the tasks that it names."""
        for assignment in self.assignments:
            yield assignment.task


class ThroughputCorrected(Decision, frozen=True, kw_only=True):
    """T(task, workers) is `flops` from now on: what the last `reports` reports say, by the median of their
    time per iteration, `iteration_us`. No plan is made because of it, unless it `asks_for_plan`; the next one uses it.

    `reports` 0: nothing new was measured. What had been counts less by now; with 0 FLOP/s it counts no longer, and T
    is again what the other measurements and the task's model say.
    """

    task: Name
    workers: SomeWorkers
    flops: Flops
    iteration_us: SomeDuration
    reports: Small
    reason: Text
    asks_for_plan: bool = False

    def sentence(self) -> str:
        """Say it in one sentence."""
        workers = count(self.workers, "worker")
        if not self.flops:
            return f"what task {self.task} achieved on {workers} no longer counts: {self.reason}"
        return f"task {self.task} achieves {self.flops:.3g} FLOP/s on {workers}: {self.reason}"


class FailureRateEstimated(Decision, frozen=True, kw_only=True):
    """One worker's mean time between failures is `worker_mtbf_us` from now on. D_running(n) = worker_mtbf_us / n.

    It is configured, as if that had been seen once, and then learned from `failures` failures in `exposed_us` of
    workers' time.
    """

    worker_mtbf_us: Annotated[int, Meta(ge=1, lt=2**62)]
    failures: Count
    exposed_us: Micros

    def sentence(self) -> str:
        """Say it in one sentence."""
        hours = self.worker_mtbf_us / 3.6e9
        return f"a worker fails every {hours:.4g} h, after {count(self.failures, 'failure')}"
