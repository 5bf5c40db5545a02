"""Selects the heartbeats that prove that a node was lost or came back: the archive keeps these. Pure.

The heartbeat stream forgets after ten minutes; `unicron-replay verify` derives a verdict from its beats for as long as
the log lasts.

Rules
-----
* A verdict is judged from the beats of a window before it: the longest silence that a node is ever given, and what a
  coordinator allows beside it.
* Of a window are kept: all beats of the verdict's node; all of the coordinator's own, which distinguish a silent bus
  from a silent node; the last one of each other node, which shows whether most of them were silent.
* Of the others, too, the first after each of the coordinator's own: they show that somebody was heard all the time.
* Kept as well: the beat that the verdict names, and the one that stood last in the stream at that time. A crash of
  nats-server takes the newest beats back and gives their numbers anew; the second one shows that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from unicrond.events.vocabulary import (
    CoordinatorStarted,
    Heartbeat,
    NodeLost,
    NodeReturned,
    NodesLost,
    SilenceEnded,
    SilenceHeld,
)
from unicrond.events.wire.codec import COORDINATOR
from unicrond.events.wire.envelope import Entry, RecordedEvent

#: Three times the limit of 2 beats + 0.5 s; 2 s to connect again; 1.5 s for the way of the verdict; one beat more.
_WINDOW_BEATS = 7
_WINDOW_US = 5_500_000
#: What is read before the beat that a verdict names, where that is older than the window.
_BEFORE_NAMED_US = 1_000_000


class NodeVerdict(NamedTuple):
    """A NodeLost or NodeReturned of the log, or what it says of many or all nodes (`node`: ""). `named_seq`,
    `named_us`: the beat that it names, 0 for none."""

    node: str
    at_us: int
    from_us: int
    named_seq: int
    named_us: int


def window_us(heartbeat_us: int) -> int:
    """Return how far before a verdict its evidence reaches."""
    return _WINDOW_BEATS * heartbeat_us + _WINDOW_US


class NodeVerdicts:
    """Finds verdicts in a log that is read in order. `heartbeat_us`: the interval of the term in which reading
    begins."""

    def __init__(self, heartbeat_us: int) -> None:
        self._heartbeat_us = heartbeat_us

    def among(self, entries: Iterable[Entry]) -> list[NodeVerdict]:
        """Return the verdicts among the next entries, in order."""
        verdicts: list[NodeVerdict] = []
        for entry in entries:
            if not isinstance(entry, RecordedEvent):
                continue
            event, at_us = entry.envelope.event, entry.recorded_at_us
            if isinstance(event, CoordinatorStarted):
                self._heartbeat_us = heartbeat_us_of(event)
            elif isinstance(event, NodeLost | NodeReturned):
                proof = event.evidence
                from_us = at_us - window_us(self._heartbeat_us)
                verdicts.append(NodeVerdict(event.node, at_us, from_us, proof.beat_seq, proof.beat_at_us))
            elif isinstance(event, NodesLost | SilenceHeld | SilenceEnded):
                verdicts.append(NodeVerdict("", at_us, at_us - window_us(self._heartbeat_us), 0, 0))
        return verdicts


def heartbeat_us_of(started: CoordinatorStarted) -> int:
    """Return the heartbeat interval of a term; 1 s where an old version did not write it."""
    return int(started.policy.get("heartbeat_s", 1.0) * 1e6)


def spans(verdicts: Iterable[NodeVerdict]) -> list[tuple[int, int]]:
    """Return the spans of time from which the verdicts need heartbeats: (from, to), both included, in order, without
    overlap."""
    windows = [(verdict.from_us, verdict.at_us) for verdict in verdicts]
    windows += [
        (verdict.named_us - _BEFORE_NAMED_US, verdict.named_us)
        for verdict in verdicts
        if verdict.named_seq and verdict.named_us < verdict.from_us
    ]
    ranges: list[tuple[int, int]] = []
    for from_us, to_us in sorted(windows):
        if ranges and from_us <= ranges[-1][1]:
            ranges[-1] = (ranges[-1][0], max(ranges[-1][1], to_us))
        else:
            ranges.append((from_us, to_us))
    return ranges


def evidence(verdicts: Sequence[NodeVerdict], beats: Iterable[RecordedEvent]) -> list[RecordedEvent]:
    """Select, from all heartbeats within the spans, those that the archive keeps. Both come in order."""
    subjects = {verdict.node for verdict in verdicts} | {COORDINATOR}
    evidence_seqs = {verdict.named_seq for verdict in verdicts}
    # Moments at which the last beat of the others counts (all but the node's own are kept then), and at which the last
    # beat of the stream does.
    moments = sorted({verdict.at_us for verdict in verdicts}, reverse=True)
    marks = sorted({verdict.named_us for verdict in verdicts if verdict.named_seq}, reverse=True)
    selection: dict[tuple[int, int], RecordedEvent] = {}
    fresh: dict[str, RecordedEvent] = {}
    newest: RecordedEvent | None = None
    is_after_own = False

    def keep(*chosen_beats: RecordedEvent) -> None:
        """Select these heartbeats."""
        selection.update({(beat.recorded_at_us, beat.seq): beat for beat in chosen_beats})

    def pass_moments(now_us: float) -> None:
        """Select what counts at the moments before `now_us`."""
        while moments and moments[-1] < now_us:
            moments.pop()
            keep(*fresh.values())
            fresh.clear()
        while marks and marks[-1] < now_us:
            marks.pop()
            if newest is not None:
                keep(newest)

    for beat in beats:
        pass_moments(beat.recorded_at_us)
        newest = beat
        event = beat.envelope.event
        node = event.node if isinstance(event, Heartbeat) else ""
        is_first = node not in subjects and is_after_own
        is_after_own = node == COORDINATOR or (is_after_own and not is_first)
        if node in subjects or is_first or beat.seq in evidence_seqs:
            keep(beat)
        elif node:
            fresh[node] = beat
    pass_moments(float("inf"))
    return [selection[place] for place in sorted(selection)]


def merge_beats(beats: Iterable[RecordedEvent]) -> list[RecordedEvent]:
    """Merge heartbeats from several places (an archive, the stream): each once, in the order in which they were
    sent."""
    by_place = {(beat.recorded_at_us, beat.seq): beat for beat in beats}
    return [by_place[place] for place in sorted(by_place)]
