"""Whether the kernel's OOM killer ended a process: three witnesses, from the most exact to the vaguest.

Rules
-----
* The kernel log (/dev/kmsg) names the process. In a container it may be closed, or count processes otherwise.
* The OOM counter of the process's memory cgroup: as many SIGKILLs as it has grown by are its work. cgroup v2 keeps it
  in memory.events, v1 in memory.oom_control.
* The machine's counter (/proc/vmstat): if it stands still, no process was OOM-killed. If it has grown, or cannot
  be read, the answer is "maybe".
* Read once at a process's birth and once at its death by SIGKILL; never in between.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from agents.protocol.messages import OomKill

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_KERNEL_LOG = Path("/dev/kmsg")
_PROC = Path("/proc")
_KILLED = re.compile(rb"Killed process (\d+)\b")
_RECORD_BYTES = 8192
_NAMED_MAX = 1024


class OomWitness:
    """`born` for every process that may be asked about, then `ended` for those that SIGKILL ended."""

    def __init__(self, cgroup_root: Path = _CGROUP_ROOT, kernel_log: Path = _KERNEL_LOG, proc: Path = _PROC) -> None:
        self._root = cgroup_root
        self._proc = proc
        self._log_fd = _opened_at_its_end(kernel_log)
        self._named: dict[int, None] = {}
        self._counters: dict[int, Path] = {}
        #: Per counter, the kills that have been explained.
        self._known: dict[Path, int] = {}
        self._machine = self._machine_kills()

    def born(self, pid: int) -> None:
        """The process has just been forked: it is in its parent's memory cgroup."""
        counter = self._counter_of(pid)
        if counter is not None:
            self._counters[pid] = counter
            if counter not in self._known:
                self._known[counter] = _kills(counter) or 0

    def forget(self, pid: int) -> None:
        """The process has ended otherwise than by SIGKILL."""
        self._counters.pop(pid, None)

    def ended(self, pid: int) -> OomKill:
        """A SIGKILL that unicron did not send has ended the process: was it the kernel's?"""
        counter = self._counters.pop(pid, None)
        before, self._machine = self._machine, self._machine_kills()
        kills = _kills(counter) if counter is not None else None
        counted = counter is not None and kills is not None and kills > self._known[counter]
        if counted and counter is not None:
            self._known[counter] += 1
        self._read_log()
        if pid in self._named or counted:
            self._named.pop(pid, None)
            return "yes"
        if before is not None and self._machine == before:
            return "no"
        return "maybe"

    def close(self) -> None:
        """Close the kernel log."""
        if self._log_fd >= 0:
            os.close(self._log_fd)
            self._log_fd = -1

    # --- the witnesses ---------------------------------------------------------------------------

    def _counter_of(self, pid: int) -> Path | None:
        try:
            lines = (self._proc / str(pid) / "cgroup").read_text().splitlines()
        except OSError:
            return None
        for line in lines:
            _, controllers, path = line.split(":", 2)
            if controllers == "memory":
                places = [self._root / "memory" / path.lstrip("/") / "memory.oom_control"]
            elif not controllers:
                places = [root / path.lstrip("/") / "memory.events" for root in (self._root, self._root / "unified")]
            else:
                continue
            for place in places:
                if _kills(place) is not None:
                    return place
        return None

    def _machine_kills(self) -> int | None:
        return _kills(self._proc / "vmstat")

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
                self._named[int(number)] = None
                if len(self._named) > _NAMED_MAX:
                    del self._named[next(iter(self._named))]


def _opened_at_its_end(log: Path) -> int:
    with contextlib.suppress(OSError):
        fd = os.open(log, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with contextlib.suppress(OSError):
            os.lseek(fd, 0, os.SEEK_END)
        return fd
    return -1


def _kills(counter: Path) -> int | None:
    """The number after "oom_kill" in a file of names and numbers; None where it cannot be read."""
    try:
        for line in counter.read_text("ascii").splitlines():
            name, _, number = line.partition(" ")
            if name == "oom_kill":
                return int(number)
    except (OSError, ValueError):
        pass
    return None
