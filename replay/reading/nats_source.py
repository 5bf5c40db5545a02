"""The event stream of a NATS server as a source.

Nothing is created or changed there: no stream, no durable consumer, no message. A login that is no reader's has a
consumer in the server's memory, which the server drops when we leave. A server that falls silent is an error here,
for a person is waiting. A long log is read by a process of its own (`reading_process.py`),
at the same time as it is decoded and folded here.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

from unicrond.core.state.state import ClusterState
from unicrond.events.archive.archived_log import ArchivedLog, archived_beats
from unicrond.events.log.event_log import EventLog, LogError, LogUnavailable
from unicrond.events.log.subjects import BEAT_STREAM, EVENT_STREAM, entry
from unicrond.events.nats.connection import Connection, Login, connect
from unicrond.events.nats.event_log import NatsEventLog, decode_messages
from unicrond.events.nats.log_proof import LogProof
from unicrond.events.nats.reader import read_stream
from unicrond.events.nats.server import tls_of
from unicrond.events.nats.stored_message import StoredMessage
from unicrond.events.nats.streams import IMPORTED, JetStreamError, api
from unicrond.events.trust.logins import Role
from unicrond.events.vocabulary.phrases import EPOCH
from unicrond.events.wire.envelope import Entry, RecordedEvent
from unicrond.replay.reading.reading_process import read_in_process
from unicrond.replay.reading.source import CHUNK_ENTRIES, LogChunk
from unicrond.service.coordinator.nats_snapshots import NatsSnapshotStore
from unicrond.service.coordinator.snapshots import Snapshots

CONNECT_TIMEOUT_S = 5.0
STALL_S = 20.0
#: With so many entries still to read, a process of its own reads them while we decode and fold. On 2 cores, which the
#: server shared, it began to pay at 75,000 entries (docs/results/benchmarks.md, "Replay").
APART_FROM = 100_000
#: So many of them are read here meanwhile: about what is folded until that process has started.
HEAD = 25_000
STREAM_NOT_FOUND = 10059


class NatsSource:
    """The event stream of a NATS server, up to the entry that was the last when it was opened.

    `apart_from`: with so many entries still to read (and no archive), a process of their own reads them.
    `has_own_times`: False where `unicron-replay import` wrote it.
    """

    def __init__(
        self,
        connection: Connection,
        last_seq: int,
        last_us: int,
        archive: Path | None = None,
        *,
        apart_from: int = APART_FROM,
        has_own_times: bool = True,
    ) -> None:
        self._connection = connection
        self._stream = NatsEventLog(connection, proof=LogProof(reader="this replay"))
        self._archive = archive
        self._log: EventLog = self._stream if archive is None else ArchivedLog(self._stream, archive)
        self._last_seq = last_seq
        self._last_us = last_us
        self._apart_from = apart_from
        self.has_own_times = has_own_times

    async def chunks(self, after_seq: int = 0) -> AsyncGenerator[LogChunk, None]:
        """Yield the entries; see Source. Raises LogUnavailable where the server falls silent."""
        seq = after_seq
        async with aclosing(self._batches(after_seq)) as batches:
            while seq < self._last_seq:
                async with self._bounded(f"nothing after entry {seq} of {self._last_seq}"):
                    batch = await anext(batches)
                seq = batch[-1].seq
                yield LogChunk(batch, seq / self._last_seq)

    async def _batches(self, after_seq: int) -> AsyncGenerator[list[Entry], None]:
        if self._log is self._stream:
            async with aclosing(self._stored(after_seq)) as batches:
                async for batch in batches:
                    yield decode_messages(batch)
            return
        waiting: list[Entry] = []
        async with aclosing(self._log.read(after_seq, until_seq=self._last_seq)) as entries:
            async for item in entries:
                waiting.append(item)
                if len(waiting) == CHUNK_ENTRIES or item.seq == self._last_seq:
                    yield waiting
                    waiting = []

    def _stored(self, after_seq: int) -> AsyncGenerator[list[StoredMessage], None]:
        if self._last_seq - after_seq >= self._apart_from:
            return self._stored_apart(after_seq)
        return self._stream.read_stored(after_seq, until_seq=self._last_seq)

    async def _stored_apart(self, after_seq: int) -> AsyncGenerator[list[StoredMessage], None]:
        head = after_seq + min(HEAD, (self._last_seq - after_seq) // 4)
        async with read_in_process(self._connection, head, self._last_seq) as rest:
            for part in (self._stream.read_stored(after_seq, until_seq=head), rest):
                async with aclosing(part) as batches:
                    async for batch in batches:
                        yield batch

    async def skips(self) -> dict[int, str]:
        """Return the skipped entries; see Source."""
        async with self._bounded("no answer about the skipped entries"):
            return await self._log.skips()

    async def end_us(self) -> int:
        """Return when the newest entry was recorded; see Source."""
        return self._last_us

    async def snapshot(self) -> ClusterState | None:
        """Return the state of the coordinator's newest snapshot; None, with a warning, if none fits this log."""
        match = await Snapshots(NatsSnapshotStore(self._connection)).restore(self._log)
        return match[0] if match is not None and match[0].seq <= self._last_seq else None

    async def beats(self) -> AsyncGenerator[list[RecordedEvent], None]:
        """Yield first the heartbeats that the archive keeps, then the stream's, some of them once more; see Source."""
        if self._archive is not None:
            for batch in archived_beats(self._archive):
                yield batch
                await asyncio.sleep(0)
        try:
            async with self._bounded("no answer about the heartbeats"):
                newest = (await api(self._connection, f"STREAM.INFO.{BEAT_STREAM}", {}))["state"]
        except JetStreamError as error:
            if error.code != STREAM_NOT_FOUND:
                raise
            return
        if not newest["messages"]:
            return
        chunk: list[RecordedEvent] = []
        stream = read_stream(self._connection, BEAT_STREAM, start={"deliver_policy": "all"})
        async with aclosing(stream) as messages:
            while True:
                async with self._bounded("no heartbeats"):
                    stored = await anext(messages)
                beat = entry(stored.seq, stored.recorded_at_us, stored.subject, stored.body)
                if isinstance(beat, RecordedEvent):
                    chunk.append(beat)
                if len(chunk) == CHUNK_ENTRIES or stored.seq >= newest["last_seq"]:
                    yield chunk
                    chunk = []
                if stored.seq >= newest["last_seq"]:
                    return

    @asynccontextmanager
    async def _bounded(self, message: str) -> AsyncIterator[None]:
        """Raise LogUnavailable with `message` after STALL_S: the client repeats requests to the server without end."""
        try:
            async with asyncio.timeout(STALL_S):
                yield
        except TimeoutError:
            raise LogUnavailable(f"{self._connection.urls}: {message} in {STALL_S:g} s; is the server up?") from None


