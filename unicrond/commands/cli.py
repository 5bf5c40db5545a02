"""`unicrond`: run the coordinator, or a whole small cluster on this machine."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from unicrond import VERSION
from unicrond.events.cli import command_line
from unicrond.events.cli import environment_flags as variables
from unicrond.events.cli.command_line import (
    Commands,
    Parser,
    SettableParser,
    add_command,
    examples,
    existing_file,
    name,
    node_name,
    number,
    option,
    repeated,
    switch,
    whole,
)
from unicrond.events.cli.exit_codes import exit_codes
from unicrond.events.cli.shared_flags import shared
from unicrond.events.host import daemon_log as log_lines
from unicrond.events.host import init_process as pid_one
from unicrond.events.host import optional_dependencies as extras

if TYPE_CHECKING:
    from unicrond.intake.config import Config

EXAMPLES = f"""examples:
  unicrond run --config unicron.yaml          the coordinator on the head node
  unicrond check-config --config unicron.yaml is it sound, and where does each setting come from?
  unicrond run --nats nats://10.0.0.5:4222    with an existing NATS server or cluster
  unicrond enroll gpu07                       the key with which a node's agent logs in
  unicrond tls-init                           a CA and the head's certificate
  unicrond archive --keep 30d                 the log's older part to files; see docs/operate/retention.md
  unicrond backup /backup/unicron-1           log, keys and configuration of the head
  unicrond restore                            the log that NATS has lost, from the archive
  unicrond dev                                nats-server, coordinator and 4 agents on this machine
  unicrond demo                               the same, with two tasks, three faults and the story of their healing

