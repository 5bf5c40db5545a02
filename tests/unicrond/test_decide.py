"""The core under every order of events that a seed draws: it converges, closes its incidents, and rests."""

from __future__ import annotations

from functools import reduce

import pytest

from tests.seeds import at_most
from tests.unicrond.cluster import MiniCluster, members
from tests.unicrond.stories import random_life
from unicrond.core.fold import fold
from unicrond.core.state.state import ClusterState, Severity, TaskStatus
from unicrond.core.state.state_bytes import digest
from unicrond.events import vocabulary as v


def two_tasks(seed: int, nodes: int = 4) -> MiniCluster:
    cluster = MiniCluster(seed)
    for number in range(nodes):
        cluster.add_host(f"n{number}")
    cluster.submit("big", weight=2.0, max_workers=3)
    cluster.submit("small", max_workers=3)
    cluster.run()
    cluster.assert_whole()
    cluster.train("big")
    cluster.train("small")
    return cluster


def test_tasks_match_plan() -> None:
    cluster = two_tasks(1)
    assert len(members(cluster, "big")) == 3
    assert len(members(cluster, "small")) == 1


@pytest.mark.parametrize("seed", range(20))
def test_killed_worker_opens_one_incident_and_restarts_on_node(seed: int) -> None:
    cluster = two_tasks(seed)
    victim = members(cluster, "big")[1]
    node = cluster.state.tasks["big"].workers[victim].node
    epoch = cluster.state.plan.epoch
    cluster.kill_worker(cluster.hosts[node], victim)
    cluster.run()
    cluster.assert_whole()
    assert cluster.state.incidents_total == 1
    assert cluster.state.closed_incidents[0].severity is Severity.SEV2
    assert cluster.state.plan.epoch == epoch, "a restart in place needs no new plan"
    assert victim not in members(cluster, "big")
    assert node in {w.node for w in cluster.state.tasks["big"].workers.values()}


@pytest.mark.parametrize("seed", range(20))
def test_lost_node_changes_plan_and_its_return_restores_it(seed: int) -> None:
    cluster = two_tasks(seed)
    host = cluster.hosts["n1"]
    cluster.kill_host(host)
    cluster.lose(host)
    cluster.run()
    cluster.assert_whole()
    assert cluster.state.incidents_total == 1
    assert cluster.state.closed_incidents[0].severity is Severity.SEV1
    assert sum(a.workers for a in cluster.state.plan.assignments.values()) == 3
    cluster.add_host("n1")
    cluster.run()
    cluster.assert_whole()
    assert sum(a.workers for a in cluster.state.plan.assignments.values()) == 4


@pytest.mark.parametrize("seed", range(5))
def test_newcomers_never_wait_for_lost_replica_with_state(seed: int) -> None:
    """It falls between the plan that they join and the boundary; the next plan wants just them."""
    cluster = MiniCluster(seed)
    cluster.add_host("n0")
    cluster.add_host("n1")
    cluster.submit("t", pp=2, min_workers=2, max_workers=4)
    cluster.run()
    cluster.train("t")
    cluster.add_host("n2")
    cluster.add_host("n3")
    while cluster.decide():
        cluster.obey_all()
    assert len(members(cluster, "t")) == 4 and not cluster.state.tasks["t"].confirmed
    cluster.kill_host(cluster.hosts["n1"])
    cluster.lose(cluster.hosts["n1"])
    cluster.run(passing=())
    cluster.assert_whole()
    assert {member.node for member in cluster.state.tasks["t"].membership.members} == {"n2", "n3"}  # type: ignore[union-attr]


def test_last_replica_resumes_from_checkpoint() -> None:
    cluster = two_tasks(3)
    (victim,) = members(cluster, "small")
    cluster.kill_worker(cluster.hosts[cluster.state.tasks["small"].workers[victim].node], victim)
    cluster.run()
    cluster.assert_whole()
    membership = cluster.state.tasks["small"].membership
    assert membership is not None
    assert membership.joiners == tuple(members(cluster, "small"))


def test_task_that_fails_everywhere_ends_and_frees_nodes() -> None:
    cluster = two_tasks(4)
    for _ in range(30):
        task = cluster.state.tasks["small"]
        if task.status is TaskStatus.FAILED:
            break
        for worker in list(task.workers.values()):
            if worker.worker in cluster.hosts[worker.node].processes:
                cluster.kill_worker(cluster.hosts[worker.node], worker.worker)
        cluster.run()
    assert cluster.state.tasks["small"].status is TaskStatus.FAILED
    assert (
        "ended" in cluster.state.tasks["small"].ending.reason or "failed" in cluster.state.tasks["small"].ending.reason
    )
    cluster.run()
    assert not any(node.isolation.active for node in cluster.state.nodes.values())
    assert cluster.state.plan.assignments["big"].workers == 3


