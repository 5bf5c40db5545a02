"""The ladder: reattempt, restart, reconfigure, give up; every loop has an end, and every step says why."""

from __future__ import annotations

import pytest

from tests.unicrond.cluster import MiniCluster, membership_of, trained
from tests.unicrond.losses import tell
from tests.unicrond.test_decide import members, two_tasks
from unicrond.core.decide import decide
from unicrond.core.faults.severity import SEVERITY, severity_of
from unicrond.core.fold import fold
from unicrond.core.rules.survey import Survey
from unicrond.core.state.policy import Policy
from unicrond.core.state.state import ClusterState, Severity, TaskStatus, WorkerStatus
from unicrond.core.state.task_parts import CALM_ITERATIONS
from unicrond.events import vocabulary as v
from unicrond.events.wire.envelope import Envelope, RecordedEvent

#: These tests ask who is to blame; how many nodes may be out at once is asked in test_brakes.py.
UNBRAKED = Policy(isolated_share=1.0)
SEEDS = range(20)


def said(cluster: MiniCluster, kind: type, after: int = 0) -> list:
    return [e.envelope.event for e in cluster.log[after:] if isinstance(e.envelope.event, kind)]


def break_group(cluster: MiniCluster, task: str, *first: str) -> None:
    """`first` report the broken group, then the others do."""
    for worker in dict.fromkeys((*first, *members(cluster, task))):
        cluster.report(worker, "connection_broken")


def two_survivors(seed: int) -> tuple[MiniCluster, list[str]]:
    """One of three has died, the others have met, and its successor is ready to join them."""
    cluster = two_tasks(seed)
    victim, *survivors = members(cluster, "big")
    cluster.kill_worker(cluster.hosts[cluster.state.tasks["big"].workers[victim].node], victim)
    while len(members(cluster, "big")) == 3 or any(host.commands for host in cluster.hosts.values()):
        cluster.decide()
        cluster.obey_all()
    cluster.group_up("big")
    assert members(cluster, "big") == survivors and cluster.state.tasks["big"].confirmed
    return cluster, survivors


@pytest.mark.parametrize("seed", SEEDS)
def test_broken_connection_is_reattempted_in_place(seed: int) -> None:
    cluster = two_tasks(seed)
    before = members(cluster, "big")
    break_group(cluster, "big", before[1])
    mark = len(cluster.log)
    cluster.run()
    cluster.assert_whole()
    assert members(cluster, "big") == before
    assert not said(cluster, v.StartWorker, mark) and not said(cluster, v.StopWorker, mark)
    (incident,) = cluster.state.closed_incidents
    assert (incident.severity, incident.response, incident.symptoms) == (Severity.SEV3, "reattempt in place", 2)


@pytest.mark.parametrize("seed", SEEDS)
def test_failed_reattempt_restarts_and_failed_restart_isolates(seed: int) -> None:
    cluster = two_tasks(seed)
    suspect = cluster.random.choice(members(cluster, "big"))
    node = cluster.state.tasks["big"].workers[suspect].node
    lose_links(cluster, "big", [node])
    cluster.run()
    assert not said(cluster, v.IncidentEscalated)

    lose_links(cluster, "big", [node])  # at once: the reattempt has failed
    cluster.run()
    cluster.assert_whole()
    (escalated,) = said(cluster, v.IncidentEscalated)
    assert (escalated.severity, escalated.worker) == (2, suspect)
    assert f"after reattempts in place: once; {node} is an endpoint of " in escalated.reason
    assert [i.severity for i in cluster.state.closed_incidents] == [Severity.SEV3, Severity.SEV2]
    successor = next(w.worker for w in cluster.state.tasks["big"].workers.values() if w.node == node)
    assert successor != suspect and len(members(cluster, "big")) == 3

    for _ in range(2):  # the new process meets the same fate
        lose_links(cluster, "big", [node])
        cluster.run_but_isolation()
    (isolated,) = said(cluster, v.NodeIsolated)
    assert isolated.node == node and "groups of big broke here again and again" in isolated.reason
    assert cluster.state.closed_incidents[-1].severity is Severity.SEV1
    assert sum(a.workers for a in cluster.state.plan.assignments.values()) == 3
    cluster.run()
    cluster.assert_whole()


