"""The run directory of a node's agents: their memory, their boot numbers, the workers' marks."""

from __future__ import annotations

from unicrond.agents.core.state import Remembered
from unicrond.agents.protocol.marks import Mark
from unicrond.events.vocabulary import WorkerId
from unicrond.replay.simulation.models.virtual_time import HostClock
from unicrond.replay.simulation.trainer.process import Process


class RunDisk:
    """The files of a node's run directory. `full`: writing the memory fails (the agent continues, and reports it).

    `boot`: the boot number used last. A lost directory keeps it here: without it a node whose clock is behind as well
    would repeat old numbers, and be ignored until its clock has caught up (a known limit,
    docs/design/simulation.md).
    """

    def __init__(self, boot: int = 0) -> None:
        self.memory = Remembered()
        self.full = False
        self.was_full = False
        self.boot = self.previous_boot = boot

    def write(self, memory: Remembered) -> None:
        """Replace the agent's memory."""
        if self.full:
            self.was_full = True
        else:
            self.memory = memory

    def next_boot(self, wall_us: int) -> int:
        """Return the next boot number; see RunDir.next_boot."""
        self.previous_boot = self.boot
        self.boot = max(self.boot + 1, wall_us)
        return self.boot


class HostSigns:
    """A node's marks, for its agents' watches (unicrond.agents.shell.progress_watch.Signs). `launched`: the workers
    whose marks lie there."""

    def __init__(self, clock: HostClock, launched: dict[str, Process]) -> None:
        self._clock = clock
        self._launched = launched

    def now_us(self) -> int:
        """Return the host's monotonic clock; see Signs."""
        return self._clock.monotonic_us()

    def mark(self, worker: WorkerId) -> Mark | None:
        """Return the worker's mark; see Signs."""
        process = self._launched.get(worker)
        return process.replica.progress.mark if process is not None and process.replica is not None else None

    def take_away(self, worker: WorkerId) -> Mark | None:
        """Return the worker's mark and remove it; see Signs."""
        mark = self.mark(worker)
        self._launched.pop(worker, None)
        return mark

    def waited_us(self, pid: int) -> int:
        """Return 0: there is a CPU for every process; see Signs."""
        return 0  # a CPU for every process

    def is_stopped(self, pid: int) -> bool:
        """Return whether the kernel shows the process as stopped; see Signs."""
        return any(process.pid == pid and process.sigstopped for process in self._launched.values())
