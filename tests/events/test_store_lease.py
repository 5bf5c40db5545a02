"""One server on one store: real servers whose machines share a directory and no lock, cut off, killed, frozen."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agents.processes import children, eventually, has_ended
from unicrond.events.nats import store_directory_lock as store_lease
from unicrond.events.nats.server import EmbeddedServer
from unicrond.events.nats.store_directory_lock import LeaseKeeper, StoreLease, Times, now_s

QUICK = Times(renew_s=0.1, stop_after_s=4.0, take_after_s=5.0)
#: Where the keeper is to give up soon, and the other head much later.
DEAF = Times(renew_s=0.1, stop_after_s=1.0, take_after_s=8.0)
#: Where nothing is to happen for want of time.
PATIENT = Times(renew_s=0.1, stop_after_s=60.0, take_after_s=90.0)


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A store in memory: a busy disk may stand still for longer than a keeper here may wait for what it syncs."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="store-lease-") as directory:
        yield Path(directory)


class Machine:
    """A machine of its own to the lease: another boot, and locks that others do not see."""

    def __init__(self, name: str, store: Path, monkeypatch: pytest.MonkeyPatch, times: Times = QUICK) -> None:
        self.name, self._monkeypatch = name, monkeypatch
        self.said: list[str] = []
        self.server = EmbeddedServer(
            store,
            lease=StoreLease(store, times),
            waits=lambda why: self.said.append(why) if why not in self.said else 0,
        )

    async def start(self) -> None:
        self._monkeypatch.setattr(store_lease, "boot_id", lambda: f"boot of {self.name}")
        self._monkeypatch.setattr(store_lease, "LOCK", f"lock of {self.name}")
        self._monkeypatch.setattr(EmbeddedServer, "adopt", _never)  # a pid says nothing on another machine
        await self.server.start()


async def _never(_: EmbeddedServer) -> bool:
    return False


def keeper_of(server: EmbeddedServer) -> int:
    assert server.pid is not None
    return int(Path(f"/proc/{server.pid}/stat").read_text().rpartition(")")[2].split()[1])


def spoil(lease: Path) -> None:
    """As storage that answers nothing of use."""
    lease.rename(lease.with_name("away"))
    lease.mkdir()


def end(server: EmbeddedServer) -> None:
    if server.pid is not None and server.is_running():
        os.kill(server.pid, signal.SIGKILL)
        assert has_ended(server.pid)


async def test_second_machine_takes_store_of_dead_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = Machine("a", tmp_path, monkeypatch), Machine("b", tmp_path, monkeypatch)
    try:
        await one.start()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(QUICK.take_after_s + 2.5):
                await two.start()
        assert one.server.is_running() and "is in use by another head" in two.said[0]
        os.kill(keeper_of(one.server), signal.SIGKILL)  # with it the server dies, and nothing gives the lease back
        assert one.server.pid is not None and has_ended(one.server.pid)
        renewed_s = (tmp_path / "lease.1").stat().st_mtime
        await two.start()
        assert time.time() - renewed_s >= QUICK.stop_after_s, "a cut-off server would have ended by then"
    finally:
        end(one.server)
        end(two.server)


async def test_server_ends_before_its_lease_can_be_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = Machine("a", tmp_path, monkeypatch, DEAF)
    await one.start()
    try:
        spoil(tmp_path / "lease.1")
        begun_s = now_s()
        assert one.server.pid is not None and has_ended(one.server.pid, DEAF.take_after_s)
        assert now_s() - begun_s < DEAF.take_after_s
        assert eventually(lambda: "could not be renewed for" in one.server.log_path.read_text())
    finally:
        end(one.server)


def test_blocked_keeper_still_kills_server(tmp_path: Path) -> None:
    """Its log lies on the storage that stands still: whoever writes there waits for ever."""
    (said, speech), (told, tells) = os.pipe(), os.pipe()
    os.set_blocking(speech, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(speech, b"x" * 4096)
    os.set_blocking(speech, True)
    lock = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in (speech, lock, tells)]
    numbers = (2, store_lease.LOCK_FD, store_lease.PID_FD)
    actions = [(os.POSIX_SPAWN_DUP2, fd, number) for fd, number in zip(high, numbers, strict=True)]
    words = store_lease.keeper_words(tmp_path, store_lease.StoreClaim(1, "mine", now_s(), lock), DEAF)
    keeper = os.posix_spawn(sys.executable, [*words, "/bin/sleep", "60"], os.environ, file_actions=actions)
    try:
        assert has_ended(int(os.read(told, 20)), DEAF.take_after_s)
        assert os.waitstatus_to_exitcode(os.waitpid(keeper, 0)[1]) == 1
    finally:
        for fd in (said, speech, told, tells, lock, *high):
            os.close(fd)


async def test_server_ends_when_other_machine_takes_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = Machine("a", tmp_path, monkeypatch, PATIENT)
    await one.start()
    try:
        (tmp_path / "lease.2").write_bytes(b"")
        assert one.server.pid is not None and has_ended(one.server.pid), "long before it would for want of a renewal"
    finally:
        end(one.server)


async def test_store_of_stopped_server_is_taken_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = [Machine(name, tmp_path, monkeypatch, PATIENT) for name in ("a", "b")]
    await one.start()
    await one.server.stop()
    begun_s = now_s()
    try:
        await two.start()
        assert now_s() - begun_s < PATIENT.take_after_s
        assert not (tmp_path / "lease.1").exists() and (tmp_path / "lease.2").exists()
    finally:
        end(two.server)


async def test_same_machine_takes_dead_and_adopts_living_server(tmp_path: Path) -> None:
    lease = StoreLease(tmp_path, Times(take_after_s=600))
    one, two = EmbeddedServer(tmp_path, lease=lease), EmbeddedServer(tmp_path, lease=lease)
    try:
        assert not await one.start()
        assert await two.start() and two.pid == one.pid
        keeper = keeper_of(one)
        os.kill(keeper, signal.SIGKILL)
        assert one.pid is not None and has_ended(one.pid)
        assert not await two.start()
        assert children(keeper_of(two)) == [two.pid]
    finally:
        end(two)


def test_concurrent_lease_attempts_have_one_winner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    boots = iter(range(100))
    monkeypatch.setattr(store_lease, "boot_id", lambda: f"boot {next(boots)}")
    lease = StoreLease(tmp_path)
    fds = [os.open(tmp_path / f"lock{n}", os.O_RDWR | os.O_CREAT) for n in range(4)]  # no lock is shared
    try:
        for number in (0, 1):
            found = lease._newest()
            monkeypatch.setattr(StoreLease, "_newest", lambda _, found=found: found)  # all have looked, then all act
            got = [taken for fd in fds if (taken := lease._attempt(fd, is_stale=bool(number)))]
            monkeypatch.undo()
            assert [taken.number for taken in got] == [number + 1]
    finally:
        for fd in fds:
            os.close(fd)


def test_keeper_detects_lost_lease(tmp_path: Path) -> None:
    keeper = LeaseKeeper(tmp_path, 1, "mine", now_s(), DEAF)
    (tmp_path / "lease.1").write_text('{"token": "theirs"}')
    keeper.renew()
    assert "another token" in keeper.trouble()
    late = LeaseKeeper(tmp_path, 1, "theirs", now_s() - 2, DEAF)
    assert "could not be renewed for 2 s" in late.trouble()
    late.renew()
    assert late.trouble() == ""
