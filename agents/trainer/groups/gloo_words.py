"""What gloo's members ask of each other's words, answered without n * n reads of a store.

Rules
-----
* Gloo sets one value, its own, and reads those of all others: where the member listens, and then a number for each
  member by which it tells its connections apart (gloo/transport/tcp/context.cc, torch 2.13).
* A device that serves one group counts its connections by rank: 0, 1, 2, ... What every member knows is not told; where
  the numbers are others, they are.
* The address that the member listens on travels with it: `ends.py` needs it.
"""

from __future__ import annotations

from datetime import timedelta

import msgspec
import numpy as np
import torch.distributed as dist

from agents.trainer.groups.words import Words


class _Word(msgspec.Struct, frozen=True, array_like=True):
    listens: str
    value: bytes
    counted: bool


class GlooWords(dist.Store):  # type: ignore[misc]
    """The store of one group's forming. `listens`: the address that this member listens on."""

    def __init__(self, words: Words, size: int, listens: str) -> None:
        super().__init__()
        self._words = words
        self._listens = listens
        self._numbers = np.arange(size, dtype=np.int64).tobytes()
        self._told: list[_Word] = []

    @property
    def listening(self) -> list[str]:
        """Where the members listen, in rank order; none before gloo has asked for another's word."""
        return [word.listens for word in self._told]

    def set(self, _key: str, value: bytes) -> None:
        """Tell the members where this one listens."""
        counted = value.endswith(self._numbers)
        own = value[: -len(self._numbers)] if counted else value
        self._words.say("gloo", msgspec.msgpack.encode(_Word(self._listens, own, counted)))

    def wait(self, _keys: list[str], _timeout: timedelta | None = None) -> None:
        """Wait for the words of all, whatever is asked for. Raises RuntimeError where forming was given up."""
        if not self._told:
            heard = self._words.heard("gloo")
            if heard is None:
                raise RuntimeError("forming was given up")
            self._told = [msgspec.msgpack.decode(word, type=_Word) for word in heard]

    def get(self, key: str) -> bytes:
        """What the member of that rank has set; "0/7" is the seventh's."""
        self.wait([key])
        word = self._told[int(key.rpartition("/")[2])]
        return word.value + self._numbers if word.counted else word.value