@pytest.mark.parametrize("seed", range(at_most(200)))
def test_decisions_converge_under_random_faults(seed: int) -> None:
    cluster = two_tasks(seed)
    for _ in random_life(cluster, seed):
        pass
    for node in cluster.state.nodes.values():
        if node.cordon.active:
            cluster.uncordon(node.name)
    for host in cluster.hosts.values():
        if not host.up:
            cluster.add_host(host.name)
    cluster.run()
    cluster.train("big")
    cluster.train("small")
    cluster.run()
    cluster.assert_whole()
    replayed = reduce(fold, cluster.log, ClusterState())
    assert digest(replayed) == digest(cluster.state)


def test_stop_of_unstarted_worker_ends_with_answer() -> None:
    cluster = two_tasks(5)
    host = cluster.hosts["n0"]
    victim = next(w for task in cluster.state.tasks.values() for w in task.workers.values() if w.node == "n0")
    del host.processes[victim.worker]  # the agent has forgotten it: no exit will ever be told
    cluster.append(v.TaskCancelled(task=victim.worker.rpartition(".")[0], reason="test"), "api", 1)
    cluster.decide()
    (stop,) = [e.envelope.event for e in host.commands if isinstance(e.envelope.event, v.StopWorker)]
    cluster.say(host, v.CommandApplied(node="n0", command_id=stop.command_id))
    assert victim.worker not in cluster.state.tasks[stop.task].workers


def test_second_break_after_reattempt_costs_one_worker() -> None:
    cluster = two_tasks(6)
    first, second, _ = members(cluster, "big")

    def broken(worker: str) -> None:
        task = cluster.state.tasks["big"]
        host = cluster.hosts[task.workers[worker].node]
        cluster.say(
            host,
            v.ErrorReported(
                node=host.name,
                task="big",
                worker=worker,
                kind="connection_broken",
                generation=task.generation,
                iteration=2,
                phase="reduce",
                message="reset",
            ),
        )

    broken(first)
    cluster.pass_deadlines("symptom")
    cluster.decide()
    broken(second)
    broken(first)  # who was the first before is a symptom now, of the newer break
    assert [i.generations for i in cluster.state.incidents.values()] == [{"big": 1}, {"big": 2}]
    cluster.pass_deadlines("symptom")
    cluster.decide()
    assert [i.severity for i in cluster.state.incidents.values()] == [Severity.SEV3, Severity.SEV2]
    assert [w.worker for w in cluster.state.tasks["big"].workers.values() if not w.alive] == [first], "the older end"
    cluster.run()
    cluster.assert_whole()


def squeezed_out(seed: int) -> MiniCluster:
    """A successor is to join the survivor of two; then "last", which needs both nodes, is worth more."""
    cluster = MiniCluster(seed)
    for number in range(2):
        cluster.add_host(f"n{number}")
    cluster.submit("big", max_workers=2)
    cluster.run()
    cluster.train("big", 3)
    _, second = members(cluster)
    cluster.kill_worker(cluster.hosts[cluster.state.tasks["big"].workers[second].node], second)
    cluster.decide()
    while second in members(cluster) or len(members(cluster)) < 2:
        cluster.obey_all()
        cluster.group_up("big")
        cluster.decide()
    cluster.obey_all()
    cluster.submit("last", weight=9.0, min_workers=2, max_workers=2)
    cluster.decide()
    task = cluster.state.tasks["big"]
    assert not task.confirmed and not cluster.state.plan.assignments["big"].workers
    return cluster


@pytest.mark.parametrize("seed", range(5))
def test_surplus_newcomer_never_waits_for_lost_state(seed: int) -> None:
    """The survivor's node is gone and back before the newcomer has met it: the newcomer holds a slot of another."""
    cluster = squeezed_out(seed)
    survivor, _ = members(cluster)
    host = cluster.hosts[cluster.state.tasks["big"].workers[survivor].node]
    cluster.kill_host(host)
    cluster.add_host(host.name)
    cluster.run()
    last = cluster.state.tasks["last"]
    assert last.confirmed and len(last.workers) == 2, cluster.story()
    assert not cluster.state.tasks["big"].workers and not cluster.state.incidents


def test_broken_surplus_group_regroups_before_leaving() -> None:
    """Nothing else would bring its members together: they wait for another membership."""
    cluster = squeezed_out(0)
    survivor, _ = before = members(cluster)
    generation = cluster.state.tasks["big"].generation
    cluster.report(survivor, "connection_broken", generation=generation)
    while cluster.decide():
        pass
    assert cluster.pass_deadlines("symptom")
    cluster.decide()
    task = cluster.state.tasks["big"]
    assert task.membership is not None and task.membership.urgent
    assert (task.generation, members(cluster)) == (generation + 1, before)
    cluster.run()
    cluster.assert_whole()
    assert len(members(cluster, "last")) == 2 and not cluster.state.tasks["big"].workers
