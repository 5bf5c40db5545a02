"""Which nodes live: beats in, verdicts out. Pure; time is the shell's monotonic clock, handed in.

Rules
-----
* A node that has been silent for two heartbeats and half a second is lost.
* Silence says something only while the bus is known to work: the coordinator sends numbered beats of its
  own through the same stream, four times as often. While they do not come back, no node is judged; once
  they do, or if one is missing in between (an outage too short for silence to show it), every node has a
  fresh grace period, and time to connect again before it. So has every node when a coordinator takes over.
* Silence says something only while we listen: a pause of this process (a slow disk, a stopped machine)
  is not counted in anybody's silence, for what was said meanwhile may not have been read yet.
* When most of three or more nodes fall silent together, the network is the likelier culprit: they are
  given three times as long.
* A lost node whose beats are heard again has returned.
* A node that is late when another is lost is a suspect: they may have gone together (`suspects`). Nodes that are lost
  within one window are one decision: a plan waits for them (`gathers`). Survivors do not wait for the plan.
* A verdict is said once, and again only if the fold has not taken it a second later (`Said`).

Verdicts are appended to the log as NodeLost and NodeReturned with the last beat as evidence; the log's
fold, not this module, is what the cluster believes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from events import vocabulary as v
from events.codec import COORDINATOR
from events.vocabulary import Evidence
from unicrond.core.state import Node, NodeStatus

#: The name under which the coordinator's own beats go round; no node may have it.
OWN_NAME = COORDINATOR
GRACE_US = 500_000
#: How long a client takes to connect again: its back-off (at most 1 s), and the connecting.
RECONNECT_US = 2_000_000
#: Own beats per heartbeat.
OWN_BEATS = 4
#: Judgements are made this often per heartbeat; a gap of more than two of these is a pause.
JUDGEMENTS = 8
MOST_SILENT_FACTOR = 3
#: After so long a verdict that had no effect is said again.
SAY_AGAIN_US = 1_000_000


class Beat(msgspec.Struct, frozen=True):
    """The last beat of a node. `heard_us` is monotonic, `at_us` the log's receive time."""

    seq: int
    at_us: int
    heard_us: int
    beat: v.Heartbeat | None


class KeptBack(NamedTuple):
    """Observations that an agent cannot append, by its last beat; `oldest_us`: the age of the oldest."""

    entries: int
    oldest_us: int


class Said:
    """Which verdicts were said when: mutable, and time is handed in."""

    def __init__(self) -> None:
        self._at_us: dict[str, int] = {}

    def news(self, verdicts: Sequence[v.AnyEvent], now_us: int) -> list[v.AnyEvent]:
        """Those that were not said within the last SAY_AGAIN_US; from now on they were."""
        found = []
        for verdict in verdicts:
            name = f"{type(verdict).__name__}:{getattr(verdict, 'node', '')}"
            if now_us - self._at_us.get(name, -SAY_AGAIN_US) >= SAY_AGAIN_US:
                self._at_us[name] = now_us
                found.append(verdict)
        return found


