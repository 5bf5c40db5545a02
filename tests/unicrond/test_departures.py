"""Planned departures: drains by a time, maintenance windows, foretold failures, preemption: no step, no micro-batch."""

from __future__ import annotations

from typing import Any

import pytest

from tests.replay.test_verify import verify
from tests.unicrond.cluster import SECOND_US, MiniCluster, members
from tests.unicrond.test_decide import two_tasks
from tests.unicrond.test_node_control import node_of, on_node
from unicrond.core.nodes.drains import departure_text
from unicrond.core.nodes.isolation import IsolationPhase, phase
from unicrond.core.rules.requests import request_problem
from unicrond.core.state.state import NodeStatus
from unicrond.events import vocabulary as v

SEEDS = range(8)
_HOUR_S = 3600.0


def of(cluster: MiniCluster, kind: type, since: int = 0) -> list[Any]:
    return [entry.envelope.event for entry in cluster.log[since:] if isinstance(entry.envelope.event, kind)]


def assert_nothing_was_lost(cluster: MiniCluster, since: int) -> None:
    """No group broke: each worker left at a boundary, by a membership that all met there, and no incident stands."""
    decided = of(cluster, v.MembershipDecided, since)
    assert decided and not any(each.urgent for each in decided)
    assert cluster.state.incidents_total == 0
    assert not any(stop.kill for stop in of(cluster, v.StopWorker, since))
    assert {each.source for each in of(cluster, v.WorkerJoinedGroup, since)} <= {"own"}
    for task in cluster.state.tasks.values():
        assert task.progress.iteration == task.progress.best_iteration == cluster.iterations[task.name]


def pass_time(cluster: MiniCluster, prefix: str) -> None:
    """The deadline passes, when it does: the log's time is then."""
    lengths = [length for name, length in cluster.standing().items() if name.startswith(prefix)]
    assert lengths, f"no deadline {prefix}: {sorted(cluster.standing())}"
    cluster.now_us += max(lengths)
    assert cluster.pass_deadlines(prefix)
    cluster.run()


# --- drain by a time -----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_drain_keeps_workers_until_lead_time_and_boundary(seed: int) -> None:
    cluster = two_tasks(seed)
    node = node_of(cluster, members(cluster, "big")[0])
    before = len(cluster.log)
    cluster.drain_by(node, _HOUR_S)
    cluster.run()
    assert len(on_node(cluster, node)) == 1, "its worker is worth most where it is"
    assert "when there is room elsewhere, or that is near" in departure_text(cluster.state.nodes[node])
    (length_us,) = [length for name, length in cluster.standing().items() if name.startswith(f"drain:{node}")]
    policy = cluster.policy
    least_s, most_s = policy.worker_start_s + policy.regroup_s, policy.worker_start_s + 10 * policy.regroup_s
    assert least_s <= _HOUR_S - length_us / SECOND_US <= most_s + 1
    cluster.train("big")
    pass_time(cluster, f"drain:{node}")
    cluster.assert_whole()
    assert on_node(cluster, node) == []
    cluster.train("big")
    assert_nothing_was_lost(cluster, before)
    assert "drained (empty by " in cluster.state.plan.trigger
    pass_time(cluster, f"empty:{node}")
    assert cluster.state.nodes[node].cordon.overdue and not of(cluster, v.IncidentEscalated)
    cluster.uncordon(node)
    cluster.run()
    cluster.assert_whole()
    assert len(on_node(cluster, node)) == 1 and not departure_text(cluster.state.nodes[node])


@pytest.mark.parametrize("seed", SEEDS)
def test_drain_moves_workers_at_once_if_room_elsewhere(seed: int) -> None:
    cluster = MiniCluster(seed)
    for number in range(4):
        cluster.add_host(f"n{number}")
    cluster.submit("big", max_workers=3)
    cluster.run()
    cluster.train("big")
    before, node = len(cluster.log), node_of(cluster, members(cluster, "big")[0])
    cluster.drain_by(node, _HOUR_S)
    cluster.run()
    cluster.assert_whole()
    (begun,) = of(cluster, v.DrainStarted)
    assert begun.reason == "the plan has room for its workers elsewhere"
    assert on_node(cluster, node) == [] and len(members(cluster, "big")) == 3
    cluster.train("big")
    assert_nothing_was_lost_but_newcomers(cluster, before)