def lose_links(cluster: MiniCluster, task: str, bad: list[str], broken: list[tuple[str, str]] | None = None) -> bool:
    """All links of the bad nodes break (or those that are given): the group's members tell of it, in a drawn order."""
    places = {worker: cluster.state.tasks[task].workers[worker].node for worker in members(cluster, task)}
    if broken is None:
        broken = [(a, b) for a in places.values() for b in places.values() if a < b and (a in bad or b in bad)]
    dead = {frozenset((a, b)) for a in places for b in places if tuple(sorted((places[a], places[b]))) in broken}
    told = tell(cluster.random, list(places), dead)
    for worker in cluster.random.sample(sorted(told), len(told)):
        lost = told[worker]
        cluster.report(worker, "connection_broken", lost=lost, peer=cluster.random.choice(lost))
    return bool(told)


def found_guilty(cluster: MiniCluster, task: str, bad: list[str], steps: int, breaks: int = 20) -> list[str]:
    """The nodes that are isolated, in order, while bad ones break their links, again and again after some steps."""
    for _ in range(breaks):
        cluster.train(task, steps)
        if not lose_links(cluster, task, bad):
            break
        cluster.run_but_isolation()
    assert cluster.state.tasks[task].status is TaskStatus.ACTIVE
    return [event.node for event in said(cluster, v.NodeIsolated)]


@pytest.mark.parametrize("steps", [0, 1, CALM_ITERATIONS - 1])
@pytest.mark.parametrize("guilty", range(4))
@pytest.mark.parametrize("workers", [3, 4])
@pytest.mark.parametrize("seed", range(5))
def test_escalation_isolates_only_node_that_breaks_connections(
    seed: int, workers: int, guilty: int, steps: int
) -> None:
    """The node alone breaks its links at each iteration's start: once its neighbours were isolated for it, and the
    task was failed although it made steps."""
    cluster = MiniCluster(seed)
    for number in range(4):
        cluster.add_host(f"n{number}")
    cluster.submit("big", max_workers=workers)
    cluster.run()
    works = any(worker.node == f"n{guilty}" for worker in cluster.state.tasks["big"].workers.values())
    assert found_guilty(cluster, "big", [f"n{guilty}"], steps) == ([f"n{guilty}"] if works else [])
    for _ in range(3):
        cluster.train("big", CALM_ITERATIONS)
    cluster.run()
    cluster.assert_whole()
    assert len(members(cluster, "big")) == workers


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("seed", SEEDS)
def test_escalation_isolates_exactly_two_bad_nodes_of_five(seed: int, steps: int) -> None:
    cluster = MiniCluster(seed, UNBRAKED)
    for number in range(5):
        cluster.add_host(f"n{number}")
    cluster.submit("big", max_workers=5)
    cluster.run()
    bad = cluster.random.sample([f"n{number}" for number in range(5)], 2)
    assert sorted(found_guilty(cluster, "big", bad, steps)) == sorted(bad)
    assert len(members(cluster, "big")) == 3


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize(
    ("far", "isolated"),
    [
        (["n3", "n4"], ["n3", "n4"]),
        (["n0", "n1"], ["n0", "n1"]),
        (["n0", "n1", "n3"], ["n2", "n4"]),
        (["n0"], ["n0"]),
    ],
)
@pytest.mark.parametrize("seed", range(5))
def test_bad_switch_leaves_larger_side_training(seed: int, far: list[str], isolated: list[str], steps: int) -> None:
    cluster = MiniCluster(seed, UNBRAKED)
    near = [f"n{number}" for number in range(5) if f"n{number}" not in far]
    assert switched(cluster, near, far, steps) == isolated


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize(("far", "isolated"), [(["n0", "n3"], ["n1", "n2"]), (["n2", "n3"], ["n2", "n3"])])
@pytest.mark.parametrize("seed", range(5))
def test_equal_sides_keep_side_with_first_name(seed: int, far: list[str], isolated: list[str], steps: int) -> None:
    cluster = MiniCluster(seed, UNBRAKED)
    near = [f"n{number}" for number in range(4) if f"n{number}" not in far]
    assert switched(cluster, near, far, steps) == isolated


