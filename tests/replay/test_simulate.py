"""The simulator: its accounts balance, its real core heals, the compared systems do what they say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from unicrond.core.rules.invariants import check
from unicrond.core.worth.costs import costs_at
from unicrond.replay.evaluation.model.assumptions import DEFAULTS, assume
from unicrond.replay.evaluation.model.meter import CostPhase, Meter
from unicrond.replay.evaluation.model.traces import Trace, TraceFault, trace
from unicrond.replay.evaluation.model.virtual_time import DAY_US, SECOND_US, VirtualClock, to_us
from unicrond.replay.evaluation.model.workload import Cluster, TrainingTask, Workload, six, workload
from unicrond.replay.evaluation.model.world import EvaluationWorld
from unicrond.replay.evaluation.simulator.core_driver import CoreDriver
from unicrond.replay.evaluation.simulator.simulator import POLICIES, SimulationOutcome, simulate
from unicrond.replay.evaluation.simulator.trainer_model import Activity

HOUR_S = 3600


@pytest.fixture(scope="module")
def sixteen() -> Workload:
    return workload(Cluster("a800-80g", 16), six())


def one_task(nodes: int, **changes: Any) -> Workload:
    """One 7B task on all nodes: whatever is lost is its loss."""
    return workload(Cluster("a800-80g", nodes), (TrainingTask(name="gpt", model="gpt3-7b", **changes),))


def made_trace(nodes: int, *faults: TraceFault, days: float = 1.0) -> Trace:
    return Trace("made", nodes, round(days * DAY_US), faults)


def lost_s(outcome: SimulationOutcome, part: str) -> float:
    """One of Costs' parts as seconds of the failure-free rate."""
    return getattr(outcome.costs, part) / outcome.costs.failure_free * outcome.trace.length_us / 1e6


# --- the identity --------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [*POLICIES, "hot-spare:3"])
@pytest.mark.parametrize("spec", ["trace-a", "trace-b:repair_h=30", "poisson:mtbf_d=3,repair_h=40,days=4"])
def test_delivered_and_lost_add_up_to_failure_free(sixteen: Workload, policy: str, spec: str) -> None:
    costs = simulate(sixteen, trace(spec, 16, 5), policy).costs
    assert costs.balanced
    assert costs.failure_free == sum(sixteen.failure_free.values()) * trace(spec, 16, 5).length_us
    assert min(costs.delivered, costs.detection, costs.transition, costs.sub_healthy) >= 0


@pytest.mark.parametrize("policy", ["unicron", "unicron-free", "megatron-wait", "megatron-shrink", "ft-hsdp", "ideal"])
def test_policy_without_faults_delivers_everything(sixteen: Workload, policy: str) -> None:
    outcome = simulate(sixteen, made_trace(16), policy)
    assert outcome.costs.delivered == outcome.costs.failure_free
    assert outcome.costs.stalled_us == outcome.costs.moves == 0
    assert (outcome.share, outcome.ratio, outcome.ettr, outcome.goodput) == (1.0, 1.0, 1.0, 1.0)


@pytest.mark.parametrize("policy", ["oobleck", "varuna", "bamboo", "recycle"])
def test_mechanism_without_faults_costs_only_its_price(sixteen: Workload, policy: str) -> None:
    outcome = simulate(sixteen, made_trace(16), policy)
    assert outcome.share == pytest.approx(outcome.ratio, rel=1e-12)
    assert 0.3 < outcome.ratio <= 1.0
    assert outcome.costs.stalled_us == 0


def test_ettr_and_goodput_match_publications() -> None:
    """ETTR counts a job's hours, goodput those of all nodes, a spare's too."""
    on = made_trace(4, TraceFault(HOUR_S * SECOND_US, 0, 1, 12 * HOUR_S * SECOND_US))
    outcome = simulate(one_task(4), on, "megatron-wait")
    down_s = 12 * HOUR_S + DEFAULTS.requeue_s + DEFAULTS.setup_s + DEFAULTS.recompute_s
    assert outcome.ettr == pytest.approx(1 - down_s / (24 * HOUR_S))
    assert outcome.goodput == pytest.approx(outcome.ettr)
    spare = simulate(one_task(4), made_trace(4), "hot-spare")
    assert (spare.ettr, spare.goodput) == (1.0, 0.75)


