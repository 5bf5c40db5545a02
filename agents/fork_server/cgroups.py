"""A cgroup (v2) for each worker: its processes cannot leave it, are bounded with it, and end with it.

Rules
-----
* A worker enters its cgroup before it becomes its user, and a user may not leave it.
* When the worker has ended, the processes left in its cgroup are killed, whatever session or user they are in.
* The processes that a killed fork server has left are killed by the next one, before it serves.
* Without a directory nothing of this happens: that is the agent's choice. It prepares one (`prepare`) below a cgroup
  that it may write to, its own or another, before it starts the fork server.
* The directory of a cgroup is its name.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

logger = logging.getLogger("unicrond.agents.fork_server")


class Cgroups:
    """Makes and removes the cgroups of workers. `place`: the directory for them, None: there are none. `limits`: by
    file of a cgroup, its content."""

    def __init__(self, place: Path | None, limits: Mapping[str, str]) -> None:
        self._place = place
        self._limits = limits
        #: Cgroups of ended workers, with processes that are about to end.
        self._emptying: set[Path] = set()

    def sweep(self) -> None:
        """End what an earlier fork server has left."""
        if self._place is None:
            return
        try:
            self._place.mkdir(exist_ok=True)
            leftovers = [directory for directory in self._place.iterdir() if directory.is_dir()]
        except OSError as error:
            logger.error("no cgroups below %s: %s; no worker starts", self._place, error.strerror)
            return
        for directory in leftovers:
            self._end(directory)

    def make(self, worker: str) -> Path | None:
        """Make the worker's cgroup, with its limits. Raise OSError."""
        if self._place is None:
            return None
        directory = self._place / worker
        directory.mkdir(exist_ok=True)
        for name, value in self._limits.items():
            (directory / name).write_text(value)
        return directory

    def ended(self, worker: str) -> None:
        """Kill the processes that the ended worker has left."""
        if self._place is not None:
            self._end(self._place / worker)

    def tidy(self) -> None:
        """Remove the cgroups that are empty by now."""
        for directory in tuple(self._emptying):
            with contextlib.suppress(OSError):
                directory.rmdir()
                self._emptying.discard(directory)

    def _end(self, directory: Path) -> None:
        if not directory.exists():
            return
        try:
            (directory / "cgroup.kill").write_text("1")
        except FileNotFoundError:
            _kill_each(directory)  # Linux before 5.14
        except OSError as error:
            logger.error("cannot end the processes that worker %s has left: %s", directory.name, error.strerror)
        self._emptying.add(directory)
        self.tidy()


def enter(directory: Path, pid: int = 0) -> None:
    """Move a process into the cgroup; 0: this one. Raise OSError."""
    (directory / "cgroup.procs").write_text(str(pid))


def _kill_each(directory: Path) -> None:
    with contextlib.suppress(OSError):
        for pid in (directory / "cgroup.procs").read_text("ascii").split():
            with contextlib.suppress(OSError):
                os.kill(int(pid), 9)


class NoCgroup(Exception):
    """No usable cgroup; the text says why and what to do."""


def own_cgroup(proc: Path = Path("/proc/self")) -> Path:
    """Return the directory of this process's cgroup (v2). Raise NoCgroup where it has none."""
    try:
        lines = (proc / "cgroup").read_text().splitlines()
        mounts = (proc / "mountinfo").read_text().splitlines()
    except OSError as error:
        raise NoCgroup(f"{error.filename}: {error.strerror}") from None
    path = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), None)
    for mount in mounts:
        fields, _, rest = mount.partition(" - ")
        if rest.startswith("cgroup2 ") and path is not None:
            _, _, _, root, place, *_ = fields.split()
            inside = os.path.relpath("/" + path, root)
            return Path(place) if inside.startswith("..") else Path(place, inside)
    raise NoCgroup("no cgroup v2 is mounted")


def prepare(parent: Path, node: str, limits: Iterable[str]) -> Path:
    """Make the directory below `parent` for the workers' cgroups, and enable the controllers of the limits
    ("memory.max").

    Raise NoCgroup where that is impossible.
    """
    place = parent / f"unicron-{node}"
    try:
        place.mkdir(exist_ok=True)
    except OSError as error:
        raise NoCgroup(f"{parent} cannot be written to ({error.strerror})") from None
    if not (place / "cgroup.procs").exists():
        place.rmdir()
        raise NoCgroup(f"{parent} is not a cgroup (v2)")
    for controller in sorted({limit.partition(".")[0] for limit in limits}):
        for directory in (parent, place):
            try:
                (directory / "cgroup.subtree_control").write_text(f"+{controller}")
            except OSError as error:
                raise NoCgroup(
                    f"controller {controller} cannot be had in {directory} ({error.strerror}); give a cgroup that has "
                    "it and holds no process itself"
                ) from None
    return place
