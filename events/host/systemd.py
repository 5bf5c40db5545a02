"""Notifications to systemd (sd_notify(3)): the service is ready, alive, or stopping. Elsewhere they do nothing.

Rules
-----
* READY means that the service does its work, or would at once; its status describes what it does, whenever that
  changes.
* WATCHDOG is sent from the event loop, at half the time that the unit asks for: a loop that stands still is killed and
  restarted. Until the service is ready each sign of life gives it more time to start: a long log is no failure.
* The variables are taken out of the environment: no child speaks for the service.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Awaitable, Callable, MutableMapping

STATUS_EVERY_S = 1.0


class Systemd:
    """The service's supervisor, if it is systemd."""

    def __init__(self, environ: MutableMapping[str, str] = os.environ) -> None:
        address = environ.pop("NOTIFY_SOCKET", "")
        #: An abstract socket is written with an @ in front.
        self._address = "\0" + address[1:] if address.startswith("@") else address
        interval_us, pid = environ.pop("WATCHDOG_USEC", ""), environ.pop("WATCHDOG_PID", "")
        is_ours = interval_us.isdecimal() and pid in ("", str(os.getpid()))
        #: Between two signs of life; None: systemd asks for none.
        self.alive_every_s = int(interval_us) / 2e6 if is_ours and self._address else None
        self._is_ready = False

    def say(self, *words: str) -> None:
        """Send notifications such as "READY=1", "STATUS=live". A failure is ignored: the service continues."""
        if self._address:
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
                out.setblocking(False)
                out.sendto("\n".join(words).encode(), self._address)

    async def accompany(self, ready: Awaitable[object], status: Callable[[], str]) -> None:
        """Send READY once `ready` is done, `status` whenever it changes, and signs of life before and after.

        Runs until it is cancelled: then it reports that the service stops.
        """
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self.live(status))
                await ready
                self._is_ready = True
                self.say("READY=1")
                await asyncio.Event().wait()
        finally:
            self.say("STOPPING=1")

    async def live(self, status: Callable[[], str]) -> None:
        """Send signs of life, and `status` whenever it changes, until cancelled. `accompany` includes it."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._give_signs())
            group.create_task(self._tell(status))

    async def _give_signs(self) -> None:
        while self.alive_every_s is not None:
            more = [] if self._is_ready else [f"EXTEND_TIMEOUT_USEC={4e6 * self.alive_every_s:.0f}"]
            self.say("WATCHDOG=1", *more)
            await asyncio.sleep(self.alive_every_s)

    async def _tell(self, status: Callable[[], str]) -> None:
        last_status = ""
        while self._address:
            if (current_status := status()) != last_status:
                last_status = current_status
                self.say(f"STATUS={last_status}")
            await asyncio.sleep(STATUS_EVERY_S)
