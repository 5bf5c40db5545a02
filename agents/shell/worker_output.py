"""Handles what this node's workers write: the end of a log for a report, the copy on stdout, and room on the volume.

Rules
-----
* Workers write into their logs by way of the fork server; here the logs are read, and those of ended workers removed.
* No log is removed before the fork server has said which workers live: an agent that knows less would take a living
  worker's. Only a volume that is full at the start is not given that time: there the agent's memory must do.
* Whatever leaves the node is masked.

What people ask for (pieces of logs, stacks, marks) is answered in node_queries.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import time
from collections.abc import Callable, Collection

from unicrond.agents.host.paths import worker_log
from unicrond.agents.host.rotated_output import tail
from unicrond.agents.output.output_mirror import OutputMirror
from unicrond.agents.output.output_pruning import Limits, prune
from unicrond.agents.shell.options import Options
from unicrond.agents.shell.run_dir import BadRunDir, RunDir
from unicrond.events.host.masking import PATTERN_MASK, REACH_BYTES
from unicrond.events.vocabulary import WorkerId

logger = logging.getLogger("unicrond.agents")

#: How much of a log goes with an unexpected exit.
LOG_TAIL_BYTES = 4096
_PRUNE_EVERY_S = 60.0


class WorkerOutput:
    """Keeps the output of one node's workers. `workers` returns those that live now."""

    def __init__(self, options: Options, run_dir: RunDir, workers: Callable[[], Collection[WorkerId]]) -> None:
        self._options = options
        self._run_dir = run_dir
        self._workers = workers
        self._mirror: OutputMirror | None = None

    def show(self) -> None:
        """Show the workers' output on stdout from now on."""
        self._mirror = OutputMirror(self._run_dir.logs, lambda: tuple(self._workers()))

    def ended(self, worker: WorkerId) -> None:
        """Note that a worker has ended."""
        if self._mirror is not None:
            self._mirror.ended(worker)

    def log_tail(self, worker: WorkerId) -> str:
        """Return the end of the worker's log, at most LOG_TAIL_BYTES bytes.

        Secrets are blotted out; bytes that are not UTF-8 are replaced.
        """
        path = worker_log(self._run_dir.logs, worker.rpartition(".")[0], worker)
        masked = PATTERN_MASK.overwrite(tail(path, LOG_TAIL_BYTES + REACH_BYTES))
        return masked[-LOG_TAIL_BYTES:].decode(errors="replace")

    async def prune(self, has_inventory: asyncio.Event) -> None:
        """Prune the logs once the living workers are known (`has_inventory`), and now and then, without end."""
        await has_inventory.wait()
        while True:
            living = frozenset(self._workers())
            await asyncio.to_thread(prune_logs, self._options, self._run_dir, living)
            await asyncio.sleep(_PRUNE_EVERY_S)

    async def close(self) -> None:
        """Show what is still to be shown, and stop."""
        if self._mirror is not None:
            await asyncio.to_thread(self._mirror.close)


def make_room(options: Options, run_dir: RunDir) -> None:
    """Remove logs of ended workers where the volume is full, before anything is written."""
    usage = shutil.disk_usage(run_dir.path)
    if usage.free >= Limits.of(run_dir.path, None, None).reserve_bytes:
        return
    logger.error("the volume of %s is full (%d of %d bytes free)", run_dir.path, usage.free, usage.total)
    with contextlib.suppress(BadRunDir):  # without the memory this agent does not know which workers live
        prune_logs(options, run_dir, frozenset(run_dir.recall().workers))


def prune_logs(options: Options, run_dir: RunDir, living: frozenset[WorkerId]) -> None:
    """Remove logs of ended workers; see output_pruning.py. A disk that refuses is logged."""
    try:
        run_dir.logs.mkdir(mode=0o700, parents=True, exist_ok=True)
        limits = Limits.of(run_dir.logs, options.logs_max_age_s, options.logs_max_bytes)
        count, size_bytes = prune(run_dir.logs, living, limits, time.time())
    except OSError as error:
        logger.error("cannot prune the workers' logs: %s", error)
        return
    if count:
        logger.warning("removed the logs of %d ended workers (%d bytes)", count, size_bytes)
