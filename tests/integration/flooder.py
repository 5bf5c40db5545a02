"""Writes to the log with a node's key, as fast as one process can, until the server ends it: valid observations, or
junk where they are to be larger than observations can be; of size 0 calls of JetStream's API; of size -1
acknowledgements.

    python -m tests.integration.flooder URL KEY NODE SECONDS SIZE_BYTES

Prints how many messages it sent and for how long, as JSON. It asks for no acknowledgement.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path

import nats.errors
from nats.aio.client import Client

from unicrond.events import vocabulary as v
from unicrond.events.log.subjects import EVENT_STREAM, subject
from unicrond.events.nats.connection import Login
from unicrond.events.trust.logins import agent_login, inbox_prefix
from unicrond.events.wire.codec import encode
from unicrond.events.wire.envelope import Envelope

TEXT_BYTES_MAX = 1_000
CALLS, ACKNOWLEDGEMENTS = 0, -1


async def flood(url: str, key: Path, node: str, duration_s: float, size_bytes: int) -> dict[str, float]:
    """Join as the node, and write."""
    client, ended, login = Client(), asyncio.Event(), agent_login(node)

    async def end() -> None:
        ended.set()

    await client.connect(
        url, **Login(key=key).options(), allow_reconnect=False, disconnected_cb=end, closed_cb=end, pending_size=1 << 26
    )
    store = v.StoreAddress(host="127.0.0.1", port=1)
    boot = time.time_ns() // 1000
    joined = v.NodeJoined(node=node, address="127.0.0.1", slots=1, store=store, agent_boot=boot, version="1")
    start_s, number = time.monotonic(), 0
    event: v.AnyObservation = joined
    while not ended.is_set() and time.monotonic() - start_s < duration_s:
        number += 1
        envelope = Envelope(producer=node, boot=boot, number=number, observed_at_us=1, event=event)
        is_junk = number > 1 and size_bytes > TEXT_BYTES_MAX
        try:
            if number > 1 and size_bytes == ACKNOWLEDGEMENTS:
                await client.publish(f"$JS.ACK.{EVENT_STREAM}.{login}.1.{number}.{number}.{boot}000.0", b"+ACK")
            elif number > 1 and size_bytes == CALLS:
                await client.publish(f"$JS.API.STREAM.INFO.{EVENT_STREAM}", reply=f"{inbox_prefix(login)}.x")
            else:
                await client.publish(subject(envelope), b"x" * size_bytes if is_junk else encode(envelope))
            if number % 64 == 0:
                await client.flush(timeout=10)
        except (nats.errors.Error, OSError, TimeoutError):
            break
        reason = f"{number} " + "x" * max(0, min(size_bytes, TEXT_BYTES_MAX) - 120)
        event = v.CommandFailed(node=node, command_id=f"1.{number}.{node}.1", reason=reason)
    return {"sent": number, "duration_s": time.monotonic() - start_s}


def main() -> None:
    """Flood as the arguments say, and print what was sent."""
    url, key, node, duration_s, size_bytes = sys.argv[1:]
    print(json.dumps(asyncio.run(flood(url, Path(key), node, float(duration_s), int(size_bytes)))))


if __name__ == "__main__":
    main()
