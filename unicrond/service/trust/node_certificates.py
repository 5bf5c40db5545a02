"""Certificates of nodes: signed by the CA of `unicrond tls-init`, and carried by nodes' keys."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from unicrond.events.trust.certificates import Authority, BadCertificate, node_certificate, read_authority
from unicrond.intake.config import Config
from unicrond.intake.tls import Tls, ca_key_of, files_of

#: A CA lives as long as a cluster: to replace it is to touch every node.
CA_DAYS = 3650


class NoAuthority(ValueError):
    """There is no CA here that could sign; one line with the fix."""


def authority_of(config: Config) -> Authority:
    """Return the CA of `tls-init`. Raises NoAuthority, OSError."""
    state_dir = Path(config.state_dir)
    ca, key = files_of(Tls(), state_dir).ca, ca_key_of(state_dir)
    if not (ca.exists() and key.exists()):
        missing = key if ca.exists() else ca
        raise NoAuthority(f"{missing} is not there; run `unicrond tls-init` first")
    try:
        return read_authority(ca.read_bytes(), key.read_bytes())
    except BadCertificate as error:
        raise NoAuthority(f"{ca}: {error}; restore both from a backup, or remove them and begin anew") from None


def pem_for_node(config: Config, node: str) -> str:
    """Return what a node's key carries: a certificate of its own, if the CA is ours, and the CA; "" in clear. Raises
    NoAuthority, OSError."""
    if not (config.nats_tls or config.certifies_nodes):
        return ""
    ca = config.certificates.ca.read_text()
    if not config.certifies_nodes:
        return ca
    now = datetime.now(UTC)
    return node_certificate(authority_of(config), node, now, CA_DAYS).decode() + ca
