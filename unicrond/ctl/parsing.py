"""What the commands of `unicronctl` have in common (`parser.py`)."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from unicrond.events.cli import command_line
from unicrond.events.cli.command_line import (
    Commands,
    Epilog,
    Flag,
    Parser,
    add,
    add_command,
    option,
    point,
    repeated,
    whole,
)

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


def setting(text: str) -> tuple[str, str]:
    """Split PATH=VALUE into (path, value). Raises ValueError where the text is not of that form."""
    path, equals, value = text.partition("=")
    if not equals or "." not in path or not value:
        raise ValueError(f"{text!r} is not a setting; give tasks.TASK.FIELD=VALUE or policy.FIELD=VALUE")
    return path, value


#: What a `whatif` may change, of `unicronctl plan` and of `unicron-replay`.
CHANGES = (
    repeated("--set", "PATH=VALUE", "tasks.TASK.FIELD=VALUE or policy.FIELD=VALUE", type=setting),
    repeated("--lose", "NODE", "without this node"),
    option("--add-nodes", "N", "with N more nodes", type=whole(0, 10_000), default=0),
    option("--slots", "N", "slots of each (default: as most nodes have)", type=whole(0, 1024), default=0),
    option("--gpu", "TYPE", "the type of their GPUs (default: as most nodes have)", default=""),
)


def changes_json(options: argparse.Namespace) -> dict[str, Any]:
    """Return the changes that the flags in CHANGES state, as the API takes them (views/what_if.py)."""
    return {
        "set": dict(options.set),
        "lose": options.lose,
        "add_nodes": options.add_nodes,
        "slots": options.slots,
        "gpu": options.gpu,
    }
