"""What stands on `unicron-replay`'s command line: the parser, and what the words of it may be."""

from __future__ import annotations

import re
from pathlib import Path

from unicrond.events.cli.command_line import Commands, Epilog, Flag, Parser, add, add_command, add_login, option, switch
from unicrond.events.nats.url import parse_urls
from unicrond.events.vocabulary import NAME_PATTERN
from unicrond.replay.options.examples import EXAMPLES

#: The last seed that may come first: what `--json` prints of the seeds after it still fits 64 bits.
SEED_MAX = 2**63 - 1
#: Where the real trace lies, if `--trace` does not say so.
TRACE_FILE_VARIABLE = "UNICRON_TRACE_FILE"
DEFAULT_POLICIES = "unicron,unicron-stay,megatron-wait,megatron-shrink,hot-spare,oobleck,varuna,bamboo,recycle,ft-hsdp"


def command(commands: Commands, name: str, run: str, summary: str, *flags: Flag, takes_file: bool = False) -> None:
    """Add a command that reads a log. `takes_file`: the path of an exported log may stand without --file."""
    parser = bare_command(commands, name, run, summary, None, *flags)
    source = parser.add_argument_group("the log (one of the four)")
    bare = option("bare_file", "FILE", "the same as --file FILE", type=Path, nargs="?")
    add(
        source.add_mutually_exclusive_group(required=True),
        *([bare] if takes_file else []),
        option("--file", "PATH", "an exported log, or a directory of segments", type=Path),
        option("--nats", "URL", "a NATS server; of a cluster several, with commas", type=parse_urls),
        option("--state-dir", "DIR", "a coordinator's directory, whether it runs or not; or a backup", type=Path),
        option("--url", "URL", "a coordinator's API; it keeps secrets back, and gives no heartbeats"),
    )
    add(source, option("--token-file", "FILE", "with --url: file with the API's bearer token", type=Path))
    summary = "the log's older part (default: that of --state-dir, if it has one)"
    add(source, option("--archive", "DIR", summary, type=Path))
    add_login(parser)


def bare_command(commands: Commands, name: str, run: str, summary: str, epilog: Epilog, *flags: Flag) -> Parser:
    """Add a command without a log. `run`: "MODULE:FUNCTION" in replay; it takes the parsed options and returns the exit
    code, or None for 0."""
    json = switch("--json", "machine-readable output")
    parser = add_command(commands, name, summary, epilog or EXAMPLES[name], json, *flags)
    parser.set_defaults(run=run)
    return parser


def places_argument(text: str) -> list[int]:
    """Parse places in a list, counted from 0: "0,2,5"; "" is none. Raises ValueError."""
    if not re.fullmatch(r"[0-9]*(,[0-9]*)*", text, re.ASCII):
        raise ValueError(f"{text!r} does not name places; give numbers from 0 with commas: 0,2,5")
    return [int(place) for place in text.split(",") if place]


def name_argument(text: str) -> str:
    """Check that the text is a valid name of a node or task, and return it. Raises ValueError."""
    if not re.fullmatch(NAME_PATTERN, text):
        raise ValueError(f"{text!r} is not a valid name; names are letters, digits, - and _, at most 63")
    return text
