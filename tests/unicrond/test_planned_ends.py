"""An end that an agent has announced is no failure, whatever becomes of it; commands are for one agent."""

from __future__ import annotations

import pytest

from tests.replay.test_verify import verify
from tests.unicrond.cluster import SECOND_US, MiniCluster
from unicrond.core.state.state import ClusterState, NodeStatus
from unicrond.events import vocabulary as v

NODE = "n2"


def training(nodes: int = 3, workers: int = 3, slots: int = 1) -> MiniCluster:
    cluster = MiniCluster(1)
    for number in range(1, nodes + 1):
        cluster.add_host(f"n{number}", slots)
    cluster.submit("t", max_workers=workers, global_batch=12)
    cluster.run()
    assert len(members(cluster.state)) == workers
    return cluster


def members(state: ClusterState) -> list[v.Member]:
    membership = state.tasks["t"].membership
    return list(membership.members) if membership else []


def announce(cluster: MiniCluster) -> None:
    leaving = v.NodeLeaving(node=NODE, grace_us=25 * SECOND_US, reason="its agent was asked to end")
    cluster.say(cluster.hosts[NODE], leaving)


def new_pod(cluster: MiniCluster) -> None:
    """Another agent under the name, with nothing of the one before."""
    cluster.kill_host(cluster.hosts[NODE])
    cluster.add_host(NODE)
    cluster.run()


def said(cluster: MiniCluster, kind: type) -> list:
    return [entry.envelope.event for entry in cluster.log if isinstance(entry.envelope.event, kind)]


def is_unblamed(cluster: MiniCluster) -> bool:
    state = cluster.state
    unblamed = not state.incidents_total and not any(node.health.returns_us for node in state.nodes.values())
    return unblamed and not state.ledger.failures and not state.tasks["t"].troubles.strikes


def test_planned_membership_empties_leaving_node() -> None:
    cluster = training()
    announce(cluster)
    cluster.run()
    newest = said(cluster, v.MembershipDecided)[-1]
    assert not newest.urgent and len(members(cluster.state)) == 2
    assert not cluster.hosts[NODE].processes and cluster.state.plan.trigger == f"node {NODE} leaving"
    cluster.say(cluster.hosts[NODE], v.NodeLeft(node=NODE, reason="its agent was asked to end"))
    new_pod(cluster)
    assert len(members(cluster.state)) == 3 and is_unblamed(cluster)


def test_task_exceeds_its_maximum_only_while_it_hands_its_state_over() -> None:
    """All its nodes have announced their ends, and two others have joined: they take the state of those that leave."""
    cluster = training()
    for host in list(cluster.hosts.values()):
        cluster.say(host, v.NodeLeaving(node=host.name, grace_us=25 * SECOND_US, reason="its agent was asked to end"))
    for name in ("n4", "n5"):
        cluster.add_host(name)
    cluster.run()
    _, handover, after = said(cluster, v.MembershipDecided)
    assert sum(run.count for run in handover.seats) == 5 and handover.reason.endswith("2 join, 0 leave")
    assert after.generation == handover.generation + 1 and after.reason.endswith("0 join, 3 leave")
    assert [member.node for member in members(cluster.state)] == ["n4", "n5"] and is_unblamed(cluster)


def test_node_whose_announced_end_is_over_is_gone() -> None:
    """No head was there to see three nodes go; the next one gives no membership to their workers, and to wait for their
    silence is not needed."""
    cluster = training()
    gone = list(cluster.hosts.values())
    for host in gone:
        cluster.say(host, v.NodeLeaving(node=host.name, grace_us=22 * SECOND_US, reason="its agent was asked to end"))
    for host in gone:
        cluster.kill_host(host)
    cluster.now_us += 540 * SECOND_US
    for name in ("n4", "n5"):
        cluster.add_host(name)
    cluster.take_over()
    cluster.run()
    assert [lost.node for lost in said(cluster, v.NodeLost)] == ["n1", "n2", "n3"]
    assert said(cluster, v.NodeLost)[0].reason == "the end that its agent announced is over since 518 s"
    assert max(sum(run.count for run in decided.seats) for decided in said(cluster, v.MembershipDecided)[1:]) == 2
    findings = verify(cluster.log)
    assert findings.node_verdicts == 3 and not findings.unverifiable, "they follow from the log, without heartbeats"
    assert [member.node for member in members(cluster.state)] == ["n4", "n5"] and is_unblamed(cluster)


def test_node_that_lives_past_its_announced_end_is_lost_once() -> None:
    cluster = training()
    announce(cluster)
    cluster.now_us += 60 * SECOND_US
    cluster.take_over()
    cluster.run()
    assert cluster.state.nodes[NODE].status is NodeStatus.LOST
    evidence = v.Evidence(beat_seq=1, beat_at_us=cluster.now_us)
    cluster.append(v.NodeReturned(node=NODE, evidence=evidence), "coordinator", cluster.state.term)
    cluster.now_us += 60 * SECOND_US
    cluster.take_over()
    cluster.run()
    assert len(said(cluster, v.NodeLost)) == 1 and is_unblamed(cluster)


