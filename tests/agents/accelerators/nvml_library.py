"""libnvidia-ml as far as the driver calls it, in Python: the real bindings (pynvml) run against it, without a GPU.

It stands where pynvml keeps the shared library, takes the same C arguments and gives the same return codes.
"""

from __future__ import annotations

import ctypes
import queue
from dataclasses import dataclass, field
from typing import Any

import pynvml
import pytest

ALL_LINKS = 2**32 - 1


@dataclass
class Gpu:
    """What one device answers. `fields`: (field, scope) -> value; what is not there is not supported."""

    name: str
    uuid: str
    fields: dict[tuple[int, int], int] = field(default_factory=dict)
    ecc: dict[int, int] = field(default_factory=dict)
    corrected: dict[int, int] = field(default_factory=dict)
    rows: tuple[int, int, int, int] | None = None
    links: list[int] = field(default_factory=list)
    reasons: int = 0
    is_lost: bool = False
    takes_events: bool = True


class Library:
    """`gpus` by index. `events`: (gpu index, XID) or an error code, in the order in which they are waited for."""

    def __init__(self, gpus: list[Gpu]) -> None:
        self.gpus = gpus
        self.events: queue.SimpleQueue[tuple[int, int] | int] = queue.SimpleQueue()
        self.registered: list[int] = []
        self.is_open = False

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(pynvml, "nvmlLib", self)
        monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})

    # --- devices ---------------------------------------------------------------------------------

    def nvmlInitWithFlags(self, flags: int) -> int:
        self.is_open = True
        return pynvml.NVML_SUCCESS

    def nvmlShutdown(self) -> int:
        self.is_open = False
        return pynvml.NVML_SUCCESS

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = len(self.gpus)
        return pynvml.NVML_SUCCESS

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, device: Any) -> int:
        if index.value >= len(self.gpus):
            return pynvml.NVML_ERROR_INVALID_ARGUMENT
        _point(device._obj, index.value)
        return pynvml.NVML_SUCCESS

    def nvmlDeviceGetHandleByUUID(self, uuid: Any, device: Any) -> int:
        for index, gpu in enumerate(self.gpus):
            if uuid.value.decode() in (gpu.uuid, f"MIG-{gpu.uuid}"):
                _point(device._obj, index)
                return pynvml.NVML_SUCCESS
        return pynvml.NVML_ERROR_NOT_FOUND

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, mig: Any, device: Any) -> int:
        _point(device._obj, _index(mig))
        return pynvml.NVML_SUCCESS

    def nvmlDeviceGetName(self, device: Any, text: Any, length: Any) -> int:
        text.value = self.gpus[_index(device)].name.encode()
        return pynvml.NVML_SUCCESS

    def nvmlDeviceGetUUID(self, device: Any, text: Any, length: Any) -> int:
        text.value = self.gpus[_index(device)].uuid.encode()
        return pynvml.NVML_SUCCESS

    # --- readings --------------------------------------------------------------------------------

    def nvmlDeviceGetTotalEccErrors(self, device: Any, kind: Any, counter: Any, count: Any) -> int:
        gpu = self.gpus[_index(device)]
        if gpu.is_lost:
            return pynvml.NVML_ERROR_GPU_IS_LOST
        counts = gpu.ecc if kind.value == pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED else gpu.corrected
        if counter.value not in counts:
            return pynvml.NVML_ERROR_NOT_SUPPORTED
        count._obj.value = counts[counter.value]
        return pynvml.NVML_SUCCESS

    def nvmlDeviceGetRemappedRows(self, device: Any, *counts: Any) -> int:
        gpu = self.gpus[_index(device)]
        if gpu.rows is None:
            return pynvml.NVML_ERROR_NOT_SUPPORTED
        for count, value in zip(counts, gpu.rows, strict=True):
            count._obj.value = value
        return pynvml.NVML_SUCCESS

    def nvmlDeviceGetNvLinkState(self, device: Any, link: int, state: Any) -> int:
        links = self.gpus[_index(device)].links
        if link >= len(links):
            return pynvml.NVML_ERROR_INVALID_ARGUMENT
        state._obj.value = links[link]
        return pynvml.NVML_SUCCESS

    def nvmlDeviceGetFieldValues(self, device: Any, count: Any, values: Any) -> int:
        gpu = self.gpus[_index(device)]
        for value in values._obj:
            told = gpu.fields.get((value.fieldId, value.scopeId))
            value.nvmlReturn = pynvml.NVML_ERROR_NOT_SUPPORTED if told is None else pynvml.NVML_SUCCESS
            value.valueType = pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG
            value.value.ullVal = told or 0
        return pynvml.NVML_SUCCESS

    def nvmlDeviceGetCurrentClocksEventReasons(self, device: Any, reasons: Any) -> int:
        reasons._obj.value = self.gpus[_index(device)].reasons
        return pynvml.NVML_SUCCESS

    # --- events ----------------------------------------------------------------------------------

    def nvmlEventSetCreate(self, events: Any) -> int:
        return pynvml.NVML_SUCCESS

    def nvmlEventSetFree(self, events: Any) -> int:
        return pynvml.NVML_SUCCESS

    def nvmlDeviceRegisterEvents(self, device: Any, kinds: Any, events: Any) -> int:
        assert kinds.value == pynvml.nvmlEventTypeXidCriticalError
        if not self.gpus[_index(device)].takes_events:
            return pynvml.NVML_ERROR_NOT_SUPPORTED
        self.registered.append(_index(device))
        return pynvml.NVML_SUCCESS

    def nvmlEventSetWait_v2(self, events: Any, data: Any, timeout: Any) -> int:
        try:
            event = self.events.get(timeout=timeout.value / 1000)
        except queue.Empty:
            return pynvml.NVML_ERROR_TIMEOUT
        if isinstance(event, int):
            return event
        index, data._obj.eventData = event
        data._obj.eventType = pynvml.nvmlEventTypeXidCriticalError
        _point(data._obj, index, "device")
        return pynvml.NVML_SUCCESS


_PAGE = 0x1000


def _point(target: Any, index: int, member: str = "") -> None:
    """Make a device handle point to what stands for device `index`; nobody looks there."""
    address = ctypes.c_void_p(_PAGE * (index + 1))
    place = ctypes.byref(target, getattr(type(target), member).offset) if member else ctypes.byref(target)
    ctypes.memmove(place, ctypes.byref(address), ctypes.sizeof(address))


def _index(device: Any) -> int:
    address = ctypes.cast(device, ctypes.c_void_p).value
    assert address is not None
    return address // _PAGE - 1
