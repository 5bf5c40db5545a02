"""Iterations that are trained again stand in the incident, in goodput and on the page, whatever made the task fall
back."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.unicrond.cluster import SECOND_US, MiniCluster, members, trained
from tests.unicrond.test_goodput import told
from unicrond.core.state.state import Incident
from unicrond.core.state.work import achieved_waf, delivered_flop, iteration_flop
from unicrond.core.worth.costs import costs_at
from unicrond.events import vocabulary as v
from unicrond.page.view import view


def train_slowly(cluster: MiniCluster, steps: int) -> None:
    """One iteration a second."""
    for _ in range(steps):
        cluster.now_us += SECOND_US
        cluster.train("big")


def fall_back(cluster: MiniCluster, iterations: int, source: v.StateSource = "checkpoint") -> None:
    """Whoever forms the next group has a state that is so many iterations old."""
    cluster.iterations["big"] -= iterations
    cluster.source = source


def only_incident(cluster: MiniCluster) -> Incident:
    (closed,) = cluster.state.closed_incidents
    assert not cluster.state.incidents
    return closed


def repeated(cluster: MiniCluster) -> dict[str, float]:
    """Shares of the cluster's work that were repeated, by cause."""
    return {part["cause"]: part["share"] for part in told(cluster)["cluster"]["badput"] if part["group"] == "repeated"}


@pytest.mark.parametrize("source", ["memory", "peer", "checkpoint", "init", "replica", "own"])
def test_incident_has_the_iterations_that_are_repeated(source: v.StateSource) -> None:
    cluster = trained(2)
    train_slowly(cluster, 20)
    fall_back(cluster, 15, source)
    cluster.kill_worker(cluster.hosts["n0"], next(iter(cluster.hosts["n0"].processes)))
    cluster.run()
    train_slowly(cluster, 20)
    closed = only_incident(cluster)
    assert (closed.iterations_lost, closed.state_from) == (15, source)
    assert cluster.state.tasks["big"].progress.iterations_repeated == 15
    (big,) = told(cluster)["tasks"]
    assert big["iterations_lost"] == 15 and 14 * SECOND_US < big["lost_work_us"] < 16 * SECOND_US
    assert big["ettr"] <= 1 - big["lost_work_us"] / big["wall_us"]
    assert repeated(cluster).keys() == {"process_exit"}
    shown = next(one for one in view(cluster.state)["incidents"] if one["id"] == closed.id)
    assert (shown["iterations_lost"], shown["state_from"]) == (15, source)


def test_incident_closed_before_the_state_is_lost_has_the_iterations() -> None:
    """All nodes of the task are lost: the plan has no workers for it, and the incident is closed. They return later."""
    cluster = trained(2, min_workers=2)
    train_slowly(cluster, 20)
    cluster.kill_host(cluster.hosts["n1"])
    cluster.lose(cluster.hosts["n1"])
    cluster.run()
    assert only_incident(cluster).iterations_lost == 0 and not cluster.state.plan.assignments["big"].workers
    fall_back(cluster, 15)
    cluster.add_host("n1")
    cluster.run()
    train_slowly(cluster, 20)
    closed = only_incident(cluster)
    assert (closed.iterations_lost, closed.state_from) == (15, "checkpoint")
    assert repeated(cluster).keys() == {"node_lost"}
    assert told(cluster)["tasks"][0]["iterations_lost"] == 15


def test_report_that_comes_late_shows_in_the_incident() -> None:
    """The old group's last report has waited: only the new group's first commit shows what is repeated."""
    cluster = trained(2)
    generation = cluster.state.tasks["big"].generation
    lead = cluster.state.tasks["big"].membership.members[0]
    cluster.kill_worker(cluster.hosts["n1"], next(iter(cluster.hosts["n1"].processes)))
    cluster.source = "memory"
    cluster.run()
    late = v.StepCommitted(
        node=lead.node, task="big", worker=lead.worker, generation=generation, first=4, last=18, samples=8,
        samples_digest=0, loss=1.0, duration_us=15 * SECOND_US, micro_batches_by_rank=(1,),
    )  # fmt: skip
    cluster.say(cluster.hosts[lead.node], late)
    train_slowly(cluster, 20)
    closed = only_incident(cluster)
    assert (closed.iterations_lost, closed.state_from) == (15, "memory")
    assert cluster.state.tasks["big"].progress.iterations_repeated == 15


