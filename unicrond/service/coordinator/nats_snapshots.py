"""The newest snapshot in a NATS object-store bucket of its own."""

from __future__ import annotations

import asyncio
import base64
import hashlib

import nats.errors
import nats.js.errors
from nats.js.api import ObjectStoreConfig, StorageType
from nats.js.object_store import ObjectStore

from unicrond.events.log.event_log import LogUnavailable
from unicrond.events.nats.connection import Connection, NoReply, Session
from unicrond.events.nats.direct_reads import DirectReads
from unicrond.events.trust.logins import CACHE_BUCKET, CACHE_STREAM

BUCKET = CACHE_BUCKET
NAME = "cluster-state"
TIMEOUT_S = 10.0


class NatsSnapshotStore:
    """A SnapshotStore. `replicas`: of the bucket, made when it is first written to."""

    def __init__(self, connection: Connection, *, replicas: int = 1) -> None:
        self._connection = connection
        self._replicas = replicas

    async def load(self) -> bytes | None:
        """Return the newest snapshot, None if there is none. Raises LogUnavailable."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                session = await self._connection.session()
                bucket = await session.client.jetstream().object_store(BUCKET)
                info = await bucket.get_info(NAME)
                body = await _chunks(session, f"$O.{BUCKET}.C.{info.nuid}")
        except (nats.js.errors.NotFoundError, nats.js.errors.BucketNotFoundError):
            return None
        except (nats.errors.Error, NoReply, OSError, TimeoutError) as error:
            raise LogUnavailable(f"bucket {BUCKET}: {type(error).__name__}: {error}") from None
        if info.size != len(body) or info.digest != _digest(body):
            raise LogUnavailable(f"bucket {BUCKET}: {len(body)} of {info.size} bytes are there, or others")
        return body

    async def save(self, body: bytes) -> None:
        """Replace the snapshot. Raises LogUnavailable."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                bucket = await self._bucket()
                await bucket.put(NAME, body)
        except (nats.errors.Error, OSError, TimeoutError) as error:
            raise LogUnavailable(f"bucket {BUCKET}: {type(error).__name__}: {error}") from None

    async def _bucket(self) -> ObjectStore:
        session = await self._connection.session()
        stream = session.client.jetstream()
        try:
            return await stream.object_store(BUCKET)
        except (nats.js.errors.NotFoundError, nats.js.errors.BucketNotFoundError):
            config = ObjectStoreConfig(
                description="the coordinator's folded state: a cache", storage=StorageType.FILE, replicas=self._replicas
            )
            return await stream.create_object_store(BUCKET, config)


async def _chunks(session: Session, subject: str) -> bytes:
    """Return what stands on the subject, in its order. By direct gets: a reader may make no consumer. Raises
    NoReply."""
    reads = DirectReads(session, CACHE_STREAM)
    await reads.open()
    try:
        return b"".join([stored.body async for batch in reads.present(1, subject) for stored in batch])
    finally:
        await reads.close()


def _digest(body: bytes) -> str:
    """Return the digest that object stores of NATS keep."""
    return f"SHA-256={base64.urlsafe_b64encode(hashlib.sha256(body).digest()).decode()}"
