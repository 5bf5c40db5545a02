"""Many random faults of every kind under one long run; afterwards nothing may tell that they happened.

    python -m tests.integration.endurance --faults 100 --seed 1

Faults: those of `chaos.py`, and an exception, a standstill (SIGSTOP), an agent alone, and two things at once: two
workers, a worker and the coordinator, a worker and the nats-server, a node and a worker of another. Exit code 0 only if

* after every fault the cluster is whole again and trains on, and at the end the replay has the daemon's digest;
* every committed iteration used exactly its own samples;
* what both tasks' newest checkpoints hold is, bit by bit, what a task that never failed had at those iterations;
* neither processes, nor open files (sockets), nor shared memory have grown in number, nor outlive the cluster.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import psutil

from tests.integration.chaos import Chaos, main
from unicrond.core.state.state import ClusterState, TaskStatus
from unicrond.ctl.inject import inject
from unicrond.events.vocabulary import LANES
from unicrond.local.demo import TASKS
from unicrond.local.dev import DevCluster

PHASES = ("forward", "backward", "reduce", "step")
REFERENCE = "reference"
CHECKPOINT_INTERVAL = 50
REFERENCE_TIMEOUT_S = 1_800.0


class Holdings(msgspec.Struct, frozen=True):
    """What the cluster's processes hold at one moment, by kind: processes, open files, shared memories."""

    processes: int
    files: int
    memories: int


