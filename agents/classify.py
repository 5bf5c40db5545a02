"""What an exit status says about the cause: one table of facts, no opinion about the response.

Severity and remedy are the coordinator's. A worker that could still speak has told its cause itself
(messages.Trouble); this is for those that could not.
"""

from __future__ import annotations

import os
import signal
from typing import NamedTuple

from agents.trainer.channel import EXIT_NO_AGENT
from events.vocabulary import ErrorKind

#: EX_TEMPFAIL: the trainer waited too long for a membership, saved what it had and stopped.
EXIT_NO_MEMBERSHIP = 75

_SIGNALS: dict[int, tuple[ErrorKind, str]] = {
    signal.SIGKILL: ("process_exit", "if nobody did that, look for the OOM killer in dmesg"),
    signal.SIGTERM: ("process_exit", "somebody asked the process to end; unicron did not"),
    signal.SIGINT: ("process_exit", "somebody interrupted the process; unicron did not"),
    signal.SIGSEGV: ("process_exit", "invalid memory access in native code; look at the log's last lines"),
    signal.SIGBUS: ("process_exit", "bus error: /dev/shm may be full, or memory is faulty"),
    signal.SIGABRT: ("process_exit", "native code called abort(); the log's last lines say which assertion failed"),
    signal.SIGFPE: ("process_exit", "arithmetic error in native code"),
    signal.SIGILL: ("process_exit", "illegal instruction: this build does not fit the CPU"),
    signal.SIGXCPU: ("process_exit", "a CPU time limit (ulimit -t) was reached"),
}

_CODES: dict[int, tuple[ErrorKind, str]] = {
    0: ("process_exit", "ended in good order before it was ever a member of its task"),
    1: ("exception", "an exception ended it; the log's last lines hold the traceback"),
    EXIT_NO_AGENT: (
        "process_exit",
        "heard of no agent for its lease time, so it ended itself; its place may be taken",
    ),
    EXIT_NO_MEMBERSHIP: ("process_exit", "waited too long for a membership, saved its state and stopped"),
}


class Exit(NamedTuple):
    """How a process ended. Exactly one of `exit_code` and `signal` is set."""

    exit_code: int | None
    signal: int | None

    @classmethod
    def of(cls, status: int) -> Exit:
        """From the 16-bit status of wait(2)."""
        if os.WIFSIGNALED(status):
            return cls(None, os.WTERMSIG(status))
        return cls(os.WEXITSTATUS(status), None)


def classify(end: Exit, *, ready: bool) -> tuple[ErrorKind, str]:
    """The kind of error and one plain sentence. `ready`: the worker had built its model."""
    if end.signal is not None:
        kind, hint = _SIGNALS.get(end.signal, ("process_exit", "see signal(7)"))
        text = f"killed by {_name(end.signal)}; {hint}"
    else:
        assert end.exit_code is not None
        kind, hint = _CODES.get(end.exit_code, ("process_exit", "see the log's last lines"))
        text = f"exit code {end.exit_code}: {hint}"
    if not ready:
        return "start_failed", f"{text}; it was not ready yet"
    return kind, text


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