@pytest.mark.parametrize("announced", [True, False])
@pytest.mark.parametrize("how", ["joins", "lost", "returns"])
def test_announced_end_is_no_failure(how: str, *, announced: bool) -> None:
    """The agent is killed before its workers have left."""
    cluster = training()
    if announced:
        announce(cluster)
    if how != "joins":
        cluster.kill_host(cluster.hosts[NODE])
        cluster.lose(cluster.hosts[NODE])
        cluster.run()
    if how == "returns":
        evidence = v.Evidence(beat_seq=1, beat_at_us=cluster.now_us)
        cluster.append(v.NodeReturned(node=NODE, evidence=evidence), "coordinator", cluster.state.term)
    new_pod(cluster)
    assert len(members(cluster.state)) == 3
    assert is_unblamed(cluster) is announced


@pytest.mark.parametrize("announced", [True, False])
def test_exits_told_by_next_agent_belong_to_announced_end(*, announced: bool) -> None:
    """It works in the run directory of the one that was killed, and tells them before it joins."""
    cluster = training()
    if announced:
        announce(cluster)
    host = cluster.hosts[NODE]
    (worker,) = host.processes
    host.boot += 1
    told = v.ErrorReported(
        node=NODE, task="t", worker=worker, kind="process_exit", generation=1, iteration=1, phase="unknown", message="m"
    )
    cluster.say(host, told)
    cluster.kill_worker(host, worker)
    host.boot -= 1
    new_pod(cluster)
    assert len(members(cluster.state)) == 3
    assert is_unblamed(cluster) is announced


def test_three_announced_ends_isolate_no_node() -> None:
    cluster = training()
    for _ in range(4):
        announce(cluster)
        new_pod(cluster)
    assert not said(cluster, v.NodeIsolated) and is_unblamed(cluster)


def start(cluster: MiniCluster, node: str, worker: str) -> v.StartWorker:
    """A command for the first agent of the node."""
    state = cluster.state
    command = v.StartWorker(
        command_id=f"{state.term}.{state.plan.epoch}.{node}.9{worker[-1]}",
        node=node,
        epoch=state.plan.epoch,
        agent_boot=1,
        spec=state.tasks["t"].spec,
        worker=worker,
        replica=9,
        shard=0,
        store=v.StoreAddress(host="h", port=1),
    )
    cluster.append(command, "coordinator", state.term)
    return command


@pytest.mark.parametrize("how", ["leaving", "left", ""])
def test_start_refused_by_leaving_node_is_no_strike(how: str) -> None:
    cluster = training(workers=2)
    (host,) = [host for host in cluster.hosts.values() if not host.processes]
    if how == "left":
        cluster.say(host, v.NodeLeft(node=host.name, reason="it was interrupted"))
    command = start(cluster, host.name, "t.77")
    if how == "leaving":
        cluster.say(host, v.NodeLeaving(node=host.name, grace_us=1, reason="test"))
    cluster.say(host, v.CommandFailed(node=host.name, command_id=command.command_id, reason="the node is leaving"))
    assert "t.77" not in cluster.state.tasks["t"].workers
    assert is_unblamed(cluster) is bool(how)


def test_command_names_its_agent() -> None:
    cluster = training()
    cluster.add_host(NODE)
    cluster.cordon(NODE, drain=True)
    cluster.run()
    commands = [e.envelope.event for e in cluster.log if isinstance(e.envelope.event, v.Command)]
    assert {command.agent_boot for command in commands if command.node != NODE} == {1}
    assert [command.agent_boot for command in commands if isinstance(command, v.StopWorker)] == [2]


@pytest.mark.parametrize("early_answer", [True, False])
def test_start_ordered_from_predecessor_is_void(*, early_answer: bool) -> None:
    """An agent is killed with a start that has not begun. `early_answer`: the next one says so before it has joined."""
    cluster = training(nodes=1, workers=1, slots=3)
    command = start(cluster, "n1", "t.77")
    host = cluster.hosts["n1"]
    host.commands.clear()
    void = v.CommandFailed(node="n1", command_id=command.command_id, reason="void: it was for an agent that has ended")
    if early_answer:
        host.boot += 1
        cluster.say(host, void)
        host.boot -= 1
        assert "t.77" in cluster.state.tasks["t"].workers, "another would be ordered from the agent that has ended"
    cluster.add_host("n1")
    if not early_answer:
        cluster.say(host, void)
    assert "t.77" not in cluster.state.tasks["t"].workers
    start(cluster, "n1", "t.78")  # decided before the second agent was known
    assert "t.78" not in cluster.state.tasks["t"].workers
    assert cluster.state.tasks["t"].numbers.next_worker == 79, "no number is given twice"
    assert is_unblamed(cluster) and cluster.state.tasks["t"].troubles.crashes is None


@pytest.mark.parametrize(("boot", "address", "acts"), [(1, "", True), (2, "", False), (0, "10.9.9.9", False)])
def test_cordon_applies_to_named_agent_only(boot: int, address: str, *, acts: bool) -> None:
    cluster = training()
    asked = v.NodeCordoned(node=NODE, drain=True, reason="test", agent_boot=boot, address=address)
    cluster.append(asked, "api", cluster.state.term)
    assert cluster.state.nodes[NODE].cordon.draining is acts


def test_drain_until_return_ends_at_return() -> None:
    cluster = training()
    asked = v.NodeCordoned(node=NODE, drain=True, reason="test", until_return=True)
    cluster.append(asked, "api", cluster.state.term)
    cluster.run()
    assert not cluster.hosts[NODE].processes and cluster.state.nodes[NODE].cordon.draining
    new_pod(cluster)
    node = cluster.state.nodes[NODE]
    assert (
        node.status is NodeStatus.UP
        and not node.cordon.active
        and not node.cordon.draining
        and not node.cordon.until_return
    )
    assert len(members(cluster.state)) == 3
