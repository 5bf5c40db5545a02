"""The GPU driver's interface on top of NVML, NVIDIA's management library (extra `gpu`: nvidia-ml-py).

Rules
-----
* A field that a GPU or an older driver does not support is None. A GPU that the driver has lost is `is_lost`.
* An event has its XID alone, so the recovery action is read right after it.
* nvmlEventSetWait cannot be interrupted: it is called for at most _SLICE_S at a time. After a call that fails at
  once (the driver is unloaded, a GPU was lost) it is called again after _AGAIN_S.
* No CUDA: NVML makes no context.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from unicrond.agents.accelerators.driver import GpuReading, NoDriver, RecoveryAction, Throttle, XidEvent

logger = logging.getLogger("unicrond.agents")

_SLICE_S = 0.5
_AGAIN_S = 5.0
_ALL_LINKS = 2**32 - 1
#: NVML_GPU_RECOVERY_ACTION_*; a number that is not here is "other".
_ACTIONS: dict[int, RecoveryAction] = {
    0: "none",
    1: "reset",
    2: "reboot",
    3: "drain",
    4: "drain",
    6: "reset",
    7: "reboot",
}
#: Reasons that the clocks are held down: thermal (software, hardware), power brake, hardware slowdown of either sort.
_SW_THERMAL, _HW_THERMAL, _POWER_BRAKE, _HW_SLOWDOWN = 0x20, 0x40, 0x80, 0x8
#: In the union of a field's value, by NVML's value type.
_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")


class NvmlDriver:
    """The GPUs that the slots' workers run on. `slots`: names as in CUDA_VISIBLE_DEVICES (index, UUID, MIG UUID)."""

    def __init__(self, slots: Sequence[str]) -> None:
        """Open NVML. Raise NoDriver."""
        try:
            import pynvml
        except ImportError:
            raise NoDriver("nvidia-ml-py is not installed; pip install 'unicrond[gpu]'") from None
        self._nvml: Any = pynvml
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise NoDriver(f"NVML cannot be used: {error}") from None
        try:
            self._open(slots)
        except pynvml.NVMLError as error:
            pynvml.nvmlShutdown()
            raise NoDriver(f"NVML cannot see the GPUs {', '.join(slots)}: {error}") from None

    def _open(self, slots: Sequence[str]) -> None:
        nvml = self._nvml
        self._devices: list[Any] = []
        names: list[str] = []
        models: list[str] = []
        gpu_of_slot = []
        for slot in slots:
            device = self._device(slot)
            model = str(nvml.nvmlDeviceGetName(device))
            name = f"{model} {nvml.nvmlDeviceGetUUID(device)}"
            if name not in names:
                names.append(name)
                models.append(model)
                self._devices.append(device)
            gpu_of_slot.append(names.index(name))
        self.names, self.models = tuple(names), tuple(models)
        self.gpu_of_slot = tuple(gpu_of_slot)
        self._addresses = [_address(device) for device in self._devices]
        self._links = [self._links_of(device) for device in self._devices]
        self._wakeup = threading.Event()
        self._complaints: set[str] = set()
        self._has_events = False
        self._events = nvml.nvmlEventSetCreate()
        for name, device in zip(names, self._devices, strict=True):
            try:
                nvml.nvmlDeviceRegisterEvents(device, nvml.nvmlEventTypeXidCriticalError, self._events)
                self._has_events = True
            except nvml.NVMLError as error:
                logger.warning("%s: no XID events here (%s); only its counters are watched", name, error)

    def _device(self, name: str) -> Any:
        nvml = self._nvml
        if name.isdecimal():
            return nvml.nvmlDeviceGetHandleByIndex(int(name))
        if name.startswith("MIG-"):
            return nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvml.nvmlDeviceGetHandleByUUID(name))
        # CUDA accepts the beginning of a UUID as well.
        for index in range(nvml.nvmlDeviceGetCount()):
            device = nvml.nvmlDeviceGetHandleByIndex(index)
            if nvml.nvmlDeviceGetUUID(device).startswith(name):
                return device
        return nvml.nvmlDeviceGetHandleByUUID(name)

    def _links_of(self, device: Any) -> list[int]:
        """Return the GPU's NVLinks, active or not."""
        nvml = self._nvml
        return [
            link
            for link in range(nvml.NVML_NVLINK_MAX_LINKS)
            if self._optional(nvml.nvmlDeviceGetNvLinkState, device, link) is not None
        ]

    # --- reading ---------------------------------------------------------------------------------

    def read(self, gpu: int) -> GpuReading:
        """Read a GPU; see Driver."""
        nvml, device = self._nvml, self._devices[gpu]
        try:
            nvml.nvmlDeviceGetUUID(device)
            fields = self._fields(device)
            rows = self._optional(nvml.nvmlDeviceGetRemappedRows, device)
            up = [self._optional(nvml.nvmlDeviceGetNvLinkState, device, link) for link in self._links[gpu]]
            return GpuReading(
                action=_action(fields[nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION]),
                ecc_volatile=self._ecc(device, nvml.NVML_VOLATILE_ECC),
                ecc_aggregate=self._ecc(device, nvml.NVML_AGGREGATE_ECC),
                ecc_corrected=self._ecc(device, nvml.NVML_VOLATILE_ECC, nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED),
                rows_pending=None if rows is None else bool(rows[2]),
                rows_failed=None if rows is None else bool(rows[3]),
                links_up=sum(map(bool, up)) if None not in up else None,
                link_errors=_first(fields, self._link_errors()),
                link_recoveries=_first(fields, self._link_recoveries()),
                throttles=_throttles(self._optional(nvml.nvmlDeviceGetCurrentClocksEventReasons, device) or 0),
            )
        except nvml.NVMLError_GpuIsLost:
            return GpuReading(is_lost=True)
        except nvml.NVMLError as error:
            self._complain(f"{self.names[gpu]} cannot be read: {error}")
            return GpuReading()

    def _fields(self, device: Any) -> dict[int, int | None]:
        nvml = self._nvml
        fields = [(nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, 0)]
        for alternatives in (self._link_errors(), self._link_recoveries()):
            # The first counts all links by itself; newer ones do under this scope.
            fields += [(field, _ALL_LINKS if place else 0) for place, ids in enumerate(alternatives) for field in ids]
        values = self._optional(nvml.nvmlDeviceGetFieldValues, device, fields) or ()
        by_id = {value.fieldId: _value(value) for value in values}
        return {field: by_id.get(field) for field, _ in fields}

    def _link_errors(self) -> list[list[int]]:
        """Return the fields to be summed, by generation of GPUs: the first that the driver knows counts."""
        nvml = self._nvml
        return [
            [
                nvml.NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL,
                nvml.NVML_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL,
                nvml.NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL,
            ],
            [nvml.NVML_FI_DEV_NVLINK_ERROR_DL_CRC, nvml.NVML_FI_DEV_NVLINK_ERROR_DL_REPLAY],
        ]

    def _link_recoveries(self) -> list[list[int]]:
        nvml = self._nvml
        return [
            [nvml.NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL],
            [nvml.NVML_FI_DEV_NVLINK_ERROR_DL_RECOVERY],
            [nvml.NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_EVENTS],
        ]

    def _ecc(self, device: Any, counter: int, kind: int | None = None) -> Any:
        """Return a counter of uncorrectable errors, or of those of `kind`."""
        nvml = self._nvml
        kind = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED if kind is None else kind
        return self._optional(nvml.nvmlDeviceGetTotalEccErrors, device, kind, counter)

    def _optional(self, ask: Callable[..., Any], *about: Any) -> Any:
        """Return the answer; None where there is none. Raise NVMLError_GpuIsLost."""
        try:
            return ask(*about)
        except self._nvml.NVMLError_GpuIsLost:
            raise
        except self._nvml.NVMLError:
            return None

    # --- events ----------------------------------------------------------------------------------

    def wait(self, timeout_s: float) -> tuple[int, XidEvent] | None:
        """Wait for an event; see Driver."""
        nvml, until_s = self._nvml, time.monotonic() + timeout_s
        while self._has_events and not self._wakeup.is_set() and (left_s := until_s - time.monotonic()) > 0:
            try:
                event = nvml.nvmlEventSetWait(self._events, int(1000 * min(left_s, _SLICE_S)) + 1)
            except nvml.NVMLError_Timeout:
                continue
            except nvml.NVMLError as error:
                self._complain(f"NVML does not report events: {error}")
                self._wakeup.wait(min(left_s, _AGAIN_S))
                continue
            xid_event = self._xid_event(event)
            if xid_event is not None:
                return xid_event
        self._wakeup.wait(max(0.0, until_s - time.monotonic()))
        return None

    def _xid_event(self, event: Any) -> tuple[int, XidEvent] | None:
        address = _address(event.device)
        if event.eventType != self._nvml.nvmlEventTypeXidCriticalError or address not in self._addresses:
            return None
        gpu = self._addresses.index(address)
        try:
            action = _action(self._fields(self._devices[gpu])[self._nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION])
        except self._nvml.NVMLError:
            action = None
        return gpu, XidEvent(code=int(event.eventData), action=action)

    def _complain(self, text: str) -> None:
        """Log each text once: it would be the same every few seconds."""
        if text not in self._complaints:
            self._complaints.add(text)
            logger.warning("%s", text)

    def wake(self) -> None:
        """Wake the waiting thread; see Driver."""
        self._wakeup.set()

    def close(self) -> None:
        """Close NVML; see Driver."""
        for let_go in (lambda: self._nvml.nvmlEventSetFree(self._events), self._nvml.nvmlShutdown):
            try:
                let_go()
            except self._nvml.NVMLError as error:
                logger.warning("NVML: %s", error)


def _address(device: Any) -> int | None:
    """Return the address in NVML's handle of a device, a pointer whose target only NVML knows."""
    return ctypes.cast(device, ctypes.c_void_p).value


def _value(field: Any) -> int | None:
    if field.nvmlReturn or not 0 <= field.valueType < len(_MEMBERS):
        return None
    return int(getattr(field.value, _MEMBERS[field.valueType]))


def _action(value: int | None) -> RecoveryAction | None:
    return None if value is None else _ACTIONS.get(value, "other")


def _first(fields: dict[int, int | None], alternatives: Sequence[Sequence[int]]) -> int | None:
    """Return the sum of the first alternative with any value."""
    for ids in alternatives:
        values = [value for field in ids if (value := fields[field]) is not None]
        if values:
            return sum(values)
    return None


def _throttles(reasons: int) -> frozenset[Throttle]:
    thermal: set[Throttle] = {"thermal"} if reasons & (_SW_THERMAL | _HW_THERMAL) else set()
    power: set[Throttle] = {"power"} if reasons & _POWER_BRAKE or (reasons & _HW_SLOWDOWN and not thermal) else set()
    return frozenset(thermal | power)
