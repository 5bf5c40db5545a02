"""A worker's phase mark: its position in training, in a few bytes of shared memory that its agent reads unaided.

    <run dir>/marks/<worker>

Rules
-----
* The worker inherits a descriptor of the memory, which the fork server has made; the file is a link to that, for
  the agent alone.
* The worker maps it and overwrites one record; no system call, no lock, about a microsecond. It is the only
  writer.
* The record begins and ends with the same number, which grows with every mark: a reader of two different ones has
  read in the middle of a mark, and reads again.
* Times are of CLOCK_MONOTONIC, which all processes of a machine share.
* `entered` counts the collectives across replicas in this generation. All members make the same ones in the same
  order, so the one that has entered fewer is behind; it does not matter what the collectives are.
* A mark outlives its worker until the agent has read it: it shows what a worker was doing when it was killed.
* A second record behind the first says which section of its program the worker is in (hook.section). Workers, agents
  and fork servers of before know the first alone, and go on with that.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import struct
import time
from pathlib import Path
from typing import NamedTuple, get_args

from unicrond.events.vocabulary import Phase

PHASES: tuple[Phase, ...] = get_args(Phase)
_NUMBER = {phase: number for number, phase in enumerate(PHASES)}
_RECORD = struct.Struct("=12Q")
#: Number, name, when it began, its limit, when that was marked, number.
_SECTION = struct.Struct("=Q32s4Q")
_MAGIC = 0x756E69636D61726B
_TRIES = 16
#: No honest number is larger; the log accepts no larger one.
_LIMIT = 2**53
#: The size of a mark.
SIZE_BYTES = _RECORD.size + _SECTION.size
#: The name of a section.
SECTION_MAX_BYTES = 32
SECTION_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9_.-]{{0,{SECTION_MAX_BYTES - 1}}}")


class Mark(NamedTuple):
    """One reading of a mark. `boundary_us`: when the iteration began; `limit_us`: how long it may last, 0 = any time.

    `changed_us`: when this mark was made. `section`: what its program says that it is in, "": nothing; since
    `section_began_us`. `section_limit_us`: how long it may be there without a move, as calculated from what was seen
    (trainer/detection/sections.py); 0: only the iteration is limited.
    """

    phase: Phase
    generation: int
    iteration: int
    micro_batch: int
    collectives_entered: int
    collectives_finished: int
    boundary_us: int
    limit_us: int
    changed_us: int
    section: str = ""
    section_began_us: int = 0
    section_limit_us: int = 0

    @property
    def is_waiting(self) -> bool:
        """Return whether the worker is inside a collective."""
        return self.collectives_entered > self.collectives_finished

    @property
    def due_us(self) -> int:
        """Return when the iteration is late, in microseconds on the marks' clock; 0: never."""
        return self.boundary_us + self.limit_us if self.limit_us else 0

    def section_us(self, at_us: int) -> int:
        """Return for how long it is in its section; 0: in none."""
        return max(0, at_us - self.section_began_us) if self.section else 0


def path_of(agent_socket: str, worker: str) -> Path:
    """Return the path of the worker's mark: beside the socket of its agent."""
    return Path(agent_socket).parent / "marks" / worker


def read(path: Path) -> Mark | None:
    """Return the newest mark; None where there is none, or none that is complete."""
    for _ in range(_TRIES):
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            record = os.pread(fd, SIZE_BYTES, 0)
        except OSError:
            return None
        finally:
            os.close(fd)
        if len(record) < _RECORD.size:
            return None
        number, *fields, again = _RECORD.unpack_from(record)
        magic, phase, *rest = fields
        if magic != _MAGIC or phase >= len(PHASES) or max(rest) >= _LIMIT:
            return None
        section = _section(record)
        if number == again and section is not None:
            name, began_us, limit_us, changed_us = section
            mark = Mark(PHASES[phase], *rest)
            return mark._replace(
                changed_us=max(mark.changed_us, changed_us),
                section=name,
                section_began_us=began_us,
                section_limit_us=limit_us,
            )
    return None


def _section(record: bytes) -> tuple[str, int, int, int] | None:
    """Return name, beginning, limit and change of the section in a mark, empty where there is none; None: torn."""
    if len(record) < SIZE_BYTES:
        return "", 0, 0, 0
    number, encoded, *times, again = _SECTION.unpack_from(record, _RECORD.size)
    if number != again:
        return None
    name = encoded.rstrip(b"\0").decode("ascii", errors="replace")
    if SECTION_NAME.fullmatch(name) is None or max(times) >= _LIMIT:
        return "", 0, 0, times[-1] if times[-1] < _LIMIT else 0
    return name, *times


