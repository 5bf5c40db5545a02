"""States in memory as the coordinator sees them: where copies go, what a task would start from, what is dropped."""

from __future__ import annotations

from msgspec.structs import replace

from tests.unicrond.cluster import MiniCluster
from unicrond.core.state.state import TaskStatus
from unicrond.core.tasks import memory_places
from unicrond.events import vocabulary as v


def service(node: str) -> v.MemoryService:
    return v.MemoryService(node=node, host="127.0.0.1", port=1, token="t")


def serving(*names: str) -> MiniCluster:
    cluster = MiniCluster(1)
    for name in names:
        join(cluster, name)
    return cluster


def join(cluster: MiniCluster, name: str) -> None:
    cluster.add_host(name, memory=service(name))


def keep(cluster: MiniCluster, node: str, iteration: int, *, origin: str = "") -> None:
    cluster.say(
        cluster.hosts[node],
        v.SnapshotStored(
            node=node,
            task="solo",
            shard=0,
            iteration=iteration,
            generation=1,
            origin=origin or node,
            size_bytes=10,
            duration_us=5,
        ),
    )


def told(cluster: MiniCluster) -> list[tuple[str, ...]]:
    """The peers of every membership, and of what is decided about peers alone, in order."""
    decided = [entry.envelope.event for entry in cluster.log]
    return [
        tuple(peer.node for peer in event.peers)
        for event in decided
        if isinstance(event, v.MembershipDecided | v.PeersDecided)
    ]


def test_copies_stay_on_same_nodes_as_cluster_changes() -> None:
    cluster = serving(*(f"n{number}" for number in range(20)))
    cluster.submit("solo")
    cluster.run()
    task = cluster.state.tasks["solo"]
    targets = target_nodes(cluster, "solo")
    assert len(targets) == memory_places.COPIES
    bystander = next(n for n in cluster.state.nodes if n not in targets and n != next(iter(task.workers.values())).node)
    before = len(told(cluster))
    cluster.kill_host(cluster.hosts[bystander])
    cluster.lose(cluster.hosts[bystander])
    cluster.run()
    assert target_nodes(cluster, "solo") == targets
    assert len(told(cluster)) == before, "nobody is told what has not changed"
    spread = {target_nodes(cluster, f"t{n}")[0] for n in range(40)}
    assert len(spread) > 8, "copies of many tasks spread over the cluster"


def target_nodes(cluster: MiniCluster, task: str) -> list[str]:
    return [one.node for one in memory_places.targets(memory_places.services(cluster.state.nodes.values()), task)]


def test_later_node_joins_peer_list() -> None:
    cluster = serving("n1")
    cluster.submit("solo")
    cluster.run()
    assert told(cluster)[-1] == ("n1",)
    join(cluster, "n2")
    cluster.run()
    assert set(told(cluster)[-1]) == {"n1", "n2"}
    count = len(told(cluster))
    cluster.run()
    assert len(told(cluster)) == count, "said once"


def test_agent_with_other_peers_gets_list_again() -> None:
    cluster = serving("n1", "n2")
    cluster.submit("solo")
    cluster.run()
    (worker,) = cluster.state.tasks["solo"].workers.values()
    count, peers = len(told(cluster)), told(cluster)[-1]
    agent = cluster.hosts[worker.node]
    cluster.say(agent, v.PeersRemembered(node=worker.node, task="solo", peers=peers))
    cluster.run()
    assert len(told(cluster)) == count, "it knows"
    # A full disk: what it was told last was not written down.
    cluster.say(agent, v.PeersRemembered(node=worker.node, task="solo", peers=(worker.node,)))
    cluster.run()
    assert told(cluster)[count:] == [peers]


def test_loss_of_last_replica_logs_its_cost() -> None:
    cluster = serving("n1", "n2")
    cluster.submit("solo")
    cluster.run()
    cluster.train("solo", steps=5)
    (worker,) = cluster.state.tasks["solo"].workers.values()
    keep(cluster, worker.node, 3)
    cluster.source = "memory"
    cluster.iterations["solo"] = 3
    cluster.kill_worker(cluster.hosts[worker.node], worker.worker)
    cluster.run()
    decided = [e.envelope.event for e in cluster.log if isinstance(e.envelope.event, v.MembershipDecided)][-1]
    assert decided.reason == f"no member has state: start from the memory of {worker.node} (iteration 3 or later)"
    closed = [e.envelope.event for e in cluster.log if isinstance(e.envelope.event, v.TransitionCompleted)][-1]
    assert closed.reason.endswith("no replica survived: 2 iterations lost, state from memory of a member's node")
    assert cluster.state.closed_incidents[-1].iterations_lost == 2


def test_states_of_finished_task_are_dropped_everywhere() -> None:
    cluster = serving("n1", "n2", "n3")
    cluster.submit("solo")
    cluster.run()
    for node in ("n1", "n2", "n3"):
        keep(cluster, node, 3, origin="n1")
    cluster.kill_host(cluster.hosts["n3"])
    cluster.lose(cluster.hosts["n3"])
    cluster.run()
    cluster.append(v.TaskCancelled(task="solo", reason="test"), "api", cluster.state.term)
    cluster.run()
    assert cluster.state.tasks["solo"].status is TaskStatus.CANCELLED
    dropped = [e.envelope.event.node for e in cluster.log if isinstance(e.envelope.event, v.DropState)]
    assert sorted(dropped) == ["n1", "n2"]
    join(cluster, "n3")
    keep(cluster, "n3", 3, origin="n1")
    cluster.run()
    assert not cluster.state.tasks["solo"].copies.holdings, (
        "told again by the node that has come back, and dropped there too"
    )


def test_nearest_source_is_checkpoint_if_memory_is_older() -> None:
    cluster = serving("n1", "n2")
    cluster.submit("solo")
    cluster.run()
    keep(cluster, "n1", 3)
    (worker,) = cluster.state.tasks["solo"].workers.values()
    about = {"node": worker.node, "task": "solo", "worker": worker.worker}
    host = cluster.hosts[worker.node]
    cluster.say(host, v.CheckpointSaved(**about, iteration=4, path="/c", size_bytes=1, duration_us=1))
    task = cluster.state.tasks["solo"]
    assert memory_places.nearest(cluster.state, task) == "the checkpoint of iteration 4, if it is valid"


def test_membership_says_which_checkpoint_is_known() -> None:
    """So that no worker goes on from an older state in memory while storage does not answer."""
    cluster = serving("n1", "n2")
    cluster.submit("solo")
    cluster.run()

    def decided() -> v.MembershipDecided:
        events = [entry.envelope.event for entry in cluster.log]
        return [event for event in events if isinstance(event, v.MembershipDecided)][-1]

    assert decided().storage_iteration is None, "nothing is committed yet: earlier runs may have left any"
    cluster.train("solo", 5)
    task = cluster.state.tasks["solo"]
    assert memory_places.newest_stored(task) == 0
    continued = replace(task.spec, start=v.TaskStart(run_id="r2", continues=("r1",)))
    assert memory_places.newest_stored(replace(task, spec=continued)) is None
    (worker,) = task.workers.values()
    about = {"node": worker.node, "task": "solo", "worker": worker.worker}
    host = cluster.hosts[worker.node]
    cluster.say(host, v.CheckpointSaved(**about, iteration=4, path="/c", size_bytes=1, duration_us=1))
    cluster.kill_host(host)
    cluster.lose(host)
    cluster.run()
    assert decided().generation > 1 and decided().storage_iteration == 4