class Endurance(Chaos):
    """Chaos with more kinds of faults, and with an eye on what is left behind."""

    KINDS: ClassVar[tuple[str, ...]] = (
        *(*Chaos.KINDS, "exception", "standstill", "agent"),
        *("two-workers", "worker-and-coordinator", "worker-and-nats-server", "node-and-worker"),
    )
    SETTINGS: ClassVar[dict[str, Any]] = {"policy": {"flaps_max": 16, "flap_window_s": 60.0}, "injection": True}

    def __init__(self, cluster: DevCluster, directory: Path, seed: int) -> None:
        super().__init__(cluster, directory, seed)
        self.holdings: list[Holdings] = []

    def spec(self, name: str, weight: float) -> dict[str, object]:
        """As in the demo, but the learning rate does not depend on when the run ends."""
        spec = super().spec(name, weight)
        assert isinstance(spec["optimizer"], dict)
        spec["optimizer"] |= {"decay_iterations": 1_000_000}
        return spec | {
            "checkpoint": {"interval": CHECKPOINT_INTERVAL, "dir": str(self.checkpoints(name))},
        }

    def checkpoints(self, name: str) -> Path:
        """Where the task's checkpoints are."""
        return self.cache.parent / f"checkpoints-of-{name}"

    async def one_fault(self, kind: str) -> None:
        await super().one_fault(kind)
        self.holdings.append(await asyncio.to_thread(self.held))

    def held(self) -> Holdings:
        """Of the agents' processes, the coordinator and the nats-server."""
        processes = [process for node in self.cluster.node_names for process in self.cluster.processes_of(node)]
        assert self.cluster.coordinator.process is not None
        with contextlib.suppress(psutil.Error):
            coordinator = psutil.Process(self.cluster.coordinator.process.pid)
            processes += [coordinator, *coordinator.children(recursive=True)]
        files, memories = 0, set()
        for process in processes:
            with contextlib.suppress(OSError):
                for fd in Path(f"/proc/{process.pid}/fd").iterdir():
                    files += 1
                    with contextlib.suppress(OSError):
                        if str(fd.readlink()).startswith("/memfd:unicron"):
                            memories.add(fd.stat().st_ino)
        return Holdings(len(processes), files, len(memories))

    # --- faults ----------------------------------------------------------------------------------

    async def _kill_exception(self, state: ClusterState) -> str:
        victim, phase = self.a_member(state), self.random.choice(PHASES)
        task = next(task for task in state.tasks.values() if victim.worker in task.workers)
        await inject(self.cluster).exception(task=task.name, node=victim.node).during(phase)  # type: ignore[arg-type]
        return f"in {phase} of {victim.worker} on {victim.node}"

    async def _kill_standstill(self, state: ClusterState) -> str:
        victim = self.a_member(state)
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim.pid, signal.SIGSTOP)
        return f"{victim.worker} on {victim.node}"

    async def _kill_agent(self, state: ClusterState) -> str:
        node = self.random.choice(self.cluster.node_names)
        process = self.cluster.agents[node].process
        assert process is not None
        process.kill()
        return f"of {node}, pid {process.pid}; its workers go on"

    async def _kill_two_workers(self, state: ClusterState) -> str:
        return f"{await self._kill_worker(state)}, and {await self._kill_worker(state)}"

    async def _kill_worker_and_coordinator(self, state: ClusterState) -> str:
        return f"{await self._kill_worker(state)}, and {await self._kill_coordinator(state)}"

    async def _kill_worker_and_nats_server(self, state: ClusterState) -> str:
        return f"{await self._kill_nats_server(state)}, and {await self._kill_worker(state)}"

    async def _kill_node_and_worker(self, state: ClusterState) -> str:
        return f"{await self._kill_worker(state)}, and {await self._kill_node(state)}"

    @staticmethod
    def _seen(kind: str, before: ClusterState, now: ClusterState) -> bool:
        if kind == "agent":
            return any(node.agent.boot != before.nodes[name].agent.boot for name, node in now.nodes.items())
        if kind == "worker-and-coordinator" and now.term == before.term:
            return False
        return Chaos._seen(kind, before, now)

    # --- afterwards ------------------------------------------------------------------------------

    async def check(self) -> None:
        healing = defaultdict(list)
        for kind, seconds in self.healing_s:
            healing[kind].append(seconds)
        for kind, times in healing.items():
            print(f"{kind}: {len(times)}, whole again after {statistics.median(times):.1f} s (median)")
        await super().check()
        self.check_holdings()
        await self.check_parameters(await self.newest_checkpoints())

    async def newest_checkpoints(self) -> dict[str, int]:
        """End both tasks, each with a checkpoint written after the last fault; task -> iteration of its newest."""
        state, _ = await self.cluster.state()
        before = {name: task.progress.checkpoint_iteration for name, task in state.tasks.items()}
        await self.until(
            "both tasks have written a checkpoint since",
            lambda s: all(s.tasks[name].progress.checkpoint_iteration > at for name, at in before.items()),
        )
        for name in TASKS:
            await asyncio.to_thread(inject(self.cluster).client.cancel, name, "the last fault is over")
        await self.until(
            "both tasks have ended", lambda s: all(s.tasks[name].status is TaskStatus.CANCELLED for name in TASKS)
        )
        return {name: iterations_saved(self.checkpoints(name), name)[0] for name in TASKS}

    async def check_parameters(self, reached: dict[str, int]) -> None:
        """Train the same without faults, as far, and compare. Raises AssertionError."""
        last = max(reached.values())
        spec = self.spec(REFERENCE, 1.0)
        lanes = {LANES: str(spec["max_workers"])}
        spec |= {"iterations": last, "max_workers": 1, "env": {**spec["env"], **lanes}}  # type: ignore[dict-item]
        spec["checkpoint"] = {
            "dir": str(self.checkpoints(REFERENCE)),
            "interval": CHECKPOINT_INTERVAL,
            "keep": 1 + last // CHECKPOINT_INTERVAL,
        }
        await self.cluster.submit(spec)
        deadline = time.monotonic() + REFERENCE_TIMEOUT_S
        while (task := (await self.cluster.state())[0].tasks[REFERENCE]).status is not TaskStatus.COMPLETED:
            assert time.monotonic() < deadline, (
                f"the run without faults is at iteration {task.progress.iteration} of {last}"
            )
            await asyncio.sleep(0.5)
        for name, iteration in reached.items():
            ours = contents(self.checkpoints(name), name, iteration)
            reference = contents(self.checkpoints(REFERENCE), REFERENCE, iteration)
            assert ours.keys() == reference.keys()
            unequal = {key: (ours[key], reference[key]) for key in ours if ours[key] != reference[key]}
            assert not unequal, (
                f"task {name} at iteration {iteration} differs from a run without faults in {unequal!r:.500}"
            )
            print(f"task {name} at iteration {iteration}: {len(ours)} tensors and values, all as without faults")

    def check_holdings(self) -> None:
        """The last tenth of the samples against the first. Raises AssertionError."""
        part = max(3, len(self.holdings) // 10)
        for field in Holdings.__struct_fields__:
            first = statistics.median(getattr(held, field) for held in self.holdings[:part])
            last = statistics.median(getattr(held, field) for held in self.holdings[-part:])
            print(f"{field}: {first:g} in the beginning, {last:g} at the end")
            assert last <= 1.1 * first + 2, f"the cluster's {field} have grown from {first:g} to {last:g}"


def iterations_saved(directory: Path, task: str) -> list[int]:
    """Iterations of the checkpoints there, newest first."""
    from unicrond.agents.trainer.states import checkpoint

    return list(checkpoint.newest_iterations(directory, task))


def contents(directory: Path, task: str, iteration: int) -> dict[str, object]:
    """What a checkpoint holds, by its path in the state tree; tensors as bytes.

    But what was timed, and where random generators stand: seeded anew for each micro-batch, they tell which came last.
    """
    from unicrond.agents.trainer.states import checkpoint

    tree, _ = checkpoint.load(directory, task, iteration, 0)
    return dict(
        _leaves(
            {key: value for key, value in tree.items() if key not in ("generators", "pace_s", "usual", "sections")}, ""
        )
    )


def _leaves(tree: Any, path: str) -> Iterator[tuple[str, object]]:
    if isinstance(tree, dict | list | tuple):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from _leaves(value, f"{path}.{key}")
    else:
        yield path, tree.contiguous().numpy().tobytes() if hasattr(tree, "numpy") else tree


if __name__ == "__main__":
    main(__doc__ or "", 100, Endurance)
