"""The event stream made from an archive: the same entries under the same numbers, recorded at the same times.

Way
---
A server of our own, for this moment, mirrors an origin that this process plays (`mirror_origin.py`) and stores what the
archive holds. The mirror is made a stream with our configuration. Its files become those of an embedded server, which
starts anew for it. On servers of others its snapshot is restored by the coordinator's login: the operator's cannot, as
what comes by an import of another account has a header of the server's, and so the empty message that ends a restore is
not empty (nats-server 2.15.1).

Rules
-----
* A stream that holds entries, or held some, is never touched.
* The target changes at the very end: it has the whole stream or none. What was made is compared with the archive
  before; after, a cluster that waited for its log writes to it at once. A server whose disk does not take a part of a
  snapshot within 5 s gives up, and keeps what it has (2.15.1, with `sync_interval: always` on a busy disk): that is
  removed, and tried again.
* Older entries may stay in the archive alone, as after a trim: the newest claim of a term, which fences appends, may
  not.
* An entry that was no event (QuarantinedMessage) is read as the same one again, though its bytes were never archived.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

from unicrond.events.archive.archived_log import archived_batches
from unicrond.events.archive.mirror_origin import API, ORIGIN, MirrorOrigin, OriginMessage
from unicrond.events.log.event_log import LogDamaged, LogError
from unicrond.events.log.log_identity import mark_of
from unicrond.events.log.subjects import EVENT_STREAM, headers, quarantine_id, subject
from unicrond.events.nats.connection import Connection, Login, Session, connect, parse_headers
from unicrond.events.nats.log_proof import LogProof
from unicrond.events.nats.server import EmbeddedServer, ServerError
from unicrond.events.nats.streams import NO_STREAM, JetStreamError, answer, api, api_once, event_stream_config
from unicrond.events.trust.accounts import NatsAccount
from unicrond.events.vocabulary import CoordinatorStarted
from unicrond.events.wire.codec import body_of
from unicrond.events.wire.envelope import Entry, RecordedEvent

logger = logging.getLogger(__name__)

CHUNK_BYTES = 128 * 1024
_ATTEMPTS = 5
_RESTORE_FAILED = 10062
#: Where a server keeps the stream, below its own directory.
STREAM_DIRECTORY = Path("store", "jetstream", NatsAccount.LOG, "streams", EVENT_STREAM)
#: So many entries are on their way to the mirror at a time.
_WINDOW = 5000
_STALLED_S = 60.0
#: What a mirror may not have.
_NOT_OF_MIRRORS = ("subjects", "allow_atomic")

#: Told what is done at present, how much of it, and of how much.
Progress = Callable[[str, int, int], object]


class ArchiveSurvey(NamedTuple):
    """The contents of an archive that was read through. `first_seq`: where the stream is to begin."""

    last_seq: int
    first_seq: int
    newest: Entry


def survey(directory: Path, keep_s: float | None) -> ArchiveSurvey:
    """Read an archive through. `keep_s`: what is older than that, before its newest entry, stays in the archive alone;
    None: nothing. Raises LogDamaged."""
    times: list[tuple[int, int]] = []
    term_seq, seq, newest = 0, 0, None
    for batch in archived_batches(directory):
        if not seq and batch[0].seq != 1:
            raise LogDamaged(
                f"{directory}: begins with entry {batch[0].seq}; entries 1 to {batch[0].seq - 1} are missing"
            )
        for entry in batch:
            seq = entry.seq
            if not isinstance(entry, RecordedEvent):
                if not entry.subject:
                    raise LogDamaged(
                        f"{directory}: this version cannot read entry {seq}: {entry.reason}; use the one that wrote it"
                    )
            elif isinstance(entry.envelope.event, CoordinatorStarted):
                term_seq = seq
        newest = batch[-1]
        times.append((batch[0].seq, newest.recorded_at_us))
    if newest is None:
        raise LogDamaged(f"{directory}: holds no entries")
    first_seq = 1
    if keep_s is not None:
        limit_us = newest.recorded_at_us - int(keep_s * 1e6)
        first_seq = min(next(begin for begin, at_us in times if at_us >= limit_us), term_seq or 1)
    return ArchiveSurvey(seq, first_seq, newest)


async def require_none(target: Connection) -> bool:
    """Return whether the target has an event stream, an empty one. Raises LogError where one holds or held entries."""
    try:
        info = await api(target, f"STREAM.INFO.{EVENT_STREAM}", {})
    except JetStreamError as error:
        if error.code != NO_STREAM:
            raise
        return False
    if info["state"]["last_seq"]:
        raise LogError(
            f"{target.urls}: stream {EVENT_STREAM} holds entries, up to {info['state']['last_seq']}; a log is never "
            "overwritten"
        )
    return True


async def make_files(
    directory: Path,
    contents: ArchiveSurvey,
    scratch: Path,
    *,
    sha256: str = "",
    progress: Progress = lambda *_: None,
    then: Callable[[Connection], Awaitable[object]] | None = None,
) -> Path:
    """Make the event stream from the archive, as files of a server that has ended; return their directory. `scratch`: a
    directory for them. `then`: done with a connection to the server before it ends. Raises LogError, OSError."""
    login, leaf = (Login(user=user, password=secrets.token_urlsafe(24)) for user in ("restore", "origin"))
    server = EmbeddedServer(scratch, login=login, dies_with_us=True, sha256=sha256, leafnodes=leaf)
    try:
        await server.start()
        source = await connect(server.url, name="unicrond-restore", login=login, timeout_s=10.0)
        try:
            async with MirrorOrigin.connected(server.leaf_port, leaf) as origin:
                await _fill(source, origin, directory, contents, progress)
            await api(source, f"STREAM.UPDATE.{EVENT_STREAM}", event_stream_config())
            await _require_whole(source, contents)
            if then is not None:
                await then(source)
        finally:
            await source.close()
    except ServerError as error:
        raise LogError(f"nats-server: {error}") from None
    finally:
        await server.stop()
    return scratch / STREAM_DIRECTORY


async def restore_stream(
    target: Connection,
    operator: Connection,
    directory: Path,
    contents: ArchiveSurvey,
    scratch: Path,
    *,
    replicas: int = 1,
    sha256: str = "",
    progress: Progress = lambda *_: None,
) -> None:
    """Make the event stream of `target` from the archive. `target`, `operator`: connections of the coordinator's login
    and of the operator's, who removes an empty stream. `scratch`: a directory for the moment, with room for twice the
    archive. Raises LogError, OSError."""

    async def send(source: Connection) -> None:
        """Restore the stream of the source on the target."""
        if await require_none(target):
            await api(operator, f"STREAM.DELETE.{EVENT_STREAM}", {})
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                await _copy(source, target, replicas, progress)
            except JetStreamError as error:
                if error.code != _RESTORE_FAILED:
                    raise
                await _remove_partial(operator)
                if attempt == _ATTEMPTS:
                    raise
                logger.warning("%s; attempt %d of %d follows", error, attempt + 1, _ATTEMPTS)
            else:
                return

    await make_files(directory, contents, scratch, sha256=sha256, progress=progress, then=send)
    await require_restored(target, contents)


async def require_restored(target: Connection, contents: ArchiveSurvey) -> None:
    """Return where the stream that the target serves is the restored one; entries may follow already, of a cluster that
    goes on, and its head may have trimmed it. Raises LogDamaged, LogError."""
    proof = LogProof(newest=mark_of(contents.newest), reader="the archive")
    if gap := await proof.look(target):
        raise LogDamaged(f"{target.urls}: {gap.reason}")


async def _require_whole(source: Connection, contents: ArchiveSurvey) -> None:
    """Return where the stream that was made, which nobody else knows of yet, holds what the archive does. Raises
    LogDamaged."""
    state = (await api(source, f"STREAM.INFO.{EVENT_STREAM}", {}))["state"]
    count = contents.last_seq - contents.first_seq + 1
    if (state["first_seq"], state["last_seq"], state["messages"]) != (contents.first_seq, contents.last_seq, count):
        raise LogDamaged(
            f"of entries {contents.first_seq} to {contents.last_seq} of the archive a nats-server has stored "
            f"{state['messages']}, from {state['first_seq']} to {state['last_seq']}"
        )


async def _fill(
    source: Connection, origin: MirrorOrigin, directory: Path, contents: ArchiveSurvey, progress: Progress
) -> None:
    """Have the server of the moment store what the archive holds from `first_seq` on."""
    config = {name: value for name, value in event_stream_config().items() if name not in _NOT_OF_MIRRORS}
    mirror = {"name": ORIGIN, "external": {"api": API, "deliver": ""}, "opt_start_seq": contents.first_seq}
    await api(source, f"STREAM.CREATE.{EVENT_STREAM}", {**config, "mirror": mirror})
    await origin.wait()
    count = contents.last_seq - contents.first_seq + 1
    count_on_way = 0
    for batch in archived_batches(directory, contents.first_seq - 1):
        entries = [entry for entry in batch if contents.first_seq <= entry.seq <= contents.last_seq]
        if not entries:
            continue
        await origin.deliver([_message(entry) for entry in entries])
        count_on_way += len(entries)
        if count_on_way >= _WINDOW or entries[-1].seq == contents.last_seq:
            await _wait_until_stored(source, entries[-1].seq)
            progress("archive read", entries[-1].seq - contents.first_seq + 1, count)
            count_on_way = 0


async def _wait_until_stored(source: Connection, seq: int) -> None:
    """Return once the mirror has stored entry `seq`. Polls: the server offers no event for it. Raises LogError."""
    last_seq, idle_s = 0, 0.0
    while True:
        state = (await api(source, f"STREAM.INFO.{EVENT_STREAM}", {}))["state"]
        if state["last_seq"] >= seq:
            return
        idle_s = 0.0 if state["last_seq"] > last_seq else idle_s + 0.02
        last_seq = state["last_seq"]
        if idle_s > _STALLED_S:
            raise LogError(f"the nats-server that restores stores nothing more, after entry {last_seq}")
        await asyncio.sleep(0.02)


def _message(entry: Entry) -> OriginMessage:
    """Return the message in which an entry stood."""
    if not isinstance(entry, RecordedEvent):
        marks = {"Nats-Msg-Id": quarantine_id(entry)}
        return OriginMessage(entry.seq, entry.recorded_at_us, entry.subject, marks, bytes(entry.size_bytes))
    marks = headers(entry.envelope)
    if isinstance(entry.envelope.event, CoordinatorStarted):
        del marks["Nats-Msg-Id"]  # as it was claimed
    return OriginMessage(entry.seq, entry.recorded_at_us, subject(entry.envelope), marks, body_of(entry))


async def _copy(source: Connection, target: Connection, replicas: int, progress: Progress) -> None:
    """Restore the snapshot of the source's stream on the target."""
    session = await source.session()
    chunks: asyncio.Queue[tuple[bytes, bytes, bytes]] = asyncio.Queue()
    inbox = session.client.new_inbox()
    subscription = await session.subscribe_raw(
        inbox, lambda _, reply, body, head: chunks.put_nowait((reply, body, head))
    )
    request = {"deliver_subject": inbox, "no_consumers": True, "chunk_size": CHUNK_BYTES}
    snapshot = await api_once(source, f"STREAM.SNAPSHOT.{EVENT_STREAM}", request)
    config = {**event_stream_config(replicas)}
    response = await api_once(target, f"STREAM.RESTORE.{EVENT_STREAM}", {"config": config, "state": snapshot["state"]})
    to_subject, sent_bytes = response["deliver_subject"], 0
    target_session = await target.session()
    while True:
        async with asyncio.timeout(_STALLED_S):
            reply, body, head = await chunks.get()
        if not body:
            status, marks = parse_headers(head)
            if status not in ("", "204"):
                raise LogError(f"no snapshot of what was read: {status} {marks.get('Description', '')}")
            break
        await _ask(target_session, to_subject, body)
        sent_bytes += len(body)
        progress("bytes restored", sent_bytes, max(sent_bytes, snapshot["state"]["bytes"]))
        if reply:
            await session.publish(reply.decode(), b"")
    await _ask(target_session, to_subject, b"")
    progress("bytes restored", sent_bytes, sent_bytes)
    with contextlib.suppress(Exception):
        await session.unsubscribe_raw(subscription)


async def _remove_partial(operator: Connection) -> None:
    """Remove what a restore that failed has left: a server keeps the entries that it had (2.15.1)."""
    try:
        await api(operator, f"STREAM.DELETE.{EVENT_STREAM}", {})
    except JetStreamError as error:
        if error.code != NO_STREAM:
            raise


async def _ask(session: Session, to_subject: str, body: bytes) -> dict[str, Any]:
    """Send a chunk; an empty one ends the restore. Raises LogError."""
    reply = await session.request(to_subject, body, timeout_s=_STALLED_S)
    return answer(f"STREAM.RESTORE.{EVENT_STREAM}", reply.data) if reply.data else {}
