"""The parts of a head around its coordinator, and how they are tied: each is made once, and the coordinator is handed
its surroundings. Parts that look at the coordinator do so once something runs, when it has been made."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from unicrond.core.state.alarms import Alarm
from unicrond.core.state.state import ClusterState
from unicrond.events.archive.archived_log import ArchivedLog, archived_batches
from unicrond.events.host.systemd import Systemd
from unicrond.events.log.lease import Holder
from unicrond.events.nats.connection import Connection
from unicrond.events.nats.event_log import NatsBeatLog, NatsEventLog
from unicrond.events.nats.lease import NatsLease
from unicrond.events.nats.server import EmbeddedServer
from unicrond.events.nats.store_directory_lock import StoreLease
from unicrond.events.trust.certificates import BadCertificate
from unicrond.events.trust.logins import User
from unicrond.events.vocabulary import AnyEvent
from unicrond.events.wire.envelope import Envelope
from unicrond.intake.config import Config, embedded_tls, login
from unicrond.intake.tls import BadTls
from unicrond.service.api.access import Access
from unicrond.service.api.api import Api
from unicrond.service.api.connections import ApiConnections, connections_max
from unicrond.service.api.worker_output import LogReader, LogsUnavailable
from unicrond.service.coordinator.alarms import hold_alarms, outage_alarms, unsaved_alarms
from unicrond.service.coordinator.clock import CLOCK
from unicrond.service.coordinator.coordinator import Coordinator
from unicrond.service.coordinator.nats_snapshots import NatsSnapshotStore
from unicrond.service.coordinator.snapshots import Snapshots
from unicrond.service.coordinator.surroundings import HeadSettings, Surroundings
from unicrond.service.event_log.consumers import Consumers
from unicrond.service.event_log.known_event_log import KnownLog
from unicrond.service.event_log.retention import LogLife
from unicrond.service.event_log.statistics import AppendTimes
from unicrond.service.event_log.stream_probe import StreamProbe
from unicrond.service.head.exporters import Exporters
from unicrond.service.head.side_jobs import Job, SideJobs
from unicrond.service.head.startup import StartupStatus
from unicrond.service.trust.certificates import Certificates
from unicrond.service.trust.fuses import Fuses
from unicrond.service.trust.membership_certificates import WarrantRenewals, Warrants
from unicrond.service.trust.node_logins import NodeLogins, RoleLogins, remembered

if TYPE_CHECKING:
    import signal

    from prometheus_client.core import Metric

#: Of a node's answer to a new warrant.
_RENEWAL_TIMEOUT_S = 3.0


class Orders(NamedTuple):
    """The options of this run, beside its configuration. `systemd`: made before any child is. `new_log`: a person takes
    the log that is there."""

    stop: asyncio.Queue[signal.Signals]
    skip: Sequence[int]
    stands_by: bool
    systemd: Systemd
    new_log: bool = False


class Links(NamedTuple):
    """The connections of a head. `asking`: of the API's login. `watching`: on which the entrance is watched; a flood
    may end it. `server`: None where it is not ours. `lease`: None where this login may not use it. `me`: this process
    in it."""

    connection: Connection
    asking: Connection
    watching: Connection
    server: EmbeddedServer | None
    lease: NatsLease | None
    me: Holder


class HeadParts:
    """Makes the coordinator and the parts of this process that it asks. `roles`: the logins of this machine."""

    def __init__(
        self, config: Config, links: Links, orders: Orders, certificates: Certificates, roles: list[User]
    ) -> None:
        self._config = config
        self._links = links
        self._roles = roles
        self._certificates = certificates
        self.side_jobs, self.connections = SideJobs(), ApiConnections(connections_max())
        self._logins: NodeLogins | None = None
        self._fuses = Fuses(self._state, CLOCK.monotonic_us, fuse_obstacle(config, links.server))
        self.known_log = KnownLog(Path(config.state_dir))
        live = asyncio.Event()
        appends = AppendTimes(time.monotonic)
        self.exporters = Exporters(config, live.is_set)
        self._consumers: Consumers | None = None
        if config.has_keys:
            self._consumers = Consumers(links.connection, self._state, self._read_seq, live.is_set)
        self.proof = self.known_log.proof()
        self._warrants = warrants_of(config)
        self.stream = NatsEventLog(
            links.connection, extra_headers=beside(self._warrants), on_duration=appends.took, proof=self.proof
        )
        self.event_log = ArchivedLog(self.stream, config.archive)
        around = Surroundings(
            requests=NatsEventLog(links.asking, on_duration=appends.took),
            views=self.exporters.views,
            live=live,
            prepare=self._prepare,
            begin=self._begin,
            alarms=self._alarms,
            metrics=self._metrics,
            log_began_us=self._log_began_us,
        )
        self.coordinator = Coordinator(
            self.event_log,
            NatsBeatLog(links.connection),
            self._settings(orders),
            snapshots=Snapshots(NatsSnapshotStore(links.connection, replicas=config.nats.replicas)),
            around=around,
        )
        self.probe = StreamProbe(
            links.connection,
            self.proof,
            lambda: self.coordinator.state.seq,
            lambda: {node: self._read_seq(node) for node in self.coordinator.liveness.beats},
            self.coordinator.log_is_behind,
            self.coordinator.log_is_whole,
        )
        self.life = LogLife(
            config,
            self.coordinator,
            lambda: self.probe.info,
            lambda: self.coordinator.state.seq,
            appends,
            time.monotonic,
        )

    def logins(self, api: Api) -> dict[str, Job]:
        """Return the jobs at the entrance: the watch over floods, and with keys what keeps logins as the log says: who
        may log in, and what each agent may read."""
        entrance = partial(self._fuses.watch, self._links.watching)
        jobs: dict[str, Job] = {"entrance": entrance}
        if self._warrants is not None:
            jobs["warrants"] = partial(self._once_folded, self._renewals(self._warrants).run)
        if self._consumers is None:
            return jobs
        self._logins = NodeLogins(
            RoleLogins(self._config.keys, self._roles),
            self._links.server,
            self._config.keys / "nodes",
            self._state,
            api.ask,
            CLOCK.wall_us,
            self.coordinator.live.is_set,
            fuses=self._fuses,
            shared=self._config.nats.shared,
        )
        return {
            **jobs,
            "consumers": partial(self._once_folded, self._consumers.run),
            "logins": partial(self._once_folded, self._logins.run),
        }

    def _renewals(self, warrants: Warrants) -> WarrantRenewals:
        reader = LogReader(self._links.asking)

        async def ask(node: str, body: bytes) -> None:
            """Send the node a new warrant. Raises LogsUnavailable where it does not take it."""
            reply = await reader.ask(node, body, _RENEWAL_TIMEOUT_S)
            if reply.error:
                raise LogsUnavailable(reply.error)

        return WarrantRenewals(warrants, self._state, ask, self.coordinator.live.is_set)

    def _settings(self, orders: Orders) -> HeadSettings:
        config, identity = self._config, self.known_log.read()
        return HeadSettings(
            policy=config.policy,
            heartbeat_s=config.heartbeat_s,
            severity=config.severity,
            readmission=config.readmission,
            schema=config.write_schema,
            skip=orders.skip,
            process=f"{socket.gethostname()}:{os.getpid()}",
            adopted_us=identity.adopted_us if identity is not None else 0,
        )

    async def _once_folded(self, run: Callable[[], Awaitable[None]]) -> None:
        await self.coordinator.caught_up.wait()
        await run()

    def _state(self) -> ClusterState:
        return self.coordinator.state

    def _read_seq(self, node: str) -> int:
        return self.coordinator.liveness.read_seq(node)

    async def _prepare(self, events: Sequence[AnyEvent]) -> None:
        if self._consumers is not None:
            await self._consumers.before(events)

    def _begin(self) -> None:
        if self._consumers is not None:
            self._consumers.forget()

    def _log_began_us(self) -> int:
        """Return when the log's first entry was recorded; 0 where neither stream nor archive has it."""
        if self.proof.first is not None:
            return self.proof.first.recorded_at_us
        batch = next(archived_batches(self._config.archive), [])  # this log's: it was compared before it was read
        return batch[0].recorded_at_us if batch and batch[0].seq == 1 else 0

    def _metrics(self) -> Iterable[Metric]:
        return self.life.metrics()

    def _alarms(self) -> list[Alarm]:
        lines = [*self.probe.alarms(), *self.life.alarms(), *self.side_jobs.alarms(), *self.connections.alarms()]
        if self._logins is not None:
            lines += self._logins.alarms()
        lines += self._fuses.alarms()
        lines += [*self.exporters.alarms(), *unsaved_alarms(self.coordinator.state)]
        lines += outage_alarms(self.coordinator.state)
        lines += hold_alarms(self.coordinator.state)
        if self._config.unlocked:
            lines.append(Alarm("auth-off", self._config.unlocked))
        return lines + (self._certificates.alarms() if self._is_tls else [])

    @property
    def _is_tls(self) -> bool:
        return bool(self._config.nats_tls or self._config.api_tls)


