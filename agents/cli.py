"""unicron-agent: the command line of the node agent."""

from __future__ import annotations

import ipaddress
import logging
import re
import sys
from argparse import SUPPRESS
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from agents.accelerators.driver import Choice, NoDriver
from agents.daemon import Options, installed_version, run_agent
from agents.run_dir import BadRunDir, RunDir, default_run_dir
from events import command_line, extras, log_lines
from events.codec import RESERVED_NAMES
from events.command_line import EXIT_CODES, Parser, UsageError, add, add_login, login_of, number, option, whole
from events.keys import read_key
from events.logins import agent_login
from events.nats_url import parse_urls
from events.vocabulary import NAME_PATTERN

_EXAMPLE = f"""example:
  unicron-agent --nats nats://head:4222 --key /etc/unicron.key \\
      --node gpu07 --slots 8 --address 10.0.0.7

SIGTERM ends the agent alone: workers go on and are adopted by the next agent of the same run directory (under
systemd, set KillMode=process). SIGINT ends the workers too, and the node leaves the cluster.

{EXIT_CODES}, 4 a newer agent of this name works"""


def parser() -> Parser:
    """All flags of `unicron-agent`."""
    found = Parser(
        prog="unicron-agent",
        description="The agent of one node: starts, watches and adopts the training processes of a unicron cluster.",
        epilog=_EXAMPLE,
        version=installed_version(),
    )
    add(
        found,
        option("--nats", "URL[,URL]", "NATS server or cluster", type=parse_urls, required=True),
        option("--node", "NAME", "this node's name, unique in the cluster", type=_node, required=True),
        option("--slots", "N", "workers at a time, one per GPU", type=whole(1, 1024), required=True),
        option("--address", "IP", "where other nodes reach this one (%(default)s)", type=_address, default="127.0.0.1"),
        option("--run-dir", "DIR", "sockets, logs, memory ($XDG_RUNTIME_DIR/unicron/NAME)", type=Path),
        option(
            "--heartbeat-s", "S", "time between heartbeats (%(default)s)", type=number(0.05, 60, "seconds"), default=1.0
        ),
        option(
            "--lease-s",
            "S",
            "workers end themselves after this long without an agent (%(default)s)",
            type=number(1, 3600, "seconds"),
            default=60.0,
        ),
        option(
            "--memory-gib",
            "GIB",
            "memory for training states, kept and copied between nodes; 0: none (a quarter of the host's)",
            type=_gib,
        ),
        option(
            "--logs-dir",
            "DIR",
            "directory of workers' logs; on a disk, they survive a reboot (RUN_DIR/logs)",
            type=Path,
        ),
        option("--logs-days", "DAYS", "how long to keep logs of workers that have ended (14)", type=_days),
        option(
            "--logs-gib",
            "GIB",
            "limit of all workers' logs; the oldest of ended workers go (4, or a tenth of a smaller volume)",
            type=_gib,
        ),
        option(
            "--accelerators",
            None,
            "source of the GPUs' health: nvml, fake (only ordered XIDs), none (auto: nvml where it works)",
            choices=get_args(Choice),
            default="auto",
        ),
        # For tests and experiments: another --preload, --worker or --store for the fork server.
        option("--fork-server", "FLAG=VALUE", SUPPRESS, action="append", default=[]),
    )
    add_login(found)
    return found


def parse(argv: Sequence[str] | None = None) -> Options:
    """The options of a command line; one line on stderr and exit code 2 where it is not valid."""
    line = parser()
    given = line.parse_args(argv)
    run_dir = given.run_dir or default_run_dir(given.node)
    try:
        login = login_of(given)
        if login.key and (name := read_key(login.key).login) != agent_login(given.node):
            raise UsageError(f"--key: {login.key} is the key of {name}, not of node {given.node}")
        RunDir(run_dir)
    except UsageError as error:
        line.error(str(error))
    except BadRunDir as error:
        line.error(f"--{error}")
    return Options(
        nats=given.nats,
        node=given.node,
        slots=given.slots,
        address=given.address,
        run_dir=run_dir,
        heartbeat_s=given.heartbeat_s,
        lease_s=given.lease_s,
        login=login,
        memory_bytes=given.memory_gib,
        logs_dir=given.logs_dir,
        logs_max_age_s=given.logs_days,
        logs_max_bytes=given.logs_gib,
        accelerators=given.accelerators,
        fork_server_arguments=tuple(given.fork_server),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; the exit code."""
    return command_line.run("unicron-agent", lambda: _run(argv))


def _run(argv: Sequence[str] | None) -> int:
    options = parse(argv)
    extras.require("unicron-agent", "node")
    import uvloop

    log_lines.set_up(logging.INFO, f"%(asctime)s %(levelname)s {options.node} %(message)s", sys.stderr)
    try:
        return uvloop.run(run_agent(options))
    except BadRunDir as error:
        raise UsageError(f"--{error}") from None
    except NoDriver as error:
        raise UsageError(f"--accelerators: {error}") from None


def _node(text: str) -> str:
    if not re.fullmatch(NAME_PATTERN, text):
        raise ValueError(f"{text!r} is not a valid name; use letters, digits, - and _, at most 63, no dots")
    if text in RESERVED_NAMES:
        taken = " and ".join((", ".join(RESERVED_NAMES[:-1]), RESERVED_NAMES[-1]))
        raise ValueError(f"{text!r} cannot be a node's name ({taken} are taken); give the node another name")
    return text


def _address(text: str) -> str:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        raise ValueError(f"{text!r} is not an IP address; give the one that other nodes use") from None
    if address.is_unspecified or address.is_multicast:
        raise ValueError(f"nothing can connect to {text}; give the address that other nodes use")
    return text


def _days(text: str) -> float:
    """In seconds."""
    return number(0, 36_500, "days")(text) * 86_400.0


def _gib(text: str) -> int:
    """In bytes."""
    return int(number(0, 65_536, "GiB")(text) * 2**30)


if __name__ == "__main__":
    sys.exit(main())
