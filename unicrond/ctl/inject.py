"""Ordered faults from Python, for tests and drills:

    inject("http://127.0.0.1:7470").kill(task="big", rank=1).at_iteration(20).now()
    await inject(cluster).hang(task="big").at_iteration(5).during("reduce")

`inject` takes an address, a Client, or anything with an address in `url`. An order is sent by `now()` (blocking), or
by `await` (in a thread); both give the API's answer and raise what Client raises, Refused above all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Protocol

from unicrond.ctl.client import Client
from unicrond.events.vocabulary import FaultPhase


class HasUrl(Protocol):
    """An object that runs a coordinator at `url`."""

    url: str


@dataclass(frozen=True, slots=True)
class FaultRequest:
    """One fault, not sent yet; the methods return a changed copy."""

    client: Client
    fields: dict[str, Any]

    def at_iteration(self, iteration: int) -> FaultRequest:
        """Set the iteration, instead of at once."""
        return FaultRequest(self.client, self.fields | {"at_iteration": iteration})

    def during(self, phase: FaultPhase) -> FaultRequest:
        """Set the point of the iteration."""
        return FaultRequest(self.client, self.fields | {"phase": phase})

    def counting(self) -> FaultRequest:
        """Count the fault against node and task (strikes, returns), like an unordered fault."""
        return FaultRequest(self.client, self.fields | {"counts": True})

    def now(self) -> dict[str, Any]:
        """Send the request; return {"node", "worker", "seq"}."""
        return self.client.inject(self.fields)

    def __await__(self) -> Generator[Any, None, dict[str, Any]]:
        return asyncio.to_thread(self.now).__await__()


@dataclass(frozen=True, slots=True)
class InjectionClient:
    """Every fault by its name; `rank` None: the task's first worker, or its first on `node`."""

    client: Client

    def kill(self, *, task: str | None = None, rank: int | None = None, node: str | None = None) -> FaultRequest:
        """Order SIGKILL for a worker; without a task for a whole node: its workers, its fork server, its agent."""
        return self._order("kill", task, rank, node)

    def stop(self, *, task: str, rank: int | None = None, node: str | None = None) -> FaultRequest:
        """Order SIGSTOP: the worker stands still."""
        return self._order("stop", task, rank, node)

    def exception(self, *, task: str, rank: int | None = None, node: str | None = None) -> FaultRequest:
        """Raise a RuntimeError in the worker's training loop."""
        return self._order("exception", task, rank, node)

    def nan(self, *, task: str, rank: int | None = None, node: str | None = None) -> FaultRequest:
        """Make the next loss NaN."""
        return self._order("nan", task, rank, node)

    def slow(self, seconds: float, *, task: str, rank: int | None = None, node: str | None = None) -> FaultRequest:
        """Make every iteration from now on take so many `seconds` longer."""
        return self._order("slow", task, rank, node, seconds=seconds)

    def hang(self, *, task: str, rank: int | None = None, node: str | None = None) -> FaultRequest:
        """Make the worker's training loop wait without end."""
        return self._order("hang", task, rank, node)

    def exit(self, *, task: str, rank: int | None = None, node: str | None = None) -> FaultRequest:
        """End the process with exit code 3, without a message."""
        return self._order("exit", task, rank, node)

    def oom(self, *, task: str, rank: int | None = None, node: str | None = None) -> FaultRequest:
        """Raise a MemoryError in the worker's training loop."""
        return self._order("oom", task, rank, node)

    def xid(
        self, code: int, *, node: str | None = None, task: str | None = None, rank: int | None = None
    ) -> FaultRequest:
        """Have the node's accelerator (the worker's, with a task) report this XID."""
        return self._order("xid", task, rank, node, xid=code)

    def drop_network(self, *, node: str, seconds: float = 0.0) -> FaultRequest:
        """Take the node's links down for so many `seconds` (0: for good)."""
        return self._order("drop_network", None, None, node, seconds=seconds)

    def _order(self, kind: str, task: str | None, rank: int | None, node: str | None, **more: Any) -> FaultRequest:
        return FaultRequest(self.client, {"kind": kind, "task": task, "rank": rank, "node": node, **more})


def inject(where: str | Client | HasUrl) -> InjectionClient:
    """Return what orders faults in the cluster at `where`."""
    if isinstance(where, Client):
        return InjectionClient(where)
    return InjectionClient(Client(where if isinstance(where, str) else where.url))
