"""Settings for NATS's own client, `nats`, to reach a server of ours: a line to paste, or a context file. Pure.

A context is a JSON file in $XDG_CONFIG_HOME/nats/context (~/.config without it), named NAME.json; `nats --context NAME`
uses it, `nats context select NAME` for good.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from pathlib import Path

from unicrond.events.nats.login import Login

#: The context that we write where no other name is given.
NAME = "unicron"
#: `nats` shows an event of ours as a sentence with this.
TRANSLATE = "unicronctl events decode"


def context(url: str, login: Login) -> dict[str, str]:
    """Return the content of a context file, without empty fields. It holds the password itself."""
    paths = _paths(login)
    fields = {
        "description": "unicrond's event log",
        "url": url,
        "user": login.user or "",
        "password": next(iter(login.passwords()), ""),
        "nkey": paths["nkey"],
        "creds": paths["creds"],
        "ca": paths["tlsca"],
        "cert": paths["tlscert"],
        "key": paths["tlskey"],
    }
    return {name: value for name, value in fields.items() if value}


def command(url: str, login: Login) -> str:
    """Return the start of a command line. A password is left out: every process could read it there."""
    words = ["nats", "-s", url]
    words += [f"--user={login.user}"] if login.user else []
    words += [f"--{flag}={path}" for flag, path in _paths(login).items() if path]
    return shlex.join(words)


def context_file(environment: Mapping[str, str], name: str = NAME) -> Path:
    """Return the path where `nats` looks for the context."""
    home = environment.get("XDG_CONFIG_HOME") or os.path.join(environment.get("HOME", "/"), ".config")  # noqa: PTH118
    return Path(home) / "nats" / "context" / f"{name}.json"


def _paths(login: Login) -> dict[str, str]:
    """Return the files of a login by the flags of `nats`."""
    key = login.key or login.nkey_seed
    is_credentials = login.key is not None and login.key.suffix == ".creds"
    certificate = login.tls_cert or None
    files = {
        "nkey": None if is_credentials else key,
        "creds": login.key if is_credentials else login.creds,
        "tlsca": login.tls_ca,
        "tlscert": certificate,
        "tlskey": login.tls_key or certificate,
    }
    return {flag: str(path) if path else "" for flag, path in files.items()}
