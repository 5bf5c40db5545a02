"""A schema older than the first, made up to keep the upcasters honest; its log is golden.

It called a NodeJoined's `slots` "capacity", told a WorkerExited's end by one number (negative for a signal), and
had no `micro_batches_assigned` in a WorkerJoinedGroup.

    python -m tests.replay.schema_0 --facts     after a wanted change of the fold
    python -m tests.replay.schema_0 --log       new bytes; only for a change of this made-up schema
"""

from __future__ import annotations

import argparse
import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from tests.replay.golden import facts
from tests.replay.logs import troubled
from unicrond.core.replayer import replay
from unicrond.events.log.segments import FORMAT, MAGIC, read_entries
from unicrond.events.wire import upcast
from unicrond.events.wire.codec import encode
from unicrond.events.wire.envelope import RecordedEvent
from unicrond.events.wire.upcast import Message

LOG_0 = Path(__file__).parents[1] / "golden" / "log_v0.bin"


def raise_0_to_1(message: Message) -> Message:
    event: dict[str, Any] = message["event"]
    if event["type"] == "NodeJoined":
        event["slots"] = event.pop("capacity")
    elif event["type"] == "WorkerExited":
        ended = event.pop("ended")
        event |= {"exit_code": ended if ended >= 0 else None, "signal": -ended if ended < 0 else None}
    elif event["type"] == "WorkerJoinedGroup":
        event["micro_batches_assigned"] = 0
    return message


def lower_1_to_0(body: bytes) -> bytes:
    """The other way round, to write the golden log."""
    message = msgspec.msgpack.decode(body)
    event = message["event"]
    if event["type"] == "NodeJoined":
        event["capacity"] = event.pop("slots")
    elif event["type"] == "WorkerExited":
        code, signal = event.pop("exit_code"), event.pop("signal")
        event["ended"] = code if code is not None else -signal
    elif event["type"] == "WorkerJoinedGroup":
        del event["micro_batches_assigned"]
    return msgspec.msgpack.encode({**message, "schema": 0})


def write_log_0(entries: Sequence[RecordedEvent]) -> None:
    """One segment, as a version of schema 0 would have written it."""

    def frame(body: bytes) -> bytes:
        head = len(body).to_bytes(4, "big") + zlib.crc32(body).to_bytes(4, "big")
        return head + zlib.crc32(head).to_bytes(4, "big") + body

    header = {"format": FORMAT, "schema": 0, "first_seq": 1}
    records = [["e", each.seq, each.recorded_at_us, lower_1_to_0(encode(each.envelope))] for each in entries]
    LOG_0.write_bytes(MAGIC + frame(msgspec.msgpack.encode(header)) + frame(msgspec.msgpack.encode(records)))


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    choice = parser.add_mutually_exclusive_group(required=True)
    choice.add_argument("--facts", action="store_true")
    choice.add_argument("--log", action="store_true")
    if parser.parse_args().log:
        write_log_0(troubled(2401, faults=5).log)
    upcast.STEPS[0] = raise_0_to_1
    LOG_0.with_suffix(".json").write_text(json.dumps(facts(replay(read_entries(LOG_0))), indent=1) + "\n")


if __name__ == "__main__":
    _main()
