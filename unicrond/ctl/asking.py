"""What all commands of `unicronctl` share: the client that the flags ask for, and answers as JSON."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from events.command_line import UsageError
from unicrond.ctl.client import DEFAULT_URL, Client

if TYPE_CHECKING:
    import argparse


def client_of(options: argparse.Namespace) -> Client:
    """The client that the flags ask for. Raises UsageError."""
    url, source = options.url, "--url"
    if url is None:
        url, source = os.environ.get("UNICRON_URL") or DEFAULT_URL, "UNICRON_URL"
    try:
        return Client(url, token_in(options.token_file))
    except ValueError as error:
        raise UsageError(f"{source}: {error}") from None


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
