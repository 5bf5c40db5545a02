"""Where a node's workers get cgroups of their own: below a cgroup (v2) that the agent may write to.

The directory of a cgroup is its name; `agents/fork_server/cgroups.py` makes one for each worker.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path


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
