"""`unicron-replay`: look at any moment of a log again. It only reads.

Exit codes: 0 done; 1 the log cannot be reached, is damaged or does not verify; 2 bad usage; 130 interrupted. An
error is one line on stderr that names the field and the fix.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import re
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

from events.log import LogError
from replay.commands import digest_command, events_command, export_command, state_command
from replay.opening import PROGRAM, UsageError
from replay.point import BeforeEnd, Point, parse_point
from replay.selection import TYPE_NAMES
from replay.verify_command import verify_command

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; its exit code."""
    logging.basicConfig(format=f"{PROGRAM}: %(message)s", level=logging.WARNING)
    logging.getLogger("events").setLevel(logging.CRITICAL)  # what it retries is no news; what fails is raised
    options = _parser().parse_args(_with_spans_glued(sys.argv[1:] if arguments is None else arguments))
    try:
        code = asyncio.run(options.run(options))
        sys.stdout.flush()
        return code or 0
    except UsageError as error:
        return _fail(2, f"{error}")
    except LogError as error:
        return _fail(1, f"{error}")
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains at exit
    except OSError as error:
        return _fail(1, f"{error.filename or 'input/output'}: {error.strerror or error}")
    except KeyboardInterrupt:
        return 130
    return 0


# --- the command line ------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    """argparse with errors of one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{PROGRAM}: {message.removeprefix('argument ')}; see {self.prog} --help\n")


_EXAMPLES = {
    "": """\
examples:
  unicron-replay state --file incident.log --at 1234
  unicron-replay digest --nats nats://127.0.0.1:4222
  unicron-replay export incident.log --state-dir unicron-state
  unicron-replay events --file incident.log --node n1 --after -10m

--at, --after and --until take a sequence number (1234), a time with its zone (2026-11-20T09:30:00Z), or a span
before the log's newest entry (-10m; units ms, s, m, h, d).""",
    "state": """\
examples:
  unicron-replay state --nats nats://127.0.0.1:4222
  unicron-replay state --file incident.log --at 1234
  unicron-replay state --file incident.log --at -10m --json | jq .state.plan""",
    "digest": """\
examples:
  unicron-replay digest --nats nats://127.0.0.1:4222
  unicron-replay digest --file incident.log --at 1234 --json

Two logs that agree up to an entry have the same digest there; so have the daemon and its log.""",
    "export": """\
examples:
  unicron-replay export incident.log --nats nats://127.0.0.1:4222
  unicron-replay export first-hour.log --state-dir unicron-state --at 2026-11-20T10:00:00Z

The file holds the tasks' arguments and environment: read it before you pass it on.""",
    "events": """\
examples:
  unicron-replay events --file incident.log --type NodeLost --type PlanAdopted
  unicron-replay events --nats nats://127.0.0.1:4222 --task big --after -10m
  unicron-replay events --file incident.log --after 100 --until 200 --json

--node and --task take every event that names the node or task, also inside a plan or a membership.""",
    "verify": """\
examples:
  unicron-replay verify --state-dir unicron-state
  unicron-replay verify --file incident.log --json

Exit code 1 at the first decision that this version, with the recorded inputs, would make otherwise. Node losses
are derived again from the heartbeats while they are kept (10 minutes, and in an export for ever).""",
}


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog=PROGRAM,
        description="Replay an event log to any point. Only reads: never writes to a log.",
        epilog=_EXAMPLES[""],
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    state = _command(commands, "state", state_command, "the cluster's state, as the coordinator believed it")
    _add_point(state, "--at", "the point to stop at (default: the end)")

    digest = _command(commands, "digest", digest_command, "the digest of the state, to compare with the daemon's")
    _add_point(digest, "--at", "the point to stop at (default: the end)")

    export = _command(commands, "export", export_command, "the log as one file, for --file")
    export.add_argument("path", metavar="FILE", type=Path, help="the file to write; appears whole or not at all")
    export.add_argument("--force", action="store_true", help="replace FILE if it exists")
    _add_point(export, "--at", "the point to stop at (default: the end)")

    events = _command(commands, "events", events_command, "the events, one line each")
    _add_point(events, "--after", "leave out everything up to and with this point")
    _add_point(events, "--until", "leave out everything after this point")
    events.add_argument("--type", metavar="TYPE", type=_type_name, action="append", default=[], help="can be repeated")
    events.add_argument("--node", metavar="NODE", type=_name, help="events that name this node")
    events.add_argument("--task", metavar="TASK", type=_name, help="events that name this task")

    _command(commands, "verify", verify_command, "make every decision again from its recorded inputs, and compare")
    return parser


def _command(commands: Any, name: str, run: Any, what: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=what,
        description=what[0].upper() + what[1:] + ".",
        epilog=_EXAMPLES[name],
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    source = parser.add_argument_group("the log (one of the three)")
    one = source.add_mutually_exclusive_group(required=True)
    one.add_argument("--file", metavar="PATH", type=Path, help="an exported log, or a directory of segments")
    one.add_argument("--nats", metavar="URL", type=_nats_urls, help="a NATS server; of a cluster several, with commas")
    one.add_argument("--state-dir", metavar="DIR", type=Path, help="a coordinator's, whose embedded NATS server runs")
    login = parser.add_argument_group("login to NATS")
    login.add_argument("--user", metavar="NAME")
    login.add_argument("--password-file", metavar="PATH", type=_existing_file, help="holds the password alone")
    login.add_argument("--creds", metavar="PATH", type=_existing_file, help="a NATS credentials file")
    login.add_argument("--nkey-seed", metavar="PATH", type=_existing_file)
    login.add_argument("--tls-ca", metavar="PATH", type=_existing_file, help="CA certificate; turns TLS on")
    return parser


def _add_point(parser: argparse.ArgumentParser, flag: str, what: str) -> None:
    parser.add_argument(flag, metavar="SEQ|TIME", type=_point_argument, help=what)


def _with_spans_glued(arguments: Sequence[str]) -> list[str]:
    """`--at -10m` as `--at=-10m`, which argparse would take for a flag named -10m."""
    glued: list[str] = []
    for argument in arguments:
        if glued and glued[-1] in ("--at", "--after", "--until") and re.match(r"-[0-9]", argument):
            glued[-1] += f"={argument}"
        else:
            glued.append(argument)
    return glued


def _point_argument(text: str) -> Point | BeforeEnd:
    try:
        return parse_point(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _type_name(text: str) -> str:
    if text not in TYPE_NAMES:
        close = get_close_matches(text, TYPE_NAMES, n=1, cutoff=0.5)
        guess = f"did you mean {close[0]}?" if close else f"known: {', '.join(TYPE_NAMES)}"
        raise argparse.ArgumentTypeError(f"no event type {text!r}; {guess}")
    return text


def _name(text: str) -> str:
    if not NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no name; names are letters, digits, - and _, at most 63")
    return text


def _nats_urls(text: str) -> list[str]:
    urls = text.split(",")
    for url in urls:
        parts = urlsplit(url)
        if parts.scheme not in ("nats", "tls") or not parts.hostname:
            raise argparse.ArgumentTypeError(f"{url!r} is no address of a NATS server; give nats://HOST:PORT")
        try:
            parts.port  # noqa: B018 - raises where it is no port
        except ValueError:
            raise argparse.ArgumentTypeError(f"{url!r} has a bad port; give nats://HOST:PORT") from None
    return urls


def _existing_file(text: str) -> Path:
    path = Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"{text!r} is not a file; create it or fix the path")
    return path


def _fail(code: int, message: str) -> int:
    print(f"{PROGRAM}: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