def test_equal_sides_keep_side_with_newer_state() -> None:
    cluster = MiniCluster(1, UNBRAKED)
    for number in range(4):
        cluster.add_host(f"n{number}")
    cluster.submit("big", max_workers=4)
    cluster.run()
    cluster.train("big", 1)
    kept = v.SnapshotStored(
        node="n3", task="big", shard=0, iteration=7, generation=1, origin="n3", size_bytes=1, duration_us=1, shards=1
    )
    cluster.say(cluster.hosts["n3"], kept)
    assert switched(cluster, ["n0", "n1"], ["n2", "n3"], 1) == ["n0", "n1"]


def switched(cluster: MiniCluster, near: list[str], far: list[str], steps: int) -> list[str]:
    """The nodes that are isolated where all links between two sides break, again and again."""
    if not cluster.hosts:
        for name in sorted(near + far):
            cluster.add_host(name)
        cluster.submit("big", max_workers=len(near + far))
        cluster.run()
    for _ in range(12):
        cluster.train("big", steps)
        if not lose_links(cluster, "big", [], [(min(a, b), max(a, b)) for a in near for b in far]):
            break
        cluster.run_but_isolation()
    assert cluster.state.tasks["big"].status is TaskStatus.ACTIVE
    return sorted({event.node for event in said(cluster, v.NodeIsolated)})


@pytest.mark.parametrize("nodes", [2, 4])
@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("seed", range(5))
def test_two_replicas_lose_no_node_while_task_progresses(seed: int, steps: int, nodes: int) -> None:
    """Either may be at fault. Else one of them is tried; its successor then shows who it was."""
    cluster = MiniCluster(seed, UNBRAKED)
    for number in range(nodes):
        cluster.add_host(f"n{number}")
    cluster.submit("big", max_workers=2)
    cluster.run()
    guilty = cluster.random.choice([worker.node for worker in cluster.state.tasks["big"].workers.values()])
    isolated = found_guilty(cluster, "big", [guilty], steps, breaks=16)
    if nodes == 2:
        assert len(isolated) == (0 if steps else 1)
    else:
        assert 1 <= len(isolated) <= 2 and isolated[-1] == guilty


def test_calm_counts_from_iteration_after_rollback() -> None:
    cluster = two_tasks(2)
    cluster.train("big", 500)
    break_group(cluster, "big", members(cluster, "big")[0])
    cluster.run()
    cluster.iterations["big"] = 100  # nobody had state: from an old checkpoint
    cluster.train("big", CALM_ITERATIONS)
    assert cluster.state.tasks["big"].group.reattempts == 0


