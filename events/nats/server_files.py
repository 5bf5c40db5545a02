"""What an embedded server's directory holds beside its store: its TLS, and files that are whole at any time."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import NamedTuple

TLS_TIMEOUT_S = 10
#: The store, and what waits for it.
_AT_START = re.compile(r"^jetstream .*$", re.MULTILINE)


class ServerTls(NamedTuple):
    """The certificates of a server: `cert` with its chain and `key`, files in PEM that may be one.

    `name`: one of the names in the certificate, for clients on this machine. `wants_clients`: clients need a
    certificate of `ca` too. `also_plain`: clients may come without TLS.
    """

    ca: Path
    cert: Path
    key: Path
    name: str
    wants_clients: bool = False
    also_plain: bool = False


def for_clients(tls: ServerTls | None) -> dict[str, str]:
    """Return what a client on this machine must know of the server's TLS."""
    if tls is None:
        return {}
    client_files = {"tls_cert": str(tls.cert), "tls_key": str(tls.key)} if tls.wants_clients else {}
    return {"tls_ca": str(tls.ca), "tls_name": tls.name, **client_files}


def tls_lines(tls: ServerTls) -> list[str]:
    """Return the TLS lines of the server's configuration."""
    quote = json.dumps
    fields = [f"cert_file: {quote(str(tls.cert))}", f"key_file: {quote(str(tls.key))}"]
    if tls.wants_clients:
        fields += [f"ca_file: {quote(str(tls.ca))}", "verify: true"]
    # After a restart thousands of agents shake hands at once.
    lines = [f"tls {{ {', '.join(fields)}, timeout: {TLS_TIMEOUT_S} }}"]
    return [*lines, "allow_non_tls: true"] if tls.also_plain else lines


def for_running(config: str, previous: str) -> str:
    """Return the configuration with what a server takes at its start alone as the `previous` one has it: a reload that
    changes that is refused whole."""
    at_start = re.search(_AT_START, previous)
    return re.sub(_AT_START, lambda _: at_start[0], config) if at_start else config


def replace(path: Path, text: str) -> None:
    """Put a file in the place of another, all or nothing; it is private."""
    new = path.with_suffix(".new")
    new.unlink(missing_ok=True)
    with open(new, "x", opener=_private) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
