"""Snapshots: the folded state, kept beside the log, so that a restart folds only what came after it.

Rules
-----
* Nothing but a cache. Deleted, damaged, or written by other code, it is ignored with one line in the log, and
  the log is folded from its beginning: the state is the same either way.
* A snapshot is believed only if its bytes have their checksum, its state has its digest, the code that folds
  and the state's shape are those that wrote it (`fingerprint`), and the log still holds the very entry that it
  ends with (`LogMark`): another log's snapshot is of no use.
* Insertion order is part of the state (ties are decided by it), so the bytes keep it; the digest alone would not.
* To write one never holds up a decision and never fails the coordinator.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Collection
from contextlib import aclosing
from typing import Protocol

import msgspec

from unicrond.core.state import state_bytes
from unicrond.core.state.state import ClusterState
from unicrond.core.state.state_bytes import digest
from unicrond.events.log.event_log import EventLog, LogError
from unicrond.events.log.log_identity import LogMark, mark_of
from unicrond.service.coordinator.code_identity import fingerprint
from unicrond.views import goodput_keeper as bookkeeper
from unicrond.views.goodput import GoodputTotals

log = logging.getLogger("unicrond")

SNAPSHOT_EVERY = 10_000


class _Snapshot(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    fingerprint: str
    mark: LogMark
    digest: str
    checksum: bytes
    state: bytes
    skipped: tuple[int, ...] = ()
    books: bytes = b""


class BadSnapshot(ValueError):
    """A snapshot cannot be used; the text says why, in one line."""


class SnapshotStore(Protocol):
    """Where the newest snapshot is kept."""

    async def load(self) -> bytes | None:
        """Return the newest snapshot, None if there is none. Raises LogError where the store cannot be reached."""
        ...

    async def save(self, body: bytes) -> None:
        """Replace the snapshot. Raises LogError where that fails."""
        ...


def encode_snapshot(
    state: ClusterState, mark: LogMark, skips: Collection[int] = (), books: GoodputTotals | None = None
) -> bytes:
    """Return the bytes of a snapshot. `skips`: the entries that were passed over. `books`: of goodput, up to the
    state."""
    body, books_body = state_bytes.encode(state), bookkeeper.encoded(books)
    skipped, checksum = _up_to(mark.seq, skips), _checksum(body + books_body)
    return msgspec.msgpack.encode(_Snapshot(fingerprint(), mark, digest(state), checksum, body, skipped, books_body))


def _up_to(seq: int, skips: Collection[int]) -> tuple[int, ...]:
    return tuple(sorted(skip for skip in skips if skip <= seq))


def decode_snapshot(body: bytes, skips: Collection[int] = ()) -> tuple[ClusterState, LogMark, GoodputTotals | None]:
    """Return the state, the entry that it ends with, and the books. `skips`: the entries to pass over. Raises
    BadSnapshot."""
    try:
        snapshot = msgspec.msgpack.decode(body, type=_Snapshot)
    except msgspec.MsgspecError as error:
        raise BadSnapshot(f"not a snapshot: {error}") from None
    if snapshot.fingerprint != fingerprint():
        raise BadSnapshot("another version's fold wrote it")
    if snapshot.checksum != _checksum(snapshot.state + snapshot.books):
        raise BadSnapshot("its checksum is wrong")
    try:
        state, books = state_bytes.decode(snapshot.state), bookkeeper.decoded(snapshot.books)
    except msgspec.MsgspecError as error:
        raise BadSnapshot(f"its state does not fit: {error}") from None
    if digest(state) != snapshot.digest or state.seq != snapshot.mark.seq:
        raise BadSnapshot("its state has another digest")
    if snapshot.skipped != _up_to(snapshot.mark.seq, skips):
        raise BadSnapshot("other entries are skipped now")
    return state, snapshot.mark, books


def _checksum(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=16).digest()


class Snapshots:
    """One coordinator's use of a store. `every`: how many entries lie between two snapshots."""

    def __init__(self, store: SnapshotStore, every: int = SNAPSHOT_EVERY) -> None:
        self._store = store
        self._every = every
        self._saved_seq = 0
        self._saving = False

    async def restore(
        self, event_log: EventLog, skips: Collection[int] | None = None
    ) -> tuple[ClusterState, LogMark, GoodputTotals | None] | None:
        """Return the newest snapshot of this very log; None, with one line in the log, if none fits."""
        try:
            body = await self._store.load()
            if body is None:
                return None
            state, mark, books = decode_snapshot(body, await event_log.skips() if skips is None else skips)
            await _require_same_log(event_log, mark)
        except (BadSnapshot, LogError) as error:
            log.warning("not using the snapshot: %s; folding the log from its beginning", error)
            return None
        self._saved_seq = state.seq
        log.info("snapshot of entry %d", state.seq)
        return state, mark, books

    def is_due(self, seq: int) -> bool:
        """Return whether it is time for the next snapshot; then call `save`."""
        return not self._saving and seq - self._saved_seq >= self._every

    async def save(
        self, state: ClusterState, mark: LogMark, skips: Collection[int] = (), books: GoodputTotals | None = None
    ) -> None:
        """Write a snapshot. Never raises because the store is away; the next is tried after as many entries again."""
        self._saving = True
        try:
            await self._store.save(encode_snapshot(state, mark, skips, books))
            log.info("wrote a snapshot of entry %d", state.seq)
        except LogError as error:
            log.warning("could not write a snapshot of entry %d: %s", state.seq, error)
        finally:
            self._saved_seq = state.seq
            self._saving = False


async def _require_same_log(event_log: EventLog, mark: LogMark) -> None:
    if await event_log.last_seq() < mark.seq:
        raise BadSnapshot(f"the log ends before its entry {mark.seq}")
    async with aclosing(event_log.read(mark.seq - 1, until_seq=mark.seq)) as entries:
        async for entry in entries:
            if mark_of(entry) != mark:
                raise BadSnapshot(f"entry {mark.seq} of the log differs from the one at its end")