def test_meter_counts_every_moment_once() -> None:
    clock = VirtualClock()
    meter = Meter(clock, {"a": 100})
    meter.run("a", 60, [1, 2])
    meter.begin()
    for length_us, change in (
        (10, lambda: meter.stall("a", CostPhase.DETECTION)),
        (7, lambda: meter.stall("a", CostPhase.TRANSITION)),
        (5, lambda: meter.idle("a")),
        (3, lambda: meter.run("a", 90, [2, 3, 4])),
    ):
        clock.run(clock.now_us + length_us)
        change()
    clock.run(clock.now_us + 2)
    costs = meter.total()
    assert (costs.delivered, costs.detection, costs.transition) == (10 * 60 + 2 * 90, 7 * 60, 5 * 60)
    assert costs.sub_healthy == (10 + 7 + 5) * 40 + 3 * 100 + 2 * 10
    assert costs.balanced
    assert (costs.stalled_us, costs.moves) == (15, 2)
    assert meter.rates == [(0, 60), (10, 0), (25, 90)]


# --- the real core -------------------------------------------------------------------------------


def driven(work: Workload, on: Trace, **assumed: float) -> tuple[CoreDriver, SimulationOutcome]:
    world = EvaluationWorld(work, on, msgspec.structs.replace(DEFAULTS, **assumed))
    driver = CoreDriver(world)
    world.play(driver)
    rates = tuple(world.meter.rates)
    made = SimulationOutcome(
        "unicron", on, work.cluster.nodes, len(work.tasks), world.meter.total(), rates, driver.finish()
    )
    return driver, made


def test_node_loss_costs_configured_times() -> None:
    driver, outcome = driven(one_task(4), made_trace(4, TraceFault(HOUR_S * SECOND_US, 1, 1, 10 * HOUR_S * SECOND_US)))
    assert lost_s(outcome, "detection") == pytest.approx(DEFAULTS.node_detect_s, abs=0.01)
    # The loss: regroup, transfer, redeal. The return: the others train while it starts; regroup, transfer.
    stops_s = 2 * (DEFAULTS.regroup_s + DEFAULTS.transfer_s + 2 * DEFAULTS.command_s) + DEFAULTS.redeal_s
    assert 0 < lost_s(outcome, "transition") <= stops_s
    assert outcome.costs.moves == 1
    assert not driver.state.incidents
    assert driver.groups["gpt"].activity is Activity.TRAINING


def test_process_fault_restarts_process_on_its_node() -> None:
    driver, outcome = driven(one_task(4), made_trace(4, TraceFault(HOUR_S * SECOND_US, 1, 2)))
    assert lost_s(outcome, "detection") == pytest.approx(DEFAULTS.process_detect_s, abs=0.01)
    assert outcome.core is not None
    assert (outcome.core.plans, outcome.core.incidents) == (0, 1)
    assert sorted(worker.node for worker in driver.state.tasks["gpt"].workers.values()) == ["n0", "n1", "n2", "n3"]


def test_broken_connection_is_reattempted_in_place() -> None:
    driver, outcome = driven(one_task(4), made_trace(4, TraceFault(HOUR_S * SECOND_US, 1, 3)))
    workers = sorted(driver.state.tasks["gpt"].workers)
    assert workers == ["gpt.1", "gpt.2", "gpt.3", "gpt.4"], "no process was replaced"
    assert lost_s(outcome, "detection") == pytest.approx(DEFAULTS.error_detect_s, abs=0.01)
    waited_s = driver.policy.symptom_window_s + DEFAULTS.command_s + DEFAULTS.regroup_s
    assert lost_s(outcome, "transition") == pytest.approx(waited_s, abs=0.1)


def test_loss_of_last_node_repeats_work() -> None:
    on = made_trace(1, TraceFault(HOUR_S * SECOND_US, 0, 1, HOUR_S * SECOND_US))
    _, outcome = driven(one_task(1), on)
    _, without = driven(one_task(1), on, recompute_s=0.0)
    assert lost_s(outcome, "transition") - lost_s(without, "transition") == pytest.approx(DEFAULTS.recompute_s, abs=1)
    assert lost_s(outcome, "sub_healthy") == pytest.approx(HOUR_S - DEFAULTS.node_detect_s, abs=60)


def test_replica_of_several_nodes_fails_as_whole() -> None:
    on = made_trace(8, TraceFault(HOUR_S * SECOND_US, 1, 1, 30 * DAY_US))
    driver, outcome = driven(one_task(8, layout="8x4"), on)
    assert outcome.costs.balanced
    membership = driver.state.tasks["gpt"].membership
    assert membership is not None
    assert len(membership.members) == 4


@pytest.mark.parametrize("seed", range(6))
def test_core_heals_in_any_order_of_faults(sixteen: Workload, seed: int) -> None:
    """Faults for five days at many times the usual rate, then none: everybody trains on what the plan gives it."""
    on = trace("poisson:mtbf_d=2,other_mtbf_d=0.5,repair_h=10,days=5", 16, seed)
    driver, outcome = driven(sixteen, replace(on, length_us=on.length_us + DAY_US))
    check(driver.state)
    assert not driver.state.incidents
    for name, group in driver.groups.items():
        given = driver.state.plan.assignments[name].workers
        assert group.activity is (Activity.TRAINING if given else Activity.STANDING), name
        assert len(group.formed.members if group.formed else ()) == given, name
    assert outcome.rates[-1][1] == pytest.approx(sum(sixteen.failure_free.values()), rel=0.2)