def server_of(config: Config, roles: list[User], status: StartupStatus, lease: StoreLease) -> EmbeddedServer:
    """Return the embedded server, not started. `lease`: of its store."""
    has_keys = config.has_keys
    shared = config.nats.shared if has_keys else login(config.nats)
    return EmbeddedServer(
        Path(config.state_dir) / "nats",
        host=config.nats.host,
        port=config.nats.port,
        login=shared if config.nats.user else None,
        users=[*roles, *remembered(config.keys / "nodes")] if has_keys else None,
        tls=embedded_tls(config),
        lease=lease,
        waits=status.say,
        sha256=config.nats.server_sha256,
    )


def fuse_obstacle(config: Config, server: EmbeddedServer | None) -> str:
    """Return why this head cannot end the login of a node that floods the log; "" where it can."""
    if not config.has_keys:
        return "NATS asks for no keys (nats.auth); find the process and end it"
    if server is None:
        return "the NATS servers are your own: take the node's key off their list (unicrond nats-config), reload them"
    return "NATS accepts the shared login too (nats.auth: migrate)" if config.nats.shared is not None else ""


def beside(warrants: Warrants | None) -> Callable[[Envelope], dict[str, str]]:
    """Return what makes the headers of events."""
    return warrants.beside if warrants is not None else lambda _: {}


def warrants_of(config: Config) -> Warrants | None:
    """Return what signs warrants; None where nodes have no certificates. Raises BadTls."""
    if not config.certifies_nodes:
        return None
    cert = config.certificates.cert
    try:
        return Warrants(cert)
    except (BadCertificate, OSError) as error:
        raise BadTls(f"{cert}: {error}; make another with `unicrond tls-init --renew`") from None


def access_of(config: Config) -> Access:
    """Return who may use the API; the head's own token is made, if it is not there. Raises OSError."""
    local = config.own_token
    source = local or (Path(config.api.token_file) if config.api.token_file else None)
    access = Access(
        path=Path(config.api.tokens_file) if config.api.tokens_file else None, local=local, token_file=source
    )
    if access.token_trouble:
        raise OSError(errno.EINVAL, access.token_trouble, str(source))
    return access
