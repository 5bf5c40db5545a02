"""Detects stragglers: replicas that take longer per micro-batch than the others, by their own compute time.

Rules
-----
* In each iteration a replica's time is compared with the median of the others' in the same iteration: what slows all
  of them down cancels out. Its own past does not count, so a replica that was slow from the beginning is found too.
* A sample is one iteration, or as many as make up SAMPLE_US: a delay of part of a second does not make a straggler. The
  first WARM_UP iterations of a group do not count.
* A replica straggles if, over the last 20 or 40 samples, the middle of its factors is above SLOW, and above 1 by so
  many standard errors as SURE says: the fewer samples, the more. The error follows from the spread of the samples: on
  a noisy machine less is seen, and what is not certain is not reported. A burst does not make a straggler: the median
  of each quarter of 20 samples, of each half of 40, is above half of SLOW.
* It is reported once; again when the factor has changed by AGAIN, at the earliest after 40 samples more; and when it is
  over: when the middle of 40 samples is below OVER, and the median of both halves below SLOW.
* Since when: from the change point on, where the sum of what it was slower by, less half the usual, is largest, as far
  back as HISTORY samples.
* A new group compares anew. Of a reported straggler that is still there only a change is reported.
* With one replica there is nothing to compare with; `baseline.py` compares a task with its own past.

Pure: times come in, findings go out.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from unicrond.agents.trainer.lifecycle.certainty import (
    LONGEST,
    SURE,
    certain_middle,
    medians_by_part,
    middle,
    standard_error,
)

#: Iterations of a group that say nothing.
WARM_UP = 3
SAMPLE_US = 100_000
HISTORY = 120
SLOW = 1.05
OVER = 1.025
AGAIN = 1.2
#: Looked at in every so many samples.
_EVERY = 2
#: So many samples make up most of the moving average.
_LATELY = 10
#: A factor beyond this says that a replica did not compute.
_FACTOR_MAX = 1000.0


class StragglerFinding(NamedTuple):
    """A straggler. `worker` takes `factor` times as long as the others, since `since_us` (the clock of `add`), the
    beginning of iteration `since_iteration`. `own_us`, `others_us`: per micro-batch. `over`: it was one and is none any
    more."""

    worker: str
    factor: float
    own_us: int
    others_us: int
    since_iteration: int
    since_us: int
    over: bool = False


class _Sample(NamedTuple):
    lag: float
    others_us: float
    iteration: int
    at_us: int


@dataclass(slots=True)
class _History:
    """A replica's samples. `moving_average`: of its lags; a quick replica is recognised at once."""

    samples: deque[_Sample] = field(default_factory=lambda: deque(maxlen=HISTORY))
    moving_average: float = 0.0

    def add(self, sample: _Sample) -> None:
        """Add a sample, also to the moving average."""
        self.samples.append(sample)
        self.moving_average += (sample.lag - self.moving_average) / _LATELY


@dataclass(slots=True)
class _Report:
    factor: float
    since_iteration: int
    since_us: int
    #: Samples until it may be told again, or be over.
    rest: int = LONGEST


@dataclass(slots=True)
class _OpenSample:
    """A sample that is not complete."""

    iteration: int = 0
    began_us: int = 0
    own_us: dict[str, float] = field(default_factory=dict)
    micro_batches: dict[str, int] = field(default_factory=dict)


