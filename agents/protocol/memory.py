"""A node's memory of one shard's state: two slots in shared memory that outlives the worker and the agent.

Rules
-----
* The memory is a memfd that the fork server holds. A worker is born with a descriptor of it; the agent opens it by its
  path under /proc. It goes with the fork server, so nothing of it can be left behind.
* A page of heads, then two slots. A writer takes the slot that does not hold the newest state: it voids its head,
  writes the payload, and seals it with a head that names iteration, generation, layout, size and blake2b of the
  payload, and carries a digest of its own. A writer that is killed half-way leaves a void head: the other slot is
  untouched.
* Readers believe a head whose digest is right, and a payload that has the digest its head names.
* A slot is locked while it is written (exclusively) or read (shared), by open file description, so that the kernel
  lifts the locks of the dead. No process waits for a lock: a writer that finds its slot taken has no turn.
* A state that does not fit makes the memory grow, which voids both slots; it never shrinks, and never grows beyond
  its bound.

No torch here: the agent reads and writes these as well.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from queue import SimpleQueue
from threading import Thread

import msgspec

from events.shape import Shape

_MAGIC = b"unicrnM3"
_PAGE_BYTES = 4096
_HEAD_STRIDE = 1024
_HEAD = struct.Struct("<8sQQQQIIII32s")
_DIGEST_BYTES = 32
_FLOCK = struct.Struct("hhqqi4x")
_SLOTS = (0, 1)
_ALONE = Shape()


class TooLarge(Exception):
    """The state does not fit within the memory's bound."""


