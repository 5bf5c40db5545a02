"""A node's memory of one shard's state: two slots in shared memory that outlives the worker and the agent.

Rules
-----
* The memory is a memfd that the fork server holds. A worker inherits a descriptor of it; the agent opens it by its
  path under /proc. It ends with the fork server, so nothing of it can be left behind.
* A page of heads, then two slots. A writer takes the slot that does not hold the newest state: it voids its head,
  writes the payload, and seals it with a head that names iteration, generation, layout, size and blake2b of the
  payload, and carries a digest of its own. A writer that is killed half-way leaves a void head: the other slot is
  untouched.
* Readers accept a head whose digest is right, and a payload that has the digest its head names.
* A slot is locked while it is written (exclusively) or read (shared), by open file description, so that the kernel
  lifts the locks of the dead. No process waits for a lock: a writer that finds its slot locked gives up.
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

from unicrond.events.vocabulary.shape import Shape

#: Of the head of a layout without context parallelism and with experts cut as usual, which older agents read, too; of
#: any other.
_MAGIC, _MAGIC_OF_MORE = b"unicrnM3", b"unicrnM4"
_PAGE_BYTES = 4096
_HEAD_STRIDE = 1024
_HEAD = struct.Struct("<8sQQQQIIII32s")
_HEAD_OF_MORE = struct.Struct("<8sQQQQIIIIII32s")
_DIGEST_BYTES = 32
_FLOCK = struct.Struct("hhqqi4x")
_SLOTS = (0, 1)
_ALONE = Shape()


class TooLarge(Exception):
    """The state does not fit within the memory's bound."""


