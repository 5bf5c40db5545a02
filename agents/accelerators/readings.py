"""The driver's data about a GPU: counters and states at one moment, and XID events. Values; None: unknown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

#: The action that a GPU needs before it can be used again, by the driver; "other": one of a newer driver.
RecoveryAction: TypeAlias = Literal["none", "reset", "reboot", "drain", "other"]
#: Why a GPU runs slower than it could, beyond its normal power management.
Throttle: TypeAlias = Literal["thermal", "power"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReading:
    """One look at a GPU. Counts only grow while the driver is loaded; `aggregate` ones survive that.

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
    """The driver has reported a code; `action`: the recovery action that it names right after it."""

    code: int
    action: RecoveryAction | None = None


Sighting: TypeAlias = GpuReading | XidEvent
