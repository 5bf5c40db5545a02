"""Garbage programs in the evaluation's simulator: what they cost the tasks of others, in a morning."""

from __future__ import annotations

import pytest

from unicrond.replay.evaluation.model.traces import Trace
from unicrond.replay.evaluation.model.virtual_time import HOUR_US
from unicrond.replay.evaluation.model.workload import Cluster, Workload, six, workload
from unicrond.replay.evaluation.studies.programs import IMPATIENCE_S, program_day


@pytest.fixture(scope="module")
def sixteen() -> Workload:
    return workload(Cluster("a800-80g", 16), six())


@pytest.mark.parametrize("patience_s", [0.0, IMPATIENCE_S])
def test_garbage_programs_cost_others_no_more_than_idle_ones(sixteen: Workload, patience_s: float) -> None:
    day = program_day(sixteen, Trace("none", 16, 2 * HOUR_US, ()), users=3, patience_s=patience_s)
    assert day.submissions == (3 if not patience_s else 37)
    assert day.garbage >= 0.99 * day.idle
    assert day.garbage < day.alone == 1.0


def test_place_that_is_claimed_again_and_again_moves_nobody() -> None:
    """On 64 nodes what a failed program frees is worth little to anybody: two tasks moved for it, twice in ten minutes,
    and the others had 0.988 of the day with idle programs."""
    work = workload(Cluster("a800-80g", 64), six(2))
    day = program_day(work, Trace("none", 64, HOUR_US, ()), users=5, patience_s=IMPATIENCE_S)
    assert day.garbage >= 0.99 * day.idle


def test_patient_users_garbage_ends_as_soon_as_it_has_failed_twice(sixteen: Workload) -> None:
    day = program_day(sixteen, Trace("none", 16, 6 * HOUR_US, ()), users=3, patience_s=0.0)
    assert day.garbage > 0.98
