"""How long things may take, as data."""

from __future__ import annotations

import pytest

from tests.unicrond.cluster import MiniCluster
from unicrond.core.rules.deadlines import deadlines
from unicrond.core.rules.survey import Survey
from unicrond.core.state.policy import Policy


@pytest.mark.parametrize(("of_the_task", "length_s"), [(None, 120), (600.0, 600), (5, 5)])
def test_task_sets_start_timeout_of_its_workers(of_the_task: float | None, length_s: int) -> None:
    cluster = MiniCluster(1)
    cluster.add_host("n0")
    cluster.submit("big", start_timeout_s=of_the_task)
    while not cluster.state.tasks.get("big") or not cluster.state.tasks["big"].workers:
        for move in cluster.moves():
            move()
    assert deadlines(Survey(cluster.state, Policy()))["start:big.1"] == length_s * 1_000_000
