"""The interface of GPU drivers: NVML (`nvml.py`), and the fake that needs no GPU (`fake.py`)."""

from __future__ import annotations

from typing import Literal, Protocol, TypeAlias

from unicrond.agents.accelerators.readings import GpuReading, XidEvent

Choice: TypeAlias = Literal["auto", "nvml", "fake", "none"]


class NoDriver(Exception):
    """Accelerators cannot be watched here; the text says why, and what would help."""


class GpuDriver(Protocol):
    """Reads GPUs, numbered from 0. `names`: each one's own. `gpu_of_slot`: on which one a slot's worker runs. `models`:
    the model of each, "" = unknown.

    `read` and `wait` may be called from different threads, `wake` from any. They block, and should not raise: the watch
    could only report that they did.
    """

    names: tuple[str, ...]
    gpu_of_slot: tuple[int, ...]
    models: tuple[str, ...]

    def read(self, gpu: int) -> GpuReading:
        """Read a GPU's counters and states; a field that cannot be read is None, or the GPU is lost."""
        ...

    def wait(self, timeout_s: float) -> tuple[int, XidEvent] | None:
        """Wait for the next XID event of any GPU; None after `timeout_s`, or sooner."""
        ...

    def wake(self) -> None:
        """Have `wait` return soon."""
        ...

    def close(self) -> None:
        """Release the driver, once all reads and waits are over."""
        ...
