"""A survey that takes over from an earlier one says what a survey from nothing says."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tests.unicrond.stories import random_life, states_of
from tests.unicrond.test_decide import two_tasks
from unicrond.core.decide import decide, needed_solves
from unicrond.core.planning.solver import solve
from unicrond.core.rules.deadlines import deadlines
from unicrond.core.rules.survey import Survey
from unicrond.core.state.state import ClusterState
from unicrond.core.tasks.reconcile import Staffing, seat


def as_asked(staffing: Staffing) -> object:
    """What the rules ask of it: workers may be as they were at an earlier look."""
    replicas = (staffing.replicas, staffing.surplus, staffing.broken)
    seats = [{n: [(w.worker, seat(w)) for w in ws] for n, ws in one.items()} for one in replicas]
    return seats, staffing.missing, staffing.fits, staffing.starting


def answers(survey: Survey) -> dict[str, object]:
    solutions = {problem: solve(problem) for problem in needed_solves(survey)}
    return {
        "capacity": survey.capacity,
        "basis": survey.basis,
        "fresh": survey.fresh,
        "staffing": [as_asked(survey.staffing(task)) for task in survey.state.tasks.values()],
        "settled": [survey.settled(task) for task in survey.state.tasks.values()],
        "targets": [survey.targets(task) for task in survey.state.tasks.values()],
        "throughput": [survey.throughput(task) for task in survey.active],
        "problems": list(solutions),
        "deadlines": deadlines(survey),
        "decisions": decide(survey, solutions),
    }


@pytest.mark.parametrize("seed", range(12))
def test_incremental_survey_matches_new_survey(seed: int) -> None:
    cluster = two_tasks(seed)
    for _ in random_life(cluster, seed):
        pass
    survey: Survey | None = None
    states = [ClusterState(), *states_of(list(cluster.log))]
    for state in states[::3] + states[::-7]:  # of any state after any other
        survey = Survey(state, cluster.policy, survey)
        assert answers(survey) == answers(Survey(state, cluster.policy))


def test_survey_reuses_unchanged_answers() -> None:
    cluster = two_tasks(1)
    first = Survey(cluster.state, cluster.policy)
    before = [first.staffing(task) for task in first.active]
    cluster.train("big")
    after = Survey(cluster.state, cluster.policy, first)
    assert after.state is not first.state
    for one, other in pairwise([before, [after.staffing(task) for task in after.active]]):
        assert all(was is now for was, now in zip(one, other, strict=True))
