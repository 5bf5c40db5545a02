"""The real cores under seeded faults. 10,000 seeds: `make fuzz`; the deliberate bugs: `make mutants`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.seeds import SEEDS
from unicrond.core import fold
from unicrond.core.folding import silence
from unicrond.core.nodes import brakes, outages
from unicrond.core.nodes.deafness import Deafness
from unicrond.core.rules import pinning
from unicrond.core.tasks import starvation
from unicrond.events.wire.schemas import SCHEMA
from unicrond.replay.simulation.cluster import coordinators, world
from unicrond.replay.simulation.faults.faults import SimulatedFault
from unicrond.replay.simulation.fuzz import fuzz, shrink
from unicrond.replay.simulation.mutants.table import MUTANTS, find_breach
from unicrond.replay.simulation.run import history, simulate

ROOT = Path(__file__).parents[2]
#: Seeds of one test: two of pytest's processes share the tests.
AT_ONCE = 25


@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", range(0, SEEDS, AT_ONCE))
def test_rules_hold_under_every_seed(first: int) -> None:
    seeds = min(AT_ONCE, SEEDS - first)
    report = fuzz(first, seeds, processes=1)
    assert not report.failed, f"{report.failure}\n{report.repeat}"
    assert report.seeds == seeds
    assert report.steps > 50 * seeds, "nothing is trained: the simulation shows nothing"
    assert report.incidents > seeds, "nothing goes wrong: the simulation shows nothing"


@pytest.mark.parametrize("how", ["", "head_anew"])
@pytest.mark.parametrize("seed", range(4))
def test_silence_of_all_nodes_costs_nothing(seed: int, how: str) -> None:
    outcome = simulate(seed, [SimulatedFault(kind="all_silent", at_s=10.0, for_s=18.0, how=how)])
    assert not outcome.rule, outcome.story
    assert outcome.incidents == 1 and outcome.micro_batches_repeated == outcome.iterations_lost == 0


DOMAIN_DOWN = SimulatedFault(kind="domain_down", at_s=12.0, for_s=6.0, pick=1)


@pytest.mark.parametrize("how", ["", "late", "cut"])
@pytest.mark.parametrize("seed", range(4))
def test_lost_domain_moves_nobody_and_comes_back(seed: int, how: str) -> None:
    outcome = simulate(seed, [replace(DOMAIN_DOWN, how=how)])
    assert not outcome.rule, outcome.story
    assert 1 <= outcome.incidents <= 2, "domains of one node or two that are no outage count each"


@pytest.mark.parametrize(
    ("seed", "for_s", "mutant", "rule"),
    [
        (5, 6.0, "await_nobody", "outages_move_nobody"),
        (5, 6.0, "hold_against_the_domain", "outages_accuse_no_node"),
        (6, 14.0, "count_each_return", "returns_are_one"),
    ],
)
def test_bug_of_outages_is_caught_by_its_rule(
    monkeypatch: pytest.MonkeyPatch, seed: int, for_s: float, mutant: str, rule: str
) -> None:
    for module, name in ((outages, "absence"), (silence, "excused")):
        monkeypatch.setattr(module, name, getattr(module, name))  # the mutant stays in this test
    MUTANTS[mutant].apply()
    assert simulate(seed, [replace(DOMAIN_DOWN, how="late", for_s=for_s)]).rule == rule


#: Programs that fail in four ways, and fewer and fewer slots.
GARBAGE = [
    *(
        SimulatedFault(kind="bad_program", at_s=14.0 + number, how=how, pick=number)
        for number, how in enumerate(("raise", "raise_at_start", "nan", "raise"))
    ),
    SimulatedFault(kind="power_off", at_s=24.0, for_s=14.0, nodes=("n1",)),
    SimulatedFault(kind="power_off", at_s=30.0, for_s=8.0, nodes=("n2",)),
]


SILENT = [SimulatedFault(kind="all_silent", at_s=10.0, for_s=18.0)]
OBSERVED = [
    SimulatedFault(kind="observe", at_s=14.0, for_s=22.0),
    SimulatedFault(kind="ill_accelerator", at_s=20.0, for_s=8.0, nodes=("n1",), how="ecc_error", pick=1),
]


@pytest.mark.parametrize(
    ("mutant", "faults", "rule"),
    [
        ("prefer_what_fails", GARBAGE, "programs_move_no_others"),
        ("judge_when_deaf", SILENT, "deaf_heads_judge_nobody"),
        ("act_while_observing", OBSERVED, "observation_moves_nothing"),
    ],
)
def test_bug_of_judgement_is_caught_by_its_rule(
    monkeypatch: pytest.MonkeyPatch, mutant: str, faults: list[SimulatedFault], rule: str
) -> None:
    assert not simulate(0, faults).rule
    for owner, name in (
        (starvation, "ranks"), (Deafness, "look"), (brakes, "observes"), (brakes, "_watcher_of"), (pinning, "observes")
    ):  # fmt: skip
        monkeypatch.setattr(owner, name, getattr(owner, name))  # the mutant stays in this test
    MUTANTS[mutant].apply()
    assert simulate(0, faults).rule == rule


def test_copies_continue_after_full_disk_lost_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A restarted agent remembers peers from before its disk was full."""
    for module in (world, coordinators):
        monkeypatch.setattr(module, "VERSIONS", (SCHEMA,))
    faults = [
        SimulatedFault(kind="power_off", at_s=20.202, for_s=7.567, nodes=("n1",), how="disk_lost", pick=1),
        SimulatedFault(kind="kill_worker", at_s=26.969, nodes=("n2",), how="reduced", pick=2),
        SimulatedFault(kind="disk_full", at_s=29.115, for_s=7.99, nodes=("n2",), pick=4),
        SimulatedFault(kind="restart_agent", at_s=34.64, nodes=("n2",)),
    ]
    outcome = simulate(770577, faults)
    assert not outcome.rule, outcome.story


