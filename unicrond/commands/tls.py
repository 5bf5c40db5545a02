"""`unicrond tls-init`: a CA and the head's certificate, made, renewed or replaced."""

from __future__ import annotations

import argparse
import errno
import ipaddress
import re
import socket
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from unicrond.commands.logins import client
from unicrond.ctl.client import ApiError
from unicrond.events.cli import command_line
from unicrond.events.host.network_addresses import interface_addresses
from unicrond.events.nats.server_files import replace
from unicrond.events.trust.certificates import (
    Authority,
    BadCertificate,
    first_certificate,
    make_authority,
    names_of,
    server_certificate,
)
from unicrond.intake.config import Config, is_loopback
from unicrond.intake.tls import Files, Tls, ca_key_of, files_of
from unicrond.service.trust.authority_roll import AuthorityRoll, OutOfTurn, Phase, nodes_behind
from unicrond.service.trust.node_certificates import CA_DAYS, NoAuthority, authority_of

DAYS = 397
#: So many nodes a refusal names.
_NODES_NAMED = 10
_HOST = re.compile(
    r"(?=.{1,253}\Z)([A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9])?)(\.[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9])?)*\Z"
)


def tls_init(arguments: argparse.Namespace, config: Config) -> int:
    """Make or renew the certificates; return the exit code."""
    state_dir = Path(config.state_dir)
    files, now = files_of(Tls(), state_dir), datetime.now(UTC)
    if arguments.roll:
        return _roll(arguments, config, files, now)
    if arguments.if_missing and files.cert.exists():
        print(f"{files.cert} is there")
        return 0
    if arguments.if_missing and not files.ca.exists():
        ca_key_of(state_dir).unlink(missing_ok=True)  # of a start that was cut off: nothing is signed with it
    try:
        if arguments.renew or (arguments.if_missing and files.ca.exists()):
            authority = authority_of(config)
            before = names_of(first_certificate(files.cert.read_bytes())) if files.cert.exists() else ()
        else:
            authority, before = _new_authority(files, state_dir, now), ()
        names = _names(arguments, config, before)
        replace(files.cert, server_certificate(authority, names, now, arguments.days).decode())
    except FileExistsError as error:
        message = f"{error.filename} is there already; --renew makes a new certificate of the same CA"
        return command_line.fail("unicrond tls-init", message, 2)
    except (NoAuthority, BadCertificate) as error:
        return command_line.fail("unicrond tls-init", error, 2)
    except OSError as error:
        return command_line.fail("unicrond tls-init", f"cannot use {error.filename}: {error.strerror}")
    ends = first_certificate(files.cert.read_bytes()).not_valid_after_utc.date()
    print(f"{files.cert} is valid until {ends} for {', '.join(names)}")
    if arguments.renew:
        print("A coordinator that runs here takes it within a second. Clients need nothing new.")
        return 0
    print(f"{files.ca} is the CA. `unicrond enroll` puts it into a node's key.")
    if config.api_tls:
        print("Give it to people for unicronctl:")
        print(f"  UNICRON_TLS_CA=ca.pem unicronctl --url https://{names[0]}:{config.api.port} status")
    print(f"{ca_key_of(state_dir)} can sign more certificates: nobody but the head's user may read it.")
    return 0


def complete(config: Config, hosts: list[str]) -> int:
    """Make what is missing of the CA and the head's certificate, as `tls-init --if-missing` does, for `hosts` and the
    names that this machine has; return the exit code."""
    return tls_init(argparse.Namespace(roll=None, if_missing=True, renew=False, host=hosts, days=DAYS), config)


def _roll(arguments: argparse.Namespace, config: Config, files: Files, now: datetime) -> int:
    """Carry out a phase of the CA's replacement, and say what comes next; return the exit code."""
    roll = AuthorityRoll(files.ca, ca_key_of(Path(config.state_dir)), files.cert)
    try:
        authority_of(config)  # else there is nothing to replace
        before = names_of(first_certificate(files.cert.read_bytes()))
        match arguments.roll:
            case "trust":
                has_changed = roll.trust(now)
            case "certificate" | "finish" if behind := _behind(arguments, config, roll):
                return command_line.fail("unicrond tls-init", behind, 2)
            case "certificate":
                names = _names(arguments, config, before)
                has_changed = roll.certificate(lambda ca: server_certificate(ca, names, now, arguments.days))
            case "finish":
                has_changed = roll.finish()
            case _:
                has_changed = False
        phase = roll.phase()
    except (NoAuthority, BadCertificate, OutOfTurn) as error:
        return command_line.fail("unicrond tls-init", error, 2)
    except OSError as error:
        return command_line.fail("unicrond tls-init", f"cannot use {error.filename}: {error.strerror}")
    if arguments.roll == "finish" and has_changed:
        print(_FINISHED.format(ca=files.ca))
        return 0
    print(_PHASES[phase].format(ca=files.ca, cert=files.cert))
    return 0


