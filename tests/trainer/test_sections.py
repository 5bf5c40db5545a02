"""Sections of a program: their limits by what they took, which of them come on top of an iteration, and their marks."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from unicrond.agents.protocol import marks
from unicrond.agents.protocol.marks import Marker, read
from unicrond.agents.trainer.detection.observing import Detection
from unicrond.agents.trainer.detection.sections import ENOUGH, FLOORS, NAMES_MAX, ProgramSection, ProgramSections
from unicrond.agents.trainer.loop.local import LocalHook
from unicrond.agents.trainer.process.context import WorkerSettings
from unicrond.events.vocabulary import TaskSpec, WorkerBusy

FLOOR_US = 1_000_000
START_S = 600.0


def entered(section: ProgramSection, *durations_us: int) -> None:
    for duration_us in durations_us:
        section.add(duration_us, FLOOR_US)


def usual_section(*durations_us: int) -> ProgramSection:
    """A section that every iteration has, after a cold entry and these."""
    sections = ProgramSections(Marker(None), FLOOR_US)
    section = sections.named("data")
    entered(section, 90_000_000, *durations_us)
    section.learn(FLOOR_US)
    return section


@pytest.mark.parametrize(
    ("durations_us", "limit_us"),
    [
        ([2_000_000] * (ENOUGH - 1), 0),
        ([1_000] * ENOUGH, FLOORS * FLOOR_US),
        ([4_000_000] * ENOUGH, 12_000_000),
        ([*[4_000_000] * ENOUGH, 9_000_000], 18_000_000),
        ([9_000_000, *[2_000_000] * 99], 18_000_000),
    ],
    ids=["too few", "the floor", "three times the usual", "twice the longest", "the longest ever"],
)
def test_limit_is_calculated_from_what_was_seen(durations_us: list[int], limit_us: int) -> None:
    assert usual_section(*durations_us).limit_us == limit_us


def test_rare_section_without_work_says_nothing() -> None:
    """Where another replica evaluates, an entry is over at once; this one may be the next to evaluate."""
    sections = ProgramSections(Marker(None), FLOOR_US)
    section = sections.named("evaluation")
    for iteration in range(1, 101):
        sections.begin_turn(iteration)
        if iteration % 10 == 0:
            with section:
                pass
            sections.learn()
    assert section.is_rare and not section.limit_us and not section.is_usual
    entered(section, *[20_000_000] * (ENOUGH + 1))
    assert section.limit_us == 60_000_000 and not section.is_usual


def test_newcomer_inherits_rare_limits_and_learns_usual_ones_itself() -> None:
    known = ProgramSections(Marker(None), FLOOR_US)
    data, evaluation = known.named("data"), known.named("evaluation")
    for iteration in range(1, 101):
        known.begin_turn(iteration)
        with data:
            pass
    evaluation.iterations = 10
    entered(evaluation, *[20_000_000] * (ENOUGH + 1))
    words = known.words()
    newcomer = ProgramSections(Marker(None), FLOOR_US)
    newcomer.begin_turn(101)
    newcomer.inherit(words)
    assert newcomer.named("evaluation").limit_us == 60_000_000 and newcomer.named("evaluation").is_rare
    assert newcomer.named("data").is_usual and not newcomer.named("data").limit_us
    assert newcomer.words()["evaluation"] == words["evaluation"], "and passes them on"


@pytest.mark.parametrize("words", [None, [], {"data": 1}, {"data": [1, 2]}, {"a b": [1, 1, 0]}, {"data": [1, -1, 0]}])
def test_strange_words_are_ignored(words: object) -> None:
    sections = ProgramSections(Marker(None), FLOOR_US)
    sections.inherit(words)
    assert not sections.words() and not sections.named("data").inherited


def test_entry_that_fails_or_holds_an_iteration_does_not_count() -> None:
    sections = ProgramSections(Marker(None), FLOOR_US)
    section = sections.named("data")
    sections.begin_turn(1)
    for _ in range(2 * ENOUGH):
        with pytest.raises(KeyError), section:
            raise KeyError
        with section:
            sections.begin_turn()
    assert not section.durations


@pytest.mark.parametrize("name", ["", "a b", "-a", "ä", "a" * 33, 7])
def test_name_is_checked(name: Any) -> None:
    with pytest.raises(ValueError, match=r"give a name of 1 to 32 letters"):
        ProgramSections(Marker(None), FLOOR_US).named(name)
    with pytest.raises(ValueError, match=r"give a name of 1 to 32 letters"):
        LocalHook.section(LocalHook.__new__(LocalHook), name)


def test_names_are_bounded() -> None:
    sections = ProgramSections(Marker(None), FLOOR_US)
    for number in range(NAMES_MAX):
        sections.named(f"s{number}")
    with pytest.raises(ValueError, match=r"there are 32 sections already: s0, s1"):
        sections.named("one-more")
    assert sections.named("s0")


# --- the mark -----------------------------------------------------------------------------------------


class Worker:
    """A worker's detection with its mark in a file; `sent`: to its agent."""

    def __init__(self, directory: Path) -> None:
        self.path, self.sent, self.timeouts_s = directory / "t.1", list[Any](), list[float]()
        self.mark = Marker(self.path)
        context: Any = SimpleNamespace(
            settings=WorkerSettings(fault_wait_s=120.0, lease_s=60.0, collective_timeout_s=60.0, start_s=START_S),
            launch=SimpleNamespace(spec=TaskSpec(name="t"), reporter={"node": "n", "task": "t", "worker": "t.1"}),
            mark=self.mark,
            channel=SimpleNamespace(send=self.sent.append),
        )
        self.detection = Detection(context, [])
        self.group: Any = SimpleNamespace(generation=1, set_timeout=self.timeouts_s.append)
        self.detection.start_generation(self.group)

    def seen(self) -> marks.Mark:
        mark = read(self.path)
        assert mark is not None
        return mark

    def train(self, *iterations: int, section: str = "") -> None:
        for iteration in iterations:
            self.detection.start_iteration(iteration)
            if section:
                with self.detection.section(section):
                    pass
            self.detection.commit(iteration, 10_000, self.group)


