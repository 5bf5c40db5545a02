"""The agent's core and the states in its node's memory: told now and then, copied each time, dropped on command."""

from __future__ import annotations

from msgspec.structs import replace

from tests.agents.node import NODE, Node, membership, reporter, start
from unicrond.agents.core.state import ArmTimer, CopyState, StateHeld, TellForkServer
from unicrond.agents.core.stored_states import TELL_APART_S
from unicrond.agents.protocol.messages import ReleaseMemory
from unicrond.events.vocabulary import (
    DropState,
    Member,
    MemoryService,
    NodeJoined,
    PeersDecided,
    PeersRemembered,
    SnapshotStored,
    StateLoaded,
)
from unicrond.events.vocabulary.placements import runs_of


def service(node: str) -> MemoryService:
    return MemoryService(node=node, host="10.0.0.1", port=9, token="t")


def trained(*peers: MemoryService) -> Node:
    """A node whose worker a.1 is a member and has peers."""
    node = Node()
    node.boot()
    node.command(start("a.1", 1))
    node.fork()
    node.ready("a.1")
    node.tell(membership("a", 1, ["a.1"]))
    if peers:
        node.tell(PeersDecided(task="a", peers=peers))
    return node


def capture(iteration: int) -> SnapshotStored:
    return SnapshotStored(
        node=NODE,
        task="a",
        origin=NODE,
        shard=0,
        iteration=iteration,
        generation=1,
        size_bytes=10,
        shards=1,
        duration_us=5,
    )


def test_capture_is_copied_always_and_reported_sometimes() -> None:
    node = trained(service(NODE), service("n2"))
    for iteration in (1, 2, 3):
        actions = node.say("a.1", capture(iteration))
        assert CopyState(task="a", shard=0, peers=(service("n2"),)) in actions
    assert [event.iteration for event in node.of(SnapshotStored)] == [1]
    assert node.of(SnapshotStored)[0].origin == NODE
    node.fire("held", "a/0")
    assert [event.iteration for event in node.of(SnapshotStored)] == [1, 3]
    node.fire("held", "a/0")
    assert ("held", "a/0") not in node.timers, "nothing new: nothing is told, no timer runs"
    node.say("a.1", capture(4))
    assert [event.iteration for event in node.of(SnapshotStored)] == [1, 3, 4]


def test_capture_waits_for_copy_peers() -> None:
    node = trained()
    assert not any(isinstance(action, CopyState) for action in node.say("a.1", capture(1)))
    later = PeersDecided(task="a", peers=(service("n2"),))
    actions = node.tell(later)
    assert CopyState(task="a", shard=0, peers=(service("n2"),)) in actions, "what is here is copied at once"


def test_older_peers_that_come_again_are_passed_over() -> None:
    node = trained(service(NODE), service("n2"))
    node.state = replace(node.state, memory=replace(node.state.memory, read_seq=12))
    node.tell(PeersDecided(task="a", peers=(service(NODE),)), seq=10)
    assert CopyState(task="a", shard=0, peers=(service("n2"),)) in node.say("a.1", capture(1))
    node.tell(PeersDecided(task="a", peers=(service("n3"),)), seq=13)
    assert CopyState(task="a", shard=0, peers=(service("n3"),)) in node.say("a.1", capture(2))


def test_foreign_copy_is_reported_and_not_forwarded() -> None:
    node = trained(service("n2"))
    held = SnapshotStored(
        node=NODE, duration_us=0, task="b", shard=1, iteration=7, generation=2, origin="n3", size_bytes=10, shards=1
    )
    actions = node.feed(StateHeld(snapshot=held))
    assert not any(isinstance(action, CopyState) for action in actions)
    assert (node.of(SnapshotStored)[0].task, node.of(SnapshotStored)[0].origin) == ("b", "n3")


def test_found_states_are_reported_after_join() -> None:
    node = Node()
    node.feed(
        StateHeld(
            snapshot=SnapshotStored(
                node=NODE,
                duration_us=0,
                task="b",
                shard=0,
                iteration=7,
                generation=2,
                origin=NODE,
                size_bytes=10,
                shards=1,
            )
        )
    )
    assert not node.appended
    node.boot()
    assert [type(event).__name__ for event in node.appended] == ["NodeJoined", "SnapshotStored"]


def test_successor_reports_remembered_peers() -> None:
    node = trained(service("n2"), service("n3"))
    node.restart_agent()
    node.boot()
    node.hello("a.1")
    assert node.of(PeersRemembered) == [PeersRemembered(node=NODE, task="a", peers=("n2", "n3"))]
    assert isinstance(node.appended[-2], NodeJoined), "the node joins first"


def test_newcomer_has_no_peers_to_remember() -> None:
    node = Node()
    node.boot()
    node.command(start("a.1", 1))
    node.fork()
    node.restart_agent()
    node.boot()
    node.hello("a.1")
    assert not node.of(PeersRemembered)


def test_nodes_of_task_report_copies_in_turn() -> None:
    node = trained(service("n2"))
    others = tuple(Member(worker=f"a.{2 + i}", node=f"n{20 + i // 2}", replica=1 + i, shard=0) for i in range(6))
    own = Member(worker="a.1", node=NODE, replica=7, shard=0)
    node.tell(replace(membership("a", 2, ["a.1"]), seats=runs_of((*others, own), (), 1)))
    armed = [action for action in node.say("a.1", capture(1)) if isinstance(action, ArmTimer)]
    assert [(timer.name, timer.after_s) for timer in armed] == [("held", 3 * TELL_APART_S)]
    node.say("a.1", capture(2))
    assert not node.of(SnapshotStored)
    node.fire("held", "a/0")
    assert [event.iteration for event in node.of(SnapshotStored)] == [2], "the newest, when it is the node's turn"


def test_drop_command_releases_state() -> None:
    node = trained(service("n2"))
    node.say("a.1", capture(1))
    drop = DropState(command_id="1.1.n1.10", node=NODE, epoch=1, task="a")
    assert TellForkServer(message=ReleaseMemory(task="a")) in node.command(drop)
    assert node.answers("1.1.n1.10") == [""]
    node.fire("held", "a/0")
    assert len(node.of(SnapshotStored)) == 1


def test_state_load_reports_its_source() -> None:
    node = trained()
    node.say(
        "a.1",
        StateLoaded(
            **reporter("a.1"),
            generation=1,
            source="peer",
            iteration=9,
            size_bytes=10,
            duration_us=5,
            failed_sources=("memory of iteration 10: no",),
            storage_iteration=4,
            saved_us=50,
            resharded_from="tp 2, pp 1",
        ),
    )
    (told,) = node.of(StateLoaded)
    assert (told.worker, told.source, told.iteration, told.saved_us) == ("a.1", "peer", 9, 50)
    assert (told.failed_sources, told.resharded_from) == (("memory of iteration 10: no",), "tp 2, pp 1")
