"""The coordinator's configuration file (YAML): strict, with one clear line for what is wrong."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from events.nats_connection import Login
from events.nats_url import parse_urls
from events.schemas import FIRST, SCHEMA
from events.vocabulary import ErrorKind, SeverityLevel
from unicrond.core.field_faults import faults
from unicrond.core.policy import Policy
from unicrond.core.severity import IMPOSSIBLE
from unicrond.intake.readmission import Readmission
from unicrond.intake.strict_yaml import BadYaml, parse, text_of

PortNumber = Annotated[int, Meta(ge=0, le=65535)]


class ConfigError(ValueError):
    """The configuration cannot be used; the message names the field and the fix."""


class NatsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`url` empty: an embedded server on host:port, kept in <state_dir>/nats. Otherwise an existing one.

    `password_file` holds the password alone. `replicas`: of the streams, for a cluster 3.
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


class ApiConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The HTTP API. `token_file` holds the bearer token that every request but /healthz must carry."""

    host: str = "127.0.0.1"
    port: PortNumber = 7470
    token_file: str = ""


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
    if not is_loopback(config.api.host) and not config.api.token_file:
        raise ConfigError(
            f"{where}: api.host: {config.api.host} is open to others, and a task can run any code; "
            "set api.token_file, or use 127.0.0.1"
        )
    for kind, level in config.severity.items():
        impossible = [severity.value for severity in IMPOSSIBLE.get(kind, ())]
        if level in impossible:
            possible = " or ".join(str(other) for other in (1, 2, 3) if other not in impossible)
            raise ConfigError(
                f"{where}: severity.{kind}: {level} is impossible, a reattempt cannot restore what is lost; "
                f"use {possible}"
            )
    if (
        not config.nats.url
        and not is_loopback(config.nats.host)
        and not (config.nats.user and config.nats.password_file)
    ):
        raise ConfigError(
            f"{where}: nats.host: {config.nats.host} is open to others; set nats.user and nats.password_file, "
            "or use 127.0.0.1"
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
    if config.api.token_file and not Path(config.api.token_file).is_file():
        raise ConfigError(f"{where}: api.token_file: {config.api.token_file} is not a file; create it or fix the path")


def login(nats: NatsConfig) -> Login:
    """How to log in to NATS."""
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
