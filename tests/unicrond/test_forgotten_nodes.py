"""Nodes that go for good: forgotten by a person or by time, told to leave, and their names in use again."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from tests.contracts.memory_log import MemoryLog
from tests.unicrond.cluster import MiniCluster
from tests.unicrond.coordinators import running
from unicrond.core.nodes.node_removal import is_planned_for, refusal
from unicrond.core.replayer import replay
from unicrond.core.rules.invariants import check
from unicrond.core.rules.plan_problems import present_replicas
from unicrond.core.rules.survey import Survey
from unicrond.core.state.policy import Policy, Settings, settings_of
from unicrond.core.state.state import NodeStatus
from unicrond.core.state.state_bytes import digest, from_json, to_json
from unicrond.events import vocabulary as v
from unicrond.events.wire.envelope import Envelope, RecordedEvent
from unicrond.events.wire.schemas import SCHEMA, told_version
from unicrond.replay.views.verify import Verifier, bases
from unicrond.views.view import feed_all

NODE = "n0"
DAY_US = 86_400_000_000


def training(seed: int = 0, policy: Policy | None = None) -> MiniCluster:
    cluster = MiniCluster(seed, policy)
    for number in range(3):
        cluster.add_host(f"n{number}")
    cluster.submit("t", min_workers=1, max_workers=3)
    cluster.run()
    cluster.train("t", 12)
    cluster.run()
    return cluster


def said(cluster: MiniCluster, kind: type) -> list:
    return [entry.envelope.event for entry in cluster.log if isinstance(entry.envelope.event, kind)]


def ask(cluster: MiniCluster, *, leave: bool = False) -> None:
    asked = v.ForgetRequested(node=NODE, leave=leave, reason="the machine goes back")
    cluster.append(asked, "api", cluster.state.term)
    cluster.run()


def lost(cluster: MiniCluster) -> None:
    host = cluster.hosts[NODE]
    cluster.kill_host(host)
    cluster.lose(host)
    cluster.run()


def left(cluster: MiniCluster) -> None:
    host = cluster.hosts[NODE]
    cluster.say(host, v.NodeLeaving(node=NODE, grace_us=1, reason="test"))
    cluster.run()
    cluster.kill_host(host)
    cluster.say(host, v.NodeLeft(node=NODE, reason="test"))
    cluster.run()


@pytest.mark.parametrize("gone", [lost, left])
@pytest.mark.parametrize("seed", range(5))
def test_departed_node_is_forgotten_on_request(gone: object, seed: int) -> None:
    cluster = training(seed)
    gone(cluster)  # type: ignore[operator]
    assert NODE in cluster.state.nodes
    ask(cluster)
    assert NODE not in cluster.state.nodes
    assert NODE not in repr({name: task.troubles for name, task in cluster.state.tasks.items()})
    told = said(cluster, v.LeaveCluster)
    assert [command.for_good for command in told] == ([False] if gone is lost else []), "one that is cut off hears it"
    check(cluster.state)
    cluster.assert_whole()
    assert len(cluster.state.tasks["t"].member_names) == 2
    assert digest(from_json(to_json(cluster.state))) == digest(cluster.state)


def test_node_that_is_up_is_not_forgotten() -> None:
    cluster = training()
    node = cluster.state.nodes[NODE]
    assert "n0 is up; unicronctl forget --leave n0 has it leave for good first" in refusal(node, leave=False)
    assert not refusal(node, leave=True)
    ask(cluster)
    assert cluster.state.nodes[NODE].status is NodeStatus.UP and not cluster.state.nodes[NODE].cordon.draining


@pytest.mark.parametrize("seed", range(5))
def test_leave_command_drains_node_without_loss(seed: int) -> None:
    """Drained first: nothing is lost, and nothing is an incident."""
    cluster = training(seed)
    ask(cluster, leave=True)
    (told,) = said(cluster, v.LeaveCluster)
    assert told.for_good and told.agent_boot == cluster.hosts[NODE].boot
    assert NODE not in cluster.state.nodes and not cluster.hosts[NODE].processes
    assert cluster.state.incidents_total == 0
    urgent = [decided.urgent for decided in said(cluster, v.MembershipDecided)]
    assert not urgent[-1]
    cluster.assert_whole()


def test_next_agent_of_leaving_name_gets_leave_command() -> None:
    cluster = training()
    cluster.append(v.ForgetRequested(node=NODE, leave=True, reason="test"), "api", cluster.state.term)
    cluster.decide()
    host = cluster.hosts[NODE]
    host.commands.clear()
    cluster.kill_host(host)
    cluster.add_host(NODE)
    cluster.run()
    assert len(said(cluster, v.LeaveCluster)) == 2
    assert NODE not in cluster.state.nodes


def test_new_address_under_old_name_opens_no_incident() -> None:
    cluster = training()
    left(cluster)
    before = cluster.state.nodes[NODE].address
    for forgotten in (False, True):
        if forgotten:
            left(cluster)
            ask(cluster)
        host = cluster.hosts[NODE]
        host.up, host.boot = True, host.boot + 1
        store = v.StoreAddress(host="10.9.9.9", port=1)
        address = "10.9.9.9" if forgotten else "10.8.8.8"
        version = told_version("test", SCHEMA)
        cluster.say(
            host,
            v.NodeJoined(
                node=NODE, address=address, slots=1, store=store, agent_boot=host.boot, version=version,
            ),
        )  # fmt: skip
        cluster.run()
        assert cluster.state.nodes[NODE].address == address != before
        assert len(cluster.state.tasks["t"].member_names) == 3
        assert not cluster.state.incidents_total and not cluster.state.nodes[NODE].health.returns_us
        assert not cluster.state.ledger.failures
        cluster.assert_whole()


def test_departed_node_is_forgotten_after_time() -> None:
    cluster = training(policy=Policy(forget_s=86_400.0))
    left(cluster)
    (standing,) = [item for item in cluster.standing().items() if item[0].startswith("forget:")]
    assert standing[0].startswith(f"forget:{NODE}#") and 0 < standing[1] <= DAY_US
    cluster.now_us += DAY_US // 2
    cluster.append(v.NodeUncordoned(node="n1", reason="time goes on"), "api", cluster.state.term)
    assert cluster.standing()[standing[0]] <= DAY_US // 2, "a restarted coordinator waits for the rest alone"
    cluster.run(passing=("forget",))
    (forgotten,) = said(cluster, v.NodeForgotten)
    assert forgotten.reason == "it left 12 h ago"
    assert NODE not in cluster.state.nodes and not [d for d in cluster.standing() if d.startswith("forget:")]


def test_forget_timeout_spares_cordoned_and_isolated_nodes() -> None:
    cluster = training()
    cluster.cordon(NODE)
    left(cluster)
    assert not [d for d in cluster.standing() if d.startswith("forget:")]
    ask(cluster)
    assert NODE not in cluster.state.nodes, "a person may"
    assert not [d for d in deadlines_of(Policy(forget_s=0.0)) if d.startswith("forget:")], "0 is never"


def deadlines_of(policy: Policy) -> dict[str, int]:
    cluster = training(policy=policy)
    left(cluster)
    return cluster.standing()


def test_name_that_rejoins_before_forget_is_new_node() -> None:
    cluster = training()
    cluster.cordon(NODE)
    left(cluster)
    cluster.append(v.ForgetRequested(node=NODE, leave=False, reason="test"), "api", cluster.state.term)
    cluster.add_host(NODE)
    cluster.run()
    node = cluster.state.nodes[NODE]
    assert node.status is NodeStatus.UP and not (node.cordon.active or node.departure.removal)
    assert len(cluster.state.tasks["t"].member_names) == 3


def test_forget_waits_until_plan_drops_node() -> None:
    cluster = training()
    host = cluster.hosts[NODE]
    cluster.kill_host(host)
    cluster.lose(host)
    assert is_planned_for(cluster.state, NODE)
    cluster.append(v.ForgetRequested(node=NODE, leave=False, reason="test"), "api", cluster.state.term)
    cluster.append(v.NodeForgotten(node=NODE, reason="too early"), "coordinator", cluster.state.term)
    assert NODE in cluster.state.nodes
    gone = replace(cluster.state, nodes={name: n for name, n in cluster.state.nodes.items() if name != NODE})
    survey = Survey(gone, cluster.policy)
    assert [len(present_replicas(survey, task)) for task in survey.active] == [2], "a plan may outlive a node"
    cluster.run()
    assert NODE not in cluster.state.nodes
    check(cluster.state)


def test_fold_ignores_late_events_of_forgotten_node() -> None:
    cluster = training()
    lost(cluster)
    worker = "t.1"
    ask(cluster)
    before = cluster.state
    host = cluster.hosts[NODE]
    for event in (
        v.WorkerExited(node=NODE, task="t", worker=worker, exit_code=None, signal=9, is_expected=False),
        v.CommandApplied(node=NODE, command_id="1.1.n0.9"),
        v.NodeLeaving(node=NODE, grace_us=1, reason="test"),
        v.NodeLeft(node=NODE, reason="test"),
    ):
        cluster.say(host, event)
    assert (cluster.state.nodes, cluster.state.tasks) == (before.nodes, before.tasks)
    assert not cluster.decide()


def test_log_holds_forget_time_only_if_changed() -> None:
    assert "forget_s" not in Settings(Policy(), 1.0).numbers()
    numbers = Settings(Policy(forget_s=60.0), 1.0).numbers()
    assert settings_of(numbers).policy.forget_s == 60.0


async def test_log_with_forgotten_node_replays_and_verifies() -> None:
    log = MemoryLog()
    store = v.StoreAddress(host="127.0.0.1", port=1)
    joined = v.NodeJoined(
        node="n1", address="127.0.0.1", slots=1, store=store, agent_boot=1, version=told_version("test", SCHEMA)
    )
    events = (joined, v.NodeLeft(node="n1", reason="test"))
    async with running(log, policy=Policy(forget_s=0.2)) as coordinator:
        for number, event in enumerate(events, 1):
            await log.append([Envelope(producer="n1", boot=1, number=number, observed_at_us=1, event=event)])
        read: list[RecordedEvent] = []
        async for entry in log.read():
            assert isinstance(entry, RecordedEvent)
            read.append(entry)
            if isinstance(entry.envelope.event, v.NodeForgotten):
                break
        while coordinator.state.seq < read[-1].seq:  # noqa: ASYNC110  # nothing tells of it
            await asyncio.sleep(0.01)
        assert not coordinator.state.nodes
        state = replay(read)
        assert digest(state) == digest(coordinator.state)
    assert [type(e.envelope.event) for e in read][-2:] == [v.DeadlineExpired, v.NodeForgotten]
    verifier = Verifier(bases(read))
    feed_all(verifier, read)
    verified = verifier.finish()
    assert verified.deadlines == 1 and verified.decisions >= 1
