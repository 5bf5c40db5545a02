"""Workers' output on the agent's own standard output, a prefix before each line: for `kubectl logs` and the like.

Rules
-----
* It is read from the workers' logs, where it stays: what is hidden there (secrets) is hidden here, and neither fork
  server nor workers know of it.
* A worker that starts under this agent is shown from its first line on; of one that was adopted only what comes now.
* A thread of its own writes: a standard output that takes nothing holds up neither the agent nor a worker. Nothing is
  kept for it but what stands in the logs; what was rotated away meanwhile is not shown.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Collection
from pathlib import Path

from agents.log_layout import worker_log
from events.vocabulary import WorkerId

_EVERY_S = 0.2
#: So many workers that have ended are remembered, so that none is shown twice.
_ENDED_MAX = 256
_CHUNK_BYTES = 1 << 16
#: A longer line is cut there.
_LINE_MAX_BYTES = 16 * 1024
#: At the end of the agent: for what is still to be shown.
_LAST_S = 2.0


class _Shown:
    """One worker's log, as far as it was shown. `from_end`: what it holds now is not."""

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
        """What has come since the last time, in whole lines."""
        shown = self._read()
        while self._is_rotated():
            os.close(self._fd)
            self._fd = -1
            shown += self._read()
        return shown

    def end(self) -> bytes:
        """What is left, and a line's end where it has none."""
        shown = self.lines() + (self._prefix + self._rest + b"\n" if self._rest else b"")
        if self._fd >= 0:
            os.close(self._fd)
        return shown

    def _read(self) -> bytes:
        shown = b""
        try:
            if self._fd < 0:
                self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            while data := os.read(self._fd, _CHUNK_BYTES):
                *whole, self._rest = (self._rest + data).split(b"\n")
                if len(self._rest) > _LINE_MAX_BYTES:
                    whole.append(self._rest)
                    self._rest = b""
                shown += b"".join(self._prefix + line + b"\n" for line in whole)
        except OSError:
            pass  # it is not there yet, or its volume is gone
        return shown

    def _is_rotated(self) -> bool:
        """The log goes on in another file."""
        if self._fd < 0:
            return False
        try:
            return self._path.stat().st_ino != os.fstat(self._fd).st_ino
        except OSError:
            return False


class OutputMirror:
    """Shows what `living()` workers write, and those that are told to have `ended`, until `close`. `out`: takes bytes,
    may block."""

    def __init__(
        self, logs: Path, living: Callable[[], Collection[WorkerId]], out: Callable[[bytes], object] | None = None
    ) -> None:
        self._logs = logs
        self._living = living
        self._out = out or _to_stdout
        self._shown = {worker: self._open(worker, from_end=True) for worker in living()}
        self._ended: deque[WorkerId] = deque()
        self._done: deque[WorkerId] = deque(maxlen=_ENDED_MAX)
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="output", daemon=True)
        self._thread.start()

    def ended(self, worker: WorkerId) -> None:
        """It has, and all that it wrote is in its log; it may have lived too shortly to be seen. May be said again."""
        self._ended.append(worker)

    def close(self) -> None:
        """Show the rest, for at most _LAST_S."""
        self._ends.set()
        self._thread.join(_LAST_S)

    def _run(self) -> None:
        while not self._ends.wait(_EVERY_S):
            self._show()
        self._show()
        for shown in self._shown.values():
            self._say(shown.end())

    def _show(self) -> None:
        living = set(self._living())
        while self._ended:
            living.add(worker := self._ended.popleft())
        for worker in sorted(living - self._shown.keys()):
            if worker not in self._done:
                self._shown[worker] = self._open(worker, from_end=False)
        living = set(self._living())
        for worker, shown in list(self._shown.items()):
            if worker in living:
                self._say(shown.lines())
            else:  # all that it wrote is in its log before its end is told
                self._say(self._shown.pop(worker).end())
                self._done.append(worker)

    def _open(self, worker: WorkerId, *, from_end: bool) -> _Shown:
        return _Shown(worker, worker_log(self._logs, worker.rpartition(".")[0], worker), from_end=from_end)

    def _say(self, text: bytes) -> None:
        if text:
            with contextlib.suppress(OSError):  # closed: nobody wants it
                self._out(text)


def _to_stdout(text: bytes) -> None:
    view = memoryview(text)
    while view:
        view = view[os.write(1, view) :]
