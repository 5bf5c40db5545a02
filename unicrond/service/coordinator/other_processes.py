"""Other heads' processes on this machine: whether another one, such as a predecessor, still runs, and the lock of a
state_dir, which one coordinator at a time uses: a second one would adopt the first one's nats-server, and end it. One
that was started by hand beside the first is told so; where locks hold across machines or containers, it waits.

A process id means something in one pid namespace of one boot, and only together with the time at which the process
began: ids are used again.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from socket import gethostname
from typing import BinaryIO

import msgspec

from unicrond.events.log.event_log import LogError
from unicrond.events.vocabulary.phrases import clean


def machine() -> str:
    """Return this boot of this machine and the pid namespace; "" where the kernel does not say."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return ""


def began(pid: int) -> int | None:
    """Return when the process began, in the kernel's ticks since the boot; None where it does not run."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if after_name[0] == "Z" else int(after_name[19])


def is_gone(other_machine: str, pid: int, other_began: int) -> bool:
    """Return whether the process ran on this machine and has ended; False for processes of other machines."""
    return bool(other_machine) and other_machine == machine() and pid != os.getpid() and began(pid) != other_began


class InUse(LogError):
    """The directory cannot be used; the text says why and what to do."""


class InUseElsewhere(InUse):
    """A head on another machine, or in another container, has the directory: it can be waited for."""


class _Holder(msgspec.Struct):
    """Who has locked a state_dir, as its lock says."""

    machine: str = ""
    host: str = ""
    pid: int = 0


@contextmanager
def sole_user(state_dir: Path) -> Iterator[None]:
    """Create the directory and hold its lock as long as the context lasts. Raises InUse, InUseElsewhere."""
    try:
        state_dir.mkdir(parents=True, exist_ok=True)
        lock = (state_dir / "unicrond.lock").open("a+b", buffering=0)
    except OSError as error:
        raise InUse(f"state_dir: cannot use {error.filename}: {error.strerror}; set another state_dir") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise _in_use(state_dir, lock) from None
        with suppress(OSError):  # a full volume: it is known to nobody who has the lock
            lock.truncate(0)
            lock.write(msgspec.json.encode(_Holder(machine=machine(), host=gethostname(), pid=os.getpid())))
        yield


def _in_use(state_dir: Path, lock: BinaryIO) -> InUse:
    holder = _Holder()
    with suppress(OSError, msgspec.MsgspecError):
        lock.seek(0)
        holder = msgspec.json.decode(lock.read(4096), type=_Holder)
    if holder.machine in ("", machine()):
        return InUse(f"state_dir: another coordinator runs in {state_dir}; stop it first, or set another state_dir")
    return InUseElsewhere(
        f"state_dir: {state_dir} is in use by another head, on {clean(holder.host)} (pid {holder.pid}); this head "
        "takes it once that has ended"
    )
