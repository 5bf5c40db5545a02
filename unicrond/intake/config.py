"""The coordinator's configuration file (YAML): strict, with one clear line for what is wrong."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from unicrond.core.faults.severity import IMPOSSIBLE
from unicrond.core.state.field_faults import Place, faults
from unicrond.core.state.policy import Policy, Readmission
from unicrond.core.tasks.task_rules import url_fault
from unicrond.events.nats.connection import Login
from unicrond.events.nats.server import ServerTls
from unicrond.events.nats.url import parse_urls
from unicrond.events.trust.logins import Role
from unicrond.events.vocabulary import ErrorKind, SeverityLevel
from unicrond.events.vocabulary.tasks import is_url
from unicrond.events.wire.schemas import FIRST, SCHEMA
from unicrond.intake import settings
from unicrond.intake.notify import Notify
from unicrond.intake.pod_logins import PodLogins
from unicrond.intake.strict_yaml import BadYaml, Document, parse, text_of
from unicrond.intake.tls import BadTls, Files, Tls, expected_name, files_of, server_tls
from unicrond.intake.tokens import BadTokens, read_tokens

#: How many days of the log stay in NATS, where nothing else is configured.
KEEP_D = 30.0
PortNumber = Annotated[int, Meta(ge=0, le=65535)]


class ConfigError(ValueError):
    """The configuration cannot be used; the message names the field and the fix."""


class NatsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`url` empty: an embedded server on host:port, kept in <state_dir>/nats. Otherwise an existing one.

    `password_file` holds the password alone. `replicas`: of the streams, for a cluster 3. `auth`: "keys": every login
    has a key of its own, in the directory `keys` those of this machine; "migrate": the user with the password may still
    do everything; "": keys where the server is embedded ("migrate" where user and password are given), else the login
    that is given. `server_sha256`: of the embedded server's program ("any": no matter); "": one that was tested.
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
    server_sha256: str = ""

    @property
    def has_login(self) -> bool:
        """Return whether a login without a key is given."""
        return bool(self.user or self.creds or self.nkey_seed or "@" in self.url)

    @property
    def shared(self) -> Login | None:
        """Return the login that may do everything beside the keys; None if there is none."""
        migrates = self.auth == "migrate" or (not self.auth and bool(self.user))
        return login(self) if migrates and not self.url else None


class ApiConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The HTTP API. `token_file` holds a bearer token that may do everything; `tokens_file` lists named tokens with
    their scopes and hashes (tokens.py). Where no `token_file` is named the head makes one (Config.own_token).
    `advertise`: HOST:PORT by which the others reach this head. `heads`: such addresses of all heads; one that stands by
    passes on to them what it is asked to do."""

    host: str = "127.0.0.1"
    port: PortNumber = 7470
    token_file: str = ""
    tokens_file: str = ""
    advertise: str = ""
    heads: tuple[str, ...] = ()


class LogConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The log's life. `archive_lag_s`: how far the archive is behind; 0: none. `archive_dir`: "": <state_dir>/archive.
    `keep_d`: days that stay in NATS; None: 30 where the server is embedded or `archive_dir` is set, else all.
    Alarms: `alarm_gib` of the stream, `alarm_free` of a volume as a share of it, `alarm_append_s` of the usual append.
    """

    archive_lag_s: Annotated[float, Meta(ge=0.0, le=60.0)] = 2.0
    archive_dir: str = ""
    keep_d: Annotated[float, Meta(ge=1.0, le=36_500.0)] | None = None
    alarm_gib: Annotated[float, Meta(gt=0.0)] = 16.0
    alarm_free: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.1
    alarm_append_s: Annotated[float, Meta(gt=0.0)] = 0.5


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole configuration. `checkpoint_dir`: where tasks that name none keep theirs; every node must see it.

    `severity`: error kind -> 1, 2 or 3, in place of severity.py's. `injection`: people may inject faults.
    `write_schema`: the newest schema to be written, by the agents too: that of the version to which one may go back.
    `readmission`: how nodes come back that were isolated for their hardware (isolation.py). `tls`: "off", or the
    certificates with which NATS and the API serve other machines; on loopback they use no TLS. `notify`: who is
    notified of what (notify.py). `traces_url`: where spans of incidents and commands go (OTLP over HTTP); empty:
    nowhere. `auth`: "off": on loopback nobody needs a login or a token, so every process of this machine may do all.
    `pod_logins`: which pods of Kubernetes get logins by their tokens (pod_logins.py).
    """

    state_dir: str = "unicron-state"
    checkpoint_dir: str = ""
    heartbeat_s: Annotated[float, Meta(ge=0.05, le=60.0)] = 1.0
    nats: NatsConfig = NatsConfig()
    api: ApiConfig = ApiConfig()
    log: LogConfig = LogConfig()
    policy: Policy = Policy()
    severity: dict[ErrorKind, SeverityLevel] = {}
    injection: bool = False
    write_schema: Annotated[int, Meta(ge=FIRST, le=SCHEMA)] = SCHEMA
    readmission: Readmission = Readmission()
    tls: Tls | Literal["off"] = Tls()
    notify: Notify = Notify()
    traces_url: str = ""
    auth: Literal["on", "off"] = "on"
    pod_logins: PodLogins = PodLogins()

    @property
    def has_keys(self) -> bool:
        """Return whether each login to NATS has a key of its own."""
        if self.nats.auth or self.nats.url:
            return bool(self.nats.auth)
        return self.auth == "on" or not is_loopback(self.nats.host)

    @property
    def own_token(self) -> Path | None:
        """Return the file of the token that the head makes for its own machine; it has every scope. None: it makes
        none."""
        if self.auth == "off" or self.api.token_file:
            return None
        return (Path(self.state_dir) / "operator.token").absolute()

    @property
    def unlocked(self) -> str:
        """Say what is open to whoever is on this machine, since the configuration says so; "" where nothing is."""
        doors = [] if self.has_keys or self.nats.has_login else ["write the log"]
        doors += [] if self.api.token_file or self.api.tokens_file else ["order by the API"]
        if self.auth == "on" or not doors:
            return ""
        return f"auth: off: every process of this machine may {' and '.join(doors)}; remove it, and enroll the nodes"

    def checkpoints_of(self, task: str) -> str:
        """Return where the checkpoints of a task are that names no place: a directory, or the URL of a prefix."""
        if is_url(self.checkpoint_dir):
            return f"{self.checkpoint_dir.rstrip('/')}/{task}"
        return str(Path(self.checkpoint_dir or Path(self.state_dir) / "checkpoints").absolute() / task)

    @property
    def keys(self) -> Path:
        """Return the directory of the keys of this machine's logins, and of the list of the nodes' logins."""
        return Path(self.nats.keys or Path(self.state_dir) / "keys")

    @property
    def nats_tls(self) -> bool:
        """Return whether the embedded NATS server uses TLS."""
        return self.tls != "off" and not self.nats.url and not is_loopback(self.nats.host)

    @property
    def certifies_nodes(self) -> bool:
        """Return whether nodes' keys carry certificates, which the CA of `unicrond tls-init` signs. With NATS servers
        of one's own they do once that command has been run."""
        if not isinstance(self.tls, Tls) or self.tls.ca:
            return False
        return self.certificates.cert.is_file() if self.nats.url else self.nats_tls

    @property
    def api_tls(self) -> bool:
        """Return whether the API uses TLS."""
        return self.tls != "off" and not is_loopback(self.api.host)

    @property
    def api_address(self) -> str:
        """Return HOST:PORT by which others reach the API, as far as it is known."""
        return self.api.advertise or f"{socket.gethostname()}:{self.api.port}"

    @property
    def certificates(self) -> Files:
        """Return the files of the server's certificates, where it has any."""
        return files_of(self.tls if isinstance(self.tls, Tls) else Tls(), Path(self.state_dir))

    @property
    def archive(self) -> Path:
        """Return the directory with the older part of the log."""
        return Path(self.log.archive_dir or Path(self.state_dir) / "archive")

    @property
    def keep_s(self) -> float | None:
        """Return how much of the log the head leaves in NATS, in seconds; None: all. Heads on several machines have
        one archive only where `log.archive_dir` names it."""
        if not self.log.archive_lag_s:
            return None
        if self.log.keep_d is None:
            return None if self.nats.url and not self.log.archive_dir else KEEP_D * 86_400.0
        return self.log.keep_d * 86_400.0


