"""Alarms: what a person has to look at though nothing has stopped, in one line each.

Rules
-----
* An invalid message in the log is lost to the fold. Where a known producer wrote it (a node of the
  cluster, the API, a coordinator) a fact or an order is missing: most likely another version is at work there.
* Alarms follow from the log and the time alone, so that a restart brings none back that is over. The state does not
  hold them: nothing is decided from them.
* An alarm lasts until STANDS_US after its producer's last such message.
* A head that hears none of its nodes says so for as long as that silence stands in the state.
* A checkpoint that could not be written is an alarm until a later one is written, or the task has ended; this one is in
  the state.
* Each decision that the brakes hold is an alarm of its own: who has seen one has not seen the next.
* Nodes that were lost together are one alarm while they are awaited, and one each afterwards.
* What people did about an alarm (core/state/alarms.py) ends when the alarm has not stood for GONE_US, as this head sees
  it: one that comes and goes stays acknowledged. The coordinator that leads says so in the log, once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from unicrond.core.fold import LEAP_MAX_US
from unicrond.core.nodes.brakes import hold_subject, hold_text, open_holds
from unicrond.core.nodes.liveness import OWN_NAME, Flood
from unicrond.core.nodes.outages import outage_texts
from unicrond.core.state.alarms import Alarm
from unicrond.core.state.state import ClusterState, Task
from unicrond.events.log.subjects import PREFIX, TERM_SUBJECT
from unicrond.events.vocabulary import AlarmEnded
from unicrond.events.vocabulary.phrases import clean, count, span, task_of, to_the_second
from unicrond.events.wire.codec import API_PRODUCER
from unicrond.events.wire.envelope import QuarantinedMessage
from unicrond.events.wire.schemas import SCHEMA

log = logging.getLogger("unicrond")

STANDS_US = 3600 * 1_000_000
GONE_US = 60_000_000
#: So many held decisions have an alarm each.
HOLDS_MAX = 16
#: So many messages of a node's workers within a minute or two are a flood. A program that saves each of its tiny
#: iterations stays below.
FLOOD_MESSAGES = 1000
_SAVE_FAILURES = {
    "unicron": "did not save the checkpoint",
    "program": "its program did not save its checkpoint",
}
_BEATS = f"{PREFIX}.beat."


@dataclass(frozen=True, slots=True)
class UnreadableMessages:
    """Messages of one known producer that are not valid events; `kind`, `reason`: of the last."""

    count: int
    seq: int
    at_us: int
    kind: str
    reason: str


class Alarms:
    """The alarms of one coordinator. Its shell passes on the messages that could not be read."""

    def __init__(self) -> None:
        self.unreadable: dict[str, UnreadableMessages] = {}
        self._schemas: dict[str, int] = {}

    def quarantined(self, entry: QuarantinedMessage, state: ClusterState) -> str:
        """Record a quarantined entry; return the alarm that it raises, "" where its producer is unknown."""
        producer, kind = written_by(entry.subject)
        if producer not in state.nodes and producer not in (API_PRODUCER, OWN_NAME):
            return ""
        before = self.unreadable.get(producer)
        count = before.count + 1 if before else 1
        self.unreadable[producer] = UnreadableMessages(count, entry.seq, entry.recorded_at_us, kind, entry.reason)
        node = state.nodes.get(producer)
        self._schemas[producer] = node.agent.schema if node else SCHEMA
        return self._line(producer)

    def standing(self, now_us: int) -> list[Alarm]:
        """Return the alarms at this moment, ordered by producer."""
        return [
            Alarm("message-unreadable", self._line(name), name)
            for name, unreadable in sorted(self.unreadable.items())
            if now_us - unreadable.at_us < STANDS_US
        ]

    def _line(self, producer: str) -> str:
        unreadable, schema = self.unreadable[producer], self._schemas[producer]
        author = f"node {producer}" if producer not in (API_PRODUCER, OWN_NAME) else f"the {producer}"
        messages = (
            f"{unreadable.count} unreadable messages, the last" if unreadable.count > 1 else "an unreadable message"
        )
        newer = f"; its agent is of schema {schema}, this coordinator reads {SCHEMA}" if schema > SCHEMA else ""
        return f"{author}: {messages} at sequence {unreadable.seq} ({unreadable.kind}): {unreadable.reason}{newer}"


def unsaved_alarms(state: ClusterState) -> list[Alarm]:
    """Return an alarm for each active task whose last checkpoint was not written."""
    alarms = []
    for task in state.active:
        failures = [_save_failure(task, saver, reason) for saver, reason in sorted(task.progress.save_failures.items())]
        if failures:  # one alarm of both savers: an alarm's key stands once
            alarms.append(Alarm("checkpoint-unsaved", f"task {task.name}: {'; '.join(failures)}", task.name))
    return alarms


def _save_failure(task: Task, saver: str, reason: str) -> str:
    since_us, newest = task.progress.unsaved_since_us.get(saver), task.progress.checkpoint_iteration
    text = f"{_SAVE_FAILURES[saver]} {reason}" + (f"; so since {to_the_second(since_us)}" if since_us else "")
    if saver != "unicron":
        return text
    place = task.spec.checkpoint.dir or "its directory"
    return f"{text}; the newest in {place} is of iteration {newest}" if newest else f"{text}; {place} has none yet"


def silence_alarms(state: ClusterState) -> list[Alarm]:
    """Return the alarm of a head that hears none of its nodes."""
    if state.silence is None:
        return []
    since, nodes = to_the_second(state.silence.since_us), count(state.silence.nodes, "node")
    lost = "; they are lost by now" if state.silence.are_lost else ""
    cause = "is the NATS server, the DNS name or the password wrong?"
    text = f"the head hears none of {nodes} since {since}: {cause} nothing is decided about them{lost}"
    return [Alarm("nodes-unheard", text)]


def outage_alarms(state: ClusterState) -> list[Alarm]:
    """Return an alarm for each outage whose nodes are awaited."""
    return [Alarm("domain-lost", text, incident) for incident, text in outage_texts(state).items()]


def clock_alarms(lead_us: int) -> list[Alarm]:
    """Return the alarm of a log whose clock is not the head's. `lead_us`: by how much it was ahead of the head's clock
    when the head's last decision was appended."""
    if abs(lead_us) <= LEAP_MAX_US:
        return []
    side = "ahead of" if lead_us > 0 else "behind"
    text = f"the clock of the log's NATS server is {span(abs(lead_us))} {side} this head's: set both by NTP"
    return [Alarm("clocks-apart", text)]


