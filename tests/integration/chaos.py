"""Random SIGKILLs of worker, node, coordinator and nats-server under a real small cluster; all must heal.

    python -m tests.integration.chaos --faults 20 --seed 1

Exit code 0 only if after every fault the cluster is whole again and trains on, the replay of the stored
log has the daemon's digest, and every committed iteration used exactly its own samples.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import Any, ClassVar

import aiohttp
import psutil
import uvloop

from tests.integration.samples import expected_digest, samples_in_corpus
from unicrond.core.state.state import ClusterState, Worker, WorkerStatus
from unicrond.local.demo import GLOBAL_BATCH, SEED, SEQ, TASKS, DemoStory, NotHealed, replay, whole
from unicrond.local.dev import DevCluster, small_cluster


class Chaos(DemoStory):
    """A story without a plot: faults drawn from a seed."""

    KINDS: ClassVar[tuple[str, ...]] = ("worker", "node", "coordinator", "nats-server")
    # Nodes are killed again and again on purpose: that is no flapping.
    SETTINGS: ClassVar[dict[str, Any]] = {"policy": {"flaps_max": 16}}

    def __init__(self, cluster: DevCluster, directory: Path, seed: int) -> None:
        super().__init__(cluster, directory, iterations=0)
        self.random = random.Random(seed)
        self.healing_s: list[tuple[str, float]] = []

    async def begin(self) -> None:
        for name, weight in TASKS.items():
            await self.cluster.submit(self.spec(name, weight))
        await self.healed_and_training(reached={})

    async def one_fault(self, kind: str) -> None:
        await asyncio.sleep(self.random.uniform(0.0, 1.5))
        state, _ = await self.cluster.state()
        started = time.monotonic()
        what = await getattr(self, "_kill_" + kind.replace("-", "_"))(state)
        print(f"{kind}: {what}", end=" ", flush=True)
        await self.until("the coordinator has seen the fault", lambda s: self._seen(kind, state, s))
        await self.healed_and_training({name: task.progress.best_iteration for name, task in state.tasks.items()})
        self.healing_s.append((kind, time.monotonic() - started))
        print(f"-> whole and training after {self.healing_s[-1][1]:.1f} s", flush=True)

    @staticmethod
    def _seen(kind: str, before: ClusterState, now: ClusterState) -> bool:
        if kind == "coordinator":
            return now.term > before.term
        return kind == "nats-server" or now.incidents_total > before.incidents_total

    async def healed_and_training(self, reached: dict[str, int]) -> ClusterState:
        return await self.until(
            "the cluster is whole and both tasks are past where they were",
            lambda s: (
                whole(s, len(self.cluster.node_names))
                and not s.incidents
                and all(task.progress.iteration > reached.get(task.name, 0) for task in s.tasks.values())
            ),
        )

    def a_member(self, state: ClusterState) -> Worker:
        """A worker that trains, or one that is on its way."""
        workers = [w for task in state.tasks.values() for w in task.workers.values() if w.pid]
        return self.random.choice([w for w in workers if w.status is WorkerStatus.MEMBER] or workers)

    async def _kill_worker(self, state: ClusterState) -> str:
        victim = self.a_member(state)
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim.pid, signal.SIGKILL)
        return f"{victim.worker} on {victim.node}"

    async def _kill_node(self, state: ClusterState) -> str:
        node = self.random.choice(self.cluster.node_names)
        away_s = self.random.choice([0.0, 0.5, 4.0])
        await self.cluster.kill_node(node)
        await asyncio.sleep(away_s)
        await self.cluster.bring_back(node)
        return f"{node}, back after {away_s:g} s"

    async def _kill_coordinator(self, state: ClusterState) -> str:
        process = self.cluster.coordinator.process
        assert process is not None
        process.kill()
        return f"pid {process.pid}"

    async def _kill_nats_server(self, state: ClusterState) -> str:
        pid = int((self.cluster.directory / "state" / "nats" / "nats-server.pid").read_text())
        psutil.Process(pid).kill()
        return f"pid {pid}"

    async def check(self) -> None:
        """What must hold after the last fault. Raises AssertionError."""
        print(f"{await self.check_samples()} committed iterations used exactly their own samples")

    async def check_samples(self) -> int:
        """Every committed range of iterations, against an independent computation; how many iterations."""
        checked = 0
        windows = samples_in_corpus(next(self.cache.glob("unicron/*.bin")).with_suffix(""), SEQ)
        async with aiohttp.ClientSession() as session, session.get(self.cluster.url + "/v1/events") as response:
            text = await response.text()
        for line in text.splitlines():
            if not line.startswith("data: "):
                continue
            event = json.loads(line[6:]).get("envelope", {}).get("event", {})
            if event.get("type") != "StepCommitted":
                continue
            digest, count = expected_digest(SEED, event["first"], event["last"], GLOBAL_BATCH, windows)
            assert event["samples"] == count, f"{event['samples']} samples used instead of {count}: {event}"
            assert event["samples_digest"] == digest, f"other samples were used than those of the iterations: {event}"
            checked += event["last"] - event["first"] + 1
        return checked


async def run(faults: int, seed: int, directory: Path, of: type[Chaos] = Chaos) -> None:
    """The whole of it, in `directory`. Raises NotHealed or AssertionError."""
    async with small_cluster(directory, settings=of.SETTINGS) as cluster:
        chaos = of(cluster, directory, seed)
        await chaos.begin()
        kinds = [of.KINDS[number % len(of.KINDS)] for number in range(faults)]
        chaos.random.shuffle(kinds)
        for number, kind in enumerate(kinds, 1):
            print(f"[{number}/{faults}]", end=" ")
            await chaos.one_fault(kind)
        await chaos.check()
        state, digest = await cluster.state()
        replayed = await replay(cluster, state.seq)
        assert replayed == digest, f"replay of the log gives {replayed}, the daemon has {digest}"
        print(f"digest {digest} at sequence {state.seq}, equal in the replay; all {faults} faults healed")
    left = [process for node in cluster.node_names for process in cluster.processes_of(node)]
    assert not left, f"processes outlive the cluster: {left}"


def main(description: str, faults: int, of: type[Chaos]) -> None:
    """As a command: so many `faults` unless told otherwise."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=faults)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dir", type=Path, help="keep all files here, logs above all")
    arguments = parser.parse_args()
    directory = arguments.dir or Path(tempfile.mkdtemp(prefix=f"unicron-{of.__name__.lower()}-"))
    directory.mkdir(parents=True, exist_ok=True)
    try:
        uvloop.run(run(arguments.faults, arguments.seed, directory, of))
    except (NotHealed, AssertionError):
        print(f"\nlogs and the event log are kept: {directory}")
        raise
    if arguments.dir is None:
        shutil.rmtree(directory)


if __name__ == "__main__":
    main(__doc__ or "", 20, Chaos)