def load(path: Path | None, environ: Mapping[str, str] = MappingProxyType({})) -> Config:
    """Load the configuration in `path` (None: no file), overridden by the variables in `environ`. Raise ConfigError."""
    value, lines = read(path, environ)
    for fault in faults(value, Config):
        name = settings.origin(fault.place, environ)
        line = f":{lines[fault.place]}" if fault.place in lines else ""
        raise ConfigError(f"{name}: {fault.text}" if name else f"{path}{line}: {fault}")
    config = msgspec.convert(value, Config, strict=True)
    check(config, where(path, environ))
    return config


def read(path: Path | None, environ: Mapping[str, str]) -> tuple[Any, dict[Place, int]]:
    """Read file and variables without checks; return the values, and their lines in the file. Raise ConfigError."""
    document = Document({}, {})
    if path is not None:
        try:
            document = parse(text_of(path, ConfigError, "give another --config"))
        except BadYaml as error:
            raise ConfigError(f"{path}:{error.line}: {error.reason}") from None
    value = {} if document.value is None else document.value
    try:
        return (settings.with_variables(value, Config, environ) if isinstance(value, dict) else value), document.lines
    except BadYaml as error:
        raise ConfigError(error.reason) from None


def where(path: Path | None, environ: Mapping[str, str]) -> str:
    """Return the name of the configuration for messages about several fields."""
    if not settings.set_variables(Config, environ):
        return str(path or "without --config")
    return f"{path} and UNICROND_ variables" if path else "UNICROND_ variables"


def check(config: Config, where: str) -> None:
    """Check the rules that concern several fields. Raise ConfigError."""
    _check_api(config, where)
    for kind, level in config.severity.items():
        impossible = [severity.value for severity in IMPOSSIBLE.get(kind, ())]
        if level in impossible:
            possible = " or ".join(str(candidate) for candidate in (1, 2, 3) if candidate not in impossible)
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
    if config.nats.url and config.auth == "on" and not (config.has_keys or config.nats.has_login):
        raise ConfigError(
            f"{where}: nats.url: no login is given, so whoever reaches that server may write the log; set nats.auth: "
            "keys (docs/operate/logins.md) or nats.creds, or say auth: off"
        )
    _check_program(config.nats.server_sha256, where)
    for field in ("password_file", "creds", "nkey_seed", "tls_ca"):
        path = getattr(config.nats, field)
        if path and not Path(path).is_file():
            raise ConfigError(f"{where}: nats.{field}: {path} is not a file; create it or fix the path")
    if problem := config.notify.problem():
        raise ConfigError(f"{where}: notify.{problem}")
    _check_urls(config, where)
    _check_pod_logins(config, where)
    _check_tls(config, where)


def _check_urls(config: Config, where: str) -> None:
    if is_url(config.checkpoint_dir) and (fault := url_fault(config.checkpoint_dir)):
        raise ConfigError(f"{where}: checkpoint_dir: {fault}")
    if config.traces_url and not config.traces_url.startswith(("http://", "https://")):
        raise ConfigError(
            f"{where}: traces_url: {config.traces_url!r} is not an http address; give http://COLLECTOR:4318/v1/traces"
        )


def _check_pod_logins(config: Config, where: str) -> None:
    if config.pod_logins.service_account and (config.nats.url or not config.has_keys):
        raise ConfigError(
            f"{where}: pod_logins.service_account: is for an embedded server with keys; remove nats.url and nats.auth, "
            "or enroll nodes by `unicrond enroll`"
        )


def _check_program(digest: str, where: str) -> None:
    if digest not in ("", "any") and (len(digest) != 64 or set(digest) - set("0123456789abcdef")):
        raise ConfigError(
            f"{where}: nats.server_sha256: {digest!r} is no sha256; give the 64 digits that `sha256sum nats-server` "
            "prints, or any"
        )


