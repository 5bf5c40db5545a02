"""Many nodes lost at once: one incident, and no machine to blame."""

from __future__ import annotations

import pytest

from tests.unicrond.cluster import MiniCluster
from tests.unicrond.test_deaf_head import returned
from tests.unicrond.test_departures import of
from tests.unicrond.test_liveness import NAMES, Bus, node
from unicrond.core.nodes.liveness import MOST_SILENT_FACTOR
from unicrond.core.state.state import NodeStatus
from unicrond.events import vocabulary as v

RACKS = [f"{rack}{number}" for rack in "abc" for number in range(3)]


class RackBus(Bus):
    """A bus that folds NodesLost too."""

    def kinds(self, seconds: float, alive: list[str]) -> list[str]:
        found: list[str] = []
        end_us = self.now_us + int(seconds * 1e6)
        while self.now_us < end_us:
            self.now_us += 100_000
            if self.now_us % 500_000 == 0:
                self.beat("coordinator")
            for place, name in enumerate(alive):
                if self.now_us % 1_000_000 == 100_000 * (place % 9):
                    self.beat(name)
            for verdict in self.liveness.verdicts(self.nodes, self.now_us):
                found.append(type(verdict).__name__)
                names = verdict.nodes_named()
                status = NodeStatus.UP if isinstance(verdict, v.NodeReturned) else NodeStatus.LOST
                self.nodes = {**self.nodes, **{name: node(name, status) for name in names}}
        return found


def test_rack_whose_nodes_beat_at_different_times_is_lost_as_one() -> None:
    bus = RackBus(RACKS)
    assert bus.kinds(5, RACKS) == []
    found = bus.kinds(4, RACKS[:6])
    assert found == ["NodesLost"]
    assert bus.kinds(4, RACKS) == ["NodeReturned"] * 3


def test_few_nodes_are_lost_each_by_itself_and_at_once() -> None:
    bus = RackBus(RACKS)
    bus.kinds(5, RACKS)
    assert bus.kinds(4, RACKS[:7]) == ["NodeLost"] * 2
    bus = RackBus(NAMES)
    bus.kinds(5, NAMES)
    limit_s = bus.liveness.limit_us / 1e6
    assert bus.kinds(limit_s - 0.5, NAMES[1:]) == [] and bus.kinds(0.7, NAMES[1:]) == ["NodeLost"]


def test_most_nodes_are_lost_as_one_after_longer() -> None:
    bus = RackBus(NAMES)
    bus.kinds(5, NAMES)
    limit_s = bus.liveness.limit_us / 1e6 * MOST_SILENT_FACTOR
    assert bus.kinds(limit_s - 1, NAMES[:1]) == []
    assert bus.kinds(2.5, NAMES[:1]) == ["NodesLost"]


def rack_cluster(seed: int) -> MiniCluster:
    cluster = MiniCluster(seed)
    for name in RACKS:
        cluster.add_host(name)
    cluster.submit("big", max_workers=5)
    cluster.submit("small", max_workers=4)
    cluster.run()
    cluster.train("big", 3)
    cluster.train("small", 3)
    return cluster


def lose_rack(cluster: MiniCluster, names: list[str]) -> None:
    for name in names:
        cluster.kill_host(cluster.hosts[name])
    cluster.append(v.NodesLost(nodes=tuple(names), reason="silent"), "coordinator", cluster.state.term)


@pytest.mark.parametrize("seed", range(6))
def test_lost_rack_is_one_incident_one_failure_one_plan(seed: int) -> None:
    cluster = rack_cluster(seed)
    since = len(cluster.log)
    lose_rack(cluster, RACKS[:3])
    (incident,) = cluster.state.incidents.values()
    assert incident.kind == "domain_lost" and incident.nodes == tuple(RACKS[:3]) and incident.severity == 1
    assert incident.location == "nodes a0, a1, a2" and not incident.node
    cluster.run()
    cluster.assert_whole()
    assert [each.kind for each in cluster.state.closed_incidents] == ["domain_lost"]
    assert len(of(cluster, v.PlanAdopted, since)) == 1 and not of(cluster, v.NodeIsolated, since)
    assert cluster.state.ledger.failures == 1


@pytest.mark.parametrize("times", [1, 4])
def test_returns_from_outage_are_no_flaps(times: int) -> None:
    cluster = rack_cluster(1)
    for _ in range(times):
        lose_rack(cluster, RACKS[:3])
        cluster.run()
        for name in RACKS[:3]:
            cluster.add_host(name)
        cluster.run()
    cluster.assert_whole()
    assert not any(each.health.returns_us or each.isolation.active for each in cluster.state.nodes.values())
    lose_rack(cluster, RACKS[:3])
    for name in RACKS[:3]:
        cluster.hosts[name].up = True
        returned(cluster, name)
    cluster.run()
    assert not any(each.health.returns_us for each in cluster.state.nodes.values())
