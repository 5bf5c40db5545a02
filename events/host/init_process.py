"""A small first process of a container: it keeps one child, passes signals on, and reaps whatever ends below it.

Rules
-----
* What a process leaves behind when it ends becomes a child of the container's first one, and stays a zombie until that
  reaps it: an agent or a head as first process would collect one for each `kubectl exec` that leaves something.
* Outside of a container the first process is made one by a request to the kernel (subreaper): what the child leaves
  behind stays below it.
* A child that ends by an error or a signal is started again, after a delay that doubles while it keeps ending; at most
  so often within a time. Then, or where its code says that it is not to be started again, its code is this one's:
  128 + N where signal N has ended it.
* Once a signal that asks for the end has been passed on, the child is not started again.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
_DELAY_S = 0.1
_DELAY_MAX_S = 5.0
_ENDS = (signal.SIGTERM, signal.SIGINT)
_PASSED_ON = (*_ENDS, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


class InitProcess:
    """Keeps one child; `run` it once, in the main thread."""

    def __init__(
        self, start: Callable[[], int], *, restarts: int = 0, within_s: float = 600.0, last: Collection[int] = (0,)
    ) -> None:
        """Create it. `start`: starts the child and returns its pid. `restarts`: as many within `within_s` at most.
        `last`: exit codes after which it is not started again."""
        self._start = start
        self._restarts = restarts
        self._within_s = within_s
        self._last = last
        self._child = 0
        self._is_to_end = 0

    def run(self) -> int:
        """Run the child, restart it where that is allowed, and return the exit code of the last one."""
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
        for number in _PASSED_ON:
            signal.signal(number, self._pass_on)
        restarts: deque[float] = deque(maxlen=self._restarts or 1)
        delay_s = _DELAY_S
        while True:
            start_s = time.monotonic()
            self._child = self._start()
            if self._is_to_end:  # it came before there was a child
                os.kill(self._child, self._is_to_end)
            code = self._reap()
            now_s = time.monotonic()
            if now_s - start_s > 10 * _DELAY_MAX_S:
                delay_s = _DELAY_S
            is_exhausted = len(restarts) == self._restarts and (not restarts or now_s - restarts[0] < self._within_s)
            if self._is_to_end or code in self._last or is_exhausted:
                return code
            restarts.append(now_s)
            print(f"ended with {code} and is started again in {delay_s:g} s", file=sys.stderr, flush=True)
            time.sleep(delay_s)
            delay_s = min(2 * delay_s, _DELAY_MAX_S)

    def _reap(self) -> int:
        """Reap processes until the child has ended; return its exit code."""
        while True:
            pid, status = os.wait()
            if pid == self._child:
                self._child = 0
                code = os.waitstatus_to_exitcode(status)
                return code if code >= 0 else 128 - code

    def _pass_on(self, number: int, _: object) -> None:
        if number in _ENDS:
            self._is_to_end = number
        if self._child:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._child, number)


def fork(work: Callable[[], int]) -> int:
    """Start a child that does `work` and ends with its code; return its pid. It has all that this process has imported,
    and takes signals as a new program would. The process must have one thread."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)  # none may be taken by a handler of this process' in the child
    try:
        if pid := os.fork():
            return pid
        for number in _PASSED_ON:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
    code = 1
    try:
        code = work()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def step_aside() -> None:
    """Fork if this is the first process of a container: become its init process, and continue in the child.

    Elsewhere does nothing. The process must have one thread.
    """
    if os.getpid() != 1:
        return
    pid = os.fork()
    if pid:
        code = InitProcess(lambda: pid).run()
        sys.stdout.flush()
        os._exit(code)


def ends_all() -> bool:
    """Say whether all other processes of this container end with this one: it is the first process, or what that
    keeps."""
    return os.getpid() == 1 or (os.getppid() == 1 and keeps(*(_cmdline(name) for name in ("1", "self"))))


def keeps(init: Sequence[str], command: Sequence[str]) -> bool:
    """Say whether the first process keeps the one with this command line: it has forked it, or was told what to start
    (`sh enter unicrond run`, `tini -- unicrond run`). A system's init was not."""
    for first in (0, 1):  # the second word where the first one is Python
        program, words = command[first : first + 1], list(command[first + 1 :])
        place = len(init) - len(words) - 1
        if program and place > 0 and list(init[place + 1 :]) == words and _is_same(init[place], program[0]):
            return True
    return list(init) == list(command)


def _is_same(word: str, path: str) -> bool:
    return Path(word).name == Path(path).name


def _cmdline(process: str) -> list[str]:
    return Path("/proc", process, "cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
