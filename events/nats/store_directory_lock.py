"""One nats-server on one store, though its directory lies on a file system that several machines mount.

flock keeps processes of one machine apart. Between machines it may mean nothing (NFS without locks, a volume of the
host's), and a pid says nothing in another pod. So a lease stands beside it: a file that its holder renews.

Rules
-----
* `lease.N` is the N-th time that the store was taken. To take it is to create `lease.N+1`, which one of several gets.
* It may be taken where there is none, where its holder has given it back, where its holder was on this boot of this
  machine and flock says that it is gone, or where nothing in it has changed for TAKE_AFTER_S as seen from here. No two
  clocks are compared.
* The keeper is the server's parent. It renews every RENEW_S, and kills the server once it could not for STOP_AFTER_S,
  which is less, or once it sees that another has taken the store. The server dies with its keeper, and holds the flock
  as long as it lives. The keeper outlives the head, as the server does.
* Time is that of the boot (CLOCK_BOOTTIME), which goes on while a machine is suspended. A virtual machine that is
  paused from outside may know of no pause: a volume that is fenced is safe there, and this is not.

This file is a program too, and imports nothing of ours: it is the keeper, which stays for as long as the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import secrets
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

RENEW_S = 2.0
STOP_AFTER_S = 20.0
TAKE_AFTER_S = 30.0
LOCK = "store.lock"
#: Whole in one write, and of one size: what is read is never half of two.
_RECORD_BYTES = 512
_LOOK_S = 0.25
_RELEASE_S = 2.0
#: Descriptors of the keeper: the lock, and where it writes the server's pid.
LOCK_FD, PID_FD = 3, 4


class StoreClaim(NamedTuple):
    """The right to run a server. `at_s`: when it was acquired (`now_s`). `lock_fd`: the lock's descriptor, for the
    keeper."""

    number: int
    token: str
    at_s: float
    lock_fd: int


class Times(NamedTuple):
    """Durations in seconds; see the constants."""

    renew_s: float = RENEW_S
    stop_after_s: float = STOP_AFTER_S
    take_after_s: float = TAKE_AFTER_S


def now_s() -> float:
    """Return seconds since the boot, suspended ones included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def boot_id() -> str:
    """Return the id of this boot of this machine; "" where the kernel does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


class StoreLease:
    """The lease of one directory, which is created where it is missing."""

    def __init__(self, directory: Path, times: Times | None = None) -> None:
        self.directory = directory
        self.times = times or Times()
        #: The newest record, and since when it has not changed as seen from here.
        self._record: tuple[int, bytes] | None = None
        self._since_s = now_s()

    def look(self) -> None:
        """Note whether the holder renews its lease, for `take`. A directory that cannot be read says nothing."""
        with contextlib.suppress(OSError):
            if (newest := self._newest()) != self._record:
                self._record, self._since_s = newest, now_s()

    async def take(self, waits: Callable[[str], object]) -> StoreClaim:
        """Acquire the lease, however long that takes.

        `waits(why)` is called while another holds it. Raises OSError where the directory cannot be used at all.
        """
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock_fd = os.open(self.directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            start_s = now_s()
            while True:
                await asyncio.to_thread(self.look)
                is_stale = self._record is not None and now_s() - self._since_s >= self.times.take_after_s
                with contextlib.suppress(OSError):  # storage that comes and goes: it is asked again
                    if claim := await asyncio.to_thread(self._attempt, lock_fd, is_stale):
                        return claim
                if now_s() - start_s > _RELEASE_S:  # a server that has just ended gives it back soon
                    waits(
                        f"{self.directory} is in use by {_describe_holder(self._record)}; this head takes it once "
                        f"its lease has not been renewed for {self.times.take_after_s:g} s"
                    )
                await asyncio.sleep(_LOOK_S)
        except BaseException:
            os.close(lock_fd)
            raise

    def _attempt(self, lock_fd: int, is_stale: bool) -> StoreClaim | None:
        is_alone, locks = _flock(lock_fd)
        if not is_alone:
            return None
        number, body = self._newest()
        record = _read(body)
        has_died = locks and bool(boot_id()) and record.get("boot") == boot_id()
        if not (number == 0 or record.get("released") or has_died or is_stale):
            fcntl.flock(lock_fd, fcntl.LOCK_UN)
            return None
        token, at_s = secrets.token_hex(8), now_s()
        path = self.directory / f"lease.{number + 1}"
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            return None
        try:
            os.write(fd, _record(token, 0))
            os.fsync(fd)
        finally:
            os.close(fd)
        for old in _numbers(self.directory):
            if old <= number:
                (self.directory / f"lease.{old}").unlink(missing_ok=True)
        return StoreClaim(number + 1, token, at_s, lock_fd)

    def _newest(self) -> tuple[int, bytes]:
        number = max(_numbers(self.directory), default=0)
        return number, (self.directory / f"lease.{number}").read_bytes() if number else b""


def keeper_words(directory: Path, claim: StoreClaim, times: Times) -> list[str]:
    """Return the command line of the keeper, to be followed by the server's program and arguments."""
    numbers = (claim.number, claim.token, claim.at_s, times.renew_s, times.stop_after_s)
    return [sys.executable, "-IS", __file__, str(directory), *map(str, numbers)]


