"""Finds out whether the kernel's OOM killer ended a process: three witnesses, from the most exact to the vaguest.

Rules
-----
* The kernel log (/dev/kmsg) names the process. In a container it may be closed, or count processes otherwise.
* The OOM counter of the process's memory cgroup, as it can be seen here (agents/host/oom_kill_counts.py): as many
  SIGKILLs as it has grown by are its work. cgroup v2 keeps it in memory.events, v1 in memory.oom_control.
  One that has not grown is a "no" for a process that stayed there: the kernel counts before it kills.
* The machine's counter (/proc/vmstat): if it stands still, no process was OOM-killed. If it has grown, or cannot
  be read, the answer is "maybe".
* Read once at a process's fork and once at its death by SIGKILL; never in between. Exit code 137 is how a shell reports
  a child's SIGKILL: it is judged in the same way.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from unicrond.agents.host.host_resources import PROC, places
from unicrond.agents.host.oom_kill_counts import oom_counter, oom_kills
from unicrond.agents.protocol.messages import OomKill

_KERNEL_LOG = Path("/dev/kmsg")
_KILLED = re.compile(rb"Killed process (\d+)\b")
#: How a shell reports that SIGKILL ended a child: 128 and the signal's number.
EXIT_OF_A_KILLED_CHILD = 137
_RECORD_BYTES = 8192
_NAMED_MAX = 1024


class OomWitness:
    """Judges kills: `track` for every process that may be asked about, then `ended` for those that SIGKILL ended."""

    def __init__(self, kernel_log: Path = _KERNEL_LOG, proc: Path = PROC) -> None:
        self._proc = proc
        self._log_fd = _opened_at_its_end(kernel_log)
        self._log_pids: dict[int, None] = {}
        self._counters: dict[int, Path] = {}
        #: Processes that are still in the cgroup in which they were forked.
        self._staying: set[int] = set()
        #: Per counter, the kills that have been explained.
        self._explained: dict[Path, int] = {}
        self._machine = self._machine_kills()

    def track(self, pid: int, *, stays: bool = True) -> None:
        """Track a process that has just been forked: it is in its parent's memory cgroup, and `stays` there or does
        not."""
        counter = self._counter_of(pid)
        if counter is not None:
            if stays:
                self._staying.add(pid)
            self._counters[pid] = counter
            if counter not in self._explained:
                self._explained[counter] = oom_kills(counter) or 0

    def forget(self, pid: int) -> None:
        """Stop tracking the process: it has ended otherwise than by SIGKILL."""
        self._counters.pop(pid, None)
        self._staying.discard(pid)

    def ended(self, pid: int) -> OomKill:
        """Judge whether the kernel's OOM killer sent the SIGKILL that ended the process, which unicron did not send."""
        counter = self._counters.pop(pid, None)
        before, self._machine = self._machine, self._machine_kills()
        kills = oom_kills(counter) if counter is not None else None
        stayed = pid in self._staying
        self.forget(pid)
        is_counted = counter is not None and kills is not None and kills > self._explained[counter]
        if is_counted and counter is not None:
            self._explained[counter] += 1
        self._read_log()
        if pid in self._log_pids or is_counted:
            self._log_pids.pop(pid, None)
            return "yes"
        if (before is not None and self._machine == before) or (stayed and kills is not None):
            return "no"
        return "maybe"

    def close(self) -> None:
        """Close the kernel log."""
        if self._log_fd >= 0:
            os.close(self._log_fd)
            self._log_fd = -1

    # --- the witnesses ---------------------------------------------------------------------------

    def _counter_of(self, pid: int) -> Path | None:
        return oom_counter(places("memory", self._proc / str(pid), self._proc / "self"))

    def _machine_kills(self) -> int | None:
        return oom_kills(self._proc / "vmstat")

    def _read_log(self) -> None:
        if self._log_fd < 0:
            return
        while True:
            try:
                record = os.read(self._log_fd, _RECORD_BYTES)
            except BlockingIOError:
                return
            except BrokenPipeError:  # records were overwritten before they were read; the next ones are there
                continue
            except OSError:
                return
            if not record:
                return
            for number in _KILLED.findall(record):
                self._log_pids[int(number)] = None
                if len(self._log_pids) > _NAMED_MAX:
                    del self._log_pids[next(iter(self._log_pids))]


def _opened_at_its_end(log: Path) -> int:
    with contextlib.suppress(OSError):
        fd = os.open(log, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with contextlib.suppress(OSError):
            os.lseek(fd, 0, os.SEEK_END)
        return fd
    return -1
