"""The interface of GPU drivers, and what a driver says of a GPU: its counters and states, its XID events, its type.

A driver is NVML (`nvml.py`) or the fake that needs no GPU (`fake.py`). A field that is None could not be read.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

#: The action that a GPU needs before it can be used again, by the driver; "other": one of a newer driver.
RecoveryAction: TypeAlias = Literal["none", "reset", "reboot", "drain", "other"]
#: Why a GPU runs slower than it could, beyond its normal power management.
Throttle: TypeAlias = Literal["thermal", "power"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReading:
    """The counters and states of a GPU at one moment. Counts only grow while the driver is loaded; `aggregate` ones
    survive that.

    `is_lost`: the driver cannot reach the GPU any more; then nothing else is known.
    `ecc_volatile`, `ecc_aggregate`: uncorrectable errors; `ecc_corrected`: corrected ones, volatile.
    `rows_pending`, `rows_failed`: of row remapping.
    `links_up`: active NVLinks. `link_errors`: their CRC errors and replays. `link_recoveries`: retrainings.
    """

    is_lost: bool = False
    action: RecoveryAction | None = None
    ecc_volatile: int | None = None
    ecc_aggregate: int | None = None
    ecc_corrected: int | None = None
    rows_pending: bool | None = None
    rows_failed: bool | None = None
    links_up: int | None = None
    link_errors: int | None = None
    link_recoveries: int | None = None
    throttles: frozenset[Throttle] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class XidEvent:
    """An error that the driver has reported. `code`: NVIDIA's XID; `action`: the recovery action that the driver names
    right after it."""

    code: int
    action: RecoveryAction | None = None


Sighting: TypeAlias = GpuReading | XidEvent
Choice: TypeAlias = Literal["auto", "nvml", "fake", "none"]


class NoDriver(Exception):
    """GPUs cannot be watched here; the text says why, and what would help."""


class GpuDriver(Protocol):
    """Reads GPUs, numbered from 0. `names`: by GPU, its UUID. `gpu_of_slot`: by slot, the GPU that its worker computes
    on. `models`: by GPU, the driver's name for its model; "": unknown.

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


#: Families whose names say how much memory a GPU has, or of which there is one size.
_FAMILY = re.compile(r"\b(a100|a800|h100|h200)\b")
_MEMORY = re.compile(r"\b(\d+)gb\b")
_USUAL_GB = {"a100": 40, "a800": 80, "h100": 80, "h200": 141}
_LENGTH_MAX = 63


def gpu_type(names: Sequence[str]) -> str:
    """Return the type of GPUs in the words of the throughput model's presets ("h100-80g"), from the driver's names
    ("NVIDIA H100 80GB HBM3"): "" without any, all types joined by "_" where there are several."""
    return "_".join(sorted({_type(name) for name in names} - {""}))[:_LENGTH_MAX]


def _type(name: str) -> str:
    words = name.lower()
    family = _FAMILY.search(words)
    if family is None:
        return re.sub(r"[^a-z0-9]+", "-", words.removeprefix("nvidia ")).strip("-")
    size = _MEMORY.search(words)
    return f"{family[1]}-{size[1] if size else _USUAL_GB[family[1]]}g"
