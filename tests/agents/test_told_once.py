"""What an agent reads in the log itself: memberships, whole or torn, of the tasks that it follows; and several starts
by one command."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Collection

import pytest
from msgspec.structs import replace

from tests.agents.node import CONFIG, NODE, STORE, Node, decision, part, start, stop
from unicrond.agents.core.state import CopyState, LogSeen, Remembered, StateHeld, TellWorker
from unicrond.agents.protocol.framing import frame
from unicrond.agents.protocol.messages import MAX_FRAME_BYTES, GroupMembership
from unicrond.agents.shell.outbox import Outbox
from unicrond.agents.shell.shell import Shell
from unicrond.events.trust.membership_digest import place_of
from unicrond.events.vocabulary import (
    WORKERS_MAX,
    AnyEvent,
    Member,
    MemoryService,
    PeersDecided,
    SnapshotStored,
    Start,
    StartWorkers,
    TaskSpec,
    WorkerStarted,
)
from unicrond.events.wire.envelope import Envelope, RecordedEvent


@pytest.fixture
def node() -> Node:
    made = Node()
    made.boot()
    return made


def running(node: Node, *workers: str) -> None:
    for number, worker in enumerate(workers, 1):
        node.command(start(worker, number))
        node.fork()
        node.ready(worker)


def generations(node: Node) -> dict[str, int]:
    return {worker: process.generation for worker, process in node.processes.items()}


# --- memberships -----------------------------------------------------------------------------------


def test_membership_is_read_from_log_without_answer(node: Node) -> None:
    running(node, "a.1", "a.2")
    said = len(node.appended)
    actions = node.tell(decision("a", 1, ["a.1", "a.7"], joiners=["a.7"]))
    assert generations(node) == {"a.1": 1, "a.2": 0}, "a newcomer waits for a later one"
    (told,) = [action.message for action in actions if isinstance(action, TellWorker)]
    assert isinstance(told, GroupMembership)
    assert told.members == tuple(Member(worker=w, node=NODE, replica=n, shard=0) for n, w in enumerate(["a.1", "a.7"]))
    assert (told.joiners, told.urgent, told.handover, told.stop, told.mtbf_us) == (("a.7",), True, True, "enough", 9)
    assert told.storage_iteration == 4
    node.tell(decision("a", 2, ["a.2"]))
    assert generations(node) == {"a.1": 2, "a.2": 2}, "leavers hear that they leave"
    assert len(node.appended) == said


def test_node_keeps_newest_warrant(node: Node) -> None:
    """The last worker here captures what it hands over after the node has left."""
    running(node, "a.1")

    def kept() -> str:
        return node.state.memory.memberships["a"].warrant

    node.tell(decision("a", 1, ["a.1"]), warrant="one")
    assert kept() == f"one.{place_of(NODE, [NODE])}"
    elsewhere = decision("a", 2, ["a.2"])
    seats = tuple(replace(run, node="n7") for run in elsewhere.seats)
    node.tell(replace(elsewhere, seats=seats), warrant="two")
    assert kept() == f"one.{place_of(NODE, [NODE])}"
    node.tell(decision("a", 3, ["a.1"]), warrant="three")
    assert kept().startswith("three.")
    node.tell(decision("a", 4, ["a.1"]))
    assert kept().startswith("three."), "of a coordinator that gives none"


def test_generation_never_decreases(node: Node) -> None:
    running(node, "a.1")
    node.tell(decision("a", 5, ["a.1"]))
    assert not node.tell(decision("a", 4, ["a.1"]))
    assert not node.tell(decision("a", 5, ["a.1"]))


def test_older_term_is_stale_and_newer_term_fences_commands(node: Node) -> None:
    running(node, "a.1")
    node.tell(decision("a", 1, ["a.1"]), term=3)
    assert not node.tell(decision("a", 2, ["a.1"]), term=2)
    node.command(stop("a.1", 9, term=2, epoch=8), term=2)
    assert "stale: term 2" in node.answers("2.8.n1.9")[0]
    node.tell(decision("a", 3, ["a.1"]), term=3)
    assert generations(node) == {"a.1": 3}


def test_membership_is_assembled_from_parts(node: Node) -> None:
    running(node, "a.1")
    assert not node.tell(part("a", 1, 1, ["a.1", "a.2"]))
    assert not node.tell(part("a", 1, 2, ["a.3"]))
    (told,) = node.tell(decision("a", 1, ["a.4"], parts=2))
    assert isinstance(told, TellWorker) and isinstance(told.message, GroupMembership)
    assert [member.worker for member in told.message.members] == ["a.1", "a.2", "a.3", "a.4"]
    assert not node.state.memory.membership_parts


def test_membership_parts_outlive_agent(node: Node) -> None:
    running(node, "a.1")
    node.tell(part("a", 1, 1, ["a.1"]))
    node.restart_agent()
    node.boot()
    node.hello("a.1")
    node.tell(decision("a", 1, ["a.2"], parts=1))
    assert generations(node) == {"a.1": 1}


def test_torn_membership_is_inert_until_next_term(node: Node) -> None:
    running(node, "a.1")
    node.tell(part("a", 1, 1, ["a.1"]))
    assert not node.tell(decision("a", 1, ["a.2"], parts=2)), "a part is missing"
    node.tell(part("a", 1, 1, ["a.7"]))
    node.tell(part("a", 1, 1, ["a.1"]), term=2)
    (told,) = node.tell(decision("a", 1, ["a.2"], parts=1), term=2)
    assert isinstance(told, TellWorker) and isinstance(told.message, GroupMembership)
    assert [member.worker for member in told.message.members] == ["a.1", "a.2"]


def test_membership_ignores_parts_of_torn_predecessor(node: Node) -> None:
    running(node, "a.1")
    node.tell(part("a", 1, 1, ["a.7"]))
    (told,) = node.tell(decision("a", 1, ["a.1"]), term=2)
    assert isinstance(told, TellWorker) and isinstance(told.message, GroupMembership)
    assert [member.worker for member in told.message.members] == ["a.1"]


def test_state_is_copied_to_changed_peers_at_once(node: Node) -> None:
    running(node, "a.1")
    node.tell(decision("a", 1, ["a.1"]))
    node.feed(
        StateHeld(
            snapshot=SnapshotStored(
                node=NODE,
                duration_us=0,
                task="a",
                shard=0,
                iteration=1,
                generation=1,
                origin=NODE,
                size_bytes=1,
                shards=1,
            )
        )
    )
    peers = (MemoryService(node="n9", host="h", port=1, token="t"),)
    assert node.tell(PeersDecided(task="a", peers=peers)) == [CopyState(task="a", shard=0, peers=peers)]
    assert node.state.memory.memberships["a"].peers == peers
    assert not node.tell(PeersDecided(task="b", peers=peers))


def test_largest_membership_fits_into_frame() -> None:
    name, node = "t" * 63, "n" * 63
    members = tuple(
        Member(worker=f"{name}.{10**9 - 1 - n}", node=node, replica=10**9 - 1, shard=WORKERS_MAX)
        for n in range(WORKERS_MAX)
    )
    joiners = tuple(member.worker for member in members)
    membership = GroupMembership(generation=1, members=members, joiners=joiners, urgent=True, store=STORE)
    assert len(frame(membership)) < MAX_FRAME_BYTES


# --- starts ----------------------------------------------------------------------------------------


def together(*numbers: int, number: int = 1) -> StartWorkers:
    starts = tuple(Start(number=n, replica=n, shard=0, store=STORE) for n in numbers)
    return StartWorkers(command_id=f"1.1.{NODE}.{number}", node=NODE, epoch=1, spec=TaskSpec(name="a"), starts=starts)


def test_batch_start_answers_for_each_worker(node: Node) -> None:
    node.command(together(1, 2, 3))
    while node.unforked:
        node.fork()
    assert [event.worker for event in node.of(WorkerStarted)] == ["a.1", "a.2"]
    assert (node.answers("1.1.n1.1/0"), node.answers("1.1.n1.1/1")) == ([""], [""])
    assert "no free slot" in node.answers("1.1.n1.1/2")[0]


def test_repeated_batch_start_acts_once(node: Node) -> None:
    node.command(together(1, 2))
    node.command(together(1, 2))
    assert node.spawned == ["a.1", "a.2"]
    node.fork()
    node.restart_agent()
    node.unforked.clear()
    node.boot()
    node.command(together(1, 2))
    while node.unforked:
        node.fork()
    assert sorted(node.processes) == ["a.1", "a.2"]
    assert set(node.answers("1.1.n1.1/0")) == set(node.answers("1.1.n1.1/1")) == {""}


# --- what is followed, and when --------------------------------------------------------------------


class Feed:
    """A CommandFeed of a few entries; `diary`: what was asked of it, in order."""

    def __init__(self, *events: AnyEvent) -> None:
        self.events = events
        self.diary: list[str] = []
        self.on_acknowledged: Callable[[], None] = lambda: None

    async def follow(self, tasks: Collection[str]) -> None:
        self.diary.append(f"follow {','.join(sorted(tasks))}")

    async def read(self) -> AsyncGenerator[RecordedEvent, None]:
        for seq, event in enumerate(self.events, 1):
            envelope = Envelope(producer="coordinator", boot=1, number=seq, term=1, observed_at_us=1, event=event)
            yield RecordedEvent(seq, 1, envelope)
            self.diary.append(f"acknowledge {seq}")
            self.on_acknowledged()


def shell() -> Shell:
    """One whose lines to the outside lead nowhere."""
    missing = {name: lambda self, *_: None for name in Shell.__abstractmethods__}
    missing |= {"now_us": lambda self: 1, "snapshots": lambda self: ()}
    return type("Silent", (Shell,), missing)(CONFIG, Remembered(), Outbox(NODE, 1, lambda: 1), _NoSigns())  # type: ignore[no-any-return]


class _NoSigns:
    def __getattr__(self, name: str) -> object:
        return lambda *_: None


async def test_feed_follows_task_before_acknowledging_start() -> None:
    made = shell()
    feed = Feed(stop("b.1", 1), start("a.1", 2), together(2, number=3), decision("a", 1, ["a.1"]))
    await made.take_entries(feed)
    again = "follow a"  # another agent of this name may have changed it
    assert feed.diary == ["acknowledge 1", "follow a", "acknowledge 2", again, "acknowledge 3", "acknowledge 4"]
    assert made.tasks_here() == {"a"}
    assert made.state.memory.memberships["a"].generation == 1


async def test_feed_ignores_tasks_of_other_log() -> None:
    made = shell()
    await made.take_entries(Feed(start("a.1", 1)))
    made.state = replace(made.state, memory=replace(made.state.memory, log="one"))
    one, another = (made.tasks_here(LogSeen(created=log)) for log in ("one", "another"))
    assert (made.tasks_here(), one, another) == ({"a"}, {"a"}, frozenset())


async def test_feed_drops_task_after_its_last_worker() -> None:
    made = shell()
    await made.take_entries(Feed(start("a.1", 1)))
    feed = Feed(decision("a", 1, ["a.1"]), stop("b.1", 2))
    feed.on_acknowledged = lambda: setattr(made, "state", replace(made.state, memory=Remembered()))
    await made.take_entries(feed)
    assert feed.diary == ["acknowledge 1", "follow ", "acknowledge 2"]


async def test_finished_agent_acknowledges_nothing() -> None:
    made = shell()
    feed = Feed(stop("b.1", 1), stop("b.1", 2))
    taking = made.take

    def take(recorded: RecordedEvent) -> None:
        taking(recorded)
        made.closed = True

    made.take = take  # type: ignore[method-assign]
    await made.take_entries(feed)
    assert not feed.diary
