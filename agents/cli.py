"""unicron-agent: the command line of the node agent."""

from __future__ import annotations

import argparse
import ipaddress
import logging
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, get_args

from agents.accelerators.driver import Choice, NoDriver
from agents.daemon import Options, installed_version, run_agent
from agents.run_dir import BadRunDir, RunDir, default_run_dir
from events import extras, log_lines
from events.codec import RESERVED_NAMES
from events.nats_connection import Login
from events.nats_url import parse_urls
from events.vocabulary import NAME_PATTERN

_EXAMPLE = """example:
  unicron-agent --nats nats://head:4222 --user unicron --password-file /etc/unicron.password \\
      --node gpu07 --slots 8 --address 10.0.0.7

SIGTERM ends the agent alone: workers go on and are adopted by the next agent of the same run directory (under
systemd, set KillMode=process). SIGINT ends the workers too, and the node leaves the cluster."""

_MAX_SLOTS = 1024


class _Parser(argparse.ArgumentParser):
    """One clear line and exit code 2, as for every other bad input."""

    def error(self, message: str) -> NoReturn:
        print(f"unicron-agent: {message} (see --help)", file=sys.stderr)
        sys.exit(2)


def parse(argv: list[str] | None = None) -> Options:
    """The options of a command line; one line on stderr and exit code 2 where it is not valid."""
    parser = _Parser(
        prog="unicron-agent",
        description="The agent of one node: starts, watches and adopts the training processes of a unicron cluster.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=installed_version())
    parser.add_argument("--nats", type=_nats, required=True, metavar="URL[,URL]", help="NATS server or cluster")
    parser.add_argument(
        "--node", type=_node, required=True, metavar="NAME", help="this node's name, unique in the cluster"
    )
    parser.add_argument("--slots", type=_slots, required=True, metavar="N", help="workers at a time (one per GPU)")
    parser.add_argument(
        "--address",
        type=_address,
        default="127.0.0.1",
        metavar="IP",
        help="where other nodes reach this one (%(default)s)",
    )
    parser.add_argument(
        "--run-dir", type=Path, metavar="DIR", help="sockets, logs, memory ($XDG_RUNTIME_DIR/unicron/NAME)"
    )
    parser.add_argument("--heartbeat-s", type=_seconds(0.05, 60), default=1.0, metavar="S", help="(%(default)s)")
    parser.add_argument(
        "--lease-s",
        type=_seconds(1, 3600),
        default=60.0,
        metavar="S",
        help="workers end themselves after so long without an agent (%(default)s)",
    )
    parser.add_argument("--user", metavar="NAME", help="NATS user, with --password-file")
    parser.add_argument("--password-file", type=_file, metavar="FILE", help="holds the NATS password alone")
    parser.add_argument(
        "--memory-gib",
        type=_gib,
        default=None,
        metavar="GIB",
        help="for states of training, kept and copied between nodes; 0: none (a quarter of the host's)",
    )
    parser.add_argument(
        "--logs-dir", type=Path, metavar="DIR", help="workers' logs; on a disk, they outlive the machine (RUN_DIR/logs)"
    )
    parser.add_argument(
        "--logs-days",
        type=_days,
        default=None,
        metavar="DAYS",
        help="how long logs of workers that have ended are kept (14)",
    )
    parser.add_argument(
        "--logs-gib",
        type=_gib,
        default=None,
        metavar="GIB",
        help="how much workers' logs may hold; the oldest of ended workers go (4, or a tenth of a smaller volume)",
    )
    parser.add_argument(
        "--accelerators",
        choices=get_args(Choice),
        default="auto",
        help="who tells of the GPUs' health: nvml, fake (tells only of ordered XIDs), none (auto: nvml where it works)",
    )
    parser.add_argument("--creds", type=_file, metavar="FILE", help="NATS credentials file")
    parser.add_argument("--nkey-seed", type=_file, metavar="FILE", help="NATS nkey seed file")
    parser.add_argument("--tls-ca", type=_file, metavar="FILE", help="CA certificate of the NATS server")
    # For tests and experiments: another --preload, --worker or --store for the fork server.
    parser.add_argument("--fork-server", action="append", default=[], metavar="FLAG=VALUE", help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.creds and given.nkey_seed:
        parser.error("--nkey-seed: give either --creds or --nkey, not both")
    if bool(given.user) != bool(given.password_file):
        parser.error("--user: give --user and --password-file together")
    run_dir = given.run_dir or default_run_dir(given.node)
    try:
        RunDir(run_dir)
    except BadRunDir as error:
        parser.error(f"--{error}")
    return Options(
        nats=given.nats,
        node=given.node,
        slots=given.slots,
        address=given.address,
        run_dir=run_dir,
        heartbeat_s=given.heartbeat_s,
        lease_s=given.lease_s,
        login=Login(
            user=given.user,
            password=given.password_file.read_text().strip() if given.password_file else None,
            creds=given.creds,
            nkey_seed=given.nkey_seed,
            tls_ca=given.tls_ca,
        ),
        memory_bytes=given.memory_gib,
        logs_dir=given.logs_dir,
        logs_max_age_s=given.logs_days,
        logs_max_bytes=given.logs_gib,
        accelerators=given.accelerators,
        fork_server_arguments=tuple(given.fork_server),
    )


def main(argv: list[str] | None = None) -> NoReturn:
    """The console script."""
    options = parse(argv)
    extras.require("unicron-agent", "node")
    import uvloop

    log_lines.set_up(logging.INFO, f"%(asctime)s %(levelname)s {options.node} %(message)s", sys.stderr)
    try:
        code = uvloop.run(run_agent(options))
    except BadRunDir as error:
        print(f"unicron-agent: --{error}", file=sys.stderr)
        code = 2
    except NoDriver as error:
        print(f"unicron-agent: --accelerators: {error}", file=sys.stderr)
        code = 2
    sys.exit(code)


def _nats(text: str) -> tuple[str, ...]:
    try:
        return parse_urls(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _node(text: str) -> str:
    if not re.fullmatch(NAME_PATTERN, text):
        raise argparse.ArgumentTypeError(f"{text!r} is no name; use letters, digits, - and _, at most 63, no dots")
    if text in RESERVED_NAMES:
        taken = " and ".join((", ".join(RESERVED_NAMES[:-1]), RESERVED_NAMES[-1]))
        raise argparse.ArgumentTypeError(f"{text!r} is no node's name ({taken} are taken); name the node otherwise")
    return text


def _slots(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or not 1 <= int(text) <= _MAX_SLOTS:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of workers; give 1 to {_MAX_SLOTS}")
    return int(text)


def _address(text: str) -> str:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no IP address; give the one that other nodes use") from None
    if address.is_unspecified or address.is_multicast:
        raise argparse.ArgumentTypeError(f"{text} cannot be connected to; give the address that other nodes use")
    return text


def _seconds(least: float, most: float) -> Callable[[str], float]:
    def seconds(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not within {least:g} to {most:g} seconds")
        return value

    return seconds


def _days(text: str) -> float:
    """In seconds."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value <= 36_500.0:
        raise argparse.ArgumentTypeError(f"{text!r} is not within 0 to 36500 days")
    return value * 86_400.0


def _gib(text: str) -> int:
    """In bytes."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value <= 65536.0:
        raise argparse.ArgumentTypeError(f"{text!r} is not within 0 to 65536 GiB")
    return int(value * 2**30)


def _file(text: str) -> Path:
    path = Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"{text} is no file that can be read")
    return path


if __name__ == "__main__":
    main()
