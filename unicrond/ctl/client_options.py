"""Shared by all commands of `unicronctl`: the client that the flags ask for, and answers as JSON."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from unicrond.ctl.client import DEFAULT_URL, Client, Snapshot
from unicrond.events.cli.command_line import UsageError

if TYPE_CHECKING:
    import argparse

    from unicrond.core.state.state import ClusterState


def client_of(options: argparse.Namespace) -> Client:
    """Return the client that the flags describe.

    There is one for each command, which finds out once which head leads. Raises UsageError.
    """
    if (existing := getattr(options, "client", None)) is not None:
        return cast(Client, existing)
    url, source = options.url, "--url"
    if url is None:
        url, source = os.environ.get("UNICRON_URL") or DEFAULT_URL, "UNICRON_URL"
    try:
        client = Client(url, token_in(options.token_file), ca=ca_in(options.tls_ca) if "https:" in url else None)
    except ValueError as error:
        raise UsageError(f"{source}: {error}") from None
    options.client = client
    return client


def snapshot_of(options: argparse.Namespace) -> Snapshot:
    """Return the present state; with --at the state at that point, without digest. Raises UsageError."""
    client = client_of(options)
    if options.at is None:
        return client.snapshot()
    from unicrond.core.state.state_bytes import to_json
    from unicrond.ctl.past_state import state_at
    from unicrond.display.cluster_tables import derived_values

    state = state_at(client, options.at)
    return Snapshot({"state": to_json(state), **derived_values(state, state.now_us)}, state)


def health_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the coordinator's health; for the past it is unknown."""
    return client_of(options).health() if options.at is None else {"status": "as it was"}


def now_us(options: argparse.Namespace, state: ClusterState) -> int:
    """Return the time up to which open intervals are counted: the wall clock's now, or the log's at the point."""
    return time.time_ns() // 1000 if options.at is None else state.now_us


def token_in(path: Path | None) -> str:
    """Read the first token from the file, else from that of UNICRON_TOKEN_FILE; "" without either. Raise UsageError."""
    source = "--token-file"
    if path is None:
        variable = os.environ.get("UNICRON_TOKEN_FILE")
        if not variable:
            return ""
        path, source = Path(variable), "UNICRON_TOKEN_FILE"
    try:
        token = path.read_text(encoding="ascii").strip().partition("\n")[0].strip()
    except OSError as error:
        raise UsageError(f"{source}: {path}: {error.strerror}; give the file with the token") from None
    except UnicodeDecodeError:
        token = ""
    if not token or not token.isprintable():
        raise UsageError(f"{source}: {path}: is not one line of plain text; give the file with the token")
    return token


def ca_in(path: Path | None) -> Path | None:
    """Return the file of the API's CA, else that of UNICRON_TLS_CA; None without either. Raises UsageError."""
    source = "--tls-ca"
    if path is None:
        variable = os.environ.get("UNICRON_TLS_CA")
        if not variable:
            return None
        path, source = Path(variable), "UNICRON_TLS_CA"
    if not path.is_file():
        raise UsageError(
            f"{source}: {path} is not a file; give the CA's certificate (STATE_DIR/tls/ca.pem on the head)"
        )
    return path


def print_json(value: Any, *, indent: int | None = 2) -> None:
    """Print one JSON value on stdout."""
    print(json.dumps(_finite(value), indent=indent, ensure_ascii=False, allow_nan=False))


def _finite(value: Any) -> Any:
    """Replace NaN, which a loss may be and JSON does not know, by null."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