@pytest.mark.parametrize("seed", SEEDS)
def test_verdict_isolates_node_with_both_shards(seed: int) -> None:
    cluster = MiniCluster(seed)
    for number in range(4):
        cluster.add_host(f"n{number}", slots=2)
    cluster.submit("wide", min_workers=2, max_workers=6, tp=2)
    cluster.run()
    guilty = f"n{cluster.random.randrange(3)}"
    for _ in range(12):
        task = cluster.state.tasks["wide"]
        assert task.membership is not None
        seats = task.membership.members
        if all(member.node != guilty for member in seats):
            break
        dead = {
            frozenset((one.worker, other.worker))
            for one in seats
            for other in seats
            if one.shard == other.shard and (one.node == guilty) != (other.node == guilty)
        }
        for worker, lost in tell(cluster.random, [member.worker for member in seats], dead, shards=2).items():
            cluster.report(worker, "connection_broken", lost=lost)
        cluster.run_but_isolation()
    assert cluster.state.tasks["wide"].status is TaskStatus.ACTIVE
    assert [event.node for event in said(cluster, v.NodeIsolated)] == [guilty]


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("seed", SEEDS)
def test_breaks_of_all_nodes_never_fail_progressing_task(seed: int, named: bool) -> None:
    """The network is sick, or the task is: no node is to blame."""
    cluster = MiniCluster(seed)
    for number in range(6):
        cluster.add_host(f"n{number}")
    cluster.submit("big", max_workers=3)
    cluster.run()
    for _ in range(40):
        cluster.train("big")
        places = [worker.node for worker in cluster.state.tasks["big"].workers.values()]
        if named:
            lose_links(cluster, "big", [], [(a, b) for a in places for b in places if a < b])
        else:
            break_group(cluster, "big", *cluster.random.sample(members(cluster, "big"), 2))
        cluster.run_but_isolation()
    assert cluster.state.tasks["big"].status is TaskStatus.ACTIVE
    assert not said(cluster, v.NodeIsolated)


@pytest.mark.parametrize("seed", SEEDS)
def test_endless_breaks_without_step_end_task(seed: int) -> None:
    cluster = MiniCluster(seed)
    for number in range(6):
        cluster.add_host(f"n{number}")
    cluster.submit("big", max_workers=3)
    cluster.run()
    for _ in range(40):
        if cluster.state.tasks["big"].status is not TaskStatus.ACTIVE:
            break
        break_group(cluster, "big", *cluster.random.sample(members(cluster, "big"), 2))
        cluster.run_but_isolation()
    task = cluster.state.tasks["big"]
    assert task.status is TaskStatus.FAILED and "without a new iteration" in task.ending.reason
    cluster.run()
    assert not any(node.isolation.active for node in cluster.state.nodes.values()), "no node was at fault"


@pytest.mark.parametrize("seed", SEEDS)
def test_broken_group_regroups_before_newcomers_join(seed: int) -> None:
    """A connection may be broken for one end alone: the other waits in the collective, and would for ever."""
    cluster, survivors = two_survivors(seed)
    mark = len(cluster.log)
    cluster.report(survivors[0], "connection_broken")
    cluster.run()
    cluster.assert_whole()
    again, whole = said(cluster, v.MembershipDecided, mark)
    assert [member.worker for member in membership_of(again).members] == survivors and again.urgent
    assert len(membership_of(whole).members) == 3


@pytest.mark.parametrize("seed", SEEDS)
def test_first_group_retries_after_failure(seed: int) -> None:
    cluster = MiniCluster(seed)
    cluster.add_host("n0")
    cluster.add_host("n1")
    cluster.submit("big", max_workers=2)
    while "big" not in cluster.state.tasks or cluster.state.tasks["big"].membership is None:
        cluster.decide()
        cluster.obey_all()
    first = members(cluster, "big")
    cluster.obey_all()
    cluster.report(first[0], "store_error", generation=1)
    mark = len(cluster.log)
    while not said(cluster, v.MembershipDecided, mark):
        assert cluster.pass_deadlines("symptom") or cluster.decide()
    assert members(cluster, "big") == first and cluster.state.tasks["big"].generation == 2
    cluster.run()
    cluster.assert_whole()
    assert [(i.kind, i.response) for i in cluster.state.closed_incidents] == [("store_error", "reattempt in place")]


