"""Two runs of a task, bit by bit: where they part, and what happened there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.replay.command import unicron_replay
from tests.replay.logs import troubled, write_log
from unicrond.events.vocabulary import Checksums, StepCommitted
from unicrond.events.wire.envelope import Entry, RecordedEvent
from unicrond.replay.views.run_comparison import RunHistory, compare_runs, entries_between, history_of


def with_steps_changed(entries: list[Entry], task: str, since: int, **fields: object) -> list[Entry]:
    """The log, in which the task's commits from that iteration on say something else."""
    changed: list[Entry] = []
    for entry in entries:
        if isinstance(entry, RecordedEvent) and isinstance(event := entry.envelope.event, StepCommitted):
            other = replace(event, **fields) if event.task == task and event.last >= since else event
            changed.append(replace(entry, envelope=replace(entry.envelope, event=other)))
        else:
            changed.append(entry)
    return changed


def run(*steps: tuple[int, float, int], sums: int = 0) -> RunHistory:
    """Of iterations, each with its loss and its parameters' checksum, 0 for none. `sums`: those of iteration 2."""
    found = RunHistory(sums={2: sums} if sums else {})
    for iteration, loss, checksum in steps:
        found.losses[iteration] = loss
        if checksum:
            found.parameters[iteration] = checksum
    return found


def test_comparison_of_equal_runs_finds_no_difference() -> None:
    found = compare_runs(run((1, 2.0, 0), (2, 1.5, 7), (3, 1.0, 0)), run((2, 1.5, 7), (4, 0.5, 0)))
    assert (found.compared, found.same, found.differs) == (2, 2, 0)


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (run((2, 1.5, 7), (3, 1.0 + 2**-40, 0), sums=5), (2, 3, "loss")),
        (run((1, 2.0, 0), (2, 1.5, 8), sums=5), (1, 2, "parameters")),
        (run((1, 2.0, 0), (2, 1.5, 8), sums=6), (1, 2, "gradient sums")),
    ],
    ids=["loss", "parameters", "sums"],
)
def test_comparison_finds_first_differing_bit(other: RunHistory, told: tuple[int, int, str]) -> None:
    found = compare_runs(run((1, 2.0, 0), (2, 1.5, 7), (3, 1.0, 0), sums=5), other)
    assert (found.same, found.differs, found.what) == told


def test_checksums_belong_to_iterations_named_by_commit() -> None:
    """Of the parameters that an iteration began with, and of its own sums; a commit without any says nothing."""
    log = with_steps_changed(list(troubled(1).log), "big", 1, checksums=Checksums(iteration=4, parameters=7, sums=5))
    found = history_of(log, "big")
    assert (found.parameters, found.sums) == ({4: 7}, {5: 5})
    plain = history_of(list(troubled(1).log), "big")
    assert (plain.parameters, plain.sums) == ({}, {})


def test_comparison_tells_entries_around_difference() -> None:
    log = list(troubled(1).log)
    whole = history_of(log, "big")
    last = max(whole.losses)
    other = history_of(with_steps_changed(log, "big", last, loss=9.0), "big")
    found = compare_runs(whole, other)
    assert found.differs == last and found.values[1] == 9.0
    earlier = sorted(whole.losses)[-2]
    assert found.same == earlier
    assert all(entry.seq for entry in entries_between(whole, found))
    assert not entries_between(whole, compare_runs(whole, whole)) or compare_runs(whole, whole).differs == 0


def test_compare_command_reports_difference(tmp_path: Path) -> None:
    log = list(troubled(1).log)
    here = write_log(tmp_path / "here.bin", list(log))
    there = write_log(tmp_path / "there.bin", with_steps_changed(log, "big", 1, loss=9.0))
    same = unicron_replay("compare", "big", "big", "--log", here)
    assert same.returncode == 0 and same.stdout.startswith("the same bits: ")
    done = unicron_replay("compare", "big", "big", "--log", here, "--other-log", there)
    assert done.returncode == 1 and "differs: loss" in done.stdout and "B: big in between" in done.stdout
    said = json.loads(unicron_replay("compare", "big", "big", "--log", here, "--other-log", there, "--json").stdout)
    assert said["what"] == "loss" and said["values"][1] == 9.0
    unknown = unicron_replay("compare", "big", "bigg", "--log", here)
    assert unknown.returncode == 2 and "bigg: the log has no committed iteration" in unknown.stderr