def test_ledger_agrees_with_meter(sixteen: Workload) -> None:
    """The core counts its costs from the log alone; the meter sees what trains. They meet within a percent."""
    on = trace("trace-b", 16, 2)
    world = EvaluationWorld(sixteen, on, DEFAULTS)
    driver = CoreDriver(world)
    driver.start()
    start_us = world.clock.now_us
    before = costs_at(driver.state, start_us)
    world.meter.begin()
    driver.start = lambda: None  # type: ignore[method-assign]  # it has started
    world.play(driver)
    after = costs_at(driver.state, world.clock.now_us)
    free = after.failure_free_flop - before.failure_free_flop
    assert free == pytest.approx(world.meter.total().failure_free / 1e6, rel=0.001)
    delivered = (after.delivered_flop - before.delivered_flop) / free
    assert delivered == pytest.approx(world.meter.costs.delivered / world.meter.costs.failure_free, abs=0.01)


def test_seed_gives_one_outcome(sixteen: Workload) -> None:
    first, second = (simulate(sixteen, trace("trace-b", 16, 4), "unicron") for _ in range(2))
    assert (first.costs, first.rates) == (second.costs, second.rates)


def test_slower_transitions_cost_more(sixteen: Workload) -> None:
    slow = assume({"regroup_s": "300", "transfer_s": "300"})
    quick, slower = (simulate(sixteen, trace("trace-b", 16, 1), "unicron", each) for each in (DEFAULTS, slow))
    assert slower.costs.transition > 3 * quick.costs.transition
    assert slower.costs.delivered < quick.costs.delivered


@pytest.mark.parametrize("policy", ["unicron", "unicron-equal", "unicron-weighted", "unicron-sized"])
def test_policy_never_beats_ideal_bound(sixteen: Workload, policy: str) -> None:
    on = trace("trace-b", 16, 1)
    assert simulate(sixteen, on, policy).costs.delivered <= simulate(sixteen, on, "ideal").costs.delivered


# --- the compared systems ------------------------------------------------------------------------


def test_megatron_wait_waits_for_node() -> None:
    outcome = simulate(
        one_task(4), made_trace(4, TraceFault(HOUR_S * SECOND_US, 2, 1, 5 * HOUR_S * SECOND_US)), "megatron-wait"
    )
    restart_s = DEFAULTS.requeue_s + DEFAULTS.setup_s + DEFAULTS.recompute_s
    assert lost_s(outcome, "detection") == pytest.approx(DEFAULTS.timeout_s)
    assert lost_s(outcome, "transition") == pytest.approx(restart_s)
    assert lost_s(outcome, "sub_healthy") == pytest.approx(5 * HOUR_S - DEFAULTS.timeout_s)


def test_megatron_shrink_continues_and_grows_again() -> None:
    work = one_task(4)
    outcome = simulate(
        work, made_trace(4, TraceFault(HOUR_S * SECOND_US, 2, 1, 5 * HOUR_S * SECOND_US)), "megatron-shrink"
    )
    curve = work.worth["gpt"]
    assert [rate for _, rate in outcome.rates] == [curve[4], 0, curve[3], 0, curve[4]]


def test_spare_replaces_node_and_next_fault_waits() -> None:
    hour_us = HOUR_S * SECOND_US
    faults = (TraceFault(hour_us, 0, 1, 12 * hour_us), TraceFault(6 * hour_us, 1, 1, 20 * hour_us))
    work = one_task(4)
    outcome = simulate(work, made_trace(4, *faults), "hot-spare")
    three = work.worth["gpt"][3]
    # The spare serves the first fault; the second waits for the first node's repair.
    times = [at_us for at_us, rate in outcome.rates if rate == three]
    restart_us = to_us(DEFAULTS.requeue_s + DEFAULTS.setup_s + DEFAULTS.recompute_s)
    assert times == [0, hour_us + to_us(DEFAULTS.timeout_s) + restart_us, 13 * hour_us + restart_us]


def test_node_that_returns_during_restart_is_used() -> None:
    hour_us = HOUR_S * SECOND_US
    back_us = to_us(DEFAULTS.timeout_s + 600)
    work = one_task(4)
    outcome = simulate(work, made_trace(4, TraceFault(hour_us, 0, 1, back_us)), "megatron-shrink")
    assert outcome.rates[-1][1] == work.worth["gpt"][4]
