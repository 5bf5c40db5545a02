"""An embedded nats-server: a process of its own that outlives us and is adopted by the next of us.

Rules
-----
* Everything about a server is in its directory: configuration, store, log, pid file, ports file. Who
  opens the same directory finds the same server.
* Where other machines may mount the directory, a lease beside it keeps a second server away (store_directory_lock.py).
* A pid alone proves nothing. A server is ours if the process's program is a nats-server and it was
  started with the configuration file of this directory.
* It is started from a program that was tested, or that the configuration names (server_program.py).
* Acknowledged means on disk: `sync_interval: always`.
* Without credentials it listens on loopback alone, since to publish a task is to run code.
* With certificates it speaks TLS. They are read again at a signal; connections stay as they are.
* One that is for this process alone ends with it, however that ends.
* Who may log in is in the configuration too, and in which account (`trust/accounts.py`). A running server takes a new
  list of users at a signal; it ends the connections of those that are no longer there, and no others.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import ipaddress
import json
import logging
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from unicrond.events.nats.connection import Login
from unicrond.events.nats.server_files import ServerTls as ServerTls
from unicrond.events.nats.server_files import for_clients, for_running, replace, tls_lines
from unicrond.events.nats.server_program import PROGRAM, UnknownProgram, trusted_program
from unicrond.events.nats.store_directory_lock import LOCK_FD, PID_FD, StoreClaim, StoreLease, keeper_words
from unicrond.events.trust.accounts import NatsAccount, server_accounts
from unicrond.events.trust.logins import User

logger = logging.getLogger(__name__)

#: Before it answers, a server reads its store again and each consumer: 2,000 consumers took it 9 s on two loaded cores.
READY_TIMEOUT_S = 180.0
_TELL_EVERY_S = 10.0
#: Becomes a program that is killed when its parent ends (PR_SET_PDEATHSIG). Arguments: the parent's pid, the program.
_BOUND = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); "
    "os.getppid() == int(sys.argv[1]) and os.execv(sys.argv[2], sys.argv[3:])"
)
STOP_TIMEOUT_S = 10.0
RELOAD_TIMEOUT_S = 10.0
#: So much of a stream waits to be stored; more are refused, and their writers try again. So what a node that
#: floods the server has left behind, when its login ends, is stored within a second.
BUFFERED_MESSAGES = 1024
BUFFERED_BYTES = 2 << 20
#: Beside the configuration: what a client on this machine has to know of the server's TLS.
CLIENT_FILE = "client.json"


class ServerError(RuntimeError):
    """The server did not start, or did not end; the message holds the end of its log."""


class EmbeddedServer:
    """The nats-server of one directory.

    `directory`: made if missing. `port` 0: any free one; `restart` keeps it. `login`: user and password
    that clients must give. `users`: who may log in with a key, and with which rights (logins.py); None: no keys. One of
    the two is needed for a `host` that is not loopback (ValueError); with both, the one login has every right.
    `tls`: None: in clear. `dies_with_us`: no next process adopts it. `lease`: of the directory, where others may mount
    it (store_directory_lock.py); `waits(why)` is called while another machine has it. `sha256`: of the program that may
    be started (server_program.py). `leafnodes`: user and password of a leafnode of the log's account, which connects to
    `leaf_port`; what such a server stores is not for long, and not synced.
    """

    def __init__(
        self,
        directory: Path,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        login: Login | None = None,
        users: Sequence[User] | None = None,
        tls: ServerTls | None = None,
        dies_with_us: bool = False,
        lease: StoreLease | None = None,
        waits: Callable[[str], object] = logger.warning,
        sha256: str = "",
        leafnodes: Login | None = None,
    ) -> None:
        if not 0 <= port <= 65535:
            raise ValueError(f"port: expected 0 to 65535, got {port}")
        if not _is_loopback(host) and users is None and not (login and login.user and login.passwords()):
            raise ValueError(f"host: {host} is not loopback; give login a user and a password, or use 127.0.0.1")
        self.directory = directory.resolve()
        self.host = host
        self.port = port
        self._login = login
        self._users = None if users is None else tuple(users)
        self._tls = tls
        self._dies_with_us = dies_with_us
        self._lease = lease
        self._waits = waits
        self._sha256 = sha256
        self._leafnodes = leafnodes
        self._keeper = 0
        self.pid: int | None = None

    @property
    def url(self) -> str:
        """Return nats://host:port of the running server, for clients on this machine."""
        host = self._own_host
        return f"nats://[{host}]:{self.port}" if ":" in host else f"nats://{host}:{self.port}"

    @property
    def _own_host(self) -> str:
        return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)

    @property
    def leaf_port(self) -> int:
        """Return the port for leafnodes of the running server. Only its log says it. Raises ServerError."""
        match = re.search(r"Listening for leafnode connections on \S+:(\d+)", self.log_path.read_text(errors="replace"))
        if match is None:
            raise ServerError(f"nats-server does not listen for leafnodes; {self._log_end()}")
        return int(match[1])

    @property
    def log_path(self) -> Path:
        """Return the server's own log."""
        return self.directory / "nats-server.log"

    async def start(self) -> bool:
        """Start the directory's server, or adopt the running one; return True if it was adopted. Returns when it is
        ready."""
        if await self.adopt():
            if self._users is not None or self._tls is not None:
                await self._reload()
            return True
        try:
            program = await asyncio.to_thread(trusted_program, self._sha256)
        except UnknownProgram as error:
            raise ServerError(str(error)) from None
        claim = await self._lease.take(self._waits) if self._lease is not None else None
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        for stale in (self._pid_path, *self.directory.glob("*.ports")):
            stale.unlink(missing_ok=True)
        self._write_config(self._config())
        self.pid = self._spawn(program) if claim is None else await asyncio.to_thread(self._keep, program, claim)
        await self._wait_ready()
        return False

    async def let_in(self, users: Sequence[User]) -> None:
        """Admit these users, and no other keys, from now on. Raises ServerError where the server refuses."""
        self._users = tuple(users)
        if self.is_running():
            await self._reload()

    async def renew(self) -> None:
        """Reload the server's certificates. Raises ServerError where it refuses them."""
        if self.is_running():
            await self._reload(is_forced=True)

    @classmethod
    def beside(cls, directory: Path) -> EmbeddedServer:
        """Return a handle on the server that another process keeps in `directory`, at the address that it was given."""
        server = cls(directory)
        with contextlib.suppress(OSError):
            if match := re.search(r'^host: "?([^"\n]+)', server._config_path.read_text(), re.MULTILINE):
                server.host = match[1]
        return server

    async def adopt(self) -> bool:
        """Take over the server that runs on this directory, if there is one; return whether there is."""
        pid = self._recorded_pid()
        if pid is None or not self._is_our_server(pid):
            return False
        self.pid = pid
        await self._wait_ready()
        return True

    async def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Stop it in good order; by force after `timeout_s`. Does nothing if it is not running."""
        if await self._end(signal.SIGTERM, timeout_s):
            return
        await self.kill()

    async def kill(self) -> None:
        """Send SIGKILL, and wait for the process to end."""
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
        """Say whether the process lives."""
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

    async def _reload(self, *, is_forced: bool = False) -> None:
        """Have the running server apply our users and certificates. Only its log says whether it did."""
        before = self._config_path.read_text() if self._config_path.exists() else ""
        config = for_running(self._config(), before)
        if before == config and not is_forced:
            return
        self._write_config(config)
        assert self.pid is not None, "adopted"
        begin = self.log_path.stat().st_size
        os.kill(self.pid, signal.SIGHUP)
        deadline = time.monotonic() + RELOAD_TIMEOUT_S
        while time.monotonic() < deadline:
            with self.log_path.open("rb") as file:
                file.seek(begin)
                log_text = file.read().decode(errors="replace")
            if "Reloaded server configuration" in log_text:
                return
            if "Failed to reload" in log_text:
                break
            await asyncio.sleep(0.02)
        log_text = self._log_end()
        replace(self._config_path, before)  # else the next start would take it for done
        raise ServerError(
            f"nats-server has not taken the new users or certificates; kill {self.pid} ends it, and unicrond starts it "
            f"again with them; {log_text}"
        )

    def _write_config(self, config: str) -> None:
        """Write the configuration, all or nothing: a server may read it at any time."""
        replace(self.directory / CLIENT_FILE, json.dumps(for_clients(self._tls)))
        replace(self._config_path, config)

    def _config(self) -> str:
        """Return the whole configuration. JSON strings are valid in it."""
        quote, sync = json.dumps, "always" if self._leafnodes is None else "1m"
        lines = [
            "server_name: unicron",
            f"host: {quote(self.host)}",
            f"port: {self.port or -1}",
            f"pid_file: {quote(str(self._pid_path))}",
            f"ports_file_dir: {quote(str(self.directory))}",
            "max_payload: 1MB",
            f"jetstream {{ store_dir: {quote(str(self.directory / 'store'))}, sync_interval: {sync}, "
            f"max_buffered_msgs: {BUFFERED_MESSAGES}, max_buffered_size: {BUFFERED_BYTES} }}",
        ]
        if self._leafnodes is not None:
            leaf = {"user": self._leafnodes.user, "password": self._leafnodes.password, "account": NatsAccount.LOG}
            lines.append(f"leafnodes: {quote({'listen': '127.0.0.1:-1', 'authorization': leaf})}")
        shared = None
        if self._login is not None and self._login.user:
            shared = (self._login.user, next(iter(self._login.passwords()), ""))
        lines += server_accounts(self._users, shared)
        if self._tls is not None:
            lines += tls_lines(self._tls)
        return "\n".join(lines) + "\n"

    def _keep(self, program: Path, claim: StoreClaim) -> int:
        """Start a server whose parent keeps the lease; return the server's pid."""
        assert self._lease is not None, "taken"
        read_fd, pid_fd = os.pipe()
        high: list[int] = []
        try:
            words = [*keeper_words(self._lease.directory, claim, self._lease.times), str(program)]
            # To numbers that no descriptor of before can have been.
            pairs = ((claim.lock_fd, LOCK_FD), (pid_fd, PID_FD))
            high += [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd, _ in pairs]
            actions = [(os.POSIX_SPAWN_DUP2, fd, to) for fd, (_, to) in zip(high, pairs, strict=True)]
            self._keeper = self._run(Path(sys.executable), [*words, *self._words], actions)
            os.close(pid_fd)
            pid_fd = -1
            pid_text = os.read(read_fd, 32)
        finally:
            for fd in (read_fd, pid_fd, claim.lock_fd, *high):
                if fd >= 0:
                    os.close(fd)
        if not pid_text:
            raise ServerError(f"the keeper of the store's lease ended at once; {self._log_end()}")
        return int(pid_text)

    @property
    def _words(self) -> list[str]:
        return [PROGRAM, "--config", str(self._config_path)]

    def _run(self, program: Path, words: list[str], actions: Sequence[Any] = ()) -> int:
        """Start a process by posix_spawn: a subprocess object would want to wait for it."""
        return os.posix_spawn(
            program,
            words,
            os.environ,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, str(self.log_path), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600),
                (os.POSIX_SPAWN_DUP2, 1, 2),
                *actions,
            ],
            setsid=True,
        )

    def _spawn(self, program: Path) -> int:
        """Start a server; return its pid."""
        words = self._words
        if self._dies_with_us:
            program, words = (
                Path(sys.executable),
                [sys.executable, "-ISc", _BOUND, str(os.getpid()), str(program), *words],
            )
        return self._run(program, words)

    async def _wait_ready(self) -> None:
        """Wait until the ports file exists and the port answers. Polls: the server offers no event for it."""
        assert self.pid is not None, "started or adopted"
        start_s = time.monotonic()
        next_warning_s = _TELL_EVERY_S
        delay_s = 0.002
        while True:
            port = self._recorded_port(self.pid)
            if port is not None and await self._greets(port):
                self.port = port
                return
            self._reap()
            if not _exists(self.pid):
                raise ServerError(f"nats-server ended at once; {self._log_end()}")
            waited_s = time.monotonic() - start_s
            if waited_s > next_warning_s:
                next_warning_s += _TELL_EVERY_S
                logger.warning("nats-server is not ready yet, after %.0f s; %s", waited_s, self._log_end())
            if waited_s > READY_TIMEOUT_S:
                raise ServerError(f"nats-server is not ready after {READY_TIMEOUT_S:g} s; {self._log_end()}")
            await asyncio.sleep(delay_s)
            delay_s = min(delay_s * 1.5, 0.1)

    async def _greets(self, port: int) -> bool:
        """Say whether a server with JetStream answers on the port."""
        try:
            async with asyncio.timeout(1.0):
                reader, writer = await asyncio.open_connection(self._own_host, port)
                try:
                    greeting = await reader.readline()
                finally:
                    writer.close()
                    with contextlib.suppress(OSError):
                        await writer.wait_closed()
        except (OSError, TimeoutError):
            return False
        return greeting.startswith(b"INFO ") and b'"jetstream":true' in greeting

    async def _end(self, signal_number: signal.Signals, timeout_s: float) -> bool:
        if not self.is_running() and await self.adopt() is False:
            return True
        assert self.pid is not None, "running or adopted"
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal_number)
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
        """Reap dead children; a process that is not our child is left alone."""
        for pid in filter(None, (self.pid, self._keeper)):
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)

    def _log_end(self) -> str:
        try:
            lines = self.log_path.read_text(errors="replace").splitlines()[-5:]
        except OSError:
            lines = []
        return f"the end of {self.log_path}: " + (" | ".join(lines) or "(empty)")


def tls_of(directory: Path) -> dict[str, Any]:
    """Return the fields of `Login` for a client on the machine of a directory's server; none where it uses no TLS."""
    try:
        fields = json.loads((directory / CLIENT_FILE).read_text())
        return {field: value if field == "tls_name" else Path(value) for field, value in fields.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
