"""How long plans take: look-up, one plan, the whole one-step table, by size and granularity.

    pytest tests/benchmarks/test_planning.py

CPU seconds, so that a busy machine does not count. Numbers and what they mean: docs/results/benchmarks.md,
"Planning"; growth over n and m: `python -m tests.benchmarks.planning_growth`.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.benchmarks.planning_clusters import cluster, cluster_of_layouts
from unicrond.core.planning import kernel_choice as kernel
from unicrond.core.planning import kernel_numba
from unicrond.core.planning.situation import NodeLoss, Situation, TaskEnd
from unicrond.core.planning.solver import solve
from unicrond.core.planning.table import Planner

SIZES = [
    pytest.param((128, 6, 1), id="128-6-gpu"),
    pytest.param((128, 6, 8), id="128-6-node"),
    pytest.param((1024, 32, 1), id="1024-32-gpu"),
    pytest.param((1024, 32, 8), id="1024-32-node"),
    pytest.param((10240, 100, 1), id="10240-100-gpu"),
    pytest.param((10240, 100, 8), id="10240-100-node"),
]


@pytest.fixture(autouse=True)
def compiled() -> Iterator[None]:
    kernel.warm()
    yield
    kernel.use("numpy")


@pytest.fixture(scope="module", params=SIZES)
def situation(request: pytest.FixtureRequest) -> Situation:
    return cluster(*request.param)


@pytest.mark.benchmark(group="look-up of a stored plan by its event")
def test_planner_look_up(benchmark: Any, situation: Situation) -> None:
    table = Planner().refresh(situation)
    assert benchmark(table.look_up, NodeLoss("node0003")) is not None


@pytest.mark.benchmark(group="look-up by the whole problem, compared field by field")
def test_planner_answer(benchmark: Any, situation: Situation) -> None:
    planner = Planner()
    planner.refresh(situation)
    problem = situation.after(NodeLoss("node0003"))
    assert benchmark(planner.answer, problem).method == "table"


@pytest.mark.benchmark(timer=time.process_time, group="one plan, from nothing")
def test_planner_single_plan(benchmark: Any, situation: Situation) -> None:
    problem = situation.after(NodeLoss("node0003"))
    benchmark.pedantic(solve, (problem,), rounds=30, warmup_rounds=2)


@pytest.mark.benchmark(timer=time.process_time, group="the whole one-step table, from nothing")
def test_planner_table(benchmark: Any, situation: Situation) -> None:
    table = benchmark.pedantic(lambda: Planner().refresh(situation), rounds=20, warmup_rounds=2)
    benchmark.extra_info.update(scenarios=table.effort.scenarios, rows=table.effort.rows_computed)


@pytest.mark.benchmark(timer=time.process_time, group="the whole one-step table over layouts, from nothing")
@pytest.mark.parametrize(("workers", "tasks"), [(1024, 32), (10240, 100)])
def test_planner_table_over_layouts(benchmark: Any, workers: int, tasks: int) -> None:
    begun = time.process_time()
    situation = cluster_of_layouts(workers, tasks)
    benchmark.extra_info["curves_s"] = round(time.process_time() - begun, 2)
    benchmark.extra_info["layouts"] = sum(1 + len(task.alternatives) for task in situation.lineup)
    table = benchmark.pedantic(lambda: Planner().refresh(situation), rounds=10, warmup_rounds=2)
    benchmark.extra_info.update(scenarios=table.effort.scenarios, rows=table.effort.rows_computed)


@pytest.mark.benchmark(timer=time.process_time, group="one plan over layouts, from nothing, with seats")
@pytest.mark.parametrize(("workers", "tasks"), [(1024, 32), (10240, 100)])
def test_planner_single_plan_over_layouts(benchmark: Any, workers: int, tasks: int) -> None:
    problem = cluster_of_layouts(workers, tasks).after(NodeLoss("node0003"))
    benchmark.pedantic(solve, (problem,), rounds=20, warmup_rounds=2)


@pytest.mark.benchmark(timer=time.process_time, group="the whole one-step table, numpy only")
def test_planner_table_in_numpy(benchmark: Any, situation: Situation) -> None:
    kernel.use("numpy")
    benchmark.pedantic(lambda: Planner().refresh(situation), rounds=3)


@pytest.mark.benchmark(timer=time.process_time, group="the table after the middle task finished, rows reused")
def test_planner_table_after_task_end(benchmark: Any, situation: Situation) -> None:
    """Its workers go where the plan gives them; the rows before and behind the changed tasks stay."""
    middle = TaskEnd(situation.tasks[len(situation.tasks) // 2].name)
    planner = Planner()
    chosen = planner.refresh(situation).solution(middle)
    assert chosen is not None
    tasks = tuple(replace(task, workers=workers) for task, workers in chosen)
    loads = tuple(replace(node, tasks=node.tasks - {middle.task}) for node in situation.nodes)
    after = replace(situation, tasks=tasks, nodes=loads)

    def prepare() -> tuple[tuple[Planner, Situation], dict[str, object]]:
        planner = Planner()
        planner.refresh(situation)
        return (planner, after), {}

    table = benchmark.pedantic(lambda p, s: p.refresh(s), setup=prepare, rounds=5)
    benchmark.extra_info.update(rows_computed=table.effort.rows_computed, rows_reused=table.effort.rows_reused)


@pytest.mark.benchmark(timer=time.process_time, group="max-plus product, for the bound")
@pytest.mark.parametrize(("size", "points"), [(129, 16), (1281, 150), (10241, 200), (10241, 460)])
def test_planner_max_plus(benchmark: Any, size: int, points: int) -> None:
    """A row of `size` with points spread over its half; additions with maximum per second."""
    rng = np.random.default_rng(7)
    row, out, values = rng.random(size), np.empty(size), rng.random(points)
    at = np.sort(rng.choice(size // 2, points, replace=False)).astype(np.int64)
    padded = kernel_numba._scratch(size)

    def many() -> None:
        for _ in range(100):
            kernel_numba._max_plus(row, at, values, 0, points, padded, out)

    benchmark.pedantic(many, rounds=20, warmup_rounds=2)
    additions = 100 * int((size - at).sum())
    benchmark.extra_info["giga_per_s"] = round(additions / benchmark.stats.stats.min / 1e9, 1)


@pytest.mark.benchmark(group="worst delay of the event loop while tables are built in a thread, wall time")
def test_planner_in_thread_leaves_loop_responsive(benchmark: Any) -> None:
    """Ten tables of 10,240 GPUs and 100 tasks in a thread; a tick every millisecond meanwhile."""
    situation, planner = cluster(10240, 100, 1), Planner()

    async def ticks(until: asyncio.Event) -> list[float]:
        late, loop = [], asyncio.get_running_loop()
        while not until.is_set():
            due = loop.time() + 0.001
            await asyncio.sleep(0.001)
            late.append(loop.time() - due)
        return late

    async def build() -> list[float]:
        done = asyncio.Event()
        ticking = asyncio.create_task(ticks(done))
        for _ in range(10):
            await asyncio.to_thread(planner.refresh, situation)
        done.set()
        return await ticking

    late = benchmark.pedantic(lambda: asyncio.run(build()), rounds=1)
    benchmark.extra_info["worst_delay_ms"] = round(max(late) * 1e3, 1)
    benchmark.extra_info["median_delay_ms"] = round(float(np.median(late)) * 1e3, 2)


MEMORY = """
import json, pathlib, re
from tests.benchmarks.planning_clusters import cluster
from unicrond.core.planning import kernel_choice as kernel
from unicrond.core.planning.table import Planner

def resident(field):
    status = pathlib.Path("/proc/self/status").read_text()
    return int(re.search(field + r":\\s+(\\d+) kB", status)[1]) * 1024

kernel.warm()
situation, planner = cluster(10240, 100, 1), Planner()
before = resident("VmRSS")
pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
planner.refresh(situation)
once = resident("VmHWM")
planner.refresh(situation)  # the old rows and the new ones at once
twice = resident("VmHWM")
rows = sum(sweep.prefixes.nbytes + sweep.suffixes.nbytes for sweep in planner._sweeps.values())
sizes = {"rows": rows, "first": once - before, "second": twice - before, "process": before}
print(json.dumps(sizes))
"""


@pytest.mark.benchmark(group="memory at 10,240 GPUs and 100 tasks")
def test_planner_memory(benchmark: Any) -> None:
    def measure() -> dict[str, int]:
        told = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True).stdout
        sizes: dict[str, int] = json.loads(told)
        return sizes

    sizes = benchmark.pedantic(measure, rounds=1)
    benchmark.extra_info.update({f"{name}_mb": round(size / 1e6) for name, size in sizes.items()})
