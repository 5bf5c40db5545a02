"""Beats in, verdicts out: no false alarm, and no lost node overlooked."""

from __future__ import annotations

import pytest

from events import vocabulary as v
from unicrond.core.liveness import MOST_SILENT_FACTOR, OWN_NAME, SAY_AGAIN_US, Liveness, Said
from unicrond.core.state import Node, NodeStatus

BEAT_US = 1_000_000


def node(name: str, status: NodeStatus = NodeStatus.UP) -> Node:
    store = v.StoreAddress(host="127.0.0.1", port=1)
    return Node(
        name=name, status=status, slots=1, slots_max=1, address="127.0.0.1", store=store, agent_boot=7, joined_us=0
    )


class Bus:
    """Delivers beats to a Liveness every 100 ms of a counted time."""

    def __init__(self, names: list[str]) -> None:
        self.now_us = 0
        self.nodes = {name: node(name) for name in names}
        self.liveness = Liveness(BEAT_US, 0)
        self.own = True
        self.verdicts: list[v.AnyEvent] = []
        self._seq = 0
        self._numbers: dict[str, int] = {}

    def run(self, seconds: float, alive: list[str]) -> list[v.AnyEvent]:
        """Time passes; `alive` nodes beat each second, the coordinator twice as often."""
        found: list[v.AnyEvent] = []
        end_us = self.now_us + int(seconds * 1e6)
        while self.now_us < end_us:
            self.now_us += 100_000
            if self.own and self.now_us % (BEAT_US // 2) == 0:
                self.beat(OWN_NAME)
            for name in alive:
                if self.now_us % BEAT_US == 0:
                    self.beat(name)
            for verdict in self.liveness.verdicts(self.nodes, {}, self.now_us):
                found.append(verdict)
                status = NodeStatus.LOST if isinstance(verdict, v.NodeLost) else NodeStatus.UP
                self.nodes[verdict.node] = node(verdict.node, status)  # type: ignore[union-attr]
        return found

    def beat(self, name: str) -> None:
        self._seq += 1
        number = self._numbers[name] = self._numbers.get(name, 0) + 1
        beat = v.Heartbeat(node=name, agent_boot=7, beat=number, workers=1, load_milli=0, memory_free_bytes=0)
        self.liveness.heard(beat, self._seq, self.now_us, self.now_us)


NAMES = ["a", "b", "c", "d", "e"]


def test_a_silent_node_is_lost_within_the_limit_and_returns_with_its_beats() -> None:
    bus = Bus(NAMES)
    assert bus.run(5, NAMES) == []
    silent_from_us = bus.now_us
    (lost,) = bus.run(4, NAMES[1:])
    assert isinstance(lost, v.NodeLost) and lost.node == "a" and lost.evidence.beat_at_us == silent_from_us
    assert bus.liveness.limit_us == 2 * BEAT_US + 500_000
    (returned,) = bus.run(3, NAMES)
    assert isinstance(returned, v.NodeReturned) and returned.node == "a"


def test_it_is_lost_no_later_than_the_limit() -> None:
    bus = Bus(NAMES)
    bus.run(5, NAMES)
    assert bus.run(2.5, NAMES[1:]) == []
    assert len(bus.run(0.2, NAMES[1:])) == 1


@pytest.mark.parametrize("outage_s", [0.7, 1.5, 3, 10, 60])
def test_an_outage_of_the_bus_loses_nobody(outage_s: float) -> None:
    bus = Bus(NAMES)
    bus.run(5, NAMES)
    bus.own = False
    assert bus.run(outage_s, []) == []
    bus.own = True
    assert bus.run(20, NAMES) == []


def test_after_an_outage_a_node_that_stays_away_is_lost() -> None:
    bus = Bus(NAMES)
    bus.run(5, NAMES)
    bus.own = False
    bus.run(10, [])
    bus.own = True
    lost = bus.run(6, NAMES[1:])
    assert [verdict.node for verdict in lost] == ["a"]  # type: ignore[union-attr]


def test_an_outage_that_swallows_one_own_beat_gives_everybody_time_to_connect_again() -> None:
    bus = Bus(NAMES)
    bus.run(5, NAMES)
    bus._numbers[OWN_NAME] += 1
    assert bus.run(4, NAMES[1:]) == [], "a is only a little late to connect again"
    assert bus.run(1, NAMES) == []


def test_a_pause_of_ours_is_nobodys_silence() -> None:
    bus = Bus(NAMES)
    bus.run(5, NAMES)
    bus.now_us += 4_000_000  # nothing was read, nothing was judged
    assert bus.liveness.verdicts(bus.nodes, {}, bus.now_us) == []
    assert bus.liveness.suspects(bus.nodes, {}, bus.now_us) == []
    assert len(bus.run(3, NAMES[1:])) == 1


def test_who_is_late_is_a_suspect_before_it_is_lost() -> None:
    bus = Bus(NAMES)
    bus.run(5, NAMES)
    bus.run(1.4, NAMES[1:])
    assert bus.liveness.suspects(bus.nodes, {}, bus.now_us) == []
    bus.run(0.2, NAMES[1:])
    assert bus.liveness.suspects(bus.nodes, {}, bus.now_us) == ["a"]
    bus.own = False
    bus.run(1.2, [])
    assert bus.liveness.suspects(bus.nodes, {}, bus.now_us) == [], "now it is the bus"


def test_a_plan_waits_while_others_are_late_and_no_longer_than_a_node_may_be_silent() -> None:
    bus = Bus(NAMES)
    bus.run(5, NAMES)
    bus.run(1.8, NAMES[1:])

    def gathers(lost_us: int | None, now_us: int) -> bool:
        return bus.liveness.gathers(lost_us, bus.nodes, {}, now_us)

    lost_us, limit_us = bus.now_us, bus.liveness.limit_us
    assert bus.liveness.suspects(bus.nodes, {}, bus.now_us) == ["a"]
    assert gathers(lost_us, bus.now_us) and not gathers(None, bus.now_us)
    bus.run(0.7, NAMES[1:])
    bus.run(limit_us / 1e6 - 0.7, NAMES[2:])
    assert "b" in bus.liveness.suspects(bus.nodes, {}, bus.now_us)
    assert gathers(lost_us, lost_us + limit_us) and not gathers(lost_us, lost_us + limit_us + 1)


def test_a_plan_waits_for_nobody_where_all_others_are_heard() -> None:
    bus = Bus(NAMES)
    bus.run(5, NAMES)
    assert not bus.liveness.gathers(bus.now_us, bus.nodes, {}, bus.now_us)


def test_a_verdict_is_said_once_and_again_only_a_second_later() -> None:
    said = Said()
    evidence = v.Evidence(beat_seq=1, beat_at_us=1)
    lost, other = (v.NodeLost(node=name, evidence=evidence, reason="silent") for name in "ab")
    returned = v.NodeReturned(node="a", evidence=evidence)
    assert said.news([lost], 0) == [lost]
    assert said.news([lost, other, returned], SAY_AGAIN_US - 1) == [other, returned]
    assert said.news([lost, other], SAY_AGAIN_US) == [lost]


def test_when_most_fall_silent_they_are_given_longer() -> None:
    bus = Bus(NAMES)
    bus.run(5, NAMES)
    limit_s = bus.liveness.limit_us / 1e6
    assert bus.run(limit_s * MOST_SILENT_FACTOR - 0.1, NAMES[:1]) == []
    assert len(bus.run(1, NAMES[:1])) == 4


def test_a_beat_of_another_boot_returns_nobody() -> None:
    bus = Bus(NAMES)
    bus.run(5, NAMES)
    bus.run(4, NAMES[1:])
    beat = v.Heartbeat(node="a", agent_boot=8, beat=1, workers=0, load_milli=0, memory_free_bytes=0)
    bus.liveness.heard(beat, 999, bus.now_us, bus.now_us)
    assert bus.liveness.verdicts(bus.nodes, {}, bus.now_us) == []


def test_a_newer_agent_that_came_and_went_without_a_word_leaves_the_name_to_the_older() -> None:
    bus = Bus(["a"])
    bus.run(3, ["a"])
    newer = v.Heartbeat(node="a", agent_boot=8, beat=1, workers=0, load_milli=0, memory_free_bytes=0)
    bus.liveness.heard(newer, 99, bus.now_us, bus.now_us)
    assert [type(verdict) for verdict in bus.run(30, ["a"])] == [v.NodeLost, v.NodeReturned]


def test_an_older_agent_of_a_name_does_not_speak_for_the_newer_one() -> None:
    bus = Bus(["a", "b"])
    bus.run(4, ["a", "b"])

    def older(number: int) -> None:
        beat = v.Heartbeat(node="a", agent_boot=6, beat=number, workers=0, load_milli=0, memory_free_bytes=0)
        bus.liveness.heard(beat, 100 + number, bus.now_us, bus.now_us)

    found: list[v.AnyEvent] = []
    for number in range(1, 6):
        found += bus.run(1, ["b"])
        older(number)
    assert [type(verdict).__name__ for verdict in found] == ["NodeLost"]
