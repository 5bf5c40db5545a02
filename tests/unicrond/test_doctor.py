"""`unicronctl doctor`: each finding is found where it is, and only there."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.unicrond.serving import healed_cluster
from unicrond.core.state.node_parts import AgentIdentity, Isolation
from unicrond.core.state.state import ClusterState, NodeLogin, NodeStatus
from unicrond.display.doctor import findings
from unicrond.display.event_lines import EventLine
from unicrond.events.vocabulary import MemoryService

HEALTH = {"status": "live", "trouble": "", "alarms": []}


@pytest.fixture(scope="module")
def state() -> ClusterState:
    """Four nodes, each on a machine of its own."""
    state = healed_cluster().state
    nodes = {
        name: replace(node, address=f"10.0.0.{number}", memory=MemoryService(node=name, host="h", port=1, token="t"))
        for number, (name, node) in enumerate(state.nodes.items(), start=1)
    }
    return replace(state, nodes=nodes)


def with_node(state: ClusterState, name: str, **fields: object) -> ClusterState:
    return replace(state, nodes={**state.nodes, name: replace(state.nodes[name], **fields)})


def said(node: str, late_s: float, count: int = 3) -> list[EventLine]:
    envelope = {"producer": node, "observed_at_us": 1_000_000_000}
    at_us = 1_000_000_000 + round(late_s * 1e6)
    return [EventLine(seq=n, recorded_at_us=at_us, type="StepCommitted", envelope=envelope) for n in range(count)]


def test_doctor_finds_nothing_in_healthy_cluster(state: ClusterState) -> None:
    assert findings(state, HEALTH, [*said("n1", 0.01), *said("n2", 1.0)]) == []
    one_machine = replace(state, nodes={n: replace(node, address="127.0.0.1") for n, node in state.nodes.items()})
    assert findings(one_machine, HEALTH, []) == []


@pytest.mark.parametrize(
    ("fields", "what", "fix"),
    [
        ({"address": "127.0.0.1"}, "where no other node reaches it", "--address"),
        ({"memory": None}, "takes no copies of states", "--memory-gib"),
        ({"status": NodeStatus.LOST, "reason": "no heartbeat"}, "is lost: no heartbeat", "unicronctl story node n2"),
        ({"isolation": Isolation(active=True)}, "is isolated", "unicronctl story node n2"),
        ({"slots_max": 8}, "has 1 slots, and had 8", "nvidia-smi"),
    ],
)
def test_doctor_names_problem_of_node(state: ClusterState, fields: dict[str, object], what: str, fix: str) -> None:
    [found] = findings(with_node(state, "n2", **fields), HEALTH, [])
    assert found.about == "n2" and what in found.problem and fix in found.fix


def test_doctor_compares_addresses_versions_and_logins(state: ClusterState) -> None:
    [same] = findings(with_node(state, "n2", address="10.0.0.1"), HEALTH, [])
    assert "n1, n2 say the same address" in same.problem
    [versions] = findings(with_node(state, "n2", agent=AgentIdentity(boot=1, version="0.0.9+x")), HEALTH, [])
    assert "run several versions" in versions.problem and "0.0.9: n2" in versions.problem
    keys = {name: NodeLogin(key="U", is_used=True) for name in ("n1", "n2", "n3")}
    [login] = findings(replace(state, logins=keys), HEALTH, [])
    assert (login.about, login.fix) == ("n4", "unicrond enroll n4")


def test_doctor_finds_clock_skew(state: ClusterState) -> None:
    [ahead] = findings(state, HEALTH, [*said("n1", -2.0), *said("n2", 0.1), *said("stranger", -9)])
    assert ahead.about == "n1" and "ahead of the log's by 2.0 s" in ahead.problem and "chrony" in ahead.fix
    assert findings(state, HEALTH, said("n1", -2.0, count=2)) == [], "too few"
    [behind] = findings(state, HEALTH, [*said("n1", 9.0), *said("n1", 7.0)])
    assert "behind the log's by up to 7.0 s" in behind.problem


def test_doctor_finds_problems_of_head(state: ClusterState) -> None:
    health = {
        "status": "log takes nothing",
        "trouble": "disk full",
        "alarms": [{"alarm": "logins-shared", "text": "the shared login"}],
    }
    kept = {"n3": {"entries": 4.0, "oldest_s": 12.0}}
    found = findings(state, {**health, "outbox_backlog": kept}, [])
    assert [one.about for one in found] == ["coordinator", "coordinator", "n3"]
    assert "disk full" in found[0].problem and "holds back 4 observations, the oldest for 12 s" in found[2].problem
    assert findings(ClusterState(), HEALTH, [])[0].problem == "none has joined"
