"""Keeps a machine's Node object and the log in step: the object's demands go to the log, an isolation to the object.

* The keeper reads the object at the start and after each watch, and watches it in between. It passes the
  object's hold to the core; the core reports each change to the log (agents/core/joining.py).
* The log is asked every LOOK_EVERY_S, and when the coordinator decides about the node. Taint and condition are written
  once for each change; a write that the API server refuses is tried again, and logged once.
* That the API server has not heard of the kubelet (Ready is Unknown) is reported once it has stood for UNKNOWN_S: after
  an outage of the API server all machines are so for some seconds, and none is cordoned for that.
* Isolation, readmission, and what the object demands stand as Events about the Node too, once for each change. One that
  the API server refuses is logged once, and not tried again.
* Whether this cluster has isolated the node is in the last NodeIsolated, NodeReadmitted and NodeForgotten of the node,
  which only the coordinator writes (events/trust/logins.py); the latest counts. Where none is in the stream any more,
  nothing is known.
* A failure here costs the cluster nothing: the agent works on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, NamedTuple

from unicrond.agents.kubernetes.api import MERGE, STRATEGIC, NodeApi
from unicrond.agents.kubernetes.node_object import (
    CordonMeans,
    Hold,
    condition_patch,
    event_about,
    has_taint,
    hold_of,
    is_marked,
    is_unknown,
    taint_patch,
)
from unicrond.events.host.kubernetes_account import KubernetesError
from unicrond.events.log.subjects import EVENT_STREAM, standing_subjects
from unicrond.events.nats.connection import Connection, NoReply
from unicrond.events.vocabulary import Name, NodeIsolated
from unicrond.events.wire.codec import BadEvent, decode

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 30.0
#: How long Ready may be Unknown; a machine that is down is found by its heartbeats.
UNKNOWN_S = 30.0
#: Reason and sentence of the Event about a hold.
_HOLD_EVENTS = {
    "drain": ("UnicronDraining", "unicrond moves its workers away: {}"),
    "cordon": ("UnicronCordoned", "unicrond starts no more workers here: {}"),
    "": ("UnicronInService", "unicrond gives the node workers again"),
}
_AGAIN_S = 1.0
_AGAIN_MAX_S = 30.0
_CONFLICT = 409
#: Events that wait for the API server.
_EVENTS_MAX = 16


class Standing(NamedTuple):
    """Whether this cluster has isolated the node, and why. `isolated`: None where the log does not say."""

    isolated: bool | None
    reason: str


async def standing(connection: Connection, node: Name) -> Standing:
    """Read from the log whether the node is isolated. Raise NoReply (PublishDenied)."""
    last, latest = 0, Standing(None, "")
    for subject in standing_subjects(node):
        answer = await connection.request(f"$JS.API.DIRECT.GET.{EVENT_STREAM}.{subject}", b"")
        seq = int((answer.headers or {}).get("Nats-Sequence", 0))
        if not answer.data or seq <= last:
            continue
        try:
            event = decode(answer.data).event
        except BadEvent:
            continue
        is_isolated = isinstance(event, NodeIsolated)
        last, latest = seq, Standing(is_isolated, event.reason if is_isolated else "")  # type: ignore[union-attr]  # tested just above
    return latest


class KubernetesNode:
    """Keeps the Node object and the log in step. `on_hold` is called in the loop with the machine's hold."""

    def __init__(self, api: NodeApi, node: Name, cordon_means: CordonMeans, on_hold: Callable[[Hold], object]) -> None:
        self._api = api
        self._node = node
        self._means = cordon_means
        self._on_hold = on_hold
        self._last_warning = ""
        self._look = asyncio.Event()
        #: The hold that was reported last.
        self._hold = Hold("", "")
        self._object: dict[str, Any] = {}
        self._unknown_timer: asyncio.TimerHandle | None = None
        self._is_unknown = False
        self._events: asyncio.Queue[dict[str, Any]] = asyncio.Queue(_EVENTS_MAX)

    async def run(self, connection: Connection) -> None:
        """Keep both in step until cancelled; never raise."""
        try:
            await asyncio.gather(self._read(), self._write(connection), self._tell_events())
        finally:
            self._wait_no_more()
            await self._api.close()

    async def _read(self) -> None:
        pause_s = _AGAIN_S
        while True:
            try:
                node = await self._api.get()
                self._report_hold(node)
                pause_s = _AGAIN_S
                version = str((node.get("metadata") or {}).get("resourceVersion", ""))
                async for change in self._api.watch(version):
                    self._report_hold(change)
            except KubernetesError as error:
                self._say(f"cannot read this machine's Node object: {error}")
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _AGAIN_MAX_S)
            else:
                await asyncio.sleep(_AGAIN_S / 10)  # a server that ends watches at once is not asked in a busy loop

    def _report_hold(self, node: dict[str, Any]) -> None:
        self._object = node
        hold = hold_of(node, self._means)
        if not is_unknown(node):
            self._is_unknown = False
            self._wait_no_more()
        elif hold == hold_of({"status": node.get("status")}, self._means) and not self._is_unknown:
            if self._unknown_timer is None:
                loop = asyncio.get_running_loop()
                self._unknown_timer = loop.call_later(UNKNOWN_S, self._believe_unknown)
            hold = Hold("", "")
        if hold != self._hold:
            kind, sentence = _HOLD_EVENTS[hold.hold]
            self._put_event(node, kind, sentence.format(hold.reason), is_warning=False)
        self._hold = hold
        self._on_hold(hold)

    def _believe_unknown(self) -> None:
        self._unknown_timer, self._is_unknown = None, True
        self._report_hold(self._object)

    def _wait_no_more(self) -> None:
        if self._unknown_timer is not None:
            self._unknown_timer.cancel()
            self._unknown_timer = None

    def _put_event(self, node: dict[str, Any], kind: str, message: str, *, is_warning: bool) -> None:
        if not self._events.full():  # an API server that is away: the newest are left out
            self._events.put_nowait(event_about(node, kind, message, is_warning=is_warning, now=_now()))

    async def _tell_events(self) -> None:
        while True:
            event = await self._events.get()
            try:
                await self._api.add_event(event)
            except KubernetesError as error:
                self._say(f"cannot write an Event about this machine: {error}", again=False)

    async def _write(self, connection: Connection) -> None:
        async def on_decision(_: object) -> None:
            self._look.set()

        for subject in standing_subjects(self._node):
            await connection.subscribe(subject, on_decision)
        last_written: Standing | None = None
        while True:
            self._look.clear()
            try:
                now = await standing(connection, self._node)
                if now.isolated is not None and now != last_written:
                    await self._tell(now)
                    last_written = now
            except NoReply as error:
                self._say(f"cannot ask the log whether this node is isolated: {error}")
            except KubernetesError as error:
                self._say(f"cannot write an isolation into this machine's Node object: {error}")
            try:
                async with asyncio.timeout(LOOK_EVERY_S):
                    await self._look.wait()
            except TimeoutError:
                pass

    async def _tell(self, now: Standing) -> None:
        isolated, was_marked = bool(now.isolated), False
        for _ in range(5):
            node = await self._api.get()
            was_marked = is_marked(node)
            if has_taint(node) == isolated:
                break
            try:
                await self._api.patch(taint_patch(node, isolated=isolated), MERGE)
                logger.info("this machine's taint for an isolation is %s", "set" if isolated else "taken away")
                break
            except KubernetesError as error:
                if error.status != _CONFLICT:  # somebody else has written: look again
                    raise
        patch = condition_patch(isolated=isolated, reason=now.reason, now=_now())
        node = await self._api.patch(patch, STRATEGIC, status=True)
        if isolated and not was_marked:
            self._put_event(node, "UnicronIsolated", f"unicrond gives it no workers: {now.reason}", is_warning=True)
        elif was_marked and not isolated:
            self._put_event(node, "UnicronReadmitted", "unicrond gives the node workers again", is_warning=False)

    def _say(self, text: str, *, again: bool = True) -> None:
        level = logging.DEBUG if text == self._last_warning else logging.WARNING
        self._last_warning = text
        logger.log(level, "%s%s", text, "; trying again" if again else "")


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
