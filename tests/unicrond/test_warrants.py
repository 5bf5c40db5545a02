"""What the coordinator puts beside a membership, for nodes that keep states of tasks that they do not follow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import pytest

from tests.events.certified import Certified, now
from unicrond.core.state.node_parts import AgentIdentity
from unicrond.core.state.state import ClusterState, Node, NodeStatus, Task, TaskStatus
from unicrond.core.state.workers import Membership
from unicrond.events.log.subjects import WARRANT_HEADER
from unicrond.events.queries.worker_queries import decode_renewal
from unicrond.events.trust import membership_digest as roster
from unicrond.events.trust.certificates import first_certificate
from unicrond.events.trust.membership_certificates import verify_warrant
from unicrond.events.trust.signing import BadSignature
from unicrond.events.vocabulary import (
    AnyEvent,
    DropState,
    Member,
    MembershipDecided,
    MembershipPart,
    SeatRun,
    StoreAddress,
    TaskSpec,
)
from unicrond.events.vocabulary.placements import runs_of
from unicrond.events.wire.envelope import Envelope
from unicrond.service.trust.membership_certificates import WarrantRenewals, Warrants

STORE = StoreAddress(host="127.0.0.1", port=1)
NODES = ("n1", "n2", "n3")
MEMBERS = tuple(Member(worker=f"a.{n}", node=node, replica=n, shard=0) for n, node in enumerate(NODES))
RUNS = runs_of(MEMBERS, (), 1)


@pytest.fixture
def certified(tmp_path: Path) -> Certified:
    return Certified(tmp_path)


def enveloped(event: AnyEvent, term: int = 1) -> Envelope:
    return Envelope(producer="coordinator", boot=term, number=1, term=term, observed_at_us=1, event=event)


def told(generation: int, seats: tuple[SeatRun, ...], parts: int = 0) -> MembershipDecided:
    return MembershipDecided(
        task="a", generation=generation, size=1, seats=seats, parts=parts, urgent=True, store=STORE, incident="",
        reason="",
    )  # fmt: skip


def generation(certified: Certified, text: str, node: str) -> int:
    place = roster.place_of(node, NODES)
    return verify_warrant(f"{text}.{place}", node, "a", [first_certificate(certified.ca.read_bytes())])


def test_warrant_covers_whole_and_partial_membership(certified: Certified) -> None:
    warrants = Warrants(certified.server)
    assert not warrants.beside(enveloped(DropState(command_id="1.1.n1.2", node="n1", epoch=1, task="a")))
    text = warrants.beside(enveloped(told(5, RUNS)))[WARRANT_HEADER]
    assert generation(certified, text, "n3") == 5
    for number, run in enumerate(RUNS[:2], 1):
        assert not warrants.beside(enveloped(MembershipPart(task="a", generation=6, part=number, seats=(run,))))
    text = warrants.beside(enveloped(told(6, RUNS[2:], parts=2)))[WARRANT_HEADER]
    assert [generation(certified, text, node) for node in NODES] == [6, 6, 6]


def test_torn_membership_gives_no_warrant(certified: Certified) -> None:
    warrants = Warrants(certified.server)
    warrants.beside(enveloped(MembershipPart(task="a", generation=6, part=1, seats=RUNS[:1]), term=1))
    text = warrants.beside(enveloped(told(6, RUNS[2:], parts=1), term=2))[WARRANT_HEADER]
    for node in NODES:
        with pytest.raises(BadSignature, match="the warrant is not for node"):
            generation(certified, text, node)


def node(name: str) -> Node:
    agent = AgentIdentity(boot=1, version="1")
    return Node(
        name=name, status=NodeStatus.UP, slots=1, slots_max=1, address="", store=STORE, agent=agent, joined_us=0
    )


class Nodes:
    """Three nodes of a task's membership, of which some do not answer."""

    def __init__(self, silent: set[str]) -> None:
        self.silent = silent
        self.warrants: dict[str, list[str]] = {node: [] for node in NODES}

    async def ask(self, node: str, body: bytes) -> None:
        if node in self.silent:
            raise RuntimeError("no answer")
        renewal = decode_renewal(body)
        assert renewal is not None and (renewal.task, renewal.generation) == ("a", 5)
        self.warrants[node].append(renewal.warrant)

    def counts(self) -> list[int]:
        return [len(self.warrants[node]) for node in NODES]


