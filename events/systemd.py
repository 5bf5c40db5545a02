"""What systemd hears of a service (sd_notify(3)): that it is ready, that it lives, that it stops. Elsewhere: nothing.

Rules
-----
* READY means that the service does its work, or would at once; what it does is said as its status, as often as that
  changes.
* WATCHDOG is said from the event loop, at half the time that the unit asks for: a loop that stands still is ended and
  started anew. Until the service is ready each sign of life gives it more time to start: a long log is no failure.
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
        place = environ.pop("NOTIFY_SOCKET", "")
        #: An abstract socket is written with an @ in front.
        self._address = "\0" + place[1:] if place.startswith("@") else place
        given, pid = environ.pop("WATCHDOG_USEC", ""), environ.pop("WATCHDOG_PID", "")
        is_ours = given.isdecimal() and pid in ("", str(os.getpid()))
        #: Between two signs of life; None: systemd asks for none.
        self.alive_every_s = int(given) / 2e6 if is_ours and self._address else None
        self._is_ready = False

    def say(self, *words: str) -> None:
        """Such as "READY=1", "STATUS=live". What cannot be said is not: the service goes on."""
        if self._address:
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
                out.setblocking(False)
                out.sendto("\n".join(words).encode(), self._address)

    async def accompany(self, ready: Awaitable[object], status: Callable[[], str]) -> None:
        """Say READY once `ready` is done, `status` whenever it is another one, and signs of life before and after.

        Runs until it is cancelled: then it says that the service stops.
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
        """Say signs of life, and `status` whenever it is another one, until cancelled: what precedes `accompany`."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._give_signs())
            group.create_task(self._tell(status))

    async def _give_signs(self) -> None:
        while self.alive_every_s is not None:
            more = [] if self._is_ready else [f"EXTEND_TIMEOUT_USEC={4e6 * self.alive_every_s:.0f}"]
            self.say("WATCHDOG=1", *more)
            await asyncio.sleep(self.alive_every_s)

    async def _tell(self, status: Callable[[], str]) -> None:
        told = ""
        while self._address:
            if (now := status()) != told:
                told = now
                self.say(f"STATUS={told}")
            await asyncio.sleep(STATUS_EVERY_S)
