"""What stands on `unicron-replay`'s command line: the parser, and what the words of it may be."""

from __future__ import annotations

import re

from unicrond.events.cli.command_line import Commands, Epilog, Flag, Parser, add, add_command
from unicrond.events.cli.exit_codes import exit_codes
from unicrond.events.cli.shared_flags import add_login, shared
from unicrond.replay.options.examples import EXAMPLES

#: The last seed that may come first: what `--json` prints of the seeds after it still fits 64 bits.
SEED_MAX = 2**63 - 1
#: Where the real trace lies, if `--trace` does not say so.
TRACE_FILE_VARIABLE = "UNICRON_TRACE_FILE"
DEFAULT_POLICIES = "unicron,unicron-stay,megatron-wait,megatron-shrink,hot-spare,oobleck,varuna,bamboo,recycle,ft-hsdp"


def command(commands: Commands, name: str, run: str, summary: str, *flags: Flag, codes: str = exit_codes()) -> None:
    """Add a command that reads a log. `codes`: its exit codes."""
    parser = bare_command(commands, name, run, summary, None, *flags, codes=codes)
    source = parser.add_argument_group("the log (one of the four)")
    add(
        source.add_mutually_exclusive_group(required=True),
        shared("--log"),
        shared("--nats"),
        shared("--state-dir", "whether it runs or not; or a backup"),
        shared("--url", "it keeps secrets back, and gives no heartbeats"),
    )
    add(
        source,
        shared("--token-file", "with --url"),
        shared("--archive", "(default: that of --state-dir, if it has one)"),
    )
    add_login(parser)


def bare_command(
    commands: Commands, name: str, run: str, summary: str, epilog: Epilog, *flags: Flag, codes: str = exit_codes()
) -> Parser:
    """Add a command without a log. `run`: "MODULE:FUNCTION" in replay; it takes the parsed options and returns the exit
    code, or None for 0."""
    parser = add_command(commands, name, summary, epilog or EXAMPLES[name], shared("--json"), *flags, codes=codes)
    parser.set_defaults(run=run)
    return parser


def places_argument(text: str) -> list[int]:
    """Parse places in a list, counted from 0: "0,2,5"; "" is none. Raises ValueError."""
    if not re.fullmatch(r"[0-9]*(,[0-9]*)*", text, re.ASCII):
        raise ValueError(f"{text!r} does not name places; give numbers from 0 with commas: 0,2,5")
    return [int(place) for place in text.split(",") if place]
