"""The users that tasks may run as: an allow-list of this node, read once, when the agent starts.

Rules
-----
* No task runs as root, nor as the agent: its key and its sockets are the agent's own.
* The first of the list is for tasks that name none: with a list no task runs as the agent.
* Without the privilege to change users an agent with a list does not start; without a list it says what that means.
"""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence

from agents.prctl import CAP_KILL, CAP_SETGID, CAP_SETUID, capabilities
from agents.protocol.identity import Identity

NEEDED = {"CAP_KILL": CAP_KILL, "CAP_SETGID": CAP_SETGID, "CAP_SETUID": CAP_SETUID}
#: What every task may see of the agent's environment: names, or (with a closing "_") beginnings of names. A secret of
#: one task that stands in the agent's environment must not reach another.
PASSED = (
    "PATH", "LANG", "LANGUAGE", "LC_", "TZ", "TMPDIR", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "PYTHONPATH",
    "PYTHONUNBUFFERED", "PYTHONHASHSEED", "PYTHONWARNINGS", "CUDA_", "CUDNN_", "NVIDIA_", "NCCL_", "GLOO_", "UCX_",
    "OMP_", "MKL_", "OPENBLAS_", "NUMEXPR_", "KMP_", "TORCH_", "PYTORCH_", "TRITON_",
)  # fmt: skip


class BadUser(ValueError):
    """The list cannot be used; one line that says why and what to do."""


def identities(names: Sequence[str]) -> tuple[Identity, ...]:
    """The users of this node with these names. Raises BadUser."""
    found = tuple(_identity(name) for name in dict.fromkeys(names))
    if found and (lacking := [name for name, number in NEEDED.items() if number not in capabilities()]):
        raise BadUser(
            f"needs {', '.join(lacking)}; start the agent as root, or with AmbientCapabilities="
            f"{' '.join(NEEDED)} in its unit"
        )
    for user in found:
        _require_readable(user)
    return found


def _require_readable(user: Identity) -> None:
    """What a task imports after the drop it reads as its user: a Python below /root is closed to others."""
    run = [sys.executable, "-c", "import agents.protocol.messages"]
    try:
        tried = subprocess.run(
            run, user=user.uid, group=user.gid, extra_groups=user.groups, cwd="/", capture_output=True, check=False
        )
        said = "" if tried.returncode == 0 else tried.stderr.decode(errors="replace").strip().rpartition("\n")[2]
    except OSError as error:
        said = f"{error.strerror}"
    if said:
        raise BadUser(f"user {user.name} cannot run {sys.executable} ({said}); install it where all users can read it")


def _identity(name: str) -> Identity:
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        raise BadUser(f"this node has no user {name}; make one, or leave it out") from None
    if entry.pw_uid == 0:
        raise BadUser(f"user {name} is root (uid 0), from whom nothing is separated; give another")
    if entry.pw_uid == os.getuid():
        raise BadUser(f"user {name} is the agent's own, who can read its key; give another")
    if entry.pw_gid == 0 or 0 in (groups := os.getgrouplist(name, entry.pw_gid)):
        raise BadUser(f"user {name} is in root's group (gid 0); take it out, or give another")
    return Identity(name=name, uid=entry.pw_uid, gid=entry.pw_gid, groups=tuple(sorted(groups)), home=entry.pw_dir)


def passed_on(environ: Mapping[str, str], more: Collection[str]) -> dict[str, str]:
    """What of the agent's environment tasks may see, where they run as users of their own."""
    return {
        name: value
        for name, value in environ.items()
        if name in more or any(name == one or (one.endswith("_") and name.startswith(one)) for one in PASSED)
    }


def refusal(users: Collection[str], run_as: str) -> str:
    """Why a task with this `run_as` does not start on a node with this list; "" where it does."""
    if not run_as or run_as in users:
        return ""
    if not users:
        return f"run_as: this node runs every task as its agent's user, not as {run_as}; start its agent with --run-as"
    return f"run_as: {run_as} is not in this node's --run-as ({', '.join(users)}); add it there, or name one of these"


def not_separated(users: Sequence[Identity], cgroup: str) -> Iterator[str]:
    """What tasks on this node can do to it and to each other, in sentences. `cgroup`: why there is none, or ""."""
    if not users:
        me = _name(os.getuid())
        yield (
            f"tasks run as this agent's user ({me}): they can read its key and its memory, and signal its processes "
            "and other tasks'; --run-as separates them (docs/operate/separation.md)"
        )
    elif cgroup:
        yield (
            f"workers have no cgroups of their own ({cgroup}): a process that leaves its worker's session may outlive "
            "it, and no limit counts a task's processes together"
        )


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"
