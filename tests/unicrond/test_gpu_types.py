"""Nodes with GPUs of several types: a task is on one, and what it achieves on one says nothing of another."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.unicrond.cluster import MiniCluster
from tests.unicrond.test_layouts import lose
from unicrond.core.nodes.gpu_types import node_types, on_type, spec_on
from unicrond.core.planning.multi_type_lookahead import fill
from unicrond.core.planning.situation import NodeArrival, NodeLoss, TaskEnd
from unicrond.core.planning.solver import solve
from unicrond.core.planning.table import Planner
from unicrond.core.rules.plan_problems import healthy_problem_of, problem_of, situation_of
from unicrond.core.rules.survey import Survey
from unicrond.core.state.policy import Policy
from unicrond.core.worth.waf import throughput
from unicrond.ctl import plan as plan_show
from unicrond.display.cluster_tables import nodes_table, plan_table
from unicrond.display.plan_explanation import gap_text
from unicrond.events import vocabulary as v
from unicrond.replay.simulation.checks.invariants import types_stay_apart
from unicrond.views.plan_preview import foreseen
from unicrond.views.what_if import ClusterChanges, what_if

SEEDS = range(8)
SLOW, FAST = "a100-80g", "h100-80g"


def faster(times: int, most: int = 4) -> tuple[v.GpuSpec, ...]:
    """T: 100 FLOP/s a worker on the slow type, so many times that on the fast one."""
    tables = [{str(n): 100 * n * factor for n in range(1, most + 1)} for factor in (1, times)]
    layouts = [(v.LayoutSpec(throughput=table),) for table in tables]
    return tuple(v.GpuSpec(gpu=gpu, layouts=layout) for gpu, layout in zip((SLOW, FAST), layouts, strict=True))


def cluster_of(seed: int, slow: int, fast: int, *, policy: Policy | None = None) -> MiniCluster:
    """So many nodes of each type, with two slots each."""
    cluster = MiniCluster(seed, policy)
    for n in range(slow):
        cluster.add_host(f"slow{n}", slots=2, gpu=SLOW)
    for n in range(fast):
        cluster.add_host(f"fast{n}", slots=2, gpu=FAST)
    cluster.run()
    return cluster


def with_task(cluster: MiniCluster, name: str = "big", times: int = 3, **spec: object) -> MiniCluster:
    cluster.submit(name, **{"min_workers": 1, "max_workers": 4, "gpus": faster(times), **spec})
    cluster.run()
    cluster.assert_whole()
    cluster.train(name, steps=5)
    return cluster


def where(cluster: MiniCluster, task: str = "big") -> tuple[set[str], int]:
    """The types that its group is on, and its size."""
    membership = cluster.state.tasks[task].membership
    assert membership is not None
    return {cluster.hosts[member.node].gpu for member in membership.members}, len(membership.members)


@pytest.mark.parametrize("seed", SEEDS)
def test_loss_of_fast_node_keeps_task_on_fast_type(seed: int) -> None:
    """Half as many of the fast ones are still better than all of the slow."""
    cluster = with_task(cluster_of(seed, 2, 2))
    assert where(cluster) == ({FAST}, 4)
    lose(cluster, "fast0")
    cluster.run()
    cluster.assert_whole()
    assert where(cluster) == ({FAST}, 2)


@pytest.mark.parametrize("seed", SEEDS)
def test_loss_of_last_fast_node_moves_task_to_slow_type_and_back(seed: int) -> None:
    """The task goes on with the other type, and back when the node is."""
    cluster = with_task(cluster_of(seed, 2, 1))
    assert where(cluster) == ({FAST}, 2)
    lose(cluster, "fast0")
    cluster.run()
    cluster.assert_whole()
    assert where(cluster) == ({SLOW}, 4)
    assert "big 2 -> 4 (faulty)" not in cluster.state.plan.reason
    cluster.train("big", steps=5)
    cluster.add_host("fast0")
    cluster.run()
    cluster.assert_whole()
    assert where(cluster) == ({FAST}, 2)


@pytest.mark.parametrize("seed", SEEDS)
def test_plan_prefers_slow_type_over_too_few_fast_gpus(seed: int) -> None:
    """1.5 times as fast, and half as many left."""
    cluster = MiniCluster(seed)
    for n, gpu in enumerate((SLOW, SLOW, FAST, FAST)):
        cluster.add_host(f"n{n}", slots=2, gpu=gpu)
    tables = {SLOW: {"2": 200, "4": 400}, FAST: {"2": 300, "4": 600}}
    gpus = tuple(v.GpuSpec(gpu=g, layouts=(v.LayoutSpec(throughput=t),)) for g, t in tables.items())
    with_task(cluster, gpus=gpus)
    assert where(cluster) == ({FAST}, 4)
    lose(cluster, "n3")
    cluster.run()
    cluster.assert_whole()
    assert where(cluster) == ({SLOW}, 4)


def test_plan_gives_no_workers_on_type_with_zero_throughput() -> None:
    """Not even to meet its floor: it may find no memory there. Nor where that type is the only one left."""
    nothing = v.GpuSpec(gpu=SLOW, layouts=(v.LayoutSpec(throughput={"1": 0, "4": 0}),))
    cluster = with_task(cluster_of(1, 2, 1), gpus=(nothing, faster(3)[1]))
    assert where(cluster) == ({FAST}, 2)
    lose(cluster, "fast0")
    cluster.run()
    plan = cluster.state.plan
    assert plan.assignments["big"].workers == 0 and plan.healthy_gpus == {"big": FAST}
    assert "floor unmet: big" in plan.reason
    forgotten = {name: node for name, node in cluster.state.nodes.items() if name != "fast0"}
    survey = Survey(replace(cluster.state, nodes=forgotten), cluster.policy)
    assert not survey.types and solve(problem_of(survey)).workers == (0,)


def test_plan_meets_floor_on_only_remaining_type() -> None:
    needs_two = v.GpuSpec(gpu=SLOW, layouts=(v.LayoutSpec(throughput={"1": 0, "2": 200, "4": 400}),))
    cluster = with_task(cluster_of(1, 1, 0), gpus=(needs_two, faster(3)[1]))
    assert where(cluster) == ({SLOW}, 2)
    (asked,) = problem_of(Survey(cluster.state, cluster.policy)).tasks
    assert asked.floor == 2


def test_deterministic_task_stays_on_its_type() -> None:
    """Its workers would end with an error on any other (`deterministic: require`)."""
    cluster = with_task(cluster_of(1, 2, 1), env={v.DETERMINISTIC: "require"})
    assert where(cluster) == ({FAST}, 2)
    lose(cluster, "fast0")
    cluster.run()
    assert cluster.state.plan.assignments["big"].workers == 0
    cluster.add_host("fast0")
    cluster.run()
    cluster.assert_whole()
    assert where(cluster) == ({FAST}, 2)


def test_single_type_leaves_problem_unchanged() -> None:
    """The very problem of a cluster that tells none."""
    problems = []
    for gpu in ("", FAST):
        cluster = MiniCluster(1)
        for n in range(3):
            cluster.add_host(f"n{n}", slots=2, gpu=gpu)
        cluster.submit("big", max_workers=4)
        cluster.run()
        survey = Survey(cluster.state, cluster.policy)
        problems.append((problem_of(survey), healthy_problem_of(survey), survey.basis, cluster.state.plan.assignments))
    assert problems[0] == problems[1]
    assert problems[0][0].pools == ()


def test_rolling_upgrade_makes_no_second_type() -> None:
    """Nodes that tell none count as the only one that is told."""
    cluster = cluster_of(1, 0, 0)
    for n in range(3):
        cluster.add_host(f"n{n}", slots=2)
    with_task(cluster)
    epoch = cluster.state.plan.epoch
    for n in range(3):
        cluster.add_host(f"n{n}", gpu=FAST)
        cluster.run()
        assert Survey(cluster.state, cluster.policy).types == ()
        assert cluster.state.plan.epoch == epoch
    assert node_types(cluster.state.nodes.values()) == (FAST, {})


def test_node_with_other_gpus_triggers_new_plan() -> None:
    cluster = with_task(cluster_of(1, 2, 1))
    cluster.add_host("slow0", gpu=FAST)
    cluster.run()
    cluster.assert_whole()
    assert where(cluster) == ({FAST}, 4)


def test_measurement_stays_with_its_type() -> None:
    cluster = with_task(cluster_of(2, 2, 1))
    task = cluster.state.tasks["big"]
    cluster.append(
        v.ThroughputCorrected(task="big", workers=2, flops=900, iteration_us=1, reports=9, reason="test"),
        "coordinator",
        cluster.state.term,
    )
    task = cluster.state.tasks["big"]
    assert task.pace.gpu == FAST
    assert throughput(task)(2) == 900
    assert throughput(on_type(task, SLOW))(2) == 200
    lose(cluster, "fast0")
    cluster.run()
    task = cluster.state.tasks["big"]
    assert (task.pace.gpu, task.pace.measurements) == (SLOW, {})
    assert throughput(task)(2) == 200
    assert throughput(on_type(task, FAST))(2) == 900
    assert on_type(on_type(task, FAST), SLOW) == task


def test_measurement_without_type_belongs_to_first_type() -> None:
    cluster = with_task(cluster_of(2, 1, 0))
    task = cluster.state.tasks["big"]
    pace = replace(task.pace, gpu="", measurements={"2": 7})
    told = on_type(replace(task, pace=pace), FAST)
    assert (told.pace.gpu, told.pace.measurements) == (FAST, {"2": 7})
    assert on_type(told, SLOW).pace.measurements == {}


def test_layouts_keep_tables_of_each_type() -> None:
    one, two = v.LayoutSpec(tp=1, throughput={"1": 5}), v.LayoutSpec(tp=2, throughput={"2": 20})
    spec = v.TaskSpec(name="t", throughput={"1": 1}, layouts=(one, two), gpus=(v.GpuSpec(gpu=FAST, layouts=(two,)),))
    there = spec_on(spec, FAST)
    assert there.throughput == {"1": 1}  # not named: as everywhere
    assert there.layouts == (one, two)
    assert spec_on(spec, SLOW) is spec


def test_micro_batches_have_own_tables_of_each_type() -> None:
    def spec(*layouts: v.LayoutSpec) -> v.TaskSpec:
        told = [v.LayoutSpec(throughput={"1": 1}), v.LayoutSpec(micro_batch=2, throughput={"1": 2})]
        gpus = (v.GpuSpec(gpu=FAST, layouts=tuple(told)),)
        return v.TaskSpec(name="big", micro_batch=2, layouts=layouts, gpus=gpus)

    of_each = spec_on(spec(v.LayoutSpec(micro_batch=2), v.LayoutSpec(micro_batch=4)), FAST).layouts
    assert [one.throughput for one in of_each] == [{"1": 2}, {"1": 1}]
    assert spec_on(spec(), FAST).throughput == {"1": 2}, "as where a person has asked for its layout"


def test_foresight_matches_problem_of_each_event() -> None:
    """Of every next event: the problem, with its pools, and so the plan."""
    for seed in SEEDS:
        cluster = with_task(with_task(cluster_of(seed, 2, 2)), "other", times=2)
        before = situation_of(Survey(cluster.state, cluster.policy))
        assert before is not None
        assert before.gpus == (SLOW, FAST)
        lose(cluster, "fast1")
        survey = Survey(cluster.state, cluster.policy)
        assert before.after(NodeLoss("fast1")) == problem_of(survey)
        assert [pool.workers for pool in problem_of(survey).pools] == [4, 2]
        cluster.run()
        before = situation_of(Survey(cluster.state, cluster.policy))
        assert before is not None
        cluster.add_host("fast2", slots=2, gpu=FAST)
        assert before.after(NodeArrival(2, FAST)) == problem_of(Survey(cluster.state, cluster.policy))
        cluster.run()
        before = situation_of(Survey(cluster.state, cluster.policy))
        assert before is not None
        cluster.append(v.TaskCancelled(task="other", reason="test"), "api", cluster.state.term)
        asked = problem_of(Survey(cluster.state, cluster.policy))
        assert before.after(TaskEnd("other")) == asked
        assert Planner().answer(asked).solution == solve(asked)


def test_plan_table_and_nodes_table_name_gpu_type() -> None:
    cluster = with_task(cluster_of(3, 2, 1))
    situation = situation_of(Survey(cluster.state, cluster.policy))
    assert situation is not None
    rows = {(row.event, row.subject): row for row in foreseen(fill(Planner().refresh(situation)))}
    assert rows["node lost", "fast0"].gpus == {"big": SLOW}
    assert rows["node joins", f"2 slots of {FAST}"].workers == {"big": 4}
    assert plan_table(cluster.state).headers[-1] == "GPU"
    assert plan_table(cluster.state).rows[0][-1] == FAST
    assert {row[-1] for row in nodes_table(cluster.state).rows} == {SLOW, FAST}
    assert not any(row.layouts for row in rows.values())


def test_whatif_adds_nodes_of_type() -> None:
    cluster = with_task(cluster_of(3, 2, 1))
    more = what_if(cluster.state, cluster.policy, ClusterChanges(add_nodes=1, gpu=FAST)).plan
    assert more.workers == {"big": 4}
    assert "fast0" in {node for replica in more.assignments["big"].replicas for node in replica}
    fewer = what_if(cluster.state, cluster.policy, ClusterChanges(lose=("fast0",))).plan
    assert f"on {SLOW}" in fewer.reason


def test_healthy_plan_uses_better_type() -> None:
    """What is lost to fewer nodes is told from there."""
    cluster = with_task(cluster_of(4, 1, 2))
    lose(cluster, "fast0")
    lose(cluster, "fast1")
    cluster.run()
    plan = cluster.state.plan
    assert plan.healthy_gpus == {"big": FAST}
    assert cluster.state.ledger.healthy == plan.waf_if_healthy == 1200
    assert plan.waf == 200


def test_plan_says_whether_it_is_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search that may look at no deal but the present one says how much it may miss."""

    def plan_of_three() -> tuple[int, str]:
        """Return the gap of the plan in force, and what `plan show` says of it."""
        cluster = with_task(cluster_of(4, 1, 2))
        cluster.submit("more", min_workers=1, max_workers=5)
        cluster.submit("third", min_workers=2, max_workers=3)
        cluster.run()
        return cluster.state.plan.gap_ppm, plan_show.summary(cluster.state)["optimum"]

    assert plan_of_three() == (0, "proven")
    monkeypatch.setattr("unicrond.core.planning.pools.LOOKS_MAX", 0)
    gap_ppm, line = plan_of_three()
    assert gap_ppm > 0 and line == f"within {gap_ppm / 10_000:.4g} %"
    assert gap_text(1_000_000) == "not proven: other minimums might be met"


def test_simulation_detects_plan_that_mixes_types() -> None:
    """Where nodes tell one type alone, the others count as it, and no plan mixes types."""
    cluster = with_task(cluster_of(1, 2, 1))
    plan = v.PlanAdopted(
        epoch=9, waf=1, basis="", trigger="", reason="",
        assignments=(v.TaskAssignment(task="big", workers=2, replicas=(("slow0",), ("fast0",)), waf=1),),
    )  # fmt: skip
    assert "big on several types of GPU: a100-80g, h100-80g" in types_stay_apart(cluster.state, plan)
    apart = replace(plan.assignments[0], replicas=(("slow0",), ("slow1",)))
    assert not types_stay_apart(cluster.state, replace(plan, assignments=(apart,)))
    untold = replace(
        cluster.state, nodes=cluster.state.nodes | {"fast0": replace(cluster.state.nodes["fast0"], gpu="")}
    )
    assert not types_stay_apart(untold, plan)
