"""Sets a process's attributes in Linux: death with its parent, adoption of orphans, capabilities (prctl(2),
capset(2))."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_CAPBSET_DROP = 24
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38
_PR_CAP_AMBIENT = 47
_PR_CAP_AMBIENT_CLEAR_ALL = 4
_CAPABILITY_VERSION_3 = 0x20080522
#: capabilities(7)
CAP_KILL = 5
CAP_SETGID = 6
CAP_SETUID = 7
CAP_SYS_RESOURCE = 24
# Loaded here, at import: a child of the fork server must not load libraries between fork and its first work.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
_capset = _libc.capset


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel SIGKILL this process when its parent dies; end it now if that has happened already."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent dies, so that it can be reaped."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def capabilities() -> frozenset[int]:
    """Return what this process may do beyond other processes of its user, as numbers of capabilities(7)."""
    for line in Path("/proc/self/status").read_text("ascii").splitlines():
        name, _, value = line.partition(":")
        if name == "CapEff":
            mask = int(value, 16)
            return frozenset(number for number in range(64) if mask >> number & 1)
    return frozenset()


def gain_nothing() -> None:
    """Disable every way in which an exec gives a privilege (setuid programs, files with capabilities). Raise
    OSError."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    for number in range(64):
        with contextlib.suppress(OSError):  # without CAP_SETPCAP, and beyond the last one
            _prctl(_PR_CAPBSET_DROP, number)


def drop_capabilities() -> None:
    """Drop all capabilities. Raise OSError."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    no_sets = (ctypes.c_uint32 * 6)()
    if _capset(ctypes.byref(header), ctypes.byref(no_sets)) != 0:
        raise _error("capset")


def be_debuggable() -> None:
    """Allow debuggers, profilers and core dumps of the user's own to read this process: a change of user forbids it."""
    _prctl(_PR_SET_DUMPABLE, 1)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        raise _error(f"prctl({option})")


def _error(call: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{call}: {os.strerror(number)}")
