"""Cordon, drain and uncordon, and nodes that come and go: the plan follows, and nobody loses work by it."""

from __future__ import annotations

import pytest

from tests.unicrond.cluster import SECOND_US, MiniCluster, membership_of
from tests.unicrond.test_decide import members, two_tasks
from unicrond.core.rules.survey import Survey
from unicrond.core.state.policy import Policy
from unicrond.events import vocabulary as v
from unicrond.events.vocabulary.placements import joiners_of

SEEDS = range(20)


def on_node(cluster: MiniCluster, node: str) -> list[str]:
    return [w.worker for task in cluster.state.tasks.values() for w in task.workers.values() if w.node == node]


def node_of(cluster: MiniCluster, worker: str) -> str:
    return cluster.state.tasks[worker.rpartition(".")[0]].workers[worker].node


@pytest.mark.parametrize("seed", SEEDS)
def test_drain_moves_workers_at_boundary_and_uncordon_restores(seed: int) -> None:
    cluster = two_tasks(seed)
    lead = members(cluster, "big")[0]
    node = node_of(cluster, lead)
    before = len(cluster.log)
    cluster.cordon(node, drain=True)
    cluster.run()
    cluster.assert_whole()
    assert on_node(cluster, node) == []
    decided = [e.envelope.event for e in cluster.log[before:] if isinstance(e.envelope.event, v.MembershipDecided)]
    assert decided and not any(membership.urgent for membership in decided), "a drain breaks no group"
    assert cluster.state.incidents_total == 0
    assert "drained" in cluster.state.plan.trigger
    cluster.uncordon(node)
    cluster.run()
    cluster.assert_whole()
    assert len(on_node(cluster, node)) == 1


@pytest.mark.parametrize("seed", SEEDS)
def test_drained_node_hands_state_to_spare(seed: int) -> None:
    """The only replica moves: its successor takes the state from it before it leaves."""
    cluster = MiniCluster(seed)
    for name in ("n0", "n1"):
        cluster.add_host(name)
    cluster.submit("solo")
    cluster.run()
    node = node_of(cluster, *members(cluster, "solo"))
    cluster.cordon(node, drain=True)
    cluster.run()
    cluster.assert_whole()
    (successor,) = members(cluster, "solo")
    assert node_of(cluster, successor) != node
    memberships = [e.envelope.event for e in cluster.log if isinstance(e.envelope.event, v.MembershipDecided)]
    assert [len(membership_of(m).members) for m in memberships] == [1, 2, 1]
    assert joiners_of("solo", memberships[1].seats) == (successor,)


@pytest.mark.parametrize("seed", SEEDS)
def test_cordoned_node_keeps_workers_and_gets_none(seed: int) -> None:
    cluster = two_tasks(seed)
    worker = members(cluster, "big")[0]
    node = node_of(cluster, worker)
    before = Survey(cluster.state, cluster.policy).basis
    cluster.cordon(node)
    cluster.run()
    cluster.assert_whole()
    assert Survey(cluster.state, cluster.policy).basis == before, "it is full: nothing has changed for the plan"
    assert on_node(cluster, node) == [worker]
    cluster.kill_worker(cluster.hosts[node], worker)
    cluster.run()
    cluster.assert_whole()
    assert on_node(cluster, node) == [], "no new worker takes the dead one's place"
    assert cluster.state.plan.basis != before
    assert sum(a.workers for a in cluster.state.plan.assignments.values()) == 3
    cluster.uncordon(node)
    cluster.run()
    cluster.assert_whole()
    assert len(on_node(cluster, node)) == 1


@pytest.mark.parametrize("seed", SEEDS)
def test_other_task_never_inherits_seat_on_cordoned_node(seed: int) -> None:
    cluster = two_tasks(seed)
    (small,) = members(cluster, "small")
    node = node_of(cluster, small)
    cluster.cordon(node)
    cluster.append(v.TaskCancelled(task="small", reason="test"), "api", cluster.state.term)
    cluster.submit("next", max_workers=3)
    cluster.run()
    cluster.assert_whole()
    assert on_node(cluster, node) == []
    assert Survey(cluster.state, cluster.policy).capacity[node] == 0


