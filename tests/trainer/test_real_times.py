"""Real clusters' times through the detector and the deal.

`real_times.json`: "AR", "SE", "ST" of ByteDance-Seed/StragglerAnalysis (OSDI '25, Apache-2.0): by step, stage and
replica the microseconds of a micro-batch's forward and backward; in AR one worker was slowed on purpose, in SE
sequences are unequal, in ST the last stage is long. "PAI 1", "PAI 3" of alibaba/clusterdata (gpu-v2020, CC BY 4.0): by
worker the normalised times of its mini-batches; in the first one worker has a burst, in the other some become slow.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from unicrond.agents.trainer.detection.stragglers import Stragglers
from unicrond.agents.trainer.lifecycle.deal import Dealing
from unicrond.agents.trainer.lifecycle.lanes import Lanes
from unicrond.agents.trainer.lifecycle.programme import ORDINARY, duration
from unicrond.agents.trainer.lifecycle.results import ReplicaWord

TIMES = json.loads(Path(__file__).with_name("real_times.json").read_text())
#: Micro-batches of a replica in a step.
EACH = {"AR": 32, "SE": 8, "ST": 4}
#: A mini-batch of PAI's longest time is made this long, so that each is a sample.
PAI_US = 1000


def named(rows: list[list[int]], each: int) -> dict[int, int]:
    """The replicas that are told to straggle, and at which step first. `rows`: by step, each replica's time."""
    stragglers, now_us, first = Stragglers(), 0, dict[int, int]()
    for step, row in enumerate(rows, 1):
        now_us += each * max(row)
        computed = {str(rank): (each * time_us, each) for rank, time_us in enumerate(row)}
        for finding in stragglers.add(step, now_us, computed):
            first.setdefault(int(finding.worker), step)
    return first


def named_by_stage(trace: str) -> dict[tuple[int, int], int]:
    """The workers that are told, as (stage, replica)."""
    stages = zip(*TIMES[trace], strict=True)
    return {
        (stage, replica): step
        for stage, rows in enumerate(stages)
        for replica, step in named(list(rows), EACH[trace]).items()
    }


def test_worker_slowed_on_purpose_is_named_alone() -> None:
    assert named_by_stage("AR") == {(0, 0): 23}


@pytest.mark.parametrize("trace", ["SE", "ST"])
def test_unequal_sequences_and_stages_name_nobody(trace: str) -> None:
    assert named_by_stage(trace) == {}


def pai(job: int) -> list[list[int]]:
    """By mini-batch, each worker's time."""
    return [[PAI_US * time for time in row] for row in zip(*TIMES[f"PAI {job}"], strict=False)]


def test_burst_is_no_straggler() -> None:
    """Worker 6's. Three others take 1.06 to 1.09 times as long for half of the time."""
    assert named(pai(1), 1) == {0: 23, 1: 35, 2: 57}


def test_workers_that_become_slow_are_named() -> None:
    """Four, from the 200th mini-batch on; two others are slower from the beginning."""
    first = named(pai(3), 1)
    assert {worker for worker, step in first.items() if step > 200} == {6, 7, 8, 9}
    assert {worker for worker, step in first.items() if step <= 200} == {0, 1}


def dealt(trace: str) -> tuple[tuple[int, ...], int]:
    """The last deal of a trace's replicas, each as slow as its slowest stage, and how often it was changed."""
    replicas, stages = len(TIMES[trace][0][0]), len(TIMES[trace][0])
    micro_batches, moves = EACH[trace] * replicas, 0
    dealing = Dealing(micro_batches, Lanes(micro_batches, replicas), stages - 1)
    dealing.begin([ORDINARY] * replicas)
    for step in TIMES[trace]:
        words = [ReplicaWord(False, max(times), dealing.proposed_number) for times in zip(*step, strict=True)]
        moves += dealing.add(words)
    return dealing.deal.counts, moves


def test_slowed_worker_is_dealt_what_is_best() -> None:
    """Within a hundredth of the shortest that whole micro-batches allow: 24.0 s of computation instead of 45.6."""
    counts, moves = dealt("AR")
    paces = [max(times) for times in zip(*TIMES["AR"][-1], strict=True)]
    best = min(duration((slow, *divided(128 - slow, 3)), paces) for slow in range(1, 65))
    assert moves == 1
    assert duration(counts, paces) <= 1.01 * best
    assert duration(counts, paces) < 0.53 * duration((32,) * 4, paces)


def divided(micro_batches: int, replicas: int) -> list[int]:
    return [micro_batches // replicas + (rank < micro_batches % replicas) for rank in range(replicas)]


@pytest.mark.parametrize("trace", ["SE", "ST"])
def test_replicas_that_are_alike_stay_dealt_evenly(trace: str) -> None:
    assert dealt(trace)[1] == 0
