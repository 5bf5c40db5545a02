"""What `unicronctl doctor` makes of what the nodes' agents have seen, and whom it asks for what."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.unicrond.serving import healed_cluster
from unicrond.core.state.state import ClusterState, NodeStatus
from unicrond.display.doctor_nodes import diagnose_nodes
from unicrond.events.queries.node_checks import (
    FactsCheck,
    Finding,
    LinksCheck,
    LinksReport,
    NodeFacts,
    PairSum,
    StorageCheck,
    StorageReport,
    UnreachablePort,
    decode_check,
    encode,
)
from unicrond.events.queries.worker_queries import LogsReply
from unicrond.events.vocabulary import CheckpointSpec
from unicrond.intake.tokens import Scope
from unicrond.service.api.access import scope_of
from unicrond.service.api.node_checks import ALL_PAIRS_MAX, ChecksBusy, ChecksRequest, NodeChecks, _turn, ring, to_try
from unicrond.service.api.worker_output import LogReader, LogsUnavailable

#: Whose storage is whose: nodes with the same letter share it.
SHARED = {"n1": "a", "n2": "a", "n3": "a", "n4": "a"}


class Agents(LogReader):
    """Answers as sound agents would, but for what is said here. `cut`: (from, to); `bad_sums`: pairs in one order."""

    def __init__(self) -> None:
        self.cut: set[tuple[str, str]] = set()
        self.bad_sums: dict[tuple[str, str], str] = {}
        self.storage = dict(SHARED)
        self.facts: dict[str, dict[str, Any]] = {}
        self.silent: dict[str, str] = {}
        self.refusing: set[str] = set()
        self.runs_as_others = False
        self.marks: dict[str, set[str]] = {}
        self.asked: list[tuple[str, Any]] = []
        self.ports: dict[str, Any] = {}

    async def ask(self, node: str, body: bytes, timeout_s: float) -> LogsReply:
        check = decode_check(body)
        self.asked.append((node, check))
        await asyncio.sleep(0)
        if node in self.silent:
            if "bad request" in self.silent[node]:
                return LogsReply(node=node, error=self.silent[node])
            raise LogsUnavailable(self.silent[node])
        return LogsReply(node=node, data=encode(self.sees(node, check)))

    def sees(self, node: str, check: Any) -> Any:
        match check:
            case FactsCheck():
                now_us = time.time_ns() // 1000
                told = {"findings": (), "mtu": 9000, "torch": "2.13.0", "driver": "", "now_us": now_us}
                told |= self.facts.get(node, {})
                told["now_us"] += told.pop("off_us", 0)
                return NodeFacts(**told)
            case LinksCheck():
                lost = [
                    UnreachablePort(
                        peer=peer.node, service=what, address=f"10.0.0.{peer.node[1:]}:7", reason="connection refused"
                    )
                    for peer in check.peers
                    for what in peer.ports
                    if (node, peer.node) in self.cut
                ]
                sums = [
                    PairSum(peer=pair.peer, trouble=self.bad_sums.get((node, pair.peer), ""), duration_us=9)
                    for pair in check.pairs
                ]
                return LinksReport(unreachable_ports=tuple(lost), sums=tuple(sums))
            case StorageCheck():
                return self.stores(node, check)

    def stores(self, node: str, check: StorageCheck) -> StorageReport:
        more = {"directory": check.directory, "runs_as_others": self.runs_as_others}
        if node in self.refusing:
            return StorageReport(result="refused", reason="Permission denied", writable=False, **more)
        there = self.marks.setdefault(self.storage[node], set())
        if check.part == "write":
            there.add(check.token)
        elif check.part == "remove":
            there.discard(check.token)
        return StorageReport(result="seen" if check.token in there else "missing", **more)


@pytest.fixture(scope="module")
def state() -> ClusterState:
    state = healed_cluster().state
    tasks = {
        name: replace(task, spec=replace(task.spec, checkpoint=CheckpointSpec(dir=f"/ckpt/{name}")))
        for name, task in state.tasks.items()
    }
    return replace(state, tasks=tasks)


@pytest.fixture
def agents() -> Iterator[Agents]:
    agents = Agents()
    yield agents
    assert not any(agents.marks.values()), "no mark stays behind"


async def look(state: ClusterState, agents: Agents) -> tuple[list[Finding], list[str]]:
    """Through JSON, as the API gives it."""
    seen = await NodeChecks(agents).look(state, ChecksRequest())
    return diagnose_nodes(msgspec.json.decode(msgspec.json.encode(seen)))


async def test_sound_nodes_have_no_findings(state: ClusterState, agents: Agents) -> None:
    assert await look(state, agents) == ([], [])
    tried = {(node, peer.node) for node, check in agents.asked if isinstance(check, LinksCheck) for peer in check.peers}
    assert len(tried) == 12, "every node connects to every other"
    summed = [
        tuple(sorted((node, pair.peer)))
        for node, check in agents.asked
        if isinstance(check, LinksCheck)
        for pair in check.pairs
    ]
    assert Counter(summed) == Counter([("n1", "n2"), ("n2", "n3"), ("n3", "n4"), ("n1", "n4")] * 2)


async def test_bad_link_makes_one_finding(state: ClusterState, agents: Agents) -> None:
    agents.cut = {("n1", "n3"), ("n3", "n1"), ("n4", "n2")}
    found, _ = await look(state, agents)
    assert [one.about for one in found] == ["n1, n3", "n2, n4"]
    assert found[0].problem.startswith("do not reach each other (") and "firewall" in found[0].fix
    assert found[1].problem == "n4 does not reach n2 (store at 10.0.0.2:7: connection refused)"


@pytest.mark.parametrize(
    ("ways", "what"),
    [
        ("to", "no other node reaches it ("),
        ("from", "it reaches no other node ("),
        ("both", "no other node reaches it, and it reaches none ("),
    ],
)
async def test_unreachable_node_makes_one_finding(state: ClusterState, agents: Agents, ways: str, what: str) -> None:
    others = ("n1", "n3", "n4")
    agents.cut = {link for o in others for link in (("n2", o), (o, "n2"))}
    agents.cut = {link for link in agents.cut if ways == "both" or (link[1] == "n2") == (ways == "to")}
    found, _ = await look(state, agents)
    assert [one.about for one in found] == ["n2"] and found[0].problem.startswith(what)


async def test_doctor_finds_failing_sums_over_open_connections(state: ClusterState, agents: Agents) -> None:
    agents.bad_sums = {
        ("n1", "n2"): "the sum failed: Timed out", ("n2", "n1"): "the sum did not end in time",
        ("n3", "n4"): "the sum is wrong", ("n4", "n1"): "the two have not met in the store",
    }  # fmt: skip
    agents.cut = {("n4", "n1")}
    found, _ = await look(state, agents)
    assert [one.about for one in found] == ["n1, n4", "n1, n2", "n3, n4"]
    assert "does not reach" in found[0].problem
    assert found[1].problem == "connect, but a sum of 4 MiB between them fails: the sum failed: Timed out (on n1)"
    assert "ping -M do" in found[1].fix
    assert "is wrong (on n3)" in found[2].problem and "drain" in found[2].fix


async def test_link_has_same_name_in_both_directions(state: ClusterState, agents: Agents) -> None:
    agents.bad_sums = {("n4", "n1"): "the sum failed: Timed out"}  # the ring closes from n4 to n1
    found, _ = await look(state, agents)
    assert [one.about for one in found] == ["n1, n4"]


async def test_doctor_collects_agent_findings_and_differences(state: ClusterState, agents: Agents) -> None:
    agents.facts = {
        "n2": {"findings": (Finding("--slots", "9 slots, but 8 visible GPUs", "look for GPUs that are gone"),)},
        "n3": {"mtu": 1500, "driver": "580.95", "torch": "2.12.1"},
        "n4": {"off_us": 7_000_000, "driver": "570.1"},
    }
    found, _ = await look(state, agents)
    told = {one.about: one for one in found}
    assert told["n2"].problem == "--slots: 9 slots, but 8 visible GPUs"
    assert told["n4"].problem.startswith("its clock is 7.") and "ahead of the head's" in told["n4"].problem
    several = [one.problem for one in found if one.about == "nodes"]
    assert several == [
        "have several MTUs of the training network: 1500: n3; 9000: n1, n2, n4",
        "have several GPU drivers: 570.1: n4; 580.95: n3",
        "have several versions of torch: 2.12.1: n3; 2.13.0: n1, n2, n4",
    ]


async def test_doctor_reports_silent_nodes(state: ClusterState, agents: Agents) -> None:
    agents.silent = {"n1": "no answer within 10 s", "n2": "bad request: unknown field `check`"}
    found, _ = await look(state, agents)
    assert [(one.about, one.problem) for one in found] == [
        ("n1", "does not answer: no answer within 10 s"),
        ("n2", "does not answer: runs an agent that is too old for this; upgrade it"),
    ]


async def test_doctor_finds_storage_that_is_not_shared(state: ClusterState, agents: Agents) -> None:
    agents.storage = {**SHARED, "n3": "b", "n4": "c"}
    found, _ = await look(state, agents)
    assert [one.about for one in found] == ["task big", "task small"]
    assert found[0].problem == "n3, n4 do not see what n1 writes to /ckpt/big" and "mount" in found[0].fix


async def test_doctor_finds_storage_without_write_access(state: ClusterState, agents: Agents) -> None:
    agents.refusing = {"n1"}
    found, _ = await look(state, agents)
    assert found[0].problem == "n1 may not write to /ckpt/big", "the others can"
    agents.refusing = set(SHARED)
    found, notes = await look(state, agents)
    assert "no agent may write to /ckpt/big: Permission denied" in found[0].problem and not notes
    agents.runs_as_others = True
    found, notes = await look(state, agents)
    assert not found and "whether all nodes share it is not known" in notes[0]


async def test_checks_refuse_second_run_meanwhile(state: ClusterState, agents: Agents) -> None:
    checks = NodeChecks(agents)
    first = asyncio.create_task(checks.look(state, ChecksRequest()))
    await asyncio.sleep(0)
    with pytest.raises(ChecksBusy):
        await checks.look(state, ChecksRequest())
    await first
    assert scope_of("POST", "/v1/checks") is Scope.OPERATE


async def test_checks_skip_nodes_that_are_not_up(state: ClusterState, agents: Agents) -> None:
    nodes = {n: replace(node, status=NodeStatus.LOST) for n, node in state.nodes.items() if n != "n1"}
    await look(replace(state, nodes={**state.nodes, **nodes}), agents)
    assert {node for node, _ in agents.asked} == {"n1"} and len(agents.asked) == 1


@given(st.integers(0, 200))
def test_link_checks_cover_both_ends_without_overlap(count: int) -> None:
    names = [f"n{number}" for number in range(count)]
    tried = to_try(names)
    assert all(one in tried[other] and one != other for one in names for other in tried[one])
    assert all(len(others) <= max(ALL_PAIRS_MAX, 2 * count.bit_length()) for others in tried.values())
    pairs = ring(names)
    in_pairs = Counter(name for pair in pairs for name in pair)
    assert all(in_pairs[name] == min(2, max(0, count - 1)) for name in names)
    turns = Counter((name, _turn(at, len(pairs))) for at, pair in enumerate(pairs) for name in pair)
    assert all(times == 1 for times in turns.values())
