"""What goes wrong in a real cluster is detected, laid at the right door once, and mended: one task of three ranks."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from unicrond.dev import DevCluster, small_cluster
from unicrond.state import ClusterState, Severity, TaskStatus, WorkerStatus

TASK = "big"
TIMEOUT_S = 60.0


class Cluster:
    """A DevCluster with one task on all of its nodes."""

    def __init__(self, dev: DevCluster, directory: Path) -> None:
        self.dev = dev
        self.directory = directory

    async def submit(self, **env: str) -> None:
        await self.dev.submit(
            {
                "name": TASK,
                "max_workers": len(self.dev.node_names),
                "model": {"layers": 1, "hidden": 32, "heads": 2, "seq": 32, "vocab": 256},
                "env": {"XDG_CACHE_HOME": str(self.directory / "cache"), **env},
                "global_batch": 12,
                "iterations": 1_000_000,
                "checkpoint": {"interval": 0},
            }
        )

    async def until(self, what: str, holds: Callable[[ClusterState], object]) -> ClusterState:
        deadline = time.monotonic() + TIMEOUT_S
        state = ClusterState()
        while time.monotonic() < deadline:
            with contextlib.suppress(aiohttp.ClientError, OSError):
                state, _ = await self.dev.state()
                if holds(state):
                    return state
                failed = [task.reason for task in state.tasks.values() if task.status is TaskStatus.FAILED]
                assert not failed, failed
            await asyncio.sleep(0.05)  # the API is all that a person has
        told = [f"{i.id} {i.kind} {i.worker}: {i.message}" for i in (*state.closed, *state.incidents.values())]
        raise AssertionError(f"waited {TIMEOUT_S:g} s for: {what}; {told}")

    async def training(self, incidents: int, beyond: int = 15) -> ClusterState:
        """All members train, past warm-up, and so many incidents are closed."""
        first: list[int] = []

        def holds(state: ClusterState) -> bool:
            task = state.tasks.get(TASK)
            if task is None or task.membership is None or state.incidents or len(state.closed) < incidents:
                return False
            if not task.confirmed or len(task.membership.members) < len(self.dev.node_names):
                return False
            first.append(task.iteration)
            return task.iteration > first[0] + beyond and task.committed_generation == task.generation

        return await self.until(f"whole and training, {incidents} incidents closed", holds)

    async def events(self, kind: str) -> list[dict[str, object]]:
        async with aiohttp.ClientSession() as session, session.get(self.dev.url + "/v1/events") as response:
            lines = (await response.text()).splitlines()
        entries = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
        found = [entry.get("envelope", {}).get("event", {}) for entry in entries]
        return [event for event in found if event.get("type") == kind]


@asynccontextmanager
async def cluster_of(directory: Path, nodes: int) -> AsyncIterator[Cluster]:
    async with small_cluster(directory, nodes=nodes) as dev:
        yield Cluster(dev, directory)


def members(state: ClusterState) -> list[str]:
    membership = state.tasks[TASK].membership
    assert membership is not None
    return [member.worker for member in membership.members]


@pytest.mark.timeout(240)
async def test_an_exception_a_hang_and_a_kill_are_one_incident_each(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, 3) as cluster:
        await cluster.submit(UNICRON_FAULT=f"raise@worker={TASK}.2,at=agreed")
        state = await cluster.training(incidents=1)
        raised = state.closed[0]
        assert (raised.kind, raised.worker, raised.severity) == ("exception", f"{TASK}.2", Severity.SEV2)
        iteration = raised.message.removeprefix("RuntimeError: injected at agreed of iteration ")
        assert iteration.isdecimal() and f"iteration {iteration}, step" in raised.place

        hung = members(state)[-1]
        os.kill(state.tasks[TASK].workers[hung].pid, signal.SIGSTOP)
        state = await cluster.training(incidents=2)
        stopped = state.closed[1]
        assert (stopped.kind, stopped.worker, stopped.severity) == ("hang", hung, Severity.SEV2)
        assert hung not in members(state)

        killed = members(state)[0]
        os.kill(state.tasks[TASK].workers[killed].pid, signal.SIGKILL)
        state = await cluster.training(incidents=3)
        died = state.closed[2]
        assert (died.kind, died.worker) == ("process_exit", killed)
        assert "the kernel's OOM killer did not" in died.message or "signal 9" in died.message

        assert state.incidents_total == 3, "symptoms that peers reported became incidents of their own"
        assert {w.status for w in state.tasks[TASK].workers.values()} == {WorkerStatus.MEMBER}
        exits = {str(e["worker"]): e for e in await cluster.events("WorkerExited")}
        assert exits[killed]["cause"] == "signalled" and exits[f"{TASK}.2"]["cause"] == "exited"
        assert {e["worker"] for e in await cluster.events("HangSuspected")} >= {hung}
