"""Watches a node's GPUs in two threads, which may block in the driver, and judges in one place what they see.

Rules
-----
* One thread waits for events, the other reads all GPUs every POLL_S: a driver that hangs in one does not keep the other
  from reporting, and neither ever holds up the event loop.
* Sightings are judged in the event loop (`diagnosis.py`), in the order in which they come. An ordered XID takes the
  same path, as if the driver had reported it.
* A driver that does not answer for SILENCE_S is reported once, in the agent's own log.
* A thread logs whatever its driver raises, the first time, and goes on after a pause: the watch does not end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Mapping

from unicrond.agents.accelerators.diagnosis import GpuFinding, History, diagnose
from unicrond.agents.accelerators.driver import Choice, GpuDriver, NoDriver, Sighting, XidEvent
from unicrond.agents.accelerators.fake import FakeDriver
from unicrond.agents.accelerators.nvml import NvmlDriver
from unicrond.events.vocabulary import WorkerId

logger = logging.getLogger("unicrond.agents")

POLL_S = 5.0
SILENCE_S = 60.0
_WAIT_S = 60.0


def open_driver(choice: Choice, gpus: tuple[str, ...], slots: int) -> GpuDriver | None:
    """Open the driver that `choice` names; return None where nothing is to be watched. `gpus`: by slot (`gpus.py`).

    "auto": NVML where the node has GPUs and NVML works. Raise NoDriver where "nvml" is impossible.
    """
    if choice == "fake":
        return FakeDriver([f"fake {name}" for name in gpus or range(slots)])
    if choice == "none" or (choice == "auto" and not gpus):
        return None
    try:
        return NvmlDriver(gpus or tuple(str(slot) for slot in range(slots)))
    except NoDriver as error:
        if choice == "nvml":
            raise
        logger.warning("the node's GPUs are not watched: %s", error)
        return None


class AcceleratorWatch:
    """Watches the node's GPUs. `workers()` returns the worker in each slot now. `on_finding(gpu, worker, finding)` is
    called with each finding; `worker` is "" where none runs on the GPU."""

    def __init__(
        self,
        driver: GpuDriver,
        workers: Callable[[], Mapping[int, WorkerId]],
        on_finding: Callable[[str, str, GpuFinding], None],
        *,
        poll_s: float = POLL_S,
    ) -> None:
        """Begin at once. Needs a running loop."""
        self._driver = driver
        self._workers = workers
        self._on_finding = on_finding
        self._poll_s = poll_s
        self._histories = [History() for _ in driver.names]
        self._loop = asyncio.get_running_loop()
        self._heard_s = self._loop.time()
        self._is_silent = False
        self._complained: set[str] = set()
        self._closing = threading.Event()
        self._threads = [
            threading.Thread(target=run, name=name, daemon=True)
            for run, name in ((self._poll, "read accelerators"), (self._listen, "accelerator events"))
        ]
        for thread in self._threads:
            thread.start()
        self._timer = self._loop.call_later(SILENCE_S / 2, self._look)
        logger.info("watching the GPUs %s", ", ".join(driver.names))

    def report_xid(self, code: int, worker: str) -> str:
        """Handle a code as if the driver had reported it, of the worker's GPU ("": the node's first). Return why not,
        or ""."""
        slots = [slot for slot, name in self._workers().items() if name == worker]
        if worker and not slots:
            return f"xid: no worker {worker} runs here"
        self._take(self._driver.gpu_of_slot[slots[0]] if slots else 0, XidEvent(code=code))
        return ""

    async def close(self) -> None:
        """Stop watching; wait for the threads, but not for a driver that hangs."""
        self._closing.set()
        self._timer.cancel()
        self._driver.wake()
        for thread in self._threads:
            await asyncio.to_thread(thread.join, 2.0)
        if not any(thread.is_alive() for thread in self._threads):
            self._driver.close()

    # --- in the event loop -----------------------------------------------------------------------

    def _take(self, gpu: int, sighting: Sighting) -> None:
        if self._closing.is_set():
            return
        self._heard_s = self._loop.time()
        by_slot = self._workers()
        on_it = (slot for slot, number in enumerate(self._driver.gpu_of_slot) if number == gpu)
        workers = tuple(by_slot[slot] for slot in on_it if slot in by_slot)
        self._histories[gpu], findings = diagnose(self._histories[gpu], sighting, workers, self._loop.time())
        for finding in findings:
            if finding.warning:
                logger.warning("%s: %s", self._driver.names[gpu], finding.message)
            for worker in workers or ("",):
                self._on_finding(self._driver.names[gpu], worker, finding)

    def _look(self) -> None:
        silent_s = self._loop.time() - self._heard_s
        if silent_s > SILENCE_S and not self._is_silent:
            logger.warning("the accelerators' driver has not answered for %.0f s", silent_s)
        self._is_silent = silent_s > SILENCE_S
        self._timer = self._loop.call_later(SILENCE_S / 2, self._look)

    # --- in threads ------------------------------------------------------------------------------

    def _poll(self) -> None:
        while True:
            for gpu in range(len(self._driver.names)):
                if self._closing.is_set():
                    return
                try:
                    reading = self._driver.read(gpu)
                except Exception as error:
                    self._complain("read", error)
                else:
                    self._hand_over(gpu, reading)
            if self._closing.wait(self._poll_s):
                return

    def _listen(self) -> None:
        while not self._closing.is_set():
            try:
                event = self._driver.wait(_WAIT_S)
            except Exception as error:
                self._complain("wait", error)
                self._closing.wait(self._poll_s)
                continue
            if event is not None:
                self._hand_over(*event)

    def _complain(self, where: str, error: Exception) -> None:
        if where not in self._complained:
            self._complained.add(where)
            logger.warning("the accelerators' driver failed in %s; trying again", where, exc_info=error)

    def _hand_over(self, gpu: int, sighting: Sighting) -> None:
        if not self._closing.is_set():
            with contextlib.suppress(RuntimeError):  # the loop has been closed in the meantime
                self._loop.call_soon_threadsafe(self._take, gpu, sighting)
