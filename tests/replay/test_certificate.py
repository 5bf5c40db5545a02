"""What a log proves of a task's training, and that nothing in it can be changed, lost or added unseen."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.replay.command import unicron_replay
from tests.replay.logs import write_log
from tests.unicrond.test_lives import played
from unicrond.events.vocabulary import Checksums, StepCommitted
from unicrond.events.wire.envelope import Entry, RecordedEvent
from unicrond.replay.views.run_certificate import RunCertificate

#: Histories of the fuzzer: in the first a task goes back to a checkpoint.
SEEDS = (1, 5, 9)
Change = Callable[[StepCommitted], StepCommitted]


@cache
def history(seed: int) -> tuple[Entry, ...]:
    return tuple(played(seed))


def steps(log: tuple[Entry, ...], task: str) -> list[int]:
    """The places of the task's commits in the log."""
    return [place for place, entry in enumerate(log) if is_step(entry, task)]


def is_step(entry: Entry, task: str = "") -> bool:
    if not isinstance(entry, RecordedEvent):
        return False
    event = entry.envelope.event
    return isinstance(event, StepCommitted) and task in ("", event.task)


def tasks(log: tuple[Entry, ...]) -> list[str]:
    return sorted({entry.envelope.event.task for entry in log if is_step(entry)})  # type: ignore[union-attr]


def certify(log: tuple[Entry, ...], task: str, **fields: Any) -> RunCertificate:
    run = RunCertificate(task, 0, **fields)
    for entry in log:
        run.add(entry)
    return run


def with_step(log: tuple[Entry, ...], place: int, change: Change) -> tuple[Entry, ...]:
    entry = log[place]
    assert isinstance(entry, RecordedEvent)
    event = change(entry.envelope.event)  # type: ignore[arg-type]
    return (*log[:place], replace(entry, envelope=replace(entry.envelope, event=event)), *log[place + 1 :])


def kept(run: RunCertificate) -> tuple[tuple[int, str], ...]:
    return tuple(run.links)


@pytest.mark.parametrize("seed", SEEDS)
def test_histories_of_the_fuzzer_are_proven(seed: int) -> None:
    log = history(seed)
    runs = [certify(log, task) for task in tasks(log)]
    assert runs and all(run.is_proven for run in runs), [run.findings for run in runs]
    assert seed != 1 or any(run.returns for run in runs)


CHANGES: dict[str, Change] = {
    "a sample is another": lambda step: replace(step, samples_digest=(step.samples_digest + 1) % 2**61),
    "a sample is lost": lambda step: replace(step, samples=step.samples - 1),
    "samples are doubled": lambda step: replace(step, samples=2 * step.samples),
    "it is of no group": lambda step: replace(step, generation=step.generation + 1000),
    "it is another iteration": lambda step: replace(step, first=step.first + 7, last=step.last + 7),
}


@pytest.mark.parametrize("what", CHANGES)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_changed_commit_is_found(what: str, data: st.DataObject) -> None:
    log = history(data.draw(st.sampled_from(SEEDS)))
    task = data.draw(st.sampled_from(tasks(log)))
    place = data.draw(st.sampled_from(steps(log, task)))
    if not certify(with_step(log, place, lambda step: step), task).is_proven:
        raise AssertionError("the history itself is not proven")
    before = certify(log, task)
    changed = certify(with_step(log, place, CHANGES[what]), task, kept_links=kept(before))
    is_repeat = before.links == certify((*log[:place], *log[place + 1 :]), task).links
    assert is_repeat or (changed.findings_count and changed.parting is not None and not changed.is_proven)


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_lost_and_doubled_commits_are_found(data: st.DataObject) -> None:
    log = history(data.draw(st.sampled_from(SEEDS)))
    task = data.draw(st.sampled_from(tasks(log)))
    places = steps(log, task)
    place = data.draw(st.sampled_from(places))
    links = kept(certify(log, task))
    without = certify((*log[:place], *log[place + 1 :]), task, kept_links=links)
    assert without.links == links or without.parting is not None
    doubled = certify((*log[:place], log[place], *log[place:]), task, kept_links=links)
    assert doubled.links == links, "a commit that the next lead tells once more changes nothing"
    if place != places[-1] and without.links != links and not certify(log, task).returns:
        assert without.findings_count


