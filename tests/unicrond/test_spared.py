"""A fault that a person ordered is held against nobody, unless it is to count."""

from __future__ import annotations

import pytest

from tests.unicrond.cluster import MiniCluster
from tests.unicrond.test_decide import members
from tests.unicrond.test_escalation import said
from unicrond.core.rules.fault_targets import FaultOrder, injection_request
from unicrond.core.state.state import TaskStatus
from unicrond.events import vocabulary as v


def cluster_of(nodes: int = 3, **spec: object) -> MiniCluster:
    cluster = MiniCluster(1)
    for number in range(nodes):
        cluster.add_host(f"n{number}", slots=int(spec.get("tp", 1)))  # type: ignore[call-overload]
    cluster.submit("big", **{"max_workers": nodes, **spec})
    cluster.run()
    return cluster


def order(cluster: MiniCluster, kind: str, *, counts: bool, node: str | None = None, rank: int | None = None) -> str:
    """As `unicronctl inject` does; whom it is for."""
    asked = FaultOrder(kind=kind, task=None if rank is None else "big", node=node, rank=rank, counts=counts)  # type: ignore[arg-type]
    event = injection_request(asked, cluster.state, allowed=True)
    cluster.append(event, "api", cluster.state.term)
    cluster.decide()
    for host in cluster.hosts.values():
        host.commands = [entry for entry in host.commands if not isinstance(entry.envelope.event, v.InjectFault)]
    return event.fault.worker or event.node


def end_all_of(cluster: MiniCluster, worker: str) -> None:
    (host,) = [host for host in cluster.hosts.values() if worker in host.processes]
    cluster.kill_worker(host, worker)


@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize("kind", ["kill", "exit", "exception", "nan", "oom"])
def test_ordered_ends_are_no_strikes(kind: str, counts: bool) -> None:
    """Quicker than a step is made, again and again, on one node."""
    cluster = cluster_of()
    for _ in range(5):
        node = "n0"
        if cluster.state.nodes[node].isolation.active or cluster.state.tasks["big"].status is not TaskStatus.ACTIVE:
            break
        rank = [cluster.state.tasks["big"].workers[name].node for name in members(cluster, "big")].index(node)
        worker = order(cluster, kind, counts=counts, rank=rank)
        if kind in ("exception", "nan", "oom"):
            named = {"nan": "nan_loss", "oom": "out_of_memory"}.get(kind, kind)
            cluster.report(worker, named)
        end_all_of(cluster, worker)
        cluster.run_but_isolation()
    of_node = counts and kind in ("kill", "exit")  # the others are faults of the program
    assert [event.node for event in said(cluster, v.NodeIsolated)] == (["n0"] if of_node else [])
    assert (cluster.state.tasks["big"].troubles.stuck == 0) is not counts
    assert cluster.state.incidents_total >= 2, "it is an incident all the same"


def test_only_ordered_end_is_excluded_from_blame() -> None:
    """The next process of the place, and who ends in another way than was ordered."""
    cluster = cluster_of()
    end_all_of(cluster, order(cluster, "kill", counts=False, rank=0))
    cluster.run_but_isolation()
    assert cluster.state.tasks["big"].troubles.strikes == {}
    end_all_of(cluster, next(iter(cluster.hosts["n0"].processes)))
    assert cluster.state.tasks["big"].troubles.strikes == {"n0": 1}
    hung = order(cluster, "hang", counts=False, rank=0)
    node = cluster.state.tasks["big"].workers[hung].node
    end_all_of(cluster, hung)
    assert cluster.state.tasks["big"].troubles.strikes == {"n0": 1} | {node: 1}


def test_ordered_hang_is_no_strike() -> None:
    cluster = cluster_of()
    for _ in range(3):
        worker = order(cluster, "stop", counts=False, rank=0)
        cluster.report(worker, "hang")
        cluster.run_but_isolation()
    assert not said(cluster, v.NodeIsolated) and cluster.state.tasks["big"].troubles.strikes == {}
    assert len(said(cluster, v.IncidentEscalated)) == 3


def test_peers_of_ordered_end_are_excluded_from_blame() -> None:
    """The other ranks of its replica, wherever they run."""
    cluster = MiniCluster(2)
    for number in range(4):
        cluster.add_host(f"n{number}")
    cluster.submit("big", min_workers=2, max_workers=4, pp=2)
    cluster.run()
    task = cluster.state.tasks["big"]
    victim = task.workers[order(cluster, "kill", counts=False, rank=0)]
    mates = [worker.worker for worker in task.workers.values() if worker.replica == victim.replica]
    for worker in mates:
        end_all_of(cluster, worker)
    assert cluster.state.tasks["big"].troubles.strikes == {} and cluster.state.tasks["big"].troubles.stuck == 0
    cluster.run()
    cluster.assert_whole()


@pytest.mark.parametrize("counts", [False, True])
def test_ordered_node_kills_are_no_flapping(counts: bool) -> None:
    cluster = cluster_of(2)
    for _ in range(4):
        order(cluster, "kill", counts=counts, node="n0")
        cluster.kill_host(cluster.hosts["n0"])
        cluster.lose(cluster.hosts["n0"])
        cluster.run_but_isolation()
        cluster.add_host("n0")
        cluster.run_but_isolation()
        cluster.train("big")
    assert cluster.state.nodes["n0"].isolation.active is counts
    assert cluster.state.tasks["big"].status is TaskStatus.ACTIVE


def test_fault_counts_for_blame_by_default() -> None:
    assert not v.Fault(kind="kill").excluded_from_blame
