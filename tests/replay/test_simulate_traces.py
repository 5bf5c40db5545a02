"""Failure traces: drawn ones are what they say, files are read strictly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from unicrond.replay.evaluation.model.traces import Trace, TraceError, trace
from unicrond.replay.evaluation.model.virtual_time import DAY_US, HOUR_US


def kinds(drawn: Trace) -> tuple[int, int]:
    return drawn.node_faults, len(drawn.faults) - drawn.node_faults


@pytest.mark.parametrize(("spec", "days", "counts"), [("trace-a", 56, (10, 33)), ("trace-b", 7, (26, 80))])
def test_traces_match_counts_of_paper(spec: str, days: int, counts: tuple[int, int]) -> None:
    drawn = trace(spec, 16, 1)
    assert (drawn.length_us, kinds(drawn)) == (days * DAY_US, counts)
    assert list(drawn.faults) == sorted(drawn.faults, key=lambda fault: fault.at_us)
    assert all(fault.repair_us > 0 if fault.severity == 1 else fault.repair_us == 0 for fault in drawn.faults)


@pytest.mark.parametrize("spec", ["trace-a", "trace-b", "poisson:mtbf_d=2,repair_h=100"])
def test_absent_node_never_fails(spec: str) -> None:
    away_until = dict.fromkeys(range(16), 0)
    for fault in trace(spec, 16, 3).faults:
        assert fault.at_us >= away_until[fault.node]
        away_until[fault.node] = fault.at_us + fault.repair_us


def test_seed_determines_trace() -> None:
    assert trace("trace-b", 16, 7) == trace("trace-b", 16, 7)
    assert trace("trace-b", 16, 7) != trace("trace-b", 16, 8)


def test_repair_time_leaves_fault_times() -> None:
    short, long = trace("trace-b:repair_h=6", 16, 1), trace("trace-b:repair_h=24", 16, 1)
    assert [fault.at_us for fault in short.faults] == [fault.at_us for fault in long.faults]
    assert {fault.repair_us for fault in long.faults if fault.severity == 1} == {24 * HOUR_US}


def test_poisson_trace_has_given_rate() -> None:
    drawn = trace("poisson:mtbf_d=10,other_mtbf_d=5,days=1000,repair_h=1", 20, 1)
    nodes, others = kinds(drawn)
    assert nodes == pytest.approx(2000, rel=0.1)
    assert others == pytest.approx(4000, rel=0.1)
    assert drawn.node_mtbf_s / 86400 == pytest.approx(10, rel=0.1)


def test_meta_trace_has_published_rate() -> None:
    """A fault in 1.8 h on 16,384 GPUs; 321 of 419 take the node."""
    drawn = trace("meta:days=50", 2048, 1)
    nodes, others = kinds(drawn)
    assert 50 * 24 / (nodes + others) == pytest.approx(1.8, rel=0.1)
    assert nodes / (nodes + others) == pytest.approx(321 / 419, rel=0.05)


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ("trace-c", "no such file"),
        ("trace-b:repair=3", "unknown setting 'repair'"),
        ("trace-b:repair_h=-3", "give hours"),
        ("trace-b:repair_h=nan", "give hours"),
        ("poisson:mtbf_d", "give mean days"),
        ("trace-a:repair_from_d=9", "swap them"),
        ("poisson:mtbf_d=0.0001,days=10000", "2 million"),
    ],
)
def test_bad_trace_spec_is_one_line_with_fix(spec: str, told: str) -> None:
    with pytest.raises(TraceError, match=told) as raised:
        trace(spec, 16, 1)
    assert "\n" not in str(raised.value)


# --- InfiniteHBD's format ------------------------------------------------------------------------


def event(node: str, day: float, kind: str) -> dict[str, Any]:
    cause = {"Level": "Hardware Failure", "Class": "GPU", "Desc": "xid"}
    return {"node_id": node, "event_time": day, "event_type": f"fault_{kind}", "fault_type": cause}


def written(path: Path, events: Any) -> str:
    file = path / "trace.json"
    file.write_text(json.dumps(events))
    return str(file)


def test_overlapping_outages_merge(tmp_path: Path) -> None:
    events = [
        event("a", 1.0, "start"), event("b", 1.5, "start"), event("a", 2.0, "start"), event("b", 2.5, "end"),
        event("a", 3.0, "end"), event("a", 4.0, "end"), event("c", 5.0, "start"), event("d", 10.25, "start"),
    ]  # fmt: skip
    read = trace(written(tmp_path, events), 400, 1)
    assert read.length_us == 10 * DAY_US
    outages = sorted((fault.at_us / DAY_US, fault.repair_us / DAY_US) for fault in read.faults)
    assert outages == [(1.0, 3.0), (1.5, 1.0), (5.0, 5.0)]
    assert len({fault.node for fault in read.faults}) == 3


def test_smaller_cluster_samples_observed_nodes(tmp_path: Path) -> None:
    events = [event(f"n{n}", 1.0, kind) for n in range(300) for kind in ("start", "end")]
    counts = [
        len(trace(written(tmp_path, [*events, event("x", 9.5, "start")]), 100, seed).faults) for seed in range(20)
    ]
    assert min(counts) < max(counts)
    assert sum(counts) / 20 == pytest.approx(75, rel=0.15)
    with pytest.raises(TraceError, match="400 nodes"):
        trace(written(tmp_path, events), 401, 1)


@pytest.mark.parametrize(
    ("events", "told"),
    [
        ({}, "expected a list"),
        ([], "expected a list"),
        ([{"node_id": "a"}], "event 0"),
        ([event("a", 1.0, "begin")], "event 0"),
        ([event("a", -1.0, "start")], "event 0"),
        ([event("a", 1.0, "start") | {"more": 1}], "event 0"),
        ([event("a", 1.0, "end")], "ends on day 1 unbegun"),
    ],
)
def test_bad_trace_file_is_one_line_with_place(tmp_path: Path, events: Any, told: str) -> None:
    with pytest.raises(TraceError, match=told) as raised:
        trace(written(tmp_path, events), 16, 1)
    assert "\n" not in str(raised.value)


def test_trace_file_must_be_json(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("node,1,2")
    with pytest.raises(TraceError, match="not JSON"):
        trace(str(tmp_path / "t"), 16, 1)