{exit_codes()}
"""


def parser() -> Parser:
    """Build the parser with all commands and flags of `unicrond`."""
    root = SettableParser(
        prog="unicrond",
        description="The coordinator of a self-healing training cluster.",
        epilog=EXAMPLES,
        version=VERSION,
    )
    commands = root.commands()

    _add_run(commands)
    _add_check_config(commands)
    _add_backup_commands(commands)
    _add_login_commands(commands)
    _add_tls_command(commands)
    iterations = shared("--iterations", "(default: as many as fit)", default=0)
    picture = shared("--out", "the picture of the losses, SVG (default: a new file, which stays)")
    for command, text, port, more, failed in (
        ("dev", "run a small cluster on this machine; everything it starts ends with it", 7470, (), ""),
        ("demo", "train, break and heal here; only a picture stays", 0, (iterations, picture), "not everything healed"),
    ):
        add_command(
            commands,
            command,
            text,
            examples(f"unicrond {command} --nodes 4 --dir /tmp/unicron-{command}"),
            shared("--nodes", "(default: 4)", default=4),
            shared("--slots", "(default: 1)", type=whole(1, 64), default=1),
            shared("--dir", "(default: a new directory)"),
            shared("--keep-dir"),
            shared("--allow-injection"),
            *(shared("--port", "the HTTP API's", default=port), *more),
            codes=exit_codes(failed=failed),
        ).variables = False  # a cluster of its own, beside the one that the variables are for
    return root


def _add_check_config(commands: Commands) -> None:
    add_command(
        commands,
        "check-config",
        "check the configuration, with the variables that are set here, and show where each setting comes from",
        examples(
            "unicrond check-config --config /etc/unicron.yaml",
            "unicrond check-config --config /etc/unicron.yaml --defaults --json",
        ),
        shared("--config", "(none: variables alone)"),
        switch("--defaults", "show settings that have their default, too"),
        shared("--json"),
    )


def _add_backup_commands(commands: Commands) -> None:
    """Add the commands that write the log, and all else that a head needs, as files."""
    configured = shared("--config")
    nats = shared("--nats", "instead of the embedded one")
    json = shared("--json")
    add_command(
        commands,
        "archive",
        "copy the event log to <state_dir>/archive, from where the last archive ends; with --keep, then remove older "
        "entries from NATS, while the coordinator runs",
        examples("unicrond archive --config /etc/unicron.yaml --keep 30d"),
        configured,
        nats,
        option("--keep", "SPAN", "leave younger entries in NATS; a span like 12h or 30d", type=_span),
        json,
    )
    add_command(
        commands,
        "backup",
        "copy the log, the keys and the configuration of a running head (docs/operate/retention.md)",
        examples("unicrond backup /backup/unicron-1 --config /etc/unicron.yaml"),
        option("directory", "DIR", "the directory to write", type=Path),
        configured,
        nats,
        json,
    )
    add_command(
        commands,
        "restore",
        "make the event log, which NATS has lost, again from the archive, beside the head; or a head from a backup "
        "(docs/operate/recovery.md)",
        examples(
            "unicrond restore --config /etc/unicron.yaml",
            "unicrond restore /backup/unicron-1 --config /etc/unicron.yaml",
        ),
        option(
            "directory",
            "DIR",
            "a backup, or an archive from elsewhere (default: the archive of the configuration)",
            type=Path,
            nargs="?",
        ),
        shared("--check", "the archive, and that NATS has no log"),
        configured,
        nats,
        json,
        codes=exit_codes(failed="nothing was restored"),
    )


def _add_run(commands: Commands) -> None:
    add_command(
        commands,
        "run",
        "run the coordinator in the foreground; SIGTERM leaves the embedded nats-server running for the next one",
        examples("unicrond run --config /etc/unicron.yaml", "unicrond run --config /etc/unicron.yaml --standby"),
        shared("--config", "YAML (docs/operate/configuration.md)"),
        shared("--nats", "instead of the embedded one"),
        shared("--allow-injection"),
        switch(
            "--standby",
            "stand by while another head of the same log leads, and take over when it ends (docs/operate/heads.md); "
            "needs nats.url or --nats",
        ),
        shared(
            "--new-log", "or make a new one, though this head knows another or a longer one (docs/operate/recovery.md)"
        ),
        repeated(
            "--skip",
            "SEQ",
            "skip this entry of the log, from now on and for every reader (docs/operate/recovery.md)",
            type=whole(1),
        ),
        repeated(
            "--tls-init",
            "HOST",
            "first make a CA and a certificate for HOST and the names of this machine (unicrond tls-init), where "
            "STATE_DIR/tls has none; for a container",
            type=_host,
        ),
        switch("--verbose", "log committed steps too"),
    )


def _add_renew_key(commands: Commands) -> None:
    add_command(
        commands,
        "renew-key",
        "change the key of a login of this machine; the running head lets both in for a minute",
        examples("unicrond renew-key coordinator --config /etc/unicron.yaml"),
        option("login", "LOGIN", "coordinator, api, reader, operator, or with NATS servers of your own agent-NODE too"),
        shared("--config"),
    )


def _add_login_commands(commands: Commands) -> None:
    """Add the commands for keys of logins, and for who may log in."""
    configured = shared("--config")
    node = option("node", "NODE", "its name, as in unicron-agent --node", type=node_name)
    add_command(
        commands,
        "enroll",
        "make the key with which a node's agent logs in to NATS (docs/operate/logins.md)",
        examples("unicrond enroll gpu07 --config /etc/unicron.yaml"),
        node,
        configured,
        shared("--out", "(default: NODE.key)"),
        option(
            "--unused-h",
            "HOURS",
            "end the key where it is not used for so long; 0: never (24)",
            type=number(0, 8784, "h"),
            default=24.0,
        ),
        option(
            "--previous-h",
            "HOURS",
            "let the keys that the node has hold for so long beside the new one; 0: they end at once (24)",
            type=number(0, 8784, "h"),
            default=24.0,
        ),
    )
    _add_renew_key(commands)
    add_command(
        commands,
        "revoke",
        "end a node's login to NATS at once",
        examples("unicrond revoke gpu07 --config /etc/unicron.yaml"),
        node,
        configured,
        shared("--reason", "(default: requested by an operator)", default="requested by an operator"),
    )
    add_command(
        commands,
        "nats-config",
        "print who may log in to NATS servers of your own, and make the keys that are missing",
        examples("unicrond nats-config --nodes-file nodes.txt --keys /etc/unicron/keys"),
        option(
            "--nodes-file", "FILE", "read the names of the nodes here, a line each", type=existing_file, required=True
        ),
        option("--keys", "DIR", "look for the keys here, and make them here (keys)", type=Path, default=Path("keys")),
        switch("--nsc", "print the commands of nsc that make the users, for operator mode"),
    )
    add_command(
        commands,
        "token",
        "make a token of the HTTP API (docs/operate/logins.md)",
        examples("unicrond token ci --scopes read,submit --config /etc/unicron.yaml"),
        option("name", "NAME", "whose it is; it stands in each request's event", type=name),
        option("--scopes", "A,B,...", "allow read, read-own, submit, operate, metrics", type=_scopes, required=True),
        option("--owner", "NAME", "have its tasks be this owner's (its own name)", type=name),
        option("--users", "A,B,...", "let its tasks run as these users, the first by default", type=_users),
        configured,
        shared("--out", "(default: NAME.token)"),
    )


def _add_tls_command(commands: Commands) -> None:
    add_command(
        commands,
        "tls-init",
        "make a CA and the head's certificate in <state_dir>/tls (docs/operate/security.md)",
        examples(
            "unicrond tls-init --config /etc/unicron.yaml",
            "unicrond tls-init --renew --host head.example.org",
            "unicrond tls-init --roll trust",
        ),
        shared("--config"),
        option(
            "--days",
            "DAYS",
            "have the certificate end after so many days (397)",
            type=number(0.0001, 3650, "days"),
            default=397.0,
        ),
        repeated("--host", "HOST", "add a name or address of the head to those that it has", type=_host),
        switch("--renew", "make a new certificate of the same CA, with the names of the old one"),
        switch("--if-missing", "change nothing where the certificate is there; for an init container"),
        option(
            "--roll",
            "PHASE",
            "replace the CA, in three phases: trust, certificate, finish; status says which comes next",
            choices=("trust", "certificate", "finish", "status"),
        ),
        switch("--unheard", "with --roll: go on though nodes were not heard with the new CA; they are cut off"),
    )


def _host(text: str) -> str:
    from unicrond.commands.tls import host_name

    return host_name(text)


def _scopes(text: str) -> frozenset[str]:
    from unicrond.intake.tokens import scopes_of

    return scopes_of(text)


def _users(text: str) -> tuple[str, ...]:
    from unicrond.intake.tokens import users_of

    return users_of(text)


def _span(text: str) -> float:
    """Parse a span like 12h or 30d into seconds."""
    unit_s = {"h": 3600.0, "d": 86400.0}.get(text[-1:])
    if unit_s is None or len(text) > 7:
        raise ValueError(f"{text!r} is not a span; give one like 12h or 30d")
    return whole(1)(text[:-1]) * unit_s


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; return its exit code."""
    return command_line.run("unicrond", lambda: _run(parser().parse_args(argv)))


