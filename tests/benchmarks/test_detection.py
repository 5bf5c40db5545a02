"""Detection: how long until the log holds a fault, and what watching for it costs. Docs: docs/results/benchmarks.md."""

from __future__ import annotations

import asyncio

import pytest

from tests.benchmarks import detection_latency, detection_overhead

ROUNDS = 20
ITERATIONS = 1000


@pytest.mark.timeout(3600)
def test_detection_latency(capsys: pytest.CaptureFixture[str]) -> None:
    lines = asyncio.run(detection_latency.run(ROUNDS))
    with capsys.disabled():
        print("", *lines, sep="\n")


@pytest.mark.timeout(3600)
def test_detection_overhead(capsys: pytest.CaptureFixture[str]) -> None:
    lines = detection_overhead.run(ITERATIONS)
    with capsys.disabled():
        print("", *lines, sep="\n")
