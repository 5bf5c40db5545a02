"""Programs that diverge: what the cluster makes of it, and who may say so."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unicrond.cluster import MiniCluster, members, trained
from tests.unicrond.test_escalation import said
from tests.unicrond.test_program_faults import steps_of
from unicrond.core.faults.program_faults import trouble_text
from unicrond.core.state.state import TaskStatus
from unicrond.display.cluster_tables import tasks_table
from unicrond.events import vocabulary as v
from unicrond.views.notifications import step_notices

TEXT = v.divergence_text(4, "newcomer")


def report(cluster: MiniCluster, reporter: int, iteration: int = 4, sign: v.DivergenceSign = "newcomer") -> None:
    task = cluster.state.tasks["big"]
    worker = members(cluster)[reporter]
    node = task.workers[worker].node
    cluster.say(
        cluster.hosts[node],
        v.DivergenceObserved(
            node=node, task="big", worker=worker, generation=task.generation, iteration=iteration, sign=sign
        ),
    )


def diverging(on_divergence: str = "stop", replicas: int = 3) -> MiniCluster:
    cluster = MiniCluster(1)
    for number in range(replicas):
        cluster.add_host(f"n{number}")
    cluster.submit("big", min_workers=1, max_workers=replicas, on_divergence=on_divergence)
    cluster.run()
    cluster.train("big", 3)
    cluster.run()
    return cluster


def blameless(cluster: MiniCluster) -> bool:
    """Whether nothing is held against a node or a worker."""
    state = cluster.state
    troubles = state.tasks["big"].troubles
    return (
        not (troubles.strikes or troubles.breaks or troubles.deaths or troubles.evictions_us or troubles.crashes)
        and not state.incidents_total
        and not any(node.isolation.active or node.health.suspicion for node in state.nodes.values())
    )


def test_task_whose_program_diverges_stops_by_that_sentence() -> None:
    cluster = diverging()
    for reporter in range(3):
        report(cluster, reporter)
    cluster.run()
    task = cluster.state.tasks["big"]
    assert task.status is TaskStatus.FAILED
    assert task.ending.reason == f"{TEXT} (on_divergence: stop)"
    assert blameless(cluster)
    assert [event.reason for event in said(cluster, v.TaskFailed)] == [task.ending.reason]


def test_task_that_is_to_go_on_says_so_everywhere() -> None:
    cluster = diverging("report")
    for reporter in range(3):
        report(cluster, reporter)
    before = members(cluster)
    cluster.run()
    task = cluster.state.tasks["big"]
    assert (task.status, members(cluster)) == (TaskStatus.ACTIVE, before) and blameless(cluster)
    assert trouble_text(task) == TEXT
    (row,) = tasks_table(cluster.state).rows
    assert row[-1] == TEXT
    notices = [notice for step in steps_of(cluster) for notice in step_notices(step) if notice.rule == "diverged"]
    assert [notice.text for notice in notices] == [TEXT]
    lead = task.workers[before[0]]
    end = v.TaskCompleted(node=lead.node, task="big", worker=lead.worker, iteration=100, loss=1.0, params_digest="")
    cluster.say(cluster.hosts[lead.node], end)
    assert cluster.state.tasks["big"].status is TaskStatus.COMPLETED
    task = cluster.state.tasks["big"]
    assert task.ending.reason.count(TEXT) == 1 and not trouble_text(task), "its end says so, once"


def test_no_replica_is_convicted_once_the_program_diverges() -> None:
    cluster = diverging("report")
    for reporter in range(3):
        report(cluster, reporter)
    task, workers = cluster.state.tasks["big"], members(cluster)
    for worker in workers[1:]:
        node = task.workers[worker].node
        event = v.CorruptionSuspected(
            node=node, task="big", worker=worker, generation=task.generation, iteration=5, sign="checksum",
            suspect=workers[0], value=0.0, usual=0.0,
        )  # fmt: skip
        cluster.say(cluster.hosts[node], event)
    assert blameless(cluster) and not cluster.state.tasks["big"].group.accusations


@pytest.mark.parametrize("replicas", [2, 3])
def test_one_member_diverges_nobodys_task(replicas: int) -> None:
    cluster = diverging(replicas=replicas)
    for iteration in (4, 4, 3):
        report(cluster, 0, iteration)
    report(cluster, 1, 2)
    cluster.run()
    task = cluster.state.tasks["big"]
    assert task.status is TaskStatus.ACTIVE and task.troubles.divergence is None


def test_replicas_that_compute_on_different_things_are_told_and_go_on() -> None:
    """What the program does later is another thing; one member's word for that does not count beside the others' for
    this."""
    cluster = diverging()
    for reporter in range(3):
        report(cluster, reporter, 1, "environment")
    report(cluster, 0, 1, "parameters")
    cluster.run()
    task = cluster.state.tasks["big"]
    assert task.status is TaskStatus.ACTIVE and blameless(cluster)
    assert trouble_text(task) == v.divergence_text(1, "environment")
    for reporter in range(3):
        report(cluster, reporter, 9, "unsteady")
    report(cluster, 0, 9, "environment")
    cluster.run()
    assert cluster.state.tasks["big"].status is TaskStatus.FAILED
    notices = [notice for step in steps_of(cluster) for notice in step_notices(step) if notice.rule == "diverged"]
    assert [notice.urgency for notice in notices] == ["warning", "critical"]


@settings(max_examples=10, deadline=None)
@given(st.permutations(range(6)))
def test_replica_of_two_workers_has_one_vote(order: list[int]) -> None:
    cluster = MiniCluster(1)
    for number in range(3):
        cluster.add_host(f"n{number}", 2)
    cluster.submit("big", min_workers=2, max_workers=6, tp=2)
    cluster.run()
    membership = cluster.state.tasks["big"].membership
    assert membership is not None and membership.replica_count == 3
    replicas: set[int] = set()
    for reporter in order:
        report(cluster, reporter)
        replicas.add(membership.members[reporter].replica)
        assert (cluster.state.tasks["big"].troubles.divergence is not None) is (len(replicas) >= 2)


def test_single_replica_says_it_of_itself() -> None:
    cluster = diverging(replicas=1)
    report(cluster, 0, 1, "unsteady")
    cluster.run()
    assert cluster.state.tasks["big"].status is TaskStatus.FAILED


@settings(max_examples=20, deadline=None)
@given(st.integers(2, 9), st.data())
def test_no_task_is_stopped_by_fewer_than_most_replicas(replicas: int, data: st.DataObject) -> None:
    cluster = diverging(replicas=replicas)
    liars = data.draw(st.lists(st.integers(0, replicas - 1), unique=True, max_size=replicas // 2))
    words = st.tuples(st.sampled_from(liars or [0]), st.integers(1, 4))
    for liar, iteration in data.draw(st.lists(words, max_size=20 if liars else 0)):
        report(cluster, liar, iteration)
    cluster.run()
    assert cluster.state.tasks["big"].status is TaskStatus.ACTIVE and blameless(cluster)
    for honest in range(replicas):
        report(cluster, honest, 4)
    cluster.run()
    assert cluster.state.tasks["big"].status is TaskStatus.FAILED and blameless(cluster)


def test_stranger_and_former_member_say_nothing() -> None:
    cluster = trained(3)
    task = cluster.state.tasks["big"]
    (node, *_), worker = sorted(cluster.hosts), "big.999"
    event = v.DivergenceObserved(
        node=node, task="big", worker=worker, generation=task.generation, iteration=4, sign="unequal"
    )
    before = cluster.state.quarantined_messages
    cluster.say(cluster.hosts[node], event)
    assert cluster.state.quarantined_messages == before + 1
    assert not cluster.state.tasks["big"].group.divergence_reports