def test_copies_continue_after_all_decisions_came_again() -> None:
    """Peers of a time when the other nodes were lost come again, behind the membership that has taken their place."""
    faults = [
        SimulatedFault(kind="domain_down", at_s=15.442, for_s=7.21, how="cut", pick=3),
        SimulatedFault(kind="redeliver", at_s=34.164, nodes=("n1",), pick=5),
    ]
    outcome = simulate(7400, faults)
    assert not outcome.rule, outcome.story


def test_node_isolated_after_the_faults_gets_its_person() -> None:
    """The cluster is observed while a GPU breaks: the isolation is held until then."""
    faults = [
        SimulatedFault(kind="observe", at_s=17.623, for_s=16.42, pick=4),
        SimulatedFault(kind="ill_accelerator", at_s=22.919, for_s=2.023, nodes=("n1",), how="gpu_broken", pick=1),
        SimulatedFault(kind="crash_log", at_s=33.173, for_s=4.978, pick=5),
        SimulatedFault(kind="cut_coordinator", at_s=37.962, for_s=3.65, pick=4),
    ]
    outcome = simulate(6326, faults)
    assert not outcome.rule, outcome.story


def test_node_isolated_again_after_the_faults_is_repaired() -> None:
    """The operator's command has failed at its second isolation, which was held while people observed."""
    faults = [
        SimulatedFault(kind="ill_accelerator", at_s=6.537, for_s=2.72, nodes=("n1",), how="gpu_broken", pick=4),
        SimulatedFault(kind="observe", at_s=30.134, for_s=15.507, pick=3),
        SimulatedFault(kind="ill_accelerator", at_s=32.604, for_s=7.948, nodes=("n1",), how="gpu_broken", pick=2),
    ]
    outcome = simulate(900397, faults)
    assert not outcome.rule, outcome.story


def test_program_that_has_no_room_elsewhere_moves_no_others() -> None:
    faults = [SimulatedFault(kind="bad_program", at_s=7.089, how="raise", pick=5)]
    outcome = simulate(902568, faults)
    assert not outcome.rule, outcome.story


