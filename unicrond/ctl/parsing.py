"""What the commands of `unicronctl` have in common (`parser.py`)."""

from __future__ import annotations

import argparse
from pathlib import Path

from unicrond.events.cli import command_line
from unicrond.events.cli.command_line import Commands, Epilog, Flag, Parser, add, add_command, option, point

PROG = "unicronctl"


def common(default: object) -> Parser:
    """Build the flags that may stand before the command and after it; there they must not undo what stood before."""
    flags = Parser(add_help=False)
    add(
        flags,
        option("--url", "URL[,URL]", "the coordinator's API; of several heads all", default=default),
        option("--token-file", "FILE", "file with the API's bearer token", type=Path, default=default),
        option("--tls-ca", "FILE", "CA certificate of an https API", type=Path, default=default),
    )
    help_text = "JSON instead of text (events: JSON lines)"
    flags.add_argument("--json", action="store_true", default=default or False, help=help_text)
    return flags


def add_to(commands: Commands, name: str, text: str, examples: tuple[str, ...] | Epilog, *flags: Flag) -> Parser:
    """Add a command. `examples`: without the name of the program, or a whole epilog."""
    epilog = (
        command_line.examples(*(f"{PROG} {line}" for line in examples)) if isinstance(examples, tuple) else examples
    )
    return add_command(commands, name, text, epilog, *flags, parents=[common(argparse.SUPPRESS)])


TASK = option("task", "TASK", "its name")
#: docs/operate/asking.md.
AT = point("--at", "as it was there: a sequence number, a time with its zone, or a span before the end (10m)")
REASON = option("--reason", "TEXT", "reason for the log (default: requested by an operator)", default="")
