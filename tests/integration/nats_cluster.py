"""Three nats-servers as one JetStream cluster, for tests: TLS and logins for clients, which change by a reload, and a
SIGKILL for each."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import nkeys
import trustme

from unicrond.events.nats import streams as nats_streams
from unicrond.events.nats.connection import Connection, Login
from unicrond.events.nats.server_program import find_program
from unicrond.local.dev import free_port

SIZE = 3
_RELOADED = "Reloaded server configuration"
_RELOAD_S = 30


class NatsCluster:
    """`urls` and `login` are what a client needs; `ca` and `seed` the files that the login names. `logins`: who may log
    in, as lines of a server's configuration; "": only `login`, which may do everything."""

    def __init__(self, directory: Path, sync: str, logins: str) -> None:
        self.directory = directory
        self._logins = logins
        self._sync = sync
        self._ports = [free_port() for _ in range(SIZE)]
        self._routes = [free_port() for _ in range(SIZE)]
        self.urls = [f"tls://127.0.0.1:{port}" for port in self._ports]
        self.ca, self.seed = directory / "ca.pem", directory / "user.nk"
        self.login = Login(nkey_seed=self.seed, tls_ca=self.ca)
        self.authority = trustme.CA()
        self.servers: dict[str, asyncio.subprocess.Process] = {}

    def prepare(self) -> None:
        """Certificates, the user's key, and a configuration for each server."""
        self.directory.mkdir()
        self.trust(self.authority)
        self.certify(self.authority)
        pair = nkeys.from_seed(nkeys.encode_seed(os.urandom(32), nkeys.PREFIX_BYTE_USER))
        self.seed.write_bytes(bytes(pair.seed))
        self.configure(self._logins or f"authorization {{ users: [{{ nkey: {pair.public_key.decode()} }}] }}")
        routes = ", ".join(f'"nats://127.0.0.1:{port}"' for port in self._routes)
        for number in range(SIZE):
            (self.directory / f"n{number}.conf").write_text(
                f"""
server_name: n{number}
listen: "127.0.0.1:{self._ports[number]}"
tls {{ cert_file: "{self.directory}/server.pem", key_file: "{self.directory}/server.key" }}
include "logins.conf"
jetstream {{ store_dir: "{self.directory}/n{number}", sync_interval: {self._sync} }}
cluster {{ name: unicron, listen: "127.0.0.1:{self._routes[number]}", routes: [{routes}] }}
"""
            )

    def trust(self, *authorities: trustme.CA) -> None:
        """Give the clients these CAs."""
        self.ca.write_bytes(b"".join(authority.cert_pem.bytes() for authority in authorities))

    def certify(self, authority: trustme.CA) -> None:
        """Give the servers a certificate of this CA, from the next start or reload on."""
        self.authority = authority
        certificate = authority.issue_cert("127.0.0.1")
        certificate.cert_chain_pems[0].write_to_path(str(self.directory / "server.pem"))
        certificate.private_key_pem.write_to_path(str(self.directory / "server.key"))

    def configure(self, logins: str) -> None:
        """Say who may log in, from the next start or reload on: as `unicrond nats-config` prints it."""
        (self.directory / "logins.conf").write_text(logins)

    async def reload(self) -> None:
        """Have each server read its configuration and its certificate again, as `nats-server --signal reload` does."""

        def reloads() -> list[int]:
            return [(self.directory / f"{name}.log").read_text().count(_RELOADED) for name in self.servers]

        before = reloads()
        for server in self.servers.values():
            server.send_signal(signal.SIGHUP)
        async with asyncio.timeout(_RELOAD_S):
            while not all(now > then for now, then in zip(reloads(), before, strict=True)):  # noqa: ASYNC110
                await asyncio.sleep(0.02)  # NATS tells its log alone

    async def start(self, name: str) -> None:
        """Start one server, again after a kill."""
        with (self.directory / f"{name}.log").open("ab") as output:
            self.servers[name] = await asyncio.create_subprocess_exec(
                str(find_program()), "-c", str(self.directory / f"{name}.conf"), stdout=output, stderr=output
            )

    async def kill(self, name: str) -> None:
        """SIGKILL."""
        with contextlib.suppress(ProcessLookupError):
            self.servers[name].kill()
        await self.servers[name].wait()

    async def leader(self, connection: Connection, stream: str) -> str:
        """The server that leads `stream`; "" while there is none."""
        told: dict[str, Any] = await nats_streams.api(connection, f"STREAM.INFO.{stream}", {})
        return str(told.get("cluster", {}).get("leader", ""))


@asynccontextmanager
async def nats_cluster(directory: Path, sync: str = "2m", logins: str = "") -> AsyncIterator[NatsCluster]:
    """Three servers that will have ended. `sync`: how often they sync their disks; "2m" is NATS's own default."""
    cluster = NatsCluster(directory, sync, logins)
    cluster.prepare()
    try:
        await asyncio.gather(*(cluster.start(f"n{number}") for number in range(SIZE)))
        yield cluster
    finally:
        for name in list(cluster.servers):
            await cluster.kill(name)
