"""A CA and certificates in files, for tests of TLS."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

from unicrond.events.nats.connection import Login
from unicrond.events.nats.server import EmbeddedServer, ServerTls
from unicrond.events.trust import membership_digest as roster
from unicrond.events.trust.certificates import Authority, make_authority, node_certificate, server_certificate
from unicrond.events.trust.keys import Key, make_key, write_key
from unicrond.events.trust.membership_certificates import make_warrant
from unicrond.events.trust.signing import Signer

LOOPBACK = ("localhost", "127.0.0.1", "::1")


def now() -> datetime:
    return datetime.now(UTC)


class Certified:
    """`directory` holds ca.pem, server.pem (with its key), and what tests ask for."""

    def __init__(self, directory: Path, names: Sequence[str] = LOOPBACK) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.authority: Authority = make_authority(now(), 10)
        self.ca, self.server = directory / "ca.pem", directory / "server.pem"
        self.ca.write_bytes(self.authority.certificate_pem)
        self.serve(names)

    def serve(self, names: Sequence[str] = LOOPBACK, begin: datetime | None = None, days: float = 5) -> None:
        """Another certificate for the server."""
        new = self.directory / "server.new"
        new.write_bytes(server_certificate(self.authority, names, begin or now(), days))
        new.replace(self.server)

    def expire(self) -> None:
        self.serve(begin=now() - timedelta(days=3), days=1)

    def tls(self, *, wants_clients: bool = False, also_plain: bool = False) -> ServerTls:
        return ServerTls(self.ca, self.server, self.server, "127.0.0.1", wants_clients, also_plain)

    def key(self, login: str = "agent-n1", *, certificate: bool = True) -> tuple[Path, Key]:
        """A key as `unicrond enroll` makes it."""
        own = node_certificate(self.authority, login.removeprefix("agent-"), now(), 5) if certificate else b""
        key = make_key(login)._replace(pem=(own + self.authority.certificate_pem).decode())
        path = self.directory / f"{login}.key"
        write_key(path, key)
        return path, key

    def warrant(self, node: str, task: str, generation: int, nodes: Collection[str] = ()) -> str:
        """Of the membership of `nodes`, or of the node alone, with the node's place."""
        nodes = nodes or (node,)
        text = make_warrant(Signer(self.server.read_bytes()), task, generation, roster.root(nodes), now())
        return f"{text}.{roster.place_of(node, nodes)}"


@asynccontextmanager
async def served(directory: Path, tls: ServerTls | None, keys: Sequence[Key] = ()) -> AsyncIterator[EmbeddedServer]:
    """A nats-server, for these keys or without logins."""
    server = EmbeddedServer(directory, users=[key.user for key in keys] if keys else None, tls=tls)
    await server.start()
    try:
        yield server
    finally:
        await server.kill()


def trusting(path: Path) -> Login:
    return Login(tls_ca=path)