def active(name: str, generation: int, nodes: Sequence[str]) -> Task:
    """A task with a member on each of these nodes."""
    members = tuple(
        Member(worker=f"{name}.{number}", node=node, replica=number, shard=0) for number, node in enumerate(nodes)
    )
    membership = Membership(generation=generation, members=members, joiners=(), urgent=True, store=STORE, decided_us=0)
    return Task(
        spec=TaskSpec(name=name), status=TaskStatus.ACTIVE, submitted_seq=1, submitted_us=0, membership=membership
    )


async def test_silent_nodes_hold_up_no_others_renewal(certified: Certified) -> None:
    """More than are asked in a second; each is asked less and less often, and takes it when it answers again."""
    names = [f"n{number}" for number in range(200)]
    silent, asked = set(names[:150]), list[str]()

    async def ask(name: str, _: bytes) -> None:
        asked.append(name)
        if name in silent:
            raise RuntimeError("no answer")

    state = ClusterState(
        tasks={task: active(task, 5, names) for task in ("a", "b")}, nodes={name: node(name) for name in names}
    )
    renewals = WarrantRenewals(Warrants(certified.server), lambda: state, ask, lambda: True)
    for _ in range(8):
        await renewals.look()
    counts = Counter(asked)
    assert all(counts[name] == 2 for name in names[150:]), "one for each task"
    asked.clear()
    for _ in range(200):
        await renewals.look()
    assert asked and set(asked) <= silent
    assert len(asked) / 200 < 64 / 2, "few of those that never answer are asked in a second"
    silent.clear()
    for _ in range(70):
        await renewals.look()
    asked.clear()
    for _ in range(70):
        await renewals.look()
    assert asked == [], "all have taken it"


async def test_membership_is_signed_anew_once_for_each_certificate(certified: Certified) -> None:
    state = ClusterState(tasks={"a": active("a", 5, NODES)}, nodes={name: node(name) for name in NODES})
    warrants, nodes, leads = Warrants(certified.server), Nodes({"n3"}), True
    renewals = WarrantRenewals(warrants, lambda: state, nodes.ask, lambda: leads)
    warrants.beside(enveloped(told(5, RUNS)))
    await renewals.look()
    assert nodes.counts() == [0, 0, 0], "this head has signed it with the present certificate"
    certified.serve()
    leads = False
    await renewals.look()
    assert nodes.counts() == [0, 0, 0], "a head that stands by sends nothing"
    leads = True
    for _ in range(2):
        await renewals.look()
        assert nodes.counts() == [1, 1, 0], "whoever has not answered is asked again"
    nodes.silent.clear()
    for counts in ([1, 1, 0], [1, 1, 1], [1, 1, 1]):
        await renewals.look()
        assert nodes.counts() == counts, "after a pause, and once"
    assert [generation(certified, nodes.warrants[node][0], node) for node in NODES] == [5, 5, 5]
    again = WarrantRenewals(Warrants(certified.server), lambda: state, nodes.ask, lambda: True)
    await again.look()
    assert nodes.counts() == [2, 2, 2], "another process does not know what this one has signed"


def test_warrant_uses_newest_certificate(certified: Certified) -> None:
    at = now()
    warrants = Warrants(certified.server, lambda: at)
    certified.serve()
    renewed = warrants.beside(enveloped(told(5, RUNS)))[WARRANT_HEADER]
    assert generation(certified, renewed, "n1") == 5
    certified.server.write_text("nonsense")
    assert generation(certified, warrants.beside(enveloped(told(6, RUNS)))[WARRANT_HEADER], "n1") == 6
    at += timedelta(days=400)
    late = warrants.beside(enveloped(told(7, RUNS)))[WARRANT_HEADER]
    with pytest.raises(BadSignature, match="not valid when it made"):
        generation(certified, late, "n1")
