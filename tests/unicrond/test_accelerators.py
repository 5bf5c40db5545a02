"""What accelerators tell, in the fold and in decisions: news, a restart, a node out of service."""

from __future__ import annotations

import pytest

from tests.unicrond.cluster import MiniCluster
from tests.unicrond.test_decide import members, two_tasks
from tests.unicrond.test_escalation import said
from unicrond.core.decide import decide
from unicrond.core.rules.survey import Survey
from unicrond.core.state.state import Severity
from unicrond.events import vocabulary as v

SEEDS = range(10)


def report(cluster: MiniCluster, node: str, kind: v.ErrorKind | None, worker: str = "", xid: int = 0) -> None:
    event = v.AcceleratorReported(
        node=node, accelerator="GPU-1", worker=worker, kind=kind, xid=xid, message=f"XID {xid}: test"
    )
    cluster.say(cluster.hosts[node], event)


def node_of(cluster: MiniCluster, worker: str) -> str:
    return cluster.state.tasks[worker.rpartition(".")[0]].workers[worker].node


@pytest.mark.parametrize("seed", SEEDS)
def test_broken_gpu_takes_node_out_of_service(seed: int) -> None:
    cluster = two_tasks(seed)
    worker = members(cluster, "big")[1]
    node = node_of(cluster, worker)
    report(cluster, node, "gpu_broken", worker, 79)
    cluster.run_but_isolation()
    (isolated,) = said(cluster, v.NodeIsolated)
    assert isolated.node == node and "GPU-1: XID 79" in isolated.reason
    (incident,) = cluster.state.closed_incidents
    assert (incident.severity, incident.kind, incident.response) == (Severity.SEV1, "gpu_broken", "reconfigure")
    assert node not in {w.node for task in cluster.state.tasks.values() for w in task.workers.values()}
    cluster.run()
    cluster.assert_whole()


@pytest.mark.parametrize("seed", SEEDS)
def test_gpu_fault_restarts_its_process(seed: int) -> None:
    cluster = two_tasks(seed)
    worker = members(cluster, "big")[1]
    node = node_of(cluster, worker)
    report(cluster, node, "gpu_fault", worker, 94)
    cluster.run()
    cluster.assert_whole()
    assert not said(cluster, v.NodeIsolated) and worker not in members(cluster, "big")
    (incident,) = cluster.state.closed_incidents
    assert (incident.severity, incident.worker, incident.node) == (Severity.SEV2, worker, node)


def test_worker_report_of_same_gpu_fault_counts_as_symptom() -> None:
    cluster = two_tasks(1)
    worker = members(cluster, "big")[0]
    report(cluster, node_of(cluster, worker), "gpu_fault", worker, 94)
    cluster.report(worker, "ecc_error")
    assert len(cluster.state.incidents) == 1
    report(cluster, node_of(cluster, worker), "gpu_broken", worker, 79)
    (incident,) = cluster.state.incidents.values()
    assert incident.symptoms == 2 and incident.severity is Severity.SEV1


def test_isolation_picks_node_with_broken_gpu() -> None:
    """Though a peer on another node was the first to report, and that was no mere symptom."""
    cluster = two_tasks(1)
    peer, worker = members(cluster, "big")[:2]
    assert node_of(cluster, peer) != node_of(cluster, worker)
    cluster.report(peer, "nccl_error")
    report(cluster, node_of(cluster, worker), "gpu_broken", worker, 79)
    node = node_of(cluster, worker)
    cluster.run_but_isolation()
    assert [event.node for event in said(cluster, v.NodeIsolated)] == [node]
    cluster.run()
    cluster.assert_whole()


def test_idle_broken_gpu_isolates_its_node() -> None:
    cluster = two_tasks(1)
    cluster.add_host("idle")
    cluster.run()
    workers = {node_of(cluster, worker): worker for task in ("big", "small") for worker in members(cluster, task)}
    report(cluster, "idle", "gpu_fault", xid=94)
    assert not cluster.state.incidents, "there is nothing to restart"
    nobody = "idle" if "idle" not in workers else next(iter(workers))
    before = len(cluster.state.closed_incidents)
    for _ in range(3):
        report(cluster, nobody, "gpu_broken", xid=79)
    (incident,) = cluster.state.incidents.values()
    assert (incident.node, incident.worker, incident.symptoms) == (nobody, "", 2)
    cluster.run_but_isolation()
    assert [event.node for event in said(cluster, v.NodeIsolated)] == [nobody]
    report(cluster, nobody, "gpu_broken", xid=79)
    assert not cluster.state.incidents and len(cluster.state.closed_incidents) == before + 1, (
        "it is out of service already"
    )
    cluster.run()
    cluster.assert_whole()


def test_fold_ignores_harmless_and_stale_gpu_reports() -> None:
    cluster = two_tasks(1)
    worker = members(cluster, "big")[1]
    node = node_of(cluster, worker)
    other = next(name for name in cluster.hosts if name != node)
    before = cluster.state
    report(cluster, node, None, worker, 63)
    report(cluster, node, "gpu_fault", "big.99", 94)
    report(cluster, other, "gpu_fault", worker, 94)
    report(cluster, node, "cuda_error", "gone.1", 8)
    assert (cluster.state.incidents, cluster.state.tasks) == (before.incidents, before.tasks)
    assert not cluster.decide()


def test_break_of_the_group_that_goes_on_is_an_echo_of_the_worker_given_up() -> None:
    """The group that has been reattempted breaks again before its faulty worker's time is up: both times are up at
    once, one worker is given up, and one incident tells of it."""
    cluster = two_tasks(1)
    faulty, innocent, _ = members(cluster, "big")
    for worker in members(cluster, "big"):
        cluster.report(worker, "connection_broken")
    assert cluster.pass_deadlines("symptom")
    reattempt = decide(Survey(cluster.state, cluster.policy), {})
    report(cluster, node_of(cluster, faulty), "gpu_fault", faulty)  # while that is on its way to the log
    for event in reattempt:
        cluster.append(event, "coordinator", cluster.state.term)
    cluster.obey_all()
    cluster.group_up("big")
    cluster.train("big")
    (cause,) = cluster.state.incidents.values()
    assert cause.resumed_us and faulty in members(cluster, "big")

    cluster.report(innocent, "connection_broken", iteration=2)
    assert len(cluster.state.incidents) == 2
    assert cluster.pass_deadlines("exit") and cluster.pass_deadlines("symptom")
    mark = len(cluster.log)
    cluster.decide()
    events = [entry.envelope.event for entry in cluster.log[mark:]]
    assert [event.worker for event in events if isinstance(event, v.IncidentEscalated)] == [faulty]
    (incident,) = cluster.state.incidents.values()
    assert (incident.id, incident.resumed_us, incident.symptoms) == (cause.id, 0, cause.symptoms + 1)
    cluster.run()
    cluster.assert_whole()
    assert innocent in cluster.state.tasks["big"].workers
