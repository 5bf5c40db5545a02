"""`unicron-replay fuzz` as people run it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.replay.command import unicron_replay
from unicrond.replay.simulation.checks.invariants import RULES
from unicrond.replay.simulation.effects.fault_effects import EFFECTS
from unicrond.replay.simulation.faults.faults import (
    BITS_KINDS,
    DOMAIN_KINDS,
    FAULT_KINDS,
    LARGE_KINDS,
    LIAR_KINDS,
    MODE_KINDS,
    OUTAGE_KINDS,
    PROGRAM_KINDS,
)
from unicrond.replay.simulation.fuzz import FuzzReport, _page
from unicrond.replay.simulation.mutants.table import MUTANTS
from unicrond.replay.simulation.run import RunOutcome, history, simulate

DOCS = Path(__file__).parents[2] / "docs"
DOCUMENT = DOCS / "design" / "simulation.md"


def test_fuzz_exits_with_0_and_reports_seeds() -> None:
    ran = unicron_replay("fuzz", "--seeds", 6, "--first-seed", 100, "--processes", 2, "--json")
    assert ran.returncode == 0, ran.stderr
    report = json.loads(ran.stdout)
    assert report["seeds"] == 6 and report["first_seed"] == 100 and not report["failed"]
    assert report["steps"] > 0 and sum(report["faults"].values()) == sum(len(history(seed)) for seed in range(100, 106))


def test_fuzz_plays_selected_faults() -> None:
    ran = unicron_replay("fuzz", "--seeds", 1, "--first-seed", 33, "--faults", "0,2")
    assert ran.returncode == 0, ran.stderr
    assert "1 seeds from 33" in ran.stdout and "2 faults" in ran.stdout


def test_fuzz_accepts_any_first_seed() -> None:
    ran = unicron_replay("fuzz", "--seeds", 1, "--first-seed", 0xFFFFFFFF, "--faults", "0", "--json")
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["first_seed"] == 0xFFFFFFFF


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--faults", "x"], "does not name places"),
        (["--faults", "99", "--seeds", "1"], "name some of these"),
        (["--seeds", "0"], "give at least 1"),
        (["--seeds", "many"], "--seeds"),
        (["--first-seed", "-1"], "is not a whole number of 0 to"),
        (["--first-seed", "9" * 5000], "is not a whole number of 0 to"),
    ],
)
def test_fuzz_reports_bad_flag_in_one_line(flags: list[str], said: str) -> None:
    ran = unicron_replay("fuzz", *flags)
    assert ran.returncode == 2 and said in ran.stderr and len(ran.stderr.splitlines()) == 1


def test_fuzz_failure_names_command_that_repeats_it() -> None:
    faults = tuple(history(33)[:2])
    failure = RunOutcome(seed=33, faults=faults, rule="incidents_close", story="i7 is open", at_s=280.0)
    page = _page(
        FuzzReport(
            first_seed=0,
            seeds=34,
            commit="abc123",
            seconds=1.0,
            entries=1,
            steps=1,
            incidents=1,
            faults={},
            slowest_rest_s=1.0,
            slowest_rest_seed=1,
            failed={33: "incidents_close"},
            failure=failure,
            repeat="unicron-replay fuzz --first-seed 33 --seeds 1 --faults=0,1",
        )
    )
    assert "git checkout abc123" in page and "--first-seed 33 --seeds 1 --faults=0,1" in page
    assert all(str(fault) in page for fault in faults) and "i7 is open" in page


def test_document_names_every_rule_and_fault() -> None:
    text = DOCUMENT.read_text()
    assert not [name for name in RULES if f"`{name}`" not in text]
    assert not [kind for kind in EFFECTS if f"`{kind}`" not in text]
    tables = (FAULT_KINDS, MODE_KINDS, LIAR_KINDS, PROGRAM_KINDS, OUTAGE_KINDS, DOMAIN_KINDS, LARGE_KINDS, BITS_KINDS)
    assert set(EFFECTS) == {kind for table in tables for kind in table}


def test_result_table_has_row_for_every_mutant() -> None:
    table = (DOCS / "results" / "fuzzing.md").read_text()
    assert [name for name in MUTANTS if f"\n| `{name}` | " not in table] == []


def test_simulation_without_faults_breaks_no_rule() -> None:
    outcome = simulate(7, [])
    assert not outcome.rule and outcome.incidents == 0 and outcome.rest_s < 10
