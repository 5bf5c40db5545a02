"""The exit codes of all commands: one table, which every `--help` quotes (docs/operate/commands.md).

A command ends with one of these alone. What its "failed" is, where that is not plain, stands in its own help.
"""

from __future__ import annotations

import signal

DONE = 0
FAILED = 1
USAGE = 2
TIMEOUT = 3
SUPERSEDED = 4
FORGOTTEN = 5
SHUT_OUT = 6
INTERRUPTED = 128 + signal.SIGINT
TERMINATED = 128 + signal.SIGTERM

#: Code -> what it means, for all commands alike.
MEANINGS: dict[int, str] = {
    DONE: "done",
    FAILED: "failed",
    USAGE: "bad usage",
    TIMEOUT: "timed out",
    SUPERSEDED: "a newer agent of this name runs",
    FORGOTTEN: "the node was forgotten",
    SHUT_OUT: "the node's key was replaced or revoked",
    INTERRUPTED: "interrupted",
    TERMINATED: "ended by SIGTERM",
}
#: Those that every command may end with.
COMMON = (DONE, FAILED, USAGE, INTERRUPTED)


def exit_codes(*more: int, failed: str = "") -> str:
    """Format the line of a help text: the common codes and `more`. `failed`: what code 1 says of this command."""
    meanings = MEANINGS | ({FAILED: f"failed ({failed})"} if failed else {})
    return "exit codes: " + ", ".join(f"{code} {meanings[code]}" for code in sorted({*COMMON, *more}))
