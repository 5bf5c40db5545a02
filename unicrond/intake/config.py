"""The coordinator's configuration file (YAML): strict, with one clear line for what is wrong."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from events.logins import Role
from events.nats_connection import Login
from events.nats_url import parse_urls
from events.schemas import FIRST, SCHEMA
from events.vocabulary import ErrorKind, SeverityLevel
from unicrond.core.field_faults import faults
from unicrond.core.policy import Policy
from unicrond.core.severity import IMPOSSIBLE
from unicrond.intake.readmission import Readmission
from unicrond.intake.strict_yaml import BadYaml, parse, text_of
from unicrond.intake.tokens import BadTokens, read_tokens

PortNumber = Annotated[int, Meta(ge=0, le=65535)]


class ConfigError(ValueError):
    """The configuration cannot be used; the message names the field and the fix."""


class NatsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`url` empty: an embedded server on host:port, kept in <state_dir>/nats. Otherwise an existing one.

    `password_file` holds the password alone. `replicas`: of the streams, for a cluster 3. `auth`: "keys": every login
    has a key of its own, in the directory `keys` those of this machine; "migrate": the user with the password may still
    do everything; "": keys where the embedded server is open to others ("migrate" where user and password are given),
    else the login that is given, or none.
    """

    url: str = ""
    host: str = "127.0.0.1"
    port: PortNumber = 4222
    user: str = ""
    password_file: str = ""
    creds: str = ""
    nkey_seed: str = ""
    tls_ca: str = ""
    replicas: Annotated[int, Meta(ge=1, le=5)] = 1
    auth: Literal["", "keys", "migrate"] = ""
    keys: str = ""

    @property
    def has_keys(self) -> bool:
        """Each login has a key of its own."""
        return bool(self.auth) or (not self.url and not is_loopback(self.host))

    @property
    def shared(self) -> Login | None:
        """The login that may do everything beside the keys; None: there is none."""
        migrates = self.auth == "migrate" or (not self.auth and bool(self.user))
        return login(self) if migrates and not self.url else None


class ApiConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The HTTP API. `token_file` holds a bearer token that may do everything; `tokens_file` lists named tokens with
    their scopes and hashes (tokens.py). With either of them every request but /healthz must carry a token."""

    host: str = "127.0.0.1"
    port: PortNumber = 7470
    token_file: str = ""
    tokens_file: str = ""


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All of it. `checkpoint_dir`: where tasks that name none keep theirs; every node must see it.

    `severity`: error kind -> 1, 2 or 3, in place of severity.py's. `injection`: people may order faults.
    `write_schema`: the newest schema to be written, by the agents too: that of the version to which one may go back.
    `readmission`: how nodes come back that were isolated for their hardware (isolation.py).
    """

    state_dir: str = "unicron-state"
    checkpoint_dir: str = ""
    heartbeat_s: Annotated[float, Meta(ge=0.05, le=60.0)] = 1.0
    nats: NatsConfig = NatsConfig()
    api: ApiConfig = ApiConfig()
    policy: Policy = Policy()
    severity: dict[ErrorKind, SeverityLevel] = {}
    injection: bool = False
    write_schema: Annotated[int, Meta(ge=FIRST, le=SCHEMA)] = SCHEMA
    readmission: Readmission = Readmission()

    @property
    def checkpoints(self) -> Path:
        """The directory under which each task has its own."""
        return Path(self.checkpoint_dir or Path(self.state_dir) / "checkpoints").absolute()

    @property
    def keys(self) -> Path:
        """The directory of the keys of this machine's logins, and of the list of the nodes' logins."""
        return Path(self.nats.keys or Path(self.state_dir) / "keys")


def load(path: Path) -> Config:
    """The configuration in `path`. Raises ConfigError."""
    try:
        document = parse(text_of(path, ConfigError, "give another --config"))
    except BadYaml as error:
        raise ConfigError(f"{path}:{error.line}: {error.what}") from None
    value = {} if document.value is None else document.value
    for fault in faults(value, Config):
        line = document.lines.get(fault.place)
        raise ConfigError(f"{path}{f':{line}' if line else ''}: {fault}")
    config = msgspec.convert(value, Config, strict=True)
    check(config, str(path))
    return config


def check(config: Config, where: str) -> None:
    """What concerns several fields. Raises ConfigError."""
    _check_api(config.api, where)
    for kind, level in config.severity.items():
        impossible = [severity.value for severity in IMPOSSIBLE.get(kind, ())]
        if level in impossible:
            possible = " or ".join(str(other) for other in (1, 2, 3) if other not in impossible)
            raise ConfigError(
                f"{where}: severity.{kind}: {level} is impossible, a reattempt cannot restore what is lost; "
                f"use {possible}"
            )
    if not config.nats.url and bool(config.nats.user) != bool(config.nats.password_file):
        raise ConfigError(f"{where}: nats.user: give nats.user and nats.password_file together")
    if config.nats.auth == "migrate" and (config.nats.url or not config.nats.user):
        raise ConfigError(
            f"{where}: nats.auth: migrate is for an embedded server that had one login for all; set nats.user and "
            "nats.password_file, or use keys"
        )
    if config.nats.url:
        try:
            parse_urls(config.nats.url)
        except ValueError as error:
            raise ConfigError(f"{where}: nats.url: {error}") from None
    for field in ("password_file", "creds", "nkey_seed", "tls_ca"):
        path = getattr(config.nats, field)
        if path and not Path(path).is_file():
            raise ConfigError(f"{where}: nats.{field}: {path} is not a file; create it or fix the path")


def _check_api(api: ApiConfig, where: str) -> None:
    if not is_loopback(api.host) and not (api.token_file or api.tokens_file):
        raise ConfigError(
            f"{where}: api.host: {api.host} is open to others, and a task can run any code; "
            "set api.tokens_file, or use 127.0.0.1"
        )
    for field in ("token_file", "tokens_file"):
        path = getattr(api, field)
        if path and not Path(path).is_file():
            raise ConfigError(f"{where}: api.{field}: {path} is not a file; create it or fix the path")
    if api.tokens_file:
        try:
            read_tokens(Path(api.tokens_file).read_text(encoding="ascii"))
        except (BadTokens, OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{where}: api.tokens_file: {api.tokens_file}: {error}") from None


def login_as(config: Config, role: Role) -> Login:
    """How this machine logs in to NATS as `role`: with its key, or all as the same where there are none."""
    if not config.nats.has_keys:
        return login(config.nats)
    path = config.keys / f"{role}.key"
    return Login(key=path, tls_ca=Path(config.nats.tls_ca) if config.nats.tls_ca else None)


def login(nats: NatsConfig) -> Login:
    """How to log in to NATS without a key."""
    return Login(
        user=nats.user or None,
        password=read_secret(nats.password_file) if nats.password_file else None,
        creds=Path(nats.creds) if nats.creds else None,
        nkey_seed=Path(nats.nkey_seed) if nats.nkey_seed else None,
        tls_ca=Path(nats.tls_ca) if nats.tls_ca else None,
    )


def read_secret(path: str) -> str:
    """The one line that a secret's file holds."""
    return Path(path).read_text().strip()


def is_loopback(host: str) -> bool:
    """The address is reachable from this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
