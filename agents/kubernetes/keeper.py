"""Keeps a machine's Node object and the log in step: the object's demands go to the log, an isolation to the object.

* The keeper reads the object at the start and after each watch, and watches it in between. It passes the
  object's hold to the core; the core reports each change to the log (agents/core/joining.py).
* The log is asked every LOOK_EVERY_S, and when the coordinator decides about the node. Taint and condition are written
  once for each change; a write that the API server refuses is tried again, and logged once.
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
from typing import NamedTuple

from unicrond.agents.kubernetes.api import MERGE, STRATEGIC, NodeApi
from unicrond.agents.kubernetes.node_object import CordonMeans, Hold, condition_patch, has_taint, hold_of, taint_patch
from unicrond.events.host.kubernetes_account import KubernetesError
from unicrond.events.log.subjects import EVENT_STREAM, standing_subjects
from unicrond.events.nats.connection import Connection, NoReply
from unicrond.events.vocabulary import Name, NodeIsolated
from unicrond.events.wire.codec import BadEvent, decode

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 30.0
_AGAIN_S = 1.0
_AGAIN_MAX_S = 30.0
_CONFLICT = 409


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

    async def run(self, connection: Connection) -> None:
        """Keep both in step until cancelled; never raise."""
        try:
            await asyncio.gather(self._read(), self._write(connection))
        finally:
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

    def _report_hold(self, node: dict[str, object]) -> None:
        self._on_hold(hold_of(node, self._means))

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
        isolated = bool(now.isolated)
        for _ in range(5):
            node = await self._api.get()
            if has_taint(node) == isolated:
                break
            try:
                await self._api.patch(taint_patch(node, isolated=isolated), MERGE)
                logger.info("this machine's taint for an isolation is %s", "set" if isolated else "taken away")
                break
            except KubernetesError as error:
                if error.status != _CONFLICT:  # somebody else has written: look again
                    raise
        at = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        await self._api.patch(condition_patch(isolated=isolated, reason=now.reason, now=at), STRATEGIC, status=True)

    def _say(self, text: str) -> None:
        level = logging.DEBUG if text == self._last_warning else logging.WARNING
        self._last_warning = text
        logger.log(level, "%s; trying again", text)
