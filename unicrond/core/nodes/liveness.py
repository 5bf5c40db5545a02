"""Which nodes live: beats in, verdicts out. Pure; time is the shell's monotonic clock, handed in.

Rules
-----
* A node that has been silent for two heartbeats and half a second is lost.
* So is one that is heard and hears nothing: an agent gets its own beats back, and says which came last. Once ECHO_LAG
  of them are missing it counts as silent for as long as these took, and half a second; with one it is late. Beats are
  counted, not time: an agent that was stopped has sent none. All that is said of silence here holds: it is the head's
  own trouble first where all are deaf or silent, and a node has returned once its beats come back to it. Who says
  nothing of it is never deaf. After a silence its time begins anew: what it said meanwhile comes at the end, at once.
* Silence says something only while own beats come back: the coordinator sends numbered ones through the same stream,
  four times as often. While they do not, no node is judged; once they do, or if one is missing in between (an outage
  too short for silence to show it), every node has a fresh grace period, and time to connect again before it. So has
  every node when a coordinator takes over.
* Silence says something only while we listen: a pause of this process (a slow disk, a stopped machine)
  is not counted in anybody's silence, for what was said meanwhile may not have been read yet.
* Own beats that are late are not always the bus's fault. While beats come that are older than the missing ones, or
  anything else comes, it is this process that is behind (`bus_works`, which is shown to people).
* When most of three or more nodes fall silent together, the network is the likelier culprit: they are
  given three times as long.
* When nobody of two or more nodes is heard, the head is the likeliest culprit: nobody is judged (deafness.py).
* A lost node whose beats are heard again has returned.
* A node that is late when another is lost is a suspect: they may have gone together (`suspects`). Nodes that are lost
  within one window are one decision: a plan waits for them (`gathers`). Survivors do not wait for the plan.
* A verdict is reported once, and again only if the fold has not taken it a second later (`VerdictLimiter`).
* A judgement looks at those who were heard longest ago, and at no others: nodes stand in the order in which they were
  heard. Mappings of nodes that are handed in never change; another one is looked through once.

Verdicts are appended to the log as NodeLost and NodeReturned with the last beat as evidence; the log's
fold, not this module, is what the cluster believes.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from unicrond.core.nodes.deafness import Deafness, Hearing, Pauses
from unicrond.core.nodes.outages import Domains, Loss, losses, waits_for
from unicrond.core.state.policy import Policy
from unicrond.core.state.state import Node, NodeStatus, Silence
from unicrond.events import vocabulary as v
from unicrond.events.vocabulary import Evidence
from unicrond.events.vocabulary.field_types import NODES_NAMED_MAX
from unicrond.events.wire.codec import COORDINATOR

#: The name under which the coordinator's own beats go round; no node may have it.
OWN_NAME = COORDINATOR
GRACE_US = 500_000
#: So many own beats have not come back to an agent that hears nothing; the one on its way is not among them.
ECHO_LAG = 2
#: How long a client takes to connect again: its back-off (at most 1 s), and the connecting.
RECONNECT_US = 2_000_000
#: Own beats per heartbeat.
OWN_BEATS = 4
#: Judgements are made this often per heartbeat; a gap of more than two of these is a pause.
JUDGEMENTS = 8
MOST_SILENT_FACTOR = 3
#: After so long a verdict that had no effect is reported again.
SAY_AGAIN_US = 1_000_000
#: Own beats that have not come for so many heartbeats are missing, although other messages come.
OWN_MISSING_BEATS = 10


class Beat(msgspec.Struct, frozen=True):
    """The last beat of a node. `heard_us` is monotonic, `at_us` the log's receive time."""

    seq: int
    at_us: int
    heard_us: int
    beat: v.Heartbeat | None


class OutboxBacklog(NamedTuple):
    """Observations that an agent cannot append, by its last beat; `oldest_us`: the age of the oldest."""

    entries: int
    oldest_us: int


class Flood(NamedTuple):
    """Messages of a node's workers beyond their budgets, by its last beat; `worker`: whose are most."""

    messages: int
    worker: str


