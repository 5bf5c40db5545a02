"""The three systems, each started on this machine as its own documents say, for one cell, and ended again.

* unicrond: everything real (nats-server, coordinator, an agent and a fork server for each rank: a node of one slot).
* torchrun: one agent for all ranks, c10d rendezvous, its default look at the ranks every 0.1 s.
* torchft: a lighthouse; a process for each rank, started again as soon as it has ended. A heartbeat is missed after 500
  ms. The lighthouse waits JOIN_TIMEOUT_MS for ranks that beat and have not come: below an iteration's jitter it drops
  slow ranks (at six ranks, 100 ms never let all train together), above it it waits for the dead until their beats are
  missed. Survivors that are no neighbours of the dead wait for the process group's own time-out (torchft_gpt.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from tests.benchmarks.recovery.cell import Cell, System
from unicrond.local.dev import DevCluster, free_port, small_cluster

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
_PR_SET_PDEATHSIG = 1
HEARTBEAT_S = 0.5
JOIN_TIMEOUT_MS = {2: 100, 3: 100, 4: 100, 6: 300}
QUORUM_TICK_MS = 10
HEARTBEAT_TIMEOUT_MS = 500
#: Repeated blows to one node are the benchmark's own, and no reason to isolate it.
PATIENT = {"policy": {"strikes_max": 1000, "stuck_max": 1000, "flaps_max": 16, "flap_window_s": 1.0}}


@asynccontextmanager
async def unicrond(cell: Cell, data: Path, directory: Path, peers: Path) -> AsyncIterator[DevCluster]:
    os.environ.update(_environment())
    async with small_cluster(directory, nodes=cell.ranks, heartbeat_s=HEARTBEAT_S, settings=PATIENT) as cluster:
        await cluster.submit(submission(cell, data, directory))
        yield cluster


def submission(cell: Cell, data: Path, directory: Path) -> dict[str, Any]:
    """The cell's task as people submit it."""
    task: dict[str, Any] = msgspec.to_builtins(cell.task(str(data)))
    del task["accumulation"]
    task["numerics"] = "follow" if cell.system == "unicrond-follow" else "fixed"
    return {**task, "entry": str(HERE / "unicrond_gpt.py"), "args": [str(directory), str(cell.paced_s)]}


@asynccontextmanager
async def torchrun(cell: Cell, data: Path, directory: Path, peers: Path) -> AsyncIterator[None]:
    arguments = _arguments(cell, data, directory)
    async with _process(
        directory / "torchrun.log",
        *(str(peers / "python"), "-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", str(cell.ranks)),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", "recovery"),
        *("--max-restarts", "1000000", "--monitor-interval", "0.1"),
        *(str(HERE / "torchrun_gpt.py"), *arguments),
    ):
        yield None


@asynccontextmanager
async def torchft(cell: Cell, data: Path, directory: Path, peers: Path) -> AsyncIterator[None]:
    port = free_port()
    arguments = _arguments(cell, data, directory)
    lighthouse = _process(
        directory / "lighthouse.log",
        *(str(peers / "torchft_lighthouse"), "--bind", f"127.0.0.1:{port}", "--min_replicas", "1"),
        *("--join_timeout_ms", str(JOIN_TIMEOUT_MS[cell.ranks]), "--quorum_tick_ms", str(QUORUM_TICK_MS)),
        *("--heartbeat_timeout_ms", str(HEARTBEAT_TIMEOUT_MS)),
    )
    environment = {"TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}"}

    async def keep(rank: int) -> None:
        command = [str(peers / "python"), str(HERE / "torchft_gpt.py"), *arguments, str(rank), str(cell.ranks)]
        while True:
            async with _process(directory / f"rank{rank}.log", *command, **environment) as process:
                await process.wait()

    async with lighthouse:
        keepers = [asyncio.create_task(keep(rank)) for rank in range(cell.ranks)]
        try:
            yield None
        finally:
            for keeper in keepers:
                keeper.cancel()
            await asyncio.gather(*keepers, return_exceptions=True)


START: dict[System, Callable[[Cell, Path, Path, Path], AbstractAsyncContextManager[Any]]] = {
    "unicrond": unicrond,
    "unicrond-follow": unicrond,
    "torchrun": torchrun,
    "torchft": torchft,
}


def _arguments(cell: Cell, data: Path, directory: Path) -> list[str]:
    task = directory / "task.json"
    task.write_bytes(msgspec.json.encode(cell.task(str(data))))
    return [str(task), str(directory), str(cell.paced_s)]


def _environment() -> dict[str, str]:
    return {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "GLOO_SOCKET_IFNAME": "lo"}


@asynccontextmanager
async def _process(log: Path, *command: str, **environment: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process in a session of its own, ended with all that it has started."""
    with log.open("ab") as output:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output, cwd=ROOT,
            env=os.environ | _environment() | environment, start_new_session=True, preexec_fn=_end_with_parent,
        )  # fmt: skip
    try:
        yield process
    finally:
        children = _descendants(process.pid)
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        for child in children:
            with contextlib.suppress(Exception):
                child.kill()


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)  # torchrun ends its ranks on SIGTERM


def _descendants(pid: int) -> list[Any]:
    import psutil

    try:
        return list(psutil.Process(pid).children(recursive=True))
    except psutil.NoSuchProcess:
        return []


def default_peers() -> Path:
    """Where the peers' programs are: beside this Python, unless told otherwise."""
    return Path(sys.executable).parent