@pytest.fixture
def worker(tmp_path: Path) -> Worker:
    return Worker(tmp_path)


def test_usual_section_is_marked_and_nothing_is_sent(worker: Worker) -> None:
    worker.train(*range(1, 11), section="data")
    worker.sent.clear()
    worker.detection.start_iteration(11)
    limit_us, before_us = worker.seen().limit_us, marks.now_us()
    with worker.detection.section("data"):
        mark = worker.seen()
        assert (mark.section, mark.section_limit_us) == ("data", FLOORS * FLOOR_US)
        assert before_us <= mark.section_began_us <= mark.changed_us <= marks.now_us()
        assert (mark.phase, mark.limit_us) == ("start", limit_us), "the iteration's limit holds as well"
    after = worker.seen()
    assert (after.section, after.section_limit_us, after.limit_us) == ("", 0, limit_us)
    assert after.changed_us >= mark.changed_us, "to leave it is a move"
    assert not worker.sent and worker.detection.is_plain(10)


def test_inner_section_is_marked_until_it_ends(worker: Worker) -> None:
    worker.train(*range(1, 11), section="data")
    with worker.detection.section("step", 5.0):
        outer = worker.seen()
        with worker.detection.section("data"):
            assert worker.seen().section == "data"
        assert worker.seen()._replace(changed_us=0) == outer._replace(changed_us=0)


def test_section_in_which_an_iteration_begins_has_no_limit(worker: Worker) -> None:
    worker.train(*range(1, 11), section="data")
    with worker.detection.section("data"):
        worker.detection.start_iteration(11)
        assert (worker.seen().section, worker.seen().section_limit_us) == ("data", 0)
    with worker.detection.section("data"):
        worker.detection.start_generation(worker.group)
        assert worker.seen().section_limit_us == 0


def test_rare_section_comes_on_top_of_the_iteration(worker: Worker) -> None:
    """Its time is unknown, the first time in iteration 40: as long as a start may take. The others wait as long."""
    worker.train(*range(1, 40))
    worker.timeouts_s.clear()
    worker.detection.start_iteration(40)
    limit_us = worker.seen().limit_us
    with worker.detection.section("evaluation"):
        mark = worker.seen()
        assert mark.limit_us >= START_S * 1e6 and (mark.phase, mark.section) == ("busy", "evaluation")
        assert worker.timeouts_s[-1] >= START_S
        time.sleep(0.002)
    assert worker.seen().limit_us >= limit_us + 2_000
    assert not worker.detection.is_plain(10_000)
    told = [message for message in worker.sent if isinstance(message, WorkerBusy)]
    assert [message.section for message in told] == ["evaluation", ""] and told[0].limit_us == START_S * 1e6


def test_known_rare_section_has_its_own_limit(worker: Worker) -> None:
    worker.train(*range(1, 40))
    evaluation = worker.detection._sections.named("evaluation")
    entered(evaluation, *[20_000_000] * (ENOUGH + 1))
    with worker.detection.section("evaluation"):
        mark = worker.seen()
    assert mark.section_limit_us == 60_000_000
    assert mark.limit_us >= 60_000_000, "no iteration is late before"


def test_declared_section_keeps_its_word(worker: Worker) -> None:
    worker.train(*range(1, 11), section="evaluation")
    with worker.detection.section("evaluation", 30.0):
        assert worker.seen().section == "evaluation" and not worker.seen().section_limit_us
    assert worker.sent[-2].limit_us == 30_000_000
