"""Exchanges short messages between the members of a group that forms, through a store, with a few operations for each
member.

Rules
-----
* Each member says its word under a key of its own. Who asks first what all have said is the *teller*: it waits for the
  words of all and sets them down as one, which the others read. So the store answers a few messages of each member, and
  none about all members but the teller's: were every member to read every word, the store would answer n * n.
* A teller that is lost or gives up leaves the others waiting, as any such member does: without all there is no group.
* Hooks before this rule say the same words and read all themselves. They are no tellers, and wait for none.
* What all have said of a kind does not change: each kind is said once in an attempt.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from datetime import timedelta

import msgspec
import torch.distributed as dist

#: How long one look for the others' words may take; it delays no member, but torch warns at the end of each.
_LOOK_AGAIN = timedelta(seconds=60)


class StoreExchange:
    """One member's side of the exchange, in a store of this attempt alone (a prefix). `is_abandoned()`: asked between
    two reads; True ends the exchange."""

    def __init__(self, store: object, rank: int, size: int, is_abandoned: Callable[[], bool]) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._is_abandoned = is_abandoned
        self._keys: list[str] = []

    def publish(self, kind: str, word: bytes | str) -> None:
        """Publish this member's word of a kind."""
        self._keys.append(f"{kind}/{self._rank}")
        self._store.set(self._keys[-1], word)  # type: ignore[attr-defined]

    def withdraw(self) -> None:
        """Withdraw this member's words, when no member will ask for them: the store outlives many groups."""
        while self._keys:
            self._store.delete_key(self._keys.pop())  # type: ignore[attr-defined]

    def collect(self, kind: str) -> list[bytes] | None:
        """Return what all members have published of a kind, in rank order, as soon as all have; None where it was
        abandoned."""
        own_rank = str(self._rank)
        collector = bytes(self._store.compare_set(f"{kind}/teller", "", own_rank)).decode()  # type: ignore[attr-defined]
        if collector != own_rank:
            return self._read_all(kind)
        keys = [f"{kind}/{member}" for member in range(self._size)]
        if not self._wait(keys):
            return None
        words = [bytes(word) for word in self._store.multi_get(keys)]  # type: ignore[attr-defined]
        self._store.set(f"{kind}/all", zlib.compress(msgspec.msgpack.encode(words), 1))  # type: ignore[attr-defined]
        return words

    def _read_all(self, kind: str) -> list[bytes] | None:
        if not self._wait([f"{kind}/all"]):
            return None
        packed = zlib.decompress(bytes(self._store.get(f"{kind}/all")))  # type: ignore[attr-defined]
        return msgspec.msgpack.decode(packed, type=list[bytes])

    def _wait(self, keys: list[str]) -> bool:
        while not self._is_abandoned():
            try:
                self._store.wait(keys, _LOOK_AGAIN)  # type: ignore[attr-defined]
            except dist.DistStoreError:
                continue
            return True
        return False
