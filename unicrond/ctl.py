"""`unicronctl`: what people type. `ctl_parser.py` knows every flag, `ctl_commands.py` acts; this file finds them.

Rules
-----
* Exit codes: 0 done, 1 the operation failed or no coordinator answers (one line says what to check),
  2 bad usage (one line names the field and the fix), 130 interrupted.
* `events decode` is called once per message by the nats CLI: it is found before anything is imported.
* `plan solve` and `throughput` have parsers of their own and need no coordinator.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:2] == ["events", "decode"]:
        from events.decode import main as decode

        return decode(arguments[2:])
    try:
        if arguments[:2] == ["plan", "solve"]:
            return _planning("solve_cli", arguments[2:])
        if arguments[:1] == ["throughput"]:
            return _planning("throughput_cli", arguments[1:])
        from unicrond.ctl_parser import parser

        command_line = parser()
        options = command_line.parse_args(arguments)
        if options.command == "throughput" or getattr(options, "plan_command", "") == "solve":
            command_line.error(f"{arguments[0]}: flags of this command stand after it")
        from unicrond.ctl_commands import run

        return run(options)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        _silence_stdout()
        return 0  # whoever read us has seen enough


def _planning(module: str, arguments: list[str]) -> int:
    """Hand over to a command of the planner, which brings numpy with it."""
    import importlib

    return int(importlib.import_module(f"unicrond.planning.{module}").main(arguments))


def _silence_stdout() -> None:
    """Or the interpreter complains when it flushes at exit."""
    import os

    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
