"""What ended processes that nothing of ours saw end: by the counts of OOM kills, written down before and read after.

Workers die with their fork server, and all of them with their container. The next agent finds them gone. What it can
know of the reason is whether the kernel's OOM killer was at work meanwhile: in the same cgroup, which is proof enough,
or on the same machine. All else it calls unknown.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from agents.protocol.container import PROC, oom_counter, oom_kills, places
from events.vocabulary import ExitCause


class KillCounts(msgspec.Struct, frozen=True):
    """At one moment. `boot`: the machine's; `cgroup`: which one has counted `kills`; `machine`: the kills of the whole
    machine. None: cannot be read."""

    boot: str = ""
    cgroup: tuple[int, int] | None = None
    kills: int | None = None
    machine: int | None = None


def look(proc: Path = PROC) -> KillCounts:
    """The counts of now, of this process's memory cgroup and of the machine."""
    counter = oom_counter(places("memory", proc / "self", proc / "self"))
    cgroup = None
    try:
        boot = (proc / "sys" / "kernel" / "random" / "boot_id").read_text().strip()
        if counter is not None:
            found = counter.parent.stat()
            cgroup = (found.st_dev, found.st_ino)
    except OSError:
        boot = ""
    kills = oom_kills(counter) if counter is not None else None
    return KillCounts(boot, cgroup, kills, oom_kills(proc / "vmstat"))


def cause(before: KillCounts, now: KillCounts) -> ExitCause:
    """Of processes that lived at `before` and are gone, though nothing saw their end."""
    if not now.boot or before.boot != now.boot:
        return "unknown"
    if before.cgroup == now.cgroup and before.kills is not None and now.kills is not None:
        return "oom_killed" if now.kills > before.kills else "signalled"
    if before.machine is None or now.machine is None:
        return "unknown"
    return "signalled" if now.machine == before.machine else "maybe_oom_killed"
