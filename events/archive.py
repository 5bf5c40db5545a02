"""Archive and retention: the older part of the stream goes to files, and only then from the server.

The event stream denies deletion and purge, and that cannot be taken back; nothing of it goes by accident. What an
operator may still set is an age limit. So a trim is: copy everything into the archive, make it durable, read it
back; then set the limit for a moment, wait until what is older has gone, and take it away again. Agents, their
consumers and the coordinator notice nothing.

Rules
-----
* What goes stands in the archive; what is younger than KEEP_LEAST_S stays, so that between the copy and the
  limit nothing can go that was not copied.
* The newest CoordinatorStarted stays: it is the token that fences appends. If it is too old, a coordinator must
  start first.
* A limit that a crash left behind is marked in the stream's metadata, and taken away by the next start of a
  coordinator or of an archive.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from events.archived_log import archived_batches, newest_archived, require_same
from events.envelope import Entry
from events.file_log import SegmentWriter
from events.log import LogDamaged, LogError
from events.nats_connection import Connection
from events.nats_log import NatsEventLog
from events.nats_streams import NANOS, NO_MESSAGE_FOUND, TRIMMING, ApiError, api, end_trim
from events.subjects import EVENT_STREAM, TERM_SUBJECT

BATCH = 1000
KEEP_LEAST_S = 3600.0
_WAIT_S = 30.0


class Archived(NamedTuple):
    """What the archive holds now: entries 1 to `last_seq`, of which `copied` are new."""

    last_seq: int
    copied: int


class CannotTrim(LogError):
    """Nothing was removed; the message says why and what to do."""


async def archive(connection: Connection, directory: Path) -> Archived:
    """Copy what is new in the event stream into `directory` and read it back. LogError, OSError."""
    log = NatsEventLog(connection)
    writer = SegmentWriter(directory)
    try:
        writer.repair()
        newest = newest_archived(directory)
        if newest is not None:
            await require_same(log, newest, directory)
        begin = newest.seq if newest is not None else 0
        last = await log.last_seq()
        waiting: list[Entry] = []
        async with aclosing(log.read(begin, until_seq=last)) as entries:
            async for entry in entries:
                waiting.append(entry)
                if len(waiting) == BATCH or entry.seq == last:
                    writer.write(waiting, sync=False)
                    waiting = []
    finally:
        writer.close()
    _read_back(directory, begin, last)
    return Archived(last, last - begin)


async def trim(connection: Connection, directory: Path, keep_s: float, *, keep_least_s: float = KEEP_LEAST_S) -> int:
    """Remove what is older than `keep_s` and stands in the archive; how many entries went. CannotTrim, LogError."""
    if keep_s < keep_least_s:
        raise CannotTrim(f"keep: {keep_s:g} s is too short; keep {keep_least_s:g} s or more")
    info = await take_limit_away(connection)
    before = int(info["state"]["first_seq"])
    newest = newest_archived(directory)
    if newest is None or newest.seq < before:
        raise CannotTrim(f"{directory}: holds nothing of the stream; archive first")
    server_now = datetime.fromisoformat(info["ts"])
    cut = await _newest_older_than(connection, info, server_now.timestamp() - keep_s)
    if cut > newest.seq:
        raise CannotTrim(f"{directory}: ends with entry {newest.seq}, which is newer than entry {cut}; archive first")
    if cut < before:
        return 0
    term_seq = await _term_seq(connection)
    if term_seq <= cut:
        raise CannotTrim(
            f"the coordinator's term began with entry {term_seq}, and must stay; restart the coordinator, or keep more"
        )
    await _set_limit(connection, info, int(keep_s * NANOS))
    try:
        async with asyncio.timeout(_WAIT_S):
            while int(info["state"]["first_seq"]) <= cut:
                await asyncio.sleep(0.05)  # the server offers no event for it
                info = await api(connection, f"STREAM.INFO.{EVENT_STREAM}", {})
    except TimeoutError:
        raise CannotTrim(f"the server did not remove the older entries within {_WAIT_S:g} s") from None
    finally:
        info = await take_limit_away(connection)
    return int(info["state"]["first_seq"]) - before


async def take_limit_away(connection: Connection) -> dict[str, Any]:
    """End a trim, our own or one that a crash left behind; the stream's information."""
    info = await api(connection, f"STREAM.INFO.{EVENT_STREAM}", {})
    if TRIMMING in (info["config"].get("metadata") or {}):
        await end_trim(connection, EVENT_STREAM, info["config"])
        info = await api(connection, f"STREAM.INFO.{EVENT_STREAM}", {})
    return info


async def _set_limit(connection: Connection, info: dict[str, Any], age_ns: int) -> None:
    config = info["config"]
    metadata = {**(config.get("metadata") or {}), TRIMMING: "true"}
    await api(connection, f"STREAM.UPDATE.{EVENT_STREAM}", {**config, "max_age": age_ns, "metadata": metadata})


async def _newest_older_than(connection: Connection, info: dict[str, Any], limit_s: float) -> int:
    """The newest entry that was recorded before `limit_s` (server's clock), by halving; first_seq - 1 for none."""
    low, high = int(info["state"]["first_seq"]) - 1, int(info["state"]["last_seq"])
    while low < high:
        middle = (low + high + 1) // 2
        got = await api(connection, f"STREAM.MSG.GET.{EVENT_STREAM}", {"seq": middle})
        if datetime.fromisoformat(got["message"]["time"]).timestamp() < limit_s:
            low = middle
        else:
            high = middle - 1
    return low


async def _term_seq(connection: Connection) -> int:
    try:
        got = await api(connection, f"STREAM.MSG.GET.{EVENT_STREAM}", {"last_by_subj": TERM_SUBJECT})
    except ApiError as error:
        if error.code != NO_MESSAGE_FOUND:
            raise
        return 0
    return int(got["message"]["seq"])


def _read_back(directory: Path, begin: int, last: int) -> None:
    seq = begin
    for batch in archived_batches(directory, begin):
        for entry in batch:
            seq = max(seq, entry.seq)
    if seq != last:
        raise LogDamaged(f"{directory}: ends with entry {seq} after entries up to {last} were written")