def hold_alarms(state: ClusterState) -> list[Alarm]:
    """Return an alarm for each decision that is held, the oldest HOLDS_MAX, and one of the others together."""
    holds = open_holds(state)
    alarms = [
        Alarm("decisions-held", f"{clean(hold_text(hold))} since {to_the_second(hold.since_us)}", hold_subject(hold))
        for hold in holds[:HOLDS_MAX]
    ]
    if rest := len(holds) - len(alarms):
        alarms.append(Alarm("decisions-held", f"{count(rest, 'more decision is', 'more decisions are')} held"))
    return alarms


def flood_alarms(floods: Mapping[str, Flood]) -> list[Alarm]:
    """Return an alarm for each node whose workers say far more than goes on to the log."""
    return [
        Alarm(
            "worker-floods",
            f"worker {flood.worker} of task {task_of(flood.worker)} on node {name} floods its agent: "
            f"{flood.messages} messages of the node's workers were dropped, replaced or read late within a minute",
            name,
        )
        for name, flood in floods.items()
        if flood.messages >= FLOOD_MESSAGES and flood.worker
    ]


def written_by(subject: str) -> tuple[str, str]:
    """Return the only producer on this subject and the type of event; two empty texts where there is none."""
    if subject.startswith(_BEATS):
        return subject.removeprefix(_BEATS), "Heartbeat"
    tokens = subject.removeprefix(f"{PREFIX}.").split(".")
    if subject == TERM_SUBJECT:
        return OWN_NAME, "CoordinatorStarted"
    if len(tokens) != 3:
        return "", ""
    return (tokens[1] if tokens[0] == "obs" else OWN_NAME), tokens[2]


class AlarmBoard:
    """Finds the alarms that are over, for one coordinator."""

    def __init__(self) -> None:
        #: Since when an alarm that people have handled does not stand, by the caller's monotonic clock.
        self._absent_us: dict[str, int] = {}
        self._ended: set[str] = set()

    def endings(self, state: ClusterState, standing: Callable[[], Collection[str]], now_us: int) -> list[AlarmEnded]:
        """Return what is to be said of alarms that are over. To be called at each judgement, also while nothing is
        handled: what was said then counts no more. `standing`: returns the keys of those that stand, asked where that
        matters; `now_us`: monotonic."""
        handled = state.alarms
        self._ended &= handled.keys()
        keys = standing() if handled else ()
        absent = {key: self._absent_us.get(key, now_us) for key in handled if key not in keys}
        self._absent_us = absent
        over = [key for key, since_us in absent.items() if now_us - since_us >= GONE_US and key not in self._ended]
        self._ended.update(over)
        return [AlarmEnded(alarm=key) for key in over]

    def begin(self) -> None:
        """Forget what was seen: a term begins."""
        self._absent_us.clear()
        self._ended.clear()
