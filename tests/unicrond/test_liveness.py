"""Beats in, verdicts out: no false alarm, and no lost node overlooked."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace

from tests.seeds import at_most
from unicrond.core.nodes.deafness import PAUSES_MAX, Pauses
from unicrond.core.nodes.liveness import (
    MOST_SILENT_FACTOR,
    OWN_NAME,
    RECONNECT_US,
    SAY_AGAIN_US,
    Flood,
    Liveness,
    VerdictLimiter,
)
from unicrond.core.state.node_parts import AgentIdentity
from unicrond.core.state.state import Node, NodeStatus
from unicrond.events import vocabulary as v
from unicrond.service.coordinator.alarms import FLOOD_MESSAGES, flood_alarms

BEAT_US = 1_000_000


def node(name: str, status: NodeStatus = NodeStatus.UP) -> Node:
    store = v.StoreAddress(host="127.0.0.1", port=1)
    return Node(
        name=name,
        status=status,
        slots=1,
        slots_max=1,
        address="127.0.0.1",
        store=store,
        agent=AgentIdentity(boot=7),
        joined_us=0,
    )


def heartbeat(name: str, number: int) -> v.Heartbeat:
    return v.Heartbeat(node=name, agent_boot=7, beat=number, workers=1, load_milli=0, memory_free_bytes=0)


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
        #: Which of its own beats came back last, of each that says so; those in `deaf` hear nothing.
        self.echoes: dict[str, int] = {}
        self.deaf: set[str] = set()

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
            for verdict in self.liveness.verdicts(self.nodes, self.now_us):
                found.append(verdict)
                status = NodeStatus.UP if isinstance(verdict, v.NodeReturned) else NodeStatus.LOST
                self.nodes = {**self.nodes, **{name: node(name, status) for name in verdict.nodes_named()}}
        return found

    def beat(self, name: str, at_us: int | None = None) -> None:
        self._seq += 1
        number = self._numbers[name] = self._numbers.get(name, 0) + 1
        at_us = self.now_us if at_us is None else at_us
        if name == OWN_NAME:
            self.liveness.on_own_beat(self.now_us)
        beat = replace(heartbeat(name, number), echo_beat=self.echoes.get(name, 0))
        if name in self.echoes and name not in self.deaf:
            self.echoes[name] = number
        self.liveness.on_beat(beat, self._seq, at_us, self.now_us)

    def echo(self, names: list[str]) -> None:
        """From now on these say which of their beats came back."""
        self.echoes = {name: self._numbers.get(name, 0) for name in names}


NAMES = ["a", "b", "c", "d", "e"]


def test_silent_node_is_lost_and_returns_with_beats() -> None:
    bus = Bus(NAMES)
    assert bus.run(5, NAMES) == []
    silent_from_us = bus.now_us
    (lost,) = bus.run(4, NAMES[1:])
    assert isinstance(lost, v.NodeLost) and lost.node == "a" and lost.evidence.beat_at_us == silent_from_us
    assert bus.liveness.limit_us == 2 * BEAT_US + 500_000
    (returned,) = bus.run(3, NAMES)
    assert isinstance(returned, v.NodeReturned) and returned.node == "a"


def test_silent_node_is_lost_at_limit() -> None:
    bus = Bus(NAMES)
    bus.run(5, NAMES)
    assert bus.run(2.5, NAMES[1:]) == []
    assert len(bus.run(0.2, NAMES[1:])) == 1


@pytest.mark.parametrize("outage_s", [0.7, 1.5, 3, 10, 60])
def test_bus_outage_loses_no_node(outage_s: float) -> None:
    bus = Bus(NAMES)
    bus.run(5, NAMES)
    bus.own = False
    assert bus.run(outage_s, []) == []
    bus.own = True
    assert bus.run(20, NAMES) == []


def test_node_absent_after_outage_is_lost() -> None:
    bus = Bus(NAMES)
    bus.run(5, NAMES)
    bus.own = False
    bus.run(10, [])
    bus.own = True
    lost = bus.run(6, NAMES[1:])
    assert [verdict.node for verdict in lost] == ["a"]  # type: ignore[union-attr]


def test_short_outage_gives_all_nodes_time_to_reconnect() -> None:
    bus = Bus(NAMES)
    bus.run(5, NAMES)
    bus._numbers[OWN_NAME] += 1
    assert bus.run(4, NAMES[1:]) == [], "a is only a little late to connect again"
    assert bus.run(1, NAMES) == []


def test_own_pause_counts_as_no_silence() -> None:
    bus = Bus(NAMES)
    bus.run(5, NAMES)
    bus.now_us += 4_000_000  # nothing was read, nothing was judged
    assert bus.liveness.verdicts(bus.nodes, bus.now_us) == []
    assert bus.liveness.suspects(bus.nodes, bus.now_us) == []
    assert len(bus.run(3, NAMES[1:])) == 1


def test_late_node_is_suspect_before_loss() -> None:
    bus = Bus(NAMES)
    bus.run(5, NAMES)
    bus.run(1.4, NAMES[1:])
    assert bus.liveness.suspects(bus.nodes, bus.now_us) == []
    bus.run(0.2, NAMES[1:])
    assert bus.liveness.suspects(bus.nodes, bus.now_us) == ["a"]
    bus.own = False
    bus.run(1.2, [])
    assert bus.liveness.suspects(bus.nodes, bus.now_us) == [], "now it is the bus"


def test_plan_waits_for_suspects_up_to_limit() -> None:
    bus = Bus(NAMES)
    bus.run(5, NAMES)
    bus.run(1.8, NAMES[1:])

    def gathers(lost_us: int | None, now_us: int) -> bool:
        return bus.liveness.gathers(lost_us, bus.nodes, now_us)

    lost_us, limit_us = bus.now_us, bus.liveness.limit_us
    assert bus.liveness.suspects(bus.nodes, bus.now_us) == ["a"]
    assert gathers(lost_us, bus.now_us) and not gathers(None, bus.now_us)
    bus.run(0.7, NAMES[1:])
    bus.run(limit_us / 1e6 - 0.7, NAMES[2:])
    assert "b" in bus.liveness.suspects(bus.nodes, bus.now_us)
    assert gathers(lost_us, lost_us + limit_us) and not gathers(lost_us, lost_us + limit_us + 1)


def test_plan_waits_for_no_suspect_if_all_beat() -> None:
    bus = Bus(NAMES)
    bus.run(5, NAMES)
    assert not bus.liveness.gathers(bus.now_us, bus.nodes, bus.now_us)


def test_verdict_repeats_only_after_a_second() -> None:
    said = VerdictLimiter()
    evidence = v.Evidence(beat_seq=1, beat_at_us=1)
    lost, other = (v.NodeLost(node=name, evidence=evidence, reason="silent") for name in "ab")
    returned = v.NodeReturned(node="a", evidence=evidence)
    assert said.news([lost], 0) == [lost]
    assert said.news([lost, other, returned], SAY_AGAIN_US - 1) == [other, returned]
    assert said.news([lost, other], SAY_AGAIN_US) == [lost]


def test_mass_silence_extends_limit() -> None:
    bus = Bus(NAMES)
    bus.run(5, NAMES)
    limit_s = bus.liveness.limit_us / 1e6
    assert bus.run(limit_s * MOST_SILENT_FACTOR - 0.1, NAMES[:1]) == []
    (outage,) = bus.run(1, NAMES[:1])
    assert isinstance(outage, v.NodesLost) and outage.nodes == tuple(NAMES[1:])


def test_beat_of_other_boot_returns_no_node() -> None:
    bus = Bus(NAMES)
    bus.run(5, NAMES)
    bus.run(4, NAMES[1:])
    beat = v.Heartbeat(node="a", agent_boot=8, beat=1, workers=0, load_milli=0, memory_free_bytes=0)
    bus.liveness.on_beat(beat, 999, bus.now_us, bus.now_us)
    assert bus.liveness.verdicts(bus.nodes, bus.now_us) == []


def test_brief_newer_agent_leaves_name_to_older() -> None:
    bus = Bus(["a"])
    bus.run(3, ["a"])
    newer = v.Heartbeat(node="a", agent_boot=8, beat=1, workers=0, load_milli=0, memory_free_bytes=0)
    bus.liveness.on_beat(newer, 99, bus.now_us, bus.now_us)
    assert [type(verdict) for verdict in bus.run(30, ["a"])] == [v.NodeLost, v.NodeReturned]


def test_older_agent_never_beats_for_newer() -> None:
    bus = Bus(["a", "b"])
    bus.run(4, ["a", "b"])

    def older(number: int) -> None:
        beat = v.Heartbeat(node="a", agent_boot=6, beat=number, workers=0, load_milli=0, memory_free_bytes=0)
        bus.liveness.on_beat(beat, 100 + number, bus.now_us, bus.now_us)

    found: list[v.AnyEvent] = []
    for number in range(1, 6):
        found += bus.run(1, ["b"])
        older(number)
    assert [type(verdict).__name__ for verdict in found] == ["NodeLost"]


# --- whose fault it is that own beats are late -------------------------------------------------------


def late_own(bus: Bus, seconds: float, *, behind: bool = False, events: bool = False, nodes: bool = True) -> None:
    """Own beats do not come. `behind`: what is read was said before. `events`: other things come."""
    begin_us = bus.now_us
    while bus.now_us < begin_us + int(seconds * 1e6):
        bus.now_us += 100_000
        if nodes:
            for name in NAMES:
                bus.beat(name, at_us=begin_us + 1000 if behind else bus.now_us)
        if events:
            bus.liveness.on_message(bus.now_us)
        bus.liveness.on_own_beat(bus.now_us)
        assert bus.liveness.verdicts(bus.nodes, bus.now_us) == []


def fault(bus: Bus) -> tuple[bool, bool]:
    return bus.liveness.bus_works, bus.liveness.is_silent


def test_silent_bus_counts_as_broken() -> None:
    bus = Bus(NAMES)
    bus.run(5, NAMES)
    late_own(bus, 0.9, nodes=False)
    assert fault(bus) == (True, False)
    late_own(bus, 0.2, nodes=False)
    assert fault(bus) == (False, True)
    bus.beat(OWN_NAME)
    assert fault(bus) == (True, False)


def test_unread_own_beats_blame_no_bus() -> None:
    """This process reads slower than beats come: no node is judged, and nobody is blamed."""
    bus = Bus(NAMES)
    bus.run(5, NAMES)
    late_own(bus, 60, behind=True)
    assert fault(bus) == (True, False)
    assert bus.run(1, []) == []
    bus.beat(OWN_NAME)
    assert bus.run(4, NAMES[1:]) == [], "all have a fresh grace period"
    assert len(bus.run(1, NAMES[1:])) == 1


def test_overtaken_own_beats_count_as_missing() -> None:
    bus = Bus(NAMES)
    bus.run(5, NAMES)
    late_own(bus, 1.3)
    assert fault(bus) == (False, False)


def test_delayed_own_beats_count_as_late() -> None:
    bus = Bus(NAMES)
    bus.run(5, NAMES)
    bus.liveness.on_own_beat(bus.now_us)
    bus.now_us += 3_000_000
    for name in NAMES:
        bus.beat(name)
    bus.liveness.on_own_beat(bus.now_us)
    late_own(bus, 1.3, behind=True)
    assert fault(bus) == (True, False)


def test_event_traffic_extends_limit_of_own_beats() -> None:
    bus = Bus(NAMES)
    bus.run(5, NAMES)
    late_own(bus, 9.5, events=True, nodes=False)
    assert fault(bus) == (True, False)
    late_own(bus, 1, events=True, nodes=False)
    assert fault(bus) == (False, False)


# --- the quick computation and the plain one --------------------------------------------------------


class Plain:
    """The same questions, answered from all that was ever seen, with a look at every node."""

    def __init__(self, now_us: int) -> None:
        self.pauses: list[tuple[int, int]] = []
        self.signs_us: dict[str, int] = {}
        self.beats_us: dict[str, int] = {}
        self.judged_us = self.grace_us = self.reconnected_us = self.own_us = now_us
        self.judges = True

    def grace(self, now_us: int) -> None:
        self.grace_us = self.own_us = now_us
        self.reconnected_us = now_us + RECONNECT_US

    def on_beat(self, name: str, now_us: int) -> None:
        if name == OWN_NAME:
            if not self.judges:
                self.judges = True
                self.grace(now_us)
            self.own_us = now_us
        else:
            self.signs_us[name] = self.beats_us[name] = now_us

    def attended_us(self, since_us: int, now_us: int) -> int:
        return now_us - since_us - sum(min(length, end - since_us) for end, length in self.pauses if end > since_us)

    def silence(self, nodes: dict[str, Node], now_us: int) -> dict[str, int]:
        up = [node.name for node in nodes.values() if node.status is NodeStatus.UP]
        since = {name: max(self.reconnected_us, self.signs_us.get(name, 0)) for name in up}
        return {name: self.attended_us(since_us, now_us) for name, since_us in since.items()}

    def verdicts(self, nodes: dict[str, Node], now_us: int) -> list[tuple[str, str]]:
        if now_us - self.judged_us > BEAT_US // 4:
            self.pauses.append((now_us, now_us - self.judged_us))
        self.judged_us = now_us
        if self.attended_us(self.own_us, now_us) > BEAT_US:
            self.judges = False
        if not self.judges:
            return []
        silence = self.silence(nodes, now_us)
        limit_us = 2 * BEAT_US + 500_000
        late = [name for name, silent_us in silence.items() if silent_us > limit_us]
        if len(silence) >= 3 and 2 * len(late) > len(silence):
            limit_us *= MOST_SILENT_FACTOR
        found = [
            ("NodeLost", f"{name}: no heartbeat for {silence[name] / 1e6:.2f} s (limit {limit_us / 1e6:.2f} s)")
            for name in late
            if silence[name] > limit_us
        ]
        missed, up = sum(silent_us > BEAT_US * 5 // 4 for silent_us in silence.values()), len(silence)
        longest_us = max((silent_us for silent_us in silence.values() if silent_us > limit_us), default=0)
        if missed > len(found) and missed >= 3 and 3 * missed >= up and longest_us <= limit_us + BEAT_US * 5 // 4:
            found = []
        elif len(found) >= 3 and 3 * len(found) >= up:
            found = [("NodesLost", " ".join(text.partition(":")[0] for _, text in found))]
        for each in nodes.values():
            heard_us = self.beats_us.get(each.name, 0)
            if each.status is NodeStatus.LOST and heard_us > self.grace_us and now_us - heard_us < BEAT_US:
                found.append(("NodeReturned", each.name))
        return found

    def suspects(self, nodes: dict[str, Node], now_us: int) -> list[str]:
        silence = self.silence(nodes, now_us)
        return [name for name in silence if self.judges and silence[name] > BEAT_US * 3 // 2]


@pytest.mark.parametrize("seed", range(at_most(60)))
def test_incremental_judgement_matches_full_scan(seed: int) -> None:
    drawn = random.Random(seed)
    now_us = drawn.randrange(10_000_000)
    names = [f"n{number}" for number in range(drawn.randrange(1, 12))]
    quick, plain = Liveness(BEAT_US, now_us), Plain(now_us)
    nodes: dict[str, Node] = {}
    numbers = dict.fromkeys([*names, OWN_NAME], 0)
    said = 0
    for _ in range(600):
        now_us += drawn.choice((0, 1, 1000, 50_000, 120_000, 120_000, 125_000, 400_000, 3_000_000))
        match drawn.choice("bbbbbbooojjvvvvvgds"):
            case "b":
                name = drawn.choice([*names[: 1 + len(names) // 2], *names])
                numbers[name] += 1
                quick.on_beat(heartbeat(name, numbers[name]), 1, now_us, now_us)
                plain.on_beat(name, now_us)
            case "o":
                numbers[OWN_NAME] += 1
                quick.on_beat(heartbeat(OWN_NAME, numbers[OWN_NAME]), 1, now_us, now_us)
                plain.on_beat(OWN_NAME, now_us)
            case "j":
                name = drawn.choice(names)
                quick.on_join(name, now_us)
                plain.signs_us[name] = now_us
                nodes = {**nodes, name: node(name)}
            case "g" if drawn.random() < 0.2:
                quick.grace(now_us)
                plain.grace(now_us)
            case "d" if drawn.random() < 0.3:  # a change that no beat tells of
                name = drawn.choice(names)
                nodes = {**nodes, name: node(name, drawn.choice(list(NodeStatus)))}
            case "s":
                assert quick.suspects(nodes, now_us) == plain.suspects(nodes, now_us)
            case _:
                verdicts = quick.verdicts(nodes, now_us)
                told = [
                    (
                        type(one).__name__,
                        f"{one.node}: {one.reason}" if isinstance(one, v.NodeLost) else " ".join(one.nodes_named()),
                    )
                    for one in verdicts
                    if isinstance(one, v.NodeLost | v.NodesLost | v.NodeReturned)
                ]
                assert told == plain.verdicts(nodes, now_us)
                said += len(told)
                for one in verdicts:
                    status = NodeStatus.UP if isinstance(one, v.NodeReturned) else NodeStatus.LOST
                    nodes = {**nodes, **{name: node(name, status) for name in one.nodes_named()}}
    assert said or seed


@pytest.mark.parametrize("seed", range(20))
def test_pause_totals_match_sum(seed: int) -> None:
    drawn = random.Random(seed)
    pauses, plain, now_us = Pauses(), [], 0
    for _ in range(300):
        now_us += drawn.randrange(1, 1000)
        length_us = drawn.randrange(1, 1000)
        now_us += length_us
        pauses.add(now_us, length_us)
        plain.append((now_us, length_us))
        since_us = drawn.randrange(now_us + 100)
        assert pauses.since(since_us) == sum(min(long, end - since_us) for end, long in plain if end > since_us)


def test_pauses_drop_oldest() -> None:
    pauses = Pauses()
    for number in range(1, 3 * PAUSES_MAX):
        pauses.add(10 * number, 3)
    end_us = 10 * (3 * PAUSES_MAX - 1)
    assert pauses.since(end_us - 10_000) == 3000
    assert 3 * PAUSES_MAX // 2 <= pauses.since(0) <= 3 * PAUSES_MAX


def test_judgement_skips_recently_heard_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"n{number}" for number in range(500)]
    bus = Bus(names)
    bus.run(3, names)
    looks = 0
    attended_us = Liveness.attended_us

    def counted(self: Liveness, since_us: int, now_us: int) -> int:
        nonlocal looks
        looks += 1
        return attended_us(self, since_us, now_us)

    monkeypatch.setattr(Liveness, "attended_us", counted)
    for _ in range(8):
        bus.now_us += 100_000
        bus.liveness.verdicts(bus.nodes, bus.now_us)
    assert looks <= 8 * 3


def test_flood_of_a_node_stands_while_its_beats_tell_of_it() -> None:
    liveness = Liveness(BEAT_US, 0)
    flooded = replace(heartbeat("n1", 1), dropped_messages=5000, flooding_worker="big.7")
    liveness.on_beat(flooded, 1, 1, 1)
    liveness.on_beat(heartbeat("n2", 1), 2, 1, 1)
    assert liveness.floods(2) == {"n1": Flood(5000, "big.7")}
    (alarm,) = flood_alarms(liveness.floods(2))
    assert alarm.key == "worker-floods:n1" and "worker big.7 of task big on node n1" in alarm
    assert not flood_alarms({"n1": Flood(FLOOD_MESSAGES - 1, "big.7")}), "a program that saves at each tiny iteration"
    assert not liveness.floods(1 + liveness.limit_us + 1), "it is heard no longer"
    liveness.on_beat(heartbeat("n1", 2), 3, 2, 2)
    assert not liveness.floods(2)


@pytest.mark.parametrize("cut_s", [0.0, 0.3, 0.9])
def test_node_that_is_heard_and_hears_nothing_is_lost_within_three_seconds(cut_s: float) -> None:
    bus = Bus(NAMES)
    bus.echo(NAMES)
    assert bus.run(5 + cut_s, NAMES) == []
    cut_us = bus.now_us
    bus.deaf = {"a"}
    found: list[v.AnyEvent] = []
    while not found and bus.now_us < cut_us + 5_000_000:
        found = bus.run(0.1, NAMES)
    (lost,) = found
    assert isinstance(lost, v.NodeLost) and lost.node == "a" and "heard, and hears nothing for 2.6" in lost.reason
    assert bus.now_us - cut_us <= 3_100_000, "two beats that do not come back, and a judgement"
    assert bus.run(10, NAMES) == [], "it is heard, and has not returned"
    bus.deaf = set()
    (returned,) = bus.run(3, NAMES)
    assert isinstance(returned, v.NodeReturned) and returned.node == "a"


def test_agent_that_does_not_say_what_it_hears_is_never_deaf() -> None:
    bus = Bus(NAMES)
    bus.echo(NAMES[1:])
    bus.deaf = {"a"}
    assert bus.run(20, NAMES) == []


def test_one_beat_that_does_not_come_back_loses_nobody() -> None:
    """Not even where the agent sends no further one for a while: a stopped agent hears nothing."""
    bus = Bus(NAMES)
    bus.echo(NAMES)
    bus.run(5, NAMES)
    bus.deaf = {"a"}
    bus.run(1, NAMES)
    bus.deaf = set()
    assert bus.run(1, NAMES) == []
    assert bus.run(1, NAMES[1:]) == []
    assert bus.run(10, NAMES) == []


@pytest.mark.parametrize("stays_deaf", [False, True])
def test_beats_of_an_outage_that_come_at_its_end_do_not_lose_the_node_again(stays_deaf: bool) -> None:
    """TCP brings what an agent said while its link was down, a part at a time: it heard nothing then."""
    bus = Bus(NAMES)
    bus.echo(NAMES)
    bus.run(5, NAMES)
    (lost,) = bus.run(20, NAMES[1:])
    assert isinstance(lost, v.NodeLost) and lost.node == "a"
    bus.deaf = {"a"}
    bus.beat("a")
    (returned,) = bus.run(0.1, NAMES[1:])
    assert isinstance(returned, v.NodeReturned) and returned.node == "a"
    for _ in range(19):
        bus.beat("a")
    assert bus.run(0.5, NAMES) == []
    if stays_deaf:
        (lost,) = bus.run(3, NAMES)
        assert isinstance(lost, v.NodeLost) and "heard, and hears nothing for 2." in lost.reason
    else:
        bus.deaf = set()
        assert bus.run(10, NAMES) == []


def test_all_that_are_deaf_at_once_are_the_heads_trouble() -> None:
    bus = Bus(NAMES)
    bus.echo(NAMES)
    bus.run(5, NAMES)
    bus.deaf = set(NAMES)
    held = bus.run(9, NAMES)[0]
    assert isinstance(held, v.SilenceHeld) and "hears nothing (5 of them)" in held.reason
    assert not [verdict for verdict in bus.run(3, NAMES) if not isinstance(verdict, v.SilenceHeld)]


@pytest.mark.parametrize("seed", range(at_most(50)))
def test_deaf_nodes_that_beat_at_other_times_are_held_together(seed: int) -> None:
    """Each sends at a phase of its own; hearing ends for all at one moment. Nobody is lost before it is held."""
    chance = random.Random(seed)
    liveness, nodes = Liveness(BEAT_US, 0), {name: node(name) for name in NAMES}
    phases = {name: chance.randrange(20) * 50_000 for name in NAMES}
    cut_us = 5_000_000 + chance.randrange(20) * 50_000
    numbers, echoes, own = dict.fromkeys(NAMES, 0), dict.fromkeys(NAMES, 0), 0
    found: list[v.AnyEvent] = []
    for now_us in range(0, 20_000_000, 50_000):
        if now_us % (BEAT_US // 4) == 0:
            own += 1
            liveness.on_own_beat(now_us)
            liveness.on_beat(heartbeat(OWN_NAME, own), 1, now_us, now_us)
        for name in NAMES:
            if now_us % BEAT_US == phases[name]:
                numbers[name] += 1
                liveness.on_beat(replace(heartbeat(name, numbers[name]), echo_beat=echoes[name]), 1, now_us, now_us)
                echoes[name] = numbers[name] if now_us < cut_us else echoes[name]
        found += liveness.verdicts(nodes, now_us)
        if found:
            break
    assert [type(verdict) for verdict in found] == [v.SilenceHeld]
