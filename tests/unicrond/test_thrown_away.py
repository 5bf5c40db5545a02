"""What a fault has thrown away is said where no survivor could keep it, and nowhere else."""

from __future__ import annotations

import pytest

from tests.unicrond.cluster import MiniCluster, members
from tests.unicrond.test_departures import of
from tests.unicrond.test_goodput import told
from unicrond.agents.core.exits import computed
from unicrond.agents.protocol.marks import Mark
from unicrond.events import vocabulary as v


def two_stages(replicas: int) -> MiniCluster:
    cluster = MiniCluster(1)
    for number in range(2 * replicas):
        cluster.add_host(f"n{number}")
    cluster.submit("big", pp=2, min_workers=2, max_workers=2 * replicas, global_batch=12)
    cluster.run()
    cluster.train("big", 3)
    cluster.run()
    assert len(members(cluster)) == 2 * replicas
    return cluster


def kill_first(cluster: MiniCluster) -> None:
    worker = members(cluster)[0]
    (host,) = [host for host in cluster.hosts.values() if worker in host.processes]
    cluster.kill_worker(host, worker)
    cluster.run()


def test_loss_of_last_replica_logs_lost_micro_batches() -> None:
    cluster = two_stages(1)
    cluster.computed = {worker: (4, 5 - place) for place, worker in enumerate(members(cluster))}
    cluster.source = "memory"
    kill_first(cluster)
    (closed,) = of(cluster, v.TransitionCompleted)
    assert closed.micro_batches_lost == 5, "both stages compute the same ones"
    assert "0 iterations, 5 finished micro-batches lost, state from memory of a member's node" in closed.reason
    assert "5 finished ones thrown away" in closed.sentence()
    (big,) = told(cluster)["tasks"]
    assert big["micro_batches_lost"] == 5
    pace_us = cluster.state.tasks["big"].pace.iteration_us
    assert big["lost_work_us"] == 5 * pace_us // cluster.state.tasks["big"].spec.micro_batches


def test_committed_work_counts_as_kept() -> None:
    cluster = two_stages(1)
    cluster.computed = dict.fromkeys(members(cluster), (3, 12))
    cluster.source = "memory"
    kill_first(cluster)
    assert of(cluster, v.TransitionCompleted)[0].micro_batches_lost == 0


def test_survivors_keep_work_and_redone_work_is_logged() -> None:
    cluster = two_stages(2)
    cluster.computed = dict.fromkeys(members(cluster), (4, 3))
    kill_first(cluster)
    (closed,) = of(cluster, v.TransitionCompleted)
    assert closed.micro_batches_lost == 0 and closed.micro_batches_repeated > 0
    assert "thrown away" not in closed.sentence()


@pytest.mark.parametrize(("phase", "count"), [("forward", 3), ("backward", 3), ("reduce", 4), ("regroup", 3)])
def test_mark_gives_finished_micro_batches(phase: v.Phase, count: int) -> None:
    mark = Mark(phase, 1, 7, 3, 0, 0, 0, 0, 0)
    assert computed(mark) == count
