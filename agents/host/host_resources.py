"""What this process may use of its machine: memory, CPUs; less where its container (its cgroups) is limited to less.

Rules
-----
* In a container the kernel may name a cgroup by the machine's path (`/kubepods/.../c1`), while the mount inside begins
  at the container: `mountinfo` says at which cgroup (its root field), and the path is taken from there.
* A limit may stand at the process's own cgroup or at any above it that is visible. The smallest counts.
* Version 1 is preferred where it has the controller: a hybrid machine mounts version 2 without any.
* A limit that cannot be read is None: unknown, never "no limit" in disguise. No limit is None too where the kernel says
  so, for then the machine's own size counts.

Sources: cgroups(7), Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst of Linux, proc_pid_mountinfo(5).
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

PROC = Path("/proc")
#: Version 1 writes "no limit" as the largest number of whole pages.
_NO_LIMIT = 1 << 60
_ESCAPE = re.compile(r"\\([0-7]{3})")


class CgroupPlace(NamedTuple):
    """A process's cgroup of one controller. `directory`: its own, as mounted here; `top`: that of the mount, which is
    `directory` or above it. `version`: 1 or 2."""

    version: int
    directory: Path
    top: Path

    def upwards(self) -> Iterator[Path]:
        """Yield the directories from the cgroup's up to the mount's."""
        yield self.directory
        if self.directory != self.top:
            for above in self.directory.parents:
                yield above
                if above == self.top:
                    return


class Mount(NamedTuple):
    """A mounted hierarchy. `root`: the cgroup that the mount begins with. `controllers`: empty for version 2."""

    version: int
    root: str
    place: Path
    controllers: frozenset[str]


def places(controller: str, process: Path = PROC / "self", observer: Path = PROC / "self") -> list[CgroupPlace]:
    """Return a process's cgroups with this controller, as `observer` sees them: version 1 before 2; empty where there
    is none.

    `process`, `observer`: directories of /proc.
    """
    try:
        memberships = list(_memberships((process / "cgroup").read_text()))
        mounts = list(cgroup_mounts((observer / "mountinfo").read_text()))
    except (OSError, ValueError):
        return []
    cgroups = []
    for version in (1, 2):
        paths = [path for names, path in memberships if (controller in names if version == 1 else not names)]
        hierarchies = [m for m in mounts if m.version == version and (version == 2 or controller in m.controllers)]
        cgroups += [CgroupPlace(version, _inside(path, mount), mount.place) for path in paths for mount in hierarchies]
    return cgroups


def cgroup_mounts(mountinfo: str) -> Iterator[Mount]:
    """Yield the hierarchies of cgroups in a /proc/PID/mountinfo."""
    for line in mountinfo.splitlines():
        fields, dash, rest = line.partition(" - ")
        if not dash or not rest.startswith(("cgroup ", "cgroup2 ")):
            continue
        kind, *_, options = rest.split(" ")
        _, _, _, root, place, *_ = fields.split(" ")
        version = 2 if kind == "cgroup2" else 1
        yield Mount(version, _plain(root), Path(_plain(place)), frozenset(options.split(",") if version == 1 else ()))


def cgroup_memory_limit_bytes(cgroups: list[CgroupPlace] | None = None) -> int | None:
    """Return the smallest limit of memory of the cgroups; None where there is none, or none that can be read."""
    limits = []
    for place in places("memory") if cgroups is None else cgroups:
        name = "memory.limit_in_bytes" if place.version == 1 else "memory.max"
        limits += [limit for directory in place.upwards() if (limit := _number(directory / name)) is not None]
    return min((limit for limit in limits if limit < _NO_LIMIT), default=None)


def cgroup_memory_free_bytes(cgroups: list[CgroupPlace] | None = None) -> int | None:
    """Return what the cgroup with the least room could still take: its limit, less the usage that cannot be reclaimed.

    None where there is no limit, or the kernel does not say.
    """
    free = []
    for place in places("memory") if cgroups is None else cgroups:
        limit_name, used_name, idle_name = (
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            if place.version == 1
            else ("memory.max", "memory.current", "inactive_file")
        )
        for directory in place.upwards():
            limit, usage = _number(directory / limit_name), _number(directory / used_name)
            if limit is not None and limit < _NO_LIMIT and usage is not None:
                idle = read_field(directory / "memory.stat", idle_name) or 0
                free.append(max(0, limit - max(0, usage - idle)))
    return min(free, default=None)


def cgroup_cpu_limit(cgroups: list[CgroupPlace] | None = None) -> float | None:
    """Return how many CPUs' time the cgroups allow; None where there is no limit, or none that can be read."""
    limits = []
    for place in places("cpu") if cgroups is None else cgroups:
        for directory in place.upwards():
            if place.version == 1:
                quota, period = _number(directory / "cpu.cfs_quota_us"), _number(directory / "cpu.cfs_period_us")
            else:
                words = (_text(directory / "cpu.max") or "").split()
                quota, period = (_integer(word) for word in words) if len(words) == 2 else (None, None)
            if quota is not None and period and quota > 0:
                limits.append(quota / period)
    return min(limits, default=None)


