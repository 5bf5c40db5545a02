"""Watches whether the log takes what is appended, and does what can be done where it does not.

Rules
-----
* Nothing is lost while it does not: the coordinator and the agents keep what they have to say and go on trying,
  and training goes on. What is missing is that anybody decides, so people must see it: /healthz, `unicronctl
  status`, the daemon's log.
* Four signs: an append that waits; the coordinator's own heartbeats that do not come back; the event stream, asked
  every PROBE_EVERY_S, would take none (stream_probe.py); and nodes whose beats say that they keep observations back,
  while nothing has come from the log since the oldest of them. A node that keeps some back while the log grows has a
  trouble of its own: an alarm names it.
* A nats-server that met a full disk stays closed when there is room again (2.15: no answer after a failed write;
  its limit is three quarters of what was free when it started). So an embedded one that takes nothing for
  RESTART_AFTER_S although there is room is ended, and its keeper starts it again; once, where nothing but
  what nodes say speaks for it, and not where the stream itself refuses.
* A server that takes anything is not ended: not while the log grows, nor for own heartbeats that are missing or a
  question without an answer while others' beats come. Time in which this process did not look is not counted.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from unicrond.core.nodes.liveness import OutboxBacklog
from unicrond.core.state.alarms import Alarm

log = logging.getLogger("unicrond")

LOOK_EVERY_S = 1.0
RESTART_AFTER_S = 10.0
#: How much must be free before a restart is worth it, in bytes; of a small volume this share of it is enough.
ROOM_BYTES = 64 * 1024 * 1024
ROOM_SHARE = 0.1
#: A volume with less is full: the largest message finds no room.
FULL_BYTES = 1 << 20
PROBE_EVERY_S = 2.0
#: Observations that nodes have held back for less may be under way.
BACKLOG_US = 3_000_000
SILENT_BUS = "NATS does not return the coordinator's own heartbeats"


class TroubledLog(Protocol):
    """A log that says why an append waits; `trouble` is empty where none does."""

    trouble: str


class Bus(Protocol):
    """Knows whether the coordinator's own heartbeats come back, and whether anything comes."""

    bus_works: bool
    is_silent: bool


class Probe(Protocol):
    """Asks the event stream whether it would take an append (stream_probe.py)."""

    trouble: str
    is_settled: bool

    async def look(self) -> None:
        """Ask once."""
        ...


class NodeReports(Protocol):
    """The coordinator, as the source of what nodes report about the log."""

    def outbox_backlog(self) -> dict[str, OutboxBacklog]:
        """Return for each node what it cannot append."""
        ...

    def quiet_us(self) -> int:
        """Return for how long nothing has come from the log, neither an entry nor an acknowledgement."""
        ...


class StoppableServer(Protocol):
    """An embedded server that can be ended."""

    directory: Path

    def is_running(self) -> bool:
        """Return whether its process lives."""
        ...

    async def stop(self) -> None:
        """End the process."""
        ...


