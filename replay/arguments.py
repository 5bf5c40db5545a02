"""What stands on `unicron-replay`'s command line: the parser, and what the words of it may be."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from events.nats_url import parse_urls
from replay.examples import EXAMPLES
from replay.opening import PROGRAM
from replay.point import BeforeEnd, Point, parse_point
from replay.selection import TYPE_NAMES

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")
_SPAN = re.compile(r"-[0-9.]+(ms|s|m|h|d)")
#: The last seed that may come first: what `--json` prints of the seeds after it still fits 64 bits.
SEED_MAX = 2**63 - 1
_SEED_DIGITS = 40
#: Stands before a span that is no flag; no point begins with it.
_NO_FLAG = "@"


class Parser(argparse.ArgumentParser):
    """argparse with errors of one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{PROGRAM}: {message.removeprefix('argument ')}; see {self.prog} --help\n")


def command(commands: Any, name: str, run: str, what: str) -> argparse.ArgumentParser:
    """A command that reads a log."""
    parser = bare_command(commands, name, run, what)
    source = parser.add_argument_group("the log (one of the three)")
    one = source.add_mutually_exclusive_group(required=True)
    one.add_argument("--file", metavar="PATH", type=Path, help="an exported log, or a directory of segments")
    one.add_argument("--nats", metavar="URL", type=nats_urls, help="a NATS server; of a cluster several, with commas")
    one.add_argument("--state-dir", metavar="DIR", type=Path, help="a coordinator's, whose embedded NATS server runs")
    source.add_argument(
        "--archive",
        metavar="DIR",
        type=Path,
        help="the log's older part (default: that of --state-dir, if it has one)",
    )
    add_login(parser)
    return parser


def bare_command(commands: Any, name: str, run: str, what: str) -> argparse.ArgumentParser:
    """A command. `run`: "MODULE:FUNCTION" in replay; takes the parsed options, gives the exit code or None for 0."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=what,
        description=what[0].upper() + what[1:] + ".",
        epilog=EXAMPLES[name],
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    return parser


def add_login(parser: argparse.ArgumentParser) -> None:
    """How to log in to NATS."""
    login = parser.add_argument_group("login to NATS")
    login.add_argument("--user", metavar="NAME", help="NATS user, with --password-file")
    login.add_argument("--password-file", metavar="PATH", type=existing_file, help="holds the password alone")
    login.add_argument("--creds", metavar="PATH", type=existing_file, help="a NATS credentials file")
    login.add_argument("--nkey-seed", metavar="PATH", type=existing_file, help="holds a NATS nkey seed")
    login.add_argument("--tls-ca", metavar="PATH", type=existing_file, help="CA certificate; turns TLS on")


def add_point(parser: argparse.ArgumentParser, flag: str, what: str) -> None:
    """A point of the log."""
    parser.add_argument(flag, metavar="SEQ|TIME", type=point_argument, help=what)


def with_spans_marked(arguments: Sequence[str]) -> list[str]:
    """`-10m` as `@-10m`, which argparse would take for a flag."""
    return [_NO_FLAG + argument if _SPAN.fullmatch(argument) else argument for argument in arguments]


def point_argument(text: str) -> Point | BeforeEnd:
    """See point.HOW."""
    try:
        return parse_point(text.removeprefix(_NO_FLAG))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def setting_argument(text: str) -> tuple[str, str]:
    """PATH=VALUE."""
    path, equals, value = text.partition("=")
    if not equals or "." not in path or not value:
        raise argparse.ArgumentTypeError(f"{text!r} is no setting; give tasks.TASK.FIELD=VALUE or policy.FIELD=VALUE")
    return path, value


def count_argument(text: str) -> int:
    """A number from 0 to 10000."""
    if not (text.isascii() and text.isdigit()) or int(text) > 10_000:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 0 to 10000")
    return int(text)


def seed_argument(text: str) -> int:
    """The first of some seeds. Unlike a count, it costs nothing to be large."""
    if not (text.isascii() and text.isdigit()) or len(text) > _SEED_DIGITS or int(text) > SEED_MAX:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is no seed; give a number from 0 to {SEED_MAX}")
    return int(text)


def places_argument(text: str) -> list[int]:
    """Places in a list, from 0: "0,2,5"; "" is none."""
    try:
        places = [int(place) for place in text.split(",") if place]
    except ValueError:
        places = [-1]
    if any(place < 0 for place in places):
        raise argparse.ArgumentTypeError(f"{text!r} names no places; give numbers from 0 with commas: 0,2,5")
    return places


def type_name(text: str) -> str:
    """An event type."""
    if text not in TYPE_NAMES:
        close = get_close_matches(text, TYPE_NAMES, n=1, cutoff=0.5)
        guess = f"did you mean {close[0]}?" if close else f"known: {', '.join(TYPE_NAMES)}"
        raise argparse.ArgumentTypeError(f"no event type {text!r}; {guess}")
    return text


def name_argument(text: str) -> str:
    """A node's or task's name."""
    if not NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no name; names are letters, digits, - and _, at most 63")
    return text


def nats_urls(text: str) -> list[str]:
    """Addresses with commas between."""
    try:
        return list(parse_urls(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def existing_file(text: str) -> Path:
    """A file that is there."""
    path = Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"{text!r} is not a file; create it or fix the path")
    return path
