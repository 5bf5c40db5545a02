"""Training: iterations that were committed, hangs, stragglers, corruption."""

from __future__ import annotations

from collections.abc import Mapping

from unicrond.events.vocabulary.base import PlacedObservation, Value, WorkerObservation
from unicrond.events.vocabulary.field_defaults import always
from unicrond.events.vocabulary.field_types import (
    CorruptionSign,
    Count,
    CountByRank,
    DivergenceSign,
    Duration,
    Factor,
    FirstIteration,
    Iteration,
    Micros,
    Name,
    Phase,
    SamplesDigest,
    Serial,
    Small,
    Text,
    WorkerId,
    WorkerOrNone,
    Workers,
)
from unicrond.events.vocabulary.phrases import count, seconds

#: Of each sign of a divergence: what was seen, and its likely cause.
DIVERGENCES: Mapping[DivergenceSign, str] = {
    "unsteady": (
        "a micro-batch computed twice on the same worker gave other gradients; likely the program draws random numbers"
        " without step.seed(micro_batch), or reads data other than that of step.samples(micro_batch)"
    ),
    "unequal": (
        "each replica computes other gradients from the same micro-batch, the same ones each time; likely each reads"
        " data of its own, or keeps state that is not attached"
    ),
    "newcomer": (
        "a replica that had received the others' state made other steps with it; likely the program keeps something"
        " that is not part of the state: an optimizer or scheduler that is not attached, or a learning rate or a buffer"
        " by its own count (hook.register)"
    ),
    "parameters": (
        "no majority of the replicas has the same parameters; likely an optimizer or scheduler is not attached, a"
        " buffer is each replica's own, or the step draws random numbers; of two replicas one may have a memory fault"
    ),
    "environment": (
        "the replicas compute on different things, so that their results may differ by rounding, and no difference is"
        " held against a replica; use GPUs or CPUs of one type, and the same versions and numerics flags"
    ),
}
#: How many replicas whose parameters differ are accused at a time: each of the others accuses each of them.
SUSPECTS_MAX = 8


class Checksums(Value, frozen=True, kw_only=True):
    """Checksums of the first shard: of the parameters' bits after `iteration`, and of the gradients' sums of
    the iteration after it. 0: none was made.
    """

    iteration: Iteration
    parameters: SamplesDigest
    sums: SamplesDigest = 0


class StepCommitted(WorkerObservation, frozen=True, kw_only=True):
    """All replicas of `generation` committed the iterations `first` to `last`.

    `samples_digest`: sum mod 2**61 of sample_hash(iteration, sample) over every sample used. `micro_batches_by_rank`:
    finished micro-batches per replica, in replica order. `micro_batches_repeated`: micro-batches that were computed
    again because a replica was lost. `loss`: of iteration `last`. `duration_us`: wall time of `first` to `last`.
    `checksums`: the newest that were made in these; None: none was. `not_plain`: how many of these held a checkpoint
    under way, or what the program had declared to be busy with, and took `not_plain_us` together: they say nothing of
    the nodes.
    """

    generation: Serial
    first: FirstIteration
    last: FirstIteration
    samples: Count
    samples_digest: SamplesDigest
    loss: float
    duration_us: Duration
    micro_batches_by_rank: CountByRank
    micro_batches_repeated: Small = always(0)
    checksums: Checksums | None = None
    not_plain: Small = 0
    not_plain_us: Duration = 0

    def sentence(self) -> str:
        """Say it in one sentence."""
        span = f"iteration {self.last}" if self.first == self.last else f"iterations {self.first}-{self.last}"
        repeated = (
            f", {count(self.micro_batches_repeated, 'micro-batch', 'micro-batches')} repeated"
            if self.micro_batches_repeated
            else ""
        )
        return f"task {self.task} committed {span}, loss {self.loss:.4g}{repeated}"


