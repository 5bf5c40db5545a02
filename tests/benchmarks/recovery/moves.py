"""What else unicrond does with a task, measured as the kills are: the loss of a node, and a worker that moves.

* node: agent, fork server and worker of one node get SIGKILL at once, wherever the iteration is; afterwards the node
  comes back. Nobody is left there to say so: it is lost when its beats are missed.
* move: a second task of ten times the weight is submitted, takes one worker from the first, makes its steps and ends;
  the worker goes back. `out_ms`: from the submission in the log to the second task's first step; `stall_ms`: by how
  much the first task's longest iteration meanwhile was longer than its usual ones; `back_ms`: from the second task's
  end in the log to the first step of the first task's new worker; `stall_back_ms`, likewise.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from tests.benchmarks.recovery.cell import STEADY_STEPS, Cell
from tests.benchmarks.recovery.figures import NotYet, recovery
from tests.benchmarks.recovery.systems import submission, unicrond
from tests.benchmarks.recovery.waiting import lives, steady, until
from tests.benchmarks.recovery.witness import Line, Traces, now_us
from unicrond.local.dev import DevCluster

_GUEST_STEPS = 10


async def logged(cluster: DevCluster, after_us: int) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The log's entries recorded since, and their events."""
    async with aiohttp.ClientSession() as session, session.get(f"{cluster.url}/v1/events?after=0") as response:
        lines = (await response.text()).splitlines()
    entries = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    return [
        (entry, entry["envelope"]["event"])
        for entry in entries
        if "envelope" in entry and entry["recorded_at_us"] > after_us
    ]


async def node_losses(cell: Cell, data: Path, directory: Path) -> dict[str, Any]:
    """Recoveries from the loss of a node, one after the other."""
    chance = random.Random(cell.seed)
    traces = Traces(directory)
    found: list[dict[str, Any]] = []
    async with unicrond(cell, data, directory, directory) as cluster:
        since_us = now_us()
        for number in range(cell.repetitions):
            await steady(traces, cell, since_us, STEADY_STEPS + chance.randrange(10))
            state, _ = await cluster.state()
            node = cluster.node_names[number % cell.ranks]
            (worker,) = [name for name, known in state.tasks["recovery"].workers.items() if known.node == node]
            processes = cluster.processes_of(node)
            await cluster.agents[node].rest()
            begun = [line for line in traces.look() if line.process.startswith(f"{worker}.")][-1]
            killed = Line(begun.process, "killed", now_us(), begun.numbers[:1])
            for process in processes:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            after = killed

            def recovered(after: Line = after) -> dict[str, Any]:
                return asdict(recovery(traces.look(), after, cell.micro_batches))

            found.append(await until("a full step after the loss of a node", recovered))
            entries = await logged(cluster, killed.at_us)
            lost = next(entry["recorded_at_us"] for entry, event in entries if event["type"] == "NodeLost")
            found[-1]["detected_ms"] = (lost - killed.at_us) / 1e3
            since_us = now_us()
            await cluster.bring_back(node)
    return {"faults": found}


async def task_moves(cell: Cell, data: Path, directory: Path) -> dict[str, Any]:
    """Moves of one worker to another task and back."""
    traces = Traces(directory)
    found: list[dict[str, Any]] = []
    async with unicrond(cell, data, directory, directory) as cluster:
        for number in range(cell.repetitions):
            since_us = now_us()
            await steady(traces, cell, since_us, 2 * STEADY_STEPS)
            usual_ms = statistics.median(_steps_ms(traces.look(), since_us, now_us()))
            at_us = now_us()
            guest = f"guest{number}"
            own = directory / guest
            own.mkdir()
            task = submission(cell, data, own) | {"name": guest, "weight": 10.0, "max_workers": 1}
            await cluster.submit(task | {"iterations": _GUEST_STEPS, "global_batch": 4 * task["micro_batch"]})
            guests = Traces(own)

            def first_step(guests: Traces = guests) -> int:
                return _first(line.at_us for line in guests.look() if line.word == "stepped")

            out_us = await until("the second task steps", first_step)

            def back(since_us: int = out_us) -> int:
                whole = {line.process for line in traces.look() if line.word == "stepped" and line.at_us > since_us}
                new = {process for process in whole if lives(process)}
                old = {line.process for line in traces.lines if line.at_us < since_us}
                return _first(
                    line.at_us
                    for line in traces.lines
                    if line.word == "stepped" and line.process in new - old and line.at_us > since_us
                )

            back_us = await until("the first task has its worker again", back)
            entries = await logged(cluster, at_us - 1_000_000)
            submitted_us = _first(
                e["recorded_at_us"] for e, event in entries if event["type"] == "TaskSubmitted" and _is(event, guest)
            )
            ended_us = _first(
                e["recorded_at_us"] for e, event in entries if event["type"] == "TaskCompleted" and _is(event, guest)
            )
            found.append(
                {
                    "out_ms": (out_us - submitted_us) / 1e3,
                    "stall_ms": max(_steps_ms(traces.lines, at_us, ended_us)) - usual_ms,
                    "back_ms": (back_us - ended_us) / 1e3,
                    "stall_back_ms": max(_steps_ms(traces.lines, ended_us, back_us)) - usual_ms,
                    "usual_ms": usual_ms,
                }
            )
    return {"faults": found}


MEASURE = {"node": node_losses, "move": task_moves}


def _is(event: dict[str, Any], task: str) -> bool:
    return task in (event.get("task"), (event.get("spec") or {}).get("name"))


def _first(times: Any) -> int:
    """The first of them. Raises NotYet where there is none."""
    first = min(times, default=None)
    if first is None:
        raise NotYet
    return int(first)


def _steps_ms(lines: Sequence[Line], begun_us: int, ended_us: int) -> list[float]:
    """From one step of the task (of its last rank) to the next, those that end in between."""
    ends: dict[int, int] = {}
    for line in lines:
        if line.word == "stepped" and line.at_us <= ended_us:
            ends[line.numbers[0]] = line.at_us
    times = sorted(ends.values())
    return [(after - before) / 1e3 for before, after in itertools.pairwise(times) if after > begun_us]