class VerdictLimiter:
    """Remembers when each verdict was reported: mutable, and time is handed in."""

    def __init__(self) -> None:
        self._at_us: dict[str, int] = {}

    def news(self, verdicts: Sequence[v.AnyEvent], now_us: int) -> list[v.AnyEvent]:
        """Return the verdicts that were not reported within the last SAY_AGAIN_US, and remember them."""
        new_verdicts = []
        for verdict in verdicts:
            name = f"{type(verdict).__name__}:{next(iter(verdict.nodes_named()), '')}"
            if now_us - self._at_us.get(name, -SAY_AGAIN_US) >= SAY_AGAIN_US:
                self._at_us[name] = now_us
                new_verdicts.append(verdict)
        return new_verdicts


class Liveness:
    """Private mutable state of one coordinator; nothing of it is replayed, its verdicts are."""

    def __init__(self, heartbeat_us: int, now_us: int, *, silence_us: int = int(Policy().silence_s * 1e6)) -> None:
        """Begin to listen. `silence_us`: how long the silence of all nodes is held (deafness.py)."""
        self.heartbeat_us = heartbeat_us
        self._deafness = Deafness(MOST_SILENT_FACTOR * self.limit_us, silence_us)
        self.beats: dict[str, Beat] = {}
        #: Whether the bus returns our beats, as far as we read it.
        self.bus_works = True
        #: Nothing comes over the bus at all.
        self.is_silent = False
        #: Whether own beats come back in time, so that others' silence says something.
        self._judges = True
        self._own_heard_us = now_us
        self._own_last = (0, 0)
        self._own_at_us = 0
        self._sent_us = now_us
        self._send_gap_us = 0
        self._beat_heard_us = now_us
        self._newest_at_us = 0
        self._delivered_us = now_us
        self._grace_from_us = now_us
        self._reconnected_us = now_us
        self._judged_us = now_us
        self._pauses = Pauses()
        #: When each was heard or has joined, the one of longest ago first; those that are not up fall out.
        self._signs_us: OrderedDict[str, int] = OrderedDict()
        self._last_sign_us = 0
        #: Those to which a beat has not come back: since when they hear nothing, as is likeliest.
        self._deaf_us: dict[str, int] = {}
        #: When each was heard for the first time, or after a silence: it may have heard nothing before either.
        self._resumed_us: dict[str, int] = {}
        self._keeping: set[str] = set()
        self._flooded: set[str] = set()
        self._nodes: Mapping[str, Node] = {}
        self._up: dict[str, int] = {}
        self._lost_nodes: list[str] = []
        self._domains = Domains({}, {})

    @property
    def limit_us(self) -> int:
        """The time for which a node may be silent."""
        return 2 * self.heartbeat_us + GRACE_US

    @property
    def late_us(self) -> int:
        """Return the time after which a node without a beat is late. When the first of those that fall silent together
        is at its limit, the others are late at least."""
        return self.heartbeat_us * 5 // 4

    def on_beat(self, beat: v.Heartbeat, seq: int, at_us: int, now_us: int) -> None:
        """Take a beat that came through the heartbeat stream."""
        self._beat_heard_us, self._newest_at_us = now_us, at_us
        if beat.node != OWN_NAME:
            previous = self.beats.get(beat.node)
            # An older agent of the name says nothing of the newer one, whom alone the log listens to; until that one
            # has been silent for longer than any node is given.
            newest = previous is None or previous.beat is None or beat.agent_boot >= previous.beat.agent_boot
            if newest or (previous is not None and now_us - previous.heard_us > 2 * MOST_SILENT_FACTOR * self.limit_us):
                if previous is None or now_us - previous.heard_us > self.limit_us:
                    self._resumed_us[beat.node] = now_us
                self.beats[beat.node] = Beat(seq, at_us, now_us, beat)
                if beat.echo_lag:
                    deaf_us = now_us - beat.echo_lag * self.heartbeat_us - GRACE_US
                    self._deaf_us[beat.node] = max(deaf_us, self._resumed_us[beat.node])
                else:
                    self._deaf_us.pop(beat.node, None)
                if beat.echo_lag < ECHO_LAG:
                    self._sign(beat.node, now_us)
                (self._keeping.add if beat.outbox_backlog else self._keeping.discard)(beat.node)
                (self._flooded.add if beat.dropped_messages else self._flooded.discard)(beat.node)
            return
        term, number = self._own_last
        is_one_missing = beat.agent_boot == term and beat.beat > number + 1
        if is_one_missing or not self._judges:
            self._judges = True
            self.grace(now_us)
        self.bus_works, self.is_silent = True, False
        self._own_heard_us, self._own_at_us = now_us, at_us
        self._own_last = (beat.agent_boot, beat.beat)
        self._send_gap_us = 0

    @property
    def own_beat(self) -> tuple[int, int]:
        """Return the term and the number of the last own beat that came back."""
        return self._own_last

    def read_seq(self, node: str) -> int:
        """Return the last entry of its commands that the node's agent has handled, by its last beat; 0: not known."""
        last = self.beats.get(node)
        return last.beat.read_seq if last is not None and last.beat is not None else 0

    def on_join(self, node: str, now_us: int) -> None:
        """Note that the coordinator has seen a NodeJoined."""
        self._sign(node, now_us)

    def on_own_beat(self, now_us: int) -> None:
        """Note that an own beat goes out."""
        self._send_gap_us = max(self._send_gap_us, now_us - self._sent_us)
        self._sent_us = now_us

    def on_message(self, now_us: int) -> None:
        """Note that something else than a beat came from the bus."""
        self._delivered_us = now_us

    def backlogs(self, now_us: int) -> dict[str, OutboxBacklog]:
        """Return, per node that is heard, the observations that its agent cannot append; most nodes have none."""
        return {
            beat.node: OutboxBacklog(beat.outbox_backlog, beat.outbox_backlog_us)
            for beat in self._fresh_beats(self._keeping, now_us)
        }

    def floods(self, now_us: int) -> dict[str, Flood]:
        """Return, per node that is heard, the messages of its workers beyond their budgets; most nodes have none."""
        return {
            beat.node: Flood(beat.dropped_messages, beat.flooding_worker)
            for beat in self._fresh_beats(self._flooded, now_us)
        }

    def _fresh_beats(self, names: Collection[str], now_us: int) -> Iterator[v.Heartbeat]:
        """Yield the last beats of those that are heard, in the order of their names."""
        for last in (self.beats[name] for name in sorted(names)):
            if last.beat is not None and now_us - last.heard_us <= self.limit_us:
                yield last.beat

    def grace(self, now_us: int) -> None:
        """Forget the silence before now (the bus was away, or this process was); nodes may have to connect again."""
        self._grace_from_us = now_us
        self._reconnected_us = now_us + RECONNECT_US
        self._own_heard_us = now_us

    def verdicts(
        self, nodes: Mapping[str, Node], now_us: int, silence: Silence | None = None, out: Collection[str] = ()
    ) -> list[v.AnyEvent]:
        """Return the NodeLost and NodeReturned that the beats call for, and what they say of a silence of all nodes.
        `nodes` never changes: other nodes are another object. `silence`: the one that stands in the log. `out`: the
        domains that are out (outages.py)."""
        if now_us - self._judged_us > 2 * self.heartbeat_us // JUDGEMENTS:
            self._pauses.add(now_us, now_us - self._judged_us)
        self._judged_us = now_us
        if self.attended_us(self._own_heard_us, now_us) > self.heartbeat_us:
            self._judges = False
            self._find_fault(now_us)
        if not self._judges:
            return []
        self._see(nodes)
        late = self._silence(self.late_us, now_us)
        silent = {name: silent_us for name, silent_us in late.items() if silent_us > self.limit_us}
        most = len(self._up) >= 3 and 2 * len(silent) > len(self._up)
        limit_us = self.limit_us * (MOST_SILENT_FACTOR if most else 1)
        overdue = {name: silent_us for name, silent_us in silent.items() if silent_us > limit_us}
        returned: list[v.AnyEvent] = [
            v.NodeReturned(node=name, evidence=self._evidence(name))
            for name in self._lost_nodes
            if self._beats_again(nodes[name], now_us)
        ]
        phase = self._deafness.look(
            self._hearing(late, silent, overdue, silence),
            now_us,
            from_us=self._grace_from_us,
            attended_us=lambda since_us: self.attended_us(since_us, now_us),
            is_held=silence is not None,
            is_lost=silence is not None and silence.are_lost,
        )
        if phase in ("judges", "loses"):
            count, longest_us = len(self._up), max(overdue.values(), default=0)
            if longest_us <= limit_us + self.late_us and waits_for(len(late), len(overdue), count):
                return returned
            if phase == "loses":
                return [*self._losses(overdue, limit_us), *returned]
            domains = self._domains._replace(out=out)
            joint, single, _ = losses(overdue, late, domains, count, limit_us + self.late_us)
            outages = [verdict for loss in joint for verdict in _outage(loss, overdue, limit_us)]
            return [*outages, *self._losses({name: overdue[name] for name in single}, limit_us), *returned]
        if phase == "holds":
            longest_us = max(overdue.values())
            deaf = sum(self._is_deaf(name) for name in overdue)
            trouble = f", or it hears nothing ({deaf} of them)" if deaf else ""
            reason = f"no heartbeat of any node for {longest_us / 1e6:.2f} s{trouble}"
            return [v.SilenceHeld(nodes=len(overdue), reason=reason)]
        if phase == "ends" and silence is not None:
            away = f", {len(silent)} are still silent" if silent else ""
            reason = f"{len(self._up) - len(silent)} of {len(self._up)} nodes are heard again{away}"
            return [v.SilenceEnded(reason=reason), *returned]
        return returned

    def _losses(self, overdue: Mapping[str, int], limit_us: int) -> list[v.AnyEvent]:
        """Return the NodeLost of nodes that are silent for too long."""
        return [
            v.NodeLost(
                node=name,
                evidence=self._evidence(name),
                reason=f"{self._trouble(name)} for {silent_us / 1e6:.2f} s (limit {limit_us / 1e6:.2f} s)",
            )
            for name, silent_us in overdue.items()
        ]

    def _trouble(self, name: str) -> str:
        """Return in which way a node is silent."""
        return "heard, and hears nothing" if self._is_deaf(name) else "no heartbeat"

    def _is_deaf(self, name: str) -> bool:
        """Return whether a node hears nothing, by its last beat."""
        last = self.beats.get(name)
        return last is not None and last.beat is not None and last.beat.echo_lag >= ECHO_LAG

    def _hearing(
        self,
        late: Mapping[str, int],
        silent: Mapping[str, int],
        overdue: Mapping[str, int],
        silence: Silence | None,
    ) -> Hearing:
        """Return what deafness.py asks of this moment."""

        def back(since_us: int) -> int:
            """Count the nodes that were heard after that time, and still are."""
            return sum(self._signs_us.get(name, 0) > since_us and name not in silent for name in self._up)

        absent = self._lost_nodes if silence is not None and silence.are_lost else []
        return Hearing(
            up=len(self._up),
            late=len(late),
            silent=len(silent),
            overdue=len(overdue),
            absent=len(absent),
            back=back,
        )

    def suspects(self, nodes: Mapping[str, Node], now_us: int) -> list[str]:
        """Return the nodes that are late, by more than half a heartbeat: a moment later it is clear whether they are
        lost."""
        if not self._judges:
            return []
        self._see(nodes)
        return list(self._silence(self.heartbeat_us * 3 // 2, now_us))

    def gathers(self, lost_us: int | None, nodes: Mapping[str, Node], now_us: int) -> bool:
        """Return whether a plan waits, since more nodes may be lost together with the one that was lost at `lost_us`.

        It waits while others are late, and at most for as long as a node may be silent.
        """
        if lost_us is None or now_us - lost_us > self.limit_us:
            return False
        return bool(self.suspects(nodes, now_us))

    def attended_us(self, since_us: int, now_us: int) -> int:
        """Return the time since then, without the pauses of this process."""
        return now_us - since_us - self._pauses.since(since_us)

    def _find_fault(self, now_us: int) -> None:
        """Find out whether it is the bus's fault that own beats are late."""
        beats_come = self.attended_us(self._beat_heard_us, now_us) <= self.heartbeat_us
        others_come = self.attended_us(self._delivered_us, now_us) <= self.heartbeat_us
        self.is_silent = not beats_come and not others_come
        if beats_come:
            # Of one stream: where a newer beat is read than ours could be, ours is not there.
            unsent_us = max(self._send_gap_us, now_us - self._sent_us)
            self.bus_works = self._newest_at_us - self._own_at_us <= self.heartbeat_us + unsent_us
        elif others_come:
            missing_us = self.attended_us(self._own_heard_us, now_us)
            self.bus_works = missing_us <= OWN_MISSING_BEATS * self.heartbeat_us
        else:
            self.bus_works = False

    def _sign(self, node: str, now_us: int) -> None:
        """Note a sign of life; the newest stand at the end."""
        self._last_sign_us = max(self._last_sign_us, now_us)
        self._signs_us[node] = self._last_sign_us
        self._signs_us.move_to_end(node)

    def _see(self, nodes: Mapping[str, Node]) -> None:
        """Take note of nodes that were handed in for the first time."""
        if nodes is self._nodes:
            return
        self._nodes = nodes
        self._up = {node.name: place for place, node in enumerate(nodes.values()) if node.status is NodeStatus.UP}
        self._lost_nodes = [node.name for node in nodes.values() if node.status is NodeStatus.LOST]
        labels = {node.name: node.domain for node in nodes.values() if node.domain and node.status is NodeStatus.UP}
        self._domains = Domains(labels, Counter(labels.values()))
        unheard = [name for name in self._up if name not in self._signs_us]
        if unheard:
            heard_us = {name: self.beats[name].heard_us if name in self.beats else 0 for name in unheard}
            in_order = sorted([*heard_us.items(), *self._signs_us.items()], key=lambda pair: pair[1])
            self._signs_us = OrderedDict(in_order)

    def _silence(self, longer_us: int, now_us: int) -> dict[str, int]:
        """Return how long those nodes have been silent that are up and were silent for longer than that; in the order
        of nodes."""
        silences: dict[str, int] = {}
        stale: list[str] = []
        for name, sign_us in self._signs_us.items():
            silent_us = self.attended_us(max(self._reconnected_us, sign_us), now_us)
            if silent_us <= longer_us:
                break
            if name in self._up:
                silences[name] = silent_us
            else:
                stale.append(name)
        for name in stale:
            del self._signs_us[name]
        for name, deaf_us in self._deaf_us.items():
            silent_us = self.attended_us(max(self._reconnected_us, deaf_us), now_us)
            if not self._is_deaf(name):
                silent_us = min(silent_us, self.limit_us)  # its next beat will say it
            if silent_us > longer_us and name in self._up:
                silences[name] = max(silent_us, silences.get(name, 0))
        return dict(sorted(silences.items(), key=lambda pair: self._up[pair[0]]))

    def _beats_again(self, node: Node, now_us: int) -> bool:
        beat = self.beats.get(node.name)
        if beat is None or beat.beat is None or beat.heard_us <= self._grace_from_us or self._is_deaf(node.name):
            return False
        # A beat of the agent that we lost, not of one that has yet to say NodeJoined.
        return now_us - beat.heard_us < self.heartbeat_us and beat.beat.agent_boot == node.agent.boot

    def _evidence(self, name: str) -> Evidence:
        beat = self.beats.get(name)
        return Evidence(beat_seq=beat.seq if beat else 0, beat_at_us=beat.at_us if beat else 0)


def _outage(loss: Loss, overdue: Mapping[str, int], limit_us: int) -> Iterator[v.NodesLost]:
    """Yield the loss of nodes that fell silent together, so many at a time as one event names."""
    longest_us = max(overdue[name] for name in loss.nodes)
    reason = f"no heartbeat of any of them for up to {longest_us / 1e6:.2f} s (limit {limit_us / 1e6:.2f} s)"
    for first in range(0, len(loss.nodes), NODES_NAMED_MAX):
        names = loss.nodes[first : first + NODES_NAMED_MAX]
        yield v.NodesLost(nodes=names, reason=reason, domain=loss.domain, joins=loss.joins or first > 0)
