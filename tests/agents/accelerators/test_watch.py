"""The watch's threads and its one door, on the fake driver."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable

import pytest

from unicrond.agents.accelerators.driver import GpuReading, XidEvent
from unicrond.agents.accelerators.fake import FakeDriver
from unicrond.agents.accelerators.watch import AcceleratorWatch

Told = tuple[str, str, str | None, str]


class Rig:
    """A node of four slots on three GPUs (two slots share one); slots 1 and 3 are taken."""

    def __init__(self) -> None:
        self.driver = FakeDriver(["a", "b", "c", "b"])
        self.workers = {1: "big.1", 3: "big.2"}
        self.told: asyncio.Queue[Told] = asyncio.Queue()
        self.watch = AcceleratorWatch(
            self.driver,
            lambda: self.workers,
            lambda gpu, worker, finding: self.told.put_nowait((gpu, worker, finding.kind, finding.message)),
            poll_s=0.02,
        )

    async def next(self) -> Told:
        return await asyncio.wait_for(self.told.get(), 10)


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig()
    yield rig
    await rig.watch.close()
    assert not [thread for thread in threading.enumerate() if "accelerator" in thread.name], "no thread stays"


async def test_watch_reports_event_to_each_worker_of_gpu(rig: Rig) -> None:
    rig.driver.report(1, XidEvent(code=48))
    assert {(await rig.next())[:3], (await rig.next())[:3]} == {
        ("b", "big.1", "ecc_error"),
        ("b", "big.2", "ecc_error"),
    }
    rig.driver.report(0, XidEvent(code=79))
    assert (await rig.next())[:3] == ("a", "", "gpu_broken")


async def test_watch_polls_counters(rig: Rig) -> None:
    rig.driver.readings[2] = GpuReading(rows_failed=True)
    assert (await rig.next())[:3] == ("c", "", "ecc_error")
    rig.workers[2] = "small.1"
    assert (await rig.next())[:3] == ("c", "small.1", "ecc_error")


async def test_watch_handles_ordered_xid_like_real(rig: Rig) -> None:
    assert rig.watch.report_xid(31, "big.1") == ""
    assert (await rig.next())[2] == "illegal_memory_access"
    await rig.next()
    rig.workers = {1: "big.3", 3: "big.2"}
    rig.driver.report(1, XidEvent(code=31))
    assert (await rig.next())[2] == "gpu_broken", "it recurs, whoever said so first"
    assert rig.watch.report_xid(31, "big.77") == "xid: no worker big.77 runs here"


async def test_watch_reports_raising_driver_once_and_retries(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failed = {"read": threading.Semaphore(0), "wait": threading.Semaphore(0)}

    def failing(where: str) -> Callable[..., None]:
        def fail(*_: object) -> None:
            failed[where].release()
            raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "no text")

        return fail

    with monkeypatch.context() as patched:
        for where in failed:
            patched.setattr(rig.driver, where, failing(where))
        rig.driver.wake()
        for semaphore in failed.values():
            for _ in range(4):
                assert await asyncio.to_thread(semaphore.acquire, timeout=10), "its thread has ended"
    told = [record.getMessage() for record in caplog.records if "driver failed" in record.getMessage()]
    assert len(told) == 2 and {message.split()[5].rstrip(";") for message in told} == set(failed)
    rig.driver.report(0, XidEvent(code=119))
    assert (await rig.next())[:3] == ("a", "", "driver_error")
    rig.driver.readings[2] = GpuReading(rows_failed=True)
    assert (await rig.next())[:3] == ("c", "", "ecc_error")


async def test_watch_reports_events_while_driver_read_hangs(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    hanging, mended = threading.Event(), threading.Event()

    def hang(gpu: int) -> GpuReading:
        hanging.set()
        mended.wait(30)
        return GpuReading()

    monkeypatch.setattr(rig.driver, "read", hang)
    await asyncio.to_thread(hanging.wait, 10)
    before_s = time.monotonic()
    rig.driver.report(0, XidEvent(code=119))
    assert (await rig.next())[:3] == ("a", "", "driver_error")
    assert time.monotonic() - before_s < 5
    mended.set()
