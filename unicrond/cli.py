"""`unicrond`: run the coordinator, or a whole small cluster on this machine."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from events import extras, log_lines
from unicrond import VERSION

EXAMPLES = """examples:
  unicrond run --config unicron.yaml          the coordinator on the head node
  unicrond run --nats nats://10.0.0.5:4222    with an existing NATS server or cluster
  unicrond archive --keep 30d                 the log's older part to files; see docs/operate/retention.md
  unicrond dev                                nats-server, coordinator and 4 agents on this machine
  unicrond demo                               the same, with two tasks, three faults and the story of their healing
"""


class Parser(argparse.ArgumentParser):
    """Bad usage is one line and exit code 2."""

    def error(self, message: str) -> NoReturn:
        """argparse calls this for everything it does not accept."""
        print(f"{self.prog}: {message}; see {self.prog} --help", file=sys.stderr)
        raise SystemExit(2)


def _parser() -> Parser:
    parser = Parser(
        prog="unicrond",
        description="The coordinator of a self-healing training cluster.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=VERSION)
    commands = parser.add_subparsers(dest="command", required=True, metavar="run|archive|dev|demo", parser_class=Parser)

    run = commands.add_parser(
        "run",
        help="run the coordinator in the foreground",
        description="Run the coordinator in the foreground. SIGTERM leaves the embedded nats-server to the next one.",
        epilog="example:\n  unicrond run --config /etc/unicron.yaml\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    run.add_argument(
        "--config", type=Path, metavar="FILE", help="YAML (docs/operate/configuration.md); default: defaults"
    )
    run.add_argument("--nats", metavar="URL", help="an existing NATS server instead of the embedded one")
    run.add_argument("--allow-injection", action="store_true", help="let people order faults (unicronctl inject)")
    run.add_argument(
        "--skip",
        type=_seq,
        action="append",
        default=[],
        metavar="SEQ",
        help="pass over this entry of the log, from now on and for every reader (docs/operate/recovery.md); repeatable",
    )
    run.add_argument("--verbose", action="store_true", help="log committed steps as well")

    archive = commands.add_parser(
        "archive",
        help="copy the log's older part to files",
        description="Copy the event log to <state_dir>/archive, from where it was left the last time; with --keep, "
        "remove what is older from NATS then. The coordinator goes on meanwhile.",
        epilog="example:\n  unicrond archive --config /etc/unicron.yaml --keep 30d\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    archive.add_argument("--config", type=Path, metavar="FILE", help="that of the coordinator")
    archive.add_argument("--nats", metavar="URL", help="an existing NATS server instead of the embedded one")
    archive.add_argument("--keep", metavar="SPAN", help="like 12h or 30d: what is younger stays in NATS")

    for name, text in (
        ("dev", "a small cluster on this machine"),
        ("demo", "train, break, heal; exit 0 if all healed"),
    ):
        small = commands.add_parser(
            name,
            help=text,
            description=f"{text[0].upper()}{text[1:]}. Everything it starts ends with it.",
            epilog=f"example:\n  unicrond {name} --nodes 4 --dir /tmp/unicron-{name}\n",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        small.add_argument("--nodes", type=_count, default=4, metavar="N", help="agents to start (default 4)")
        small.add_argument("--slots", type=_count, default=1, metavar="N", help="workers per node (default 1)")
        small.add_argument("--dir", type=Path, metavar="DIR", help="state, logs, checkpoints (default: a new one)")
        small.add_argument("--keep", action="store_true", help="keep the new directory")
        small.add_argument("--allow-injection", action="store_true", help="let people order faults (unicronctl inject)")
        port = 7470 if name == "dev" else 0
        small.add_argument("--api-port", type=_port, default=port, metavar="PORT", help="of the HTTP API; 0: any")
        if name == "demo":
            small.add_argument("--iterations", type=_count, default=0, metavar="N", help="of each task (default: fit)")
    return parser


def _count(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= 64:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 to 64")
    return int(text)


def _seq(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= 15 and int(text) >= 1):
        raise argparse.ArgumentTypeError(f"{text!r} is no entry of a log; give its sequence number")
    return int(text)


def _port(text: str) -> int:
    if not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port; give 0 (any) to 65535")
    return int(text)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. Exit codes: 0 ended as asked, 1 could not go on, 2 bad usage or configuration."""
    arguments = _parser().parse_args(argv)
    if arguments.command != "archive":
        extras.require(f"unicrond {arguments.command}", "head" if arguments.command == "run" else "all")
    level = logging.DEBUG if getattr(arguments, "verbose", False) else logging.INFO
    log_lines.set_up(level, "%(asctime)s %(levelname)s %(name)s: %(message)s")
    for noisy in ("asyncio", "nats", "aiohttp"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    if arguments.command == "run":
        return _run(arguments)
    if arguments.command == "archive":
        return _archive(arguments)
    from unicrond import demo, dev

    return dev.main(arguments) if arguments.command == "dev" else demo.main(arguments)


def _archive(arguments: argparse.Namespace) -> int:
    import asyncio

    from msgspec.structs import replace

    from events.log import LogError
    from unicrond.archive_command import keep_argument, run
    from unicrond.config import Config, ConfigError, load

    try:
        config = load(arguments.config) if arguments.config else Config()
        if arguments.nats:
            config = replace(config, nats=replace(config.nats, url=arguments.nats))
        keep_s = keep_argument(arguments.keep) if arguments.keep else None
    except ConfigError as error:
        print(f"unicrond: {error}", file=sys.stderr)
        return 2
    except argparse.ArgumentTypeError as error:
        print(f"unicrond archive: --keep: {error}", file=sys.stderr)
        return 2
    try:
        print(asyncio.run(run(config, keep_s)))
    except (LogError, OSError) as error:
        print(f"unicrond archive: {error}", file=sys.stderr)
        return 1
    return 0


def _run(arguments: argparse.Namespace) -> int:
    import uvloop
    from msgspec.structs import replace

    from unicrond.config import Config, ConfigError, check, load
    from unicrond.daemon import Fatal, serve

    try:
        config = load(arguments.config) if arguments.config else Config()
        if arguments.nats:
            config = replace(config, nats=replace(config.nats, url=arguments.nats))
        if arguments.allow_injection:
            config = replace(config, injection=True)
        check(config, str(arguments.config or "without --config"))
    except ConfigError as error:
        print(f"unicrond: {error}", file=sys.stderr)
        return 2
    try:
        uvloop.run(serve(config, arguments.skip))
    except Fatal as error:
        print(f"unicrond: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