class HangSuspected(PlacedObservation, frozen=True, kw_only=True):
    """A worker's iteration lasts longer than `limit_us`, more than three times the usual; its own agent reports it.

    From the worker's phase mark (agents/protocol/marks.py): `collectives_entered` counts the collectives across
    replicas that it has entered in `generation`; `is_waiting`: it has not left the last of them. `still_us`: for how
    long the mark has not changed. `is_stopped`: the kernel shows the process as stopped. `section`: what it had
    declared to be busy with, for at most so long (hook.section); "": nothing. `report_number`: which report of
    this iteration it is, from 1; 0: not numbered. `slow_section`: the section in which it has not moved for longer than
    `slow_limit_us`, as calculated from what that section took; "": none.
    """

    phase: Phase
    micro_batch: Small
    collectives_entered: Count
    is_waiting: bool
    is_stopped: bool
    still_us: Duration
    limit_us: Duration
    section: Text = ""
    report_number: Small = 0
    slow_section: Text = ""
    slow_limit_us: Duration = 0

    def sentence(self) -> str:
        """Say it in one sentence."""
        if self.slow_section:
            return (
                f"worker {self.worker} on {self.node} has not moved in {self.slow_section} of iteration"
                f" {self.iteration} for {seconds(self.still_us)} (limit {seconds(self.slow_limit_us)})"
            )
        place = f"{'waits in' if self.is_waiting else 'has left'} collective {self.collectives_entered}"
        process = ", its process is stopped" if self.is_stopped else ""
        busy = f", busy with {self.section}" if self.section else ""
        return (
            f"iteration {self.iteration} takes longer than {seconds(self.limit_us)}: worker {self.worker} on"
            f" {self.node} last moved {seconds(self.still_us)} ago, in {self.phase}; it {place}{process}{busy}"
        )


class DegradationObserved(PlacedObservation, frozen=True, kw_only=True):
    """The task's iterations have taken more than 1.1 times the usual for a while. The leader's agent reports it.

    `slowest`: the worker whose computing, waits excluded, takes longest per micro-batch; "" where none stands out.
    `compute_us`: its time per micro-batch. `others_us`: the median of the other replicas' (0: there are none).
    """

    iteration_us: Duration
    usual_us: Duration
    slowest: WorkerOrNone
    compute_us: Duration
    others_us: Duration

    def sentence(self) -> str:
        """Say it in one sentence."""
        against = f" against {seconds(self.others_us)}" if self.others_us else ""
        slowest = f"{self.slowest} is slowest, {seconds(self.compute_us)} per micro-batch{against}"
        return (
            f"task {self.task} is slow: iterations take {seconds(self.iteration_us)} instead of"
            f" {seconds(self.usual_us)}; {slowest if self.slowest else 'no worker stands out'}"
        )


class StragglerSeen(PlacedObservation, frozen=True, kw_only=True):
    """An observation that `worker` makes of `straggler`, another member of its group at place `rank` of the membership.

    `factor`: how many times as long the straggler takes as the others.
    """

    straggler: WorkerId
    straggler_node: Name
    rank: Workers
    factor: Factor


class ReplicaDeal(Value, frozen=True, kw_only=True):
    """Tell what a replica computes of an iteration where micro-batches are dealt by speed, and what that has brought.

    It is `dealt` so many of all `micro_batches`, of which an even deal would give it `dealt_evenly`. Iterations took
    `iteration_us_before` when all were dealt evenly, take `iteration_us` now, and would take `ideal_us` if they had
    become shorter by all that the deal cuts by the measured speeds. 0: not known yet, or not in this group.
    """

    micro_batches: Count
    dealt: Count
    dealt_evenly: Count
    iteration_us_before: Duration = 0
    iteration_us: Duration = 0
    ideal_us: Duration = 0

    def phrase(self) -> str:
        """Say it in a phrase."""
        text = f"dealt {self.dealt} of {self.micro_batches} micro-batches instead of {self.dealt_evenly}"
        if not self.iteration_us_before or not self.iteration_us:
            return text
        before, now, ideal = (round(us / 1000) for us in (self.iteration_us_before, self.iteration_us, self.ideal_us))
        return f"{text}; iterations {before} -> {now} ms, ideal {ideal}"


