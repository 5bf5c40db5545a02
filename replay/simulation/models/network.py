"""Links that lose, delay, repeat and reorder messages; pipes that do none of that, but may end.

Rules
-----
* A `Link` carries messages in order while it is sound. In bad weather it is as if connections broke all the time:
  each message is late by a time of its own, may be lost, may come twice. A sender that needs more (the log's clients)
  repeats its request, as the real clients do.
* A `Pipe` is one direction of a local socket: in order, nothing lost, until either end closes it. Messages in flight
  are lost then.
* `Reach` says which nodes can talk to each other (the peers' network), and which way, apart from the log's links.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from typing import Generic, TypeVar

M = TypeVar("M")
#: Timers of one moment run in no certain order: messages that must arrive in order are that far apart.
_NEXT_S = 1e-6


class Link:
    """One machine's link to the log. `cut`: nothing passes; `hears`, `is_heard`: what the log says arrives, and what
    the machine says; `loss`, `repeats`: probabilities of a message.

    `in_order`: as one connection has it; connections that break and are made again can bring older messages later."""

    def __init__(self, loop: asyncio.AbstractEventLoop, rng: random.Random) -> None:
        self._loop = loop
        self._rng = rng
        self._last_at = 0.0
        self.cut = False
        self.hears = self.is_heard = True
        self.heal()

    def heal(self) -> None:
        """Make the network sound."""
        self.loss = 0.0
        self.repeats = 0.0
        self.delay_s = (0.0005, 0.004)
        self.in_order = True

    @property
    def is_sound(self) -> bool:
        """Check that it carries everything, in order."""
        return self.carries() and self.carries(back=True) and not self.loss and self.in_order

    def carries(self, *, back: bool = False) -> bool:
        """Return whether anything passes to the log, or `back` from it."""
        return not self.cut and (self.hears if back else self.is_heard)

    def send(self, deliver: Callable[[], object], *, back: bool = False) -> None:
        """Deliver later, perhaps never, perhaps twice. `back`: from the log."""
        copies = 2 if self.repeats and self._rng.random() < self.repeats else 1
        for _ in range(copies):
            if self.carries(back=back) and not (self.loss and self._rng.random() < self.loss):
                at = self._loop.time() + self.travel_s()
                if self.in_order:
                    at = self._last_at = max(self._last_at + _NEXT_S, at)
                self._loop.call_at(at, self._arrive, deliver, back)

    def travel_s(self) -> float:
        """Draw how long one message travels, seconds."""
        return self._rng.uniform(*self.delay_s)

    def _arrive(self, deliver: Callable[[], object], back: bool) -> None:
        if self.carries(back=back):
            deliver()


class Pipe(Generic[M]):
    """A connection on one machine: calls `deliver` for each message, in order, some tenths of a millisecond late."""

    def __init__(self, loop: asyncio.AbstractEventLoop, rng: random.Random, deliver: Callable[[M], object]) -> None:
        self._loop = loop
        self._rng = rng
        self._deliver = deliver
        self._last_at = 0.0
        self.open = True

    def send(self, message: M) -> None:
        """Send a message; nothing happens on a closed pipe."""
        if self.open:
            self._last_at = max(self._last_at + _NEXT_S, self._loop.time() + self._rng.uniform(0.0001, 0.001))
            self._loop.call_at(self._last_at, self._arrive, message)

    def close(self) -> None:
        """Close the pipe; messages in flight are lost."""
        self.open = False

    def _arrive(self, message: M) -> None:
        if self.open:
            self._deliver(message)


class Reach:
    """The network among the nodes: every pair can communicate, but for those that are cut."""

    def __init__(self) -> None:
        #: By sender and receiver, how many cuts there are.
        self._cuts: Counter[tuple[str, str]] = Counter()

    def cut(self, node: str, peer: str, *, one_way: bool = False) -> None:
        """Cut the two off from each other; `one_way`: what the node sends does not arrive, what the peer sends does.
        Cuts nest: as many `mend`s are needed."""
        self._cuts.update(_ways(node, peer, one_way=one_way))

    def mend(self, node: str, peer: str, *, one_way: bool = False) -> None:
        """Undo one cut."""
        self._cuts -= Counter(_ways(node, peer, one_way=one_way))

    def heal(self) -> None:
        """Remove all cuts."""
        self._cuts.clear()

    def carries(self, sender: str, receiver: str) -> bool:
        """Return whether what the one sends arrives at the other."""
        return sender == receiver or (sender, receiver) not in self._cuts

    def reaches(self, node: str, peer: str) -> bool:
        """Return whether the two can talk to each other (every node can to itself): a connection needs both ways."""
        return self.carries(node, peer) and self.carries(peer, node)


def _ways(node: str, peer: str, *, one_way: bool) -> tuple[tuple[str, str], ...]:
    return ((node, peer),) if one_way else ((node, peer), (peer, node))
