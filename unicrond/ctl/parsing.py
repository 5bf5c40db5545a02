"""What the commands of `unicronctl` have in common (`parser.py`)."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from unicrond.events.cli import command_line
from unicrond.events.cli.command_line import Commands, Epilog, Flag, Parser, add, add_command, name, node_name, option
from unicrond.events.cli.exit_codes import exit_codes
from unicrond.events.cli.shared_flags import shared
from unicrond.events.log.point import AtTime, BeforeEnd, Point, parse_point

PROG = "unicronctl"


def common(default: object) -> Parser:
    """Build the flags that may stand before the command and after it; there they must not undo what stood before."""
    flags = Parser(add_help=False)
    add(
        flags,
        *(shared(flag, default=default) for flag in ("--url", "--token-file", "--tls-ca")),
        shared("--json", "(events: JSON lines)", default=default or False),
    )
    return flags


def add_to(
    commands: Commands,
    name: str,
    text: str,
    examples: tuple[str, ...] | Epilog,
    *flags: Flag,
    codes: str = exit_codes(),
) -> Parser:
    """Add a command. `examples`: without the name of the program, or a whole epilog. `codes`: its exit codes."""
    epilog = (
        command_line.examples(*(f"{PROG} {line}" for line in examples)) if isinstance(examples, tuple) else examples
    )
    return add_command(commands, name, text, epilog, *flags, codes=codes, parents=[common(argparse.SUPPRESS)])


TASK = option("task", "TASK", "its name", type=name)
NODES = option("nodes", "NODE", "its name; several are taken together", type=node_name, nargs="+")
AT = shared("--at", "a sequence number, a time with its zone, or a span before the end (10m)")
UNTIL = shared("--until", "a sequence number, a time with its zone, or a span before the end (10m)")
SINCE = shared("--since", "8h: before the end")
REASON = shared("--reason", "(default: requested by an operator)", default="")
#: What a `whatif` may change, of `unicronctl plan` and of `unicron-replay`.
CHANGES = (
    shared("--set", "tasks.TASK.FIELD=VALUE or policy.FIELD=VALUE"),
    shared("--lose"),
    shared("--add-nodes", default=0),
    shared("--slots", "(default: as most nodes have)", default=0),
    shared("--gpu-type", "of those nodes (default: as most nodes have)", default=""),
)


def changes_json(options: argparse.Namespace) -> dict[str, Any]:
    """Return the changes that the flags in CHANGES state, as the API takes them (views/what_if.py)."""
    return {
        "set": dict(options.set),
        "lose": options.lose,
        "add_nodes": options.add_nodes,
        "slots": options.slots,
        "gpu": options.gpu_type,
    }


#: More names than anyone reads are none at all.
NAMES_MAX = 2000


def live_names(kind: str, words: Sequence[str]) -> Iterable[str]:
    """Return the names of this kind that there are now. `words`: the command line so far. Raises whatever goes
    wrong."""
    if kind not in ("task", "node", "worker", "incident", "plan", "window"):
        return ()
    from unicrond.ctl.client_options import client_of

    options = argparse.Namespace(url=None, token_file=None, tls_ca=None)
    for flag, value in pairwise(words):
        if flag in ("--url", "--token-file", "--tls-ca"):
            setattr(options, flag[2:].replace("-", "_"), value if flag == "--url" else Path(value))
    state = client_of(options).state()[0]
    names: dict[str, Iterable[str]] = {
        "task": state.tasks,
        "node": state.nodes,
        "worker": (worker for task in state.tasks.values() for worker in task.workers),
        "incident": (*reversed(state.incidents), *(incident.id for incident in reversed(state.closed_incidents))),
        "plan": (str(state.plan.epoch),),
        "window": state.windows,
    }
    return [name for _, name in zip(range(NAMES_MAX), names[kind], strict=False)]


# --- times to come: a span from now, or a time with its zone ----------------------------------------

MOMENT_SYNTAX = "a span from now (2h, 90m) or a time with its zone (2026-11-20T09:30:00Z)"
_SPAN_MAX_US = 366 * 86_400_000_000


def moment(text: str) -> BeforeEnd | AtTime:
    """Parse a future time, for argparse. Raises ValueError in one line."""
    text = text.removeprefix("@")  # command_line.py has put it before a span that looks like a flag
    point = _parsed(text)
    if isinstance(point, AtTime) or (isinstance(point, BeforeEnd) and _is_positive(text, point)):
        return point
    raise ValueError(f"{text!r} is no time to come; give {MOMENT_SYNTAX}")


def span_s(text: str) -> float:
    """Parse a duration in seconds, for argparse. Raises ValueError in one line."""
    text = text.removeprefix("@")  # command_line.py has put it before a span that looks like a flag
    span = _parsed(text)
    if isinstance(span, BeforeEnd) and _is_positive(text, span):
        return span.span_us / 1e6
    raise ValueError(f"{text!r} is no duration up to a year; give one like 90m, 2h or 3d")


def as_body(when: BeforeEnd | AtTime) -> dict[str, Any]:
    """Convert the time to the form of the API (service/api/api.py, `_When`): a span is counted by the coordinator's
    clock."""
    return {"at_us": when.time_us} if isinstance(when, AtTime) else {"in_s": when.span_us / 1e6}


def _parsed(text: str) -> Point | BeforeEnd | None:
    try:
        return parse_point(text)
    except ValueError:
        return None


def _is_positive(text: str, span: BeforeEnd) -> bool:
    return not text.startswith("-") and 0 < span.span_us <= _SPAN_MAX_US
