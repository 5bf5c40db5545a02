"""The users that tasks may run as: an allow-list of this node, read once, when the agent starts.

Rules
-----
* No task runs as root, nor as the agent: the key and the sockets are for the agent alone.
* The first of the list is for tasks that name none: with a list no task runs as the agent.
* An agent with a list needs the privilege to change users, else it does not start; one without a list logs the risks.
"""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence

from unicrond.agents.host.prctl import CAP_KILL, CAP_SETGID, CAP_SETUID, capabilities
from unicrond.agents.protocol.messages import Identity

NEEDED = {"CAP_KILL": CAP_KILL, "CAP_SETGID": CAP_SETGID, "CAP_SETUID": CAP_SETUID}
#: The variables of the agent that every task may see: names, or (with a closing "_") beginnings of names. A secret of
#: one task in the agent's environment must not reach another task.
SAFE_VARIABLES = (
    "PATH", "LANG", "LANGUAGE", "LC_", "TZ", "TMPDIR", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "PYTHONPATH",
    "PYTHONUNBUFFERED", "PYTHONHASHSEED", "PYTHONWARNINGS", "CUDA_", "CUDNN_", "NVIDIA_", "NCCL_", "GLOO_", "UCX_",
    "OMP_", "MKL_", "OPENBLAS_", "NUMEXPR_", "KMP_", "TORCH_", "PYTORCH_", "TRITON_",
)  # fmt: skip


class BadUser(ValueError):
    """The list cannot be used; one line that says why and what to do."""


def identities(names: Sequence[str]) -> tuple[Identity, ...]:
    """Return the users of this node with these names. Raise BadUser."""
    users = tuple(_identity(name) for name in dict.fromkeys(names))
    if users and (lacking := [name for name, number in NEEDED.items() if number not in capabilities()]):
        raise BadUser(
            f"needs {', '.join(lacking)}; start the agent as root, or with AmbientCapabilities="
            f"{' '.join(NEEDED)} in its unit"
        )
    for user in users:
        _require_readable(user)
    return users


def _require_readable(user: Identity) -> None:
    """Raise BadUser where the user cannot read what a task imports: a Python below /root is closed to others."""
    run = [sys.executable, "-c", "import unicrond.agents.protocol.messages"]
    try:
        process = subprocess.run(
            run, user=user.uid, group=user.gid, extra_groups=user.groups, cwd="/", capture_output=True, check=False
        )
        problem = "" if process.returncode == 0 else process.stderr.decode(errors="replace").strip().rpartition("\n")[2]
    except OSError as error:
        problem = f"{error.strerror}"
    if problem:
        raise BadUser(
            f"user {user.name} cannot run {sys.executable} ({problem}); install it where all users can read it"
        )


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


def visible_environment(environ: Mapping[str, str], more: Collection[str]) -> dict[str, str]:
    """Return the part of the agent's environment that tasks may see where they run as users of their own."""
    return {
        name: value
        for name, value in environ.items()
        if name in more
        or any(name == pattern or (pattern.endswith("_") and name.startswith(pattern)) for pattern in SAFE_VARIABLES)
    }


def refusal(users: Collection[str], run_as: str) -> str:
    """Return why a task with this `run_as` does not start on a node with this list; "" where it does."""
    if not run_as or run_as in users:
        return ""
    if not users:
        return f"run_as: this node runs every task as its agent's user, not as {run_as}; start its agent with --run-as"
    return f"run_as: {run_as} is not in this node's --run-as ({', '.join(users)}); add it there, or name one of these"


def not_separated(users: Sequence[Identity], cgroup: str) -> Iterator[str]:
    """Yield sentences about what tasks on this node can do to it and to each other. `cgroup`: why there is none, or
    ""."""
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
