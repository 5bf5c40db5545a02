"""A store for gloo's rendezvous that answers from what the members have said already, without n * n reads of the real
store.

Rules
-----
* Gloo sets one value, its own, and reads those of all others: where the member listens, and then a number for each
  member by which it tells its connections apart (gloo/transport/tcp/context.cc, torch 2.13).
* A device that serves one group counts its connections by rank: 0, 1, 2, ... What every member knows is not told; where
  the numbers are others, they are.
* The address that the member listens on travels with it: `socket_peers.py` needs it.
"""

from __future__ import annotations

from datetime import timedelta

import msgspec
import numpy as np
import torch.distributed as dist

from unicrond.agents.trainer.groups.store_messages import StoreExchange


class _GlooWord(msgspec.Struct, frozen=True, array_like=True):
    listens: str
    value: bytes
    is_regular: bool


class GlooStore(dist.Store):  # type: ignore[misc]
    """The store that gloo asks while one group forms. `listens`: the address that this member listens on."""

    def __init__(self, exchange: StoreExchange, size: int, listens: str) -> None:
        super().__init__()
        self._exchange = exchange
        self._listens = listens
        self._numbers = np.arange(size, dtype=np.int64).tobytes()
        self._words: list[_GlooWord] = []

    @property
    def listening(self) -> list[str]:
        """Return where the members listen, in rank order; none before gloo has asked for another's word."""
        return [word.listens for word in self._words]

    def set(self, _key: str, value: bytes) -> None:
        """Tell the members where this one listens."""
        is_regular = value.endswith(self._numbers)
        address = value[: -len(self._numbers)] if is_regular else value
        self._exchange.publish("gloo", msgspec.msgpack.encode(_GlooWord(self._listens, address, is_regular)))

    def wait(self, _keys: list[str], _timeout: timedelta | None = None) -> None:
        """Wait for the words of all, whatever is asked for. Raises RuntimeError where forming was given up."""
        if not self._words:
            encoded = self._exchange.collect("gloo")
            if encoded is None:
                raise RuntimeError("forming was given up")
            self._words = [msgspec.msgpack.decode(word, type=_GlooWord) for word in encoded]

    def get(self, key: str) -> bytes:
        """Return what the member of that rank has set; "0/7" is the seventh's."""
        self.wait([key])
        word = self._words[int(key.rpartition("/")[2])]
        return word.value + self._numbers if word.is_regular else word.value
