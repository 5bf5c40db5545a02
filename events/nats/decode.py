"""One event from stdin as one line for people; made for the `nats` CLI:

    nats stream view UNICRON_EVENTS --translate "python -m unicrond.events.nats.decode"
    nats sub 'unicron.v1.>' --translate "python -m unicrond.events.nats.decode --json"

The CLI starts one process per message, mixes stdout with stderr and calls it for empty bodies too. So:
quick to start (no argparse), one line on stdout whatever comes in, nothing on stderr, exit code 0.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import UTC, datetime

import msgpack  # type: ignore[import-untyped]

from unicrond.events.wire.codec import MAX_EVENT_BYTES, BadEvent, read
from unicrond.events.wire.envelope import Envelope

_PROGRAM = "python -m unicrond.events.nats.decode"
HELP = f"usage: {_PROGRAM} [--json] < BODY     e.g. --translate '{_PROGRAM}'"


def line(body: bytes, *, as_json: bool = False) -> str:
    """Describe `body` on one line: "" for an empty body; for bytes that are no event the reason why."""
    if not body:
        return ""
    if as_json:
        return _json(body)
    try:
        envelope, unknown = read(body)
    except BadEvent as error:
        return _plain(f"not a valid event: {error.reason}")
    return _plain(" ".join([_sentence(envelope), *(f"[unknown to this version: {field}]" for field in unknown)]))


def main(arguments: list[str] | None = None) -> int:
    """Read stdin, write one line, return 0."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        if "--help" in arguments or "-h" in arguments:
            text = HELP
        else:
            text = line(sys.stdin.buffer.read(MAX_EVENT_BYTES + 1), as_json="--json" in arguments)
        sys.stdout.buffer.write(text.encode(errors="replace") + b"\n")
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains at exit
    return 0


def _sentence(envelope: Envelope) -> str:
    """Format the event as a sentence with its time, id, term and cause."""
    kind = type(envelope.event).__name__
    try:
        timestamp = (
            datetime.fromtimestamp(envelope.observed_at_us / 1e6, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"
        )
    except (ValueError, OverflowError, OSError):
        timestamp = f"{envelope.observed_at_us}us"
    term = f" term {envelope.term}" if envelope.term else ""
    cause = f" (because of {envelope.caused_by})" if envelope.caused_by else ""
    return f"{timestamp} {envelope.event_id}{term} {kind}: {envelope.event.sentence()}{cause}"


def _json(body: bytes) -> str:
    """Convert msgpack to JSON as it is, valid event or not: JSON shows every field."""
    try:
        value = msgpack.unpackb(body, strict_map_key=False)
        return json.dumps(value, default=str, ensure_ascii=True)
    except Exception as error:  # any input gives a line
        return json.dumps({"error": f"not msgpack: {type(error).__name__}: {error}"})


def _plain(text: str) -> str:
    """Replace unprintable characters, and join the lines."""
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())


if __name__ == "__main__":
    sys.exit(main())
