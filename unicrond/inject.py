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

from events.vocabulary import FaultPhase
from unicrond.ctl.client import Client


class HasUrl(Protocol):
    """Something that runs a coordinator there."""

    url: str


@dataclass(frozen=True, slots=True)
class Order:
    """One fault, not sent yet; the methods give a changed copy."""

    client: Client
    fields: dict[str, Any]

    def at_iteration(self, iteration: int) -> Order:
        """In this iteration, instead of at once."""
        return Order(self.client, self.fields | {"at_iteration": iteration})

    def during(self, phase: FaultPhase) -> Order:
        """At this point of the iteration."""
        return Order(self.client, self.fields | {"phase": phase})

    def counting(self) -> Order:
        """Counted against node and task (strikes, returns), like an unordered fault."""
        return Order(self.client, self.fields | {"counts": True})

    def now(self) -> dict[str, Any]:
        """Send the order; {"node", "worker", "seq"}."""
        return self.client.inject(self.fields)

    def __await__(self) -> Generator[Any, None, dict[str, Any]]:
        return asyncio.to_thread(self.now).__await__()


@dataclass(frozen=True, slots=True)
class Inject:
    """Every fault by its name; `rank` None: the task's first worker, or its first on `node`."""

    client: Client

    def kill(self, *, task: str | None = None, rank: int | None = None, node: str | None = None) -> Order:
        """SIGKILL for a worker; without a task for a whole node: its workers, its fork server, its agent."""
        return self._order("kill", task, rank, node)

    def stop(self, *, task: str, rank: int | None = None, node: str | None = None) -> Order:
        """SIGSTOP: the worker stands still."""
        return self._order("stop", task, rank, node)

    def exception(self, *, task: str, rank: int | None = None, node: str | None = None) -> Order:
        """A RuntimeError in the worker's training loop."""
        return self._order("exception", task, rank, node)

    def nan(self, *, task: str, rank: int | None = None, node: str | None = None) -> Order:
        """The next loss is NaN."""
        return self._order("nan", task, rank, node)

    def slow(self, seconds: float, *, task: str, rank: int | None = None, node: str | None = None) -> Order:
        """Every iteration from now on takes so much longer."""
        return self._order("slow", task, rank, node, seconds=seconds)

    def hang(self, *, task: str, rank: int | None = None, node: str | None = None) -> Order:
        """The worker's training loop waits without end."""
        return self._order("hang", task, rank, node)

    def exit(self, *, task: str, rank: int | None = None, node: str | None = None) -> Order:
        """The process ends with exit code 3, without a word."""
        return self._order("exit", task, rank, node)

    def oom(self, *, task: str, rank: int | None = None, node: str | None = None) -> Order:
        """A MemoryError in the worker's training loop."""
        return self._order("oom", task, rank, node)

    def xid(self, code: int, *, node: str | None = None, task: str | None = None, rank: int | None = None) -> Order:
        """The node's accelerator (the worker's, with a task) reports this XID."""
        return self._order("xid", task, rank, node, xid=code)

    def drop_network(self, *, node: str, seconds: float = 0.0) -> Order:
        """The node's links go down, for so long (0: for good)."""
        return self._order("drop_network", None, None, node, seconds=seconds)

    def _order(self, kind: str, task: str | None, rank: int | None, node: str | None, **more: Any) -> Order:
        return Order(self.client, {"kind": kind, "task": task, "rank": rank, "node": node, **more})


def inject(where: str | Client | HasUrl) -> Inject:
    """Faults for the cluster there."""
    if isinstance(where, Client):
        return Inject(where)
    return Inject(Client(where if isinstance(where, str) else where.url))
