"""A worker that floods its agent (worker_budgets.py, floods.py): what goes on, and what others feel of it."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import aclosing
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.agents.entries import JUNK
from tests.agents.node import NODE, Node, committed, decision, reporter
from tests.agents.test_core import member
from tests.agents.test_daemon import AgentProcess, Coordinator, agent, coordinator
from tests.seeds import at_most
from unicrond.agents.core import floods
from unicrond.agents.core import worker_budgets as budgets
from unicrond.agents.core.state import Action, Append, WorkerSaid
from unicrond.agents.core.worker_budgets import (
    ANSWERS,
    BUDGETS,
    READING,
    WAITING_MAX,
    ReportDrops,
    WorkerBudget,
    WorkerHeldUp,
)
from unicrond.agents.protocol.messages import FromWorker, Launch
from unicrond.events.log.entrance import Bucket
from unicrond.events.nats.connection import Connection
from unicrond.events.nats.event_log import NatsBeatLog
from unicrond.events.vocabulary import (
    ErrorReported,
    Heartbeat,
    NodeJoined,
    StepCommitted,
    StopRequested,
    StoreAddress,
    StragglerObserved,
    StragglerRecovered,
    TaskCompleted,
    TaskSpec,
    WorkerExited,
    WorkerJoinedGroup,
    WorkerReady,
    WorkerStarted,
)
from unicrond.events.wire.envelope import RecordedEvent

__all__ = ["agent", "coordinator"]

LAUNCH = Launch(
    worker="a.1", task="a", node=NODE, address="", agent_socket="", replica=0, shard=0,
    store=StoreAddress(host="127.0.0.1", port=1), spec=TaskSpec(name="a"),
)  # fmt: skip
SECOND_US = 1_000_000
#: How many entries a worker that says everything as fast as it can brings about at once, and then in a second.
ENTRIES_AT_ONCE = sum(bucket.size for bucket in (*BUDGETS.values(), ANSWERS))
ENTRIES_PER_S = sum(SECOND_US / bucket.every_us for bucket in (*BUDGETS.values(), ANSWERS)) + 3
FLOOD_S = 6


def junk(kind: str, number: int) -> FromWorker:
    return JUNK[kind](LAUNCH, number)


def error(message: str = "boom", generation: int = 0) -> ErrorReported:
    return ErrorReported(
        **reporter("a.1"), kind="exception", generation=generation, iteration=0, phase="unknown", message=message
    )


@pytest.fixture
def node() -> Node:
    node = Node()
    node.boot()
    member(node, "a.1", 1)
    return node


def say(node: Node, message: FromWorker, now_us: int) -> list[Action]:
    return node.feed(WorkerSaid(worker="a.1", message=message, now_us=now_us))


def said(actions: list[Action]) -> list[Any]:
    return [action.event for action in actions if isinstance(action, Append)]


# --- the pure budget -----------------------------------------------------------------------------


@given(
    st.integers(1, 20),
    st.integers(1, 1000),
    st.lists(st.integers(0, 3000), max_size=60),
)
def test_bucket_gives_its_size_at_once_and_one_more_in_its_time(size: int, every_us: int, gaps: list[int]) -> None:
    bucket, paid_us, now_us, taken = Bucket(size, every_us), 0, 10_000, []
    for gap_us in gaps:
        now_us += gap_us
        if not bucket.pause_us(paid_us, now_us):
            paid_us = bucket.paid_us(paid_us, now_us)
            taken.append(now_us)
        else:
            assert not bucket.pause_us(paid_us, now_us + bucket.pause_us(paid_us, now_us)), "the pause is enough"
    for first in range(len(taken)):
        for last in range(first, len(taken)):
            assert last - first + 1 <= size + (taken[last] - taken[first]) / every_us
    assert len(taken) >= min(size, len(gaps))


@settings(max_examples=at_most(100))
@given(st.data())
def test_any_flood_is_bounded_and_its_newest_states_go_on(data: st.DataObject) -> None:
    """Whatever is said in whatever order: entries, memory and counts are bounded, and nothing is lost uncounted."""
    limited = sorted(name for name in JUNK if budgets.kind_of(junk(name, 1)) in BUDGETS and "copies" not in name)
    budget, now_us, passed, counted = WorkerBudget(), 0, 0, 0
    newest: dict[tuple[str, str], FromWorker] = {}
    names = data.draw(st.lists(st.sampled_from(limited), min_size=1, max_size=4))
    for number in range(1, 400):
        name = names[number % len(names)]
        message = junk(name, number)
        now_us += data.draw(st.sampled_from([0, 1, 1000])) if number % 50 == 0 else 1
        budget, verdict = budgets.judge(budget, message, now_us)
        passed += verdict == "pass"
        counted += verdict in ("replace", "drop")
        if verdict in ("wait", "replace"):
            newest[budgets.kind_of(message), budgets.subject_of(message)] = message
        assert len(budget.waiting) <= WAITING_MAX
    kinds = {budgets.kind_of(junk(name, 1)) for name in names}
    assert passed <= sum(BUDGETS[kind].size for kind in kinds) + len(kinds)
    assert budget.waiting == newest, "of each subject the newest waits"
    assert counted == sum(budget.unsaid.values()) and passed + counted + len(budget.waiting) == 399


def test_kinds_do_not_empty_each_others_buckets() -> None:
    budget = WorkerBudget()
    for number in range(1000):
        for kind in ("waiting", "corruption", "not saved", "slow"):
            budget, _ = budgets.judge(budget, junk(kind, number), 0)
    _, verdict = budgets.judge(budget, error(), 0)
    assert verdict == "pass", "the first error is told at once"


def test_same_error_is_told_once_in_a_second() -> None:
    budget, first = budgets.judge(WorkerBudget(), error(), 0)
    budget, again = budgets.judge(budget, error(), budgets.REPEAT_US - 1)
    budget, other = budgets.judge(budget, error("bang"), budgets.REPEAT_US - 1)
    _, later = budgets.judge(budget, error("bang"), 3 * budgets.REPEAT_US)
    assert (first, again, other, later) == ("pass", "drop", "pass", "pass")


def test_recovery_replaces_the_straggler_that_waits() -> None:
    budget = WorkerBudget()
    for number in range(BUDGETS["StragglerObserved"].size):
        budget, verdict = budgets.judge(budget, junk("stragglers", number), 0)
        assert verdict == "pass"
    late = junk("stragglers", 1)
    assert isinstance(late, StragglerObserved)
    budget, _ = budgets.judge(budget, late, 0)
    fields = {name: getattr(late, name) for name in StragglerRecovered.__struct_fields__}
    budget, verdict = budgets.judge(budget, StragglerRecovered(**fields), 0)
    assert verdict == "replace" and list(budget.waiting.values()) == [StragglerRecovered(**fields)]


def test_answers_to_memberships_are_as_fast_as_these() -> None:
    """A group that cannot form breaks in each of its generations, fifty in a second."""
    budget = WorkerBudget()
    for generation in range(1, 400):
        budget, verdict = budgets.judge(budget, error(str(generation), generation), 20_000 * generation, generation)
        assert verdict == "pass"
    _, verdict = budgets.judge(budget, error("more", 399), 20_000 * 399, 399)
    assert verdict == "pass", "the bucket of errors is full still"
    flood = WorkerBudget()
    verdicts = []
    for generation in range(1, 2000):
        flood, verdict = budgets.judge(flood, error(str(generation), generation), 0, 10**9)
        verdicts.append(verdict)
    assert verdicts.count("pass") == ANSWERS.size + BUDGETS["ErrorReported"].size, "one that lies about its generation"


# --- the core ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", sorted(JUNK))
def test_flood_of_one_kind_brings_few_entries(node: Node, kind: str) -> None:
    before = len(node.appended)
    for number in range(2, 3002):
        say(node, junk(kind, number), number * 1000)  # three seconds
    assert len(node.appended) - before <= 60


def test_what_waits_goes_on_when_its_bucket_allows_it(node: Node) -> None:
    for number in range(100):
        say(node, error(str(number)), 0)
    assert [event.message for event in node.of(ErrorReported)] == [str(number) for number in range(16)]
    assert node.timers["budget", "a.1/ErrorReported"] == 5.0
    assert [event.message for event in said(node.fire("budget", "a.1/ErrorReported"))] == ["99"], "the newest"
    assert ("budget", "a.1/ErrorReported") not in node.timers
    say(node, error("late"), 5 * SECOND_US)
    assert node.timers["budget", "a.1/ErrorReported"] == 5.0


@pytest.mark.parametrize("last", ["end", "completion", "stop"])
def test_what_waits_goes_before_the_last_word(node: Node, last: str) -> None:
    for number in range(1, 100):
        say(node, junk("saved", number), 0)
    if last == "end":
        actions = node.die("a.1", 9)
    elif last == "stop":
        actions = say(node, junk("stop", 1), 0)
    else:
        completed = TaskCompleted(**reporter("a.1"), iteration=99, loss=1.0, params_digest="0" * 16)
        actions = say(node, completed, 0)
    assert said(actions)[0].iteration == 99
    assert isinstance(said(actions)[-1], WorkerExited | StopRequested | TaskCompleted)
    if last == "end":
        node.fire("floods", "a.1")  # says the rest
        node.fire("floods", "a.1")
        assert not node.state.budgets, "nothing is kept of one that has ended"


def test_drops_are_said_once_in_a_minute_and_in_the_beats(node: Node) -> None:
    lines = []
    for number in range(100):
        lines += [a for a in say(node, error(str(number)), 0) if isinstance(a, ReportDrops)]
    assert lines == [ReportDrops(worker="a.1", counts={"ErrorReported": 1})], "the first at once"
    assert floods.worst(node.state) == (83, "a.1")
    (line,) = [a for a in node.fire("floods", "a.1") if isinstance(a, ReportDrops)]
    assert line.counts == {"ErrorReported": 82}
    assert floods.worst(node.state) == (82, "a.1")
    assert not [a for a in node.fire("floods", "a.1") if isinstance(a, ReportDrops)]
    assert floods.worst(node.state) == (0, "") and ("floods", "a.1") not in node.timers


def test_frames_that_are_read_late_count(node: Node) -> None:
    node.feed(WorkerHeldUp(worker="a.1", frames=5000))
    node.feed(WorkerHeldUp(worker="nobody.1", frames=5000))
    assert floods.worst(node.state) == (5000, "a.1")


def test_commits_of_a_diverging_loss_are_summed(node: Node) -> None:
    """The first are told at once; after that they are summed as others are, and none is lost."""
    for iteration in range(1, 1001):
        say(node, committed(1, iteration, loss=float("nan")), iteration * 1000)
    node.fire("commits", "a")
    steps = node.of(StepCommitted)
    assert len(steps) <= 40
    assert sum(step.last - step.first + 1 for step in steps) == 1000


def test_honest_pace_passes_unchanged(node: Node) -> None:
    """Fifty generations in a second for three seconds, each with all that a worker says in one."""
    for generation in range(2, 152):
        now_us = generation * 20_000
        node.tell(decision("a", generation, ["a.1"]))
        joined = replace(junk("joined", generation), iteration=1)
        for message in (joined, replace(junk("loaded", 1), generation=generation), error("peer", generation)):
            assert said(say(node, message, now_us)), (generation, message)
    assert len(node.of(WorkerJoinedGroup)) == 151 and not node.state.budgets["a.1"].unsaid


# --- a real agent, and a real worker -------------------------------------------------------------


@pytest.mark.parametrize("kind", ["same error", "all"])
async def test_flood_of_one_worker_delays_no_other(
    agent: AgentProcess, coordinator: Coordinator, nats_connection: Connection, kind: str
) -> None:
    await coordinator.until(NodeJoined)
    await coordinator.start("b.1")
    victim = (await coordinator.until(WorkerStarted, worker="b.1")).pid
    await coordinator.until(WorkerReady, worker="b.1")
    await coordinator.membership(1, "b.1")
    await coordinator.start("a.1", "flood", kind, str(FLOOD_S))
    await coordinator.until(WorkerReady, worker="a.1")
    assert (await _flooded(nats_connection)).flooding_worker == "a.1"
    for _ in range(2):  # the full buckets are emptied, and the flood goes on
        await coordinator.until(StepCommitted, worker="b.1")
    killed_us = time.time_ns() // 1000
    os.kill(victim, signal.SIGKILL)
    await coordinator.until(WorkerExited, worker="b.1")
    told_s = (coordinator.seen[-1].recorded_at_us - killed_us) / 1e6
    end = await coordinator.until(WorkerExited, within_s=90, worker="a.1")  # behind all that it has said
    events = [entry.envelope.event for entry in coordinator.seen if isinstance(entry, RecordedEvent)]
    ours = [event for event in events if "a" in event.tasks_named()]
    print(f"{kind}: the other's end is told after {told_s:.3f} s; {len(ours)} entries; {end.log_tail.strip()}")
    assert told_s < 1.0
    assert len(ours) < (32 if kind == "same error" else ENTRIES_AT_ONCE + ENTRIES_PER_S * (FLOOD_S + 5))
    assert agent.log().count("a.1 says more than goes on to the log") == 1


async def _flooded(connection: Connection) -> Heartbeat:
    """The first beat that tells of a flood."""
    async with asyncio.timeout(20), aclosing(NatsBeatLog(connection).subscribe()) as beats:
        async for entry in beats:
            assert isinstance(entry, RecordedEvent) and isinstance(entry.envelope.event, Heartbeat)
            if entry.envelope.event.dropped_messages >= 1000:
                return entry.envelope.event
    raise AssertionError("the beats never end")


def test_reading_is_faster_than_any_training() -> None:
    assert SECOND_US / READING.every_us >= 2000 and READING.size >= 2000
