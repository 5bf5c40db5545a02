"""`unicrond enroll`, `revoke` and `nats-config`: keys for logins to NATS; `token`: of the API."""

from __future__ import annotations

import argparse
from pathlib import Path

from unicrond.ctl.client import ApiError, Client
from unicrond.ctl.client_options import token_in
from unicrond.events.cli import command_line
from unicrond.events.cli.command_line import UsageError
from unicrond.events.nats.server_files import replace
from unicrond.events.trust.accounts import nsc_commands, server_accounts
from unicrond.events.trust.keys import (
    BadKey,
    load_or_create_key,
    make_key,
    read_key,
    rewrite_key,
    write_key,
    write_private,
)
from unicrond.events.trust.logins import BadLogin, Role, User, agent_login
from unicrond.intake.config import Config, is_loopback
from unicrond.intake.tls import BadTls, expected_name
from unicrond.intake.tokens import BadTokens, line_of, make_token, read_tokens
from unicrond.service.trust.node_certificates import NoAuthority, pem_for_node

#: Logins beside the agents', for a NATS server of one's own.
_ROLES = (Role.COORDINATOR, Role.API, Role.READER, Role.OPERATOR, Role.SYSTEM)


def enroll(arguments: argparse.Namespace, config: Config) -> int:
    """Make the key of a node and tell the coordinator; the exit code."""
    node, path = arguments.node, arguments.out or Path(f"{arguments.node}.key")
    try:
        login = agent_login(node)
        if config.nats.url:  # where nats-config has it, or will
            path = config.keys / f"{login}.key"
            user = _login_users(config.keys, login)[0]
            is_sealed = _certify(path, config, node)
        else:
            key = make_key(login)._replace(pem=pem_for_node(config, node))
            write_key(path, key)
            user = key.user
            is_sealed = True
    except (BadLogin, BadKey, NoAuthority) as error:
        raise UsageError(str(error)) from None
    except FileExistsError:
        return command_line.fail("unicrond enroll", f"{path} is there already; remove it, or give another --out", 2)
    except OSError as error:
        return command_line.fail("unicrond enroll", f"cannot use {error.filename}: {error.strerror}")
    try:
        client(config).enroll(node, user.key, arguments.unused_h, arguments.previous_h)
    except ApiError as error:
        if not config.nats.url:
            path.unlink()  # nobody lets it in
        return command_line.fail("unicrond enroll", error)
    print(f"{path} is the key of {node}. Copy it to the node, and nowhere else:")
    print(f"  scp -p {path} {node}:/etc/unicron.key && rm {path}")
    print("The agent's user must own it there. Start the agent with it; first with --check, which only looks:")
    url = config.nats.url or f"nats://HEAD:{config.nats.port}"
    print(f"  unicron-agent --nats {url} --key /etc/unicron.key --node {node} --slots 8 --address ADDRESS")
    if arguments.unused_h:
        print(f"Unused, the key ends in {arguments.unused_h:g} hours.")
    if arguments.previous_h:
        print(f"A key that the node has already holds for {arguments.previous_h:g} hours beside it.")
    if not is_sealed:
        print(f"No certificate: {path} is not there, or is a JWT. States of {node} travel in clear.")
    if config.nats.url:
        print(
            f"Your NATS servers must let it in: {user.key} as {user.login}, with the rights that "
            "`unicrond nats-config` prints"
        )
    return 0


def renew_key(arguments: argparse.Namespace, config: Config) -> int:
    """Replace the key of a login in the directory of keys; return the exit code. On NATS servers of one's own both hold
    until the line of the old one is taken out of LOGIN.pub."""
    path, public = config.keys / f"{arguments.login}.key", config.keys / f"{arguments.login}.pub"
    try:
        key = read_key(path)
        if key.has_jwt:
            raise BadKey(f"{path}: is a JWT; get a new one from its operator")
        new = make_key(key.login)._replace(pem=key.pem, is_for_states=key.is_for_states)
        if config.nats.url:
            replace(public, f"{new.user.key}\n{key.user.key}\n")
        rewrite_key(path, new)
    except BadKey as error:
        raise UsageError(str(error)) from None
    except OSError as error:
        return command_line.fail("unicrond renew-key", f"cannot use {error.filename}: {error.strerror}")
    print(f"{path} is new; the head moves to it by itself.")
    if config.nats.url:
        print("Your NATS servers must let both in: print `unicrond nats-config` again, and reload them with that.")
        print(f"When nobody uses the old one, take the second line out of {public}, and do so once more.")
    return 0