@pytest.mark.parametrize("seed", SEEDS)
def test_break_before_close_opens_own_incident(seed: int) -> None:
    """The coordinator has decided to close the first, and not read yet that the new group broke: the same worker says
    so, and nobody would say it again."""
    cluster = two_tasks(seed)
    first = members(cluster, "big")[0]
    cluster.report(first, "connection_broken")
    cluster.pass_deadlines("symptom")
    cluster.decide()
    cluster.obey_all()
    cluster.group_up("big")
    decided = decide(Survey(cluster.state, cluster.policy), {})
    assert [type(event) for event in decided] == [v.TransitionCompleted]
    cluster.report(first, "connection_broken")
    cluster.append(decided[0], "coordinator", cluster.state.term)
    assert len(cluster.state.incidents) == len(cluster.state.closed_incidents) == 1
    cluster.run()
    cluster.assert_whole()
    assert cluster.state.tasks["big"].generation > 2


@pytest.mark.parametrize("read", [True, False])
@pytest.mark.parametrize("seed", SEEDS)
def test_break_before_planned_group_regroups_at_once(seed: int, read: bool) -> None:
    """One end has noticed, and follows the planned membership; the other waits in the old group for a boundary. The
    report stands in the log behind that membership, or just before it, and was not `read` when it was decided."""
    cluster, survivors = two_survivors(seed)
    while len(members(cluster, "big")) == 2:
        decided = decide(Survey(cluster.state, cluster.policy), cluster._solutions)
        if not read and any(isinstance(event, v.MembershipDecided) for event in decided):
            cluster.report(survivors[0], "connection_broken")
            for event in decided:
                cluster.append(event, "coordinator", cluster.state.term)
        else:
            cluster.decide()
        cluster.obey_all()
    task = cluster.state.tasks["big"]
    assert task.membership is not None and not task.membership.urgent and not task.confirmed
    if read:
        cluster.report(survivors[0], "connection_broken", generation=task.generation - 1)
    before = members(cluster, "big")
    cluster.pass_deadlines("symptom")
    cluster.decide()
    again = cluster.state.tasks["big"].membership
    assert again is not None and again.urgent and [member.worker for member in again.members] == before
    cluster.run()
    cluster.assert_whole()
    assert members(cluster, "big") == before


@pytest.mark.parametrize("seed", SEEDS)
def test_loss_of_leaving_worker_opens_no_incident(seed: int) -> None:
    """It is left out at the next boundary, and ends before it: what its peers lose is its doing."""
    cluster = two_tasks(seed)
    culprit, *survivors = members(cluster, "big")
    cluster.report(culprit, "ecc_error")
    while culprit in members(cluster, "big"):
        cluster.decide()
    generation = cluster.state.tasks["big"].generation
    cluster.kill_worker(cluster.hosts[cluster.state.tasks["big"].workers[culprit].node], culprit)
    for worker in survivors:
        cluster.report(worker, "connection_broken", generation=generation - 1)
    cluster.run_but_isolation()
    (incident,) = cluster.state.closed_incidents
    assert (incident.kind, incident.severity, incident.worker) == ("ecc_error", Severity.SEV1, culprit)
    assert incident.symptoms >= 2


@pytest.mark.parametrize("seed", SEEDS)
def test_isolation_lets_reporter_of_answered_break_leave_by_plan(seed: int) -> None:
    """The reattempt has held, and the incident waits for another worker to join: its reporter has done nothing."""
    cluster, (reporter, _) = two_survivors(seed)
    cluster.report(reporter, "connection_broken")
    cluster.pass_deadlines("symptom")
    cluster.decide()
    cluster.obey_all()
    assert cluster.group_up("big")
    (incident,) = [i for i in cluster.state.incidents.values() if i.kind == "connection_broken"]
    assert incident.resumed_us and incident.worker == reporter

    mark = len(cluster.log)
    isolate(cluster, incident.node)
    cluster.run_but_isolation()
    cluster.assert_whole()
    assert not said(cluster, v.IncidentEscalated, mark)
    assert reporter in [parked.worker for parked in said(cluster, v.WorkerPaused, mark)], "it handed over"


