"""What was measured stands with its circumstances: a slow node costs a task no worker once it is gone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from tests.unicrond.cluster import SECOND_US, MiniCluster
from tests.unicrond.test_plan_problems import told
from unicrond.core.rules.estimates import CALM_US
from unicrond.core.state.work import iteration_flop
from unicrond.core.worth.evidence import HALF_LIFE_US
from unicrond.events import vocabulary as v

#: Of one worker of healthy nodes; an iteration of three takes a second.
STEP_US = 3 * SECOND_US


def nodes_of(cluster: MiniCluster, task: str = "t") -> list[str]:
    """The nodes that train the task."""
    membership = cluster.state.tasks[task].membership
    return sorted({member.node for member in membership.members}) if membership else []


def healthy_us(nodes: Sequence[str]) -> int:
    """An iteration's time where each node counts alike."""
    return STEP_US // len(nodes)


def train_for(cluster: MiniCluster, seconds: float, step_us: Callable[[Sequence[str]], int], task: str = "t") -> None:
    """Train in log time, an iteration in as much time as the group's nodes need."""
    until_us = cluster.now_us + int(seconds * SECOND_US)
    while cluster.now_us < until_us:
        cluster.run()
        membership, nodes = cluster.state.tasks[task].membership, nodes_of(cluster, task)
        assert membership is not None and nodes, "nobody trains"
        took_us = step_us(nodes)
        cluster.now_us += took_us
        lead = membership.members[0]
        at = cluster.iterations[task] = cluster.iterations.get(task, 0) + 1
        step = v.StepCommitted(
            node=lead.node, task=task, worker=lead.worker, generation=membership.generation, first=at, last=at,
            samples=8, samples_digest=0, loss=1.0, duration_us=took_us, micro_batches_by_rank=(1,),
        )  # fmt: skip
        cluster.say(cluster.hosts[lead.node], step)
    cluster.run()


def small_cluster(*names: str, max_workers: int = 4) -> MiniCluster:
    """One task on a few nodes of one slot."""
    cluster = MiniCluster(1)
    for name in names:
        cluster.add_host(name)
    cluster.submit("t", max_workers=max_workers)
    cluster.run()
    return cluster


def slow_n2(nodes: Sequence[str]) -> int:
    """An iteration's time where n2 is four times slower, and all wait for it."""
    return healthy_us(nodes) * (4 if "n2" in nodes else 1)


@pytest.mark.parametrize("from_birth", [False, True])
@pytest.mark.parametrize("joins", [1, 2])
@pytest.mark.parametrize("apart_s", [0, 5, 120])
def test_drained_slow_node_costs_no_worker(from_birth: bool, joins: int, apart_s: float) -> None:
    """A node four times slower, then drained, and healthy ones join: all workers are back within one minute."""
    cluster = small_cluster("n1", "n2", "n3")
    train_for(cluster, 60, slow_n2 if from_birth else healthy_us)
    train_for(cluster, CALM_US / SECOND_US + 60, slow_n2)
    flops = iteration_flop(cluster.state.tasks["t"].spec) * SECOND_US // slow_n2(["n1", "n2", "n3"])
    assert cluster.state.tasks["t"].pace.measurements["3"] == flops, "the slow node was measured"
    cluster.cordon("n2", drain=True)
    cluster.run()
    train_for(cluster, apart_s, slow_n2)
    assert nodes_of(cluster) == ["n1", "n3"]
    for number in range(joins):
        cluster.add_host(f"n{4 + number}")
    began_us = cluster.now_us
    wanted = sorted(["n1", "n3", *(f"n{4 + number}" for number in range(joins))])
    while nodes_of(cluster) != wanted:
        assert cluster.now_us - began_us < 60 * SECOND_US, f"on {nodes_of(cluster)} after a minute"
        train_for(cluster, 1, slow_n2)
    train_for(cluster, 1800, slow_n2)
    assert nodes_of(cluster) == wanted, "and stay"
