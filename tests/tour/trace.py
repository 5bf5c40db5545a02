"""Run a small real cluster under the tracer, kill one worker, and read what each process did."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.integration.live import live_cluster, seats
from tests.tour import tracer

ROOT = Path(__file__).parent.parent.parent
WORKERS = 3
#: Training without a fault, before the fault; and after it, before the head is asked whether all is whole.
QUIET_S = 3.0
HEAL_S = 4.0
_FLUSH_S = 0.3


@dataclass(frozen=True)
class Process:
    """One process of the cluster. `role`: head, agent, fork server (its stores and preloaders too) or worker."""

    role: str
    node: str
    lines: list[dict[str, Any]]

    @property
    def title(self) -> str:
        """Return its name for a reader."""
        return f"{self.role} of {self.node}" if self.node else self.role

    def sightings(self, name: str = "") -> Iterator[dict[str, Any]]:
        """Yield what was seen of the events, messages and effects of this type, or of all, in order of time."""
        return (line for line in self.lines if "sighting" in line and name in ("", line["sighting"]))


@dataclass(frozen=True)
class Trace:
    """A run. `entries`: the log as the API shows it, with its sentences."""

    killed_at_us: int
    worker: str
    node: str
    entries: list[dict[str, Any]]
    processes: list[Process]

    def quiet_types(self) -> set[str]:
        """Return the types of events, messages and effects that training without a fault has as well."""
        begin_us = self.killed_at_us - int(QUIET_S * 1e6)
        seen = (line for process in self.processes for line in process.sightings())
        return {line["sighting"] for line in seen if begin_us <= line["at_us"] < self.killed_at_us}

    def functions(self, begin_us: int, end_us: int) -> dict[str, set[str]]:
        """Return the functions that ran in this time, by role."""
        functions: dict[str, set[str]] = {}
        for process in self.processes:
            ran = functions.setdefault(process.role, set())
            ran.update(
                *(line["calls"] for line in process.lines if begin_us <= line["at_us"] <= end_us and "calls" in line)
            )
        return functions


async def record(folder: Path) -> Trace:
    """Train on three nodes, kill the second member's worker, wait until all is whole, and return the trace.

    Nobody asks the API for anything from QUIET_S before the fault until HEAL_S after it.
    """
    with _tracing(folder):
        async with live_cluster(folder / "cluster", nodes=WORKERS, workers=WORKERS) as live:
            await live.submit()
            members = seats(await live.training(0))
            await asyncio.sleep(QUIET_S + _FLUSH_S)
            worker = list(members)[1]
            node, pid = members[worker]
            killed_at_us = time.time_ns() // 1000
            os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(HEAL_S)
            await live.training(1)
            lines = [
                {"seq": line.seq, "at_us": line.recorded_at_us, "sentence": line.summary, "envelope": line.envelope}
                for line in live.client.events(0)
            ]
    return Trace(killed_at_us, worker, node, lines, _processes(folder))


@contextmanager
def _tracing(folder: Path) -> Iterator[None]:
    """Let every Python process that is started here be traced into `folder`."""
    (folder / "cluster").mkdir(parents=True)
    shutil.copy(tracer.__file__, folder / "sitecustomize.py")
    (folder / "trace.json").write_text(json.dumps({"root": str(ROOT)}))
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), *([before] if before else [])])
    try:
        yield
    finally:
        os.environ.pop("PYTHONPATH") if before is None else os.environ.update(PYTHONPATH=before)


def _processes(folder: Path) -> list[Process]:
    files = {}
    for path in sorted(folder.glob("*.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        files[lines[0]["pid"]] = lines
    agents = {pid for pid, lines in files.items() if _flag(lines[0]["argv"], "--node")}
    processes = []
    for lines in files.values():
        first = lines[0]
        node = _flag(first["argv"], "--node") or Path(_flag(first["argv"], "--run-dir")).name
        if not node:
            role = "head"
        elif first["pid"] in agents:
            role = "agent"
        else:
            role = "fork server" if first["parent"] in agents else "worker"
        processes.append(Process(role, node, lines[1:]))
    return processes


def _flag(arguments: list[str], flag: str) -> str:
    return arguments[arguments.index(flag) + 1] if flag in arguments else ""