@pytest.mark.parametrize("seed", SEEDS)
def test_isolation_gives_up_reporter_of_unanswered_break(seed: int) -> None:
    """The incident is no symptom any more, so there is no reattempt: something has to answer the break."""
    cluster = two_tasks(seed)
    reporter = members(cluster, "big")[0]
    break_group(cluster, "big", reporter)
    cluster.pass_deadlines("symptom")
    isolate(cluster, cluster.state.tasks["big"].workers[reporter].node)
    cluster.run_but_isolation()
    cluster.assert_whole()
    assert [escalated.worker for escalated in said(cluster, v.IncidentEscalated)] == [reporter]


def isolate(cluster: MiniCluster, node: str) -> None:
    cluster.append(v.NodeIsolated(node=node, until_us=None, reason="test"), "coordinator", cluster.state.term)


def test_calm_resets_count_of_breaks() -> None:
    cluster = two_tasks(2)
    for _ in range(6):
        break_group(cluster, "big", members(cluster, "big")[0])
        cluster.run()
        cluster.train("big", CALM_ITERATIONS)
    assert not said(cluster, v.IncidentEscalated) and len(cluster.state.closed_incidents) == 6


@pytest.mark.parametrize("kind", sorted(kind for kind, severity in SEVERITY.items() if severity is Severity.SEV2))
def test_erroneous_worker_that_survives_is_restarted(kind: str) -> None:
    """A hang does not end by itself, nor does a process whose exit hangs."""
    cluster = two_tasks(3)
    culprit = members(cluster, "big")[2]
    cluster.report(culprit, kind)
    cluster.run()
    cluster.assert_whole()
    (escalated,) = said(cluster, v.IncidentEscalated)
    assert escalated.worker == culprit and "still runs" in escalated.reason
    assert culprit not in members(cluster, "big") and len(members(cluster, "big")) == 3
    (incident,) = cluster.state.closed_incidents
    assert (incident.kind, incident.severity, incident.place) == (kind, Severity.SEV2, "rank 2, iteration 1, reduce")


def test_hang_gets_short_deadline_and_exception_exit_time() -> None:
    cluster = two_tasks(3)
    cluster.report(members(cluster, "big")[0], "hang")
    cluster.report(members(cluster, "small")[0], "exception")
    lengths = {name: us for name, us in cluster.standing().items() if name.startswith("exit:")}
    assert sorted(lengths.values()) == [int(cluster.policy.symptom_window_s * 1e6), int(cluster.policy.exit_s * 1e6)]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", ["ecc_error", "driver_error", "nvlink_error"])
def test_broken_machine_is_isolated_at_once(kind: str, seed: int) -> None:
    cluster = two_tasks(seed)
    culprit = members(cluster, "big")[0]
    node = cluster.state.tasks["big"].workers[culprit].node
    cluster.report(culprit, kind)
    cluster.run_but_isolation()
    assert cluster.state.nodes[node].isolation.active
    assert not [w for t in cluster.state.tasks.values() for w in t.workers.values() if w.node == node]
    assert cluster.state.closed_incidents[-1].response == "reconfigure"


@pytest.mark.parametrize("seed", SEEDS)
def test_poisoned_work_ends_task_with_its_place(seed: int) -> None:
    """A poisoned sample: whoever gets it dies, in the same iteration, for ever."""
    cluster = two_tasks(seed)
    for _ in range(60):
        task = cluster.state.tasks["big"]
        if task.status is not TaskStatus.ACTIVE:
            break
        able = [w for w in task.workers.values() if w.status is WorkerStatus.MEMBER and task.confirmed]
        if able:
            victim = able[0]
            cluster.report(victim.worker, "nan_loss", iteration=17)
            cluster.kill_worker(cluster.hosts[victim.node], victim.worker)
        cluster.run()
    task = cluster.state.tasks["big"]
    assert task.status is TaskStatus.FAILED
    assert "nan_loss" in task.ending.reason and "iteration 17" in task.ending.reason
    assert len(said(cluster, v.StartWorker)) < 30
    cluster.run()
    assert not any(node.isolation.active for node in cluster.state.nodes.values()), "the task was at fault"


