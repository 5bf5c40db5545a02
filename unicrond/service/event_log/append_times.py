"""Measures how long appends to the log take: a histogram for Prometheus, and whether they have become slow."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator
from itertools import accumulate
from statistics import median

from prometheus_client.core import HistogramMetricFamily, Metric

BOUNDS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
#: Appends count as slow by the median of at least RECENT_LEAST and at most RECENT_MOST of them, none older than
#: RECENT_S: a few that waited through an outage are no sign of a slow log.
RECENT_LEAST, RECENT_MOST, RECENT_S = 20, 100, 300.0


class AppendTimes:
    """The durations of this process's appends, from the call to the acknowledgement. `now_s`: a monotonic clock."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._counts = [0] * (len(BOUNDS_S) + 1)
        self._sum_s = 0.0
        self._recent: deque[tuple[float, float]] = deque(maxlen=RECENT_MOST)

    def took(self, seconds: float) -> None:
        """Record that an append was acknowledged after `seconds`."""
        self._counts[bisect_left(BOUNDS_S, seconds)] += 1
        self._sum_s += seconds
        self._recent.append((self._now_s(), seconds))

    def usual_s(self) -> float:
        """Return the median of the recent durations in seconds; 0 where there are too few."""
        since = self._now_s() - RECENT_S
        recent = [seconds for at_s, seconds in self._recent if at_s >= since]
        return median(recent) if len(recent) >= RECENT_LEAST else 0.0

    def metrics(self) -> Iterator[Metric]:
        """Yield the histogram for Prometheus."""
        bounds = [*(str(bound) for bound in BOUNDS_S), "+Inf"]
        buckets = list(zip(bounds, map(float, accumulate(self._counts)), strict=True))
        text = "Time until an append to the log is acknowledged"
        yield HistogramMetricFamily("unicron_log_append_seconds", text, buckets=buckets, sum_value=self._sum_s)
