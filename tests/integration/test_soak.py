"""The soak, small and short: what it measures must be there (tests/soak)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.soak.memberships import Memberships
from tests.soak.report import percentile, slope


@pytest.mark.timeout(600)
def test_soak_heals_and_loses_nothing(tmp_path: Path) -> None:
    out = tmp_path / "soak.json"
    command = [sys.executable, "-m", "tests.soak.run", "--agents", "12", "--slots", "4", "--minutes", "0.25"]
    command += ["--faults-per-hour", "1500", "--heartbeat-s", "0.5", "--down-s", "4", "--iteration-s", "1"]
    command += ["--patience-s", "60", "--kept-every-s", "2", "--out", str(out), "--keep", str(tmp_path / "kept")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=540, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = json.loads(out.read_text())
    assert found["nothing_lost"] and found["all_healed"]
    # Each of 48 workers started, was ready and joined a group, and each node joined and applied what it was told.
    assert found["log"]["acknowledged"] > 48 * 4 + 12 * 2 and found["log"]["missing"] == 0
    assert {fault["kind"] for fault in found["faults"]} == {"worker", "node", "takeover"}
    assert found["last_node_ms"]["count"] >= 3 and found["last_node_ms"]["p99"] < 10_000
    assert found["fold"]["refused"] == [] and found["fold"]["incidents_open"] == []
    for phase in ("rest", "faults"):
        assert found["phases"][phase]["coordinator_cpu_percent"] > 0
        assert found["loop_delay_ms"][phase]["max"] > 0
    assert out.with_suffix(".png").stat().st_size > 10_000


def test_soak_slope_has_interval() -> None:
    rise, half = slope([(x, 3.0 * x + (x % 2) * 0.1) for x in range(50)])
    assert abs(rise - 3) < half < 0.01
    assert percentile([5.0, 1.0, 3.0], 0.5) == 3.0 and percentile([5.0, 1.0], 0.99) == 5.0


def test_soak_task_is_whole_once_workers_follow_membership() -> None:
    known = Memberships()
    known.told("t", 1, False, 4, 2, {"a": 1.0, "b": 1.5})
    known.following(1, [["t", 1, 2]], 2.0)
    assert not known.all_whole(["t"], 4)
    known.following(2, [["t", 1, 2]], 2.5)
    assert not known.all_whole(["t", "u"], 4) and known.all_whole(["t"], 4)
    fault = {"s": 10.0, "tasks": ["t"], "before": known.generations()}
    known.told("t", 2, True, 3, 2, {"a": 10.1})
    known.told("t", 2, True, 3, 2, {"b": 10.3})
    known.following(1, [["t", 2, 2]], 10.5)
    known.following(2, [["t", 2, 1]], 10.6)
    assert known.reached(fault)["whole_s"] is None
    known.told("t", 3, False, 4, 2, {"a": 11.0, "b": 11.0})
    known.following(1, [["t", 3, 2]], 11.5)
    known.following(2, [["t", 3, 2]], 12.0)
    reached = known.reached(fault)
    assert round(reached["first_s"], 3) == 0.1 and round(reached["last_s"], 3) == 0.3 and reached["complete"]
    assert known.all_whole(["t"], 4)
    assert reached["whole_s"] == 2.0