class Marker:
    """The worker's side of the mark. Without a directory to write to, marks are made nowhere."""

    def __init__(self, path: Path | None) -> None:
        self._number = 0
        self._phase: Phase = "start"
        self._generation = self._iteration = self._micro_batch = self._entered = self._finished = 0
        self._boundary_us = self._limit_us = 0
        self._section, self._section_number = (b"", 0, 0), 0
        self._memory: mmap.mmap | bytearray = bytearray(SIZE_BYTES)
        if path is not None:
            with contextlib.suppress(OSError):
                self._memory = _mapped(path)
        self._mark()

    @property
    def phase(self) -> Phase:
        """The phase that was marked last."""
        return self._phase

    @phase.setter
    def phase(self, phase: Phase) -> None:
        """Set the phase and mark it."""
        if phase != self._phase:
            self._phase = phase
            self._mark()

    @property
    def limit_us(self) -> int:
        """The limit that was marked last, in microseconds."""
        return self._limit_us

    @limit_us.setter
    def limit_us(self, limit_us: int) -> None:
        """Set the limit, in microseconds, and mark it."""
        self._limit_us = limit_us
        self._mark()

    @property
    def elapsed_us(self) -> int:
        """Return the microseconds since the iteration began."""
        return max(0, now_us() - self._boundary_us)

    def begin_micro_batch(self, micro_batch: int) -> None:
        """Mark the beginning of the iteration's `micro_batch`-th micro-batch (from 0)."""
        self._micro_batch = micro_batch
        self._phase = "forward"
        self._mark()

    def begin_iteration(self, iteration: int, limit_us: int) -> None:
        """Mark the beginning of an iteration, which may last `limit_us`."""
        self._iteration = iteration
        self._micro_batch = 0
        self._boundary_us = now_us()
        self._limit_us = limit_us
        self._unlimit_section()
        self._mark()

    def idle(self) -> None:
        """Mark that no iteration runs: nothing is late."""
        self._limit_us = 0
        self._mark()

    def enter_group(self, generation: int) -> None:
        """Mark that the worker is in the group of `generation`, whose collectives are counted from here on."""
        self._generation = generation
        self._entered = self._finished = self._limit_us = 0
        self._unlimit_section()
        self._mark()

    def enter_section(self, name: bytes, began_us: int, limit_us: int, at_us: int) -> None:
        """Mark at `at_us` the section that the program is in since `began_us`, b"": none. It may be there for
        `limit_us` without a move, 0: for as long as the iteration lets it."""
        self._section = name, began_us, limit_us
        if len(self._memory) >= SIZE_BYTES:
            self._section_number += 1
            number = self._section_number
            _SECTION.pack_into(self._memory, _RECORD.size, number, name, began_us, limit_us, at_us, number)

    def entering(self) -> None:
        """Mark the beginning of a collective across replicas."""
        self._entered += 1
        self._mark()

    def leaving(self) -> None:
        """Mark the end of the collective."""
        self._finished = self._entered
        self._mark()

    def _unlimit_section(self) -> None:
        # A section that contains an iteration, or the forming of a group, has no limit of its own.
        if self._section[0]:
            self.enter_section(*self._section[:2], 0, now_us())

    def _mark(self) -> None:
        self._number += 1
        _RECORD.pack_into(
            self._memory, 0, self._number, _MAGIC, _NUMBER[self._phase], self._generation, self._iteration,
            self._micro_batch, self._entered, self._finished, self._boundary_us, self._limit_us, now_us(), self._number,
        )  # fmt: skip


def now_us() -> int:
    """Return the microseconds of CLOCK_MONOTONIC."""
    return time.monotonic_ns() // 1000


def _mapped(path: Path) -> mmap.mmap:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        # On a full disk an error here, else a SIGBUS at the first mark. A page of a fork server of before is smaller.
        size_bytes = SIZE_BYTES if os.fstat(fd).st_size != _RECORD.size else _RECORD.size
        os.posix_fallocate(fd, 0, size_bytes)
        return mmap.mmap(fd, size_bytes)
    finally:
        os.close(fd)
