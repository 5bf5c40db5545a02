"""Keeps both in step: what the Node object says goes into the log, an isolation goes into the Node object.

* The keeper reads the object at the start and after each watch, and watches it in between. It tells the core what the
  object says; the core tells the log each change (agents/handling/joining.py).
* The log is asked every LOOK_EVERY_S, and when the coordinator says something of the node. Taint and condition are
  written once for each change; what the API server refuses is tried again, and said once.
* Whatever fails here costs the cluster nothing: the agent works on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from datetime import UTC, datetime

from agents.kubernetes.api import MERGE, STRATEGIC, KubernetesError, NodeApi
from agents.kubernetes.node_object import (
    CordonMeans,
    Held,
    condition_patch,
    has_taint,
    held,
    taint_patch,
)
from agents.kubernetes.standing import Standing, standing
from events.nats_connection import Connection, Unanswered
from events.subjects import standing_subjects
from events.vocabulary import Name

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 30.0
_AGAIN_S = 1.0
_AGAIN_MAX_S = 30.0
_CONFLICT = 409


class KubernetesNode:
    """`saw`: told what the machine is held for, in the loop."""

    def __init__(self, api: NodeApi, node: Name, cordon_means: CordonMeans, saw: Callable[[Held], object]) -> None:
        self._api = api
        self._node = node
        self._means = cordon_means
        self._saw = saw
        self._said = ""
        self._look = asyncio.Event()

    async def run(self, connection: Connection) -> None:
        """Until cancelled; never raises."""
        try:
            await asyncio.gather(self._read(), self._write(connection))
        finally:
            await self._api.close()

    async def _read(self) -> None:
        pause_s = _AGAIN_S
        while True:
            try:
                found = await self._api.get()
                self._found(found)
                pause_s = _AGAIN_S
                version = str((found.get("metadata") or {}).get("resourceVersion", ""))
                async for changed in self._api.watch(version):
                    self._found(changed)
            except KubernetesError as error:
                self._say(f"cannot read this machine's Node object: {error}")
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _AGAIN_MAX_S)
            else:
                await asyncio.sleep(_AGAIN_S / 10)  # a server that ends watches at once is not asked in a circle

    def _found(self, node: dict[str, object]) -> None:
        self._saw(held(node, self._means))

    async def _write(self, connection: Connection) -> None:
        async def heard(_: object) -> None:
            self._look.set()

        for subject in standing_subjects(self._node):
            await connection.subscribe(subject, heard)
        written: Standing | None = None
        while True:
            self._look.clear()
            try:
                now = await standing(connection, self._node)
                if now.isolated is not None and now != written:
                    await self._tell(now)
                    written = now
            except Unanswered as error:
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
        level = logging.DEBUG if text == self._said else logging.WARNING
        self._said = text
        logger.log(level, "%s; trying again", text)
