"""`unicrond run`: one asyncio process on the head node: NATS, the coordinator, the HTTP API.

Rules
-----
* The API answers before the log is folded; it says "catching up" until the coordinator is live.
* SIGTERM leaves the embedded nats-server to the next coordinator (systemd restart); SIGINT ends it too.
* An embedded nats-server that dies is started again on its port and store; so is one that stays closed after
  its disk was full (log_keeper.py).
* One coordinator at a time uses a `state_dir`.
* Where logins have keys, what the coordinator decides and what people ask for go by two connections with different
  rights, and streams are made and brought up to date as the operator, at the start alone.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple

from aiohttp import web

from events.archived_log import ArchivedLog
from events.keys import BadKey, kept_key, read_key
from events.log import Fenced, LogError
from events.logins import Role, User
from events.nats_connection import Connection, Denied, Login, Refused, connect
from events.nats_log import NatsBeatLog, NatsEventLog
from events.nats_server import EmbeddedServer, ServerError
from events.nats_streams import create_streams
from events.nats_url import parse_urls
from unicrond.core.skipping import SkipRefused
from unicrond.display.tables import clean
from unicrond.intake.config import Config, login, login_as, read_secret
from unicrond.intake.timeouts import contradictions
from unicrond.service.access import Access
from unicrond.service.api import Api
from unicrond.service.archive_command import archive_directory
from unicrond.service.clock import CLOCK
from unicrond.service.consumers import Consumers
from unicrond.service.coordinator import Coordinator
from unicrond.service.log_keeper import LogKeeper
from unicrond.service.log_reading import LogReader
from unicrond.service.nats_snapshots import NatsSnapshotStore
from unicrond.service.node_logins import NodeLogins, remembered
from unicrond.service.snapshots import Snapshots
from unicrond.service.stream_probe import StreamProbe

log = logging.getLogger("unicrond")

CONNECT_TIMEOUT_S = 15.0


class Fatal(RuntimeError):
    """The daemon cannot go on; the message says why and what to do."""


async def serve(config: Config, skip: Sequence[int] = ()) -> None:
    """Run until SIGTERM or SIGINT. `skip`: entries of the log to pass over. Raises Fatal."""
    stop: asyncio.Queue[signal.Signals] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.put_nowait, signum)
    with nullcontext() if config.nats.url else _sole_user(Path(config.state_dir)):
        await _serve(config, skip, stop)


async def _serve(config: Config, skip: Sequence[int], stop: asyncio.Queue[signal.Signals]) -> None:
    roles = _roles(config)
    server = None if config.nats.url else await _embedded(config, roles)
    url = server.url if server else config.nats.url
    ended_by = None
    try:
        if config.nats.has_keys and (config.keys / f"{Role.OPERATOR}.key").exists():
            async with _connected(url, login_as(config, Role.OPERATOR), "unicrond-start") as operator:
                await create_streams(operator, replicas=config.nats.replicas)
        async with AsyncExitStack() as connections:
            connection = asking = await connections.enter_async_context(
                _connected(url, login_as(config, Role.COORDINATOR), "unicrond")
            )
            if config.nats.has_keys:
                asking = await connections.enter_async_context(
                    _connected(url, login_as(config, Role.API), "unicrond-api")
                )
            await create_streams(connection, replicas=config.nats.replicas)
            ended_by = await _serve_until_stopped(config, Links(connection, asking, server, roles), stop, skip)
    except Denied as error:
        raise Fatal(f"nats: {error}; give the server the rights that `unicrond nats-config` prints") from None
    finally:
        if server is not None and ended_by is not signal.SIGTERM:
            await server.stop()


class Links(NamedTuple):
    """`asking`: the connection of the API's login. `server`: None where it is not ours. `roles`: the logins with keys
    that are no agents'."""

    connection: Connection
    asking: Connection
    server: EmbeddedServer | None
    roles: list[User]


@asynccontextmanager
async def _connected(url: str, login: Login, name: str) -> AsyncIterator[Connection]:
    """Raises Fatal."""
    try:
        connection = await connect(parse_urls(url), name=name, login=login, timeout_s=CONNECT_TIMEOUT_S)
    except Refused as error:
        raise Fatal(str(error)) from None
    except LogError as error:
        raise Fatal(f"nats.url: no NATS at {url}: {error}; check that it runs and that the login is right") from None
    try:
        yield connection
    finally:
        await connection.close()


def _roles(config: Config) -> list[User]:
    """The logins of this machine, which get keys where the server is ours. Raises Fatal."""
    if not config.nats.has_keys:
        return []
    needed = (Role.COORDINATOR, Role.API)
    try:
        if config.nats.url:
            return [read_key(config.keys / f"{role}.key").user for role in needed]
        return [kept_key(config.keys, role).user for role in (*needed, Role.OPERATOR, Role.READER)]
    except (BadKey, OSError) as error:
        raise Fatal(f"nats.keys: {error}; `unicrond nats-config` makes keys") from None


@contextmanager
def _sole_user(state_dir: Path) -> Iterator[None]:
    """Hold the directory: a second coordinator would adopt the first one's nats-server, and end it. Raises Fatal."""
    try:
        state_dir.mkdir(parents=True, exist_ok=True)
        lock = (state_dir / "unicrond.lock").open("a")
    except OSError as error:
        raise Fatal(f"state_dir: cannot use {error.filename}: {error.strerror}; set another state_dir") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise Fatal(
                f"state_dir: another coordinator runs in {state_dir}; stop it first, or set another state_dir"
            ) from None
        yield