def revoke(arguments: argparse.Namespace, config: Config) -> int:
    """End a node's login; the exit code."""
    try:
        client(config).revoke(arguments.node, arguments.reason)
    except ApiError as error:
        return command_line.fail("unicrond revoke", error)
    if config.nats.url:
        print(f"{arguments.node} is revoked. Your NATS servers let it in until you take its user away there.")
    else:
        print(f"{arguments.node} can no longer log in. What runs there stays until you stop its agent.")
    return 0


def _certify(path: Path, config: Config, node: str) -> bool:
    """Give the key a certificate for states, where this head has a CA; return whether the key has what it can have.
    Raises BadKey, NoAuthority, OSError."""
    if not config.certifies_nodes:
        return True
    if not path.exists():
        return False
    key = read_key(path)
    if key.has_jwt:
        return False
    rewrite_key(path, key._replace(pem=pem_for_node(config, node), is_for_states=True))
    return True


def nats_config(arguments: argparse.Namespace) -> int:
    """Print who may log in to NATS servers of one's own; return the exit code. Keys that are missing are made (not for
    nsc, which makes them)."""
    names = [line.strip() for line in arguments.nodes_file.read_text().splitlines()]
    try:
        logins = [*_ROLES, *(agent_login(name) for name in names if name and not name.startswith("#"))]
        if arguments.nsc:
            lines = nsc_commands(logins)
        else:
            lines = server_accounts([user for login in logins for user in _login_users(arguments.keys, login)])
    except (BadLogin, BadKey) as error:
        raise UsageError(str(error)) from None
    except OSError as error:
        return command_line.fail("unicrond nats-config", f"cannot use {error.filename}: {error.strerror}")
    print("\n".join(lines))
    return 0


def _login_users(directory: Path, login: str) -> list[User]:
    """Return the login with the key that is in the directory, or was, before it was moved to where it is used; and with
    the one before, while the key changes."""
    public = directory / f"{login}.pub"
    if public.exists():
        return [User(login, key) for key in public.read_text().split()]
    user = load_or_create_key(directory, login).user
    public.write_text(f"{user.key}\n")
    return [user]


def client(config: Config) -> Client:
    """Return a client of the coordinator with this configuration, on this machine. Raises UsageError."""
    host = config.api.host if is_loopback(config.api.host) else "127.0.0.1"
    token = token_in(Path(config.api.token_file) if config.api.token_file else None)
    if not config.api_tls:
        return Client(f"http://{host}:{config.api.port}", token)
    files = config.certificates
    try:
        name = expected_name(files, host)
    except BadTls as error:
        raise UsageError(str(error)) from None
    return Client(f"https://{host}:{config.api.port}", token, ca=files.ca, server_name=name)


def token(arguments: argparse.Namespace, config: Config) -> int:
    """Make a token of the API, and list its hash where the configuration names a list; the exit code."""
    path = arguments.out or Path(f"{arguments.name}.token")
    listed = Path(config.api.tokens_file) if config.api.tokens_file else None
    secret = make_token()
    try:
        line = line_of(arguments.name, arguments.scopes, secret, arguments.owner or "", arguments.users or ())
        if listed is not None:
            text = listed.read_text(encoding="ascii")
            text += f"{'' if text.endswith(chr(10)) or not text else chr(10)}{line}{chr(10)}"
            read_tokens(text)
        write_private(path, f"{secret}\n")
        if listed is not None:
            listed.write_text(text, encoding="ascii")
    except BadTokens as error:
        return command_line.fail("unicrond token", f"{listed}: {error}", 2)
    except FileExistsError:
        return command_line.fail("unicrond token", f"{path} is there already; remove it, or give another --out", 2)
    except OSError as error:
        return command_line.fail("unicrond token", f"cannot use {error.filename}: {error.strerror}")
    print(f"{path} is the token of {arguments.name}: UNICRON_TOKEN_FILE={path} unicronctl status")
    print(f"{listed} lists it; the coordinator takes it at once." if listed else f"Add to api.tokens_file:\n{line}")
    return 0
