"""The run directory of one node's agent: sockets, logs, the boot number, what the agent remembers.

    <run_dir>/agent.lock     held by the living agent: two agents on one node would fight
    <run_dir>/agent.boot     the boot number that was used last
    <run_dir>/agent.memory   what an agent tells the next one (see agents/core/state.py: Remembered)
    <run_dir>/agent.kills    how often the OOM killer had been at work (oom_kill_counts.py)
    <run_dir>/agent.exchange the port that serves states, and the token for it
    <run_dir>/agent.sock     workers connect here
    <run_dir>/fork.sock      the fork server serves the agent here
    <run_dir>/probe.sock     the agent answers `--probe` here
    <run_dir>/sum.sock       a sum with other nodes tells its result here, while one is made (doctor_checks.py)
    <run_dir>/marks/<worker>         the worker's phase mark (see agents/protocol/marks.py)
    <run_dir>/fork_server.log
    <run_dir>/logs/<task>/<worker>.log, .log.1, ...    (output_pruning.py; may lie elsewhere, on a disk)

The directory is private (0700): write access to its sockets is enough to run code.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import stat
from pathlib import Path

import msgspec

from unicrond.agents.core.state import Remembered
from unicrond.agents.host.oom_kill_counts import KillCounts
from unicrond.agents.host.paths import PROBE_SOCKET

#: sockaddr_un.sun_path holds 108 bytes with the closing NUL (unix(7)).
MAX_SOCKET_PATH_BYTES = 107
_LONGEST_SOCKET = "agent.sock"
#: Boot numbers are microseconds since 1970; a number from this limit on was never given out
#: (unicrond.events.vocabulary.Boot).
BOOT_LIMIT = 2**52
#: How much of a small file is read: our numbers, ports and tokens are shorter.
_SMALL_BYTES = 256

logger = logging.getLogger(__name__)


class BadRunDir(ValueError):
    """The run directory cannot be used; the text says why and what to do."""


class RunDir:
    """Paths and small files of one run directory. It touches nothing before `claim`."""

    def __init__(self, path: Path, logs: Path | None = None) -> None:
        """Derive the paths. `logs`: where workers' logs go, if not below `path`.

        Raise BadRunDir where a socket's path would be too long for the kernel.
        """
        self.path = path.absolute()
        length = len(os.fsencode(self.path / _LONGEST_SOCKET))
        if length > MAX_SOCKET_PATH_BYTES:
            raise BadRunDir(
                f"run-dir: {self.path} is {length - MAX_SOCKET_PATH_BYTES} bytes too long for a Unix socket; "
                f"give a shorter one (at most {MAX_SOCKET_PATH_BYTES - len(_LONGEST_SOCKET) - 1} bytes)"
            )
        self.agent_socket = self.path / "agent.sock"
        self.fork_socket = self.path / "fork.sock"
        self.probe_socket = self.path / PROBE_SOCKET
        self.sum_socket = self.path / "sum.sock"
        self.fork_server_log = self.path / "fork_server.log"
        self.logs = self.path / "logs" if logs is None else logs.absolute()
        self.marks = self.path / "marks"
        self._memory = self.path / "agent.memory"
        self._boot = self.path / "agent.boot"
        self._exchange = self.path / "agent.exchange"
        self._kills = self.path / "agent.kills"
        self._lock_fd = -1
        #: The boot number before the one that was given out, 0 = none that is known.
        self.previous_boot = 0

    def claim(self) -> None:
        """Create the directory and hold its lock until this process ends. Raise BadRunDir."""
        try:
            _refuse_foreign_links(self.path)
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            _refuse_foreign_links(self.path)
            status = self.path.stat()
            if status.st_uid != os.getuid():
                raise BadRunDir(f"run-dir: {self.path} belongs to uid {status.st_uid}; give one of your own")
            if stat.S_IMODE(status.st_mode) & 0o077:
                self.path.chmod(0o700)
            parent = self.path.parent.stat()
            if parent.st_uid not in (0, os.getuid()) or (parent.st_mode & 0o022 and not parent.st_mode & stat.S_ISVTX):
                raise BadRunDir(f"run-dir: others may replace {self.path}; give one in a directory of your own")
            self._lock_fd = os.open(
                self.path / "agent.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
            )
        except OSError as error:
            raise BadRunDir(f"run-dir: cannot use {self.path}: {error.strerror}; give another one") from error
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock_fd)
            self._lock_fd = -1
            raise BadRunDir(
                f"run-dir: another agent works in {self.path}; stop it, or give this one another directory"
            ) from None

    def release(self) -> None:
        """Give up the lock (for tests; a process that ends does it anyhow)."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def next_boot(self, wall_clock_us: int) -> int:
        """Return a number above every earlier one, and make it durable before it is used.

        The wall clock is a lower bound so that a directory that was lost does not repeat old numbers: it alone counts
        where the last number is damaged, or where a full disk keeps the new one from being written. Both are logged.
        """
        self.previous_boot = self._last_boot()
        boot = max(self.previous_boot + 1, wall_clock_us)
        self.write_boot(boot)
        return boot

    def belongs_to(self, boot: int) -> bool:
        """Return whether the agent of this boot has claimed the directory since (its lock was removed): the workers are
        its own."""
        return self._last_boot() == boot

    def write_boot(self, boot: int) -> None:
        """Record `boot`, so that the next number is above it."""
        content = str(boot).encode("ascii")
        try:
            _replace(self._boot, content, durable=True)
        except OSError as error:
            try:
                _overwrite(self._boot, content)  # a full disk has no room for a second file
            except OSError:
                logger.error(
                    "cannot write %s (%s): this agent starts anyway; the next one takes its number from the clock",
                    self._boot,
                    error.strerror,
                )

    def _last_boot(self) -> int:
        try:
            content = _read_small(self._boot)
        except FileNotFoundError:
            return 0
        except OSError as error:
            logger.error("cannot read %s (%s): the boot number comes from the clock", self._boot, error.strerror)
            return 0
        text = content.strip()
        if text.isdigit() and len(text) <= len(str(BOOT_LIMIT)) and int(text) < BOOT_LIMIT - 1:
            return int(text)
        beginning = content[:20].decode("ascii", "backslashreplace")
        logger.error(
            "%s is damaged (it begins with %r): replacing it; the boot number comes from the clock. "
            "If the log knows a later one, it ignores this node until the clock has passed that",
            self._boot,
            beginning,
        )
        return 0

    def exchange(self) -> tuple[int, str]:
        """Return the port (0: none yet) and the token that the agent before used for states; else a new token."""
        try:
            port, token = _read_small(self._exchange).decode("ascii").split()
            return (int(port) if int(port) < 65536 else 0), token
        except (OSError, ValueError):
            return 0, secrets.token_hex(16)

    def remember_exchange(self, port: int, token: str) -> None:
        """Record port and token: other nodes know both by the log, so the next agent has to use them as well."""
        _replace(self._exchange, f"{port} {token}".encode("ascii"), durable=False)

    def remember_kills(self, counts: KillCounts) -> None:
        """Record the present counts, for an agent that finds that workers have ended."""
        _replace(self._kills, msgspec.msgpack.encode(counts), durable=False)

    def recall_kills(self) -> KillCounts:
        """Return the counts that were recorded last; an empty KillCounts where there are none."""
        try:
            return msgspec.msgpack.decode(self._kills.read_bytes(), type=KillCounts)
        except (OSError, msgspec.MsgspecError):
            return KillCounts()

    def remember(self, memory: Remembered) -> None:
        """Record what the next agent must know. The file outlives the process, not the machine: no worker does."""
        _replace(self._memory, msgspec.msgpack.encode(memory), durable=False)

    def recall(self) -> Remembered:
        """Return what the agent before recorded; an empty Remembered where there was none. Raise BadRunDir."""
        try:
            return msgspec.msgpack.decode(self._memory.read_bytes(), type=Remembered, strict=True)
        except FileNotFoundError:
            return Remembered()
        except (msgspec.MsgspecError, ValueError) as error:
            raise BadRunDir(f"run-dir: {self._memory} is damaged ({error}); it is not used") from error


def _refuse_foreign_links(path: Path) -> None:
    """Refuse symbolic links of other users on the path: in a shared directory such as /tmp their owner decides where
    they lead."""
    for part in (path, *path.parents):
        try:
            status = part.lstat()
        except FileNotFoundError:
            continue
        if stat.S_ISLNK(status.st_mode) and status.st_uid not in (0, os.getuid()):
            raise BadRunDir(
                f"run-dir: {part} is a symbolic link of uid {status.st_uid}; remove it, or give another directory"
            )


def _read_small(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_SMALL_BYTES)


def _overwrite(path: Path, content: bytes) -> None:
    """Write in place and durably: needs no room, but the file must exist. An incomplete write is detected when it is
    read."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.pwrite(fd, content, 0)
        os.ftruncate(fd, len(content))
        os.fsync(fd)
    finally:
        os.close(fd)


def _replace(path: Path, content: bytes, *, durable: bool) -> None:
    new = path.with_name(path.name + ".new")
    try:
        with new.open("wb") as file:
            file.write(content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        new.replace(path)
    except OSError:
        new.unlink(missing_ok=True)
        raise
