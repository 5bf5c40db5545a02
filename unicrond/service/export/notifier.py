"""Sends notices (views/notifications.py) to people at destinations (intake/notify.py) by transports
(notification_transports.py).

Rules
-----
* The coordinator's loop never waits: as a view of the log, this only puts notices on a list. A queue that is full drops
  its oldest message and logs that. Nothing is decided from any of this.
* Only of what is new, and only by the coordinator that decides: entries that are read again after a start, or while
  another one leads, give no notices. One that takes over says so, with the open incidents.
* One matter, one message: notices of one key within `group_s` go together; the same again within `repeat_s` does not go
  at all, unless the matter was over in between. The end of a matter is sent if its beginning was sent.
* An alarm that somebody has acknowledged or silenced is not sent; it is when a silence ends and it still stands.
* A message is tried again after 1, 2, 4, ... s up to 5 min, each somewhat drawn, for GIVE_UP_S; each destination by
  itself. What is given up is an alarm.
* The heartbeat stops where nothing is decided or the log takes nothing, so that its receiver notices.
"""

from __future__ import annotations

import asyncio
import logging
import random
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import aiohttp

from unicrond.core.replayer import LogStep
from unicrond.core.state.alarms import Alarm
from unicrond.core.state.state import ClusterState
from unicrond.intake.notify import Destination, Notify
from unicrond.page.attention import state_alarms
from unicrond.service.coordinator.clock import CLOCK, Clock
from unicrond.service.export.notification_transports import Notification, Undelivered, deliver
from unicrond.views.notifications import Notice, alarm_notice, standing, step_notices, taken_over
from unicrond.views.view import View

log = logging.getLogger("unicrond")

QUEUE_MAX = 500
GIVE_UP_S = 3600.0
PAUSE_MAX_S = 300.0
LOOK_S = 1.0


