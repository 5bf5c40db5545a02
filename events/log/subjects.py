"""Where an event stands on NATS: streams, subjects, headers.

Subjects (node and type in them, so `nats stream subjects` and `--last-per-subject` say something):

    unicron.v1.obs.<node or "api">.<Type>     observations
    unicron.v1.decision.<key>.<Type>          decisions; key = the task, the node, or "cluster"
    unicron.v1.command.<node>.<Type>          commands
    unicron.v1.term                           CoordinatorStarted alone: the fencing token
    unicron.v1.beat.<node>                    heartbeats, on a stream of their own

The subject follows from the envelope, so a reader compares: a node that may publish only under its own
name cannot speak for another one. Headers are for people and for de-duplication; nothing is folded from
them.
"""

from __future__ import annotations

import base64
import hashlib
import secrets
from collections.abc import Collection

from unicrond.events.log.event_log import BROADCAST_TYPES
from unicrond.events.vocabulary import (
    Command,
    CoordinatorStarted,
    Heartbeat,
    NodeForgotten,
    NodeIsolated,
    NodeJoined,
    NodeReadmitted,
)
from unicrond.events.vocabulary.phrases import clean
from unicrond.events.wire.codec import COORDINATOR, BadEvent, read
from unicrond.events.wire.envelope import Entry, Envelope, QuarantinedMessage, RecordedEvent

EVENT_STREAM = "UNICRON_EVENTS"
BEAT_STREAM = "UNICRON_BEATS"
PREFIX = "unicron.v1"
TERM_SUBJECT = f"{PREFIX}.term"
#: Of EntrySkipped alone; within the subjects of decisions, so that a stream of older versions has room for it.
SKIP_SUBJECT = f"{PREFIX}.decision.cluster.EntrySkipped"
EVENT_SUBJECTS = (f"{PREFIX}.obs.*.*", f"{PREFIX}.decision.*.*", f"{PREFIX}.command.*.*", TERM_SUBJECT)
BEAT_SUBJECTS = (f"{PREFIX}.beat.*",)
#: Where the coordinator's own beats go round.
OWN_BEATS_SUBJECT = f"{PREFIX}.beat.{COORDINATOR}"
MAX_SUMMARY_CHARS = 160
#: The header beside a membership for the nodes that read it (`membership_certificates.py`).
WARRANT_HEADER = "Unicron-Warrant"
#: How the message id begins under which a restored log holds what was no event; the reason follows. An archive does not
#: keep what such a message held.
_QUARANTINE_ID = "quarantined."


def command_subjects(node: str) -> str:
    """Return the filter that matches every command to `node`."""
    return f"{PREFIX}.command.{node}.*"


def feed_subjects(node: str, tasks: Collection[str]) -> list[str]:
    """Return the filters that match every command to `node`, and the broadcast decisions of each of `tasks`."""
    filters = [f"{PREFIX}.decision.{task}.{kind.__name__}" for task in sorted(tasks) for kind in BROADCAST_TYPES]
    return [command_subjects(node), *filters]


def joins_subject(node: str) -> str:
    """Return the subject on which the agents of this name report that they join."""
    return f"{PREFIX}.obs.{node}.{NodeJoined.__name__}"


def standing_subjects(node: str) -> tuple[str, ...]:
    """Return the subjects on which the coordinator isolates and readmits the node."""
    return tuple(f"{PREFIX}.decision.{node}.{kind.__name__}" for kind in (NodeIsolated, NodeReadmitted, NodeForgotten))


def agent_consumer(node: str) -> str:
    """Return the name of the durable consumer through which `node`'s agent receives its commands."""
    return f"agent-{node}"


def subject(envelope: Envelope) -> str:
    """Return the one subject on which this envelope may stand."""
    event = envelope.event
    kind = type(event).__name__
    if not event.is_decided:
        if type(event) is Heartbeat:
            return f"{PREFIX}.beat.{event.node}"
        return f"{PREFIX}.obs.{envelope.producer}.{kind}"
    if isinstance(event, CoordinatorStarted):
        return TERM_SUBJECT
    if isinstance(event, Command):
        return f"{PREFIX}.command.{event.node}.{kind}"
    key = getattr(event, "task", None) or getattr(event, "node", None) or "cluster"
    return f"{PREFIX}.decision.{key}.{kind}"


class MessageIds:
    """The ids by which the server recognises messages of one process: the event id, and a part that no other process
    can guess.

    Otherwise somebody could write a message under a future id, and the event itself would be taken for its repetition.
    The part follows from a secret of this process and the event id, so that readers of one id of a boot do not know the
    next.
    """

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)

    def of(self, envelope: Envelope) -> str:
        """Return the message id, the same each time."""
        event_id = envelope.event_id
        return f"{event_id}.{hashlib.blake2b(event_id.encode(), key=self._secret, digest_size=12).hexdigest()}"


def headers(envelope: Envelope, message_id: str = "") -> dict[str, str]:
    """Return plain ASCII headers: the message id, and what a person looks for with the `nats` CLI."""
    event = envelope.event
    spec = getattr(event, "spec", None)
    fields = {
        "Nats-Msg-Id": message_id or envelope.event_id,
        "Unicron-Type": type(event).__name__,
        "Unicron-Node": getattr(event, "node", ""),
        "Unicron-Task": getattr(event, "task", "") or (spec.name if spec else ""),
        "Unicron-Worker": getattr(event, "worker", ""),
        "Unicron-Summary": _plain(event.sentence()),
    }
    return {header: value for header, value in fields.items() if value}


def quarantine_id(message: QuarantinedMessage) -> str:
    """Return the message id under which a message of the same size is read as this one again (`entry`)."""
    reason = base64.urlsafe_b64encode(message.reason.encode()).decode()
    return f"{_QUARANTINE_ID}{message.seq}.{reason}"


def entry(seq: int, recorded_at_us: int, on_subject: str, body: bytes, message_id: str = "") -> Entry:
    """Decode a stored message: an event, or a quarantined message with the reason why it is none.

    `message_id`: the id under which it was written, "" where it had none: it begins with the event's own id.
    """
    try:
        if message_id.startswith(_QUARANTINE_ID):
            raise BadEvent(clean(_reason(message_id)))
        envelope, unknown = read(body)
        expected = subject(envelope)
        if expected != on_subject:
            raise BadEvent(f"{envelope.event_id} belongs on subject {expected}, not on {on_subject}")
        if message_id and not f"{message_id}.".startswith(f"{envelope.event_id}."):
            raise BadEvent(f"{envelope.event_id} was written under the id of another message, {message_id!r:.200}")
    except BadEvent as error:
        return QuarantinedMessage(seq, recorded_at_us, on_subject, error.reason, len(body))
    return RecordedEvent(seq, recorded_at_us, envelope, body if unknown else b"")


def _reason(message_id: str) -> str:
    """Return the reason in a `quarantine_id`."""
    try:
        return base64.b64decode(message_id.rpartition(".")[2], altchars=b"-_", validate=True).decode()
    except ValueError:
        return f"it was written under the id {message_id!r:.200}"


def _plain(text: str) -> str:
    """Return one short line of printable ASCII."""
    line = " ".join(text.split())
    plain = "".join(char if " " <= char <= "~" else "?" for char in line)
    return plain if len(plain) <= MAX_SUMMARY_CHARS else plain[: MAX_SUMMARY_CHARS - 3] + "..."