class LogKeeper:
    """Watches whether the log takes appends. `trouble` is for people; `run` watches, and ends an embedded server (None:
    not ours) that needs it.

    `room_bytes`: how much must be free for that; None: ROOM_BYTES, or a tenth of the volume where that is less.
    """

    def __init__(
        self,
        event_log: TroubledLog,
        bus: Bus,
        server: StoppableServer | None,
        *,
        restart_after_s: float = RESTART_AFTER_S,
        look_every_s: float = LOOK_EVERY_S,
        room_bytes: int | None = None,
        probe: Probe | None = None,
        nodes: NodeReports | None = None,
    ) -> None:
        self._event_log = event_log
        self._bus = bus
        self._server = server
        self._restart_after_s = restart_after_s
        self._look_every_s = look_every_s
        self._room_bytes = room_bytes
        self._probe = probe
        self._nodes = nodes

    @property
    def trouble(self) -> str:
        """The reason why the log takes nothing, in one line; empty where it takes appends."""
        probed = self._probe.trouble if self._probe else ""
        if self._probe is not None and self._probe.is_settled:
            return probed  # the cause; waiting appends and missing heartbeats only follow
        trouble = self._trouble_here or probed or self._trouble_of_nodes
        return f"{self._full_volume}{trouble}" if trouble else ""

    @property
    def _full_volume(self) -> str:
        """The cause, where our server has no room: it says something else then, or nothing."""
        if self._server is None:
            return ""
        try:
            free_bytes = shutil.disk_usage(self._server.directory).free
        except OSError as error:
            return f"the volume of {self._server.directory} cannot be read ({error.strerror}), mend it: "
        if free_bytes >= FULL_BYTES:
            return ""
        return f"the volume of {self._server.directory} is full, make room there: "

    @property
    def _trouble_here(self) -> str:
        return self._event_log.trouble or ("" if self._bus.bus_works else SILENT_BUS)

    @property
    def _trouble_of_nodes(self) -> str:
        backlogs = (
            {n: k for n, k in self._nodes.outbox_backlog().items() if k.oldest_us >= BACKLOG_US} if self._nodes else {}
        )
        oldest_us = max((backlog.oldest_us for backlog in backlogs.values()), default=0)
        if self._nodes is None or not backlogs or self._nodes.quiet_us() < oldest_us - BACKLOG_US // 2:
            return ""
        entries = sum(backlog.entries for backlog in backlogs.values())
        names = ", ".join([*list(backlogs)[:3], *(["..."] if len(backlogs) > 3 else [])])
        return (
            f"{len(backlogs)} of the nodes ({names}) hold back {entries} observations, "
            f"the oldest for {oldest_us / 1e6:.0f} s, and the log got no new entry meanwhile"
        )

    async def run(self) -> None:
        """Watch until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch())
            if self._probe is not None:
                group.create_task(self._ask(self._probe))

    async def _ask(self, probe: Probe) -> None:
        while True:
            await probe.look()
            await asyncio.sleep(PROBE_EVERY_S)

    async def _watch(self) -> None:
        looks = 0  # that saw trouble, one after another: what a clock says counts our own delays
        warning = ""
        restarted = False
        while True:
            await asyncio.sleep(self._look_every_s)
            trouble = self.trouble
            if not trouble:
                if warning:
                    log.info("the log accepts appends again")
                looks, warning, restarted = 0, "", False
                continue
            looks += 1
            if looks > 1 and not warning:
                warning = trouble
                log.warning("the coordinator cannot decide: %s; appends wait, nothing is lost", trouble)
            refuses = self._probe is not None and self._probe.is_settled
            if (looks - 1) * self._look_every_s < self._restart_after_s or refuses or self._takes_something:
                continue
            if restarted and not self._trouble_here:
                continue
            if await self._restart_with_room():
                looks, restarted = 1, True

    @property
    def _takes_something(self) -> bool:
        if self._nodes is not None and self._nodes.quiet_us() < self._restart_after_s * 1e6:
            return True
        return not (self._event_log.trouble or self._trouble_of_nodes or self._bus.is_silent)

    async def _restart_with_room(self) -> bool:
        """End an embedded server that takes nothing although there is room; return whether that was tried."""
        server = self._server
        if server is None or not server.is_running():
            return False
        try:
            usage = shutil.disk_usage(server.directory)
        except OSError:
            return False  # `trouble` says so; no server helps where its volume is gone
        enough = min(ROOM_BYTES, ROOM_SHARE * usage.total) if self._room_bytes is None else self._room_bytes
        if usage.free < enough:
            return False
        log.warning("nats-server accepts nothing, with %d MiB free; restarting it", usage.free >> 20)
        await server.stop()
        return True


def outbox_backlog_alarms(backlogs: Mapping[str, OutboxBacklog]) -> list[Alarm]:
    """Return an alarm for each node that has held back observations for long."""
    return [
        Alarm(
            "outbox-backlog",
            f"node {name} holds back {backlog.entries} observations, the oldest for {backlog.oldest_us / 1e6:.0f} s: "
            "the log does not accept its appends",
            name,
        )
        for name, backlog in backlogs.items()
        if backlog.oldest_us >= BACKLOG_US
    ]
