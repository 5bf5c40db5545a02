"""One task on a small cluster of real parts, for tests that break it: wait for it, look at it, read its log."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from unicrond.core.state.state import ClusterState, TaskStatus
from unicrond.core.state.work_ledger import open_books
from unicrond.core.worth.costs import settle
from unicrond.ctl.client import ApiError, Client
from unicrond.local.dev import DevCluster, small_cluster
from unicrond.views.goodput_report import open_report

TASK = "big"
TIMEOUT_S = 180.0
#: A node is lost after two of them and half a second. On a busy machine an agent had no processor for 2.5 s.
HEARTBEAT_S = 2.0
_LOOK_AGAIN_S = 0.05


class Live:
    """A DevCluster with a task of so many workers, one for each node or fewer."""

    def __init__(self, dev: DevCluster, workers: int) -> None:
        self.dev = dev
        self.workers = workers
        self.client = Client(dev.url)
        self.directory = dev.directory
        #: How many have been closed, as of the last `training`.
        self.incidents = 0

    async def submit(self, name: str = TASK, **fields: Any) -> None:
        env = {"XDG_CACHE_HOME": str(self.directory / "cache"), **fields.pop("env", {})}
        await self.dev.submit(
            {
                "name": name,
                "max_workers": self.workers,
                "model": {"layers": 1, "hidden": 32, "heads": 2, "seq": 32, "vocab": 256},
                "env": env,
                "global_batch": 12,
                "iterations": 1_000_000,
                "checkpoint": {"interval": 0},
                **fields,
            }
        )

    async def until(
        self, what: str, holds: Callable[[ClusterState], object], *, may_fail: bool = False
    ) -> ClusterState:
        """The first state in which `holds`; the API is asked again and again, as a person would."""
        deadline, state = time.monotonic() + TIMEOUT_S, ClusterState()
        while time.monotonic() < deadline:
            with contextlib.suppress(ApiError):
                state, _ = await self.dev.state()
                if holds(state):
                    return state
                failed = [task.ending.reason for task in state.tasks.values() if task.status is TaskStatus.FAILED]
                assert may_fail or not failed, failed
            await asyncio.sleep(_LOOK_AGAIN_S)
        told = [
            f"{i.id} {i.kind} {i.worker}: {i.message}" for i in (*state.closed_incidents, *state.incidents.values())
        ]
        raise AssertionError(f"waited {TIMEOUT_S:g} s for: {what}; {told}")

    async def training(self, incidents: int | None, beyond: int = 15, task: str = TASK) -> ClusterState:
        """All members train in the newest generation, so many iterations past its first look, nobody is isolated, and
        so many incidents are closed (None: any number)."""
        first: list[int] = []

        def holds(state: ClusterState) -> bool:
            found = state.tasks.get(task)
            if (
                found is None
                or not found.confirmed
                or state.incidents
                or len(state.closed_incidents) < (incidents or 0)
            ):
                return False
            if len(members(state, task)) != self.workers or found.progress.committed_generation != found.generation:
                return False
            first.append(found.progress.iteration)
            rested = not any(node.isolation.active for node in state.nodes.values())
            return rested and found.progress.iteration > first[0] + beyond

        state = await self.until(f"{self.workers} members train, {incidents} incidents are closed", holds)
        told = [
            f"{one.kind} {one.worker or one.node}: {one.message}" for one in state.closed_incidents[incidents or 0 :]
        ]
        assert incidents in (None, len(state.closed_incidents)), told
        self.incidents = len(state.closed_incidents)
        return state

    def events(self, *types: str, after: int = 0) -> list[dict[str, Any]]:
        """The log's events of these types, of all if none is named, after a sequence number."""
        return [line.envelope["event"] for line in self.client.events(after) if not types or line.type in types]

    async def assert_books_close(self) -> None:
        """What was delivered and each loss are within the whole and make it up, of the cluster and of each task. A head
        that a test has stopped is not asked."""
        with contextlib.suppress(ApiError):
            state, _ = await self.dev.state()
            assert not open_books(settle(state.ledger, state.now_us))
            assert not open_report(await asyncio.to_thread(self.client.goodput))

    async def run(self, program: str, *arguments: str) -> str:
        return await printed_by(program, *arguments)


async def printed_by(program: str, *arguments: str, status: int = 0) -> str:
    """Run one of our programs; return what it prints. It must end with this status."""
    process = await asyncio.create_subprocess_exec(
        str(Path(sys.executable).parent / program),
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await asyncio.wait_for(process.communicate(), TIMEOUT_S)
    assert process.returncode == status, output.decode()
    return output.decode()


@asynccontextmanager
async def live_cluster(
    directory: Path,
    *,
    nodes: int,
    workers: int,
    heartbeat_s: float = HEARTBEAT_S,
    agents_hand_over: bool = True,
    keys: bool = False,
    **settings: Any,
) -> AsyncIterator[Live]:
    """`settings`: of the coordinator. `keys`: every login has one."""
    async with small_cluster(
        directory, nodes=nodes, heartbeat_s=heartbeat_s, settings=settings, keys=keys, agents_hand_over=agents_hand_over
    ) as dev:
        live = Live(dev, workers)
        yield live
        await live.assert_books_close()


def told_members(decided: dict[str, Any]) -> list[str]:
    """The workers of a membership as the log shows it: each run is [node, number, seat, count, joins]."""
    runs = decided["seats"]
    return [f"{decided['task']}.{number + i}" for _, number, _, count, _ in runs for i in range(count)]


def members(state: ClusterState, task: str = TASK) -> list[str]:
    """The workers of the present membership, in rank order."""
    membership = state.tasks[task].membership if task in state.tasks else None
    return [member.worker for member in membership.members] if membership else []


def nodes_of(state: ClusterState, task: str = TASK) -> set[str]:
    """Where it has workers."""
    return {worker.node for worker in state.tasks[task].workers.values()}


def seats(state: ClusterState, task: str = TASK) -> dict[str, tuple[str, int]]:
    """Member -> its node, and the process's id."""
    workers = state.tasks[task].workers
    return {name: (workers[name].node, workers[name].pid) for name in members(state, task)}