def _nodes_path(config: Config) -> Path:
    return config.keys / "nodes"


async def _embedded(config: Config, roles: list[User]) -> EmbeddedServer:
    has_keys = config.nats.has_keys
    shared = config.nats.shared if has_keys else login(config.nats)
    server = EmbeddedServer(
        Path(config.state_dir) / "nats",
        host=config.nats.host,
        port=config.nats.port,
        login=shared if config.nats.user else None,
        users=[*roles, *remembered(_nodes_path(config))] if has_keys else None,
    )
    try:
        adopted = await server.start()
    except (OSError, ServerError) as error:
        if isinstance(error, OSError) and error.filename:
            raise Fatal(f"state_dir: cannot use {error.filename}: {error.strerror}; set another state_dir") from None
        raise Fatal(f"nats-server: {clean(str(error))}") from None
    log.info("nats-server at %s (%s, pid %s)", server.url, "adopted" if adopted else "started", server.pid)
    return server


async def _serve_until_stopped(
    config: Config,
    links: Links,
    stop: asyncio.Queue[signal.Signals],
    skip: Sequence[int],
) -> signal.Signals:
    connection, server = links.connection, links.server
    stream = NatsEventLog(connection)
    event_log = ArchivedLog(stream, archive_directory(config))
    snapshots = Snapshots(NatsSnapshotStore(connection, replicas=config.nats.replicas))
    coordinator = Coordinator(
        event_log,
        NatsBeatLog(connection),
        config.policy,
        config.heartbeat_s,
        severity=config.severity,
        snapshots=snapshots,
        process=f"{socket.gethostname()}:{os.getpid()}",
        skip=skip,
        schema=config.write_schema,
        readmission=config.readmission,
    )
    coordinator.around.requests = NatsEventLog(links.asking)
    for warning in contradictions(config.policy, config.heartbeat_s, {}):
        log.warning("%s", warning)
    if config.injection:
        log.warning("injection is on: anyone with access to the API may order faults")
    probe = StreamProbe(connection, lambda: coordinator.state.seq)
    keeper = LogKeeper(stream, coordinator.liveness, server, probe=probe, nodes=coordinator)
    api = Api(config, coordinator, event_log, LogReader(links.asking), _access(config), lambda: keeper.trouble)
    runner = web.AppRunner(api.application(), access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, config.api.host, config.api.port).start()
        except OSError as error:
            where = f"{config.api.host}:{config.api.port}"
            raise Fatal(f"api.port: cannot listen on {where}: {error.strerror}; set another api.port") from None
        log.info("API at http://%s:%d", config.api.host, config.api.port)
        work = [
            asyncio.create_task(coordinator.run(), name="coordinator"),
            asyncio.create_task(keeper.run(), name="log-keeper"),
        ]
        if server is not None:
            work.append(asyncio.create_task(_keep_running(server), name="nats-server"))
        work += _keep_logins(config, links, coordinator, api)
        stopped = asyncio.create_task(stop.get(), name="stop")
        done, _ = await asyncio.wait([*work, stopped], return_when=asyncio.FIRST_COMPLETED)
        for task in [*work, stopped]:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)
        if stopped in done:
            log.info("stopping on %s", stopped.result().name)
            return stopped.result()
        _raise_cause(done.pop())
        raise Fatal("a part of the daemon ended without a reason")
    finally:
        with suppress(asyncio.TimeoutError):
            await runner.cleanup()


def _access(config: Config) -> Access:
    """Who may use the API."""
    token = read_secret(config.api.token_file) if config.api.token_file else ""
    return Access(token, Path(config.api.tokens_file) if config.api.tokens_file else None)


def _keep_logins(config: Config, links: Links, coordinator: Coordinator, api: Api) -> list[asyncio.Task[None]]:
    """What follows from the log for logins with keys: who is let in, and what each agent may read."""
    if not config.nats.has_keys:
        return []
    consumers = Consumers(links.connection, lambda: coordinator.state)
    coordinator.around.prepare = consumers.before
    logins = NodeLogins(
        links.roles,
        links.server,
        _nodes_path(config),
        lambda: coordinator.state,
        api.ask,
        CLOCK.wall_us,
        has_shared=config.nats.shared is not None,
    )
    coordinator.around.alarms = logins.alarms
    return [
        asyncio.create_task(_once_live(coordinator, consumers.run), name="consumers"),
        asyncio.create_task(_once_live(coordinator, logins.run), name="logins"),
    ]


async def _once_live(coordinator: Coordinator, run: Callable[[], Awaitable[None]]) -> None:
    await coordinator.live.wait()
    await run()


async def _keep_running(server: EmbeddedServer) -> None:
    while True:
        await server.ended()
        log.warning("nats-server ended; restarting it")
        await server.start()
        log.info("nats-server runs again at %s (pid %s)", server.url, server.pid)


def _raise_cause(task: asyncio.Task[Any]) -> None:
    """The task's exception, a task group's wrapping taken off."""
    error = task.exception()
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, Fenced):
        raise Fatal(f"another coordinator took over ({error}); this one stops, so that only one decides") from None
    if isinstance(error, SkipRefused):
        raise Fatal(str(error)) from None
    if error is not None:
        raise error
