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


def test_of_the_last_replica_the_log_says_how_many_micro_batches_went_with_it() -> None:
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


def test_what_was_committed_since_is_not_lost() -> None:
    cluster = two_stages(1)
    cluster.computed = dict.fromkeys(members(cluster), (3, 12))
    cluster.source = "memory"
    kill_first(cluster)
    assert of(cluster, v.TransitionCompleted)[0].micro_batches_lost == 0


def test_survivors_keep_theirs_and_what_is_done_again_is_told_as_that() -> None:
    cluster = two_stages(2)
    cluster.computed = dict.fromkeys(members(cluster), (4, 3))
    kill_first(cluster)
    (closed,) = of(cluster, v.TransitionCompleted)
    assert closed.micro_batches_lost == 0 and closed.micro_batches_repeated > 0
    assert "thrown away" not in closed.sentence()


@pytest.mark.parametrize(("phase", "count"), [("forward", 3), ("backward", 3), ("reduce", 4), ("regroup", 3)])
def test_a_mark_says_how_many_were_finished(phase: v.Phase, count: int) -> None:
    mark = Mark(phase, 1, 7, 3, 0, 0, 0, 0, 0)
    assert computed(mark) == count
