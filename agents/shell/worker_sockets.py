"""Serves the Unix socket on which workers talk to the agent: one connection for each worker, the newest one counts.

The fork server makes a worker's connection and names the worker: a worker cannot speak in another one's name. (Workers
of an older fork server connect themselves, as this user.)

A worker that says more than READING (core/worker_budgets.py) allows is read no further for a while: what it says then
stays with the kernel, and after that with the worker. That holds over its connections, and each of them counts as well.

The socket's file may be unlinked (by a cleaner of temporary files). Connected workers do not notice; a worker
that starts later would find no agent, and end after the lease. So the file is checked regularly, and bound again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from unicrond.agents.core.worker_budgets import GREETING_FRAMES, READING
from unicrond.agents.host.paths import BoundPath
from unicrond.agents.protocol.framing import BadFrame, Unframer, frame
from unicrond.agents.protocol.messages import MAX_REPORT_BYTES, ConnectionOwner, FromWorker, Hello, ToWorker
from unicrond.agents.protocol.worker_line import peer_uid
from unicrond.events.vocabulary import WorkerId

logger = logging.getLogger(__name__)

#: Nothing waits for a worker that does not read; beyond this it is cut off (it connects again and gets all anew).
_MAX_UNREAD_BYTES = 16 * 1024 * 1024
_LOOK_EVERY_S = 1.0
#: What is read at once: others wait for so long.
READ_BYTES = 16 * 1024
#: A pause is no shorter, so that there are few.
_PAUSE_MIN_S = 0.05


class WorkerSockets:
    """The workers' connections. `on_connected` is called before any message of a connection; `on_disconnected` for the
    newest one only; `on_held_up` with the number of frames that were read late."""

    def __init__(
        self,
        path: Path,
        *,
        on_connected: Callable[[Hello], None],
        on_message: Callable[[WorkerId, FromWorker], None],
        on_disconnected: Callable[[WorkerId], None],
        on_held_up: Callable[[WorkerId, int], None] = lambda _worker, _frames: None,
        look_every_s: float = _LOOK_EVERY_S,
    ) -> None:
        self._path = path
        self._on_connected = on_connected
        self._on_message = on_message
        self._on_disconnected = on_disconnected
        self._on_held_up = on_held_up
        #: Until when each worker's frames are paid for (Bucket).
        self._read_us: dict[WorkerId, int] = {}
        self._writers: dict[WorkerId, asyncio.StreamWriter] = {}
        #: The connections that the fork server has made; a worker has one at a time.
        self._assigned_writers: dict[WorkerId, asyncio.StreamWriter] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._bound: BoundPath | None = None
        self._look_every_s = look_every_s
        self._looking: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen; a socket file that an earlier agent left is replaced. Raise OSError."""
        await self._bind()
        self._looking = asyncio.create_task(self._stay_bound(), name="agent.sock")

    async def _bind(self) -> None:
        if self._server is not None:
            self._server.close()
        self._path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._accepted, str(self._path), backlog=256)
        self._path.chmod(0o600)
        self._bound = BoundPath(self._path)

    async def _stay_bound(self) -> None:
        last_error = ""
        while True:
            await asyncio.sleep(self._look_every_s)
            if self._bound is not None and self._bound.holds():
                continue
            try:
                await self._bind()
            except OSError as error:
                if str(error) != last_error:
                    logger.error("%s is gone and cannot be bound again: %s", self._path, error)
                last_error, self._bound = str(error), None
            else:
                last_error = ""
                logger.warning("%s was gone: bound it again; connected workers are not affected", self._path)

    async def close(self) -> None:
        """Stop listening and close all connections; workers notice and look for the next agent."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._path.unlink(missing_ok=True)

    def send(self, worker: WorkerId, message: ToWorker) -> None:
        """Send to a worker if it is connected; if not, its next Hello is answered with what it must know."""
        writer = self._writers.get(worker)
        if writer is None or writer.is_closing():
            return
        writer.write(frame(message))
        if writer.transport.get_write_buffer_size() > _MAX_UNREAD_BYTES:
            logger.error("%s does not read its messages: disconnecting it", worker)
            writer.transport.abort()

    def disconnect(self, worker: WorkerId) -> None:
        """Close a worker's connection."""
        writer = self._writers.pop(worker, None)
        if writer is not None:
            writer.close()

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if (uid := peer_uid(writer.get_extra_info("socket"))) != os.getuid():
            logger.warning("refused a connection of uid %d: it is not this user's", uid)
            writer.close()
            return
        try:
            await self._serve(reader, writer)
        except asyncio.CancelledError:
            pass  # close() ends this loop; no reader waits for more
        finally:
            writer.close()
            with contextlib.suppress(OSError, asyncio.CancelledError):
                await writer.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        incoming: Unframer[FromWorker | ConnectionOwner] = Unframer(FromWorker | ConnectionOwner, MAX_REPORT_BYTES)
        worker = ""
        owner: ConnectionOwner | None = None
        reason = "end of stream"
        try:
            while data := await reader.read(READ_BYTES):
                frames_before = incoming.frames
                for message in incoming.feed(data):
                    if isinstance(message, ConnectionOwner):
                        owner = self._assign(message, owner, worker, writer)
                    elif isinstance(message, Hello) and not worker:
                        _require_owner(owner, message)
                        worker = message.worker
                        self._greet(message, writer)
                    elif not worker or isinstance(message, Hello):
                        raise BadFrame(
                            f"{type(message).__name__}: the first message must be a Hello, and no other one may be"
                        )
                    elif self._writers.get(worker) is writer:
                        self._on_message(worker, message)
                await self._hold_up(owner.worker if owner else worker, incoming.frames - frames_before, len(data))
        except BadFrame as error:
            reason = f"bad frame: {error}"
            logger.error("%s: closing its connection, %s", worker or "an unknown worker", reason)
        except OSError as error:
            reason = error.strerror or type(error).__name__
        finally:
            if owner and self._assigned_writers.get(owner.worker) is writer:
                del self._assigned_writers[owner.worker]
            if worker and self._writers.get(worker) is writer:
                del self._writers[worker]
                logger.info("%s has disconnected (%s)", worker, reason)
                self._on_disconnected(worker)

    async def _hold_up(self, worker: str, frames: int, size_bytes: int) -> None:
        """Wait until the worker may say more."""
        now_us = time.monotonic_ns() // 1000
        paid_us = READING.paid_us(self._read_us.get(worker, 0), now_us, frames + size_bytes // 4096)
        self._read_us[worker] = paid_us
        if pause_us := READING.pause_us(paid_us, now_us):
            if worker in self._writers:
                self._on_held_up(worker, frames)
            await asyncio.sleep(max(pause_us / 1e6, _PAUSE_MIN_S))

    def _assign(
        self, message: ConnectionOwner, before: ConnectionOwner | None, worker: str, writer: asyncio.StreamWriter
    ) -> ConnectionOwner:
        """Assign this connection to the worker that the fork server names, and close the worker's older one. Return the
        message."""
        if worker or before is not None:
            raise BadFrame("ConnectionOwner: only the fork server says it, first of all")
        older = self._assigned_writers.pop(message.worker, None)
        if older is not None:
            older.close()
        self._assigned_writers[message.worker] = writer
        return message

    def _greet(self, hello: Hello, writer: asyncio.StreamWriter) -> None:
        now_us = time.monotonic_ns() // 1000
        self._read_us = {worker: paid_us for worker, paid_us in self._read_us.items() if paid_us > now_us}
        self._read_us[hello.worker] = READING.paid_us(self._read_us.get(hello.worker, 0), now_us, GREETING_FRAMES)
        older = self._writers.get(hello.worker)
        self._writers[hello.worker] = writer
        if older is not None:
            older.close()
        self._on_connected(hello)


def _require_owner(owner: ConnectionOwner | None, hello: Hello) -> None:
    if owner and (owner.worker, owner.task, owner.pid) != (hello.worker, hello.task, hello.pid):
        raise BadFrame(f"says it is {hello.worker} of process {hello.pid}, and was given to {owner.worker}")
