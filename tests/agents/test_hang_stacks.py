"""Whose stacks an agent reads before a kill or a new group, and what it tells of them."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from tests.agents.node import NODE, Node, decision, membership, reporter, start, stop
from unicrond.agents.core.state import TakeStacks, TellForkServer, TellWorker
from unicrond.agents.output.stacks import Questions
from unicrond.agents.protocol.marks import Mark
from unicrond.agents.protocol.messages import Flight, GroupMembership, Hello, Kill, Stacks, TellFlight, TellStacks
from unicrond.agents.shell import stack_keeper
from unicrond.agents.shell.stack_keeper import StackKeeper, bundle, collective_text, without_numbers
from unicrond.events.queries.worker_queries import Collective
from unicrond.events.vocabulary import StacksTaken, WorkerJoinedGroup, WorkerStack
from unicrond.events.vocabulary.stacks import STACK_TEXTS_MAX, place_in_program

# --- the core ---------------------------------------------------------------------------------------


@pytest.fixture
def node() -> Node:
    """Two workers of one task, in generation 1."""
    node = Node()
    node.boot()
    for number, worker in enumerate(("a.1", "a.2"), start=1):
        node.command(start(worker, number))
        node.fork()
        node.ready(worker)
    node.tell(membership("a", 1, ["a.1", "a.2"]))
    for worker in ("a.1", "a.2"):
        joined = WorkerJoinedGroup(
            **reporter(worker), generation=1, iteration=1, micro_batches_assigned=0, duration_us=1, source="init"
        )
        node.say(worker, joined)
    return node


def orders(actions: list[Any]) -> list[tuple[str, ...]]:
    return [tuple(action.processes) for action in actions if isinstance(action, TakeStacks)]


def test_stack_is_read_before_the_kill(node: Node) -> None:
    actions = node.command(replace(stop("a.1", 3), kill=True))
    kill = TellForkServer(message=Kill(worker="a.1", signal=signal.SIGKILL))
    taken = TakeStacks(task="a", generation=1, processes={"a.1": node.state.memory.workers["a.1"].pid})
    assert actions.index(taken) < actions.index(kill)
    assert orders(node.command(replace(stop("a.1", 4), kill=True))) == [], "the same stack twice"


def test_stop_without_a_kill_reads_no_stack(node: Node) -> None:
    assert orders(node.command(stop("a.1", 3))) == []


def test_stacks_are_read_before_the_members_hear_of_the_next_group(node: Node) -> None:
    node.command(replace(stop("a.1", 3), kill=True))
    actions = node.tell(replace(decision("a", 2, ["a.2"]), takes_stacks=True))
    assert orders(actions) == [("a.2",)], "that of a.1 is read already"
    told = [number for number, action in enumerate(actions) if isinstance(action, TellWorker)]
    assert isinstance(actions[told[0]].message, GroupMembership)
    assert next(n for n, action in enumerate(actions) if isinstance(action, TakeStacks)) < told[0]


def test_ordinary_membership_reads_no_stack(node: Node) -> None:
    assert orders(node.tell(decision("a", 2, ["a.2"]))) == []


def test_stacks_are_told_to_the_log(node: Node) -> None:
    told = StacksTaken(node=NODE, task="a", generation=1, workers=(WorkerStack(worker="a.1"),))
    node.feed(told)
    assert node.appended[-1] == told


# --- the keeper -------------------------------------------------------------------------------------


class Sight:
    """The signs of workers that wait in their third collective; `stopped`: pids."""

    def __init__(self, *stopped: int) -> None:
        self.stopped = stopped

    def now_us(self) -> int:
        return 5_000_000

    def mark(self, worker: str) -> Mark | None:
        return None if worker == "t.9" else Mark("reduce", 1, 62, 0, 3, 2, 0, 1, 1_000_000)

    def is_stopped(self, pid: int) -> bool:
        return pid in self.stopped


class Desk:
    """A keeper with workers that answer when `reply` is called."""

    def __init__(self, sight: Sight, *workers: str) -> None:
        self.asked: list[tuple[str, type]] = []
        self.numbers: dict[tuple[str, type], list[int]] = {}
        self.told: list[StacksTaken] = []
        self.questions = Questions(self._take)
        for worker in workers:
            hello = Hello(
                worker=worker, task="t", pid=1, generation=1, ready=True, has_flight=True, has_stacks=True,
                repeats_numbers=True,
            )  # fmt: skip
            self.questions.connected(hello)
        self.keeper = StackKeeper("n1", self.questions, sight, self.told.append)  # type: ignore[arg-type]

    def _take(self, worker: str, question: TellFlight | TellStacks) -> None:
        self.asked.append((worker, type(question)))
        self.numbers.setdefault((worker, type(question)), []).append(question.number)

    def reply(self, worker: str, text: str, *collectives: Collective) -> None:
        """Answer the oldest question of each kind."""
        stacks, flight = [self.numbers[worker, kind].pop(0) for kind in (TellStacks, TellFlight)]
        self.questions.receive(worker, Stacks(text=text, question=stacks))
        self.questions.receive(worker, Flight(collectives=collectives, question=flight))

    async def event(self) -> StacksTaken:
        for _ in range(1000):
            if self.told:
                return self.told.pop()
            await asyncio.sleep(0.01)
        raise AssertionError("nothing was told")


def collective(number: int, *, is_over: bool) -> Collective:
    return Collective(
        library="gloo", group=1, number=number, is_p2p=False, name="allreduce", state="", is_over=is_over,
        sizes="Float[8]", since_us=1,
    )  # fmt: skip


async def test_workers_are_asked_at_once_and_equal_stacks_stand_once() -> None:
    desk = Desk(Sight(), "t.1", "t.2")
    desk.keeper.take(TakeStacks(task="t", generation=4, processes={"t.1": 11, "t.2": 12}))
    assert {worker for worker, kind in desk.asked if kind is TellStacks} == {"t.1", "t.2"}, "before take returned"
    kills: list[str] = []
    assert desk.keeper.is_reading("t.1")
    desk.keeper.when_read("t.1", lambda: kills.append("t.1"))
    await asyncio.sleep(0.05)
    assert not kills, "killed before its stack was read"
    for worker in ("t.1", "t.2"):
        desk.reply(worker, "where it stands", collective(6, is_over=True), collective(7, is_over=False))
    event = await desk.event()
    assert kills == ["t.1"] and not desk.keeper.is_reading("t.1")
    assert (event.task, event.generation, event.stacks) == ("t", 4, ("where it stands",))
    first, second = event.workers
    assert (first.worker, first.stack, first.reader, second.stack) == ("t.1", 1, "worker", 1)
    assert (first.phase, first.iteration, first.still_us, first.is_waiting) == ("reduce", 62, 4_000_000, True)
    assert first.collective == "allreduce of gloo, group 1, number 7, Float[8]"


async def test_silent_worker_holds_up_its_kill_for_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack_keeper, "ASKED_S", 0.05)
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    desk = Desk(Sight(), "t.1")
    desk.keeper.take(TakeStacks(task="t", generation=1, processes={"t.1": 11}))
    event = await desk.event()
    (worker,) = event.workers
    assert "it did not answer" in worker.trouble and "py-spy is not on this node" in worker.trouble
    assert worker.stack == 0 and worker.phase == "reduce"


async def test_hanging_py_spy_holds_up_the_kill_for_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack_keeper, "READ_S", 0.1)

    async def never(*_: object) -> bytes:
        await asyncio.sleep(60)
        return b""

    monkeypatch.setattr(stack_keeper, "stacks", never)
    desk = Desk(Sight(11))
    desk.keeper.take(TakeStacks(task="t", generation=1, processes={"t.1": 11}))
    assert (await desk.event()).workers[0].trouble == "no stack within 0.1 s"


@pytest.fixture
def stopped() -> Iterator[int]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        os.kill(process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        yield process.pid
        process.kill()


async def test_stopped_process_is_not_asked(stopped: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    desk = Desk(Sight(stopped), "t.1")
    desk.keeper.take(TakeStacks(task="t", generation=1, processes={"t.1": stopped}))
    (worker,) = (await desk.event()).workers
    assert not desk.asked and worker.is_stopped
    assert worker.trouble.startswith("its process is stopped")


async def test_py_spy_that_cannot_be_run_costs_its_own_stack_alone(
    stopped: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda *_, **__: "/")
    desk = Desk(Sight(stopped), "t.1", "t.2")
    desk.keeper.take(TakeStacks(task="t", generation=1, processes={"t.1": stopped, "t.2": 12}))
    desk.reply("t.2", "Thread MainThread")
    silent, other = (await desk.event()).workers
    assert "/ cannot be run" in silent.trouble and other.stack == 1


def test_equal_stacks_of_two_processes_are_equal_texts() -> None:
    printed = 'Process {0}: python train.py --token=x\nPython v3.12\n\nThread {0} (idle): "MainThread"\n    '
    printed += "step (train.py:62)"
    one, other = (without_numbers(printed.format(pid)) for pid in (7, 8))
    assert one == other and place_in_program(one) == "step (train.py:62)" and "token" not in one
    assert without_numbers("no thread") == "no thread"


async def test_end_of_the_agent_lets_the_kill_through() -> None:
    desk, kills = Desk(Sight(), "t.1"), []
    desk.keeper.take(TakeStacks(task="t", generation=1, processes={"t.1": 11}))
    desk.keeper.when_read("t.1", lambda: kills.append("t.1"))
    await desk.keeper.close()
    assert kills == ["t.1"] and not desk.told


def test_collective_that_has_not_ended_counts() -> None:
    assert "number 7" in collective_text([collective(7, is_over=False), collective(8, is_over=True)])
    assert collective_text([collective(6, is_over=True)]).endswith(", ended")


def test_bundle_keeps_so_many_different_stacks() -> None:
    workers, texts = bundle([(WorkerStack(worker=f"t.{n}"), f"text {n}") for n in range(STACK_TEXTS_MAX + 1)])
    assert len(texts) == STACK_TEXTS_MAX
    assert [worker.stack for worker in workers] == [*range(1, STACK_TEXTS_MAX + 1), 0]
    assert "left out" in workers[-1].trouble


async def test_late_answer_to_the_first_hang_does_not_answer_the_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """It told where the worker stood minutes ago."""
    monkeypatch.setattr(stack_keeper, "ASKED_S", 0.05)
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    desk = Desk(Sight(), "t.1")
    desk.keeper.take(TakeStacks(task="t", generation=4, processes={"t.1": os.getpid()}))
    first = await desk.event()
    assert not first.stacks and first.workers[0].trouble
    monkeypatch.setattr(stack_keeper, "ASKED_S", 5.0)
    desk.keeper.take(TakeStacks(task="t", generation=5, processes={"t.1": os.getpid()}))
    desk.reply("t.1", "where it stood in generation 4")
    desk.reply("t.1", "where it stands in generation 5")
    second = await desk.event()
    assert (second.generation, second.stacks) == (5, ("where it stands in generation 5",))
