"""The compared systems: no more workers than there are, no faster than without faults, what each keeps of itself, and
their prices against plain recomputation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.seeds import at_most
from unicrond.replay.evaluation.model.assumptions import DEFAULTS
from unicrond.replay.evaluation.model.meter import CostPhase
from unicrond.replay.evaluation.model.speeds import fixed_layout, fixed_speeds, restricted_job
from unicrond.replay.evaluation.model.templates import Templates
from unicrond.replay.evaluation.model.traces import Trace, TraceFault, trace
from unicrond.replay.evaluation.model.virtual_time import DAY_US, SECOND_US
from unicrond.replay.evaluation.model.workload import Cluster, TrainingTask, Workload, six, workload
from unicrond.replay.evaluation.model.world import EvaluationWorld
from unicrond.replay.evaluation.policies.bamboo import (
    bamboo_speeds,
    iteration_with_shadows_s,
    memory_with_shadows_bytes,
)
from unicrond.replay.evaluation.policies.bamboo import search_space as bamboo_search_space
from unicrond.replay.evaluation.policies.ft_hsdp import FtHsdp
from unicrond.replay.evaluation.policies.oobleck import instantiate, oobleck_speeds, reinstantiate
from unicrond.replay.evaluation.policies.recycle import PipelineForm, recycle_speeds
from unicrond.replay.evaluation.policies.varuna import search_space, varuna_speeds
from unicrond.replay.evaluation.simulator.simulator import POLICIES, build_policy, simulate
from unicrond.throughput.layouts import Layout, job, layers_per_stage
from unicrond.throughput.model import Estimate, best, iteration_s, legal, memory_bytes, parts_s, usable_bytes
from unicrond.throughput.presets import GPUS, MODELS

HOUR_US = 3600 * SECOND_US
A800 = Cluster("a800-80g", 16)
#: Three tasks on six nodes: everything that a plan of six tasks has, in a fraction of the time.
SMALL = workload(
    Cluster("a800-80g", 6),
    (
        TrainingTask(name="one", model="gpt3-1.3b", weight=2.0),
        TrainingTask(name="two", model="gpt3-7b"),
        TrainingTask(name="three", model="gpt3-13b"),
    ),
)
STORM = trace("poisson:mtbf_d=2,other_mtbf_d=1,repair_h=12,days=3", 6, 3)


def one_task(nodes: int, **changes: Any) -> Workload:
    return workload(Cluster("a800-80g", nodes), (TrainingTask(name="gpt", **{"model": "gpt3-7b", **changes}),))


def made_trace(nodes: int, *faults: TraceFault, days: float = 1.0) -> Trace:
    return Trace("made", nodes, round(days * DAY_US), faults)


def partitions(nodes: int, least: int = 1) -> Iterator[tuple[int, ...]]:
    yield (nodes,)
    for first in range(least, nodes // 2 + 1):
        yield from ((first, *rest) for rest in partitions(nodes - first, first))


# --- every policy ----------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [*POLICIES, "hot-spare:2"])
def test_policy_never_exceeds_available_workers(policy: str) -> None:
    world = EvaluationWorld(SMALL, STORM, DEFAULTS)
    running: dict[str, set[int]] = {}
    plain = world.meter.run

    def watched(task: str, rate: int, nodes: Iterable[int]) -> None:
        given = list(nodes)
        assert len(given) == len(set(given)) <= 6
        assert all(world.up(node) for node in given)
        training = {name: held for name, held in running.items() if world.meter.phase(name) is CostPhase.RUNNING}
        if policy != "ideal":  # it moves all tasks at once, one after the other
            assert all(held.isdisjoint(given) for name, held in training.items() if name != task)
        running[task] = set(given)
        plain(task, rate, given)

    world.meter.run = watched  # type: ignore[method-assign]
    world.play(build_policy(policy, world))
    assert world.meter.total().balanced
    assert running


@pytest.mark.parametrize("policy", POLICIES)
def test_policy_never_exceeds_speed_without_faults(policy: str) -> None:
    """Megatron in its best layout on as many nodes is the limit; systems of other forms have their own."""
    world = EvaluationWorld(SMALL, STORM, DEFAULTS)
    running = build_policy(policy, world)
    plain = world.meter.run
    tables = {"oobleck": oobleck_speeds, "varuna": varuna_speeds, "bamboo": bamboo_speeds, "recycle": recycle_speeds}
    own = SMALL.worth_at(tables[policy](SMALL)) if policy in tables else SMALL.worth
    first: dict[str, int] = {}

    def watched(task: str, rate: int, nodes: Iterable[int]) -> None:
        given = list(nodes)
        first.setdefault(task, rate)
        if policy == "recycle":  # its bubbles take up what others lost; never more than before the fault
            assert rate <= max(first[task], own[task][len(given)])
        elif policy == "oobleck":  # of all pipelines on as many nodes, not of even ones alone
            templates = running._templates[task]  # type: ignore[attr-defined]
            sizes = (each for each in partitions(len(given)) if set(each) <= templates.by_nodes.keys())
            weight = next(each.weight for each in SMALL.tasks if each.name == task)
            assert rate <= weight * max(map(templates.flops_per_s, sizes))
        else:
            assert rate <= own[task][len(given)]
        plain(task, rate, given)

    world.meter.run = watched  # type: ignore[method-assign]
    world.play(running)
    assert len(first) == 3


@pytest.mark.parametrize("speeds", [oobleck_speeds, varuna_speeds, bamboo_speeds, recycle_speeds])
def test_more_nodes_are_never_slower(speeds: Any) -> None:
    for speed in speeds(SMALL).values():
        assert list(speed.flops) == sorted(speed.flops)
        assert len(speed.flops) == 7


# --- one layout for good ---------------------------------------------------------------------------


def test_fixed_layout_is_optimal_only_at_full_size() -> None:
    work = workload(A800, six())
    plan = work.best_plan(16)
    for name, speed in fixed_speeds(work, plan).items():
        assert speed.flops[plan[name]] == work.throughput[name][plan[name]]
        assert all(mine <= its for mine, its in zip(speed.flops, work.throughput[name], strict=True))


def test_fixed_layout_shares_nodes_evenly_or_fills_them() -> None:
    for model, nodes in product(("gpt3-7b", "gpt3-13b", "gpt3-70b"), (4, 5, 7)):
        tp, pp = fixed_layout(TrainingTask(name="t", model=model), A800, nodes)
        assert 8 % (tp * pp) == 0 or tp * pp % 8 == 0


# --- Oobleck ---------------------------------------------------------------------------------------

SEVEN_B = Templates(restricted_job(job(MODELS["gpt3-7b"], GPUS["a800-80g"]), ragged=True), 1)
SEVENTY_B = Templates(restricted_job(job(MODELS["gpt3-70b"], GPUS["a800-80g"]), ragged=True), 1)


def test_templates_cover_every_size_from_minimum() -> None:
    for templates in (SEVEN_B, SEVENTY_B):
        sizes = list(templates.by_nodes)
        assert sizes == list(range(sizes[0], sizes[-1] + 1))
    assert SEVEN_B.fewest == 1
    assert SEVENTY_B.fewest > 1


def test_micro_batch_deal_is_optimal() -> None:
    few = Templates(replace(SEVENTY_B.question, batch=9), 1)
    sizes = (few.fewest, few.fewest + 1, few.fewest + 2)
    kinds = [few.by_nodes[size] for size in sizes]
    dealings = (dealt for dealt in product(range(10), repeat=3) if sum(dealt) == 9)
    ready_s = min(
        max(kind.fill_s + count * kind.slope_s for kind, count in zip(kinds, dealt, strict=True) if count)
        for dealt in dealings
    )
    assert few._computing_s([(kind, 1) for kind in kinds]) == pytest.approx(ready_s, rel=1e-5)


@pytest.mark.parametrize("nodes", [3, 6, 9])
def test_even_pipelines_are_nearly_best_combination(nodes: int) -> None:
    every = max(SEVEN_B.flops_per_s(sizes) for sizes in partitions(nodes) if len(sizes) >= 2)
    assert SEVEN_B.flops_per_s(SEVEN_B.best_sizes(nodes, 2)) >= 0.98 * every


@given(
    sizes=st.lists(st.integers(SEVENTY_B.fewest, SEVENTY_B.fewest + 3), min_size=1, max_size=5),
    lost=st.sets(st.integers(0, 30), max_size=8),
)
@settings(max_examples=at_most(200), deadline=None)
def test_oobleck_keeps_pipelines_when_nodes_are_lost(sizes: list[int], lost: set[int]) -> None:
    ends = np.cumsum(sizes).tolist()
    pipelines = [list(range(end - size, end)) for size, end in zip(sizes, ends, strict=True)]
    there = set(range(ends[-1])) - lost
    after = reinstantiate(pipelines, there, SEVENTY_B)
    used = [node for pipeline in after for node in pipeline]
    assert len(used) == len(set(used))
    assert there.issuperset(used)
    assert all(len(pipeline) in SEVENTY_B.by_nodes for pipeline in after)
    whole = [pipeline for pipeline in pipelines if there.issuperset(pipeline)]
    needy = any(0 < sum(node in there for node in pipeline) < SEVENTY_B.fewest for pipeline in pipelines)
    if not needy:  # those that lost nobody are as they were
        assert after[: len(whole)] == whole
    for pipeline in whole:  # needy ones borrow from them or join them, and leave them enough
        assert any(len(set(pipeline) & set(other)) >= SEVENTY_B.fewest for other in after)
    if whole:  # no node is idle
        assert there == set(used)


@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    came=st.integers(0, 4),
)
@settings(max_examples=at_most(100), deadline=None)
def test_oobleck_keeps_pipelines_when_nodes_arrive(sizes: list[int], came: int) -> None:
    ends = np.cumsum(sizes).tolist()
    pipelines = [list(range(end - size, end)) for size, end in zip(sizes, ends, strict=True)]
    nodes = list(range(ends[-1] + came))
    after = instantiate(pipelines, nodes, SEVEN_B)
    wanted = sorted(map(len, after))
    assert wanted == sorted(SEVEN_B.best_sizes(len(nodes), 2))
    assert sorted(node for pipeline in after for node in pipeline) == nodes
    for size in set(wanted):  # as many as the new combination has of a size stay
        before = [pipeline for pipeline in pipelines if len(pipeline) == size]
        assert sum(pipeline in after for pipeline in before) >= min(len(before), wanted.count(size))


def test_oobleck_needs_checkpoint_only_without_whole_pipeline() -> None:
    fault = TraceFault(HOUR_US, 0, 1, 30 * SECOND_US)
    again_s = DEFAULTS.checkpoint_load_s + DEFAULTS.recompute_s
    alone = simulate(one_task(1), made_trace(1, fault), "oobleck")
    replicated = simulate(one_task(4), made_trace(4, fault), "oobleck")
    assert alone.costs.stalled_us / 1e6 == pytest.approx(
        DEFAULTS.elastic_detect_s + DEFAULTS.oobleck_reinstantiate_s + again_s
    )
    assert replicated.costs.stalled_us / 1e6 < 4 * DEFAULTS.oobleck_reinstantiate_s


# --- Varuna ----------------------------------------------------------------------------------------


def test_varuna_search_matches_brute_force() -> None:
    work = one_task(3, model="gpt3-13b")
    question = search_space(work.tasks[0].job(work.cluster))
    for nodes in (1, 2, 3):
        found = []
        for stages, size in product(range(1, 41), (1, 2, 4, 8, 16)):
            layout, dp = Layout(1, stages, size, 1, "full"), np.arange(1, nodes * 8 // stages + 1, dtype=np.int64)
            dp = dp[legal(question, layout, dp)]
            dp = dp[memory_bytes(question, layout, dp) <= usable_bytes(question.gpu)]
            found += (question.flops_per_iteration / iteration_s(question, layout, dp)).tolist()
        assert varuna_speeds(work)["gpt"].flops[nodes] == round(max(found, default=0))


def test_ragged_pipeline_has_all_layers() -> None:
    question = search_space(one_task(1).tasks[0].job(A800))
    for stages in range(1, 33):
        cut = layers_per_stage(question.model, question.stack, stages)
        assert cut is not None
        assert cut[1] == -(-32 // stages)
        assert cut[2] >= 1
        assert stages == 1 or cut[2] * stages <= 32 <= cut[1] * stages


def test_varuna_returns_to_checkpoint_on_each_fault() -> None:
    outcome = simulate(one_task(4), made_trace(4, TraceFault(HOUR_US, 0, 3)), "varuna")
    stalled_s = DEFAULTS.elastic_detect_s + DEFAULTS.varuna_morph_s + DEFAULTS.varuna_recompute_s
    assert outcome.costs.stalled_us / 1e6 == pytest.approx(stalled_s)


# --- Bamboo ----------------------------------------------------------------------------------------


def test_bamboo_pays_extra_forward_pass_and_second_state() -> None:
    question, layout = bamboo_search_space(job(MODELS["gpt3-7b"], GPUS["a800-80g"])), Layout(1, 4, 1, 1, "none")
    dp = np.array([8], dtype=np.int64)
    parts = parts_s(question, layout, dp)[:, 0]
    assert iteration_with_shadows_s(question, layout, dp)[0] == pytest.approx(
        parts.sum() + max(0.0, parts[0] / 3 - parts[3])
    )
    parameters = MODELS["gpt3-7b"].parameters / 4
    more = memory_with_shadows_bytes(question, layout, dp)[0] - memory_bytes(question, layout, dp)[0]
    assert more == pytest.approx(14 * parameters, rel=0.1)  # weights, master weights, moments


def test_long_bubble_hides_redundant_pass() -> None:
    question = bamboo_search_space(job(MODELS["gpt3-7b"], GPUS["a800-80g"], batch=32))
    layout, dp = Layout(1, 32, 1, 1, "none"), np.array([8], dtype=np.int64)
    assert iteration_with_shadows_s(question, layout, dp) == pytest.approx(iteration_s(question, layout, dp))


def test_bamboo_loses_stage_with_two_neighbours() -> None:
    def stalled_s(*nodes: int) -> float:
        faults = [TraceFault(HOUR_US + nth * SECOND_US, node, 1, 30 * DAY_US) for nth, node in enumerate(nodes)]
        return simulate(one_task(8), made_trace(8, *faults), "bamboo").costs.stalled_us / 1e6

    takes_s = DEFAULTS.elastic_detect_s + DEFAULTS.bamboo_failover_s + DEFAULTS.bamboo_reconfigure_s
    assert stalled_s(2, 5) == pytest.approx(takes_s)
    assert stalled_s(2, 3) > DEFAULTS.recompute_s


# --- ReCycle ---------------------------------------------------------------------------------------


def form(tp: int, pp: int, nodes: int, **given: Any) -> PipelineForm:
    question = restricted_job(job(MODELS["gpt3-13b"], GPUS["a800-80g"], tp=tp, pp=pp, micro_batch=1, **given))
    estimate = best(question, nodes * 8)
    assert isinstance(estimate, Estimate)
    return PipelineForm(estimate, tuple(range(nodes)))


def test_recycle_without_losses_matches_its_layout() -> None:
    whole = form(8, 2, 4)
    assert whole.flops_per_s(range(4)) == pytest.approx(whole.estimate.flops_per_s, rel=1e-9)


def test_recycle_bubbles_absorb_lost_replica() -> None:
    """8 x 4 on 8 nodes: a node is one of a stage's two replicas; with few micro-batches the bubble is long."""
    few, many = form(8, 4, 8, batch=4), form(8, 4, 8, batch=1024)
    assert few.most_lost(set(range(8)) - {3}) == 1
    assert few.flops_per_s(set(range(8)) - {3}) == few.flops_per_s(range(8))
    assert many.flops_per_s(set(range(8)) - {3}) < 0.6 * many.flops_per_s(range(8))
    assert not few.has_peers(set(range(8)) - {2, 3})