def _run(arguments: argparse.Namespace) -> int:
    if arguments.command == "run":
        pid_one.step_aside()
    if arguments.command in ("run", "dev", "demo"):
        extras.require(f"unicrond {arguments.command}", "head" if arguments.command == "run" else "all")
    level = logging.DEBUG if getattr(arguments, "verbose", False) else logging.INFO
    log_lines.set_up(level, "%(asctime)s %(levelname)s %(name)s: %(message)s")
    for noisy in ("asyncio", "nats", "aiohttp"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    if arguments.command == "nats-config":
        from unicrond.commands.logins import nats_config

        return nats_config(arguments)
    if arguments.command not in ("dev", "demo"):
        return _on_a_log(arguments)
    print(f"unicrond {arguments.command}: nats-server, coordinator and {arguments.nodes} agents start", flush=True)
    from unicrond.local import demo, dev

    return dev.main(arguments) if arguments.command == "dev" else demo.main(arguments)


def _on_a_log(arguments: argparse.Namespace) -> int:
    """Run a command that takes a configuration."""
    from msgspec.structs import replace

    from unicrond.intake import settings
    from unicrond.intake.config import Config, ConfigError, load
    from unicrond.intake.tls import BadTls

    try:
        variable_names = variables.program_variables(parser()) | {
            settings.variable(place) for place, _ in settings.settings(Config)
        }
        variables.check("unicrond", variable_names, os.environ)
        config = load(arguments.config, os.environ)
        if getattr(arguments, "nats", None):
            config = replace(config, nats=replace(config.nats, url=",".join(arguments.nats)))
        if arguments.command == "tls-init":
            from unicrond.commands.tls import tls_init

            return tls_init(arguments, config)
        if arguments.command == "check-config":
            from unicrond.commands.config import check_config

            return check_config(arguments, config)
        if arguments.command in ("enroll", "revoke", "renew-key", "token"):
            from unicrond.commands import logins as logins_command

            command: Callable[[argparse.Namespace, Config], int] = getattr(
                logins_command, arguments.command.replace("-", "_")
            )
            return command(arguments, config)
        if arguments.command in ("archive", "backup", "restore"):
            return _copy(arguments, config)
        return _serve(arguments, config)
    except (ConfigError, BadTls, variables.BadVariable) as error:
        return command_line.fail("unicrond", error, 2)


def _copy(arguments: argparse.Namespace, config: Config) -> int:
    """Run archive, backup or restore."""
    import asyncio
    import json

    from unicrond.events.log.event_log import LogError
    from unicrond.service.event_log import archive_command, backup, restore_command

    report: archive_command.ArchiveReport | backup.Backup | restore_command.RestoredLog
    try:
        if arguments.command == "archive":
            report = asyncio.run(archive_command.run(config, arguments.keep))
        elif arguments.command == "backup":
            report = backup.back_up(config, arguments.config, arguments.directory)
        elif arguments.directory is None or not (arguments.directory / backup.MANIFEST).exists():
            tell = _bar if sys.stderr.isatty() and not arguments.json else lambda *_: None
            source, is_dry = arguments.directory, arguments.check
            report = asyncio.run(restore_command.run(config, source, is_dry=is_dry, progress=tell))
        else:
            report = backup.restore(config, arguments.directory)
    except (LogError, OSError) as error:
        return command_line.fail(f"unicrond {arguments.command}", error)
    print(json.dumps(report._asdict()) if arguments.json else report)
    return 0


def _bar(text: str, count: int, whole_count: int) -> None:
    """Draw how far a restore is, on standard error."""
    share = count / max(1, whole_count)
    end = "\n" if count >= whole_count else ""
    print(
        f"\r{text:15} [{'#' * int(30 * share):30}] {count:,} of {whole_count:,}", end=end, file=sys.stderr, flush=True
    )


def _serve(arguments: argparse.Namespace, config: Config) -> int:
    import uvloop
    from msgspec.structs import replace

    from unicrond.intake.config import check, check_certificates
    from unicrond.service.head.daemon import Fatal, serve

    if arguments.allow_injection:
        config = replace(config, injection=True)
    where = str(arguments.config or "without --config")
    check(config, where)
    if arguments.tls_init and not config.certificates.cert.exists():
        from unicrond.commands.tls import complete

        if code := complete(config, arguments.tls_init):
            return code
    check_certificates(config, where)
    if arguments.standby and not config.nats.url:
        raise command_line.UsageError(
            "--standby: a head can only stand by on the log of another one; set nats.url to where that is"
        )
    try:
        uvloop.run(serve(config, arguments.skip, stands_by=arguments.standby, new_log=arguments.new_log))
    except Fatal as error:
        return command_line.fail("unicrond", error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
