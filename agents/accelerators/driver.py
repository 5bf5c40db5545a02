"""What watches GPUs: the interface that NVML stands behind (`nvml.py`), and the fake that needs no GPU (`fake.py`)."""

from __future__ import annotations

from typing import Literal, Protocol, TypeAlias

from agents.accelerators.readings import Reading, XidSeen

Choice: TypeAlias = Literal["auto", "nvml", "fake", "none"]


class NoDriver(Exception):
    """Accelerators cannot be watched here; says why, and what would help."""


class Driver(Protocol):
    """Tells of GPUs, numbered from 0. `names`: each one's own. `gpu_of_slot`: on which one a slot's worker runs.
    `models`: what each is, "" = not known.

    `read` and `wait` may be called from different threads, `wake` from any. They block, and should not
    raise: the watch could say no more than that they did.
    """

    names: tuple[str, ...]
    gpu_of_slot: tuple[int, ...]
    models: tuple[str, ...]

    def read(self, gpu: int) -> Reading:
        """One look at a GPU's counters and states; what cannot be read is None, or the GPU is `lost`."""
        ...

    def wait(self, timeout_s: float) -> tuple[int, XidSeen] | None:
        """Wait for the next XID event of any GPU; None after `timeout_s`, or sooner."""
        ...

    def wake(self) -> None:
        """Have `wait` return soon."""
        ...

    def close(self) -> None:
        """Let go of the driver, once all reads and waits are over."""
        ...
