"""What a training process is given before its entry starts; the hook picks it up from here."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agents.trainer.channel import AgentChannel
from agents.trainer.injection import Injection
from agents.trainer.messages import Launch
from events.vocabulary import Phase

if TYPE_CHECKING:
    from agents.trainer.replica import Replica


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a worker waits: for a membership after a fault, for an agent, for a silent collective; and how many
    bytes of gradients it reduces at a time."""

    fault_wait_s: float
    lease_s: float
    collective_timeout_s: float
    bucket_bytes: int = 32 * 1024 * 1024

    @staticmethod
    def from_environment() -> Patience:
        """UNICRON_FAULT_WAIT_S (120), UNICRON_LEASE_S (60), UNICRON_COLLECTIVE_TIMEOUT_S (1800), UNICRON_BUCKET_BYTES
        (32 MiB; the same for all workers of a task)."""
        return Patience(
            fault_wait_s=_seconds("UNICRON_FAULT_WAIT_S", 120.0),
            lease_s=_seconds("UNICRON_LEASE_S", 60.0),
            collective_timeout_s=_seconds("UNICRON_COLLECTIVE_TIMEOUT_S", 1800.0),
            bucket_bytes=_bytes("UNICRON_BUCKET_BYTES", 32 * 1024 * 1024),
        )


def _bytes(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    if text and not (text.isdecimal() and int(text) > 0):
        raise ValueError(f"{name}: {text!r} is no number of bytes; give a whole one above 0, or leave it out")
    return int(text or default)


def _seconds(name: str, default: float) -> float:
    text = os.environ.get(name, "")
    try:
        value = float(text) if text else default
    except ValueError:
        value = -1.0
    if not 0.0 < value < float("inf"):
        raise ValueError(f"{name}: {text!r} is no number of seconds; give one above 0, or leave it out")
    return value


@dataclass(slots=True)
class Context:
    """The process's launch, its line to the agent, its replica, and where it stands (told in case of trouble)."""

    launch: Launch
    channel: AgentChannel
    replica: Replica
    patience: Patience
    injection: Injection
    generation: int = 0
    iteration: int = 0
    phase: Phase = "start"


_current: Context | None = None


def enter(context: Context) -> None:
    """Make `context` this process's own."""
    global _current
    _current = context


def current() -> Context:
    """This process's context. Raises RuntimeError outside a worker."""
    if _current is None:
        raise RuntimeError("Hook.attach: this process was not started by unicrond; submit the script as a task's entry")
    return _current
