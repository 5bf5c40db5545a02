"""Where the lead tells that its group has met (MembershipDecided.leader_confirms), the others are not reported."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.agents.node import CONFIG, Node, committed, decision, reporter, start
from unicrond.events.vocabulary import StateSource, StepCommitted, WorkerJoinedGroup

SLOTS = 4


@pytest.fixture
def node() -> Node:
    made = Node(config=replace(CONFIG, slots=SLOTS))
    made.boot()
    for number in range(1, SLOTS + 1):
        made.command(start(f"a.{number}", number))
        made.fork()
        made.ready(f"a.{number}")
    return made


def regroup(node: Node, worker: str, generation: int = 1, *, source: StateSource = "own", others: int = 0) -> None:
    node.say(
        worker,
        WorkerJoinedGroup(
            **reporter(worker), generation=generation, iteration=7, micro_batches_assigned=1, duration_us=9,
            source=source, micro_batches_assigned_elsewhere=others
        ),
    )  # fmt: skip


def told(node: Node) -> list[tuple[str, int, int]]:
    return [
        (event.worker, event.generation, event.micro_batches_assigned_elsewhere) for event in node.of(WorkerJoinedGroup)
    ]


def test_leader_report_carries_all_fields(node: Node) -> None:
    node.tell(decision("a", 1, ["a.1", "a.2", "a.9"], leader_confirms=True))
    regroup(node, "a.1", others=5)
    assert told(node) == [("a.1", 1, 5)]


def test_report_of_continuing_member_is_suppressed(node: Node) -> None:
    node.tell(decision("a", 1, ["a.9", "a.1", "a.2"], leader_confirms=True))
    regroup(node, "a.1", others=5)
    regroup(node, "a.2")
    assert not told(node)
    assert node.state.memory.workers["a.1"].generation == 1, "the next agent is to know where it is"


def test_reports_of_joiners_and_loaders_are_sent(node: Node) -> None:
    node.tell(decision("a", 1, ["a.9", "a.1", "a.2", "a.3"], joiners=["a.1"], leader_confirms=True))
    regroup(node, "a.1", source="replica", others=5)
    regroup(node, "a.2", source="checkpoint")
    regroup(node, "a.3")
    assert told(node) == [("a.1", 1, 0), ("a.2", 1, 0)]


def test_members_report_if_leader_does_not_confirm(node: Node) -> None:
    """Whatever the worker knows of the others: the log would count it twice."""
    node.tell(decision("a", 1, ["a.9", "a.1", "a.2"]))
    regroup(node, "a.1", others=5)
    regroup(node, "a.2")
    assert told(node) == [("a.1", 1, 0), ("a.2", 1, 0)]


def test_leader_confirmation_covers_one_generation(node: Node) -> None:
    node.tell(decision("a", 1, ["a.9", "a.1"], leader_confirms=True))
    node.tell(decision("a", 2, ["a.9", "a.1", "a.2"]))
    regroup(node, "a.1", 2)
    node.tell(decision("a", 3, ["a.9", "a.1", "a.2"], leader_confirms=True))
    regroup(node, "a.2", 2)
    regroup(node, "a.1", 3)
    assert told(node) == [("a.1", 2, 0), ("a.2", 2, 0)]


def test_restarted_agent_reports_member_despite_confirmation(node: Node) -> None:
    node.tell(decision("a", 1, ["a.9", "a.1"], leader_confirms=True))
    node.restart_agent()
    node.boot()
    node.hello("a.1")
    regroup(node, "a.1")
    assert told(node) == [("a.1", 1, 0)]


def test_suppressed_report_flushes_commit_sum(node: Node) -> None:
    """It was committed in the group before."""
    node.tell(decision("a", 1, ["a.1", "a.2"]))
    regroup(node, "a.1")
    for iteration in (1, 2):
        node.say("a.1", committed(1, iteration))
    before = len(node.of(StepCommitted))
    node.tell(decision("a", 2, ["a.1", "a.2"], leader_confirms=True))
    regroup(node, "a.2", 2)
    assert len(node.of(StepCommitted)) == before + 1