def test_task_of_an_outage_whose_node_is_forgotten_gets_the_seats_of_a_program_that_fails() -> None:
    """n1 is awaited until a person forgets it; on the one node that is up a program fails without progress."""
    faults = [
        SimulatedFault(kind="maintain", at_s=5.95, for_s=6.235, nodes=("n3", "n4"), pick=5),
        SimulatedFault(kind="slow_node", at_s=7.491, for_s=8.769, nodes=("n4",), how="4", pick=3),
        SimulatedFault(kind="change_version", at_s=19.567, nodes=("n1",), how="1", pick=4),
        SimulatedFault(kind="cut_log", at_s=23.685, for_s=6.785, nodes=("n1", "n3", "n4"), pick=4),
        SimulatedFault(kind="bad_program", at_s=24.387, how="raise_at_start", pick=3),
        SimulatedFault(kind="hang_after_join", at_s=27.361, for_s=3.559, nodes=("n4",), pick=5),
        SimulatedFault(kind="domain_down", at_s=28.301, for_s=13.156, how="late", pick=3),
        SimulatedFault(kind="power_off", at_s=30.871, for_s=0.969, nodes=("n1",), pick=5),
    ]
    outcome = simulate(900364, faults)
    assert not outcome.rule, outcome.story


def test_task_of_an_outage_that_has_failed_on_its_node_moves_no_others() -> None:
    faults = [
        SimulatedFault(kind="ill_accelerator", at_s=13.316, for_s=9.823, nodes=("n2",), how="gpu_broken", pick=2),
        SimulatedFault(kind="end_agent", at_s=14.385, for_s=3.031, nodes=("n4",), how="impatient_pod", pick=5),
        SimulatedFault(kind="end_agent", at_s=17.604, for_s=0.528, nodes=("n2", "n3", "n4"), how="pod", pick=4),
        SimulatedFault(kind="domain_down", at_s=30.253, for_s=11.531, how="cut", pick=4),
    ]
    outcome = simulate(900709, faults)
    assert not outcome.rule, outcome.story


def test_return_from_an_outage_that_is_over_is_a_cause_in_another() -> None:
    faults = [
        SimulatedFault(kind="domain_down", at_s=14.738, for_s=12.285, how="late", pick=2),
        SimulatedFault(kind="cut_log", at_s=33.602, for_s=8.372, nodes=("n1", "n2", "n3"), pick=2),
    ]
    outcome = simulate(901918, faults)
    assert not outcome.rule, outcome.story


def test_break_of_the_group_that_goes_on_costs_one_worker() -> None:
    """The next group breaks before the faulty worker's time is up: once an innocent one was given up beside it."""
    faults = history(565)
    outcome = simulate(565, [faults[place] for place in (0, 1, 2, 3, 4, 7, 8, 9)])
    assert not outcome.rule, outcome.story


def test_links_are_probed_once_while_the_logs_clock_stands_still() -> None:
    """It was an hour ahead for a while: probes were ordered again and again until it had caught up."""
    faults = history(953)
    outcome = simulate(953, [faults[place] for place in (0, 1, 14)])
    assert not outcome.rule, outcome.story


def test_peers_of_readmitted_node_are_not_clearly_blamed() -> None:
    """Two replicas of two nodes; the links of n3 are bad for longer than it is isolated."""
    faults = [
        SimulatedFault(kind="crash_log", at_s=11.463, for_s=2.025, pick=2),
        SimulatedFault(kind="break_links", at_s=12.094, for_s=14.489, nodes=("n3",), pick=1),
    ]
    outcome = simulate(9059, faults)
    assert not outcome.rule, outcome.story


def test_command_to_namesake_binds_only_its_machine() -> None:
    """n4 comes back with an empty disk; a second n4 was told of a newer epoch. Commands of old heads name no boot."""
    faults = [
        SimulatedFault(kind="second_agent", at_s=4.02, for_s=12.796, nodes=("n4",), how="leaves", pick=4),
        SimulatedFault(kind="power_off", at_s=8.003, for_s=8.812, nodes=("n4",), how="disk_lost", pick=4),
        SimulatedFault(kind="crash_log", at_s=28.03, for_s=2.332, pick=4),
    ]
    outcome = simulate(60475, faults)
    assert not outcome.rule, outcome.story


