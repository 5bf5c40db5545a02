"""How many nodes to keep back: the numbers against a simulation of failures, and what pays."""

from __future__ import annotations

import math
import random

import pytest

from tests.unicrond.cluster import MiniCluster
from unicrond.core.spares import poisson, spares

DAY_S = 86_400


def cluster_of(nodes: int, **spec: object) -> MiniCluster:
    cluster = MiniCluster(1)
    for n in range(nodes):
        cluster.add_host(f"n{n}", slots=2)
    cluster.submit("big", **{"max_workers": 2 * nodes, **spec})
    cluster.run()
    return cluster


def test_where_each_node_adds_something_none_is_kept_back() -> None:
    cluster = cluster_of(6)
    told = spares(cluster.state, cluster.policy, DAY_S, mtbf_s=40 * DAY_S)
    assert (told.nodes, told.pay, told.node_mtbf_s) == (6, 0, 20 * DAY_S)
    assert told.away == pytest.approx(0.3)
    assert [row.waf for row in told.rows] == [told.rows[0].waf * n // 6 for n in range(6, 0, -1)]
    assert all(a.expected_waf > b.expected_waf for a, b in zip(told.rows, told.rows[1:], strict=False))
    some_away = 1 - math.exp(-0.3)
    assert told.next_node_waf == pytest.approx(some_away * told.rows[0].waf / 6, rel=1e-4), "the task may have no more"


def test_what_adds_nothing_waits() -> None:
    """Replicas of two nodes: the fifth node stands in for any that fails."""
    cluster = cluster_of(5, tp=2, pp=2, min_workers=4, max_workers=8)
    told = spares(cluster.state, cluster.policy, DAY_S, mtbf_s=40 * DAY_S)
    assert told.pay == 1
    assert told.rows[0].waf == told.rows[1].waf > told.rows[2].waf


def test_one_more_node_is_worth_its_share() -> None:
    cluster = cluster_of(4, max_workers=20)
    told = spares(cluster.state, cluster.policy, 1, mtbf_s=1e12)
    assert told.next_node_waf == pytest.approx(told.rows[0].waf / 4, rel=1e-3)


def test_it_is_what_failures_and_repairs_come_to() -> None:
    """Nodes that fail and are repaired, drawn one by one, against the average over the distribution."""
    cluster = cluster_of(5, tp=2, pp=2, min_workers=4, max_workers=8)
    told = spares(cluster.state, cluster.policy, DAY_S, mtbf_s=10 * DAY_S)
    draw, kept = random.Random(7), 1
    rate = 4 * 2 / (10 * DAY_S)
    time_s, back, achieved, covered, whole = 0.0, [], 0.0, 0.0, [0, 0, 1, 1, 2]
    while time_s < 40_000 * DAY_S:
        step = draw.expovariate(rate)
        while back and back[0] < time_s + step:
            until = back.pop(0)
            training = min(4, 5 - len(back) - 1)
            achieved += (until - time_s) * whole[max(0, training)]
            covered += (until - time_s) * (len(back) + 1 <= kept)
            step -= until - time_s
            time_s = until
        achieved += step * whole[max(0, min(4, 5 - len(back)))]
        covered += step * (len(back) <= kept)
        time_s += step
        back.append(time_s + DAY_S)
    row = told.rows[kept]
    assert row.expected_waf / told.rows[0].waf == pytest.approx(achieved / time_s / 2, rel=0.01)
    assert row.covered == pytest.approx(covered / time_s, rel=0.01)


@pytest.mark.parametrize("mean", [0.0, 1e-9, 0.3, 4.0, 50.0])
def test_shares_come_to_one(mean: float) -> None:
    shares = poisson(mean, 10)
    assert len(shares) == 11 and sum(shares) == pytest.approx(1.0) and min(shares) >= 0
    if mean <= 0.3:
        assert sum(count * share for count, share in enumerate(shares)) == pytest.approx(mean, abs=1e-4)


def test_where_most_nodes_would_be_away_there_is_no_answer() -> None:
    cluster = cluster_of(2)
    told = "mtbf_s: a node would fail once in 12 h and be away for 24 h, so most nodes would be away"
    with pytest.raises(ValueError, match=told):
        spares(cluster.state, cluster.policy, DAY_S, mtbf_s=DAY_S)


def test_no_nodes_is_said() -> None:
    cluster = MiniCluster(1)
    with pytest.raises(ValueError, match="there are no nodes yet"):
        spares(cluster.state, cluster.policy, DAY_S)
