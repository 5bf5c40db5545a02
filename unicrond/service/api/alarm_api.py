"""The routes about alarms: which stand, and what people do about them.

    GET  /v1/alarms                        the alarms that stand, of this head and of the state (display/alarms.py)
    POST /v1/alarms/ALARM/acknowledge      {"reason"}
    POST /v1/alarms/ALARM/silence          {"for_s", "reason"}
    POST /v1/alarms/ALARM/assign           {"person", "reason"}

ALARM is a name, or name:subject. One that does not stand cannot be acknowledged: what a person sees may be over by now.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeAlias

from aiohttp import web
from prometheus_client.core import GaugeMetricFamily, Metric

from unicrond.core.rules.fault_targets import OrderRefused
from unicrond.core.rules.requests import silence_problem
from unicrond.core.state.alarms import Alarm
from unicrond.display.alarms import alarm_rows
from unicrond.events.vocabulary import AlarmAcknowledged, AlarmAssigned, AlarmSilenced
from unicrond.page.attention import state_alarms
from unicrond.service.api.http_parts import answer, body_of, error
from unicrond.service.api.redaction import mask_of, redact
from unicrond.service.api.request_bodies import AssignOrder, Reason, SilenceOrder
from unicrond.service.coordinator.coordinator import Coordinator

_REASON = "requested by an operator"
Append: TypeAlias = Callable[
    [AlarmAcknowledged | AlarmSilenced | AlarmAssigned, dict[str, object], int], Awaitable[web.Response]
]


class AlarmApi:
    """The routes, over one coordinator. `append`: puts a request of the caller into the log, and answers."""

    def __init__(self, coordinator: Coordinator, append: Append) -> None:
        self._coordinator = coordinator
        self._append = append

    def routes(self) -> list[web.RouteDef]:
        """Return the routes."""
        return [
            web.get("/v1/alarms", self.alarms),
            web.post("/v1/alarms/{alarm}/acknowledge", self.acknowledge),
            web.post("/v1/alarms/{alarm}/silence", self.silence),
            web.post("/v1/alarms/{alarm}/assign", self.assign),
        ]

    def of_head(self) -> list[dict[str, Any]]:
        """Return the alarms of this head alone, for /healthz."""
        return self._rows(self._coordinator.standing_alarms())

    def metrics(self) -> Iterator[Metric]:
        """Yield the metric of the alarms."""
        family = GaugeMetricFamily("unicron_alarm", "1 for each alarm that stands", labels=["alarm", "quiet"])
        for row in self._rows(self._standing()):
            family.add_metric([row["alarm"], "1" if row.get("is_quiet") else "0"], 1.0)
        yield family

    async def alarms(self, _: web.Request) -> web.Response:
        """Answer with all alarms that stand, those that are not quiet first."""
        return answer({"alarms": self._rows(self._standing())})

    async def acknowledge(self, request: web.Request) -> web.Response:
        """Record that the caller has seen the alarm."""
        alarm = self._key(request)
        reason = (await body_of(request, Reason)).reason or _REASON
        return await self._append(AlarmAcknowledged(alarm=alarm, reason=reason), {"alarm": alarm}, 202)

    async def silence(self, request: web.Request) -> web.Response:
        """Have the alarm notify nobody for a while."""
        alarm = self._key(request)
        order = await body_of(request, SilenceOrder)
        event = AlarmSilenced(alarm=alarm, for_us=order.for_us, reason=order.reason or _REASON)
        if problem := silence_problem(event):
            return error(400, problem)
        return await self._append(event, {"alarm": alarm, "for_s": order.for_s}, 202)

    async def assign(self, request: web.Request) -> web.Response:
        """Record whose the alarm is."""
        alarm = self._key(request)
        order = await body_of(request, AssignOrder)
        event = AlarmAssigned(alarm=alarm, person=order.person, reason=order.reason or _REASON)
        return await self._append(event, {"alarm": alarm, "person": order.person}, 202)

    def _standing(self) -> list[Alarm]:
        return [*self._coordinator.standing_alarms(), *state_alarms(self._coordinator.state)]

    def _rows(self, alarms: list[Alarm]) -> list[dict[str, Any]]:
        state = self._coordinator.state
        rows: list[dict[str, Any]] = redact(alarm_rows(state, alarms, self._coordinator.now_us()), mask_of(state).text)
        return rows

    def _key(self, request: web.Request) -> str:
        key = request.match_info["alarm"]
        if key not in {alarm.key for alarm in self._standing()}:
            raise OrderRefused(404, f"alarm: no alarm {key[:127]} stands; see `unicronctl alarms`")
        return key


def without_people(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of alarms without what people did about them: for probes, which need no token."""
    return [{name: row[name] for name in ("alarm", "text", "is_quiet") if name in row} for row in rows]
