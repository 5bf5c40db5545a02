"""Tells what is certain of noisy samples: their middle, its standard error, and whether it holds in each part of them.

Measured noise has heavier tails than normal noise, and neighbouring samples share some of it
(docs/results/benchmarks.md): hence so many standard errors, and the fewer samples, the more. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, median

#: Samples looked back upon -> standard errors, and in how many parts.
SURE = {20: (7.0, 4), 40: (4.5, 2)}
LONGEST = 40
#: Of normal noise: from a median distance to a deviation, and from that to the error of a mean of the middle half.
_TO_DEVIATION = 1.4826
_TO_ERROR = 1.09


def certain_middle(samples: Sequence[float], size: int, least: float) -> float | None:
    """Return the middle of the last `size` samples, if it is certainly above 0 and above `least`, and above half of
    that in each part of them; else None."""
    if len(samples) < size:
        return None
    recent = samples[-size:]
    value = middle(recent)
    errors, parts = SURE[size]
    if value <= least or min(medians_by_part(recent, parts)) <= least / 2:
        return None
    return value if value > errors * standard_error(samples, size) else None


def middle(samples: Sequence[float]) -> float:
    """Return the mean of the middle half: nearly as exact as a mean, nearly as robust as a median."""
    ranked, rest = sorted(samples), len(samples) // 4
    return fmean(ranked[rest : len(ranked) - rest])


def medians_by_part(samples: Sequence[float], parts: int) -> list[float]:
    """Return the median of each of so many parts of the samples, in their order."""
    length = len(samples) // parts
    return [median(samples[begin : begin + length]) for begin in range(0, length * parts, length)]


def standard_error(samples: Sequence[float], size: int) -> float:
    """Return the standard error of the middle of the last `size`. The noise is taken from all, by how much neighbours
    differ, so that a change does not count as noise; and from the last, in case it has grown."""
    neighbours = median(abs(previous - following) for previous, following in pairwise(samples)) / math.sqrt(2)
    recent = samples[-size:]
    centre = median(recent)
    deviation = _TO_DEVIATION * max(neighbours, median(abs(sample - centre) for sample in recent))
    return _TO_ERROR * deviation / math.sqrt(size)
