"""Which heartbeats prove that a node was lost or came back: what the archive keeps of them. Pure.

The heartbeat stream forgets after ten minutes; `unicron-replay verify` derives a verdict from its beats for as long as
the log lasts.

Rules
-----
* A verdict is judged from the beats of a window before it: the longest silence that a node is ever given, and what a
  coordinator allows beside it.
* Kept of a window: all beats of the verdict's node; all of the coordinator's own, which tell a silent bus from a silent
  node; the last one of each other node, which tells whether most of them were silent.
* Kept as well: the beat that the verdict names, and the one that stood last in the stream at that time. A crash of
  nats-server takes the newest beats back and gives their numbers anew; the second one shows that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from events.codec import COORDINATOR
from events.envelope import Entry, Recorded
from events.vocabulary import CoordinatorStarted, Heartbeat, NodeLost, NodeReturned

#: Three times the limit of 2 beats + 0.5 s; 2 s to connect again; 1.5 s for the way of the verdict; one beat more.
_WINDOW_BEATS = 7
_WINDOW_US = 5_500_000
#: What is read before the beat that a verdict names, where that is older than the window.
_BEFORE_NAMED_US = 1_000_000


class Verdict(NamedTuple):
    """A NodeLost or NodeReturned of the log. `named_seq`, `named_us`: the beat that it names, 0 for none."""

    node: str
    at_us: int
    from_us: int
    named_seq: int
    named_us: int


def window_us(heartbeat_us: int) -> int:
    """How far before a verdict its evidence reaches."""
    return _WINDOW_BEATS * heartbeat_us + _WINDOW_US


class Verdicts:
    """Finds verdicts in a log that is read in order. `heartbeat_us`: of the term in which reading begins."""

    def __init__(self, heartbeat_us: int) -> None:
        self._heartbeat_us = heartbeat_us

    def among(self, entries: Iterable[Entry]) -> list[Verdict]:
        """Those among the next entries, in order."""
        found: list[Verdict] = []
        for entry in entries:
            if not isinstance(entry, Recorded):
                continue
            event, at_us = entry.envelope.event, entry.recorded_at_us
            if isinstance(event, CoordinatorStarted):
                self._heartbeat_us = heartbeat_us_of(event)
            elif isinstance(event, NodeLost | NodeReturned):
                named = event.evidence
                from_us = at_us - window_us(self._heartbeat_us)
                found.append(Verdict(event.node, at_us, from_us, named.beat_seq, named.beat_at_us))
        return found


def heartbeat_us_of(started: CoordinatorStarted) -> int:
    """The heartbeat of a term; 1 s where an old version did not write it."""
    return int(started.policy.get("heartbeat_s", 1.0) * 1e6)


def spans(verdicts: Iterable[Verdict]) -> list[tuple[int, int]]:
    """When the evidence for these verdicts was said: from and to, both included, one after another."""
    wanted = [(it.from_us, it.at_us) for it in verdicts]
    wanted += [
        (it.named_us - _BEFORE_NAMED_US, it.named_us) for it in verdicts if it.named_seq and it.named_us < it.from_us
    ]
    found: list[tuple[int, int]] = []
    for from_us, to_us in sorted(wanted):
        if found and from_us <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], to_us))
        else:
            found.append((from_us, to_us))
    return found


def evidence(verdicts: Sequence[Verdict], beats: Iterable[Recorded]) -> list[Recorded]:
    """Of all beats that were said within one of the spans, in order, those that are kept; in order."""
    subjects = {it.node for it in verdicts} | {COORDINATOR}
    named = {it.named_seq for it in verdicts}
    # Moments at which the last beat of the others counts (all but the node's own are kept then), and at which the last
    # beat of the stream does.
    moments = sorted({it.at_us for it in verdicts}, reverse=True)
    marks = sorted({it.named_us for it in verdicts if it.named_seq}, reverse=True)
    kept: dict[tuple[int, int], Recorded] = {}
    fresh: dict[str, Recorded] = {}
    newest: Recorded | None = None

    def keep(*some: Recorded) -> None:
        kept.update({(beat.recorded_at_us, beat.seq): beat for beat in some})

    def pass_moments(now_us: float) -> None:
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
        if node in subjects or beat.seq in named:
            keep(beat)
        elif node:
            fresh[node] = beat
    pass_moments(float("inf"))
    return [kept[place] for place in sorted(kept)]


def in_order(beats: Iterable[Recorded]) -> list[Recorded]:
    """Beats from several places (an archive, the stream), each once, in the order in which they were said."""
    found = {(beat.recorded_at_us, beat.seq): beat for beat in beats}
    return [found[place] for place in sorted(found)]