@pytest.mark.parametrize("seed", SEEDS)
def test_vacated_seat_on_cordoned_node_stays_empty(seed: int) -> None:
    cluster = MiniCluster(seed)
    for number in range(4):
        cluster.add_host(f"n{number}")
    cluster.submit("wide", max_workers=4)
    cluster.run()
    node = node_of(cluster, members(cluster, "wide")[-1])  # the first that it gives up
    cluster.cordon(node)
    before = len(cluster.log)
    cluster.submit("heavy", weight=10.0, max_workers=2)
    cluster.run()
    cluster.assert_whole()
    started = [e.envelope.event for e in cluster.log[before:] if isinstance(e.envelope.event, v.StartWorker)]
    assert started and node not in {start.node for start in started}


@pytest.mark.parametrize("seed", SEEDS)
def test_plan_skips_free_slots_of_cordoned_node(seed: int) -> None:
    cluster = MiniCluster(seed)
    cluster.add_host("n0", slots=2)
    cluster.add_host("n1", slots=2)
    cluster.submit("a", max_workers=2)
    cluster.run()
    node = node_of(cluster, members(cluster, "a")[0])
    other = "n1" if node == "n0" else "n0"
    cluster.cordon(other)
    cluster.submit("b", max_workers=2)
    cluster.run()
    cluster.assert_whole()
    had = [w for w in on_node(cluster, other) if w.startswith("b")]
    assert had == []


@pytest.mark.parametrize("seed", SEEDS)
def test_death_on_cordoned_node_spares_other_tasks(seed: int) -> None:
    cluster = MiniCluster(seed)
    cluster.add_host("n0", slots=2)
    cluster.submit("a")
    cluster.submit("b")
    cluster.run()
    (dead,), (other,) = members(cluster, "a"), members(cluster, "b")
    cluster.cordon("n0")
    cluster.kill_worker(cluster.hosts["n0"], dead)
    before = len(cluster.log)
    cluster.run()
    assert on_node(cluster, "n0") == [other]
    said = [type(entry.envelope.event) for entry in cluster.log[before:]]
    assert v.StartWorker not in said and v.MembershipDecided not in said


def test_cordon_outlives_node_loss_and_ignores_unknown_node() -> None:
    cluster = two_tasks(3)
    cluster.cordon("n1", drain=True)
    cluster.cordon("stranger")
    cluster.run()
    cluster.kill_host(cluster.hosts["n1"])
    cluster.lose(cluster.hosts["n1"])
    cluster.add_host("n1")
    cluster.run()
    cluster.assert_whole()
    assert cluster.state.nodes["n1"].cordon.draining and not on_node(cluster, "n1")
    assert "stranger" not in cluster.state.nodes


def flap(cluster: MiniCluster, node: str, away_s: float = 1.0) -> None:
    host = cluster.hosts[node]
    cluster.kill_host(host)
    cluster.lose(host)
    cluster.now_us += int(away_s * SECOND_US)
    cluster.add_host(node)
    cluster.run_but_isolation()


@pytest.mark.parametrize("seed", SEEDS)
def test_flapping_node_is_isolated_with_growing_back_off(seed: int) -> None:
    cluster = two_tasks(seed)
    for flaps in range(1, 4):
        assert not cluster.state.nodes["n1"].isolation.active, f"after {flaps - 1} returns"
        flap(cluster, "n1")
    node = cluster.state.nodes["n1"]
    assert node.isolation.active and "flapping" in node.reason and "3 times" in node.reason
    first_us = cluster.standing()["isolation:n1#1"]
    assert cluster.pass_deadlines("isolation")
    cluster.run_but_isolation()
    assert not cluster.state.nodes["n1"].isolation.active, "what it did before is forgiven"
    for _ in range(3):
        flap(cluster, "n1")
    assert cluster.state.nodes["n1"].isolation.active
    assert cluster.standing()["isolation:n1#2"] == 2 * first_us
    cluster.run()
    cluster.assert_whole()


def test_rare_returns_are_no_flapping() -> None:
    cluster = two_tasks(5)
    for _ in range(6):
        flap(cluster, "n1", away_s=400)
    assert not cluster.state.nodes["n1"].isolation.active
    cluster.run()
    cluster.assert_whole()


def test_quick_restarts_count_as_flapping() -> None:
    cluster = MiniCluster(1, Policy(flaps_max=2))
    cluster.add_host("n0")
    cluster.add_host("n1")
    cluster.submit("a", max_workers=2)
    cluster.run()
    for _ in range(2):
        cluster.kill_host(cluster.hosts["n1"])
        cluster.add_host("n1")
        cluster.run_but_isolation()
        cluster.train("a")
    assert cluster.state.nodes["n1"].isolation.active and "flapping" in cluster.state.nodes["n1"].reason
