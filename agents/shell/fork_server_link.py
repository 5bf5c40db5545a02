"""Connects the agent to its fork server: finds a living one or starts one, and tells a broken connection from a death.

Rules
-----
* A fork server that serves the run directory is adopted; one is started only where none answers.
* Nothing is sent before the inventory of the present connection has come: what the core asked for on an older
  connection is settled by that inventory, and would be done twice otherwise.
* A fork server that separates users where the agent does not, or the other way round, ends as soon as it has no
  workers: until then no worker is started.
* When the connection ends, the process's pidfd says whether the process has: the core hears of its death at once
  (its workers died with it), before the next one has loaded torch; alive means connect again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from unicrond.agents.fork_server.server import EXIT_OCCUPIED, READY
from unicrond.agents.host.rotated_output import MAX_BYTES, tail
from unicrond.agents.protocol.framing import BadFrame, Unframer, frame
from unicrond.agents.protocol.messages import FromForkServer, Inventory, Retire, Sum, ToForkServer
from unicrond.agents.shell.run_dir import RunDir
from unicrond.events.wire.schemas import FIRST

logger = logging.getLogger(__name__)

#: A dead process closes its sockets a little before its pidfd tells.
_DEATH_WAIT_S = 1.0
_RETIRE_WAIT_S = 8.0
_PAUSE_MIN_S = 0.1
_PAUSE_MAX_S = 10.0
_START_TIMEOUT_S = 120.0
#: torch's and numpy's thread pools are sized when they are loaded, in the fork server.
_ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
#: Asking whether there is a GPU must not initialise CUDA: a process with CUDA cannot fork workers that use it.
_NO_CUDA = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


class ForkServerFailed(RuntimeError):
    """The fork server did not come up; the text holds the end of its log."""


class ForkLink:
    """The agent's connection to the fork server. Calls `on_message` and `on_death` in the event loop.

    `arguments`: further flags of unicrond.agents.fork_server.server. `environment`: the variables of this process that
    the fork server, and so every worker, sees. `separates`: it is to run workers as other users.
    """

    def __init__(
        self,
        run_dir: RunDir,
        *,
        arguments: Sequence[str],
        on_message: Callable[[FromForkServer], None],
        on_death: Callable[[], None],
        environment: Mapping[str, str] = os.environ,
        separates: bool = False,
    ) -> None:
        self._run_dir = run_dir
        self._environment = environment
        self._separates = separates
        self._is_unfit = False
        #: The schema of the log's vocabulary that the fork server reads.
        self.schema = FIRST
        self._arguments = list(arguments)
        self._on_message = on_message
        self._on_death = on_death
        self._writer: asyncio.StreamWriter | None = None
        self._is_usable = False
        #: Why no fork server serves, in one line; "" while one serves or starts.
        self.trouble = ""
        self._pidfd = -1
        #: The process that is connected to, or was last.
        self.pid = 0
        self._child: subprocess.Popen[bytes] | None = None
        #: The same, until it serves: it has no workers, and reads no message yet.
        self._starting: subprocess.Popen[bytes] | None = None
        self._is_retiring = False

    @property
    def serves(self) -> bool:
        """Return whether the fork server is connected and takes orders."""
        return self._is_usable

    def send(self, message: ToForkServer) -> None:
        """Send on the present connection; without one the message is lost, and the next inventory settles it."""
        if self._writer is not None and self._is_usable and not self._writer.is_closing():
            self._writer.write(frame(message))

    def sum(self, order: Sum) -> str:
        """Send the order to sum; return "", or why that is impossible."""
        if not self._is_usable:
            return self.trouble or "the fork server does not run yet"
        self.send(order)
        return ""

    def kill(self) -> None:
        """Send SIGKILL to the fork server: its workers and the store die with it."""
        if self._pidfd >= 0:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def renew(self) -> None:
        """Retire a fork server that does not fit; called when there are no workers."""
        if self._is_unfit:
            self.send(Retire())

    def retire(self) -> None:
        """Have the fork server kill its workers and end; `run` returns once it has. One that imports is killed."""
        self._is_retiring = True
        if self._starting is not None:
            self._starting.kill()
        self.send(Retire())

    async def run(self) -> None:
        """Keep a fork server and a connection to it, until retired. Cancelled, it leaves the fork server alive."""
        pause_s = _PAUSE_MIN_S
        while True:
            try:
                reader = await self._connect()
            except (OSError, ForkServerFailed) as error:
                if self._is_retiring and isinstance(error, ForkServerFailed):
                    return
                self.trouble = f"no fork server: {' '.join(str(error).split())}"
                logger.error("no fork server: %s; trying again in %.1f s", error, pause_s)
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2, _PAUSE_MAX_S)
                continue
            pause_s, self.trouble = _PAUSE_MIN_S, ""
            try:
                reason = await self._read(reader)
            finally:
                self._disconnect()
            has_ended = await self._ended(_RETIRE_WAIT_S if self._is_retiring else _DEATH_WAIT_S)
            if self._is_retiring:
                self._forget_process()
                return
            if has_ended:
                logger.error("the fork server ended (%s) and its workers with it; starting another", reason)
                self._forget_process()
                self._on_death()
            else:
                logger.warning("the connection to the fork server broke (%s); connecting again", reason)

    async def _ended(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` for the end of the fork server's process; return whether it has ended."""
        if self._pidfd < 0:
            return True
        loop = asyncio.get_running_loop()
        over = asyncio.Event()
        loop.add_reader(self._pidfd, over.set)
        try:
            async with asyncio.timeout(timeout_s):
                await over.wait()
        except TimeoutError:
            return False
        finally:
            loop.remove_reader(self._pidfd)
        return True

    # --- connecting ------------------------------------------------------------------------------

    async def _connect(self) -> asyncio.StreamReader:
        path = str(self._run_dir.fork_socket)
        try:
            reader, writer = await asyncio.open_unix_connection(path)
        except (FileNotFoundError, ConnectionRefusedError):
            if self._is_retiring:
                raise ForkServerFailed("none is wanted any more") from None
            await self._start()
            reader, writer = await asyncio.open_unix_connection(path)
        self._forget_process()
        self._writer = writer
        pid = self.pid = _peer_pid(writer.get_extra_info("socket"))
        with contextlib.suppress(ProcessLookupError):  # it has ended already: the end of the stream tells
            self._pidfd = os.pidfd_open(pid)
        logger.info("connected to the fork server (pid %d)", pid)
        return reader

    async def _start(self) -> None:
        """Start a fork server and wait until it serves. Raise ForkServerFailed if it ends or takes too long."""
        begun_s = time.monotonic()
        self._reap()
        ready_fd, write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            try:
                child = self._child = self._starting = self._launch(write_fd)
            finally:
                os.close(write_fd)
            is_ready = await _says_ready(ready_fd)
        finally:
            self._starting = None
            os.close(ready_fd)
        if is_ready:
            logger.info("started a fork server (pid %d) in %.1f s", child.pid, time.monotonic() - begun_s)
            return
        code = await asyncio.to_thread(child.wait)
        if code == EXIT_OCCUPIED:
            raise ForkServerFailed("another fork server is starting in this run directory")
        log_end = tail(self._run_dir.fork_server_log, 2048).decode(errors="replace").strip()
        raise ForkServerFailed(f"it ended with code {code} before it served; its log ends with:\n{log_end}")

    def _launch(self, write_fd: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", "-m", "unicrond.agents.fork_server", "--run-dir", str(self._run_dir.path)]
        command += [*self._arguments, "--ready-fd", str(write_fd)]
        path = self._run_dir.fork_server_log
        if path.exists() and path.stat().st_size > MAX_BYTES:
            path.replace(path.with_name(f"{path.name}.1"))
        with path.open("ab") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # it outlives us, and no terminal's Ctrl-C is for it
                pass_fds=(write_fd,),
                env=dict.fromkeys(_ONE_THREAD, "1") | _NO_CUDA | dict(self._environment),
            )

    def _reap(self) -> None:
        if self._child is not None and self._child.poll() is not None:
            self._child = None

    # --- reading ---------------------------------------------------------------------------------

    async def _read(self, reader: asyncio.StreamReader) -> str:
        """Pass messages on until the connection ends; return why it did."""
        incoming: Unframer[FromForkServer] = Unframer(FromForkServer)
        try:
            while data := await reader.read(65536):
                for message in incoming.feed(data):
                    if isinstance(message, Inventory):
                        self._is_usable = True
                        self.schema = message.schema
                        self._compare(message)
                        if self._is_retiring or (self._is_unfit and not message.workers):
                            self.send(Retire())
                    self._on_message(message)
        except BadFrame as error:
            return f"bad frame: {error}"
        except OSError as error:
            return error.strerror or type(error).__name__
        return "end of stream"

    def _compare(self, inventory: Inventory) -> None:
        self._is_unfit = inventory.separates != self._separates
        if self._is_unfit:
            logger.warning(
                "the fork server %s run workers as other users, unlike this agent's (--run-as): %s",
                "can" if inventory.separates else "cannot",
                "another starts when its workers have ended, and no worker before"
                if inventory.workers
                else "replacing it",
            )

    def _disconnect(self) -> None:
        self._is_usable = False
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _forget_process(self) -> None:
        self._reap()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


async def _says_ready(fd: int) -> bool:
    """Return whether READY comes before the end of the stream. Raise ForkServerFailed after _START_TIMEOUT_S."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(fd, readable.set)
    try:
        async with asyncio.timeout(_START_TIMEOUT_S):
            await readable.wait()
    except TimeoutError:
        raise ForkServerFailed(f"it did not serve within {_START_TIMEOUT_S:g} s") from None
    finally:
        loop.remove_reader(fd)
    return os.read(fd, len(READY)) == READY


def _peer_pid(connection: socket.socket) -> int:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[0])
