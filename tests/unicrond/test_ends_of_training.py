"""What the log makes of a program that ends early, and of one that says stop."""

from __future__ import annotations

import pytest

from tests.unicrond.cluster import MiniCluster, members, membership_of, trained
from unicrond.core.state.state import TaskStatus
from unicrond.events import vocabulary as v


@pytest.fixture
def cluster() -> MiniCluster:
    """One task of two workers, of 100 iterations, that has trained three."""
    return trained(2, iterations=100)


def leave_early(cluster: MiniCluster) -> None:
    """All members' programs end, each with its report."""
    task = cluster.state.tasks["big"]
    for name in members(cluster):
        node = task.workers[name].node
        told = v.ErrorReported(
            node=node, task="big", worker=name, kind="left_early", generation=task.generation, iteration=4,
            phase="step", message="LeftEarly: the program left the loop over hook.steps() in iteration 4",
        )  # fmt: skip
        cluster.say(cluster.hosts[node], told)
        cluster.kill_worker(cluster.hosts[node], name)
    cluster.run()


def test_repeated_early_exit_fails_task_and_blames_no_node(cluster: MiniCluster) -> None:
    for _ in range(2):
        leave_early(cluster)
        assert cluster.state.tasks["big"].status is TaskStatus.ACTIVE
        cluster.train("big", 2)  # a step is no proof that it stays
        cluster.run()
    leave_early(cluster)
    task = cluster.state.tasks["big"]
    assert task.status is TaskStatus.FAILED
    assert task.ending.reason.startswith("its program ended 3 times in mid-training without hook.stop(reason)")
    assert not [e for e in cluster.log if isinstance(e.envelope.event, v.NodeIsolated)]


def test_early_exit_strikes_no_node(cluster: MiniCluster) -> None:
    """Nothing that ends with it is held against the nodes, and the next blow is: it is of another time."""
    first = cluster.state.tasks["big"]
    node = first.workers[members(cluster)[0]].node
    for _ in range(2):
        leave_early(cluster)
        task = cluster.state.tasks["big"]
        assert not task.troubles.strikes and not task.troubles.breaks and not task.troubles.unclear_breaks
    assert task.troubles.crashes is not None and task.troubles.crashes.early == 2
    worker = next(name for name in members(cluster) if task.workers[name].node == node)
    cluster.kill_worker(cluster.hosts[node], worker)
    cluster.run()
    assert cluster.state.tasks["big"].troubles.strikes == {node: 1}


def test_ten_iterations_clear_early_exits(cluster: MiniCluster) -> None:
    for _ in range(5):
        leave_early(cluster)
        cluster.train("big", 12)
        cluster.run()
    assert (
        cluster.state.tasks["big"].status is TaskStatus.ACTIVE and cluster.state.tasks["big"].troubles.crashes is None
    )


def stop(cluster: MiniCluster, worker: str, *, left: bool) -> None:
    node = cluster.state.tasks["big"].workers[worker].node
    asked = v.StopRequested(node=node, task="big", worker=worker, iteration=3, reason="enough", has_left_loop=left)
    cluster.say(cluster.hosts[node], asked)


def test_nobody_is_started_for_a_member_that_ends_before_its_lead_says_so(cluster: MiniCluster) -> None:
    lead, other = members(cluster)
    stop(cluster, other, left=False)
    cluster.run()
    before = len(cluster.log)

    def starts() -> list[object]:
        return [
            entry.envelope.event for entry in cluster.log[before:] if isinstance(entry.envelope.event, v.StartWorker)
        ]

    task = cluster.state.tasks["big"]
    cluster.kill_worker(cluster.hosts[task.workers[other].node], other)
    cluster.run()
    assert not starts()
    cluster.kill_worker(cluster.hosts[task.workers[lead].node], lead)
    cluster.run()
    assert starts(), "nobody is left to end it"


def test_task_completes_when_all_workers_leave(cluster: MiniCluster) -> None:
    one, other = members(cluster)
    stop(cluster, one, left=True)
    assert cluster.state.tasks["big"].status is TaskStatus.ACTIVE
    stop(cluster, other, left=True)
    task = cluster.state.tasks["big"]
    assert task.status is TaskStatus.COMPLETED
    assert task.ending.reason == "stopped by its program after iteration 3 of 100: enough"


def test_next_membership_carries_stop(cluster: MiniCluster) -> None:
    one, other = members(cluster)
    stop(cluster, one, left=True)
    cluster.kill_worker(cluster.hosts[cluster.state.tasks["big"].workers[one].node], one)
    cluster.run()
    told = [e.envelope.event for e in cluster.log if isinstance(e.envelope.event, v.MembershipDecided)]
    assert membership_of(told[-1]).stop == "enough" and other in members(cluster)


@pytest.mark.parametrize("asked_first", [True, False])
def test_stop_reason_comes_from_program_in_either_order(cluster: MiniCluster, asked_first: bool) -> None:
    one, other = members(cluster)
    node = cluster.state.tasks["big"].workers[one].node
    if asked_first:
        stop(cluster, other, left=False)
    done = v.TaskCompleted(node=node, task="big", worker=one, iteration=4, loss=1.0, params_digest="d")
    cluster.say(cluster.hosts[node], done)
    if not asked_first:
        stop(cluster, other, left=False)
    assert cluster.state.tasks["big"].ending.reason == "stopped by its program after iteration 4 of 100: enough"
