"""The entrance of the log: how much a node writes at most, and who writes more. Pure; the time comes with each message.

Rules
-----
* Each node has one bucket of messages and one of KiB, for observations and heartbeats together; a message counts as one
  KiB at least. Two sides hold to them: what an agent sends at most (PACE), and what the head takes from a node
  (ENTRANCE). The second is wider in everything, also for an agent that was just started again, and for a head that was
  busy for some seconds and hears all at once. So a node that empties it has no agent of ours:
  its key was stolen, or it has a bug.
* What is counted is what the NATS server hears, headers and all, before it is stored or decoded.
* The log may not be purged, so the entrance's bucket of KiB is no wider than an agent needs that is started again
  after it has sent all it may at once, to a head that was busy for 3 s.
* What an agent reads is counted apart: each command takes a call and an acknowledgement, and after an outage there may
  be many.
* A node that has written too much stays in `excesses` until it is forgotten (`forget`): when people let it in again.
* A flood says what it was since its bucket was last full: so many messages and KiB within so long.

What does not live here: what becomes of a flood (service/trust/fuses.py: its login ends, within the brakes).
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

_SECOND_US = 1_000_000


class Bucket(msgspec.Struct, frozen=True):
    """A bucket of `size` messages that gets one more every `every_us`. What is known of its content is one number:
    until when what has gone out is paid for (the generic cell rate algorithm)."""

    size: int
    every_us: int

    def pause_us(self, paid_us: int, now_us: int) -> int:
        """Return how long the next message has to wait; 0: not at all."""
        return max(0, paid_us - now_us - (self.size - 1) * self.every_us)

    def paid_us(self, paid_us: int, now_us: int, count: int = 1) -> int:
        """Return until when is paid after `count` more messages."""
        return max(paid_us, now_us) + count * self.every_us


#: Of an agent's outbox (agents/shell/outbox.py): 200 observations and 400 KiB a second. The workers of a node of 64
#: GPUs say some hundred observations when all of them start at once. One that is larger than the bucket goes out when
#: any of it is left.
PACE = Bucket(1024, _SECOND_US // 200)
PACE_KIB = Bucket(512, _SECOND_US // 400)
#: Of the commands that an agent asks for (events/nats/commands.py).
READS = Bucket(512, _SECOND_US // 200)
#: Of a node at the head (service/trust/fuses.py): 400 messages and 700 KiB a second.
ENTRANCE = Bucket(2560, _SECOND_US // 400)
ENTRANCE_KIB = Bucket(3 * 1024, _SECOND_US // 700)
#: Two messages for each command.
ENTRANCE_READS = Bucket(3584, _SECOND_US // 600)


#: The first line of headers and the last.
_FRAME_BYTES = len("NATS/1.0\r\n\r\n")
#: What the server adds to the headers of an observation at most: the account of its client, and how far that is.
_SERVERS_HEADER_BYTES = 128


def sent_bytes(body: bytes, headers: Mapping[str, str]) -> int:
    """Return the size of a message that is sent."""
    return len(body) + sum(len(name) + len(value) + len(": \r\n") for name, value in headers.items()) + _FRAME_BYTES


def heard_bytes(body: bytes, headers: bytes) -> int:
    """Return the size of a message as it came by the server, less what that may have added."""
    return len(body) + max(0, len(headers) - _SERVERS_HEADER_BYTES)


def kib(size_bytes: int) -> int:
    """Return how many KiB a message counts for."""
    return 1 + (size_bytes - 1) // 1024 if size_bytes > 0 else 1


class Excess(msgspec.Struct, frozen=True):
    """What a node wrote since its bucket was last full, when that first was too much. `last_us`: its newest message
    that was too much."""

    messages: int
    size_kib: int
    duration_us: int
    last_us: int

    def sentence(self) -> str:
        """Say what was written."""
        return f"{self.messages} messages of {self.size_kib} KiB within {self.duration_us / 1e6:.1f} s"


class _NodeCount(msgspec.Struct):
    """What one node has written lately."""

    paid_us: int = 0
    paid_kib_us: int = 0
    paid_reads_us: int = 0
    begin_us: int = 0
    messages: int = 0
    size_kib: int = 0


class Entrance:
    """Counts what each node writes. `excesses`: by node, what was too much."""

    def __init__(self) -> None:
        self.excesses: dict[str, Excess] = {}
        self._counts: dict[str, _NodeCount] = {}

    def take(self, node: str, size_bytes: int, at_us: int, *, is_read: bool = False) -> bool:
        """Count one message that came at `at_us`; return whether it is too much. `is_read`: it asks for a command, or
        acknowledges one."""
        count = self._counts.get(node)
        if count is None:
            count = self._counts[node] = _NodeCount()
        if at_us >= max(count.paid_us, count.paid_kib_us, count.paid_reads_us):
            count.begin_us, count.messages, count.size_kib = at_us, 0, 0
        size_kib = kib(size_bytes)
        count.messages += 1
        count.size_kib += size_kib
        bucket, paid_us = (ENTRANCE_READS, count.paid_reads_us) if is_read else (ENTRANCE, count.paid_us)
        is_excess = bool(bucket.pause_us(paid_us, at_us) or ENTRANCE_KIB.pause_us(count.paid_kib_us, at_us))
        if is_excess:
            first = self.excesses.get(node)
            if first is None:
                duration_us = max(at_us - count.begin_us, 0)
                first = Excess(count.messages, count.size_kib, duration_us, at_us)
            self.excesses[node] = msgspec.structs.replace(first, last_us=at_us)
        # What is too much is not paid for: a bucket is full again as soon after a long flood as after a short one.
        elif is_read:
            count.paid_reads_us = bucket.paid_us(paid_us, at_us)
            count.paid_kib_us = ENTRANCE_KIB.paid_us(count.paid_kib_us, at_us, size_kib - 1)
        else:
            count.paid_us = bucket.paid_us(paid_us, at_us)
            count.paid_kib_us = ENTRANCE_KIB.paid_us(count.paid_kib_us, at_us, size_kib)
        return is_excess

    def forget(self, node: str) -> None:
        """Begin anew with the node."""
        self.excesses.pop(node, None)
        self._counts.pop(node, None)