def test_repetition_without_incident_has_a_cause_of_its_own() -> None:
    cluster = trained(2)
    train_slowly(cluster, 20)
    worker = members(cluster)[0]
    fall_back(cluster, 8)
    cluster.cordon(cluster.state.tasks["big"].workers[worker].node, drain=True)
    cluster.run()
    train_slowly(cluster, 10)
    assert not cluster.state.closed_incidents
    assert repeated(cluster).keys() == {"no incident"}
    assert told(cluster)["tasks"][0]["iterations_lost"] == 8


def test_second_fall_counts_what_it_repeats() -> None:
    cluster = trained(2)
    train_slowly(cluster, 20)
    for lost, progress in ((15, 5), (5, 30)):
        fall_back(cluster, lost)
        cluster.kill_worker(cluster.hosts["n0"], next(iter(cluster.hosts["n0"].processes)))
        cluster.run()
        train_slowly(cluster, progress)
    assert [incident.iterations_lost for incident in cluster.state.closed_incidents] == [15, 5]
    progress = cluster.state.tasks["big"].progress
    assert (progress.iterations_repeated, progress.repeats_until) == (20, 0)
    assert 19 * SECOND_US < told(cluster)["tasks"][0]["lost_work_us"] < 22 * SECOND_US


def test_nothing_is_repeated_where_a_replica_lives() -> None:
    cluster = trained(2)
    train_slowly(cluster, 20)
    cluster.kill_worker(cluster.hosts["n0"], next(iter(cluster.hosts["n0"].processes)))
    cluster.run()
    train_slowly(cluster, 5)
    assert only_incident(cluster).iterations_lost == 0 and not repeated(cluster)
    assert costs_at(cluster.state, cluster.state.now_us).repeated_flop == 0


def test_report_of_the_group_that_comes_late_repeats_nothing() -> None:
    """One member's agent delivers its join after the first iterations of that very group."""
    cluster = trained(2)
    task = cluster.state.tasks["big"]
    worker = next(worker for worker in task.workers.values() if worker.worker in task.member_names)
    late = v.WorkerJoinedGroup(
        node=worker.node,
        task="big",
        worker=worker.worker,
        generation=task.generation,
        iteration=1,
        micro_batches_assigned=0,
        duration_us=1,
        source="replica",
    )
    cluster.say(cluster.hosts[worker.node], late)
    assert cluster.state.tasks["big"].progress.repeats_until == 0


# --- rates ---------------------------------------------------------------------------------------


def test_achieved_rate_is_that_of_the_iterations_where_appends_waited() -> None:
    """A minute of steps is recorded within a millisecond."""
    cluster = trained(1)
    task = cluster.state.tasks["big"]
    lead, progress = task.membership.members[0], task.progress
    for first in (4, 34):
        step = v.StepCommitted(
            node=lead.node, task="big", worker=lead.worker, generation=task.generation, first=first, last=first + 29,
            samples=8, samples_digest=0, loss=1.0, duration_us=30 * SECOND_US, micro_batches_by_rank=(1,),
        )  # fmt: skip
        cluster.say(cluster.hosts[lead.node], step)
    task = cluster.state.tasks["big"]
    real = iteration_flop(task.spec)  # one iteration a second
    assert progress.iteration == 3 and task.progress.trained_us > 60 * SECOND_US
    assert 0.9 * real < achieved_waf(task, cluster.state.now_us) < 1.1 * real
    later_us = cluster.state.now_us + 240 * SECOND_US
    assert achieved_waf(task, later_us) == delivered_flop(task) * SECOND_US // (later_us - progress.first_commit_us)


def test_first_step_has_a_rate() -> None:
    cluster = trained(1)
    task = cluster.state.tasks["big"]
    task = replace(task, progress=replace(task.progress, first_commit_us=cluster.state.now_us))
    assert achieved_waf(task, cluster.state.now_us) > 0
