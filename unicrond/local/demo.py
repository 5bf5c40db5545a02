"""`unicrond demo`: train two tasks, kill a worker, kill a node, bring it back, and tell how each was healed.

Everything is real: the parts are `unicrond dev`'s, the training is Megatron-core's on the Python standard
library's sources, the faults are SIGKILLs. The story at the end comes from the log, and a picture of the losses with
the faults in them stays as a file.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from unicrond.core.rules.survey import Survey
from unicrond.core.state.policy import Policy
from unicrond.core.state.state import ClusterState, NodeStatus, Task, TaskStatus, Worker
from unicrond.core.state.work import achieved_waf, delivered_flop
from unicrond.ctl.client import ApiError
from unicrond.ctl.live_view import incident_table, watch
from unicrond.ctl.streams import follow
from unicrond.display.loss_plot import LossCurve, svg, text_plot
from unicrond.display.plan_explanation import explain_plan
from unicrond.display.tables import interactive
from unicrond.local.dev import DevCluster, small_cluster, start_small

TASKS = {"big": 2.0, "small": 1.0}
SEED, SEQ, GLOBAL_BATCH, MICRO_BATCH = 1234, 64, 48, 4
HEAL_TIMEOUT_S = 90.0
#: Between two lines of progress, until both tasks train.
PROGRESS_S = 3.0


class NotHealed(RuntimeError):
    """The cluster is not as it should be; the message says what was waited for."""


class DemoFault(msgspec.Struct, frozen=True):
    """A fault that the demo caused, and when (wall clock)."""

    text: str
    at_us: int


class DemoStory:
    """The demo's steps, over one running cluster."""

    def __init__(self, cluster: DevCluster, directory: Path, iterations: int) -> None:
        self.cluster = cluster
        self.cache = directory / "cache"
        self.iterations = iterations
        self.faults: list[DemoFault] = []
        self.digest = ""
        self.losses: dict[str, dict[int, float]] = {}
        self.marks: dict[str, list[tuple[int, str]]] = {}
        self._random = random.Random(2401)

    async def run(self) -> ClusterState:
        """Run all steps, and return the last state. Raises NotHealed."""
        for name, weight in TASKS.items():
            await self.cluster.submit(self.spec(name, weight))
        state = await self.until("both tasks train on all four nodes", lambda s: whole(s, 4) and _trained(s, 8))

        name, worker = self._victim(state)
        await self._in_mid_iteration(name)
        self._fault(f"SIGKILL of worker {worker.worker} (pid {worker.pid}) on {worker.node}")
        self._mark(name, f"SIGKILL of worker {worker.worker}")
        os.kill(worker.pid, signal.SIGKILL)
        state = await self._healed(4)

        name, worker = self._victim(state)
        node = worker.node
        self._fault(f"SIGKILL of node {node}: agent, fork server, workers")
        self._mark(name, f"SIGKILL of node {node}")
        await self.cluster.kill_node(node)
        await self._healed(3)

        self._fault(f"node {node} comes back", count=False)
        self._mark(name, f"{node} comes back")
        await self.cluster.bring_back(node)
        state = await self.until(f"{node} has workers again", lambda s: whole(s, 4))
        reached = {name: task.progress.iteration for name, task in state.tasks.items()}
        state = await self.until(
            "both tasks continue",
            lambda s: all(s.tasks[name].progress.iteration >= at + 10 for name, at in reached.items()),
        )
        state, self.digest = await self.cluster.state()
        return state

    def _victim(self, state: ClusterState) -> tuple[str, Worker]:
        """Draw a member, not the first, of the task that has the most: on a busy machine that may be the light one."""
        members = {name: task.membership.members for name, task in state.tasks.items() if task.membership is not None}
        name = max(members, key=lambda task: len(members[task]))
        victim = self._random.choice(members[name][1:] or members[name])
        return name, state.tasks[name].workers[victim.worker]

    async def until(self, goal: str, holds: Callable[[ClusterState], bool]) -> ClusterState:
        """Wait, and return the first state in which `holds`. Raises NotHealed after HEAL_TIMEOUT_S, or when a task
        failed."""
        deadline = time.monotonic() + HEAL_TIMEOUT_S
        state = ClusterState()
        while time.monotonic() < deadline:
            with contextlib.suppress(ApiError):
                state, _ = await self.cluster.state()
                self._record(state)
                failed = [task for task in state.tasks.values() if task.status is TaskStatus.FAILED]
                if failed:
                    raise NotHealed(f"task {failed[0].name} failed: {failed[0].ending.reason}")
                if holds(state):
                    return state
            await asyncio.sleep(0.05)
        raise NotHealed(f"waited {HEAL_TIMEOUT_S:g} s for this: {goal}; {_where_things_stand(state)}")

    async def _healed(self, workers: int) -> ClusterState:
        opened = sum(1 for fault in self.faults if fault.text.startswith("SIGKILL"))
        return await self.until(
            f"incident {opened} is healed and {workers} workers train",
            lambda s: s.incidents_total >= opened and not s.incidents and whole(s, workers),
        )

    async def _in_mid_iteration(self, task: str) -> None:
        """Wait until half an iteration after a commit."""
        state, _ = await self.cluster.state()
        iteration = state.tasks[task].progress.iteration
        state = await self.until("another step", lambda s: s.tasks[task].progress.iteration > iteration)
        await asyncio.sleep(state.tasks[task].pace.iteration_us / 2e6)

    def _fault(self, text: str, *, count: bool = True) -> None:
        print(f">>> {text}", flush=True)
        if count:
            self.faults.append(DemoFault(text, time.time_ns() // 1000))

    def _record(self, state: ClusterState) -> None:
        for task in state.tasks.values():
            if task.progress.loss is not None:
                self.losses.setdefault(task.name, {})[task.progress.iteration] = task.progress.loss

    def _mark(self, task: str, text: str) -> None:
        """Note what happens to the task now, for its curve."""
        self.marks.setdefault(task, []).append((max(self.losses.get(task, {0: 0.0})), text))

    def curves(self) -> list[LossCurve]:
        """Return what was seen of each task's losses: one for every look at the coordinator's state."""
        return [
            LossCurve(f"task {name}", tuple(sorted(losses.items())), tuple(self.marks.get(name, ())))
            for name, losses in self.losses.items()
        ]

    def spec(self, name: str, weight: float) -> dict[str, object]:
        """Return the specification of a small GPT on the standard library's sources, 1 to 3 workers."""
        return {
            "name": name,
            "weight": weight,
            "min_workers": 1,
            "max_workers": 3,
            "model": {"layers": 2, "hidden": 64, "heads": 4, "seq": SEQ, "vocab": 256},
            "optimizer": {"lr": 2e-3, "warmup_iterations": 10},
            "env": {"XDG_CACHE_HOME": str(self.cache)},
            "global_batch": GLOBAL_BATCH,
            "micro_batch": MICRO_BATCH,
            "seed": SEED,
            "iterations": self.iterations or 1_000_000,
            "checkpoint": {"interval": 100},
        }


class DemoProgress:
    """Prints a line now and then, until the tasks train: what the demo waits for."""

    def __init__(self, started_s: float, nodes: int) -> None:
        """Begin. `started_s`: of time.monotonic; `nodes`: so many are awaited."""
        self.cluster: DevCluster | None = None
        self._started_s = started_s
        self._nodes = nodes
        self._printer = asyncio.create_task(self._print(), name="progress")

    def end(self) -> None:
        """Print no more."""
        self._printer.cancel()

    async def _print(self) -> None:
        text = "nats-server and coordinator start"
        while text:
            print(f"{time.monotonic() - self._started_s:4.0f} s: {text}", flush=True)
            await asyncio.sleep(PROGRESS_S)
            if self.cluster is not None:
                with contextlib.suppress(ApiError):
                    text = waiting_for((await self.cluster.state())[0], self._nodes)


def waiting_for(state: ClusterState, nodes: int) -> str:
    """Return what the demo waits for before its tasks train on `nodes` nodes; "" when they do."""
    up = sum(node.status is NodeStatus.UP for node in state.nodes.values())
    if up < nodes:
        return f"{up} of {nodes} nodes are up; each imports torch and Megatron-core first"
    starting = [task.name for task in state.tasks.values() if task.progress.loss is None]
    return f"all nodes are up; workers of {' and '.join(starting)} start" if starting else ""


def _where_things_stand(state: ClusterState) -> str:
    """Return what is not as it should be, to find out why."""
    lines = [f"incident {i.id} ({i.kind}, {i.worker or i.node}: {i.message}) is open" for i in state.incidents.values()]
    for node in state.nodes.values():
        isolated = f", isolated ({node.reason})" if node.isolation.active else ""
        lines.append(f"node {node.name} is {node.status}{isolated}")
    for task in state.tasks.values():
        workers = ", ".join(f"{w.worker} {w.status} on {w.node}" for w in task.workers.values())
        target = state.plan.assignments[task.name].workers if task.name in state.plan.assignments else 0
        lines.append(
            f"task {task.name} at iteration {task.progress.iteration} is given {target} workers"
            f" and has: {workers or 'none'}"
        )
    return "; ".join(lines)


def _trained(state: ClusterState, iterations: int) -> bool:
    return all(task.progress.iteration >= iterations for task in state.tasks.values())


def whole(state: ClusterState, workers: int) -> bool:
    """Return whether the plan is for `workers` workers' slots, and every task trains on exactly what it gives.

    The plan may leave a slot free: on a few busy cores more workers are measured to be no faster.
    """
    survey = Survey(state, Policy())
    planned = set(state.tasks) == set(TASKS) and survey.fresh and sum(survey.capacity.values()) == workers
    return planned and all(_staffed(survey, task) for task in state.tasks.values())


def _staffed(survey: Survey, task: Task) -> bool:
    """Return whether all members are in, and are what the plan gives. (Workers of a lost node stay known until it
    returns.)"""
    staff = survey.staffing(task)
    target = survey.state.plan.assignments[task.name].workers
    trains = task.confirmed and task.membership is not None and len(task.membership.members) == target
    return trains and staff.fits and not staff.starting and not task.leavers


def main(arguments: argparse.Namespace) -> int:
    """Run the demo; the exit code is 0 only if everything healed and the replay agrees."""
    return start_small(arguments, _main)


async def _main(arguments: argparse.Namespace, directory: Path) -> int:
    started = time.monotonic()
    demo = asyncio.current_task()
    assert demo is not None
    for signum in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(signum, demo.cancel)
    print(f"their files are in {directory}", flush=True)
    progress = DemoProgress(started, arguments.nodes)
    try:
        async with small_cluster(
            directory, nodes=arguments.nodes, slots=arguments.slots, api_port=arguments.port, keys=True
        ) as cluster:
            if interactive(sys.stdout):
                progress.end()  # the view shows it
            progress.cluster = cluster
            story = DemoStory(cluster, directory, arguments.iterations)
            stop = asyncio.Event()
            view = asyncio.create_task(watch(cluster.state, stop, follow(cluster.client)))
            try:
                state = await story.run()
            finally:
                stop.set()
                await asyncio.gather(view, return_exceptions=True)
            print("replaying the stored log; then everything ends", flush=True)
            replayed = await replay(cluster, state.seq)
    except NotHealed as error:
        print(f"NOT HEALED: {error}; run with --dir DIR and look at the logs there", file=sys.stderr)
        return 1
    except asyncio.CancelledError:
        print("interrupted; everything was ended", file=sys.stderr)
        return 130
    finally:
        progress.end()
    return _draw(story, arguments.out) or _tell(story, state, replayed, time.monotonic() - started)


async def replay(cluster: DevCluster, seq: int) -> str:
    """Return the digest that `unicron-replay`, a process of its own, computes from the stored log."""
    process = await asyncio.create_subprocess_exec(
        str(Path(sys.executable).parent / "unicron-replay"),
        "digest",
        "--state-dir",
        str(cluster.state_dir),
        "--at",
        str(seq),
        "--json",
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await process.communicate()
    return str(json.loads(output)["digest"]) if process.returncode == 0 else ""


def _draw(story: DemoStory, path: Path | None) -> int:
    """Draw the losses, in the terminal and as a file; return the exit code, 0 where the file was written."""
    curves = story.curves()
    print()
    for curve in (curve for curve in curves if curve.marks):
        print("\n".join(text_plot(curve)))
    if path is None:
        handle, name = tempfile.mkstemp(prefix="unicron-demo-", suffix=".svg")
        os.close(handle)
        path = Path(name)
    try:
        path.write_text(svg(curves), encoding="utf-8")
    except OSError as error:
        print(f"--out: cannot write {path}: {error.strerror}; give another one", file=sys.stderr)
        return 2
    print(f"\nthe losses of both tasks, with what happened to them: {path}")
    return 0


def _tell(story: DemoStory, state: ClusterState, replayed: str, took_s: float) -> int:
    incidents = [*state.closed_incidents, *state.incidents.values()]
    print()
    incident_table(state)
    for fault, incident in zip(story.faults, incidents, strict=False):
        print(f"  {fault.text}: in the log {_since(fault, incident.detected_us)} after it,", end=" ")
        print(f"training again {_since(fault, incident.resumed_us)} after it")
    print()
    for task in state.tasks.values():
        first, last = task.progress.first_loss or 0.0, task.progress.loss or 0.0
        print(
            f"  {task.name}: iteration {task.progress.iteration}, loss {first:.3f} -> {last:.3f}, "
            f"{delivered_flop(task):.3e} weighted FLOP, WAF {achieved_waf(task, state.now_us):.3e} FLOP/s"
        )
    print(f"  total WAF: {sum(achieved_waf(task, state.now_us) for task in state.tasks.values()):.3e} FLOP/s")
    if reason := explain_plan(state):
        print(f"  why the plan is so: {reason}")
    is_equal = replayed == story.digest
    print(f"  digest of the daemon at sequence {state.seq}: {story.digest}")
    print(f"  digest of a replay of the stored log:    {replayed or 'none'} ({'equal' if is_equal else 'NOT EQUAL'})")
    learned = all((task.progress.loss or 9e9) < (task.progress.first_loss or 0.0) for task in state.tasks.values())
    healed = not state.incidents and len(state.closed_incidents) == len(story.faults) and is_equal and learned
    print(f"{'all healed' if healed else 'NOT all healed'}, in {took_s:.0f} s")
    return 0 if healed else 1


def _since(fault: DemoFault, at_us: int) -> str:
    return f"{max(0, at_us - fault.at_us) / 1000:.0f} ms"