@given(data=st.data(), loss=st.floats(0, 10))
@settings(max_examples=40, deadline=None)
def test_every_field_of_training_is_in_the_chain(data: st.DataObject, loss: float) -> None:
    """A loss, or checksums, that somebody made look better."""
    log = history(data.draw(st.sampled_from(SEEDS)))
    task = data.draw(st.sampled_from(tasks(log)))
    before = certify(log, task)
    place = data.draw(st.sampled_from(steps(log, task)))
    changes: list[Change] = [
        lambda step: replace(step, loss=loss),
        lambda step: replace(step, checksums=Checksums(iteration=step.first, parameters=12345)),
    ]
    changed = certify(with_step(log, place, data.draw(st.sampled_from(changes))), task, kept_links=kept(before))
    assert changed.links == before.links or changed.parting is not None


def test_longer_log_continues_the_one_that_was_kept() -> None:
    log = history(5)
    task = max(tasks(log), key=lambda name: len(steps(log, name)))
    half = log[: steps(log, task)[len(steps(log, task)) // 2] + 1]
    early = certify(half, task)
    assert 0 < early.last < certify(log, task).last
    assert certify(log, task, kept_links=kept(early)).parting is None
    assert certify(half[:-1], task, kept_links=kept(early)).parting == (0, early.last), "a tail is missing"


def test_commit_that_is_told_once_more_with_other_values_is_found() -> None:
    log = history(5)
    task = max(tasks(log), key=lambda name: len(steps(log, name)))
    place = steps(log, task)[3]
    lie = with_step((log[place],), 0, lambda step: replace(step, loss=0.25))
    run = certify((*log[: place + 1], *lie, *log[place + 1 :]), task)
    assert [finding.text for finding in run.findings] == ["told once more, with other samples or another loss"]


def test_parameters_that_two_commits_tell_differently_are_found() -> None:
    log = history(5)
    task = max(tasks(log), key=lambda name: len(steps(log, name)))
    first, second = steps(log, task)[:2]
    log = with_step(log, first, lambda step: replace(step, checksums=Checksums(iteration=1, parameters=7)))
    log = with_step(log, second, lambda step: replace(step, checksums=Checksums(iteration=1, parameters=8)))
    assert [finding.text for finding in certify(log, task).findings] == [
        "other parameters than the log had for it before"
    ]


def test_certify_command_keeps_and_compares(tmp_path: Path) -> None:
    log, out = history(5), tmp_path / "kept.json"
    task = tasks(log)[-1]
    path = write_log(tmp_path / "log.bin", list(log))
    done = unicron_replay("certify", task, "--log", path, "--dataset-size", "0", "--out", str(out))
    assert done.returncode == 0 and "their digests are those that the seed draws" in done.stdout, done.stderr
    again = unicron_replay("certify", task, "--log", path, "--against", str(out))
    assert again.returncode == 0 and f"the log continues that of {out}" in again.stdout
    place = steps(log, task)[2]
    other = write_log(tmp_path / "other.bin", list(with_step(log, place, lambda step: replace(step, loss=0.5))))
    changed = unicron_replay("certify", task, "--log", other, "--against", str(out), "--json")
    assert changed.returncode == 1 and json.loads(changed.stdout)["parting"] is not None
    wrong = unicron_replay("certify", task, "--log", path, "--dataset-size", "17", "--out", str(tmp_path / "no.json"))
    assert wrong.returncode == 1 and "that the seed does not draw" in wrong.stdout
    assert not (tmp_path / "no.json").exists()
    unknown = unicron_replay("certify", f"{task}x", "--log", path)
    assert unknown.returncode == 2 and f"the log has no submission of {task}x" in unknown.stderr
    out.write_text("{}")
    bad = unicron_replay("certify", task, "--log", path, "--against", str(out))
    assert bad.returncode == 2 and "is no certificate" in bad.stderr