def assert_nothing_was_lost_but_newcomers(cluster: MiniCluster, since: int) -> None:
    decided = of(cluster, v.MembershipDecided, since)
    assert decided and not any(each.urgent for each in decided)
    assert cluster.state.incidents_total == 0 and cluster.state.tasks["big"].progress.iteration == 2


def test_drain_begins_when_other_task_makes_room() -> None:
    cluster = two_tasks(1)
    node = node_of(cluster, members(cluster, "big")[0])
    cluster.drain_by(node, _HOUR_S)
    cluster.run()
    assert not of(cluster, v.DrainStarted)
    cluster.append(v.TaskCancelled(task="small", reason="test"), "api", cluster.state.term)
    cluster.run()
    assert len(of(cluster, v.DrainStarted)) == 1 and on_node(cluster, node) == []
    assert len(members(cluster, "big")) == 3


def test_drain_of_empty_node_begins_at_once() -> None:
    cluster = MiniCluster(1)
    cluster.add_host("n0")
    cluster.drain_by("n0", _HOUR_S)
    cluster.run()
    assert of(cluster, v.DrainStarted)[0].reason == "no worker is on it" and cluster.state.nodes["n0"].cordon.draining


def test_drain_deadline_stops_remaining_workers() -> None:
    """The group does not come to its boundary: the node is empty all the same, and the others train on."""
    cluster = two_tasks(1)
    stubborn = members(cluster, "big")[-1]
    node = node_of(cluster, stubborn)
    cluster.drain_by(node, _HOUR_S)
    cluster.group_up = lambda task: False  # type: ignore[method-assign]  # no group meets
    pass_time(cluster, f"drain:{node}")
    assert on_node(cluster, node) == [stubborn], "it leaves at a boundary"
    pass_time(cluster, f"empty:{node}")
    assert on_node(cluster, node) == []
    (stop,) = [stop for stop in of(cluster, v.StopWorker) if stop.worker == stubborn]
    assert stop.reason == f"node {node} was to be empty by now"
    del cluster.group_up  # type: ignore[method-assign]
    cluster.run()
    cluster.assert_whole()
    assert len(members(cluster, "big")) == 2 and cluster.state.incidents_total == 0


def test_new_cordon_or_uncordon_voids_old_deadlines() -> None:
    cluster = two_tasks(1)
    node = node_of(cluster, members(cluster, "big")[0])
    cluster.drain_by(node, _HOUR_S)
    late = [name for name in cluster.standing() if name.startswith(("drain:", "empty:"))]
    assert len(late) == 2
    cluster.uncordon(node)
    assert not [name for name in cluster.standing() if name.startswith(("drain:", "empty:"))]
    cluster.drain_by(node, 2 * _HOUR_S)
    for name in late:
        cluster.append(v.DeadlineExpired(deadline_id=name), "coordinator", cluster.state.term)
    assert not cluster.state.nodes[node].cordon.draining and not cluster.state.nodes[node].cordon.overdue


def test_drain_outlives_coordinator_and_agent() -> None:
    cluster = two_tasks(1)
    node = node_of(cluster, members(cluster, "big")[0])
    cluster.drain_by(node, _HOUR_S)
    before = cluster.standing()
    cluster.take_over()
    cluster.add_host(node)
    after = cluster.standing()
    assert {name for name in before if node in name} <= set(after)
    pass_time(cluster, f"drain:{node}")
    assert on_node(cluster, node) == []


# --- maintenance ---------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_window_empties_nodes_before_start_and_returns_them(seed: int) -> None:
    cluster = two_tasks(seed)
    nodes = [node_of(cluster, members(cluster, "big")[0]), node_of(cluster, members(cluster, "big")[1])]
    before = len(cluster.log)
    window = cluster.maintain(*nodes, after_s=_HOUR_S, for_s=600)
    cluster.run()
    assert not any(cluster.state.nodes[node].cordon.active for node in nodes), "in full use until it is near"
    pass_time(cluster, f"window:{window}#near")
    cluster.assert_whole()
    assert [on_node(cluster, node) for node in nodes] == [[], []]
    cluster.train("big")
    cluster.train("small")
    assert_nothing_was_lost(cluster, before)
    pass_time(cluster, f"empty:{nodes[0]}")
    rebooted = cluster.hosts[nodes[0]]
    cluster.kill_host(rebooted)
    cluster.lose(rebooted)
    cluster.add_host(rebooted.name)
    cluster.run()
    back = cluster.state.nodes[nodes[0]]
    assert back.status is NodeStatus.UP and back.cordon.active and not back.health.returns_us
    assert cluster.state.incidents_total == 0, "it was expected to be away"
    pass_time(cluster, f"window:{window}#end")
    cluster.assert_whole()
    assert not cluster.state.windows and not any(cluster.state.nodes[node].cordon.active for node in nodes)
    assert all(len(on_node(cluster, node)) == 1 for node in nodes)


