"""A link between two nodes that lets nothing or little through, between real agents and workers (faulty_links.py)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.integration.faulty_links import CASES, Outcome
from tests.integration.namespaces import run_case, succeeds
from unicrond.local.dev import HANG_FLOOR_S

matrix = pytest.mark.matrix
#: Opens a device in a network namespace, as link_relay.py does; fails where the kernel, or who runs this, cannot.
_PROBE = """
import fcntl, os, struct
device = os.open("/dev/net/tun", os.O_RDWR)
fcntl.ioctl(device, 0x400454CA, struct.pack("16sH14x", b"probe", 0x1001))
"""
#: No more time without a step than this many time limits; whole so soon after the link is good again.
LIMITS, WHOLE_S = 3, 10.0
SILENT = [name for name in CASES if name.startswith("silent")]


def can_relay() -> bool:
    return succeeds([sys.executable, "-c", _PROBE])


pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(not can_relay(), reason="no network namespaces, or no /dev/net/tun, here"),
]


def run(case: str, directory: Path) -> Outcome:
    return run_case("tests.integration.faulty_links", case, directory, Outcome)


def test_silent_link_costs_one_end_once(tmp_path: Path) -> None:
    """The shortest row, in the plain suite: what happens, not how soon. `make matrix` holds all rows to the figures."""
    outcome = run("silent for 10 s", tmp_path)
    assert sum(outcome.evicted.values()) == 1 and set(outcome.evicted) < set(CASES["silent for 10 s"].pair), outcome
    assert not outcome.isolated and outcome.whole_s >= 0, outcome


@matrix
@pytest.mark.parametrize("case", SILENT)
def test_task_leaves_one_end_of_a_silent_link(case: str, tmp_path: Path) -> None:
    outcome = run(case, tmp_path)
    assert outcome.standstill_s <= LIMITS * float(HANG_FLOOR_S), outcome
    assert sum(outcome.evicted.values()) == 1 and set(outcome.evicted) < set(CASES[case].pair), outcome
    assert not outcome.isolated and 0 <= outcome.whole_s <= WHOLE_S, outcome
    first, second = CASES[case].pair
    is_named = any(f"reason={first} -> {second} is cut; the other way works" in line for line in outcome.sentences)
    assert is_named is not CASES[case].both, outcome


@matrix
def test_task_is_whole_after_a_node_was_silent(tmp_path: Path) -> None:
    outcome = run("node silent for 10 s", tmp_path)
    assert outcome.standstill_s <= LIMITS * float(HANG_FLOOR_S) and outcome.evicted == {"n3": 1}, outcome
    assert not outcome.isolated and 0 <= outcome.whole_s <= WHOLE_S, outcome


@matrix
def test_flapping_link_is_believed_later_each_time(tmp_path: Path) -> None:
    outcome = run("flapping", tmp_path)
    assert outcome.standstill_s <= LIMITS * float(HANG_FLOOR_S), outcome
    assert sum(outcome.evicted.values()) < CASES["flapping"].times and not outcome.isolated, outcome


@matrix
@pytest.mark.parametrize("case", ["loses 25 %", "3 Mbit/s"])
def test_task_leaves_a_link_that_costs_more_than_it_brings(case: str, tmp_path: Path) -> None:
    outcome = run(case, tmp_path)
    assert sum(outcome.evicted.values()) == 1 and set(outcome.evicted) < set(CASES[case].pair), outcome
    assert not outcome.isolated and 0 <= outcome.whole_s <= WHOLE_S, outcome
