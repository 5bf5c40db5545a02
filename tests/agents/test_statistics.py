"""What the agent's core makes of late iterations, of what the trainer's statistics tell, and of forced stops."""

from __future__ import annotations

import signal
from typing import Any

import pytest
from msgspec.structs import replace

from tests.agents.node import Node, committed, reporter, stop
from tests.agents.test_core import member
from unicrond.agents.core.state import ForkServerSaid, Stalled, TellForkServer, TellWorker
from unicrond.agents.protocol.marks import Mark
from unicrond.agents.protocol.messages import Kill, ProcessExited, Quit
from unicrond.events.vocabulary import (
    CorruptionSuspected,
    DegradationObserved,
    ErrorReported,
    HangSuspected,
    StepCommitted,
    StragglerObserved,
    StragglerRecovered,
    WorkerExited,
)

MARK = Mark("backward", 1, 8, 2, 15, 15, 1_000_000, 300_000, 1_100_000)


@pytest.fixture
def node() -> Node:
    """A node with one worker that is its task's only member, and has committed iterations 1 to 7."""
    node = Node()
    node.boot()
    member(node, "a.1", 1)
    for iteration in range(1, 8):
        node.say("a.1", committed(1, iteration))
    return node


def stalled(worker: str = "a.1") -> Stalled:
    return Stalled(worker=worker, mark=MARK, still_us=290_000, is_stopped=False)


def test_late_iteration_report_follows_its_commits(node: Node) -> None:
    node.feed(stalled())
    steps, told = node.appended[-2:]
    assert isinstance(steps, StepCommitted) and steps.last == 7
    assert isinstance(told, HangSuspected)
    assert (told.task, told.worker, told.generation, told.iteration) == ("a", "a.1", 1, 8)
    assert (told.phase, told.micro_batch, told.collectives_entered, told.is_waiting) == ("backward", 2, 15, False)
    assert (told.still_us, told.limit_us) == (290_000, 300_000)


def test_watch_ignores_unknown_or_stopping_worker(node: Node) -> None:
    node.feed(stalled("a.9"))
    node.command(stop("a.1", 9))
    node.feed(stalled())
    assert not node.of(HangSuspected)


def test_statistics_become_events(node: Node) -> None:
    node.say(
        "a.1",
        DegradationObserved(
            **reporter("a.1"), generation=1, iteration=7, iteration_us=23, usual_us=20, slowest="a.4", compute_us=12,
            others_us=10
        ),
    )  # fmt: skip
    (slow,) = node.of(DegradationObserved)
    assert (slow.slowest, slow.iteration_us, slow.usual_us, slow.compute_us, slow.others_us) == ("a.4", 23, 20, 12, 10)
    about: Any = {
        **reporter("a.1"),
        "generation": 1,
        "iteration": 7,
        "straggler": "a.4",
        "straggler_node": "n9",
        "rank": 3,
    }
    node.say(
        "a.1",
        StragglerObserved(**about, factor=1.25, compute_us=125, others_us=100, since_iteration=4, since_us=77),
    )
    (straggles,) = node.of(StragglerObserved)
    assert (straggles.worker, straggles.straggler, straggles.straggler_node) == ("a.1", "a.4", "n9")
    assert (straggles.rank, straggles.factor, straggles.since_iteration, straggles.since_us) == (3, 1.25, 4, 77)
    node.say("a.1", StragglerRecovered(**about, factor=1.01))
    (recovered,) = node.of(StragglerRecovered)
    assert (recovered.straggler, recovered.factor) == ("a.4", 1.01)
    node.say(
        "a.1",
        CorruptionSuspected(
            **reporter("a.1"), generation=1, iteration=7, sign="loss", suspect="a.4", value=9.0, usual=2.0
        ),
    )
    (odd,) = node.of(CorruptionSuspected)
    assert (odd.worker, odd.suspect, odd.sign, odd.value, odd.usual) == ("a.1", "a.4", "loss", 9.0, 2.0)


def test_forced_stop_kills_at_once_and_is_applied_after_exit(node: Node) -> None:
    order = replace(stop("a.1", 9), kill=True)
    actions = node.command(order)
    kills = [a.message for a in actions if isinstance(a, TellForkServer) and isinstance(a.message, Kill)]
    assert [kill.signal for kill in kills] == [signal.SIGKILL]
    assert not any(isinstance(a, TellWorker) and isinstance(a.message, Quit) for a in actions)
    assert not node.answers(order.command_id)
    node.die("a.1", 9)
    assert node.answers(order.command_id) == [""]


def test_forced_stop_overtakes_graceful_stop(node: Node) -> None:
    node.command(stop("a.1", 8))
    actions = node.command(replace(stop("a.1", 9), kill=True))
    assert any(isinstance(a, TellForkServer) and a.message == Kill(worker="a.1", signal=9) for a in actions)


@pytest.mark.parametrize(
    ("status", "oom", "cause", "kind"),
    [
        (9, "yes", "oom_killed", "out_of_memory"),
        (9, "no", "signalled", "process_exit"),
        (11 | 0x80, "no", "core_dumped", "process_exit"),
        (3 << 8, "no", "exited", "process_exit"),
    ],
)
def test_death_carries_cause_and_place(node: Node, status: int, oom: str, cause: str, kind: str) -> None:
    pid = node.processes.pop("a.1").pid
    exited = ProcessExited(worker="a.1", pid=pid, status=status, oom=oom)  # type: ignore[arg-type]
    node.feed(ForkServerSaid(message=exited, mark=MARK))
    (ended,), (error,) = node.of(WorkerExited), node.of(ErrorReported)
    assert (ended.cause, ended.is_expected) == (cause, False)
    assert (error.kind, error.iteration, error.phase) == (kind, 8, "backward")
