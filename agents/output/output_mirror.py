"""Copies workers' output to the agent's own standard output, with a prefix before each line: for `kubectl logs` and the
like.

Rules
-----
* It is read from the workers' logs, where it stays: what is hidden there (secrets) is hidden here, and neither fork
  server nor workers know of it.
* A worker that starts under this agent is shown from its first line on; an adopted one only from the adoption on.
* A thread of its own writes: a standard output that takes nothing holds up neither the agent nor a worker. Nothing is
  stored for it but the logs themselves; text that is rotated away before it is written is not shown.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Collection
from pathlib import Path

from unicrond.agents.host.paths import worker_log
from unicrond.events.vocabulary import WorkerId

_EVERY_S = 0.2
#: How many workers that have ended are remembered, so that none is shown twice.
_ENDED_MAX = 256
_CHUNK_BYTES = 1 << 16
#: The length at which a longer line is cut.
_LINE_MAX_BYTES = 16 * 1024
#: How long the agent's end waits for output that is still to be shown.
_LAST_S = 2.0


class _LogTail:
    """Follows one worker's log as it grows. `from_end`: skip its present content."""

    def __init__(self, worker: WorkerId, path: Path, *, from_end: bool) -> None:
        self._prefix = f"{worker}| ".encode()
        self._path = path
        self._rest = b""
        self._fd = -1
        if from_end:
            with contextlib.suppress(OSError):
                self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                os.lseek(self._fd, 0, os.SEEK_END)

    def lines(self) -> bytes:
        """Return the whole lines that have come since the last call."""
        output = self._read()
        while self._is_rotated():
            os.close(self._fd)
            self._fd = -1
            output += self._read()
        return output

    def end(self) -> bytes:
        """Return the rest, with a line end where it has none, and close the log."""
        output = self.lines() + (self._prefix + self._rest + b"\n" if self._rest else b"")
        if self._fd >= 0:
            os.close(self._fd)
        return output

    def _read(self) -> bytes:
        output = b""
        try:
            if self._fd < 0:
                self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            while data := os.read(self._fd, _CHUNK_BYTES):
                *whole, self._rest = (self._rest + data).split(b"\n")
                if len(self._rest) > _LINE_MAX_BYTES:
                    whole.append(self._rest)
                    self._rest = b""
                output += b"".join(self._prefix + line + b"\n" for line in whole)
        except OSError:
            pass  # it is not there yet, or its volume is gone
        return output

    def _is_rotated(self) -> bool:
        """Return whether the log goes on in another file."""
        if self._fd < 0:
            return False
        try:
            return self._path.stat().st_ino != os.fstat(self._fd).st_ino
        except OSError:
            return False


class OutputMirror:
    """Copies what the workers of `living()` write, and those reported as `ended`, until `close`. `out` takes bytes, and
    may block."""

    def __init__(
        self, logs: Path, living: Callable[[], Collection[WorkerId]], out: Callable[[bytes], object] | None = None
    ) -> None:
        self._logs = logs
        self._living = living
        self._out = out or _to_stdout
        self._log_tails = {worker: self._open(worker, from_end=True) for worker in living()}
        self._ended: deque[WorkerId] = deque()
        self._past_workers: deque[WorkerId] = deque(maxlen=_ENDED_MAX)
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="output", daemon=True)
        self._thread.start()

    def ended(self, worker: WorkerId) -> None:
        """Note that the worker has ended and its log is complete; it may have lived too shortly to be seen. Repeating
        does no harm."""
        self._ended.append(worker)

    def close(self) -> None:
        """Show the rest, for at most _LAST_S."""
        self._ends.set()
        self._thread.join(_LAST_S)

    def _run(self) -> None:
        while not self._ends.wait(_EVERY_S):
            self._show()
        self._show()
        for log_tail in self._log_tails.values():
            self._write(log_tail.end())

    def _show(self) -> None:
        living = set(self._living())
        while self._ended:
            living.add(worker := self._ended.popleft())
        for worker in sorted(living - self._log_tails.keys()):
            if worker not in self._past_workers:
                self._log_tails[worker] = self._open(worker, from_end=False)
        living = set(self._living())
        for worker, log_tail in list(self._log_tails.items()):
            if worker in living:
                self._write(log_tail.lines())
            else:  # all that it wrote is in its log before its end is reported
                self._write(self._log_tails.pop(worker).end())
                self._past_workers.append(worker)

    def _open(self, worker: WorkerId, *, from_end: bool) -> _LogTail:
        return _LogTail(worker, worker_log(self._logs, worker.rpartition(".")[0], worker), from_end=from_end)

    def _write(self, text: bytes) -> None:
        if text:
            with contextlib.suppress(OSError):  # closed: nobody reads it
                self._out(text)


def _to_stdout(text: bytes) -> None:
    view = memoryview(text)
    while view:
        view = view[os.write(1, view) :]
