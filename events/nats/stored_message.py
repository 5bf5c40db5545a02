"""A message as a stream holds it, parsed from the forms in which the server hands it out."""

from __future__ import annotations

import base64
import re
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from nats.aio.msg import Msg

from unicrond.events.log.subjects import entry
from unicrond.events.vocabulary.phrases import EPOCH
from unicrond.events.wire.envelope import Entry

#: The server's own headers in an answer to a direct get of many messages.
_STREAM = b"\r\nNats-Stream: "
_ADDED = re.compile(
    rb"[^\r]*\r\nNats-Subject: ([^\r]*)\r\nNats-Sequence: (\d+)\r\nNats-Time-Stamp: ([^\r]*)"
    rb"\r\nNats-Num-Pending: \d+\r\nNats-Last-Sequence: (\d+)\r\n"
)
_MICROSECOND = timedelta(microseconds=1)


class StoredMessage(NamedTuple):
    """A message as the stream holds it. `headers`: only where headers alone were requested.
    `message_id`: "" for none."""

    seq: int
    recorded_at_us: int
    subject: str
    body: bytes
    headers: dict[str, str] | None
    message_id: str = ""


def stored_message(message: Msg) -> StoredMessage:
    """Convert a delivered message to the form in which the stream holds it."""
    message_id = (message.headers or {}).get("Nats-Msg-Id", "")
    return delivery(message.reply, message.subject, message.data, message.headers, message_id)[1]


def message_id_in(headers: bytes) -> str:
    """Return the message id among raw headers, without parsing the others."""
    _, _, rest = headers.partition(b"\r\nNats-Msg-Id:")
    return rest.partition(b"\r\n")[0].strip().decode("utf-8", "replace") if rest else ""


def delivery(
    reply: str, subject: str, body: bytes, headers: dict[str, str] | None, message_id: str = ""
) -> tuple[int, StoredMessage]:
    """Parse a delivery; return the delivery number and the message. A reply subject reads

    $JS.ACK.<stream>.<consumer>.<deliveries>.<stream seq>.<delivery number>.<time, ns>.<pending>
    with <domain>.<account> after "ACK" where there are domains, and perhaps a token more at the end.
    """
    tokens = reply.split(".")
    first = 4 if len(tokens) == 9 else 6
    seq, number, at_ns = int(tokens[first + 1]), int(tokens[first + 2]), int(tokens[first + 3])
    return number, StoredMessage(seq, at_ns // 1000, subject, body, headers, message_id)


def direct_answer(headers: bytes, body: bytes) -> tuple[int, StoredMessage] | None:
    """Parse an answer to a direct get; return the sequence before it in the same batch, and the message. None: it is no
    message, but says something of the request.

    The server's own headers are the last ones, whatever the writer of the message has put before them. Raises
    ValueError where they cannot be read.
    """
    begin = headers.rfind(_STREAM)
    if begin < 0:
        return None
    match = _ADDED.match(headers, begin + len(_STREAM))
    if match is None:
        raise ValueError(f"no answer to a direct get of many: {headers!r:.200}")
    subject, seq, time, last_seq = match.groups()
    at_us = stored_time_us(time.decode())
    return int(last_seq), StoredMessage(int(seq), at_us, subject.decode(), body, None, message_id_in(headers[:begin]))


def stored_entry(message: dict[str, Any]) -> Entry:
    """Decode the entry in an answer of STREAM.MSG.GET."""
    body = base64.b64decode(message.get("data", ""))
    message_id = message_id_in(base64.b64decode(message.get("hdrs", "")))
    return entry(int(message["seq"]), stored_time_us(message["time"]), message["subject"], body, message_id)


def stored_time_us(text: str) -> int:
    """Parse a time as the server writes it, and return microseconds since the epoch."""
    return (datetime.fromisoformat(text) - EPOCH) // _MICROSECOND