class StateHead(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The head of a sealed slot: the state after `iteration`, reduced under `generation`, of a replica in `layout`."""

    iteration: int
    generation: int
    size_bytes: int
    digest: bytes
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    cp: int = 1
    etp: int = 0

    @property
    def layout(self) -> Shape:
        """The layout of the replica."""
        return Shape(self.tp, self.pp, self.vpp, self.ep, cp=self.cp, etp=self.etp)


def digest_of(payload: bytes | memoryview) -> bytes:
    """Return the blake2b of a payload, 32 bytes; other threads may run in the meantime."""
    return blake2b(payload, digest_size=_DIGEST_BYTES).digest()


class Digesting:
    """Computes `digest_of` a view in another thread, while the view is being filled from its start."""

    _STRETCH_BYTES = 4 << 20

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._queued_bytes = 0
        self._stretches: SimpleQueue[int] = SimpleQueue()
        self._hash = blake2b(digest_size=_DIGEST_BYTES)
        self._thread: Thread | None = None

    def __enter__(self) -> Digesting:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        self._view = memoryview(b"")

    def reached(self, size_bytes: int) -> None:
        """Note that this many bytes of the view are filled."""
        if size_bytes - self._queued_bytes >= self._STRETCH_BYTES:
            if self._thread is None:
                self._thread = Thread(target=self._run, name="digest", daemon=True)
                self._thread.start()
            self._queued_bytes = size_bytes
            self._stretches.put(size_bytes)

    def digest(self) -> bytes:
        """Return the digest of the whole view, which is filled."""
        self._end()
        self._hash.update(self._view[self._queued_bytes :])
        return self._hash.digest()

    def _end(self) -> None:
        if self._thread is not None:
            self._stretches.put(-1)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        hashed = 0
        while (end := self._stretches.get()) >= 0:
            self._hash.update(self._view[hashed:end])
            hashed = end


def sealed_memory(name: str, seals: int, size_bytes: int = 0) -> int:
    """Make a memfd whose size the kernel keeps from changing as `seals` say, whoever has it. Raise OSError."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals | fcntl.F_SEAL_SEAL)
    except OSError:
        os.close(fd)
        raise
    return fd


class Memory:
    """One opening of a node's memory; of no use to two threads at once (`reopen` makes another)."""

    def __init__(self, path: str, max_bytes: int) -> None:
        """Open the memory at `path`; `max_bytes`: bound of the whole memory. Raise OSError where there is none."""
        self.path = path
        self.max_bytes = max_bytes
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._map: mmap.mmap | None = None

    @staticmethod
    def private(max_bytes: int) -> Memory:
        """Make memory of this process alone, where the fork server holds none for it."""
        fd = os.memfd_create("unicron-private", os.MFD_CLOEXEC)
        try:
            memory = Memory(f"/proc/{os.getpid()}/fd/{fd}", max_bytes)
        finally:
            os.close(fd)
        memory.path = f"/proc/{os.getpid()}/fd/{memory._fd}"
        return memory

    def reopen(self) -> Memory:
        """Return another opening, with its own locks."""
        return Memory(self.path, self.max_bytes)

    def close(self) -> None:
        """Release the locks. Views in use stay valid."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._map = None

    # --- reading ---------------------------------------------------------------------------------

    def heads(self) -> list[StateHead]:
        """Return the heads of the sealed slots, newest first."""
        return [head for _, head, _ in self._sealed()]

    def newest(self) -> StateHead | None:
        """Return the head of the newest complete state, None where there is none."""
        return next(iter(self.heads()), None)

    @contextmanager
    def reading(self, iteration: int, layout: Shape | None = None) -> Iterator[tuple[StateHead, memoryview] | None]:
        """Lock and yield the sealed state after `iteration` (of that layout, where one is named), so that it is not
        overwritten.

        None where there is none, or it is being overwritten. The reader checks its digest (`digest_of`).
        """
        for slot, candidate, _ in self._sealed():
            if (
                candidate.iteration == iteration
                and layout in (None, candidate.layout)
                and self._lock(slot, fcntl.F_RDLCK)
            ):
                try:
                    # Only what is read under the lock holds.
                    again = next(((h, at) for s, h, at in self._sealed() if s == slot and h == candidate), None)
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
        """Return a slot to write a state of that size into; None while it is in use. Raise TooLarge."""
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
            for index in _SLOTS:
                self._void(index)
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

    def _sealed(self) -> list[tuple[int, StateHead, int]]:
        """Return slot, head and place of each payload, newest first. A head is read as one piece, and has its own
        digest."""
        mapped, entries = self._mapped(), []
        for slot in _SLOTS:
            start = slot * _HEAD_STRIDE
            form = _HEAD_OF_MORE if mapped[start : start + len(_MAGIC)] == _MAGIC_OF_MORE else _HEAD
            packed = bytes(mapped[start : start + form.size])
            checksum = bytes(mapped[start + form.size : start + form.size + _DIGEST_BYTES])
            magic, iteration, generation, size_bytes, at, *cut, digest = form.unpack(packed)
            is_sealed = magic in (_MAGIC, _MAGIC_OF_MORE) and checksum == digest_of(packed)
            if is_sealed and at + size_bytes <= len(mapped):
                entries.append((slot, StateHead(iteration, generation, size_bytes, digest, *cut), at))
        return sorted(entries, key=lambda entry: (entry[1].generation, entry[1].iteration), reverse=True)

    def _void(self, slot: int) -> None:
        start = slot * _HEAD_STRIDE
        self._mapped()[start : start + _HEAD_STRIDE] = bytes(_HEAD_STRIDE)

    def _seal(self, slot: int, at: int, head: StateHead) -> None:
        counts = head.iteration, head.generation, head.size_bytes, at
        cut = head.tp, head.pp, head.vpp, head.ep
        if (head.cp, head.etp) == (_ALONE.cp, _ALONE.etp):
            packed = _HEAD.pack(_MAGIC, *counts, *cut, head.digest)
        else:
            packed = _HEAD_OF_MORE.pack(_MAGIC_OF_MORE, *counts, *cut, head.cp, head.etp, head.digest)
        start = slot * _HEAD_STRIDE
        self._mapped()[start : start + len(packed) + _DIGEST_BYTES] = packed + digest_of(packed)

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
        actual: bytes | None = None,
    ) -> StateHead:
        """Make it the newest state, and return its head.

        `digest`: the view's announced digest (it came from elsewhere); raise ValueError if it differs. `layout`: that
        of the replica whose shard it is. `actual`: the view's digest, where it is known.
        """
        actual = actual or digest_of(self.view)
        if digest is not None and digest != actual:
            self.abandon()
            raise ValueError("the payload's digest differs from the announced one")
        head = StateHead(iteration, generation, len(self.view), actual, *layout[:4], layout.cp, layout.etp)
        self._memory._seal(self._slot, self._at, head)
        self.abandon()
        return head

    def abandon(self) -> None:
        """Release the slot; unsealed, it stays void."""
        self.view = memoryview(b"")
        if self._memory._fd >= 0:
            self._memory._lock(self._slot, fcntl.F_UNLCK)


def _page_up(size_bytes: int) -> int:
    return -(-size_bytes // _PAGE_BYTES) * _PAGE_BYTES
