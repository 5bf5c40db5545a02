"""Mode observe: what died is restarted; all else stands in the log and is not done, until the mode is heal again."""

from __future__ import annotations

import pytest

from tests.unicrond.cluster import MiniCluster, members
from tests.unicrond.test_brakes import break_gpu, cluster_of, die_on, hang, isolated, rest
from tests.unicrond.test_escalation import said
from unicrond.core.nodes.brakes import mode_text
from unicrond.core.state.policy import Policy, Settings, settings_of
from unicrond.core.state.state import TaskStatus
from unicrond.events import vocabulary as v


def set_mode(cluster: MiniCluster, mode: v.Mode, task: str = "") -> None:
    cluster.append(v.ModeRequested(mode=mode, task=task, reason="test", requester="ops"), "api", cluster.state.term)
    rest(cluster)


def seats_of(cluster: MiniCluster, task: str = "t0") -> list[tuple[str, str]]:
    return sorted((worker.worker, worker.node) for worker in cluster.state.tasks[task].workers.values())


@pytest.mark.parametrize("task", ["", "t0"], ids=["cluster", "task"])
def test_no_node_is_isolated_until_mode_is_heal(task: str) -> None:
    cluster = cluster_of(4)
    set_mode(cluster, "observe", task)
    before = seats_of(cluster)
    break_gpu(cluster, "n1")
    break_gpu(cluster, "n1")
    (told,) = [event for event in said(cluster, v.DecisionHeld) if event.action == "isolation"]
    assert told.node == "n1" and told.limit == "observe" and not isolated(cluster)
    assert told.sentence() == (
        f"node n1 is not isolated: {f'task {task}' if task else 'the cluster'} is in mode observe;"
        " the reason: GPU-1: XID 94: test"
    )
    assert seats_of(cluster) == before and mode_text(cluster.state).startswith("observe")
    set_mode(cluster, "heal", task)
    assert isolated(cluster) == ["n1"] and not cluster.state.holds and not mode_text(cluster.state)
    cluster.assert_whole()


def test_mode_of_task_keeps_no_other_node_in_service() -> None:
    cluster = cluster_of(4, tasks=2, workers=2)
    set_mode(cluster, "observe", "t0")
    node = seats_of(cluster, "t1")[0][1]
    break_gpu(cluster, node)
    assert isolated(cluster) == [node]


@pytest.mark.parametrize("task", ["", "t0"], ids=["cluster", "task"])
def test_what_died_is_restarted_in_place(task: str) -> None:
    cluster = cluster_of(3)
    set_mode(cluster, "observe", task)
    before = [node for _, node in seats_of(cluster)]
    die_on(cluster, "n1")
    rest(cluster)
    assert sorted(node for _, node in seats_of(cluster)) == sorted(before)
    cluster.assert_whole()


def test_what_died_with_its_node_starts_on_free_node_and_others_stay() -> None:
    cluster = cluster_of(4, workers=3)
    set_mode(cluster, "observe")
    before = dict(seats_of(cluster))
    gone = next(iter(before.values()))
    cluster.kill_host(cluster.hosts[gone])
    cluster.lose(cluster.hosts[gone])
    rest(cluster)
    after = dict(seats_of(cluster))
    alive = {worker: node for worker, node in after.items() if cluster.state.nodes[node].status == "up"}
    assert len(alive) == 3 and {w: n for w, n in before.items() if n != gone}.items() <= alive.items()


def test_no_plan_moves_workers_and_what_it_would_move_is_told_once() -> None:
    cluster = cluster_of(2, workers=4)
    set_mode(cluster, "observe")
    before = seats_of(cluster)
    cluster.add_host("n8")
    rest(cluster)
    (told,) = [event for event in said(cluster, v.DecisionHeld) if event.action == "plan"]
    assert told.reason == "t0 2 -> 3 workers" and seats_of(cluster) == before
    set_mode(cluster, "heal")
    assert len(cluster.state.tasks["t0"].workers) == 3 and not cluster.state.holds
    cluster.assert_whole()


def test_lost_node_without_room_moves_no_other_task() -> None:
    cluster = cluster_of(4, tasks=2, workers=2)
    set_mode(cluster, "observe")
    before = seats_of(cluster, "t1")
    gone = next(worker.node for worker in cluster.state.tasks["t0"].workers.values())
    cluster.kill_host(cluster.hosts[gone])
    cluster.lose(cluster.hosts[gone])
    rest(cluster)
    assert seats_of(cluster, "t1") == before and cluster.state.plan.workers == {"t0": 1, "t1": 2}
    assert len(members(cluster, "t0")) == 1


def test_person_still_drains_and_submits() -> None:
    cluster = cluster_of(4, workers=2)
    set_mode(cluster, "observe")
    node = seats_of(cluster)[0][1]
    cluster.cordon(node, drain=True)
    rest(cluster)
    assert node not in [name for _, name in seats_of(cluster)] and len(members(cluster, "t0")) == 2
    cluster.submit("t1", max_workers=1)
    rest(cluster)
    assert len(members(cluster, "t1")) == 1
    cluster.assert_whole()


def test_suspect_stays_until_mode_is_heal() -> None:
    cluster = cluster_of(2)
    set_mode(cluster, "observe", "t0")
    culprit = members(cluster, "t0")[1]
    hang(cluster)
    hang(cluster)
    assert [event.worker for event in said(cluster, v.DecisionHeld)] == [culprit]
    assert cluster.state.tasks["t0"].workers[culprit].alive
    set_mode(cluster, "heal", "t0")
    assert culprit not in cluster.state.tasks["t0"].workers
    cluster.assert_whole()


def test_task_is_not_failed_and_its_restarts_back_off() -> None:
    cluster = cluster_of(2, stuck_max=2)
    set_mode(cluster, "observe", "t0")
    for _ in range(4):
        for node in ("n0", "n1"):
            if cluster.hosts[node].processes:
                die_on(cluster, node)
        cluster.run(passing=("symptom", "exit"))
        waits = [length for name, length in cluster.standing().items() if name.startswith("hold:failure")]
        if [event for event in said(cluster, v.DecisionHeld) if event.action == "failure"]:
            assert waits and not cluster.hosts["n0"].processes
        rest(cluster)
    assert cluster.state.tasks["t0"].status is TaskStatus.ACTIVE and not said(cluster, v.TaskFailed)
    assert len([event for event in said(cluster, v.DecisionHeld) if event.action == "failure"]) == 1
    set_mode(cluster, "heal", "t0")
    assert cluster.state.tasks["t0"].status is TaskStatus.FAILED


def test_newest_word_on_mode_counts() -> None:
    cluster = MiniCluster(1, Policy(mode="observe"))
    assert cluster.state.mode == "observe"
    cluster.append(v.ModeRequested(mode="heal", reason="test"), "api", 1)
    cluster.take_over()
    assert cluster.state.mode == "heal", "the configuration says nothing new"
    cluster.policy = Policy()
    cluster.take_over()
    cluster.policy = Policy(mode="observe")
    cluster.take_over()
    assert cluster.state.mode == "observe"
    assert settings_of(Settings(cluster.policy, 1.0).numbers()).policy == cluster.policy
