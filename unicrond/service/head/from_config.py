"""Builds the parts of a head that follow from its configuration: embedded server, API access, headers of events."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from unicrond.events.nats.server import EmbeddedServer
from unicrond.events.nats.store_directory_lock import StoreLease
from unicrond.events.trust.certificates import BadCertificate
from unicrond.events.trust.logins import User
from unicrond.events.wire.envelope import Envelope
from unicrond.intake.config import Config, embedded_tls, login, read_secret
from unicrond.intake.tls import BadTls
from unicrond.service.api.access import Access
from unicrond.service.head.startup import StartupStatus
from unicrond.service.trust.membership_certificates import Warrants
from unicrond.service.trust.node_logins import remembered


def server_of(config: Config, roles: list[User], status: StartupStatus) -> EmbeddedServer:
    """Return the embedded server, not started."""
    has_keys = config.nats.has_keys
    shared = config.nats.shared if has_keys else login(config.nats)
    return EmbeddedServer(
        Path(config.state_dir) / "nats",
        host=config.nats.host,
        port=config.nats.port,
        login=shared if config.nats.user else None,
        users=[*roles, *remembered(config.keys / "nodes")] if has_keys else None,
        tls=embedded_tls(config),
        lease=StoreLease(Path(config.state_dir) / "nats"),
        waits=status.say,
    )


def beside(config: Config) -> Callable[[Envelope], dict[str, str]]:
    """Return what makes the headers of events: warrants, where nodes have certificates. Raises BadTls."""
    if not config.certifies_nodes:
        return lambda _: {}
    cert = config.certificates.cert
    try:
        return Warrants(cert).beside
    except (BadCertificate, OSError) as error:
        raise BadTls(f"{cert}: {error}; make another with `unicrond tls-init --renew`") from None


def access_of(config: Config) -> Access:
    """Return who may use the API."""
    token = read_secret(config.api.token_file) if config.api.token_file else ""
    return Access(token, Path(config.api.tokens_file) if config.api.tokens_file else None)
