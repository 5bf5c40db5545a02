"""`unicrond run`: one asyncio process on the head node: NATS, the coordinator, the HTTP API.

Rules
-----
* The API answers before the log is folded; it says "catching up" until the coordinator is live. Before the log can be
  reached its port says what the head waits for (startup.py); a NATS that is away is waited for.
* SIGTERM leaves the embedded nats-server to the next coordinator (systemd restart); SIGINT ends it too, unless another
  head uses it. As process 1 of a container both do, else it would die with its lease held.
* Of several heads on one log one leads, the others stand by (head.py). A login that may not use the lease (rights of
  before it) leads alone, as ever.
* An embedded nats-server that dies is started again on its port and store; so is one that stays closed after
  its disk was full (event_log_health.py).
* One coordinator at a time uses a `state_dir`. Where locks tell that another machine or container has it, this head
  waits for that one's end, alive and not ready; beside one on the same machine it ends with an error.
* Where others reach them, NATS and the API speak TLS (certificates.py).
* Where logins have keys, what the coordinator decides and what people ask for go by two connections with different
  rights, and streams are made and brought up to date as the operator, at the start alone.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import web

from unicrond.core.rules.skip_rules import SkipRefused
from unicrond.events.archive import archive
from unicrond.events.host.init_process import ends_all
from unicrond.events.host.systemd import Systemd
from unicrond.events.log.event_log import AnotherLog, Fenced, LogError
from unicrond.events.nats.connection import Connection, Login, LoginRefused, PublishDenied
from unicrond.events.nats.event_log import NatsEventLog
from unicrond.events.nats.lease import NatsLease
from unicrond.events.nats.server import EmbeddedServer, ServerError
from unicrond.events.nats.store_directory_lock import StoreLease
from unicrond.events.nats.streams import JetStreamError, create_streams, forget_restored_readers
from unicrond.events.trust.keys import BadKey, load_or_create_key, read_key
from unicrond.events.trust.logins import Role, User
from unicrond.events.vocabulary.phrases import clean
from unicrond.intake.config import Config, login_as
from unicrond.intake.timeouts import contradictions
from unicrond.intake.tls import Tls
from unicrond.service.api.access import Access
from unicrond.service.api.api import Api
from unicrond.service.api.connections import ApiConnections
from unicrond.service.api.process_status import ProcessStatus
from unicrond.service.api.worker_output import LogReader
from unicrond.service.coordinator.clock import CLOCK
from unicrond.service.coordinator.event_log_health import LogKeeper
from unicrond.service.coordinator.follower import CURE
from unicrond.service.coordinator.garbage_collection import short_pauses
from unicrond.service.coordinator.other_processes import InUse, InUseElsewhere, sole_user
from unicrond.service.event_log.durability_checks import Promises
from unicrond.service.event_log.known_event_log import KnownLog
from unicrond.service.head.head import Head, other_heads, this_process
from unicrond.service.head.parts import HeadParts, Links, Orders, access_of, server_of
from unicrond.service.head.startup import StartupStatus, StoppedBySignal, porch, reach, unless_stopped
from unicrond.service.trust.certificates import Certificates

log = logging.getLogger("unicrond")


#: How often the lock of a state_dir is tried.
_LOOK_S = 0.25


class Fatal(RuntimeError):
    """The daemon cannot go on; the message says why and what to do."""


async def serve(config: Config, skip: Sequence[int] = (), *, stands_by: bool = False, new_log: bool = False) -> None:
    """Run until SIGTERM or SIGINT. `skip`: entries of the log to pass over. `stands_by`: another head is to lead, where
    there is one. `new_log`: accept whatever log there is. Raises Fatal, BadTls."""
    stop: asyncio.Queue[signal.Signals] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.put_nowait, signum)
    orders, lease = Orders(stop, skip, stands_by, Systemd(), new_log), StoreLease(Path(config.state_dir) / "nats")
    with short_pauses(), ExitStack() as lock:
        if not config.nats.url:
            try:
                await _lock_state_dir(config, orders, lock, lease)
            except StoppedBySignal:
                return
        if new_log:
            KnownLog(Path(config.state_dir)).take(CLOCK.wall_us())
        await _serve(config, orders, lease)


async def _lock_state_dir(config: Config, orders: Orders, lock: ExitStack, lease: StoreLease) -> None:
    """Lock the state_dir as long as the stack `lock` lives; where a head elsewhere has it, wait and answer meanwhile.
    Raises Fatal, StoppedBySignal."""
    status = StartupStatus()

    def has_locked() -> bool:
        """Try once. Raises Fatal."""
        lease.look()  # its time runs meanwhile
        try:
            lock.enter_context(sole_user(Path(config.state_dir)))
        except InUseElsewhere as error:
            status.say(str(error))
            return False
        except InUse as error:
            raise Fatal(str(error)) from None
        return True

    async def wait() -> None:
        """Try until the lock is free."""
        while not has_locked():  # noqa: ASYNC110  (another process)
            await asyncio.sleep(_LOOK_S)

    if not has_locked():
        certificates = Certificates(config.certificates, None, is_for_api=config.api_tls)
        async with AsyncExitStack() as outside:
            await _receive(outside, config, certificates, orders, status)
            await unless_stopped(orders.stop, wait())


async def _serve(config: Config, orders: Orders, lease: StoreLease) -> None:
    status = StartupStatus()
    server = None if config.nats.url else server_of(config, _roles(config), status, lease)
    certificates = Certificates(config.certificates, server if config.nats_tls else None, is_for_api=config.api_tls)
    ended_by, is_used, has_begun = None, False, False
    try:
        async with AsyncExitStack() as connections, AsyncExitStack() as outside:
            await _receive(outside, config, certificates, orders, status)
            if server is not None:
                await unless_stopped(orders.stop, _start(server))
                has_begun = True
            async with _running(server):  # also while its log is awaited: who restores that starts it anew
                links = await unless_stopped(orders.stop, _links(config, orders, server, connections, status))
            if orders.new_log:
                await _adopt_archive(config, links.connection)
            try:
                ended_by = await _serve_until_stopped(config, links, orders, certificates, outside)
            finally:
                is_used = (
                    server is not None and links.lease is not None and bool(await other_heads(links.lease, links.me))
                )
    except StoppedBySignal as stopped:
        ended_by = stopped.by
    except PublishDenied as error:
        raise Fatal(f"nats: {error}; give the server the rights that `unicrond nats-config` prints") from None
    finally:
        if is_used:
            log.warning("nats-server stays: another head uses it")
        elif server is not None and has_begun and (ended_by is not signal.SIGTERM or ends_all()):
            await server.stop()


async def _receive(
    stack: AsyncExitStack, config: Config, certificates: Certificates, orders: Orders, status: StartupStatus
) -> None:
    """Answer requests for a head that has not begun, until the stack is closed. Raises Fatal."""
    try:
        await stack.enter_async_context(
            porch(config.api.host, config.api.port, certificates.context, lambda: status.text)
        )
    except OSError as error:
        raise _no_port(config, error) from None
    living = asyncio.create_task(orders.systemd.live(lambda: status.text), name="systemd")
    stack.callback(living.cancel)


async def _links(
    config: Config, orders: Orders, server: EmbeddedServer | None, connections: AsyncExitStack, status: StartupStatus
) -> Links:
    """Return connections that live as long as the stack, to streams that exist. Raises Fatal."""
    url, known_log = server.url if server else config.nats.url, KnownLog(Path(config.state_dir))
    if config.has_keys and (config.keys / f"{Role.OPERATOR}.key").exists():
        async with _connected(url, login_as(config, Role.OPERATOR), "unicrond-start", status) as operator:
            await known_log.wait(operator, status.say)
            await create_streams(operator, replicas=config.nats.replicas)
            await forget_restored_readers(operator)
    connection = asking = await connections.enter_async_context(
        _connected(url, login_as(config, Role.COORDINATOR), "unicrond", status)
    )
    if config.has_keys:
        asking = await connections.enter_async_context(
            _connected(url, login_as(config, Role.API), "unicrond-api", status)
        )
    await known_log.wait(connection, status.say)
    await create_streams(connection, replicas=config.nats.replicas)
    if not config.has_keys:
        await forget_restored_readers(connection)
    watching = await connections.enter_async_context(
        _connected(url, login_as(config, Role.COORDINATOR), "unicrond-entrance", status)
    )
    lease = await _lease(connection, config, orders)
    return Links(connection, asking, watching, server, lease, this_process(config.api_address))


async def _adopt_archive(config: Config, connection: Connection) -> None:
    """Keep of the archive what belongs to the log that a person takes, and set the rest aside. Raises Fatal."""
    name = f"before-{datetime.fromtimestamp(CLOCK.wall_us() / 1e6, UTC):%Y%m%dT%H%M%S.%fZ}"
    try:
        aside = await archive.adopt(NatsEventLog(connection), config.archive, name)
    except (LogError, OSError) as error:
        raise Fatal(f"the archive cannot become one of this log: {error}") from None
    if aside is not None:
        log.warning("the archive held entries that this log does not have; they lie in %s now", aside)


async def _lease(connection: Connection, config: Config, orders: Orders) -> NatsLease | None:
    """Return the lease, None where this login may not use it. Raises what NATS answers if this head is to stand by."""
    lease = NatsLease(connection, replicas=config.nats.replicas)
    try:
        await lease.make()
    except (JetStreamError, PublishDenied) as error:
        if orders.stands_by:
            raise
        log.error("ALARM: no second head can stand by: %s; give the server the rights of `unicrond nats-config`", error)
        return None
    return lease


@asynccontextmanager
async def _connected(url: str, login: Login, name: str, status: StartupStatus) -> AsyncIterator[Connection]:
    """Connect, and close the connection with the context. Raises Fatal."""
    try:
        connection = await reach(url, login, name, status)
    except LoginRefused as error:
        raise Fatal(str(error)) from None
    try:
        yield connection
    finally:
        await connection.close()


def _roles(config: Config) -> list[User]:
    """Return the logins of this machine; they get keys where the server is ours. Raises Fatal."""
    if not config.has_keys:
        return []
    needed = (Role.COORDINATOR, Role.API)
    try:
        if config.nats.url:
            return [read_key(config.keys / f"{role}.key").user for role in needed]
        return [load_or_create_key(config.keys, role).user for role in (*needed, Role.OPERATOR, Role.READER)]
    except (BadKey, OSError) as error:
        raise Fatal(f"nats.keys: {error}; `unicrond nats-config` makes keys") from None


async def _start(server: EmbeddedServer) -> None:
    """Start the embedded server, or adopt the one that runs. Raises Fatal."""
    try:
        adopted = await server.start()
    except (OSError, ServerError) as error:
        if isinstance(error, OSError) and error.filename:
            raise Fatal(f"state_dir: cannot use {error.filename}: {error.strerror}; set another state_dir") from None
        raise Fatal(f"nats-server: {clean(str(error))}") from None
    log.info("nats-server at %s (%s, pid %s)", server.url, "adopted" if adopted else "started", server.pid)


async def _serve_until_stopped(
    config: Config, links: Links, orders: Orders, certificates: Certificates, outside: AsyncExitStack
) -> signal.Signals:
    """Run all parts of the head; return the signal that ended it. `outside`: what answers on the API's port until
    now."""
    server = links.server
    parts = HeadParts(config, links, orders, certificates, _roles(config))
    coordinator, probe = parts.coordinator, parts.probe
    _warn(config, orders)
    keeper = LogKeeper(parts.stream, coordinator.liveness, server, probe=probe, nodes=coordinator)
    head = None
    if links.lease is not None:
        head = Head(coordinator, links.lease, links.me, config.heartbeat_s, is_patient=orders.stands_by)
    promises = _promises(config, links, head)
    process = ProcessStatus(lambda: keeper.trouble, head, lambda: promises.lines, parts.life.archive)
    api = Api(config, coordinator, parts.event_log, LogReader(links.asking), _access(config), process)
    runner = web.AppRunner(api.application(parts.connections.middleware), access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    listening = AsyncExitStack()
    try:
        await outside.aclose()
        await _open(listening, parts.connections, runner, config, certificates)
        runs = {
            "coordinator": head.run() if head is not None else coordinator.run(),
            "log-keeper": keeper.run(),
            "known-log": parts.known_log.keep(
                parts.proof, lambda: coordinator.mark, lambda: not (probe.mismatch or coordinator.fault)
            ),
        }
        work = [asyncio.create_task(run, name=name) for name, run in runs.items()]
        beside = {"log-life": parts.life.run, "promises": promises.run, **parts.logins(api)}
        beside |= parts.exporters.jobs(api.condition)
        if server is not None:
            beside["nats-server"] = partial(_keep_running, server)
        if config.nats_tls or config.api_tls:
            beside["certificates"] = certificates.run
        work += [parts.side_jobs.start(name, job) for name, job in beside.items()]
        watchdog = orders.systemd.accompany(coordinator.caught_up.wait(), api.status)  # a standby is ready too
        work.append(asyncio.create_task(watchdog, name="systemd"))
        return await _until_stopped(work, orders.stop)
    finally:
        await listening.aclose()
        with suppress(asyncio.TimeoutError):
            await runner.cleanup()


def _access(config: Config) -> Access:
    """Return who may use the API. Raises Fatal where its own token cannot be kept."""
    try:
        return access_of(config)
    except OSError as error:
        raise Fatal(f"state_dir: cannot use {error.filename}: {error.strerror}; set another state_dir") from None


async def _until_stopped(work: list[asyncio.Task[None]], stop: asyncio.Queue[signal.Signals]) -> signal.Signals:
    """Return the signal that came; all work has ended then. Raises what a part of it raised, and Fatal."""
    stop_task = asyncio.create_task(stop.get(), name="stop")
    first, _ = await asyncio.wait([*work, stop_task], return_when=asyncio.FIRST_COMPLETED)
    for task in [*work, stop_task]:
        task.cancel()
    await asyncio.gather(*work, return_exceptions=True)
    if stop_task in first:
        log.info("stopping on %s", stop_task.result().name)
        return stop_task.result()
    _raise_cause(first.pop())
    raise Fatal("a part of the daemon ended without a reason")


def _warn(config: Config, orders: Orders) -> None:
    for warning in contradictions(config.policy, config.heartbeat_s, {}):
        log.warning("%s", warning)
    if config.unlocked:
        log.warning("%s", config.unlocked)
    if config.injection:
        log.warning("injection is on: anyone with access to the API may order faults")
    may_sign = isinstance(config.tls, Tls) and not config.tls.ca
    if orders.stands_by and config.has_keys and may_sign and not config.certifies_nodes:
        log.warning(
            "%s is missing: if the other head has it, copy its directory, or nodes will exchange no states while this "
            "head leads (docs/operate/heads.md)",
            config.certificates.cert,
        )


async def _open(
    listening: AsyncExitStack,
    connections: ApiConnections,
    runner: web.AppRunner,
    config: Config,
    certificates: Certificates,
) -> None:
    """Have the API listen as long as the stack lives. Raises Fatal."""
    host, port = config.api.host, config.api.port
    try:
        await listening.enter_async_context(connections.listening(runner, host, port, certificates.context))
    except OSError as error:
        raise _no_port(config, error) from None
    log.info("API at %s://%s:%d", "https" if config.api_tls else "http", host, port)


def _no_port(config: Config, error: OSError) -> Fatal:
    where = f"{config.api.host}:{config.api.port}"
    return Fatal(f"api.port: cannot listen on {where}: {error.strerror}; set another api.port")


def _promises(config: Config, links: Links, head: Head | None) -> Promises:
    system = config.keys / f"{Role.SYSTEM}.key"
    return Promises(
        links.connection,
        Role.COORDINATOR if config.has_keys else None,
        login_as(config, Role.SYSTEM) if config.has_keys and system.exists() else None,
        config.nats.replicas,
        is_embedded=links.server is not None,
        has_others=lambda: head is not None and (head.standing_by or not head.leads),
    )


@asynccontextmanager
async def _running(server: EmbeddedServer | None) -> AsyncIterator[None]:
    """Keep the embedded server running as long as the context lasts; None: there is none."""
    keeping = asyncio.create_task(_keep_running(server)) if server is not None else None
    try:
        yield
    finally:
        if keeping is not None:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)


async def _keep_running(server: EmbeddedServer) -> None:
    while True:
        await server.ended()
        log.warning("nats-server ended; restarting it")
        await server.start()
        log.info("nats-server runs again at %s (pid %s)", server.url, server.pid)


def _raise_cause(task: asyncio.Task[Any]) -> None:
    """Raise the task's exception without the wrapping of task groups."""
    error = task.exception()
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, Fenced):
        raise Fatal(f"another coordinator took over ({error}); this one stops, so that only one decides") from None
    if isinstance(error, SkipRefused):
        raise Fatal(str(error)) from None
    if isinstance(error, AnotherLog):
        raise Fatal(f"{error}: this head ends, and what it has folded goes with it; {CURE}") from None
    if error is not None:
        raise error
