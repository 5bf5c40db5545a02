"""Drops privileges: a child of a privileged fork server becomes its task's user before any line of the task runs.

Rules
-----
* Limits come first, while they may still be set; then groups, group, user, and at last every capability.
* The outcome is verified: a child that still has a privilege of the fork server ends.
* A change of user makes the kernel forget that the child dies with its parent: that is requested again.
* The fork server itself reads a task's files with the rights of the task's user (`acting_for`).

`agents/host/task_users.py` decides as which users tasks may run; `cgroups.py` puts the child into its cgroup, before
this.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

from unicrond.agents.host.prctl import be_debuggable, capabilities, die_with_parent, drop_capabilities, gain_nothing
from unicrond.agents.protocol.messages import Identity


class StillPrivileged(Exception):
    """The child could not become its user and must not go on. The text says which privilege is left."""


def become(user: Identity, limits: Mapping[int, int], parent_pid: int) -> None:
    """Turn this process into one of `user`'s, for good. `limits`: by number of resource (resource.RLIMIT_NOFILE).

    Raise StillPrivileged.
    """
    try:
        for number, value in limits.items():
            resource.setrlimit(number, (value, value))
        gain_nothing()
        os.setgroups(user.groups)
        os.setresgid(user.gid, user.gid, user.gid)
        os.setresuid(user.uid, user.uid, user.uid)
        drop_capabilities()
        be_debuggable()
    except (OSError, ValueError) as error:
        raise StillPrivileged(f"cannot become user {user.name}: {error}") from None
    if os.getresuid() != (user.uid,) * 3 or os.getresgid() != (user.gid,) * 3:
        raise StillPrivileged(f"user {user.name}: the kernel kept another id")
    if set(os.getgroups()) - {user.gid, *user.groups} or capabilities():
        raise StillPrivileged(f"user {user.name}: groups or capabilities are left")
    die_with_parent(parent_pid)


@contextmanager
def acting_for(user: Identity | None) -> Iterator[None]:
    """Open files with the rights of `user` inside the block, not with this process's; None: with this process's.

    The real and the saved user stay, so that `user` can neither signal nor trace this process. Raise OSError.
    """
    with ExitStack() as back:
        if user is not None:
            back.callback(be_debuggable)  # or its agent could not read its descriptors any more
            back.callback(os.setgroups, os.getgroups())
            os.setgroups(user.groups)
            back.callback(os.setegid, os.getegid())
            os.setegid(user.gid)
            back.callback(os.seteuid, os.geteuid())
            os.seteuid(user.uid)
        yield


def personal(user: Identity) -> dict[str, str]:
    """Return the variables that name a user."""
    return {"HOME": user.home, "USER": user.name, "LOGNAME": user.name}