class Liveness:
    """Private mutable state of one coordinator; nothing of it is replayed, its verdicts are."""

    def __init__(self, heartbeat_us: int, now_us: int) -> None:
        self.heartbeat_us = heartbeat_us
        self.beats: dict[str, Beat] = {}
        self.bus_works = True
        self._own_heard_us = now_us
        self._own_last = (0, 0)
        self._grace_from_us = now_us
        self._reconnected_us = now_us
        self._judged_us = now_us
        self._pauses: deque[tuple[int, int]] = deque(maxlen=64)

    @property
    def limit_us(self) -> int:
        """How long a node may be silent."""
        return 2 * self.heartbeat_us + GRACE_US

    def heard(self, beat: v.Heartbeat, seq: int, at_us: int, now_us: int) -> None:
        """A beat came through the heartbeat stream."""
        if beat.node != OWN_NAME:
            known = self.beats.get(beat.node)
            # An older agent of the name says nothing of the newer one, whom alone the log listens to; until that one
            # has been silent for longer than any node is given.
            newest = known is None or known.beat is None or beat.agent_boot >= known.beat.agent_boot
            if newest or (known is not None and now_us - known.heard_us > 2 * MOST_SILENT_FACTOR * self.limit_us):
                self.beats[beat.node] = Beat(seq, at_us, now_us, beat)
            return
        term, number = self._own_last
        is_one_missing = beat.agent_boot == term and beat.beat > number + 1
        if is_one_missing or not self.bus_works:
            self.bus_works = True
            self.grace(now_us)
        self._own_heard_us = now_us
        self._own_last = (beat.agent_boot, beat.beat)

    def kept_back(self, now_us: int) -> dict[str, KeptBack]:
        """Per node that is heard, what it keeps back; of most nodes nothing."""
        return {
            name: KeptBack(told.beat.kept_back, told.beat.kept_back_us)
            for name, told in sorted(self.beats.items())
            if told.beat is not None and told.beat.kept_back and now_us - told.heard_us <= self.limit_us
        }

    def grace(self, now_us: int) -> None:
        """Silence before now says nothing (the bus was away, or we were); nodes may have to connect again."""
        self._grace_from_us = now_us
        self._reconnected_us = now_us + RECONNECT_US
        self._own_heard_us = now_us

    def verdicts(self, nodes: Mapping[str, Node], joined_us: Mapping[str, int], now_us: int) -> list[v.AnyEvent]:
        """NodeLost and NodeReturned that the beats call for.

        `joined_us`: when (monotonic) this coordinator saw each node's last NodeJoined.
        """
        if now_us - self._judged_us > 2 * self.heartbeat_us // JUDGEMENTS:
            self._pauses.append((now_us, now_us - self._judged_us))
        self._judged_us = now_us
        if self._attended_us(self._own_heard_us, now_us) > self.heartbeat_us:
            self.bus_works = False
        if not self.bus_works:
            return []
        silence = self._silence(nodes, joined_us, now_us)
        up = list(silence)
        late = [name for name in up if silence[name] > self.limit_us]
        limit_us = self.limit_us
        if len(up) >= 3 and 2 * len(late) > len(up):
            limit_us *= MOST_SILENT_FACTOR
        verdicts: list[v.AnyEvent] = [
            v.NodeLost(
                node=name,
                evidence=self._evidence(name),
                reason=f"no heartbeat for {silence[name] / 1e6:.2f} s (limit {limit_us / 1e6:.2f} s)",
            )
            for name in late
            if silence[name] > limit_us
        ]
        verdicts += [
            v.NodeReturned(node=node.name, evidence=self._evidence(node.name))
            for node in nodes.values()
            if node.status is NodeStatus.LOST and self._beats_again(node, now_us)
        ]
        return verdicts

    def suspects(self, nodes: Mapping[str, Node], joined_us: Mapping[str, int], now_us: int) -> list[str]:
        """Nodes that are late, by more than half a heartbeat: another moment will tell whether they are lost."""
        if not self.bus_works:
            return []
        late_us = self.heartbeat_us * 3 // 2
        return [name for name, silent_us in self._silence(nodes, joined_us, now_us).items() if silent_us > late_us]

    def gathers(
        self, lost_us: int | None, nodes: Mapping[str, Node], joined_us: Mapping[str, int], now_us: int
    ) -> bool:
        """Whether a plan waits, since more nodes may be lost together with the one that was lost at `lost_us`.

        So it is while others are late, and at most for as long as a node may be silent.
        """
        if lost_us is None or now_us - lost_us > self.limit_us:
            return False
        return bool(self.suspects(nodes, joined_us, now_us))

    def _silence(self, nodes: Mapping[str, Node], joined_us: Mapping[str, int], now_us: int) -> dict[str, int]:
        up = [node.name for node in nodes.values() if node.status is NodeStatus.UP]
        return {name: self._attended_us(self._heard(name, joined_us), now_us) for name in up}

    def _attended_us(self, since_us: int, now_us: int) -> int:
        """The time since then, without our pauses."""
        return (
            now_us
            - since_us
            - sum(min(length_us, ended_us - since_us) for ended_us, length_us in self._pauses if ended_us > since_us)
        )

    def _heard(self, name: str, joined_us: Mapping[str, int]) -> int:
        beat = self.beats.get(name)
        return max(self._reconnected_us, joined_us.get(name, 0), beat.heard_us if beat else 0)

    def _beats_again(self, node: Node, now_us: int) -> bool:
        beat = self.beats.get(node.name)
        if beat is None or beat.beat is None or beat.heard_us <= self._grace_from_us:
            return False
        # A beat of the agent that we lost, not of one that has yet to say NodeJoined.
        return now_us - beat.heard_us < self.heartbeat_us and beat.beat.agent_boot == node.agent_boot

    def _evidence(self, name: str) -> Evidence:
        beat = self.beats.get(name)
        return Evidence(beat_seq=beat.seq if beat else 0, beat_at_us=beat.at_us if beat else 0)
