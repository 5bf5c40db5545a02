"""An hour of bad weather on the bus, in virtual time: no node is given up that lives, and none that died is overlooked.

The weather, each kind at random moments, also at the same time:
  late beats          every beat up to 0.2 s; from a host with a slow disk, for a minute, up to 0.7 s
  checkpoint pauses   all agents stand still for up to 0.6 s
  bus stalls          up to 30 s; what was said comes afterwards, all at once
  bus outages         up to 30 s; what was said is lost, everybody connects again within 1.5 s, each in its own time
  our own pauses      up to 6 s (a slow disk, a stopped machine), and the backlog is read bit by bit between judgements
  restarts            a new coordinator, after up to 20 s
  clock steps         the log's clock jumps by up to an hour, either way

An agent that is later than 1.5 s (two beats and half a second, less the one beat) is lost by definition: what the
weather does to one agent adds up to less.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable

import pytest

from tests.unicrond.test_liveness import node
from unicrond.core.nodes.liveness import JUDGEMENTS, OWN_BEATS, OWN_NAME, RECONNECT_US, Liveness
from unicrond.core.state.state import Node, NodeStatus
from unicrond.events import vocabulary as v

BEAT_US = 1_000_000
HOUR_US = 3_600_000_000
SECOND_US = 1_000_000
NAMES = [f"n{number}" for number in range(8)]


class Weather:
    """The senders, the bus and one judge, on a counted time."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now_us = 0
        self.nodes: dict[str, Node] = {name: node(name) for name in NAMES}
        self.dead: set[str] = set()
        self.verdicts: list[tuple[int, v.AnyEvent]] = []
        self.liveness = Liveness(BEAT_US, 0)
        self.step_us = 0
        self._due: list[tuple[int, int, Callable[[], None]]] = []
        self._count = 0
        self._own_number = 0
        self._inbox: list[tuple[str, int]] = []
        self._slow_until: dict[str, int] = {}
        self._agents_pause_until = 0
        self._stalled_until = 0
        self._connected_at: dict[str, int] = {}
        self._judge_pause_until = 0
        self._judge_away_until = 0
        for name in [*NAMES, OWN_NAME]:
            self.after(self.random.randrange(BEAT_US), lambda name=name: self._beat(name))  # type: ignore[misc]
        self.after(0, self._judge)

    def after(self, delay_us: int, happens: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._due, (self.now_us + delay_us, self._count, happens))

    def run(self, until_us: int) -> None:
        while self._due and self._due[0][0] <= until_us:
            self.now_us, _, happens = heapq.heappop(self._due)
            happens()
        self.now_us = until_us

    # --- senders and the bus ---------------------------------------------------------------------

    def _beat(self, name: str) -> None:
        own = name == OWN_NAME
        held_until = self._judge_pause_until if own else self._agents_pause_until
        if self.now_us < held_until:
            self.after(held_until - self.now_us, lambda: self._beat(name))
            return
        self.after(BEAT_US // OWN_BEATS if own else BEAT_US, lambda: self._beat(name))
        if name in self.dead or (own and self.now_us < self._judge_away_until):
            return
        self._own_number += own
        number = self._own_number
        if self.now_us < self._connected_at.get(name, 0):
            return  # there is no connection: what is said now is lost
        late_us = int(min(self.random.expovariate(1 / 20_000), 200_000))
        if self.now_us < self._slow_until.get(name, 0):
            late_us = self.random.randrange(700_000)
        if own:
            late_us = 1000  # the bus keeps the order of what one client says
        self.after(max(late_us, self._stalled_until - self.now_us), lambda: self._inbox.append((name, number)))

    def _hear(self, most: int) -> None:
        heard, self._inbox = self._inbox[:most], self._inbox[most:]
        for name, number in heard:
            self._count += 1
            beat = v.Heartbeat(node=name, agent_boot=7, beat=number, workers=0, load_milli=0, memory_free_bytes=0)
            self.liveness.on_beat(beat, self._count, max(0, self.now_us + self.step_us), self.now_us)

    def _judge(self) -> None:
        if self.now_us < self._judge_pause_until:
            self.after(self._judge_pause_until - self.now_us, self._judge)
            return
        self.after(BEAT_US // JUDGEMENTS, self._judge)
        if self.now_us < self._judge_away_until:
            self._inbox.clear()
            return
        first = self.random.randrange(2)  # who comes first after a pause is not to be relied upon
        if first:
            self._hear(5)
        for verdict in self.liveness.verdicts(self.nodes, self.now_us):
            self.verdicts.append((self.now_us, verdict))
            status = NodeStatus.LOST if isinstance(verdict, v.NodeLost) else NodeStatus.UP
            self.nodes = {**self.nodes, verdict.node: node(verdict.node, status)}  # type: ignore[union-attr]
        # In a backlog a judgement may come between any two bits of it.
        self._hear(5 if len(self._inbox) > 20 else 1000)

    # --- weather ---------------------------------------------------------------------------------

    def slow_disk(self) -> None:
        self._slow_until[self.random.choice(NAMES)] = self.now_us + 60 * SECOND_US

    def checkpoint(self) -> None:
        if self.now_us > self._agents_pause_until + SECOND_US:
            self._agents_pause_until = self.now_us + self.random.randrange(600_000)

    def stall(self) -> None:
        self._stalled_until = self.now_us + self.random.randrange(30 * SECOND_US)

    def outage(self) -> None:
        back_us = self.now_us + self.random.randrange(30 * SECOND_US)
        self._inbox.clear()
        for name in [*NAMES, OWN_NAME]:
            self._connected_at[name] = back_us + self.random.randrange(1_500_000)

    def pause(self) -> None:
        self._judge_pause_until = self.now_us + self.random.choice((300_000, 800_000, 2_000_000, 6_000_000))

    def restart(self) -> None:
        self._judge_away_until = self.now_us + self.random.randrange(20 * SECOND_US)

        def take_over() -> None:
            self.liveness = Liveness(BEAT_US, self.now_us)
            self.liveness.grace(self.now_us)

        self.after(self._judge_away_until - self.now_us, take_over)

    def clock_step(self) -> None:
        self.step_us = self.random.randrange(-HOUR_US, HOUR_US)

    def set_in(self, until_us: int) -> None:
        """Every kind, every now and then."""
        kinds = {
            self.slow_disk: 120,
            self.checkpoint: 20,
            self.stall: 180,
            self.outage: 240,
            self.pause: 60,
            self.restart: 300,
            self.clock_step: 300,
        }
        for kind, every_s in kinds.items():
            at_us = 0
            while (at_us := at_us + int(self.random.expovariate(1 / (every_s * SECOND_US)))) < until_us:
                self.after(at_us, kind)


@pytest.mark.parametrize("seed", range(6))
def test_hour_of_noise_loses_no_node(seed: int) -> None:
    weather = Weather(seed)
    weather.set_in(HOUR_US)
    weather.run(HOUR_US)
    assert weather.verdicts == [], f"seed {seed}"


@pytest.mark.parametrize("seed", range(6))
def test_death_in_noise_is_found(seed: int) -> None:
    """Later than in calm, by what the weather costs; but found, once, and nobody else with it."""
    weather = Weather(seed)
    weather.set_in(HOUR_US)
    weather.run(HOUR_US // 2)
    weather.dead.add("n3")
    weather.run(HOUR_US)
    assert [getattr(verdict, "node", "") for _, verdict in weather.verdicts] == ["n3"]
    assert weather.verdicts[0][0] < HOUR_US // 2 + 180 * SECOND_US


@pytest.mark.parametrize("seed", range(20))
def test_death_in_calm_is_found_within_limit(seed: int) -> None:
    weather = Weather(seed)
    weather.run(30 * SECOND_US)
    weather.dead.add("n3")
    died_us = weather.now_us
    weather.run(died_us + 10 * SECOND_US)
    ((found_us, lost),) = weather.verdicts
    assert isinstance(lost, v.NodeLost) and lost.node == "n3"
    assert found_us - died_us <= weather.liveness.limit_us + BEAT_US // JUDGEMENTS + 200_000  # the last beat was late


def test_death_after_outage_is_found_after_reconnection() -> None:
    weather = Weather(1)
    weather.run(10 * SECOND_US)
    weather.outage()
    weather.dead.add("n3")
    back_us = max(weather._connected_at.values())
    weather.run(back_us + 20 * SECOND_US)
    ((found_us, _),) = weather.verdicts
    assert found_us - back_us <= weather.liveness.limit_us + RECONNECT_US + BEAT_US
