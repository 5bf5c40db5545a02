"""Counts of OOM kills, and what two of them say about processes whose end nobody observed.

Workers die with their fork server, and all of them with their container. The next agent only finds that they no longer
exist. It can tell whether the kernel's OOM killer acted in between: in the same cgroup, which is proof enough, or on
the same machine. It calls every other reason unknown.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from unicrond.agents.host.host_resources import PROC, CgroupPlace, places, read_field
from unicrond.events.vocabulary import ExitCause


class KillCounts(msgspec.Struct, frozen=True):
    """The counts of OOM kills at one moment. `boot`: the machine's boot id; `cgroup`: device and inode of the cgroup
    that has counted `kills`; `machine`: the kills of the whole machine. None: cannot be read."""

    boot: str = ""
    cgroup: tuple[int, int] | None = None
    kills: int | None = None
    machine: int | None = None


def oom_counter(cgroups: list[CgroupPlace]) -> Path | None:
    """Return the file that counts the OOM kills of a cgroup: of the nearest one, upwards, that has a count."""
    for place in cgroups:
        name = "memory.oom_control" if place.version == 1 else "memory.events"
        # A process's own cgroup of version 2 may have no memory controller: then one above counts.
        for directory in place.upwards() if place.version == 2 else (place.directory,):
            if oom_kills(directory / name) is not None:
                return directory / name
    return None


def oom_kills(counter: Path) -> int | None:
    """Return the number of OOM kills in such a file, or in /proc/vmstat; None where it cannot be read."""
    return read_field(counter, "oom_kill")


def look(proc: Path = PROC) -> KillCounts:
    """Return the present counts of this process's memory cgroup and of the machine."""
    counter = oom_counter(places("memory", proc / "self", proc / "self"))
    cgroup = None
    try:
        boot = (proc / "sys" / "kernel" / "random" / "boot_id").read_text().strip()
        if counter is not None:
            status = counter.parent.stat()
            cgroup = (status.st_dev, status.st_ino)
    except OSError:
        boot = ""
    kills = oom_kills(counter) if counter is not None else None
    return KillCounts(boot, cgroup, kills, oom_kills(proc / "vmstat"))


def cause(before: KillCounts, now: KillCounts) -> ExitCause:
    """Return what ended the processes that lived at `before` and do not exist now, though nothing saw their end."""
    if not now.boot or before.boot != now.boot:
        return "unknown"
    if before.cgroup == now.cgroup and before.kills is not None and now.kills is not None:
        return "oom_killed" if now.kills > before.kills else "signalled"
    if before.machine is None or now.machine is None:
        return "unknown"
    return "signalled" if now.machine == before.machine else "maybe_oom_killed"