class Stragglers:
    """Detects the stragglers among the replicas of one shard; a replica is named by its worker."""

    def __init__(self) -> None:
        self._reports: dict[str, _Report] = {}
        self.regrouped()

    def regrouped(self) -> None:
        """Start anew, for another group."""
        self._histories: dict[str, _History] = {}
        self._iterations = 0
        self._sample_count = 0
        self._sum = _OpenSample()
        self._ended_us = 0

    def add(self, iteration: int, now_us: int, computed: Mapping[str, tuple[int, int]]) -> list[StragglerFinding]:
        """Add an iteration that has ended at `now_us`: per worker, microseconds and for how many micro-batches. Return
        what is to be reported."""
        began_us, self._ended_us = self._ended_us, now_us
        self._iterations += 1
        for worker in self._reports.keys() - computed.keys():
            del self._reports[worker]
        if self._iterations <= WARM_UP or len(computed) < 2:
            return []
        self._collect(iteration, began_us, computed)
        if now_us - self._sum.began_us < SAMPLE_US:
            return []
        self._close_sample()
        if self._sample_count % _EVERY:
            return []
        findings = [self._judge(worker, samples) for worker, samples in self._histories.items()]
        return [finding for finding in findings if finding is not None]

    def _collect(self, iteration: int, began_us: int, computed: Mapping[str, tuple[int, int]]) -> None:
        sample = self._sum
        if not sample.iteration:
            sample.iteration, sample.began_us = iteration, began_us
        for worker, (own_us, micro_batches) in computed.items():
            if own_us > 0 and micro_batches > 0:
                sample.own_us[worker] = sample.own_us.get(worker, 0.0) + own_us
                sample.micro_batches[worker] = sample.micro_batches.get(worker, 0) + micro_batches

    def _close_sample(self) -> None:
        """Close the open sample, and give it to the replicas' histories."""
        sample, self._sum = self._sum, _OpenSample()
        self._sample_count += 1
        times = {worker: own_us / sample.micro_batches[worker] for worker, own_us in sample.own_us.items()}
        if len(times) < 2:
            return
        ranked = sorted(times.values())
        for worker, own_us in times.items():
            others_us = _median_without(ranked, own_us)
            lag = math.log(min(max(own_us / others_us, 1 / _FACTOR_MAX), _FACTOR_MAX))
            samples = self._histories.setdefault(worker, _History())
            samples.add(_Sample(lag, others_us, sample.iteration, sample.began_us))

    def _judge(self, worker: str, history: _History) -> StragglerFinding | None:
        report, samples = self._reports.get(worker), history.samples
        if report is None and history.moving_average <= math.log(SLOW) / 2:
            return None
        lags = [sample.lag for sample in samples]
        if report is None:
            lag = next((lag for size in SURE if (lag := certain_middle(lags, size, math.log(SLOW))) is not None), None)
            if lag is None:
                return None
            since = samples[_change(lags, lag)]
            self._reports[worker] = report = _Report(math.exp(lag), since.iteration, since.at_us)
            return self._finding(worker, report, samples)
        report.rest -= _EVERY
        if report.rest > 0 or len(lags) < LONGEST:
            return None
        recent = lags[-LONGEST:]
        lag = middle(recent)
        if lag < math.log(OVER) and max(medians_by_part(recent, 2)) < math.log(SLOW):
            del self._reports[worker]
            report.factor = math.exp(lag)
            return self._finding(worker, report, samples, over=True)
        change = abs(lag - math.log(report.factor))
        if change > max(math.log(AGAIN), SURE[LONGEST][0] * standard_error(lags, LONGEST)) and lag > math.log(SLOW):
            report.factor, report.rest = math.exp(lag), LONGEST
            return self._finding(worker, report, samples)
        return None

    @staticmethod
    def _finding(worker: str, report: _Report, samples: deque[_Sample], *, over: bool = False) -> StragglerFinding:
        others_us = median([sample.others_us for sample in samples][-LONGEST:])
        own_us = int(others_us * report.factor)
        return StragglerFinding(
            worker, report.factor, own_us, int(others_us), report.since_iteration, report.since_us, over
        )


def _change(lags: Sequence[float], lag: float) -> int:
    """Return from which sample on the replica has been slow."""
    best, since, total = 0.0, len(lags) - 1, 0.0
    for place in range(len(lags) - 1, -1, -1):
        total += min(lags[place], 2 * lag) - lag / 2
        if total >= best:
            best, since = total, place
    return since


def _median_without(ranked: Sequence[float], value: float) -> float:
    """Return the median of all but one of the ranked values."""
    place = bisect_left(ranked, value)
    rest = len(ranked) - 1

    def at(number: int) -> float:
        """Return the value at this place, with the one left out."""
        return ranked[number if number < place else number + 1]

    return at(rest // 2) if rest % 2 else (at(rest // 2 - 1) + at(rest // 2)) / 2
