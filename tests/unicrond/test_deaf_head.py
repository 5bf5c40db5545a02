"""A head that hears none of its nodes: one incident of its own, and all goes on as before once they are heard."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.replay.test_verify import verify
from tests.seeds import at_most
from tests.unicrond.cluster import SECOND_US, MiniCluster, members
from tests.unicrond.test_decide import two_tasks
from tests.unicrond.test_departures import of
from tests.unicrond.test_liveness import BEAT_US, NAMES, Bus, node
from unicrond.core.nodes.liveness import MOST_SILENT_FACTOR, Liveness
from unicrond.core.state.state import NodeStatus, Silence
from unicrond.events import vocabulary as v
from unicrond.service.coordinator.alarms import silence_alarms

HOLD_S = 60.0


class DeafBus(Bus):
    """A bus whose coordinator folds what its Liveness concludes; `kinds`: of all of it, in order."""

    def __init__(self, names: list[str]) -> None:
        super().__init__(names)
        self.liveness = Liveness(BEAT_US, 0, silence_us=int(HOLD_S * SECOND_US))
        self.silence: Silence | None = None
        self.kinds: list[str] = []

    def run(self, seconds: float, alive: list[str]) -> list[v.AnyEvent]:
        begun = len(self.kinds)
        end_us = self.now_us + int(seconds * 1e6)
        while self.now_us < end_us:
            self.now_us += 100_000
            for name in (["coordinator"] if self.now_us % 500_000 == 0 else []) + alive:
                if name == "coordinator" or self.now_us % BEAT_US == 0:
                    self.beat(name)
            for verdict in self.liveness.verdicts(self.nodes, self.now_us, self.silence):
                self.kinds.append(type(verdict).__name__)
                if isinstance(verdict, v.SilenceHeld):
                    self.silence = Silence(since_us=1, nodes=verdict.nodes, incident="i1")
                elif isinstance(verdict, v.SilenceEnded):
                    self.silence = None
                else:
                    is_lost = isinstance(verdict, v.NodeLost)
                    if is_lost and self.silence is not None:
                        self.silence = Silence(since_us=1, nodes=1, incident="i1", are_lost=True)
                    name = verdict.node  # type: ignore[union-attr]
                    status = NodeStatus.LOST if is_lost else NodeStatus.UP
                    self.nodes = {**self.nodes, name: node(name, status)}
        return self.kinds[begun:]  # type: ignore[return-value]


@pytest.mark.parametrize("names", [NAMES, NAMES[:3], NAMES[:2]], ids=len)
@pytest.mark.parametrize("silent_s", [3, 8, 20, 50])
def test_silence_of_all_loses_no_node(names: list[str], silent_s: float) -> None:
    bus = DeafBus(names)
    assert bus.run(5, names) == []
    bus.run(silent_s, [])
    bus.run(20, names)
    assert bus.kinds in ([], ["SilenceHeld", "SilenceEnded"])
    limit_s = bus.liveness.limit_us / 1e6 * (MOST_SILENT_FACTOR if len(names) >= 3 else 1)
    assert bool(bus.kinds) is (silent_s > limit_s)


def test_silence_is_held_no_sooner_than_nodes_were_lost() -> None:
    bus = DeafBus(NAMES)
    bus.run(5, NAMES)
    limit_s = bus.liveness.limit_us / 1e6 * MOST_SILENT_FACTOR
    assert bus.run(limit_s - 0.1, []) == []
    assert bus.run(0.3, []) == ["SilenceHeld"]
    assert bus.run(20, []) == []


def test_new_head_that_hears_nobody_holds_silence() -> None:
    """It has heard no beat at all; a node that was up in its log is silent from its first look on."""
    bus = DeafBus(NAMES)
    assert bus.run(30, []) == ["SilenceHeld"]
    assert bus.run(10, NAMES) == ["SilenceEnded"]


def test_node_that_stays_away_is_lost_after_others_return() -> None:
    bus = DeafBus(NAMES)
    bus.run(5, NAMES)
    bus.run(30, [])
    bus.kinds.clear()
    return_s = bus.liveness.limit_us / 1e6 * MOST_SILENT_FACTOR
    assert bus.run(return_s, NAMES[1:]) == [], "it has some time to come back, too"
    assert bus.run(3, NAMES[1:]) == ["SilenceEnded", "NodeLost"]


def test_single_death_is_found_as_fast_as_ever() -> None:
    for names in (NAMES, NAMES[:2]):
        bus = DeafBus(names)
        bus.run(5, names)
        assert bus.run(bus.liveness.limit_us / 1e6, names[1:]) == []
        assert bus.run(0.2, names[1:]) == ["NodeLost"]


def test_late_beat_of_other_node_delays_no_loss() -> None:
    """One node is dead, and the only other one's beat is late at the limit: there was no silence of all."""
    bus = DeafBus(NAMES[:2])
    bus.run(5, NAMES[:2])
    bus.run(1.0, NAMES[1:2])
    assert bus.run(bus.liveness.limit_us / 1e6 - 1.0 + 0.2, []) == [], "n2's beat is late: it may be the head"
    bus.beat(NAMES[1])
    assert bus.run(0.2, []) == ["NodeLost"]