class StragglerObserved(StragglerSeen, frozen=True, kw_only=True):
    """A replica has been slower than the others at the same work, for at least some seconds.

    The first replica's worker of its shard reports it once, and again when its `factor` has changed or it is known what
    another deal of the micro-batches has brought. `straggler`: its
    worker in that shard; `rank`: its place in the membership. `factor`: its own time per micro-batch over the median of
    the other replicas' in the same iterations; `compute_us` and `others_us`: these two. It began about the beginning of
    `since_iteration`, at `since_us` by the reporter's clock. `deal`: what is done about it; None: nothing (yet), or not
    said.
    """

    compute_us: Duration
    others_us: Duration
    since_iteration: Iteration
    since_us: Micros
    deal: ReplicaDeal | None = None

    def sentence(self) -> str:
        """Say it in one sentence."""
        deal = f": {self.deal.phrase()}" if self.deal else ""
        return (
            f"worker {self.straggler} (rank {self.rank}) on {self.straggler_node} is a straggler: it takes"
            f" {self.factor:.2f} times as long as the other replicas since iteration {self.since_iteration},"
            f" {seconds(self.compute_us)} per micro-batch against {seconds(self.others_us)}{deal}"
        )


class StragglerRecovered(StragglerSeen, frozen=True, kw_only=True):
    """A straggler is as quick as the other replicas again; `factor`: what is left."""

    def sentence(self) -> str:
        """Say it in one sentence."""
        return (
            f"worker {self.straggler} (rank {self.rank}) on {self.straggler_node} no longer straggles, as of"
            f" iteration {self.iteration}: {self.factor:.2f} times the time of the other replicas"
        )


class CorruptionSuspected(PlacedObservation, frozen=True, kw_only=True):
    """A replica has numbers that no sound one should have. `worker` reports it, `suspect` has them ("": unknown).

    `sign` "checksum": its parameters differ from those of the majority, of which each reports it for itself
    (SUSPECTS_MAX); "micro_batch": so do the gradients that it computes from the same micro-batch; else its share of
    the iteration has a loss or a gradient norm far off the usual, `value` instead of about `usual`.
    """

    sign: CorruptionSign
    suspect: WorkerOrNone
    value: float
    usual: float

    def sentence(self) -> str:
        """Say it in one sentence."""
        subject = self.suspect or "an unknown worker"
        if self.sign == "checksum":
            return f"parameters of {subject} differ from other replicas' before iteration {self.iteration}"
        if self.sign == "micro_batch":
            return f"{subject} computes other gradients from the same micro-batch than the other replicas"
        return (
            f"{subject} has a {self.sign.replace('_', ' ')} of {self.value:.4g} in iteration {self.iteration},"
            f" usual is {self.usual:.4g}"
        )


class DivergenceObserved(PlacedObservation, frozen=True, kw_only=True):
    """The task's program trains something else on each replica, or each time, since `iteration`: none of the replicas
    is at fault. Each member reports it for itself.

    `sign` "unsteady", "unequal": of the gradients of one micro-batch that every replica has computed twice;
    "newcomer": the parameters of replicas that received their state in this generation differ from all others';
    "parameters": no majority has the same parameters. "environment": they compute on different things; the task goes
    on, whatever its `on_divergence`.
    """

    sign: DivergenceSign

    def sentence(self) -> str:
        """Say it in one sentence."""
        return f"task {self.task} has {divergence_text(self.iteration, self.sign)}"


def divergence_text(iteration: int, sign: DivergenceSign) -> str:
    """Say since when a program diverges, what was seen of it, and its likely cause: the same words everywhere."""
    if sign == "environment":
        return f"deviates since iteration {iteration}: {DIVERGENCES[sign]}"
    return f"diverged since iteration {iteration}: {DIVERGENCES[sign]}"