def test_cancelled_window_returns_nodes() -> None:
    cluster = two_tasks(1)
    node = node_of(cluster, members(cluster, "big")[0])
    first = cluster.maintain(node, after_s=_HOUR_S, for_s=600)
    cluster.append(v.MaintenanceCancelled(window=first, reason="test"), "api", cluster.state.term)
    assert not cluster.state.windows and not [name for name in cluster.standing() if name.startswith("window")]
    second = cluster.maintain(node, after_s=_HOUR_S, for_s=600)
    pass_time(cluster, f"window:{second}#near")
    assert on_node(cluster, node) == []
    cluster.append(v.MaintenanceCancelled(window=second, reason="test"), "api", cluster.state.term)
    cluster.run()
    assert len(on_node(cluster, node)) == 1


def test_window_leaves_manual_cordon_in_place() -> None:
    cluster = two_tasks(1)
    node = node_of(cluster, members(cluster, "big")[0])
    cluster.cordon(node, drain=True)
    window = cluster.maintain(node, after_s=_HOUR_S, for_s=600)
    for which in ("near", "end"):
        pass_time(cluster, f"window:{window}#{which}")
    assert cluster.state.nodes[node].cordon.active and cluster.state.nodes[node].cordon.reason == "test"


def test_later_window_keeps_shared_node() -> None:
    cluster = two_tasks(1)
    node = node_of(cluster, members(cluster, "big")[0])
    first = cluster.maintain(node, after_s=_HOUR_S, for_s=600)
    second = cluster.maintain(node, after_s=_HOUR_S, for_s=6000)
    for window in (first, second):
        pass_time(cluster, f"window:{window}#near")
    pass_time(cluster, f"window:{first}#end")
    assert cluster.state.nodes[node].cordon.window == second and on_node(cluster, node) == []
    pass_time(cluster, f"window:{second}#end")
    assert not cluster.state.nodes[node].cordon.active


def test_lead_time_grows_with_workload() -> None:
    """A window over nodes without work begins to empty them at its beginning; a task that comes meanwhile counts."""
    cluster = MiniCluster(1)
    cluster.add_host("n0")
    cluster.add_host("n1")
    window = cluster.maintain("n0", "n1", after_s=2 * _HOUR_S, for_s=600)
    (first,) = [length for name, length in cluster.standing().items() if "#near" in name]
    cluster.submit("big")
    cluster.run()
    (second,) = [(name, length) for name, length in cluster.standing().items() if "#near" in name]
    policy = cluster.policy
    assert first - second[1] >= (policy.worker_start_s + 10 * policy.regroup_s) * SECOND_US, "the last has to save"
    assert second[0].startswith(f"window:{window}#near.") and not second[0].endswith(".0")


def test_fold_refuses_impossible_windows() -> None:
    cluster = two_tasks(1)
    now_us = cluster.state.now_us
    for nodes, from_us, until_us, wrong in (
        ((), now_us + 1, now_us + 2, "nodes: "),
        (("n0",), now_us + 2, now_us + 2, "for: "),
        (("n0",), now_us - 2, now_us - 1, "from: "),
    ):
        asked = v.MaintenancePlanned(nodes=nodes, from_us=from_us, until_us=until_us, reason="test")
        assert request_problem(cluster.state, asked).startswith(wrong)
        seen = len(cluster.state.refusals)
        cluster.append(asked, "api", cluster.state.term)
        assert len(cluster.state.refusals) == seen + 1 and not cluster.state.windows


# --- foretold failures ---------------------------------------------------------------------------


def foretell(cluster: MiniCluster, node: str) -> None:
    said = v.AcceleratorReported(
        node=node, accelerator="GPU-1", worker="", kind=None, xid=92, message="XID 92: test", predicts_failure=True
    )
    cluster.say(cluster.hosts[node], said)


