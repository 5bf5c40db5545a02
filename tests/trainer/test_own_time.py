"""A micro-batch's own time: work and sleep count, a wait for a CPU and what is declared apart do not."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from unicrond.agents.trainer.detection.own_time import ComputeTime

#: Work long enough that the looks at the clock do not show.
WORK_S = 0.05
#: By how much the thread's clock and its scheduler's, which is read here, may differ.
CLOCKS_US = 2_000


def work(for_s: float) -> None:
    """So much of this thread's own CPU time."""
    until_s = time.thread_time() + for_s
    while time.thread_time() < until_s:
        pass


def test_compute_time_counts_sleep_and_work() -> None:
    own = ComputeTime()
    own.begin()
    work(WORK_S)
    own.end(1)
    own.begin()
    time.sleep(WORK_S)
    own.end(2)
    assert own.micro_batches == 3
    assert own.compute_us >= 2 * WORK_S * 1e6 - CLOCKS_US
    own.clear()
    assert (own.compute_us, own.micro_batches) == (0, 0)


def test_compute_time_excludes_declared_section() -> None:
    own, began_s = ComputeTime(), time.monotonic()
    own.begin()
    with own.exclude():
        time.sleep(WORK_S)
    own.end(1)
    assert own.compute_us <= (time.monotonic() - began_s - WORK_S) * 1e6
    own.end(1)
    assert own.micro_batches == 1, "an end without a beginning is none"


def test_pace_is_by_the_clock_without_the_filling_of_pipelines() -> None:
    own = ComputeTime()
    assert own.pace_us(0) == 0
    for micro_batches in (3, 1):
        own.begin()
        time.sleep(WORK_S)
        own.end(micro_batches)
    assert own.clock_us >= 2 * WORK_S * 1e6 and own.clock_us >= own.compute_us
    assert own.pace_us(0) == own.clock_us // 4
    assert own.pace_us(1) == own.clock_us // (4 + 2), "two calls"


@pytest.mark.skipif(not Path("/proc/thread-self/schedstat").exists(), reason="the kernel does not tell")
def test_compute_time_excludes_cpu_wait() -> None:
    """Beside others on the same CPU, which take their share of it."""
    allowed = os.sched_getaffinity(0)
    busy = "print(flush=True)\nwhile True: pass"
    os.sched_setaffinity(0, {min(allowed)})
    others = [subprocess.Popen([sys.executable, "-c", busy], stdout=subprocess.PIPE) for _ in range(2)]
    try:
        for other in others:
            assert other.stdout is not None and other.stdout.readline()
        own, began_s = ComputeTime(), time.monotonic()
        own.begin()
        work(4 * WORK_S)
        own.end(1)
        wall_us = (time.monotonic() - began_s) * 1e6
    finally:
        os.sched_setaffinity(0, allowed)
        for other in others:
            other.kill()
            other.communicate()
    waited_us = wall_us - own.compute_us
    assert own.compute_us >= 4 * WORK_S * 1e6 * 0.99
    assert waited_us > own.compute_us / 2, "two others took two thirds"