class Head(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a sealed slot holds: the state after `iteration`, reduced under `generation`, by a replica of tp * pp."""

    iteration: int
    generation: int
    size_bytes: int
    digest: bytes
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1

    @property
    def layout(self) -> Shape:
        """That of the replica."""
        return Shape(self.tp, self.pp, self.vpp, self.ep)


def digest_of(payload: bytes | memoryview) -> bytes:
    """blake2b of a payload, 32 bytes; lets other threads run meanwhile."""
    return blake2b(payload, digest_size=_DIGEST_BYTES).digest()


class Digesting:
    """`digest_of` a view that is being filled from its start, by another thread meanwhile."""

    _STRETCH_BYTES = 4 << 20

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._told = 0
        self._stretches: SimpleQueue[int] = SimpleQueue()
        self._hash = blake2b(digest_size=_DIGEST_BYTES)
        self._thread: Thread | None = None

    def __enter__(self) -> Digesting:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        self._view = memoryview(b"")

    def reached(self, size_bytes: int) -> None:
        """So much of the view is filled."""
        if size_bytes - self._told >= self._STRETCH_BYTES:
            if self._thread is None:
                self._thread = Thread(target=self._run, name="digest", daemon=True)
                self._thread.start()
            self._told = size_bytes
            self._stretches.put(size_bytes)

    def digest(self) -> bytes:
        """Of the whole view, which is filled."""
        self._end()
        self._hash.update(self._view[self._told :])
        return self._hash.digest()

    def _end(self) -> None:
        if self._thread is not None:
            self._stretches.put(-1)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        done = 0
        while (until := self._stretches.get()) >= 0:
            self._hash.update(self._view[done:until])
            done = until


def sealed_memory(name: str, seals: int, size_bytes: int = 0) -> int:
    """A memfd whose size the kernel keeps from changing as `seals` say, whoever has it. Raises OSError."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals | fcntl.F_SEAL_SEAL)
    except OSError:
        os.close(fd)
        raise
    return fd


class Memory:
    """One opening of a node's memory; of no use to two threads at once (`reopen` gives another)."""

    def __init__(self, path: str, max_bytes: int) -> None:
        """`max_bytes`: bound of the whole memory. Raises OSError where there is none at `path`."""
        self.path = path
        self.max_bytes = max_bytes
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._map: mmap.mmap | None = None

    @staticmethod
    def private(max_bytes: int) -> Memory:
        """Memory of this process alone, where the fork server holds none for it."""
        fd = os.memfd_create("unicron-private", os.MFD_CLOEXEC)
        try:
            memory = Memory(f"/proc/{os.getpid()}/fd/{fd}", max_bytes)
        finally:
            os.close(fd)
        memory.path = f"/proc/{os.getpid()}/fd/{memory._fd}"
        return memory

    def reopen(self) -> Memory:
        """Another opening, with locks of its own."""
        return Memory(self.path, self.max_bytes)

    def close(self) -> None:
        """Lift the locks. Views that are still held stay valid."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._map = None

    # --- reading ---------------------------------------------------------------------------------

    def heads(self) -> list[Head]:
        """Of the sealed slots, newest first."""
        return [head for _, head, _ in self._sealed()]

    def newest(self) -> Head | None:
        """The newest state that is whole, None where there is none."""
        return next(iter(self.heads()), None)

    @contextmanager
    def reading(self, iteration: int, layout: Shape | None = None) -> Iterator[tuple[Head, memoryview] | None]:
        """The sealed state after `iteration` (of that layout, where one is given), kept from being overwritten;
        None where there is none, or it is being overwritten. Its digest is for the reader to check (`digest_of`)."""
        for slot, found, _ in self._sealed():
            if found.iteration == iteration and layout in (None, found.layout) and self._lock(slot, fcntl.F_RDLCK):
                try:
                    # Only what is read under the lock holds.
                    again = next(((h, at) for s, h, at in self._sealed() if s == slot and h == found), None)
                    if again is None:
                        continue
                    head, at = again
                    yield head, memoryview(self._mapped())[at : at + head.size_bytes]
                    return
                finally:
                    self._lock(slot, fcntl.F_UNLCK)
        yield None

    # --- writing ---------------------------------------------------------------------------------

    def draft(self, size_bytes: int) -> Draft | None:
        """A slot to write a state of that size into; None while it is in use. Raises TooLarge."""
        if self._needed(size_bytes) > self.max_bytes:
            raise TooLarge(f"two states of {size_bytes} bytes do not fit into {self.max_bytes} bytes of memory")
        sealed = self._sealed()
        slot = 1 - sealed[0][0] if sealed else 0
        if not self._lock(slot, fcntl.F_WRLCK):
            return None
        capacity = self._capacity()
        if size_bytes > capacity:
            if not self._lock(1 - slot, fcntl.F_WRLCK):
                self._lock(slot, fcntl.F_UNLCK)
                return None
            capacity = _page_up(size_bytes)
            for each in _SLOTS:
                self._void(each)
            os.ftruncate(self._fd, _PAGE_BYTES + 2 * capacity)
            self._lock(1 - slot, fcntl.F_UNLCK)
        self._void(slot)
        at = _PAGE_BYTES + slot * capacity
        return Draft(self, slot, at, memoryview(self._mapped())[at : at + size_bytes])

    # --- inside ----------------------------------------------------------------------------------

    @staticmethod
    def _needed(size_bytes: int) -> int:
        return _PAGE_BYTES + 2 * _page_up(size_bytes)

    def _capacity(self) -> int:
        return max(0, (os.fstat(self._fd).st_size - _PAGE_BYTES) // 2)

    def _mapped(self) -> mmap.mmap:
        size = os.fstat(self._fd).st_size
        if size < _PAGE_BYTES:
            os.ftruncate(self._fd, _PAGE_BYTES)
            size = _PAGE_BYTES
        if self._map is None or len(self._map) != size:
            self._map = mmap.mmap(self._fd, size)
        return self._map

    def _sealed(self) -> list[tuple[int, Head, int]]:
        """Slot, head and place of the payload, newest first. A head is read as one piece, and has its own digest."""
        mapped, found = self._mapped(), []
        for slot in _SLOTS:
            start = slot * _HEAD_STRIDE
            packed = bytes(mapped[start : start + _HEAD.size])
            own = bytes(mapped[start + _HEAD.size : start + _HEAD.size + _DIGEST_BYTES])
            magic, iteration, generation, size_bytes, at, tp, pp, vpp, ep, digest = _HEAD.unpack(packed)
            if magic == _MAGIC and own == digest_of(packed) and at + size_bytes <= len(mapped):
                found.append((slot, Head(iteration, generation, size_bytes, digest, tp, pp, vpp, ep), at))
        return sorted(found, key=lambda entry: (entry[1].generation, entry[1].iteration), reverse=True)

    def _void(self, slot: int) -> None:
        start = slot * _HEAD_STRIDE
        self._mapped()[start : start + _HEAD_STRIDE] = bytes(_HEAD_STRIDE)

    def _seal(self, slot: int, at: int, head: Head) -> None:
        counts = head.iteration, head.generation, head.size_bytes, at
        packed = _HEAD.pack(_MAGIC, *counts, *head.layout[:4], head.digest)
        start = slot * _HEAD_STRIDE
        self._mapped()[start : start + _HEAD.size + _DIGEST_BYTES] = packed + digest_of(packed)

    def _lock(self, slot: int, kind: int) -> bool:
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, slot, 1, 0))
        except BlockingIOError:
            return False
        return True


class Draft:
    """A slot that is being written: fill `view`, then `seal` or `abandon` it."""

    def __init__(self, memory: Memory, slot: int, at: int, view: memoryview) -> None:
        self._memory = memory
        self._slot = slot
        self._at = at
        self.view = view

    def seal(
        self,
        iteration: int,
        generation: int,
        digest: bytes | None = None,
        layout: Shape = _ALONE,
        found: bytes | None = None,
    ) -> Head:
        """Make it the newest state. `digest`: what the view must have (it came from elsewhere); ValueError if not.
        `layout`: of the replica whose shard it is. `found`: the view's digest, where it is known."""
        found = found or digest_of(self.view)
        if digest is not None and digest != found:
            self.abandon()
            raise ValueError("the payload's digest differs from the announced one")
        head = Head(iteration, generation, len(self.view), found, *layout[:4])
        self._memory._seal(self._slot, self._at, head)
        self.abandon()
        return head

    def abandon(self) -> None:
        """Let go of the slot; unsealed, it stays void."""
        self.view = memoryview(b"")
        if self._memory._fd >= 0:
            self._memory._lock(self._slot, fcntl.F_UNLCK)


def _page_up(size_bytes: int) -> int:
    return -(-size_bytes // _PAGE_BYTES) * _PAGE_BYTES
