"""The status of the process around a coordinator: its log, and which head leads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from unicrond.events.log.lease import Holder


class Leadership(Protocol):
    """Tell which head leads (`unicrond/service/head/head.py`)."""

    leader: Holder | None

    @property
    def leads(self) -> bool:
        """Return whether this head leads."""

    @property
    def standing_by(self) -> list[str]:
        """Return the heads that stand by, as HOST:PID."""


class ProcessStatus(NamedTuple):
    """The process around a coordinator. `trouble`: why the log takes nothing at this moment; empty where it takes
    appends. `head`: knows which head leads; None: this one, alone. `weaker`: the promises of the log that do not hold
    here, a line each. `archive`: where the archive is (LogLife.archive)."""

    trouble: Callable[[], str] = str
    head: Leadership | None = None
    weaker: Callable[[], list[str]] = list
    archive: Callable[[], dict[str, Any]] = dict

    @property
    def leads(self) -> bool:
        """Return whether this head leads."""
        return self.head is None or self.head.leads

    @property
    def heads(self) -> dict[str, Any]:
        """Return which head leads, and which stand by."""
        if self.head is None:
            return {}
        leader = self.head.leader
        address = {"process": leader.process, "api": leader.api} if leader is not None else None
        return {"leader": address, "standing_by": self.head.standing_by}

    @property
    def leader_address(self) -> str:
        """Return HOST:PORT of the API of another head that leads; "": none is known."""
        leader = self.head.leader if self.head is not None else None
        return leader.api if leader is not None and not self.leads else ""

    @property
    def referral(self) -> str:
        """Return an error text that refers to the head that leads."""
        leader = self.head.leader if self.head is not None else None
        if leader is None or self.leads:
            return "coordinator: no head leads yet; try again in a moment"
        return f"coordinator: this head stands by; ask the one that leads, {leader.process} (API {leader.api})"
