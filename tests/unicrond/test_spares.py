"""How many nodes to keep back: the numbers against a simulation of failures, and what pays."""

from __future__ import annotations

import math
import random
from argparse import Namespace

import pytest
from msgspec import to_builtins
from msgspec.structs import replace

from tests.unicrond.cluster import MiniCluster
from tests.unicrond.test_gpu_types import FAST, SLOW, with_task
from tests.unicrond.test_gpu_types import cluster_of as types_of
from unicrond.core.planning.problem import Problem
from unicrond.core.rules.plan_problems import healthy_problem_of
from unicrond.core.rules.survey import Survey
from unicrond.ctl.plan import plan_spares
from unicrond.events import vocabulary as v
from unicrond.views.spares import PLANS_MAX, Spares, TypeSpares, poisson, spares

DAY_S = 86_400


def cluster_of(nodes: int, **spec: object) -> MiniCluster:
    cluster = MiniCluster(1)
    for n in range(nodes):
        cluster.add_host(f"n{n}", slots=2)
    cluster.submit("big", **{"max_workers": 2 * nodes, **spec})
    cluster.run()
    return cluster


def only(told: Spares) -> TypeSpares:
    (one,) = told.types
    return one


def test_spares_recommend_none_if_each_node_adds_throughput() -> None:
    cluster = cluster_of(6)
    told = only(spares(cluster.state, cluster.policy, DAY_S, mtbf_s=40 * DAY_S))
    assert (told.nodes, told.pay, told.node_mtbf_s) == (6, 0, 20 * DAY_S)
    assert told.away == pytest.approx(0.3)
    assert [row.waf for row in told.rows] == [told.rows[0].waf * n // 6 for n in range(6, 0, -1)]
    assert all(a.expected_waf > b.expected_waf for a, b in zip(told.rows, told.rows[1:], strict=False))
    some_away = 1 - math.exp(-0.3)
    assert told.next_node_waf == pytest.approx(some_away * told.rows[0].waf / 6, rel=1e-4), "the task may have no more"


def test_spares_recommend_node_that_adds_nothing() -> None:
    """Replicas of two nodes: the fifth node stands in for any that fails."""
    cluster = cluster_of(5, tp=2, pp=2, min_workers=4, max_workers=8)
    told = only(spares(cluster.state, cluster.policy, DAY_S, mtbf_s=40 * DAY_S))
    assert told.pay == 1
    assert told.rows[0].waf == told.rows[1].waf > told.rows[2].waf


def test_next_node_is_worth_its_share() -> None:
    cluster = cluster_of(4, max_workers=20)
    told = only(spares(cluster.state, cluster.policy, 1, mtbf_s=1e12))
    assert told.next_node_waf == pytest.approx(told.rows[0].waf / 4, rel=1e-3)


def test_spares_match_simulated_failures() -> None:
    """Nodes that fail and are repaired, drawn one by one, against the average over the distribution."""
    cluster = cluster_of(5, tp=2, pp=2, min_workers=4, max_workers=8)
    told = only(spares(cluster.state, cluster.policy, DAY_S, mtbf_s=10 * DAY_S))
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
def test_poisson_shares_sum_to_one(mean: float) -> None:
    shares = poisson(mean, 10)
    assert len(shares) == 11 and sum(shares) == pytest.approx(1.0) and min(shares) >= 0
    if mean <= 0.3:
        assert sum(count * share for count, share in enumerate(shares)) == pytest.approx(mean, abs=1e-4)


def test_spares_refuse_case_with_most_nodes_absent() -> None:
    cluster = cluster_of(2)
    told = "mtbf_s: a node would fail once in 12 h and be away for 24 h, so most nodes would be away"
    with pytest.raises(ValueError, match=told):
        spares(cluster.state, cluster.policy, DAY_S, mtbf_s=DAY_S)


def test_spares_refuse_empty_cluster() -> None:
    cluster = MiniCluster(1)
    with pytest.raises(ValueError, match="there are no nodes yet"):
        spares(cluster.state, cluster.policy, DAY_S)


def two_types(slow: int, fast: int) -> MiniCluster:
    """`big` in replicas of two fast nodes; `small` on the slow ones, of which each adds something."""
    cluster = MiniCluster(1)
    for gpu, nodes in ((SLOW, slow), (FAST, fast)):
        for n in range(nodes):
            cluster.add_host(f"{gpu[:1]}{n}", slots=2, gpu=gpu)
    most = 2 * max(slow, fast)
    none = v.LayoutSpec(throughput=dict.fromkeys(map(str, range(4, most + 1, 4)), 0))
    only_slow = v.LayoutSpec(throughput=dict.fromkeys(map(str, range(1, most + 1)), 0))
    line = {str(n): 100 * n for n in range(1, most + 1)}
    cluster.submit(
        "big",
        tp=2,
        pp=2,
        min_workers=4,
        max_workers=most // 4 * 4,
        throughput={str(n): 100 * n for n in range(4, most + 1, 4)},
        gpus=(v.GpuSpec(gpu=SLOW, layouts=(replace(none, tp=2, pp=2),)),),
    )
    cluster.submit("small", max_workers=most, throughput=line, gpus=(v.GpuSpec(gpu=FAST, layouts=(only_slow,)),))
    cluster.run()
    return cluster


def test_spares_count_per_gpu_type() -> None:
    """The fifth fast node stands in for any of them; each slow one trains."""
    cluster = two_types(4, 5)
    told = spares(cluster.state, cluster.policy, DAY_S, mtbf_s=40 * DAY_S)
    slow, fast = told.types
    assert (slow.gpu, slow.nodes, slow.pay, fast.gpu, fast.nodes, fast.pay) == (SLOW, 4, 0, FAST, 5, 1)
    assert slow.rows[0].waf == fast.rows[0].waf == 800 + 800, "all nodes of the other type are there"
    assert [row.waf for row in slow.rows] == [1600, 1400, 1200, 1000]
    assert [row.waf for row in fast.rows] == [1600, 1600, 1200, 1200, 800]
    assert slow.time_share == fast.time_share == 1.0
    # one slow node more: small may have no more than 10 workers, and it is there for 9 of 10
    whole = poisson(4 * 2 / 40, 4)
    assert slow.rows[0].expected_waf == round(sum(share * (1600 - 200 * away) for away, share in enumerate(whole)))
    away = poisson(4 * 2 / 40, 5)
    expected = sum(share * (1600 if count <= 1 else 1200 if count <= 3 else 800) for count, share in enumerate(away))
    assert fast.rows[1].expected_waf == round(expected)


def test_spares_keep_type_without_remaining_node() -> None:
    """A task that must have the same bits does not go over to the other type where the last node is away."""
    cluster = with_task(types_of(1, 2, 1), env={v.DETERMINISTIC: "require"})
    (fast,) = (one for one in spares(cluster.state, cluster.policy, DAY_S, mtbf_s=10 * DAY_S).types if one.gpu == FAST)
    assert [row.waf for row in fast.rows] == [600]
    assert fast.rows[0].expected_waf == round(600 * poisson(0.2, 1)[0])


def test_spares_bound_number_of_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = two_types(40, 40)
    asked: list[int] = []

    def counted(survey: Survey) -> Problem:
        asked.append(1)
        return healthy_problem_of(survey)

    monkeypatch.setattr("unicrond.views.spares.healthy_problem_of", counted)
    told = spares(cluster.state, cluster.policy, DAY_S, mtbf_s=6 * DAY_S)
    assert len(asked) <= PLANS_MAX
    assert all(one.away > 13 and len(one.rows) == 7 and 0.8 < one.time_share < 1 for one in told.types)
    asked.clear()
    spares(cluster.state, cluster.policy, DAY_S, mtbf_s=400 * DAY_S)
    assert len(asked) <= PLANS_MAX


def test_spares_print_table_per_type(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = two_types(4, 5)

    class Asked:
        def plan_spares(self, repair_s: int, mtbf_s: int) -> object:
            return to_builtins(spares(cluster.state, cluster.policy, repair_s, mtbf_s))

    monkeypatch.setattr("unicrond.ctl.plan._planner", lambda _: Asked())
    plan_spares(Namespace(repair_s=DAY_S, mtbf_s=40 * DAY_S, json=False))
    slow, fast = capsys.readouterr().out.split("\n\nnodes of ")
    assert slow.startswith(f"nodes of {SLOW}:\n") and "no spare pays" in slow and "0*" in slow
    assert fast.startswith(f"{FAST}:\n") and "to keep back 1 node brings" in fast and "1*" in fast