def _check_tls(config: Config, where: str) -> None:
    tls = config.tls
    if not isinstance(tls, Tls):
        return
    if len({bool(tls.ca), bool(tls.cert), bool(tls.key)}) > 1:
        raise ConfigError(f"{where}: tls: give ca, cert and key together, or none of them")
    for field in ("ca", "cert", "key"):
        path = getattr(tls, field)
        if path and not Path(path).is_file():
            raise ConfigError(f"{where}: tls.{field}: {path} is not a file; create it or fix the path")


def _check_api(config: Config, where: str) -> None:
    api = config.api
    if not is_loopback(api.host) and not (api.token_file or api.tokens_file or config.own_token):
        raise ConfigError(
            f"{where}: api.host: {api.host} is open to others, and a task can run any code; "
            "remove auth: off, set api.tokens_file, or use 127.0.0.1"
        )
    for field, address in (("advertise", api.advertise), *(("heads", address) for address in api.heads)):
        if address and not _is_address(address):
            raise ConfigError(f"{where}: api.{field}: {address!r} is no HOST:PORT; give one like head1:7470")
    for field in ("token_file", "tokens_file"):
        path = getattr(api, field)
        if path and not Path(path).is_file():
            raise ConfigError(f"{where}: api.{field}: {path} is not a file; create it or fix the path")
    if api.tokens_file:
        try:
            read_tokens(Path(api.tokens_file).read_text(encoding="ascii"))
        except (BadTokens, OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{where}: api.tokens_file: {api.tokens_file}: {error}") from None


def _is_address(text: str) -> bool:
    host, colon, port = text.rpartition(":")
    is_host = bool(re.fullmatch(r"[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]", host))
    return is_host and bool(colon) and port.isdecimal() and 0 < int(port) < 65536


def check_certificates(config: Config, where: str) -> None:
    """Check that the certificates that are needed exist. Raise ConfigError."""
    if not (config.nats_tls or config.api_tls):
        return
    field = f"nats.host: {config.nats.host}" if config.nats_tls else f"api.host: {config.api.host}"
    for path in config.certificates:
        if not path.is_file():
            raise ConfigError(
                f"{where}: {field} is open to others and speaks TLS, but {path} is not there; run `unicrond tls-init`, "
                "set tls to certificates of your own, or set tls: off"
            )
    try:
        expected_name(config.certificates, "")
    except BadTls as error:
        raise ConfigError(f"{where}: tls: {error}") from None


def embedded_tls(config: Config) -> ServerTls | None:
    """Return the TLS settings of the embedded NATS server; None: no TLS. Raise BadTls."""
    if not config.nats_tls or not isinstance(config.tls, Tls):
        return None
    wide = config.nats.host in ("0.0.0.0", "::")
    return server_tls(config.tls, config.certificates, "127.0.0.1" if wide else config.nats.host)


def login_as(config: Config, role: Role) -> Login:
    """Return how this machine logs in to NATS as `role`: with its key, or with the common login where there are no
    keys. Raise BadTls."""
    if not config.has_keys:
        return login(config.nats)
    path, tls = config.keys / f"{role}.key", embedded_tls(config)
    if tls is None:
        return Login(key=path, tls_ca=Path(config.nats.tls_ca) if config.nats.tls_ca else None)
    cert, key = (tls.cert, tls.key) if tls.wants_clients else (None, None)
    return Login(key=path, tls_ca=tls.ca, tls_name=tls.name, tls_cert=cert, tls_key=key)


def login(nats: NatsConfig) -> Login:
    """Return how to log in to NATS without a key."""
    return Login(
        user=nats.user or None,
        password_file=Path(nats.password_file) if nats.password_file else None,
        creds=Path(nats.creds) if nats.creds else None,
        nkey_seed=Path(nats.nkey_seed) if nats.nkey_seed else None,
        tls_ca=Path(nats.tls_ca) if nats.tls_ca else None,
    )


def read_secret(path: str) -> str:
    """Read the one line of a secret's file."""
    return Path(path).read_text().strip()


def is_loopback(host: str) -> bool:
    """Return whether the address is reachable from this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