def test_deposed_leader_takes_no_lease_that_nats_lost() -> None:
    """It was cut off, the other head leads, NATS was killed, and it reaches NATS before it hears of the newer term."""
    faults = [
        SimulatedFault(kind="hang_after_join", at_s=6.984, for_s=4.503, nodes=("n2",), pick=1),
        SimulatedFault(kind="order_fault", at_s=9.71, for_s=0.408, nodes=("n1",), how="kill", pick=1),
        SimulatedFault(kind="cordon", at_s=23.239, for_s=9.193, nodes=("n1", "n2"), pick=2),
        SimulatedFault(kind="kill_worker", at_s=25.822, for_s=0.0, nodes=("n1",), how="agreeing", pick=1),
        SimulatedFault(kind="cut_coordinator", at_s=28.811, for_s=6.632, pick=3),
        SimulatedFault(kind="crash_log", at_s=35.365, for_s=0.882, pick=2),
    ]
    outcome = simulate(62040, faults)
    assert not outcome.rule, outcome.story


@pytest.mark.parametrize("seed", range(1, 7))
def test_planned_departures_lose_and_redo_nothing(seed: int) -> None:
    faults = [
        SimulatedFault(kind="cordon", how="by", at_s=14.0, for_s=14.0, nodes=("n1",)),
        SimulatedFault(kind="ill_accelerator", how="foretold", at_s=29.0, for_s=1.0, nodes=("n1",), pick=1),
        SimulatedFault(kind="maintain", at_s=31.0, for_s=8.0, nodes=("n2",)),
    ]
    outcome = simulate(seed, faults)
    assert not outcome.rule, outcome.story
    assert outcome.micro_batches_repeated == outcome.iterations_lost == 0


def test_simulation_is_deterministic_per_seed() -> None:
    assert simulate(33) == simulate(33)
    assert simulate(33) != simulate(34)


@pytest.mark.parametrize("hash_seed", ["1", "2"])
def test_simulation_is_independent_of_hash_seed(hash_seed: str) -> None:
    program = "from unicrond.replay.simulation.run import simulate; print(simulate(33).digest)"
    said = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
    )
    assert said.stdout.strip() == simulate(33).digest


def test_simulation_plays_part_of_history() -> None:
    faults = history(33)
    assert len(faults) > 2
    outcome = simulate(33, faults[:1])
    assert not outcome.rule and outcome.faults == tuple(faults[:1])


@pytest.fixture
def forgetting_lost_workers() -> Iterator[None]:
    mutated = MUTANTS["forget_lost_workers"]
    before = dict(fold.FOLDS)
    mutated.apply()
    yield
    fold.FOLDS.clear()
    fold.FOLDS.update(before)


@pytest.mark.usefixtures("forgetting_lost_workers")
@pytest.mark.timeout(300)
def test_failing_history_shrinks_to_minimum() -> None:
    """From seed 133 on: it fails with five faults, and each fault costs a simulation."""
    failed = next(outcome for outcome in map(simulate, range(133, 1000)) if outcome.rule)
    assert len(failed.faults) > 2
    smallest = shrink(failed)
    assert smallest.rule == failed.rule and len(smallest.faults) < len(failed.faults)
    for place in range(len(smallest.faults)):
        fewer: list[SimulatedFault] = [fault for number, fault in enumerate(smallest.faults) if number != place]
        assert simulate(failed.seed, fewer).rule != failed.rule, "a fault is left that is not needed"
    assert simulate(failed.seed, smallest.faults) == smallest


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("mutant", "rule"),
    [
        ("drop_the_hold", "decisions_take_effect"),
        ("slots_are_not_counted", "slots_are_held_once"),
        ("deal_what_is_held", "trainers_agree"),
        ("fold_by_the_machine", "replay_equals_live"),
        ("keep_states", "memory_is_given_back"),
        ("lanes_out_of_order", "sums_are_the_reference"),
    ],
)
def test_mutant_is_caught_by_its_rule(mutant: str, rule: str) -> None:
    outcome, _ = find_breach(mutant, range(200), processes=1)
    assert outcome is not None and outcome.rule == rule
