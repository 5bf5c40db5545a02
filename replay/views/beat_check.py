"""Check whether a lost or returned node follows from the retained heartbeats.

Rules
-----
* The coordinator's own `Liveness` runs again over the retained beats and the log, on the log's clock in place
  of the coordinator's monotonic one, judging as often as the coordinator does.
* A recorded verdict is right if the rerun gives the same one within SLACK before it was recorded (the way of a
  beat, of the judgement and of the append), and if the beat that it names as evidence is the retained one.
* A crash of nats-server takes the newest beats back and gives their numbers anew. Where the beats that are there had
  not reached the number of the evidence at its time, that happened to it: the rerun alone decides.
* Beats expire; an archive keeps those before each verdict (`events/log/heartbeat_evidence.py`), so there are gaps. The
  rerun begins anew after each. Where the beats do not reach back to before the silence, the verdict is `Unverifiable`.
* A pause between two beats whose numbers follow each other is no gap: the bus itself was silent.

Pure: entries and beats in, findings out.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from unicrond.core.nodes.liveness import MOST_SILENT_FACTOR, Liveness
from unicrond.core.nodes.outages import held_domains
from unicrond.core.state.policy import Settings
from unicrond.core.state.state import ClusterState
from unicrond.events import vocabulary as v
from unicrond.events.wire.envelope import RecordedEvent

SLACK_US = 1_500_000
#: The coordinator judges so many times per heartbeat.
JUDGEMENTS = 8


#: Beats that are further apart belong to two stretches. The coordinator sends one every 15 s or more often.
GAP_US = 20_000_000


#: What the coordinator concludes from heartbeats.
Verdict: TypeAlias = v.NodeLost | v.NodesLost | v.NodeReturned | v.SilenceHeld | v.SilenceEnded


class Unverifiable(Exception):
    """The retained heartbeats do not suffice for a verdict; the message says why."""


class BeatCheck:
    """Compares what the log says of nodes with the heartbeats. `take_over`, `joined` and `advance` follow the log;
    `contradiction` checks one lost or returned node."""

    def __init__(self, beats: Sequence[RecordedEvent]) -> None:
        self._beats = beats
        self._by_place = {(beat.seq, beat.recorded_at_us): beat for beat in beats}
        self._seqs = {beat.seq for beat in beats}
        self._stretches = _stretches(beats)
        self._next = 0
        self._now_us = 0
        self._from_us = 0
        self._liveness: Liveness | None = None
        self._joined_us: dict[str, int] = {}
        self._verdict_us: dict[tuple[type, str], int] = {}

    def take_over(self, settings: Settings, at_us: int) -> None:
        """Start anew with a coordinator: no beat has arrived yet, and every node has a grace period."""
        self._now_us = max(self._now_us, at_us)
        silence_us = int(settings.policy.silence_s * 1e6)
        self._liveness = Liveness(int(settings.heartbeat_s * 1e6), self._now_us, silence_us=silence_us)
        self._liveness.grace(self._now_us)
        self._from_us = self._now_us
        self._joined_us = {}
        self._verdict_us = {}
        while self._next < len(self._beats) and self._beats[self._next].recorded_at_us <= at_us:
            self._next += 1  # unheard: a coordinator listens from its start on

    def joined(self, node: str, at_us: int) -> None:
        """Note that the coordinator reads a NodeJoined."""
        self._joined_us[node] = max(self._now_us, at_us)
        if self._liveness is not None:
            self._liveness.on_join(node, self._joined_us[node])

    def advance(self, until_us: int, state: ClusterState) -> None:
        """Process the beats up to `until_us`, and judge on the way. `state`: the state in that interval."""
        liveness = self._liveness
        if liveness is None or not self._beats:
            return
        tick_us = max(1, liveness.heartbeat_us // JUDGEMENTS)
        while self._now_us < until_us:
            stretch = self._stretch_at(self._now_us, liveness.heartbeat_us)
            if stretch is None or stretch.begin_us > until_us:
                self._now_us = until_us
                return
            if self._now_us < stretch.begin_us:
                self._begin_at(stretch.begin_us, liveness, state)
            self._now_us = min(self._now_us + tick_us, until_us)
            self._hear_beats(liveness)
            for verdict in liveness.verdicts(state.nodes, self._now_us, state.silence, held_domains(state)):
                for name in verdict.nodes if isinstance(verdict, v.NodesLost) else ():
                    self._verdict_us[v.NodeLost, name] = self._now_us
                self._verdict_us[type(verdict), getattr(verdict, "node", "")] = self._now_us

    def contradiction(self, verdict: Verdict, at_us: int) -> str:
        """Return why the verdict recorded at `at_us` does not follow from the beats; empty if it does. Raises
        Unverifiable."""
        liveness = self._liveness
        if liveness is None or not self._beats:
            raise Unverifiable("this log has no heartbeats with it")
        if isinstance(verdict, v.NodeLost | v.NodeReturned):
            return self._contradiction_of_node(verdict, at_us, liveness)
        self._require_beats(at_us, self._from_us, liveness)
        verdict_us = self._verdict_us.get((type(verdict), ""))
        is_right = verdict_us is not None and verdict_us >= at_us - SLACK_US
        return "" if is_right else "the retained heartbeats do not support it"

    def _require_beats(self, at_us: int, began_us: int, liveness: Liveness) -> list[_Stretch]:
        """Return the stretches of beats before `at_us`. Raise Unverifiable where they do not reach back to before the
        silence that a verdict is about."""
        patience_us = MOST_SILENT_FACTOR * liveness.limit_us + SLACK_US
        earlier = [stretch for stretch in self._stretches if stretch.begin_us <= at_us]
        if not earlier or earlier[-1].begin_us > max(began_us, at_us - patience_us):
            raise Unverifiable("beats expired")
        if earlier[-1].end_us < at_us - liveness.limit_us:
            raise Unverifiable(
                "the heartbeats end before this entry" if earlier == self._stretches else "beats expired"
            )
        return earlier

    def _contradiction_of_node(self, verdict: v.NodeLost | v.NodeReturned, at_us: int, liveness: Liveness) -> str:
        began_us = max(self._from_us, self._joined_us.get(verdict.node, 0))
        earlier = self._require_beats(at_us, began_us, liveness)
        evidence = verdict.evidence
        if evidence.beat_seq and not self._was_taken_back(evidence):
            beat = self._by_place.get((evidence.beat_seq, evidence.beat_at_us))
            event = beat.envelope.event if beat is not None else None
            if beat is None and evidence.beat_seq not in self._seqs:
                if evidence.beat_seq >= earlier[-1].first_seq:
                    return f"its evidence, beat {evidence.beat_seq}, is not among the heartbeats"
            elif not isinstance(event, v.Heartbeat) or event.node != verdict.node:
                return f"its evidence, beat {evidence.beat_seq}, is another node's or another time's"
        verdict_us = self._verdict_us.get((type(verdict), verdict.node))
        if verdict_us is None or verdict_us < at_us - SLACK_US:
            newest = liveness.beats.get(verdict.node)
            last = f"beat {newest.seq}, {(at_us - newest.at_us) / 1e6:.2f} s before" if newest else "none in this term"
            return f"the retained heartbeats do not support it: the last one of {verdict.node} was {last}"
        return ""

    def _was_taken_back(self, evidence: v.Evidence) -> bool:
        before = bisect_right(self._beats, evidence.beat_at_us, key=lambda beat: beat.recorded_at_us)
        return 0 < before < len(self._beats) and self._beats[before - 1].seq < evidence.beat_seq

    def _stretch_at(self, at_us: int, heartbeat_us: int) -> _Stretch | None:
        """Return the stretch that holds this time, or the next one. Judging goes on for a heartbeat after its last
        beat."""
        place = bisect_right(self._stretches, at_us - heartbeat_us, key=lambda stretch: stretch.end_us)
        return self._stretches[place] if place < len(self._stretches) else None

    def _begin_at(self, at_us: int, liveness: Liveness, state: ClusterState) -> None:
        """Start anew after a gap in the retained beats, as if every node had sent a beat just then."""
        self._now_us = at_us
        liveness.verdicts(state.nodes, at_us, state.silence)  # the pause ends here
        liveness.grace(at_us)

    def _hear_beats(self, liveness: Liveness) -> None:
        while self._next < len(self._beats) and self._beats[self._next].recorded_at_us <= self._now_us:
            beat = self._beats[self._next]
            self._next += 1
            event = beat.envelope.event
            if isinstance(event, v.Heartbeat):
                liveness.on_beat(event, beat.seq, beat.recorded_at_us, beat.recorded_at_us)


class _Stretch(NamedTuple):
    """A run of heartbeats without a gap."""

    begin_us: int
    end_us: int
    first_seq: int


def _stretches(beats: Sequence[RecordedEvent]) -> list[_Stretch]:
    stretches: list[_Stretch] = []
    last_seq = 0
    for beat in beats:
        at_us = beat.recorded_at_us
        if stretches and (at_us - stretches[-1].end_us <= GAP_US or beat.seq == last_seq + 1):
            stretches[-1] = stretches[-1]._replace(end_us=max(stretches[-1].end_us, at_us))
        else:
            stretches.append(_Stretch(at_us, at_us, beat.seq))
        last_seq = beat.seq
    return stretches