@asynccontextmanager
async def open_nats(
    urls: Sequence[str], login: Login | None = None, *, archive: Path | None = None, apart_from: int = APART_FROM
) -> AsyncIterator[NatsSource]:
    """Open the log of a NATS server or cluster. Raises LogError in one line if there is none. `archive`: its older
    part.

    `apart_from`: as for NatsSource."""
    connection = await connect(urls, name="unicron-replay", login=login, timeout_s=CONNECT_TIMEOUT_S)
    try:
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                info = await api(connection, f"STREAM.INFO.{EVENT_STREAM}", {})
        except TimeoutError:
            raise LogUnavailable(
                f"{connection.urls}: JetStream did not answer within {CONNECT_TIMEOUT_S:g} s;"
                " is it enabled there, and may this login read it?"
            ) from None
        except JetStreamError as error:
            if error.code != STREAM_NOT_FOUND:
                raise
            raise LogError(
                f"{connection.urls}: no stream {EVENT_STREAM} there; is it the coordinator's server?"
            ) from None
        last_seq = int(info["state"]["last_seq"])
        last_us = (datetime.fromisoformat(info["state"]["last_ts"]) - EPOCH) // timedelta(microseconds=1)
        yield NatsSource(
            connection,
            last_seq,
            last_us if last_seq else 0,
            archive,
            apart_from=apart_from,
            has_own_times=IMPORTED not in (info["config"].get("metadata") or {}),
        )
    finally:
        await connection.close()


def embedded_login(state_dir: Path, login: Login) -> Login:
    """Return the login to use there: as passed; where nothing is set, with the reader's key, if the coordinator made
    one. The CA is the coordinator's, if none is set."""
    key = state_dir / "keys" / f"{Role.READER}.key"
    tls = {name: getattr(login, name) for name in ("tls_ca", "tls_cert", "tls_key")}
    if replace(login, tls_ca=None, tls_cert=None, tls_key=None) == Login() and key.exists():
        login = Login(key=key, **tls)
    return login if login.tls_ca else replace(login, **tls_of(state_dir / "nats"))
