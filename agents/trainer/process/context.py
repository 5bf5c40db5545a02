"""What a training process gets before its program starts: launch, channel, replica, settings; the hook finds it
here."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from unicrond.agents.protocol.injection import FaultInjector
from unicrond.agents.protocol.marks import Marker
from unicrond.agents.protocol.messages import Launch
from unicrond.agents.trainer.process.channel import AgentChannel
from unicrond.events.vocabulary import DETERMINISM, DETERMINISTIC, Phase

if TYPE_CHECKING:
    from unicrond.agents.trainer.process.replica import ReplicaWorld

#: Of /proc/PID/stat, counted from behind the process's name: where its arguments begin; they end at the next.
_ARG_START = 45
_PART_MAX = 0.5
_PREFIX = "unicrond: "


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """How long a worker waits: for a membership after a fault, for an agent, for a silent collective (at most: see
    baseline.py); and how many bytes of gradients it reduces at a time.

    `hang_floor_s`: no iteration is late before that. `start_s`: as long as nothing is known of its iterations.
    `checksum_every`: iterations from one checksum of the parameters in the log to the next, 0: replicas do not compare
    their parameters at all; else they do so in each iteration. `standby_max`:
    standby groups are kept for so many replicas at most, 0: never. `deterministic`: see process/determinism.py.
    `save_wait_s`: see states/storing.py. `audit_budget`: the part of the time that audits may cost
    (detection/audits.py).
    """

    fault_wait_s: float
    lease_s: float
    collective_timeout_s: float
    bucket_bytes: int = 32 * 1024 * 1024
    hang_floor_s: float = 1.0
    start_s: float = 600.0
    checksum_every: int = 50
    standby_max: int = 8
    deterministic: str = "check"
    save_wait_s: float = 60.0
    audit_budget: float = 0.005

    @staticmethod
    def from_environment() -> WorkerSettings:
        """Read UNICRON_FAULT_WAIT_S (120), UNICRON_LEASE_S (60), UNICRON_COLLECTIVE_TIMEOUT_S (600),
        UNICRON_HANG_FLOOR_S (1), UNICRON_START_S (600), UNICRON_SAVE_WAIT_S (60); UNICRON_BUCKET_BYTES (32 MiB),
        UNICRON_CHECKSUM_EVERY (50), UNICRON_STANDBY_MAX (8) and UNICRON_DETERMINISTIC (check), which must be the same
        for all workers of a task; UNICRON_AUDIT_BUDGET (0.005). Raises ValueError."""
        return WorkerSettings(
            fault_wait_s=_seconds("UNICRON_FAULT_WAIT_S", 120.0),
            lease_s=_seconds("UNICRON_LEASE_S", 60.0),
            collective_timeout_s=_seconds("UNICRON_COLLECTIVE_TIMEOUT_S", 600.0),
            bucket_bytes=_bytes("UNICRON_BUCKET_BYTES", 32 * 1024 * 1024),
            hang_floor_s=_seconds("UNICRON_HANG_FLOOR_S", 1.0),
            start_s=_seconds("UNICRON_START_S", 600.0),
            checksum_every=_count("UNICRON_CHECKSUM_EVERY", 50, "iterations"),
            standby_max=_count("UNICRON_STANDBY_MAX", 8, "replicas"),
            deterministic=_one_of(DETERMINISTIC, DETERMINISM),
            save_wait_s=_seconds("UNICRON_SAVE_WAIT_S", 60.0),
            audit_budget=_part("UNICRON_AUDIT_BUDGET", 0.005),
        )


def _one_of(name: str, choices: Sequence[str]) -> str:
    text = os.environ.get(name, "") or choices[0]
    if text not in choices:
        raise ValueError(f"{name}: {text!r} is not one of {', '.join(choices)}")
    return text


def _count(name: str, default: int, unit: str) -> int:
    text = os.environ.get(name, "")
    if text and not text.isdecimal():
        raise ValueError(
            f"{name}: {text!r} is not a number of {unit}; give a whole number, 0 for never, or leave it out"
        )
    return int(text) if text else default


def _bytes(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    if text and not (text.isdecimal() and int(text) > 0):
        raise ValueError(f"{name}: {text!r} is not a number of bytes; give a whole number above 0, or leave it out")
    return int(text or default)


def _part(name: str, default: float) -> float:
    text = os.environ.get(name, "")
    try:
        value = float(text) if text else default
    except ValueError:
        value = -1.0
    if not 0.0 <= value <= _PART_MAX:
        raise ValueError(f"{name}: {text!r} is no part of the time; give 0 (none) to {_PART_MAX:g}, or leave it out")
    return value


def _seconds(name: str, default: float) -> float:
    text = os.environ.get(name, "")
    try:
        value = float(text) if text else default
    except ValueError:
        value = -1.0
    if not 0.0 < value < float("inf"):
        raise ValueError(f"{name}: {text!r} is not a number of seconds; give one above 0, or leave it out")
    return value


@dataclass(slots=True)
class Context:
    """The process's launch, its channel to the agent, its replica, and its present iteration and phase (reported with
    an error)."""

    launch: Launch
    channel: AgentChannel
    replica: ReplicaWorld
    settings: WorkerSettings
    injection: FaultInjector
    generation: int = 0
    iteration: int = 0
    mark: Marker = field(default_factory=lambda: Marker(None))
    #: What is left to do where the program ends by itself with code 0; it raises LeftEarly in mid-training.
    finish: Callable[[], None] | None = None
    #: What gradients are divided by in their backward already (`megatron/runs.py`).
    divided_by: int = 1
    #: The program has ended.
    has_ended: bool = False

    @property
    def phase(self) -> Phase:
        """Return what the worker is doing; its mark says the same to the agent."""
        return self.mark.phase

    @phase.setter
    def phase(self, phase: Phase) -> None:
        self.mark.phase = phase


_current: Context | None = None


def enter(context: Context) -> None:
    """Make `context` this process's own."""
    global _current
    _current = context


def is_worker() -> bool:
    """Return whether unicrond started this process."""
    return _current is not None


def current() -> Context:
    """Return this process's context. Raises RuntimeError outside a worker."""
    if _current is None:
        raise RuntimeError("Hook.attach: unicrond did not start this process; submit the script as a task's entry")
    return _current


def show_as(name: str) -> None:
    """Show this process under that name in ps and nvidia-smi, and as much of it in top as fits (15 bytes). Where Linux
    does not say where its arguments are, they stay: a worker is the fork server's copy, and looks like it."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path("/proc/self/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
        start, end = int(fields[_ARG_START]), int(fields[_ARG_START + 1])
        if 0 < start < end:
            ctypes.memmove(start, name.encode()[: end - start - 1].ljust(end - start, b"\0"), end - start)
        Path("/proc/self/comm").write_text(name.removeprefix(_PREFIX), "utf-8")