def _numbers(directory: Path) -> list[int]:
    names = (path.name.removeprefix("lease.") for path in directory.glob("lease.*"))
    return [int(name) for name in names if name.isdecimal()]


def _flock(fd: int) -> tuple[bool, bool]:
    """Lock the file; return whether no other process has the lock, as far as is known, and whether locks work here at
    all."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False, True
    except OSError:
        return True, False
    return True, True


def _record(token: str, count: int, *, released: bool = False) -> bytes:
    # In a pod the host's name is the pod's.
    fields: dict[str, Any] = {"token": token, "host": socket.gethostname()[:64], "boot": boot_id()}
    return json.dumps(fields | {"pid": os.getpid(), "count": count, "released": released}).encode().ljust(_RECORD_BYTES)


def _read(body: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(body)
    except ValueError:
        return {}
    return fields if isinstance(fields, dict) else {}


def _describe_holder(newest: tuple[int, bytes] | None) -> str:
    """Describe the holder in a record, for people."""
    record = _read(newest[1] if newest else b"")
    return f"another head, on {record['host']} (pid {record.get('pid')})" if record.get("host") else "another head"


# --- the keeper ----------------------------------------------------------------------------------


class LeaseKeeper:
    """Renews the lease while the server runs."""

    def __init__(self, directory: Path, number: int, token: str, at_s: float, times: Times) -> None:
        self._path = directory / f"lease.{number}"
        self._next = directory / f"lease.{number + 1}"
        self._token = token
        self._times = times
        self._count = 0
        self.renewed_s = at_s
        self.loss_reason = ""

    def renew(self, *, released: bool = False) -> None:
        """Renew the lease once. Raises OSError."""
        start_s = now_s()
        self._count += 1
        fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if _read(os.pread(fd, _RECORD_BYTES, 0)).get("token") != self._token:
                self.loss_reason = "the lease holds another token"
                return
            os.pwrite(fd, _record(self._token, self._count, released=released), 0)
            os.fsync(fd)
        finally:
            os.close(fd)
        if self._next.exists():
            self.loss_reason = "another head has taken the store"
            return
        self.renewed_s = start_s

    def run(self) -> None:
        """Renew the lease until it is lost, in a thread of its own: storage may stand still."""
        while not self.loss_reason:
            try:
                self.renew()
            except FileNotFoundError:
                self.loss_reason = "the lease is gone: another head has taken the store"
            except OSError as error:
                print(f"store lease: cannot renew: {error}", file=sys.stderr, flush=True)
            time.sleep(self._times.renew_s)

    def trouble(self) -> str:
        """Say why the server must end now; "" while it may run."""
        if self.loss_reason:
            return self.loss_reason
        silent_s = now_s() - self.renewed_s
        return f"the lease could not be renewed for {silent_s:.0f} s" if silent_s > self._times.stop_after_s else ""


def main(argv: list[str]) -> int:
    """Run the keeper. `argv`: as `keeper_words` makes it, then the server's program and arguments."""
    directory, number, token, at_s, renew_s, stop_after_s, program, *words = argv
    keeper = LeaseKeeper(Path(directory), int(number), token, float(at_s), Times(float(renew_s), float(stop_after_s)))
    os.set_inheritable(LOCK_FD, True)
    server = _start(program, words)
    for number_of_signal in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number_of_signal, signal.SIG_IGN)
    os.write(PID_FD, str(server).encode())
    os.close(PID_FD)
    threading.Thread(target=keeper.run, daemon=True).start()
    pidfd = os.pidfd_open(server)
    while not select.select([pidfd], [], [], _LOOK_S)[0]:
        if reason := keeper.trouble():
            os.kill(server, signal.SIGKILL)
            _bounded(lambda: print(f"store lease: {reason}; nats-server is killed", file=sys.stderr, flush=True))
            os.waitpid(server, 0)
            os._exit(1)
    os.waitpid(server, 0)
    _bounded(lambda: _give_back(keeper))
    os._exit(0)  # whatever storage a thread may still wait for


def _start(program: str, words: list[str]) -> int:
    """Start the server, which dies with this process (PR_SET_PDEATHSIG); return its pid."""
    import ctypes

    libc, parent = ctypes.CDLL(None), os.getpid()
    pid = os.fork()
    if pid:
        return pid
    libc.prctl(1, signal.SIGKILL)
    if os.getppid() == parent:
        os.close(PID_FD)
        os.execv(program, words)
    os._exit(127)


def _bounded(action: Callable[[], object]) -> None:
    """Run the action, or give up after _RELEASE_S: the lease and the server's log lie on storage that may stand
    still."""
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    thread.join(_RELEASE_S)


def _give_back(keeper: LeaseKeeper) -> None:
    with contextlib.suppress(OSError):
        if not keeper.loss_reason:
            keeper.renew(released=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
