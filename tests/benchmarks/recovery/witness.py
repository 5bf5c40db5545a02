"""What happened in each training process, by one clock for all, and the kill on order; the same for every system.

Rules
-----
* A process writes `<directory>/<name>.<pid>.trace`, a line as it happens: WORD MICROSECONDS NUMBER ..., in wall clock
  time, which all processes of a machine share with the log server.

      computing ITERATION MICRO_BATCH   its forward begins
      computed ITERATION MICRO_BATCH    its backward has ended
      stepped ITERATION MICRO_BATCHES   the optimizer has stepped, with the gradients of so many
      discarded ITERATION MICRO_BATCHES the step was given up after so many had been computed here
      killed ITERATION                  SIGKILL, now

* `<directory>/kill` names a process and a delay in microseconds: that one, in its next iteration, begins its third
  micro-batch and is killed so much later, wherever it is then. By itself: so the time is exact.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

#: The kill falls into the micro-batch that follows so many.
_FINISHED = 2


class Witness:
    """One process's. `paced_s`: each micro-batch lasts so long at least."""

    def __init__(self, directory: Path, name: str, paced_s: float = 0.0) -> None:
        self._order = directory / "kill"
        self._paced_s = paced_s
        self._fd = os.open(directory / f"{name}.{os.getpid()}.trace", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._open: tuple[int, int] | None = None
        self._began_s = 0.0
        self._finished = (0, 0)

    def tell(self, word: str, *numbers: int) -> None:
        os.write(self._fd, f"{word} {now_us()} {' '.join(map(str, numbers))}\n".encode())

    def computing(self, iteration: int, micro_batch: int) -> None:
        """A micro-batch begins; one that was open has ended."""
        self.computed()
        number = self._finished[1] if self._finished[0] == iteration else 0
        self._finished = (iteration, number + 1)
        if number == _FINISHED and self._order.exists():
            self._obey(iteration)
        self._open, self._began_s = (iteration, micro_batch), time.monotonic()
        self.tell("computing", iteration, micro_batch)

    def computed(self) -> None:
        """The open micro-batch, if any, has ended."""
        if self._open is not None:
            time.sleep(max(0.0, self._began_s + self._paced_s - time.monotonic()))
            self.tell("computed", *self._open)
            self._open = None

    def stepped(self, iteration: int, micro_batches: int) -> None:
        self.tell("stepped", iteration, micro_batches)
        self._finished = (0, 0)

    def discarded(self, iteration: int, micro_batches: int) -> None:
        self.tell("discarded", iteration, micro_batches)
        self._finished = (0, 0)

    def _obey(self, iteration: int) -> None:
        pid, delay_us = map(int, self._order.read_text().split())
        if pid == os.getpid():
            self._order.unlink()
            threading.Thread(target=self._kill, args=(iteration, delay_us / 1e6), daemon=True).start()

    def _kill(self, iteration: int, delay_s: float) -> None:
        time.sleep(delay_s)
        self.tell("killed", iteration)
        os.kill(os.getpid(), signal.SIGKILL)


def now_us() -> int:
    return time.time_ns() // 1000


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a trace. `process`: "name.pid"."""

    process: str
    word: str
    at_us: int
    numbers: tuple[int, ...]

    @property
    def pid(self) -> int:
        return int(self.process.rpartition(".")[2])


class Traces:
    """All traces in a directory, as far as they have been read."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._read: dict[Path, int] = {}
        self.lines: list[Line] = []

    def look(self) -> list[Line]:
        """Read what has come since the last look; all lines so far, in order of time."""
        for path in sorted(self._directory.glob("*.trace")):
            with path.open("rb") as trace:
                trace.seek(self._read.get(path, 0))
                new = trace.read()
            whole = new[: new.rfind(b"\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(whole)
            self.lines.extend(_parsed(path.name.removesuffix(".trace"), whole.decode()))
        self.lines.sort(key=lambda line: line.at_us)
        return self.lines


def _parsed(process: str, text: str) -> Iterator[Line]:
    for line in text.splitlines():
        word, at_us, *numbers = line.split()
        yield Line(process, word, int(at_us), tuple(map(int, numbers)))
