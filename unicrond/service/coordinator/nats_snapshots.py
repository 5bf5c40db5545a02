"""The newest snapshot in a NATS object-store bucket of its own."""

from __future__ import annotations

import asyncio

import nats.errors
import nats.js.errors
from nats.js.api import ObjectStoreConfig, StorageType
from nats.js.object_store import ObjectStore

from unicrond.events.log.event_log import LogUnavailable
from unicrond.events.nats.connection import Connection
from unicrond.events.trust.logins import CACHE_BUCKET

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
                stored_object = await bucket.get(NAME)
                return bytes(stored_object.data or b"")
        except (nats.js.errors.NotFoundError, nats.js.errors.BucketNotFoundError):
            return None
        except (nats.errors.Error, OSError, TimeoutError) as error:
            raise LogUnavailable(f"bucket {BUCKET}: {type(error).__name__}: {error}") from None

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
