"""The driver on NVML: real bindings against a library in Python, and against a real GPU where there is one."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pynvml
import pytest

from tests.agents.accelerators.nvml_library import ALL_LINKS, Gpu, Library
from unicrond.agents.accelerators.driver import GpuReading, NoDriver, XidEvent
from unicrond.agents.accelerators.nvml import NvmlDriver
from unicrond.agents.accelerators.watch import open_driver
from unicrond.agents.protocol.gpus import visible_gpus

OLD = Gpu(
    "Old",
    "GPU-aaaa-1",
    fields={(38, 0): 5, (45, 0): 6, (52, 0): 7, (59, 0): 2},
    ecc={pynvml.NVML_VOLATILE_ECC: 3, pynvml.NVML_AGGREGATE_ECC: 11},
    rows=(1, 2, 1, 0),
    links=[1, 0, 1],
    reasons=0x40 | 0x4,
)
NEW = Gpu("New", "GPU-bbbb-2", fields={(230, 0): 4, (163, ALL_LINKS): 30, (161, ALL_LINKS): 1, (215, ALL_LINKS): 9})


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    library = Library([OLD, NEW])
    library.install(monkeypatch)
    return library


def test_nvml_reads_fields_that_gpu_supports(library: Library) -> None:
    driver = NvmlDriver(["0", "1"])
    assert driver.names == ("Old GPU-aaaa-1", "New GPU-bbbb-2") and library.registered == [0, 1]
    assert driver.read(0) == GpuReading(
        ecc_volatile=3, ecc_aggregate=11, rows_pending=True, rows_failed=False, links_up=2, link_errors=18,
        link_recoveries=2, throttles=frozenset({"thermal"}),
    )  # fmt: skip
    assert driver.read(1) == GpuReading(action="drain", links_up=0, link_errors=31, link_recoveries=9)
    driver.close()
    assert not library.is_open


@pytest.mark.parametrize(
    ("reasons", "throttles"),
    [(0x4, set()), (0x20, {"thermal"}), (0x48, {"thermal"}), (0x80, {"power"}), (0x8, {"power"}), (0x1, set())],
)
def test_nvml_reports_only_unusual_throttling(library: Library, reasons: int, throttles: set[str]) -> None:
    library.gpus = [Gpu("G", "GPU-1", reasons=reasons)]
    assert NvmlDriver(["0"]).read(0).throttles == throttles


@pytest.mark.parametrize(("number", "word"), [(0, "none"), (1, "reset"), (2, "reboot"), (3, "drain"), (99, "other")])
def test_nvml_maps_recovery_actions(library: Library, number: int, word: str) -> None:
    library.gpus = [Gpu("G", "GPU-1", fields={(230, 0): number})]
    assert NvmlDriver(["0"]).read(0).action == word


def test_nvml_reads_lost_gpu_without_error(library: Library) -> None:
    library.gpus = [Gpu("G", "GPU-1")]
    driver = NvmlDriver(["0"])
    library.gpus[0].is_lost = True
    assert driver.read(0) == GpuReading(is_lost=True)


def test_nvml_slots_match_cuda_order(library: Library) -> None:
    driver = NvmlDriver(["1", "GPU-aa", "MIG-GPU-bbbb-2", "1"])
    assert driver.names == ("New GPU-bbbb-2", "Old GPU-aaaa-1") and driver.gpu_of_slot == (0, 1, 0, 0)


def test_nvml_event_carries_gpu_and_recovery_action(library: Library) -> None:
    driver = NvmlDriver(["1", "0"])
    library.events.put((0, 79))
    library.events.put((1, 154))
    assert driver.wait(30.0) == (1, XidEvent(code=79))
    assert driver.wait(30.0) == (0, XidEvent(code=154, action="drain"))
    assert driver.wait(0.01) is None


def test_nvml_wait_ends_on_wake(library: Library) -> None:
    driver, began_s = NvmlDriver(["0"]), time.monotonic()
    waiting = threading.Thread(target=driver.wait, args=(60.0,))
    waiting.start()
    driver.wake()
    waiting.join(10)
    assert not waiting.is_alive() and time.monotonic() - began_s < 10


def test_nvml_wait_never_spins_after_failure(library: Library, caplog: pytest.LogCaptureFixture) -> None:
    driver = NvmlDriver(["0"])
    for _ in range(100):
        library.events.put(pynvml.NVML_ERROR_GPU_IS_LOST)
    assert driver.wait(0.05) is None
    assert library.events.qsize() == 99 and caplog.text.count("does not report events") == 1


def test_nvml_reads_gpu_without_event_support(library: Library, caplog: pytest.LogCaptureFixture) -> None:
    library.gpus = [Gpu("G", "GPU-1", takes_events=False)]
    driver = NvmlDriver(["0"])
    assert "no XID events" in caplog.text and driver.read(0) == GpuReading(links_up=0)
    assert driver.wait(0.01) is None


def test_driver_without_nvml_tells_reason(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def missing() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", missing)
    with pytest.raises(NoDriver, match="Shared Library Not Found"):
        open_driver("nvml", ("0",), 1)
    assert open_driver("auto", ("0",), 1) is None and "not watched" in caplog.text
    assert open_driver("auto", (), 4) is None and open_driver("none", ("0",), 1) is None


def test_nvml_names_missing_gpu(library: Library) -> None:
    with pytest.raises(NoDriver, match="7"):
        NvmlDriver(["7"])
    assert not library.is_open


@pytest.mark.skipif(not Path("/proc/driver/nvidia/gpus").is_dir(), reason="no NVIDIA driver on this machine")
def test_nvml_reads_and_waits_on_real_gpu() -> None:
    driver = NvmlDriver(visible_gpus())
    for gpu in range(len(driver.names)):
        reading = driver.read(gpu)
        assert not reading.is_lost and reading.action in (None, "none"), driver.names[gpu]
    assert driver.wait(1.0) is None
    driver.close()