def test_simultaneous_exits_count_as_one_strike() -> None:
    """Eight processes of one node that go down with each other are no eight failed restarts."""
    cluster = MiniCluster(4, Policy(stuck_max=4))
    cluster.add_host("n0", slots=8)
    cluster.submit("wide", max_workers=8)
    cluster.run()
    for _ in range(1, 4):
        cluster.train("wide")
        for worker in list(cluster.hosts["n0"].processes):
            cluster.kill_worker(cluster.hosts["n0"], worker)
        assert (cluster.state.tasks["wide"].troubles.stuck, cluster.state.tasks["wide"].troubles.strikes) == (
            1,
            {"n0": 1},
        )
        cluster.run()
        cluster.assert_whole()
    assert cluster.state.tasks["wide"].status is TaskStatus.ACTIVE
    assert not said(cluster, v.NodeIsolated)


def test_refused_starts_count_for_task_alone() -> None:
    cluster = MiniCluster(4, Policy(strikes_max=3))
    cluster.add_host("n0")
    cluster.submit("bad")
    for number in range(1, 4):
        fail_start(cluster)
        troubles = cluster.state.tasks["bad"].troubles
        assert troubles.crashes is not None and (troubles.crashes.count, troubles.stuck) == (number, number)
    cluster.add_host("n1")
    cluster.run()
    assert not troubles.strikes and not said(cluster, v.NodeIsolated)
    assert [worker.node for worker in cluster.state.tasks["bad"].workers.values()] == ["n1"]


def test_last_node_is_never_isolated_for_task_fault() -> None:
    cluster = MiniCluster(4)
    cluster.add_host("n0")
    cluster.submit("bad")
    for _ in range(8):
        fail_start(cluster)
    cluster.decide()
    assert not said(cluster, v.NodeIsolated)
    assert "failed 8 times without a new iteration" in cluster.state.tasks["bad"].ending.reason
    cluster.submit("good")
    cluster.run()
    assert members(cluster, "good")


def fail_start(cluster: MiniCluster) -> None:
    while not cluster.state.tasks["bad"].workers:
        assert cluster.decide() or cluster.pass_deadlines("restart")
    (worker,) = cluster.state.tasks["bad"].workers.values()
    failed = v.CommandFailed(node="n0", command_id=worker.command_id, reason="no such file")
    cluster.hosts["n0"].commands.clear()
    cluster.say(cluster.hosts["n0"], failed)


@pytest.mark.parametrize("more", [0, 1])
@pytest.mark.parametrize("seed", SEEDS)
def test_node_with_healthy_replicas_is_not_isolated(seed: int, more: int) -> None:
    """Its third process ends as often as it is started, quicker than a step is made. It is started no more than twice
    between two steps, and the task neither stops nor fails."""
    cluster = MiniCluster(seed)
    for number in range(1 + more):
        cluster.add_host(f"n{number}", slots=3)
    cluster.submit("big", max_workers=3 * (1 + more))
    cluster.run()
    for _ in range(8):
        started = len(said(cluster, v.StartWorker))
        for _ in range(6):
            host = cluster.hosts["n0"]
            newest = max(host.processes, key=lambda name: int(name.rpartition(".")[2]))
            if len(host.processes) == 3:
                cluster.kill_worker(host, newest)
            cluster.run_but_isolation()
        assert len(said(cluster, v.StartWorker)) - started <= 2
        cluster.train("big")
        cluster.run_but_isolation()
    assert not said(cluster, v.NodeIsolated)
    assert cluster.state.tasks["big"].status is TaskStatus.ACTIVE and cluster.iterations["big"] == 8
    cluster.assert_whole()


