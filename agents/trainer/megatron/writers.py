"""TensorBoard and W&B, written by the leader's replica alone, whichever that is.

A writer is made when it is first written to by a process of the leader's replica. Before it is known which replica
leads, and on all others, what is written is dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class LeadWriter:
    """In place of one of Megatron's writers. `leads`: whether this process is in the leader's replica. `make`: the real
    one; None where it cannot be made."""

    def __init__(self, leads: Callable[[], bool], make: Callable[[], Any]) -> None:
        self._leads = leads
        self._make = make
        self._writers: list[Any] = []

    def __bool__(self) -> bool:
        return self._leads() and self._real() is not None

    def _real(self) -> Any:
        if not self._writers:
            self._writers.append(self._make())
        return self._writers[0]

    def __getattr__(self, name: str) -> Any:
        if not self._leads():
            real = self._writers[0] if self._writers and name in ("flush", "finish", "close") else None
            return getattr(real, name) if real is not None else _Dropped()
        return getattr(self._real(), name)


class _Dropped:
    """Takes every call and every attribute, and does nothing."""

    def __call__(self, *_: Any, **__: Any) -> None:
        return None

    def __getattr__(self, _: str) -> _Dropped:
        return self
