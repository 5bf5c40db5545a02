"""`unicrond`: run the coordinator, or a whole small cluster on this machine."""

from __future__ import annotations

import argparse
import logging
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from events import command_line, extras, log_lines
from events.command_line import (
    EXIT_CODES,
    Commands,
    Parser,
    add_command,
    examples,
    existing_file,
    number,
    option,
    repeated,
    switch,
    whole,
)
from events.vocabulary import NAME_PATTERN
from unicrond import VERSION

if TYPE_CHECKING:
    from unicrond.intake.config import Config

EXAMPLES = f"""examples:
  unicrond run --config unicron.yaml          the coordinator on the head node
  unicrond run --nats nats://10.0.0.5:4222    with an existing NATS server or cluster
  unicrond enroll gpu07                       the key with which a node's agent logs in
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

    nats = option("--nats", "URL", "an existing NATS server instead of the embedded one")
    injection = switch("--allow-injection", "allow ordered faults (unicronctl inject)")
    add_command(
        commands,
        "run",
        "run the coordinator in the foreground; SIGTERM leaves the embedded nats-server running for the next one",
        examples("unicrond run --config /etc/unicron.yaml"),
        option("--config", "FILE", "YAML (docs/operate/configuration.md); default: defaults", type=Path),
        nats,
        injection,
        repeated(
            "--skip",
            "SEQ",
            "skip this entry of the log, from now on and for every reader (docs/operate/recovery.md)",
            type=whole(1),
        ),
        switch("--verbose", "log committed steps too"),
    )
    add_command(
        commands,
        "archive",
        "copy the event log to <state_dir>/archive, from where the last archive ends; with --keep, then remove older "
        "entries from NATS, while the coordinator runs",
        examples("unicrond archive --config /etc/unicron.yaml --keep 30d"),
        option("--config", "FILE", "the coordinator's configuration", type=Path),
        nats,
        option("--keep", "SPAN", "a span like 12h or 30d: younger entries stay in NATS", type=_span),
        switch("--json", "JSON instead of text"),
    )
    _add_login_commands(commands)
    iterations = option("--iterations", "N", "of each task (default: fit)", type=whole(1), default=0)
    for name, text, port, more in (
        ("dev", "a small cluster on this machine; everything it starts ends with it", 7470, ()),
        ("demo", "train, break and heal on this machine; exit code 0 if all healed; nothing stays", 0, (iterations,)),
    ):
        add_command(
            commands,
            name,
            text,
            examples(f"unicrond {name} --nodes 4 --dir /tmp/unicron-{name}"),
            option("--nodes", "N", "agents to start (default 4)", type=whole(1, 64), default=4),
            option("--slots", "N", "workers per node (default 1)", type=whole(1, 64), default=1),
            option("--dir", "DIR", "state, logs, checkpoints (default: a new one)", type=Path),
            switch("--keep", "keep the new directory"),
            injection,
            option("--api-port", "PORT", "of the HTTP API; 0: any", type=whole(0, 65535), default=port),
            *more,
        )
    return root


def _add_login_commands(commands: Commands) -> None:
    """Keys for logins, and who may log in."""
    configured = option("--config", "FILE", "the coordinator's configuration", type=Path)
    node = option("node", "NODE", "the node's name, as in unicron-agent --node")
    add_command(
        commands,
        "enroll",
        "make the key with which a node's agent logs in to NATS (docs/operate/logins.md)",
        examples("unicrond enroll gpu07 --config /etc/unicron.yaml"),
        node,
        configured,
        option("--out", "FILE", "where to write the key (NODE.key)", type=Path),
        option("--unused-h", "HOURS", "an unused key ends; 0: never (24)", type=number(0, 8784, "h"), default=24.0),
    )
    add_command(
        commands,
        "revoke",
        "end a node's login to NATS at once",
        examples("unicrond revoke gpu07 --config /etc/unicron.yaml"),
        node,
        configured,
        option("--reason", "TEXT", "why, for the log", default="requested by an operator"),
    )
    add_command(
        commands,
        "nats-config",
        "print who may log in to NATS servers of your own, and make the keys that are missing",
        examples("unicrond nats-config --nodes nodes.txt --keys /etc/unicron/keys"),
        option("--nodes", "FILE", "the names of the nodes, a line each", type=existing_file, required=True),
        option("--keys", "DIR", "where the keys are, and are made (keys)", type=Path, default=Path("keys")),
        switch("--nsc", "for operator mode: commands of nsc that make the users"),
    )
    add_command(
        commands,
        "token",
        "make a token of the HTTP API (docs/operate/logins.md)",
        examples("unicrond token ci --scopes read,submit --config /etc/unicron.yaml"),
        option("name", "NAME", "whose it is; it stands in each request's event", type=_name),
        option("--scopes", "A,B,...", "of read, submit, operate, metrics", type=_scopes, required=True),
        configured,
        option("--out", "FILE", "where to write the token (NAME.token)", type=Path),
    )


def _name(text: str) -> str:
    if not re.fullmatch(NAME_PATTERN, text):
        raise ValueError(f"{text!r} is not a valid name; names are letters, digits, - and _, at most 63")
    return text


def _scopes(text: str) -> frozenset[str]:
    from unicrond.intake.tokens import scopes_of

    return scopes_of(text)


def _span(text: str) -> float:
    """A span like 12h or 30d, in seconds."""
    unit_s = {"h": 3600.0, "d": 86400.0}.get(text[-1:])
    if unit_s is None or len(text) > 7:
        raise ValueError(f"{text!r} is not a span; give one like 12h or 30d")
    return whole(1)(text[:-1]) * unit_s


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; the exit code."""
    return command_line.run("unicrond", lambda: _run(parser().parse_args(argv)))