def _behind(arguments: argparse.Namespace, config: Config, roll: AuthorityRoll) -> str:
    """Return why the phase in which the CA's replacement is may not end yet; "" where it may, or where `--unheard` says
    so."""
    before = {"certificate": Phase.TRUST, "finish": Phase.CERTIFICATE}[arguments.roll]
    if arguments.unheard or roll.phase() is not before:
        return ""
    try:
        nodes = client(config).authorities()
    except ApiError as error:
        return f"{error}; no head tells which nodes have the new CA: start it, or go on without their word (--unheard)"
    behind = nodes_behind(before, roll.incoming(), nodes, signs_for_nats=config.nats_tls)
    if not behind:
        return ""
    names = ", ".join(behind[:_NODES_NAMED])
    more = f" and {len(behind) - _NODES_NAMED} more" if len(behind) > _NODES_NAMED else ""
    return (
        f"nodes stand on the old CA: {names}{more}; `unicrond enroll` each again, its key in place; revoke those "
        "that are gone, or cut them off (--unheard)"
    )


#: Where the CA's replacement is, and what to do now.
_PHASES = {
    Phase.NONE: "{ca} holds one CA: none is being replaced. unicrond tls-init --roll trust begins.",
    Phase.TRUST: """Phase trust: {ca} holds the old CA, which signs, and the new one.
Now give both to all who check the head: `unicrond enroll` each node again, its file into the place of the old key; copy
{ca} to people, Prometheus and other heads' STATE_DIR/tls, with all that lies there. Agents take it by themselves.
Who has the old CA alone after the next phase cannot connect. Then: unicrond tls-init --roll certificate""",
    Phase.CERTIFICATE: """Phase certificate: the new CA signs, and has signed {cert}; {ca} holds both.
A head that runs here takes it within a second; copy STATE_DIR/tls to other heads. Now `unicrond enroll` each node
again: its key gets a certificate of the new CA. Then: unicrond tls-init --roll finish""",
}
_FINISHED = """{ca} holds the new CA alone; copy it, and STATE_DIR/tls to other heads; remove ca-next.key there.
Nodes' keys carry the old CA too until they are enrolled once more: do that where its key may be in wrong hands."""


def _names(arguments: argparse.Namespace, config: Config, before: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names for the head's certificate. `before`: those of the one that it replaces."""
    return tuple(dict.fromkeys([*arguments.host, *configured_names(config), *before, *names_here()]))


def configured_names(config: Config) -> Iterator[str]:
    """Yield where the configuration says that the head listens, if that is one address, and by which name the others
    reach it."""
    advertised = config.api.advertise.rpartition(":")[0].strip("[]")
    for host in filter(None, (advertised, config.nats.host, config.api.host)):
        if host not in ("0.0.0.0", "::") and not is_loopback(host):
            yield host


def names_here() -> Iterator[str]:
    """Yield this machine's names and addresses, those that others use first."""
    name = socket.gethostname()
    for host in (name, socket.getfqdn()):
        if _HOST.match(host) and not host.startswith("localhost"):
            yield host
    for _, host in interface_addresses():
        address = ipaddress.ip_address(host)
        if not (address.is_loopback or (address.version == 6 and address.is_link_local)):
            yield host
    yield from ("localhost", "127.0.0.1", "::1")


def host_name(text: str) -> str:
    """Parse a host's name or address, for the command line."""
    with suppress(ValueError):
        return str(ipaddress.ip_address(text))
    if not _HOST.match(text.removeprefix("*.")):
        raise ValueError(f"{text!r} is neither a host's name nor an IP address")
    return text


def _new_authority(files: Files, state_dir: Path, now: datetime) -> Authority:
    """Make a CA and write its files. Raises FileExistsError, OSError."""
    directory = files.ca.parent
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    authority, key = make_authority(now, CA_DAYS), ca_key_of(state_dir)
    for path in (key, files.ca):
        if path.exists():
            raise FileExistsError(errno.EEXIST, "is there already", str(path))
    replace(key, authority.key_pem.decode())
    replace(files.ca, authority.certificate_pem.decode())
    return authority