def test_nodes_that_beat_at_other_times_are_silent_together() -> None:
    bus = DeafBus(NAMES[:3])
    bus.run(5, NAMES[:3])
    for name in NAMES[1:3]:
        bus.run(0.4, [])
        bus.beat(name)
    assert bus.run(20, []) == ["SilenceHeld"]


def test_only_node_is_judged_as_ever() -> None:
    """A cluster of one node, and the last one that is up."""
    bus = DeafBus(NAMES[:1])
    bus.run(5, NAMES[:1])
    assert bus.run(5, []) == ["NodeLost"]
    bus = DeafBus(NAMES[:2])
    bus.run(5, NAMES[:2])
    assert bus.run(5, NAMES[:1]) == ["NodeLost"]
    assert bus.run(5, []) == ["NodeLost"]


def test_long_silence_loses_all_and_ends_with_return() -> None:
    bus = DeafBus(NAMES)
    bus.run(5, NAMES)
    found = bus.run(HOLD_S + 20, [])
    assert found == ["SilenceHeld", *["NodeLost"] * len(NAMES)]
    assert sorted(bus.run(10, NAMES)) == [*["NodeReturned"] * len(NAMES), "SilenceEnded"]


def test_head_that_takes_over_goes_on_with_silence() -> None:
    bus = DeafBus(NAMES)
    bus.run(5, NAMES)
    bus.run(20, [])
    assert bus.kinds == ["SilenceHeld"]
    bus.liveness = Liveness(BEAT_US, bus.now_us, silence_us=int(HOLD_S * SECOND_US))
    bus.liveness.grace(bus.now_us)
    assert bus.run(20, []) == [], "it has heard nobody either"
    assert bus.run(5, NAMES) == ["SilenceEnded"]


def test_silence_ends_where_no_node_is_left() -> None:
    bus = DeafBus(NAMES[:2])
    bus.run(20, [])
    bus.nodes = {name: node(name, NodeStatus.LEFT) for name in NAMES[:2]}
    assert bus.run(1, []) == ["SilenceEnded"]


@pytest.mark.parametrize("seed", range(at_most(30)))
def test_no_node_is_lost_while_none_is_heard(seed: int) -> None:
    """Random spells of silence, of all nodes at once: whatever follows what, nobody is lost."""
    draw = random.Random(seed)
    bus = DeafBus(NAMES[: draw.randint(2, 5)])
    names = list(bus.nodes)
    for _ in range(12):
        bus.run(draw.uniform(1.0, 15.0), names)
        bus.run(draw.uniform(0.5, HOLD_S * 0.9), [])
    bus.run(20, names)
    assert set(bus.kinds) <= {"SilenceHeld", "SilenceEnded"} and bus.silence is None


# --- what the log makes of it ------------------------------------------------------------------------


def held(cluster: MiniCluster) -> None:
    nodes = sum(each.status is NodeStatus.UP for each in cluster.state.nodes.values())
    cluster.append(v.SilenceHeld(nodes=nodes, reason="silent"), "coordinator", cluster.state.term)


def ended(cluster: MiniCluster) -> None:
    cluster.append(v.SilenceEnded(reason="heard"), "coordinator", cluster.state.term)


def returned(cluster: MiniCluster, name: str) -> None:
    evidence = v.Evidence(beat_seq=1, beat_at_us=cluster.now_us)
    cluster.append(v.NodeReturned(node=name, evidence=evidence), "coordinator", cluster.state.term)


