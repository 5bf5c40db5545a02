"""The state of the log: its size, its age, its copy in the archive, the room on the disks; in numbers, and as alarms.

A figure is what the last look gave; None where nothing is known yet. The alarms are pure.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from itertools import accumulate
from statistics import median
from typing import Any, NamedTuple

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from unicrond.core.state.alarms import Alarm
from unicrond.intake.config import LogConfig

GIB = 2**30
DAY_S = 86_400.0
#: With so much room there is no alarm, however large the volume.
FREE_ENOUGH_BYTES = 10 * GIB
#: The archive is behind once an entry has waited for it so many times longer than it should.
BEHIND_LAGS = 5
#: So many moments are remembered while the archive is behind.
_MARKS_MAX = 1000


class LogVolume(NamedTuple):
    """A volume that the log needs. `name`: "state" or "archive"."""

    name: str
    path: str
    free_bytes: int
    size_bytes: int


class Stream(NamedTuple):
    """The event stream in NATS. `oldest_s`: the age of its oldest entry, 0 for none."""

    size_bytes: int
    entries: int
    first_seq: int
    oldest_s: float


class Figures(msgspec.Struct):
    """All that is known of the log. `behind_entries`: those that the archive lacks of what was folded; `behind_s`: how
    long the first of them has waited. `failure`, `trim_failure`: of the last attempt, in one line; "" where it
    succeeded."""

    stream: Stream | None = None
    disks: Sequence[LogVolume] = ()
    archived_seq: int = 0
    behind_entries: int = 0
    behind_s: float = 0.0
    archived_beats: int = 0
    removed: int = 0
    failures: int = 0
    failure: str = ""
    trim_failure: str = ""
    append_s: float = 0.0


def stream_of(info: dict[str, Any]) -> Stream:
    """Return the figures in an answer of STREAM.INFO."""
    state = info["state"]
    entries = int(state["messages"])
    now, first = datetime.fromisoformat(info["ts"]), datetime.fromisoformat(state["first_ts"])
    oldest_s = (now - first).total_seconds() if entries else 0.0
    return Stream(int(state["bytes"]), entries, int(state["first_seq"]), max(0.0, oldest_s))


def slack_s(keep_s: float) -> float:
    """Return how much older than `keep_s` an entry may become before a trim removes it: trims are rare, and large."""
    return min(max(keep_s / 10, 3600.0), DAY_S)


def alarms(figures: Figures, config: LogConfig, keep_s: float | None) -> list[Alarm]:
    """Return what a person has to look at. `keep_s`: what the head trims to; None: it does not trim."""
    lines: list[Alarm] = []
    stream = figures.stream
    if config.archive_lag_s and figures.behind_s > BEHIND_LAGS * config.archive_lag_s:
        begin = figures.archived_seq + 1
        text = (
            f"the archive is behind: it lacks entries {begin} to {begin + figures.behind_entries - 1}, the first for "
            f"{figures.behind_s:.0f} s"
        )
        lines.append(Alarm("archive-behind", f"{text}: {figures.failure}" if figures.failure else text))
    if stream is not None and stream.size_bytes > config.alarm_gib * GIB:
        size = f"{stream.size_bytes / GIB:.1f} GiB"
        text = f"the log holds {size} in NATS, more than log.alarm_gib ({config.alarm_gib:g})"
        lines.append(Alarm("log-large", text))
    if figures.trim_failure:
        lines.append(Alarm("log-untrimmed", f"older entries are not removed from NATS: {figures.trim_failure}"))
    elif stream is not None and keep_s is not None and stream.oldest_s > keep_s + 2 * slack_s(keep_s):
        age = f"the oldest is {stream.oldest_s / DAY_S:.1f} days old, log.keep_d is {keep_s / DAY_S:g}"
        lines.append(Alarm("log-untrimmed", f"older entries are not removed from NATS: {age}"))
    lines += [
        Alarm(
            "volume-full",
            f"the volume of {disk.path} has {disk.free_bytes / GIB:.1f} GiB free of {disk.size_bytes / GIB:.1f}",
            disk.name,
        )
        for disk in figures.disks
        if disk.free_bytes < min(config.alarm_free * disk.size_bytes, FREE_ENOUGH_BYTES)
    ]
    if figures.append_s > config.alarm_append_s:
        text = f"appends to the log take {figures.append_s:.2f} s, more than log.alarm_append_s"
        lines.append(Alarm("appends-slow", text))
    return lines


def metrics(figures: Figures) -> Iterator[Metric]:
    """Yield the figures for Prometheus."""
    stream = figures.stream
    if stream is not None:
        yield GaugeMetricFamily("unicron_log_bytes", "Bytes of the event stream in NATS", stream.size_bytes)
        yield GaugeMetricFamily("unicron_log_entries", "Entries of the event stream in NATS", stream.entries)
        yield GaugeMetricFamily("unicron_log_oldest_seconds", "Age of the oldest of them", stream.oldest_s)
    yield GaugeMetricFamily("unicron_log_archived_sequence", "Last entry in the archive", figures.archived_seq)
    text = "Entries that were folded and are not in the archive"
    yield GaugeMetricFamily("unicron_log_archive_behind_entries", text, figures.behind_entries)
    text = "How long the first of them has waited"
    yield GaugeMetricFamily("unicron_log_archive_behind_seconds", text, figures.behind_s)
    text = "Heartbeats kept in the archive as evidence"
    yield CounterMetricFamily("unicron_log_archived_beats", text, figures.archived_beats)
    yield CounterMetricFamily("unicron_log_removed", "Archived entries removed from NATS", figures.removed)
    yield CounterMetricFamily("unicron_log_archive_failures", "Failed attempts to archive or trim", figures.failures)
    free = GaugeMetricFamily("unicron_disk_free_bytes", "Free room on the volumes of the log", labels=["volume"])
    size = GaugeMetricFamily("unicron_disk_size_bytes", "Size of the volumes of the log", labels=["volume"])
    for disk in figures.disks:
        free.add_metric([disk.name], disk.free_bytes)
        size.add_metric([disk.name], disk.size_bytes)
    yield from (free, size)


BOUNDS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
#: Appends count as slow by the median of at least RECENT_LEAST and at most RECENT_MOST of them, none older than
#: RECENT_S: a few that waited through an outage are no sign of a slow log.
RECENT_LEAST, RECENT_MOST, RECENT_S = 20, 100, 300.0


class ArchiveLag:
    """Measures how long the first entry that was folded and is not in the archive has waited for it."""

    def __init__(self) -> None:
        #: Which entry was folded at which moment, as looks have found it; those that the archive lacks.
        self._marks: deque[tuple[int, float]] = deque()

    def look(self, folded_seq: int, archived_seq: int, now_s: float) -> None:
        """Take in what is folded and what is archived at this moment."""
        if folded_seq > (self._marks[-1][0] if self._marks else 0):
            if len(self._marks) == _MARKS_MAX:
                self._marks.pop()  # the first is what counts
            self._marks.append((folded_seq, now_s))
        while self._marks and self._marks[0][0] <= archived_seq:
            self._marks.popleft()

    def seconds(self, now_s: float) -> float:
        """Return how long the first entry has waited; 0 where the archive lacks none."""
        return now_s - self._marks[0][1] if self._marks else 0.0


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
