"""The coordinator's configuration file (YAML): strict, with one clear line for what is wrong."""

from __future__ import annotations

import difflib
import ipaddress
import re
from pathlib import Path
from typing import Annotated, Any

import msgspec
import yaml
from msgspec import Meta

from events.nats_connection import Login
from unicrond.policy import Policy

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
    """All of it. `checkpoint_dir`: where tasks that name none keep theirs; every node must see it."""

    state_dir: str = "unicron-state"
    checkpoint_dir: str = ""
    heartbeat_s: Annotated[float, Meta(ge=0.05, le=60.0)] = 1.0
    nats: NatsConfig = NatsConfig()
    api: ApiConfig = ApiConfig()
    policy: Policy = Policy()

    @property
    def checkpoints(self) -> Path:
        """The directory under which each task has its own."""
        return Path(self.checkpoint_dir or Path(self.state_dir) / "checkpoints").absolute()


def load(path: Path) -> Config:
    """The configuration in `path`. Raises ConfigError."""
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}; give another --config") from None
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    return convert(data if data is not None else {}, str(path))


def convert(data: Any, where: str) -> Config:
    """A Config from plain data, checked. Raises ConfigError naming `where` and the field."""
    try:
        config = msgspec.convert(data, Config, strict=True)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {explain(error, Config)}") from None
    check(config, where)
    return config


def check(config: Config, where: str) -> None:
    """What concerns several fields. Raises ConfigError."""
    if not is_loopback(config.api.host) and not config.api.token_file:
        raise ConfigError(
            f"{where}: api.host: {config.api.host} is open to others, and to submit a task is to run code; "
            "set api.token_file, or use 127.0.0.1"
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
    """The address reaches nobody else."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def explain(error: msgspec.ValidationError, root: type[msgspec.Struct]) -> str:
    """msgspec's message as "field: what is wrong", with a guess for a misspelt field."""
    text = str(error)
    match = re.fullmatch(r"(?P<what>.*?)(?: - at `\$\.?(?P<path>.*?)`)?", text, re.DOTALL)
    what, path = (match["what"], match["path"] or "") if match else (text, "")
    unknown = re.fullmatch(r"Object contains unknown field `(?P<name>.*)`", what)
    if unknown:
        known = [field.name for field in msgspec.structs.fields(_at(root, path))]
        close = difflib.get_close_matches(unknown["name"], known, n=1)
        guess = f"did you mean {close[0]}?" if close else f"known here: {', '.join(known)}"
        path, what = f"{path}.{unknown['name']}".lstrip("."), f"unknown field; {guess}"
    missing = re.fullmatch(r"Object missing required field `(?P<name>.*)`", what)
    if missing:
        path, what = f"{path}.{missing['name']}".lstrip("."), "missing; give it a value"
    return f"{path}: {what}" if path else what


def _at(root: type[msgspec.Struct], path: str) -> type[msgspec.Struct]:
    for part in filter(None, path.split(".")):
        types = {field.name: field.type for field in msgspec.structs.fields(root)}
        found = types.get(part)
        if not (isinstance(found, type) and issubclass(found, msgspec.Struct)):
            return root
        root = found
    return root
