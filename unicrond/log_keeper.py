"""Whether the log takes what is appended, and what can be done where it does not.

Rules
-----
* Nothing is lost while it does not: the coordinator and the agents keep what they have to say and go on trying,
  and training goes on. What is missing is that anybody decides, so people must see it: /healthz, `unicronctl
  status`, the daemon's log.
* Two signs: an append that waits, and the coordinator's own heartbeats that do not come back.
* A nats-server that met a full disk stays closed when there is room again (2.15: no answer after a failed write;
  its limit is three quarters of what was free when it started). So an embedded one that takes nothing for
  RESTART_AFTER_S although there is room is ended, and started anew by who keeps it running.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from pathlib import Path
from typing import Protocol

log = logging.getLogger("unicrond")

LOOK_EVERY_S = 1.0
RESTART_AFTER_S = 10.0
#: How much must be free before a restart is worth it, in bytes; of a small volume this share of it is enough.
ROOM_BYTES = 64 * 1024 * 1024
ROOM_SHARE = 0.1
SILENT_BUS = "NATS does not give the coordinator's own heartbeats back"


class TroubledLog(Protocol):
    """A log that says why an append waits; empty where none does."""

    trouble: str


class Bus(Protocol):
    """What knows whether own heartbeats come back."""

    bus_works: bool


class Server(Protocol):
    """An embedded server that can be ended."""

    directory: Path

    def is_running(self) -> bool:
        """Whether its process lives."""
        ...

    async def stop(self) -> None:
        """End it."""
        ...


class LogKeeper:
    """`trouble` is for people; `run` watches, and ends an embedded server (None: not ours) that needs it.

    `room_bytes`: how much must be free for that; None: ROOM_BYTES, or a tenth of the volume where that is less.
    """

    def __init__(
        self,
        event_log: TroubledLog,
        bus: Bus,
        server: Server | None,
        *,
        restart_after_s: float = RESTART_AFTER_S,
        look_every_s: float = LOOK_EVERY_S,
        room_bytes: int | None = None,
    ) -> None:
        self._event_log = event_log
        self._bus = bus
        self._server = server
        self._restart_after_s = restart_after_s
        self._look_every_s = look_every_s
        self._room_bytes = room_bytes

    @property
    def trouble(self) -> str:
        """Why the log takes nothing, in one line; empty where it does."""
        return self._event_log.trouble or ("" if self._bus.bus_works else SILENT_BUS)

    async def run(self) -> None:
        """Until cancelled."""
        since_s: float | None = None
        told = ""
        while True:
            await asyncio.sleep(self._look_every_s)
            trouble = self.trouble
            if not trouble:
                if told:
                    log.info("the log takes appends again")
                since_s, told = None, ""
                continue
            now_s = time.monotonic()
            if since_s is None:
                since_s = now_s
            elif not told and now_s - since_s >= self._look_every_s:
                told = trouble
                log.warning("nothing can be decided: %s; appends wait, nothing is lost", trouble)
            if now_s - since_s >= self._restart_after_s and await self._restart_with_room():
                since_s = now_s

    async def _restart_with_room(self) -> bool:
        """End an embedded server that takes nothing although there is room; whether that was tried."""
        server = self._server
        if server is None or not server.is_running():
            return False
        usage = shutil.disk_usage(server.directory)
        enough = min(ROOM_BYTES, ROOM_SHARE * usage.total) if self._room_bytes is None else self._room_bytes
        if usage.free < enough:
            return False
        log.warning("nats-server takes nothing, with %d MiB free; ending it to start it anew", usage.free >> 20)
        await server.stop()
        return True