@pytest.mark.parametrize("seed", SEEDS)
def test_failure_forecast_drains_checks_and_readmits_node(seed: int) -> None:
    cluster = two_tasks(seed)
    cluster.limits_s = (60.0, 0.0)
    cluster.take_over()
    node = node_of(cluster, members(cluster, "big")[0])
    before = len(cluster.log)
    foretell(cluster, node)
    cluster.run_but_isolation()
    (isolated,) = of(cluster, v.NodeIsolated)
    assert isolated.reason == "its failure is expected: GPU-1: XID 92: test"
    assert on_node(cluster, node) == [] and not of(cluster, v.CheckNode)
    cluster.train("big")
    cluster.train("small")
    assert_nothing_was_lost(cluster, before)
    cluster.run()
    assert of(cluster, v.CheckNode) and of(cluster, v.NodeReadmitted)
    assert phase(cluster.state, cluster.state.nodes[node]) is IsolationPhase.IN_SERVICE
    assert not cluster.state.nodes[node].health.failure_forecast and len(on_node(cluster, node)) == 1


def test_node_check_waits_until_workers_leave() -> None:
    cluster = two_tasks(1)
    cluster.limits_s = (60.0, 0.0)
    cluster.take_over()
    node = node_of(cluster, members(cluster, "big")[0])
    cluster.group_up = lambda task: False  # type: ignore[method-assign]  # no group meets
    foretell(cluster, node)
    cluster.run()
    assert on_node(cluster, node) and cluster.state.nodes[node].isolation.over and not of(cluster, v.CheckNode)
    del cluster.group_up  # type: ignore[method-assign]
    cluster.run()
    assert of(cluster, v.CheckNode)


def test_failure_forecast_stops_no_task() -> None:
    cluster = MiniCluster(1)
    for number in range(2):
        cluster.add_host(f"n{number}")
    cluster.submit("big", min_workers=2, max_workers=2)
    cluster.run()
    foretell(cluster, "n0")
    cluster.run()
    assert not of(cluster, v.NodeIsolated) and len(members(cluster, "big")) == 2
    cluster.add_host("n2")
    cluster.run_but_isolation()
    assert [each.node for each in of(cluster, v.NodeIsolated)] == ["n0"]
    assert on_node(cluster, "n0") == [] and len(members(cluster, "big")) == 2 and not cluster.state.incidents_total


def test_uncordon_clears_failure_forecast() -> None:
    cluster = MiniCluster(1)
    cluster.add_host("n0")
    cluster.submit("big")
    cluster.run()
    foretell(cluster, "n0")
    assert cluster.state.nodes["n0"].health.failure_forecast
    cluster.uncordon("n0")
    assert not cluster.state.nodes["n0"].health.failure_forecast


def test_verify_repeats_every_departure_decision() -> None:
    cluster = two_tasks(3)
    cluster.limits_s = (60.0, 0.0)
    cluster.take_over()
    first, second, third = (node_of(cluster, name) for name in members(cluster, "big"))
    cluster.drain_by(first, _HOUR_S)
    window = cluster.maintain(second, after_s=2 * _HOUR_S, for_s=60)
    pass_time(cluster, f"drain:{first}")
    pass_time(cluster, f"window:{window}#near")
    cluster.uncordon(first)
    cluster.run()
    foretell(cluster, third)
    cluster.run()
    pass_time(cluster, f"window:{window}#end")
    cluster.drain_by(third, _HOUR_S)
    cluster.append(v.TaskCancelled(task="small", reason="test"), "api", cluster.state.term)
    cluster.run()
    assert of(cluster, v.DrainStarted) and of(cluster, v.NodeIsolated)
    findings = verify(cluster.log)
    assert findings.deadlines == len(of(cluster, v.DeadlineExpired)) and findings.decisions > 30


# --- preemption ----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_heavier_task_takes_workers_at_boundary(seed: int) -> None:
    cluster = MiniCluster(seed)
    for number in range(4):
        cluster.add_host(f"n{number}")
    cluster.submit("light", max_workers=4)
    cluster.run()
    cluster.train("light", 3)
    before = len(cluster.log)
    cluster.submit("heavy", weight=10.0, max_workers=3)
    cluster.run()
    cluster.assert_whole()
    assert (len(members(cluster, "light")), len(members(cluster, "heavy"))) == (1, 3)
    cluster.train("light")
    assert cluster.state.tasks["light"].progress.iteration == 4 and cluster.state.incidents_total == 0
    decided = [each for each in of(cluster, v.MembershipDecided, before) if each.task == "light"]
    assert decided and not any(each.urgent for each in decided)
    regrouped = [each for each in of(cluster, v.WorkerJoinedGroup, before) if each.task == "light"]
    assert {each.source for each in regrouped} == {"own"} and not any(stop.kill for stop in of(cluster, v.StopWorker))