def workers(cluster: MiniCluster) -> dict[str, Any]:
    return {task.name: (task.generation, members(cluster, task.name)) for task in cluster.state.active}


@pytest.mark.parametrize("seed", range(6))
def test_held_silence_is_one_incident_and_decides_nothing(seed: int) -> None:
    cluster = two_tasks(seed)
    before, plan, since = workers(cluster), cluster.state.plan, len(cluster.log)
    held(cluster)
    (incident,) = cluster.state.incidents.values()
    assert incident.kind == "head_deaf" and incident.tasks == () and not incident.node
    assert "hears none of" in incident.message and len(silence_alarms(cluster.state)) == 1
    cluster.kill_worker(*next((host, name) for host in cluster.hosts.values() for name in host.processes))
    cluster.submit("late")
    assert cluster.standing() == {}, "no time limit of a node runs"
    assert not cluster.decide(), "nobody would hear it"
    ended(cluster)
    assert silence_alarms(cluster.state) == []
    cluster.run()
    cluster.assert_whole()
    assert not cluster.state.incidents and plan.epoch < cluster.state.plan.epoch, "the new task got its plan"
    assert not of(cluster, v.NodeLost, since) and not of(cluster, v.NodeIsolated, since)
    assert before.keys() <= workers(cluster).keys()
    assert cluster.state.ledger.failures == 1, "the worker's death, and not the silence"


@pytest.mark.parametrize("seed", range(6))
def test_state_is_as_before_once_nodes_are_heard(seed: int) -> None:
    cluster = two_tasks(seed)
    before, plan = workers(cluster), cluster.state.plan
    since = len(cluster.log)
    held(cluster)
    cluster.run()
    ended(cluster)
    cluster.run()
    assert workers(cluster) == before and cluster.state.plan == plan
    assert not of(cluster, v.StopWorker, since) and not cluster.state.incidents
    assert [incident.kind for incident in cluster.state.closed_incidents] == ["head_deaf"]
    assert cluster.state.ledger.failures == 0
    verify(cluster.log)


@pytest.mark.parametrize("seed", range(6))
def test_workers_of_nodes_lost_in_silence_train_on_at_return(seed: int) -> None:
    cluster = two_tasks(seed)
    before, since = workers(cluster), len(cluster.log)
    held(cluster)
    for host in cluster.hosts.values():
        cluster.lose(host)
    (incident,) = cluster.state.incidents.values()
    assert incident.severity == 1 and cluster.state.silence is not None and cluster.state.silence.are_lost
    cluster.run()
    for name in cluster.hosts:
        returned(cluster, name)
        cluster.run()
    ended(cluster)
    cluster.run()
    assert workers(cluster) == before and not of(cluster, v.StopWorker, since)
    assert not of(cluster, v.PlanAdopted, since) and not cluster.state.incidents
    assert [each.kind for each in cluster.state.closed_incidents] == ["head_deaf"]
    assert not any(each.health.returns_us for each in cluster.state.nodes.values()), "no flap"


@pytest.mark.parametrize("seed", range(6))
def test_node_lost_in_silence_that_stays_away_is_lost(seed: int) -> None:
    cluster = two_tasks(seed)
    held(cluster)
    away, *others = cluster.hosts.values()
    for host in cluster.hosts.values():
        cluster.lose(host)
    cluster.kill_host(away)
    for host in others:
        returned(cluster, host.name)
    cluster.run()
    ended(cluster)
    cluster.run()
    cluster.assert_whole()
    assert cluster.state.nodes[away.name].status is NodeStatus.LOST
    assert all(each.node != away.name for task in cluster.state.active for each in task.membership.members)  # type: ignore[union-attr]
    assert [each.kind for each in cluster.state.closed_incidents] == ["head_deaf"], "one incident, also for that"


def test_agents_that_come_back_without_workers_are_part_of_silence() -> None:
    """The power was off: all nodes were silent, then join anew with nothing."""
    cluster = two_tasks(1)
    held(cluster)
    for host in cluster.hosts.values():
        cluster.kill_host(host)
        cluster.add_host(host.name)
    ended(cluster)
    cluster.run()
    cluster.assert_whole()
    assert [each.kind for each in cluster.state.closed_incidents] == ["head_deaf"]
    assert cluster.state.ledger.failures == 1
