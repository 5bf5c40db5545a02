"""Names the cause of a worker's end from its exit status: a table of facts, without an opinion about the response.

Severity and remedy are the coordinator's. A worker that could still report has sent its cause itself
(messages.Trouble); this is for those that could not.
"""

from __future__ import annotations

import os
import signal
from typing import NamedTuple

from unicrond.agents.protocol.messages import EXIT_NO_AGENT, EXIT_NO_MEMBERSHIP, LEFT_EARLY, OomKill
from unicrond.events.vocabulary import ErrorKind, ExitCause

_SIGNALS: dict[int, tuple[ErrorKind, str]] = {
    signal.SIGKILL: ("process_exit", "from outside unicron; not the OOM killer"),
    signal.SIGTERM: ("process_exit", "from outside unicron: something asked the process to end"),
    signal.SIGINT: ("process_exit", "from outside unicron: something interrupted the process"),
    signal.SIGSEGV: ("process_exit", "invalid memory access in native code; look at the log's last lines"),
    signal.SIGBUS: ("process_exit", "bus error: /dev/shm may be full, or memory is faulty"),
    signal.SIGABRT: ("process_exit", "native code called abort(); the log's last lines say which assertion failed"),
    signal.SIGFPE: ("process_exit", "arithmetic error in native code"),
    signal.SIGILL: ("process_exit", "illegal instruction: this build does not fit the CPU"),
    signal.SIGXCPU: ("process_exit", "a CPU time limit (ulimit -t) was reached"),
}

_CODES: dict[int, tuple[ErrorKind, str]] = {
    0: ("process_exit", "ended cleanly before it joined its task"),
    1: ("exception", "an exception ended it; the log's last lines hold the traceback"),
    EXIT_NO_AGENT: (
        "process_exit",
        "heard no agent for its lease time, so it ended itself; another worker may have its place",
    ),
    EXIT_NO_MEMBERSHIP: ("process_exit", "waited too long for a membership, saved its state and stopped"),
}


_CAUSES: dict[ExitCause, tuple[ErrorKind, str]] = {
    "oom_killed": (
        "out_of_memory",
        "the kernel's OOM killer: give the task a smaller micro_batch, or the node fewer slots or more memory",
    ),
    "maybe_oom_killed": ("process_exit", "from outside unicron, or by the OOM killer: see dmesg"),
    "unknown": ("process_exit", "with its fork server or its container; what ended them is unknown here"),
}


class Exit(NamedTuple):
    """How a process ended. Exactly one of `exit_code` and `signal` is set."""

    exit_code: int | None
    signal: int | None
    cause: ExitCause = "unknown"

    @classmethod
    def of(cls, status: int, oom: OomKill = "no") -> Exit:
        """Build it from the 16-bit status of wait(2), and what is known of the OOM killer (fork_server.py)."""
        if not os.WIFSIGNALED(status):
            return cls(os.WEXITSTATUS(status), None, "oom_killed" if oom == "yes" else "exited")
        cause: ExitCause = "core_dumped" if os.WCOREDUMP(status) else "signalled"
        if oom != "no":
            cause = "oom_killed" if oom == "yes" else "maybe_oom_killed"
        return cls(None, os.WTERMSIG(status), cause)


def classify(end: Exit, *, ready: bool, member: bool = False) -> tuple[ErrorKind, str]:
    """Return the kind of error and one plain sentence.

    `ready`: the worker had built its model; `member`: it trained.
    """
    if end.signal is not None:
        kind, hint = _SIGNALS.get(end.signal, ("process_exit", "see signal(7)"))
        if end.signal == signal.SIGKILL:
            kind, hint = _CAUSES.get(end.cause, (kind, hint))
        dump = " with a core dump" if end.cause == "core_dumped" else ""
        joint = " " if hint.startswith(("from outside", "with its")) else "; "
        text = f"killed by {_name(end.signal)}{dump}{joint}{hint}"
    elif end.cause == "oom_killed":
        kind, hint = _CAUSES[end.cause]
        text = f"exit code {end.exit_code}: a process of it was killed by {hint}"
    elif end.exit_code == 0 and member:
        return "left_early", f"exit code 0 in mid-training: {LEFT_EARLY}"
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
