"""Deals an iteration's micro-batches by measured speed: which deal a group has, and when it gets another.

Rules
-----
* Each replica says in the agreement that ends an iteration what its slowest shard took for a micro-batch: by the clock,
  waits for a CPU or for data included, for the others wait for it whatever the reason. All ranks add the same rows.
* A sample is one iteration, or as many as make up SAMPLE_US; a group's first WARM_UP iterations do not count, nor does
  an iteration for which a replica gives no time: it computed no micro-batch, its hook is older, or its GPU has no
  memory for more gradient sums.
* The best deal by the speeds in the last 20 or 40 samples is the integer programme's (`programme.py`). It is proposed
  if in these samples it certainly would have been shorter than the present one (`certainty.py`) by more than GAIN; with
  lanes also where the waits for running sums are counted. So noise moves nothing, nor do replicas that are slow alike,
  nor a slow one whose micro-batches are too few to divide better.
* Speeds within NEAR hundredths of an ordinary replica's are that.
* A proposal is announced in the next agreement, as a number, and holds from the iteration after that if all announce
  the same: whatever differs on one rank (a version, a fraction), no two ranks compute by two deals.
* Then samples begin anew: a deal stands for 20 samples at least. Each replica goes on computing, so when it recovers
  the deal goes back by the same rule.
* Into a new group each member takes the factor by which it was dealt, and a newcomer that of an ordinary replica: that
  is the group's first deal, and by it a lost member's work is assigned too. With an older hook in the group all is
  even.

Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median, median_low

from unicrond.agents.trainer.lifecycle.certainty import LONGEST, SURE, certain_middle, middle
from unicrond.agents.trainer.lifecycle.lanes import Lanes
from unicrond.agents.trainer.lifecycle.micro_batch_assignment import initial_assignment, time_needed
from unicrond.agents.trainer.lifecycle.programme import ALIKE, ORDINARY, Speeds, best_counts, duration
from unicrond.agents.trainer.lifecycle.results import ReplicaWord

WARM_UP = 3
SAMPLE_US = 100_000
GAIN = 0.01
NEAR = 3
FACTOR_MAX = 4095
#: Judged at every so many samples; of many replicas more seldom, for it takes longer.
_EVERY, _REPLICAS_A_SAMPLE = 2, 32
#: A number above all that `Deal.number` gives.
_NUMBERS = (1 << 20) - 1


@dataclass(frozen=True, slots=True)
class Deal:
    """The number of micro-batches that each replica computes in an iteration, and the speeds by which they were dealt.
    `counts`: (): as the speeds say. `ordinary_us`: what an ordinary replica took for a micro-batch then, 0: unknown."""

    speeds: Speeds = ALIKE
    counts: tuple[int, ...] = ()
    ordinary_us: int = 0

    @property
    def number(self) -> int:
        """Return a number by which others know it, at least 1."""
        number = 0
        for value in (*self.counts, *self.speeds.factors):
            number = (number * 8191 + value + 1) % (_NUMBERS - 1)
        return number + 1


@dataclass(slots=True)
class Dealing:
    """The deals of one group, as each of its members knows them. `fill`: see `Speeds`; `least`: see `best_counts`.
    `deal`: by which iterations are computed from now on. `proposal`: what is to replace it. `is_open`: all members'
    hooks deal by speed."""

    micro_batches: int
    lanes: Lanes | None
    fill: int = 0
    least: int = 1
    deal: Deal = Deal()
    proposal: Deal | None = None
    is_open: bool = False
    _iterations: int = 0
    _sample_count: int = 0
    _samples: deque[tuple[float, ...]] = field(default_factory=lambda: deque(maxlen=LONGEST))
    #: Of each sample: how many times as long as the shortest deal of any fractions the present one was.
    _bounds: deque[float] = field(default_factory=lambda: deque(maxlen=min(SURE) // 2))
    _open_sample: list[tuple[int, ...]] = field(default_factory=list)
    _open_us: float = 0.0

    def begin(self, factors: Sequence[int]) -> None:
        """Begin in another group. `factors`: by rank, as its members say them; 0: of an older hook."""
        self.is_open, self.proposal, self._iterations = all(factors), None, 0
        speeds = Speeds(tuple(factors) if self.is_open else (ORDINARY,) * len(factors), self.fill)
        self.deal = Deal(speeds, best_counts(speeds.factors, self.micro_batches, least=self.least))
        self._forget()

    def factor(self, rank: int) -> int:
        """Return the factor by which the member is dealt."""
        return self.deal.speeds.factors[rank] if self.deal.speeds.factors else ORDINARY

    @property
    def proposed_number(self) -> int:
        """Return the number of what is proposed, 0 for nothing."""
        return 0 if self.proposal is None else self.proposal.number

    def add(self, words: Sequence[ReplicaWord]) -> bool:
        """Add an agreed iteration, of which each member says this. Return whether another deal holds from now on."""
        proposal, self.proposal = self.proposal, None
        if proposal is not None and {word.number for word in words} == {proposal.number}:
            self.deal = proposal
            self._forget()
            return True
        self._iterations += 1
        paces = tuple(word.pace_us for word in words)
        if self.is_open and len(paces) > 1 and self._iterations > WARM_UP and all(paces):
            self._collect(paces)
        return False

    def _forget(self) -> None:
        self._samples.clear()
        self._bounds.clear()
        self._open_sample, self._open_us, self._sample_count = [], 0.0, 0

    def _collect(self, paces: tuple[int, ...]) -> None:
        self._open_sample.append(paces)
        self._open_us += duration(self.deal.counts, paces)
        if self._open_us < SAMPLE_US:
            return
        sample = tuple(sum(column) / len(column) for column in zip(*self._open_sample, strict=True))
        self._samples.append(sample)
        self._bounds.append(duration(self.deal.counts, sample) * sum(1 / pace for pace in sample) / self.micro_batches)
        self._open_sample, self._open_us = [], 0.0
        self._sample_count += 1
        if not self._sample_count % max(_EVERY, len(paces) // _REPLICAS_A_SAMPLE) and median(self._bounds) > 1 + GAIN:
            self.proposal = self._judge()

    def _judge(self) -> Deal | None:
        """Return a deal that is certainly better than the present one, None for none."""
        samples, present = list(self._samples), self.deal.counts
        for size in SURE:
            if len(samples) < size:
                return None
            speeds = Speeds(factors_of(samples[-size:]), self.fill)
            ordinary_us = int(median(median_low(sample) for sample in samples[-size:]))
            counts = best_counts(speeds.factors, self.micro_batches, present, self.least)
            deal = Deal(speeds, counts, ordinary_us)
            if deal.counts == present:
                continue
            gains = [duration(present, sample) / duration(deal.counts, sample) - 1 for sample in samples]
            if certain_middle(gains, size, GAIN) is not None and self._gains_with_waits(deal):
                return deal
        return None

    def _gains_with_waits(self, deal: Deal) -> bool:
        """Return whether the deal is still better than the present counts where members wait for running sums."""
        if self.lanes is None:
            return True
        present, new = (
            time_needed(initial_assignment(len(counts), self.lanes, deal.speeds, counts).runs, deal.speeds)
            for counts in (self.deal.counts, deal.counts)
        )
        return present > (1 + GAIN) * new


def factors_of(samples: Sequence[Sequence[float]]) -> tuple[int, ...]:
    """Return, by rank, the middle of what each takes for a micro-batch, in hundredths of what an ordinary one takes.
    `samples`: of each, what each rank takes."""
    ordinary_paces = [median(sample) for sample in samples]
    relative = (
        [pace / ordinary for pace, ordinary in zip(paces, ordinary_paces, strict=True)]
        for paces in zip(*samples, strict=True)
    )
    middles = [middle(column) for column in relative]
    ordinary = median_low(middles)
    factors = (max(1, min(round(ORDINARY * value / ordinary), FACTOR_MAX)) for value in middles)
    return tuple(ORDINARY if abs(factor - ORDINARY) <= NEAR else factor for factor in factors)
