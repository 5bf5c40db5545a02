"""Links that lose, delay, repeat and reorder; pipes that do none of that but may end.

Rules
-----
* A `Link` carries messages in order while it is sound. In bad weather it is as if connections broke all the time:
  each message is late by a time of its own, may be lost, may come twice. A sender that needs more (the log's clients)
  asks again, as the real clients do.
* A `Pipe` is one direction of a local socket: in order, nothing lost, until either end closes it. What was under way
  then is lost.
* `Reach` says which nodes can talk to each other (the peers' network), apart from the log's links.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Generic, TypeVar

M = TypeVar("M")
#: Timers of one moment come in no certain order: what is to come in order is that far apart.
_NEXT_S = 1e-6


class Link:
    """One machine's way to the log. `cut`: nothing passes; `loss`, `repeats`: probabilities of a message.

    `in_order`: as one connection has it; connections that break and are made again can bring older messages later.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, drawn: random.Random) -> None:
        self._loop = loop
        self._drawn = drawn
        self._last_at = 0.0
        self.cut = False
        self.heal()

    def heal(self) -> None:
        """A sound network."""
        self.loss = 0.0
        self.repeats = 0.0
        self.delay_s = (0.0005, 0.004)
        self.in_order = True

    @property
    def is_sound(self) -> bool:
        """It carries everything, in order."""
        return not self.cut and not self.loss and self.in_order

    def send(self, deliver: Callable[[], object]) -> None:
        """Deliver later, perhaps never, perhaps twice."""
        copies = 2 if self.repeats and self._drawn.random() < self.repeats else 1
        for _ in range(copies):
            if not self.cut and not (self.loss and self._drawn.random() < self.loss):
                at = self._loop.time() + self.travel_s()
                if self.in_order:
                    at = self._last_at = max(self._last_at + _NEXT_S, at)
                self._loop.call_at(at, self._arrive, deliver)

    def travel_s(self) -> float:
        """How long one message is under way, seconds."""
        return self._drawn.uniform(*self.delay_s)

    def _arrive(self, deliver: Callable[[], object]) -> None:
        if not self.cut:
            deliver()


class Pipe(Generic[M]):
    """Messages to `deliver`, in order, each some tenths of a millisecond late."""

    def __init__(self, loop: asyncio.AbstractEventLoop, drawn: random.Random, deliver: Callable[[M], object]) -> None:
        self._loop = loop
        self._drawn = drawn
        self._deliver = deliver
        self._last_at = 0.0
        self.open = True

    def send(self, message: M) -> None:
        """Put a message in; nothing happens on a closed pipe."""
        if self.open:
            self._last_at = max(self._last_at + _NEXT_S, self._loop.time() + self._drawn.uniform(0.0001, 0.001))
            self._loop.call_at(self._last_at, self._arrive, message)

    def close(self) -> None:
        """What is under way is lost."""
        self.open = False

    def _arrive(self, message: M) -> None:
        if self.open:
            self._deliver(message)


class Reach:
    """The network among the nodes: all to all, but for the pairs that are cut."""

    def __init__(self) -> None:
        self._cut: dict[frozenset[str], int] = {}

    def cut(self, one: str, other: str) -> None:
        """Cuts nest: as many `mend`s are needed."""
        pair = frozenset((one, other))
        self._cut[pair] = self._cut.get(pair, 0) + 1

    def mend(self, one: str, other: str) -> None:
        """Undo one cut."""
        pair = frozenset((one, other))
        self._cut[pair] = max(0, self._cut.get(pair, 0) - 1)

    def heal(self) -> None:
        """Everybody reaches everybody."""
        self._cut.clear()

    def reaches(self, one: str, other: str) -> bool:
        """The two can talk to each other (everybody can to itself)."""
        return one == other or not self._cut.get(frozenset((one, other)))
