"""What the cluster keeps of stragglers, and shows."""

from __future__ import annotations

import io

import pytest
from msgspec.structs import replace
from rich.console import Console

from tests.unicrond.cluster import SECOND_US, MiniCluster, trained
from unicrond.core.folding.suspicions import straggler_observed
from unicrond.core.state.state import TaskStatus
from unicrond.ctl.live_view import render
from unicrond.display.cluster_tables import stragglers_table, tasks_table
from unicrond.events import vocabulary as v
from unicrond.service.api.metrics import exposition


@pytest.fixture
def cluster() -> MiniCluster:
    """One task of three workers that has trained three iterations."""
    return trained(3)


def member(cluster: MiniCluster, rank: int) -> v.Member:
    membership = cluster.state.tasks["big"].membership
    assert membership is not None
    return membership.members[rank]


def about(cluster: MiniCluster, rank: int) -> dict[str, object]:
    told, slow = member(cluster, 0), member(cluster, rank)
    return {
        "node": told.node, "task": "big", "worker": told.worker, "generation": cluster.state.tasks["big"].generation,
        "iteration": 60, "straggler": slow.worker, "straggler_node": slow.node, "rank": rank,
    }  # fmt: skip


def straggles(cluster: MiniCluster, rank: int, **changes: object) -> v.StragglerObserved:
    told = v.StragglerObserved(
        **about(cluster, rank),  # type: ignore[arg-type]
        factor=1.25, compute_us=125_000, others_us=100_000, since_iteration=11, since_us=7 * SECOND_US,
    )  # fmt: skip
    return replace(told, **changes)


def say(cluster: MiniCluster, event: v.StragglerObserved | v.StragglerRecovered) -> None:
    cluster.say(cluster.hosts[event.node], event)
    cluster.run()


def test_straggler_shows_rank_node_factor_and_start(cluster: MiniCluster) -> None:
    before = cluster.state
    say(cluster, straggles(cluster, 2))
    slow = member(cluster, 2)
    (row,) = stragglers_table(cluster.state).rows
    assert row[:6] == (slow.worker, "2", slow.node, "1.25", "125 ms", "100 ms") and row[-1] == "11"
    assert row[6] == "-" and row[7].startswith("1970-01-0"), "since when, in local time"
    assert tasks_table(cluster.state).rows[0][-1] == (
        f"{slow.worker} on {slow.node} takes 1.25 times as long as the others"
    )
    labels = f'node="{slow.node}",rank="2",task="big",worker="{slow.worker}"'
    assert f"unicron_straggler_factor{{{labels}}} 1.25" in exposition(lambda: cluster.state)().decode()
    assert cluster.state.plan == before.plan and not cluster.state.incidents_total, "nothing is done about it"


def test_straggler_shows_what_it_is_dealt_and_what_that_brought(cluster: MiniCluster) -> None:
    deal = v.ReplicaDeal(
        micro_batches=12, dealt=2, dealt_evenly=4, iteration_us_before=366_000, iteration_us=240_000, ideal_us=236_000
    )
    event = straggles(cluster, 2, factor=2.0, since_iteration=120, deal=deal)
    say(cluster, event)
    words = "dealt 2 of 12 micro-batches instead of 4; iterations 366 -> 240 ms, ideal 236"
    (row,) = stragglers_table(cluster.state).rows
    assert row[6] == words
    assert tasks_table(cluster.state).rows[0][-1].endswith(f"takes 2.00 times as long as the others: {words}")
    assert event.sentence().endswith(f"per micro-batch against 0.100 s: {words}")
    say(cluster, replace(event, deal=replace(deal, iteration_us_before=0)))
    assert stragglers_table(cluster.state).rows[0][6] == "dealt 2 of 12 micro-batches instead of 4"


def test_straggler_keeps_first_report_time(cluster: MiniCluster) -> None:
    say(cluster, straggles(cluster, 2))
    say(cluster, straggles(cluster, 2, factor=1.5, since_iteration=40, since_us=9 * SECOND_US))
    (slow,) = cluster.state.tasks["big"].group.stragglers.values()
    assert (slow.factor, slow.since_iteration, slow.since_us) == (1.5, 11, 7 * SECOND_US)


def test_recovered_straggler_is_removed(cluster: MiniCluster) -> None:
    say(cluster, straggles(cluster, 1))
    say(cluster, straggles(cluster, 2))
    say(cluster, v.StragglerRecovered(**about(cluster, 1), factor=1.01))  # type: ignore[arg-type]
    assert [row[1] for row in stragglers_table(cluster.state).rows] == ["2"]
    say(cluster, v.StragglerRecovered(**about(cluster, 1), factor=1.01))  # type: ignore[arg-type]
    assert len(cluster.state.tasks["big"].group.stragglers) == 1


def test_departed_worker_is_no_straggler(cluster: MiniCluster) -> None:
    say(cluster, straggles(cluster, 1))
    slow, stays = member(cluster, 2), member(cluster, 1)
    told = straggles(cluster, 2)
    say(cluster, told)
    cluster.kill_worker(cluster.hosts[slow.node], slow.worker)
    cluster.run()
    assert list(cluster.state.tasks["big"].group.stragglers) == [stays.worker]
    say(cluster, replace(told, node=member(cluster, 0).node))
    assert list(cluster.state.tasks["big"].group.stragglers) == [stays.worker], "a late word about the dead"


def test_straggler_must_be_member(cluster: MiniCluster) -> None:
    told = straggles(cluster, 2)
    task = cluster.state.tasks["big"]
    assert task.membership is not None
    without = replace(task, membership=replace(task.membership, members=task.membership.members[:2]))
    state = replace(cluster.state, tasks={"big": without})
    envelope = cluster.log[-1].envelope
    assert straggler_observed(cluster.state, told, envelope) != cluster.state
    assert straggler_observed(state, told, envelope) == state


def test_finished_task_has_no_stragglers(cluster: MiniCluster) -> None:
    say(cluster, straggles(cluster, 2))
    task = replace(cluster.state.tasks["big"], status=TaskStatus.CANCELLED)
    ended = replace(cluster.state, tasks={"big": task})
    assert not stragglers_table(ended).rows and tasks_table(ended).rows[0][-1] == "-"


def test_fold_ignores_stragglers_of_unknown_tasks_and_workers(cluster: MiniCluster) -> None:
    before = cluster.state.tasks
    say(cluster, straggles(cluster, 2, task="none", straggler="none.1"))
    say(cluster, straggles(cluster, 2, straggler="big.77"))
    assert cluster.state.tasks == before


def test_view_and_events_describe_straggler(cluster: MiniCluster) -> None:
    told = straggles(cluster, 2)
    say(cluster, told)
    file = io.StringIO()
    Console(file=file, width=120).print(render(cluster.state, cluster.state.now_us))
    assert "stragglers" in file.getvalue() and "1.25" in file.getvalue()
    assert told.sentence() == (
        f"worker {told.straggler} (rank 2) on {told.straggler_node} is a straggler: it takes 1.25 times as long as the"
        " other replicas since iteration 11, 0.125 s per micro-batch against 0.100 s"
    )
