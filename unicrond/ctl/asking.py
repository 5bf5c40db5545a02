"""What all commands of `unicronctl` share: the client that the flags ask for, and answers as JSON."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from events.command_line import UsageError
from unicrond.ctl.client import DEFAULT_URL, Client, Snapshot

if TYPE_CHECKING:
    import argparse

    from unicrond.core.state import ClusterState


def client_of(options: argparse.Namespace) -> Client:
    """The client that the flags ask for; one for each command, which finds out once which head leads. Raises
    UsageError."""
    if (known := getattr(options, "client", None)) is not None:
        return cast(Client, known)
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
    """The state as it is; with --at as it was, without digest. Raises UsageError."""
    client = client_of(options)
    if options.at is None:
        return client.snapshot()
    from unicrond.core.state_bytes import to_json
    from unicrond.ctl.past import state_at
    from unicrond.display.derived import derived

    state = state_at(client, options.at)
    return Snapshot({"state": to_json(state), **derived(state, state.now_us)}, state)


def health_of(options: argparse.Namespace) -> dict[str, Any]:
    """The coordinator's health; of the past nothing is known."""
    return client_of(options).health() if options.at is None else {"status": "as it was"}


def now_us(options: argparse.Namespace, state: ClusterState) -> int:
    """Until when what is open has lasted: the wall clock's now, or the log's at the point."""
    return time.time_ns() // 1000 if options.at is None else state.now_us


def token_in(path: Path | None) -> str:
    """The token in the file, else in that of UNICRON_TOKEN_FILE; "" without either. Raises UsageError."""
    source = "--token-file"
    if path is None:
        named = os.environ.get("UNICRON_TOKEN_FILE")
        if not named:
            return ""
        path, source = Path(named), "UNICRON_TOKEN_FILE"
    try:
        token = path.read_text(encoding="ascii").strip()
    except OSError as error:
        raise UsageError(f"{source}: {path}: {error.strerror}; give the file with the token") from None
    except UnicodeDecodeError:
        token = ""
    if not token or not token.isprintable():
        raise UsageError(f"{source}: {path}: is not one line of plain text; give the file with the token")
    return token


def ca_in(path: Path | None) -> Path | None:
    """The file of the API's CA, else that of UNICRON_TLS_CA; None without either. Raises UsageError."""
    source = "--tls-ca"
    if path is None:
        named = os.environ.get("UNICRON_TLS_CA")
        if not named:
            return None
        path, source = Path(named), "UNICRON_TLS_CA"
    if not path.is_file():
        raise UsageError(
            f"{source}: {path} is not a file; give the CA's certificate (STATE_DIR/tls/ca.pem on the head)"
        )
    return path


def print_json(value: Any, *, indent: int | None = 2) -> None:
    """One JSON value on stdout."""
    print(json.dumps(_finite(value), indent=indent, ensure_ascii=False, allow_nan=False))


def _finite(value: Any) -> Any:
    """JSON knows no NaN, which a loss may be: null in its place."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