class Notifier(View):
    """Notifies people. `leads`: this coordinator decides. `courier`: the transport. `hide`: maps a text to its form
    without the secrets that a state knows."""

    def __init__(
        self,
        config: Notify,
        leads: Callable[[], bool],
        clock: Clock = CLOCK,
        courier: Callable[[Destination, Notification], Awaitable[None]] = deliver,
        cluster: str = "",
        hide: Callable[[ClusterState, str], str] = lambda _, text: text,
    ) -> None:
        self._config, self._leads = config, leads
        self._state = ClusterState()
        self._was_leading = False
        self._hide = hide
        self._clock = clock
        self._courier = courier
        self._cluster = cluster or socket.gethostname()
        #: Notices that wait, by key, and since when.
        self._grouped: dict[str, tuple[int, list[Notice]]] = {}
        #: When the matter of a key was last sent.
        self._told_us: dict[str, int] = {}
        self._standing: dict[str, Notice] = {}
        #: The alarms that somebody has acknowledged or silenced, as seen last.
        self._quiet: set[str] = set()
        self._queues: list[deque[Notification]] = [deque(maxlen=QUEUE_MAX) for _ in config.to]
        self._wake = [asyncio.Event() for _ in config.to]
        self._failures = [""] * len(config.to)

    def feed(self, step: LogStep) -> None:
        """Queue the notices of a new step, if this coordinator leads. Never waits."""
        self._state = step.after
        if self._config.to and self._leads():
            for notice in step_notices(step):
                self._take(notice)

    def alarms(self) -> list[Alarm]:
        """Return the destinations that cannot be reached."""
        return [
            Alarm("notification-failed", line, f"to-{number}") for number, line in enumerate(self._failures) if line
        ]

    async def run(self, condition: Callable[[], Mapping[str, Any]]) -> None:
        """Deliver notices until cancelled. `condition`: returns the body of /healthz."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._look(condition))
            for number in range(len(self._config.to)):
                group.create_task(self._carry(number))
            if self._config.heartbeat_url:
                group.create_task(self._beat(condition))

    # --- what is told ----------------------------------------------------------------------------

    def _is_quiet(self, notice: Notice) -> bool:
        handling = self._state.alarms.get(notice.alarm)
        return handling is not None and handling.is_quiet(self._clock.wall_us())

    def _take(self, notice: Notice) -> None:
        if not notice.is_over and self._is_quiet(notice):
            return
        notice = notice._replace(title=self._hide(self._state, notice.title), text=self._hide(self._state, notice.text))
        since_us, waiting = self._grouped.get(notice.key, (self._clock.monotonic_us(), []))
        self._grouped[notice.key] = since_us, [*waiting, notice]

    async def _look(self, condition: Callable[[], Mapping[str, Any]]) -> None:
        while True:
            await asyncio.sleep(min(LOOK_S, self._config.group_s / 2 or LOOK_S))
            if self._config.to:
                try:
                    self.look(condition())
                except Exception:
                    log.exception("notify")

    def look(self, condition: Mapping[str, Any]) -> None:
        """Queue what holds now, and send what has waited long enough. Another coordinator that leads notifies by
        itself. `condition`: the body of /healthz."""
        was_leading, self._was_leading = self._was_leading, self._leads()
        if not self._was_leading:
            self._standing, self._quiet = {}, set()
            self._grouped.clear()
            return
        for notice in taken_over(self._state) if not was_leading else ():
            self._take(notice)
        no_progress_us = int(self._config.no_progress_s * 1e6)
        lines = [line for line in (condition["trouble"],) if line]
        alarms = {row["alarm"]: row["text"] for row in condition["alarms"]}
        notices = standing(self._state, self._clock.wall_us(), no_progress_us, lines, alarms)
        now = {notice.key: notice for notice in notices}
        for notice in self._after_silence(now):
            self._told_us.pop(notice.key, None)  # told before its silence: the end of that is news
            self._take(notice)
        for key, notice in now.items():
            if key not in self._standing:
                self._take(notice)
        for key, notice in self._standing.items():
            if key not in now:
                self._take(notice._replace(urgency="info", title=f"over: {notice.title}", text="", is_over=True))
        self._standing = now
        now_us = self._clock.monotonic_us()
        for key, (since_us, grouped) in list(self._grouped.items()):
            if now_us - since_us >= self._config.group_s * 1e6:
                del self._grouped[key]
                self._send(key, tuple(grouped), now_us)

    def _after_silence(self, now: Mapping[str, Notice]) -> list[Notice]:
        """Return the notices of the alarms that stand, and are no longer quiet. `now`: what stands, of the head; what
        the state has is told by its events, and here."""
        wall_us = self._clock.wall_us()
        quiet = {key for key, handling in self._state.alarms.items() if handling.is_quiet(wall_us)}
        loud, self._quiet = self._quiet - quiet, quiet
        if not loud:
            return []
        of_state = [alarm_notice(alarm.key, alarm) for alarm in state_alarms(self._state) if alarm.key in loud]
        return of_state + [notice for key, notice in now.items() if notice.alarm in loud and key in self._standing]

    def _send(self, key: str, notices: tuple[Notice, ...], now_us: int) -> None:
        told_us, is_over = self._told_us.get(key), notices[-1].is_over
        came_and_went = is_over and len(notices) > 1  # within one group: told once, as both
        if is_over and told_us is None and not came_and_went:
            return
        if not is_over and told_us is not None and now_us - told_us < self._config.repeat_s * 1e6:
            return
        if is_over:
            self._told_us.pop(key, None)
        else:
            self._told_us[key] = now_us
        message = Notification(self._cluster, notices)
        rules = {notice.rule for notice in notices}
        for number, to in enumerate(self._config.to):
            if not to.rules or rules & set(to.rules):
                if len(self._queues[number]) == QUEUE_MAX:
                    log.error("notify: %s: more than %d messages wait; the oldest is lost", to.kind, QUEUE_MAX)
                self._queues[number].append(message)
                self._wake[number].set()

    # --- how it gets there -----------------------------------------------------------------------

    async def _carry(self, number: int) -> None:
        to, queue, wake = self._config.to[number], self._queues[number], self._wake[number]
        while True:
            await wake.wait()
            wake.clear()
            while queue:
                await self._try(number, to, queue.popleft())

    async def _try(self, number: int, to: Destination, message: Notification) -> None:
        began_us, pause_s = self._clock.monotonic_us(), 1.0
        while True:
            try:
                await self._courier(to, message)
                self._failures[number] = ""
                return
            except Undelivered as error:
                log.warning("notify: %s cannot be reached (%s); trying again", to.kind, error)
                self._failures[number] = f"notify.to[{number}]: {to.kind} cannot be reached: {error}"
            except Exception:
                log.exception("notify: %s", to.kind)
                return
            if self._clock.monotonic_us() - began_us > GIVE_UP_S * 1e6:
                log.error("ALARM: notify: %s did not get: %s", to.kind, message.title)
                return
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, PAUSE_MAX_S)

    async def _beat(self, condition: Callable[[], Mapping[str, Any]]) -> None:
        timeout = aiohttp.ClientTimeout(total=min(10.0, self._config.heartbeat_s))
        while True:
            if condition()["status"] == "live":
                try:
                    async with (
                        aiohttp.ClientSession(timeout=timeout) as session,
                        session.get(self._config.heartbeat_url) as answer,
                    ):
                        await answer.read()
                except (aiohttp.ClientError, TimeoutError, OSError) as error:
                    log.warning("notify: the heartbeat was not taken (%s)", type(error).__name__)
            await asyncio.sleep(self._config.heartbeat_s)
