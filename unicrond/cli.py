"""`unicrond`: run the coordinator, or a whole small cluster on this machine."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from events import command_line, extras, log_lines
from events.command_line import EXIT_CODES, Parser, add_command, examples, whole
from unicrond import VERSION

if TYPE_CHECKING:
    from unicrond.config import Config

EXAMPLES = f"""examples:
  unicrond run --config unicron.yaml          the coordinator on the head node
  unicrond run --nats nats://10.0.0.5:4222    with an existing NATS server or cluster
  unicrond archive --keep 30d                 the log's older part to files; see docs/operate/retention.md
  unicrond dev                                nats-server, coordinator and 4 agents on this machine
  unicrond demo                               the same, with two tasks, three faults and the story of their healing

{EXIT_CODES}
"""


def parser() -> Parser:
    """All commands and flags of `unicrond`."""
    root = Parser(
        prog="unicrond",
        description="The coordinator of a self-healing training cluster.",
        epilog=EXAMPLES,
        version=VERSION,
    )
    commands = root.commands()

    run = add_command(
        commands,
        "run",
        "run the coordinator in the foreground; SIGTERM leaves the embedded nats-server to the next one",
        examples("unicrond run --config /etc/unicron.yaml"),
    )
    run.add_argument(
        "--config", type=Path, metavar="FILE", help="YAML (docs/operate/configuration.md); default: defaults"
    )
    run.add_argument("--nats", metavar="URL", help="an existing NATS server instead of the embedded one")
    run.add_argument("--allow-injection", action="store_true", help="let people order faults (unicronctl inject)")
    run.add_argument(
        "--skip",
        type=whole(1),
        action="append",
        default=[],
        metavar="SEQ",
        help="pass over this entry of the log, from now on and for every reader (docs/operate/recovery.md); repeatable",
    )
    run.add_argument("--verbose", action="store_true", help="log committed steps as well")

    archive = add_command(
        commands,
        "archive",
        "copy the event log to <state_dir>/archive, from where it was left the last time; with --keep, remove what "
        "is older from NATS then, while the coordinator goes on",
        examples("unicrond archive --config /etc/unicron.yaml --keep 30d"),
    )
    archive.add_argument("--config", type=Path, metavar="FILE", help="that of the coordinator")
    archive.add_argument("--nats", metavar="URL", help="an existing NATS server instead of the embedded one")
    archive.add_argument("--keep", metavar="SPAN", type=_span, help="like 12h or 30d: what is younger stays in NATS")
    archive.add_argument("--json", action="store_true", help="JSON instead of text")

    for name, text in (
        ("dev", "a small cluster on this machine; everything it starts ends with it"),
        ("demo", "train, break, heal on this machine; exit code 0 if all healed; everything it starts ends with it"),
    ):
        example = examples(f"unicrond {name} --nodes 4 --dir /tmp/unicron-{name}")
        small = add_command(commands, name, text, example)
        small.add_argument("--nodes", type=whole(1, 64), default=4, metavar="N", help="agents to start (default 4)")
        small.add_argument("--slots", type=whole(1, 64), default=1, metavar="N", help="workers per node (default 1)")
        small.add_argument("--dir", type=Path, metavar="DIR", help="state, logs, checkpoints (default: a new one)")
        small.add_argument("--keep", action="store_true", help="keep the new directory")
        small.add_argument("--allow-injection", action="store_true", help="let people order faults (unicronctl inject)")
        port = 7470 if name == "dev" else 0
        small.add_argument(
            "--api-port", type=whole(0, 65535), default=port, metavar="PORT", help="of the HTTP API; 0: any"
        )
    # Only the demo ends.
    small.add_argument("--iterations", type=whole(1), default=0, metavar="N", help="of each task (default: fit)")
    return root


def _span(text: str) -> float:
    """A span like 12h or 30d, in seconds."""
    unit_s = {"h": 3600.0, "d": 86400.0}.get(text[-1:])
    if unit_s is None or len(text) > 7:
        raise ValueError(f"{text!r} is no span; give one like 12h or 30d")
    return whole(1)(text[:-1]) * unit_s


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; the exit code."""
    return command_line.run("unicrond", lambda: _run(parser().parse_args(argv)))


def _run(arguments: argparse.Namespace) -> int:
    if arguments.command != "archive":
        extras.require(f"unicrond {arguments.command}", "head" if arguments.command == "run" else "all")
    level = logging.DEBUG if getattr(arguments, "verbose", False) else logging.INFO
    log_lines.set_up(level, "%(asctime)s %(levelname)s %(name)s: %(message)s")
    for noisy in ("asyncio", "nats", "aiohttp"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    if arguments.command in ("run", "archive"):
        return _on_a_log(arguments)
    from unicrond import demo, dev

    return dev.main(arguments) if arguments.command == "dev" else demo.main(arguments)


def _on_a_log(arguments: argparse.Namespace) -> int:
    """`run` and `archive`, which take a configuration."""
    from msgspec.structs import replace

    from unicrond.config import Config, ConfigError, load

    try:
        config = load(arguments.config) if arguments.config else Config()
        if arguments.nats:
            config = replace(config, nats=replace(config.nats, url=arguments.nats))
        return _archive(arguments, config) if arguments.command == "archive" else _serve(arguments, config)
    except ConfigError as error:
        return command_line.fail("unicrond", error, 2)


def _archive(arguments: argparse.Namespace, config: Config) -> int:
    import asyncio
    import json

    from events.log import LogError
    from unicrond.archive_command import run

    try:
        done = asyncio.run(run(config, arguments.keep))
    except (LogError, OSError) as error:
        return command_line.fail("unicrond archive", error)
    print(json.dumps(done._asdict()) if arguments.json else done)
    return 0


def _serve(arguments: argparse.Namespace, config: Config) -> int:
    import uvloop
    from msgspec.structs import replace

    from unicrond.config import check
    from unicrond.daemon import Fatal, serve

    if arguments.allow_injection:
        config = replace(config, injection=True)
    check(config, str(arguments.config or "without --config"))
    try:
        uvloop.run(serve(config, arguments.skip))
    except Fatal as error:
        return command_line.fail("unicrond", error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