@pytest.mark.parametrize("seed", SEEDS)
def test_progressing_task_survives_failures_on_two_other_nodes(seed: int) -> None:
    """They are isolated: that it trains elsewhere says whose fault it is."""
    cluster = MiniCluster(seed, UNBRAKED)
    for number in range(3):
        cluster.add_host(f"n{number}")
    cluster.submit("big", max_workers=3)
    cluster.run()
    for _ in range(2):
        for node in ("n0", "n1"):
            for worker in list(cluster.hosts[node].processes):
                cluster.kill_worker(cluster.hosts[node], worker)
        for _ in range(20):
            cluster.decide()
            cluster.obey_all()
            if cluster.group_up("big") and members(cluster, "big") and not cluster.state.tasks["big"].leavers:
                cluster.train("big")
                break
    cluster.run_but_isolation()
    assert cluster.state.tasks["big"].status is TaskStatus.ACTIVE
    assert sorted(event.node for event in said(cluster, v.NodeIsolated)) == ["n0", "n1"]
    assert [cluster.state.tasks["big"].workers[name].node for name in members(cluster, "big")] == ["n2"]


# --- severities that the configuration sets ------------------------------------------------------


def started(severity: dict) -> RecordedEvent:
    event = v.CoordinatorStarted(term=1, version="t", severity=severity)
    return RecordedEvent(
        10**6, 1, Envelope(producer="coordinator", boot=1, number=1, term=1, observed_at_us=1, event=event)
    )


def test_severity_overrides_last_for_coordinator_term() -> None:
    state = fold(ClusterState(), started({"nan_loss": 1}))
    assert severity_of("nan_loss", state.severity) is Severity.SEV1
    assert severity_of("exception", state.severity) is Severity.SEV2
    assert severity_of("never heard of", state.severity) is Severity.SEV2
    state = fold(state, _next(state))
    assert severity_of("nan_loss", state.severity) is Severity.SEV2


def _next(state: ClusterState) -> RecordedEvent:
    event = v.CoordinatorStarted(term=state.term + 1, version="t")
    envelope = Envelope(
        producer="coordinator", boot=state.term + 1, number=1, term=state.term + 1, observed_at_us=1, event=event
    )
    return RecordedEvent(state.seq + 1, 1, envelope)


def test_severity_override_changes_response() -> None:
    cluster = two_tasks(5)
    term = cluster.state.term + 1
    cluster.append(v.CoordinatorStarted(term=term, version="test", severity={"exception": 1}), "coordinator", term)
    culprit = members(cluster, "big")[0]
    node = cluster.state.tasks["big"].workers[culprit].node
    cluster.report(culprit, "exception")
    cluster.run_but_isolation()
    assert cluster.state.nodes[node].isolation.active


def test_missing_planned_group_is_called_despite_open_incident() -> None:
    """The worker at fault is on its way out by plan; the one that stays hangs, and its agent does not tell."""
    cluster = trained(2)
    leaving, staying = members(cluster, "big")
    cluster.add_host("n2")
    cluster.report(leaving, "nvlink_error")
    cluster.decide()
    while cluster.state.tasks["big"].generation < 2:
        assert cluster.decide()
    task = cluster.state.tasks["big"]
    assert task.membership is not None and not task.membership.urgent
    for _ in range(2):  # the first deadline finds who is late, the second who does not answer
        cluster.pass_deadlines("meet")
        cluster.decide()
    task = cluster.state.tasks["big"]
    assert task.membership is not None
    assert task.membership.urgent or not task.workers[staying].alive


def test_cause_on_other_node_in_later_group_opens_own_incident() -> None:
    cluster = trained(3)
    first, second, _ = members(cluster, "big")
    cluster.report(first, "nvlink_error")
    while cluster.state.tasks["big"].generation < 2:
        assert cluster.decide()
    cluster.report(second, "cuda_error", generation=1)
    causes = {incident.worker: incident.generations["big"] for incident in cluster.state.incidents.values()}
    assert causes == {first: 1, second: 2}