def load_milli() -> int:
    """Return the load average of the last minute, in thousandths. It is the machine's: the kernel keeps none for a
    container."""
    return round(os.getloadavg()[0] * 1000)


def memory_total_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Return the memory that may be used: the host's (MemTotal), or the container's limit if that is less; 0 where the
    kernel does not say."""
    return _less(_meminfo_bytes("MemTotal:", meminfo), cgroup_memory_limit_bytes())


def memory_free_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Return the memory that could be given out without swapping (MemAvailable), or up to the container's limit if that
    is less; 0 where the kernel does not say."""
    return _less(_meminfo_bytes("MemAvailable:", meminfo), cgroup_memory_free_bytes())


def cpus() -> int:
    """Return how many CPUs this process may keep busy: of those that it may run on, within its cgroups' limit; at least
    1."""
    allowed = len(os.sched_getaffinity(0))
    limit = cgroup_cpu_limit()
    return allowed if limit is None else max(1, min(allowed, math.floor(limit)))


def _memberships(text: str) -> Iterator[tuple[frozenset[str], str]]:
    """Yield the entries of a /proc/PID/cgroup: the controllers, none for version 2, and the cgroup's path."""
    for line in text.splitlines():
        _, names, path = line.split(":", 2)
        yield frozenset(names.split(",") if names else ()), path.removesuffix(" (deleted)")


def _inside(path: str, mount: Mount) -> Path:
    """Return the directory of a cgroup, or the mount's own where the cgroup is not below the mount's root."""
    inside = os.path.relpath(PurePosixPath("/", path), PurePosixPath("/", mount.root))
    return mount.place if inside == "." or inside.split("/")[0] == ".." else mount.place / inside


def _plain(text: str) -> str:
    """Return the text without the kernel's escapes: `\\040` is a space."""
    return _ESCAPE.sub(lambda match: chr(int(match[1], 8)), text)


def _text(path: Path) -> str | None:
    try:
        return path.read_text("ascii").strip()
    except (OSError, ValueError):
        return None


def _number(path: Path) -> int | None:
    return _integer(_text(path) or "")


def _integer(text: str) -> int | None:
    return int(text) if text.removeprefix("-").isdecimal() and text.isascii() else None


def read_field(path: Path, name: str) -> int | None:
    """Return the number after a name in a file of names and numbers."""
    for line in (_text(path) or "").splitlines():
        first, _, number = line.partition(" ")
        if first == name:
            return _integer(number)
    return None


def _less(of_host: int, of_container: int | None) -> int:
    if of_container is None:
        return of_host
    return min(of_host, of_container) if of_host else of_container


def _meminfo_bytes(field: str, meminfo: Path) -> int:
    try:
        for line in meminfo.read_text("ascii").splitlines():
            if line.startswith(field):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0