def test_losses_in_different_stages_cost_as_much_as_one() -> None:
    made_form = form(8, 4, 8)
    one, two = set(range(8)) - {0}, set(range(8)) - {0, 7}
    assert made_form.flops_per_s(one) == made_form.flops_per_s(two) > 0


def test_recycle_without_pipeline_loses_full_share() -> None:
    flat = form(8, 1, 8)
    assert flat.flops_per_s(range(7)) == pytest.approx(7 / 8 * flat.flops_per_s(range(8)), rel=0.03)


def test_recycle_keeps_layout_and_takes_node_back() -> None:
    work = one_task(4)
    outcome = simulate(work, made_trace(4, TraceFault(HOUR_US, 2, 1, 5 * HOUR_US)), "recycle")
    rates = [rate for _, rate in outcome.rates]
    assert (rates[0], rates[1], rates[3], rates[-1]) == (rates[0], 0, 0, rates[0])
    assert 0 < rates[2] < rates[0]
    stalled_s = DEFAULTS.elastic_detect_s + DEFAULTS.recycle_reroute_s + DEFAULTS.recycle_join_s
    assert outcome.costs.stalled_us / 1e6 == pytest.approx(stalled_s)


# --- FT-HSDP ---------------------------------------------------------------------------------------


def test_ft_hsdp_replica_leaves_and_returns_without_stop() -> None:
    work = one_task(4)
    outcome = simulate(work, made_trace(4, TraceFault(HOUR_US, 1, 2)), "ft-hsdp")
    whole = outcome.rates[0][1]
    left = min(whole * 3 // 4, work.worth["gpt"][3])
    times = [at_us // SECOND_US for at_us, _ in outcome.rates]
    assert [rate for _, rate in outcome.rates] == [whole, 0, left, whole]
    stall_s, restart_s = DEFAULTS.ft_hsdp_stall_s, DEFAULTS.ft_hsdp_restart_s
    assert times == [0, 3600, 3600 + stall_s, 3600 + restart_s]


def test_ft_hsdp_spare_node_completes_replica() -> None:
    work = one_task(5, max_nodes=4)
    two_nodes = msgspec.structs.replace(DEFAULTS, ft_hsdp_replica_nodes=2.0)
    world = EvaluationWorld(work, made_trace(5, TraceFault(HOUR_US, 1, 1, 30 * DAY_US)), two_nodes)
    policy = FtHsdp(world)
    world.play(policy)
    assert [sorted(replica) for replica in policy.replicas["gpt"].training] == [[2, 3], [0, 4]]


def test_ft_hsdp_last_replica_loses_state() -> None:
    outcome = simulate(one_task(1), made_trace(1, TraceFault(HOUR_US, 0, 2)), "ft-hsdp")
    again_s = DEFAULTS.checkpoint_load_s + DEFAULTS.recompute_s
    assert outcome.costs.stalled_us / 1e6 > DEFAULTS.ft_hsdp_restart_s + again_s - DEFAULTS.ft_hsdp_stall_s


def test_recycle_price_matches_restricted_model() -> None:
    work = one_task(2, model="gpt3-13b")
    question = restricted_job(work.tasks[0].job(work.cluster))
    answers = (best(question, gpus) for gpus in range(1, 17))
    flops = [answer.flops_per_s for answer in answers if hasattr(answer, "flops_per_s")]
    assert recycle_speeds(work)["gpt"].flops[2] == max(flops)