def _run(arguments: argparse.Namespace) -> int:
    if arguments.command in ("run", "dev", "demo"):
        extras.require(f"unicrond {arguments.command}", "head" if arguments.command == "run" else "all")
    level = logging.DEBUG if getattr(arguments, "verbose", False) else logging.INFO
    log_lines.set_up(level, "%(asctime)s %(levelname)s %(name)s: %(message)s")
    for noisy in ("asyncio", "nats", "aiohttp"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    if arguments.command == "nats-config":
        from unicrond.logins_command import nats_config

        return nats_config(arguments)
    if arguments.command in ("run", "archive", "enroll", "revoke", "token"):
        return _on_a_log(arguments)
    from unicrond.local import demo, dev

    return dev.main(arguments) if arguments.command == "dev" else demo.main(arguments)


def _on_a_log(arguments: argparse.Namespace) -> int:
    """The commands that take a configuration."""
    from msgspec.structs import replace

    from unicrond.intake.config import Config, ConfigError, load

    try:
        config = load(arguments.config) if arguments.config else Config()
        if getattr(arguments, "nats", None):
            config = replace(config, nats=replace(config.nats, url=arguments.nats))
        if arguments.command in ("enroll", "revoke", "token"):
            from unicrond import logins_command

            command: Callable[[argparse.Namespace, Config], int] = getattr(logins_command, arguments.command)
            return command(arguments, config)
        return _archive(arguments, config) if arguments.command == "archive" else _serve(arguments, config)
    except ConfigError as error:
        return command_line.fail("unicrond", error, 2)


def _archive(arguments: argparse.Namespace, config: Config) -> int:
    import asyncio
    import json

    from events.log import LogError
    from unicrond.service.archive_command import run

    try:
        done = asyncio.run(run(config, arguments.keep))
    except (LogError, OSError) as error:
        return command_line.fail("unicrond archive", error)
    print(json.dumps(done._asdict()) if arguments.json else done)
    return 0


def _serve(arguments: argparse.Namespace, config: Config) -> int:
    import uvloop
    from msgspec.structs import replace

    from unicrond.intake.config import check
    from unicrond.service.daemon import Fatal, serve

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
