"""`unicronctl nats-context`: what NATS's own client needs to look at the log; needs no coordinator."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from unicrond.ctl.client_options import print_json
from unicrond.events.cli.command_line import UsageError, login_of

if TYPE_CHECKING:
    from unicrond.events.nats.login import Login

_PRIVATE = 0o600


def nats_context(options: argparse.Namespace) -> None:
    """Print the line to paste, or write the context file. Raises UsageError."""
    from unicrond.events.nats import cli_context as nats_cli

    login = login_of(options)
    if options.state_dir is not None:
        url, login = _of_head(options.state_dir, login)
    else:
        url = ",".join(options.nats)
    if options.tls_ca is None and login.tls_ca is None and url.startswith("tls:"):
        raise UsageError("--tls-ca: missing; give the head's STATE_DIR/tls/ca.pem")
    if options.write:
        path = nats_cli.context_file(os.environ, options.context)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(_PRIVATE)
        path.write_text(json.dumps(nats_cli.context(url, login), indent=2) + "\n")
        name = options.context
        print(f"{path}: written; use it with `nats --context {name}`, or `nats context select {name}`")
    elif options.json:
        print_json(nats_cli.context(url, login))
    else:
        print(nats_cli.command(url, login))


def _of_head(state_dir: Path, login: Login) -> tuple[str, Login]:
    """Return address and login of the embedded server; the operator's key where the coordinator made one."""
    import asyncio

    from unicrond.events.nats.login import Login
    from unicrond.events.nats.server import EmbeddedServer, tls_of
    from unicrond.events.trust.logins import Role

    server = EmbeddedServer.beside(state_dir / "nats")
    if not asyncio.run(server.adopt()):
        raise UsageError(f"--state-dir: no nats-server runs in {server.directory}; start unicrond, or give --nats URL")
    key = (state_dir / "keys" / f"{Role.OPERATOR}.key").absolute()
    tls = {name: path for name, path in tls_of(state_dir / "nats").items() if name != "tls_name"}
    if login == Login() and key.exists():
        login = replace(login, key=key)
    return server.url, replace(login, **(tls if login.tls_ca is None else {}))
