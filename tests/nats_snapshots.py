"""A backup of a stream and its restoration, as `nats stream backup` and `nats stream restore` make them: for tests."""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

from unicrond.events.nats.connection import Connection
from unicrond.events.nats.streams import answer, api

_CHUNK_BYTES = 64 * 1024


class StreamBackup(NamedTuple):
    """What a backup of a stream holds."""

    config: dict[str, Any]
    state: dict[str, Any]
    chunks: list[bytes]


async def backup(connection: Connection, stream: str) -> StreamBackup:
    """Take a backup of the stream with its consumers."""
    session = await connection.session()
    inbox, messages = session.client.new_inbox(), asyncio.Queue[tuple[bytes, bytes]]()
    subscription = await session.subscribe_raw(inbox, lambda _, reply, body, __: messages.put_nowait((reply, body)))
    request = {"deliver_subject": inbox, "no_consumers": False, "chunk_size": _CHUNK_BYTES}
    begun = await api(connection, f"STREAM.SNAPSHOT.{stream}", request)
    chunks: list[bytes] = []
    async with asyncio.timeout(30):
        while True:
            reply, body = await messages.get()
            if not body:
                break
            chunks.append(body)
            if reply:
                await session.publish(reply.decode(), b"")
    await session.unsubscribe_raw(subscription)
    return StreamBackup(begun["config"], begun["state"], chunks)


async def restore(connection: Connection, saved: StreamBackup) -> None:
    """Make the stream again from its backup, where there is none."""
    subject = f"STREAM.RESTORE.{saved.config['name']}"
    begun = await api(connection, subject, {"config": saved.config, "state": saved.state})
    session = await connection.session()
    for chunk in [*saved.chunks, b""]:
        reply = await session.request(begun["deliver_subject"], chunk, timeout_s=30)
        if reply.data:
            answer(subject, reply.data)
