"""Limits of a task's processes: of resources (setrlimit(2)), and of cgroups, whose names have a dot."""

from __future__ import annotations

import re
import resource
from typing import NamedTuple

_RESOURCES = {
    "as": resource.RLIMIT_AS,
    "core": resource.RLIMIT_CORE,
    "data": resource.RLIMIT_DATA,
    "fsize": resource.RLIMIT_FSIZE,
    "memlock": resource.RLIMIT_MEMLOCK,
    "nofile": resource.RLIMIT_NOFILE,
    "nproc": resource.RLIMIT_NPROC,
    "stack": resource.RLIMIT_STACK,
}
_FILE = re.compile(r"(cpu|hugetlb|io|memory|misc|pids|rdma)(\.[a-z0-9_]+)+")


class Limit(NamedTuple):
    """One limit of a process. `resource`: the number of an rlimit, -1 for a cgroup's. `number`: the rlimit's value.
    `value`: the text for a cgroup's file."""

    name: str
    value: str
    resource: int
    number: int

    def __str__(self) -> str:
        return f"{self.name}={self.value}"


def parse(text: str) -> Limit:
    """Parse "NAME=VALUE". Raise ValueError."""
    name, equals, value = text.partition("=")
    if not equals or not value:
        raise ValueError(f"{text!r} is not NAME=VALUE; give nofile=65536 or memory.max=64G")
    if _FILE.fullmatch(name):
        return Limit(name, value, -1, 0)
    if name not in _RESOURCES:
        raise ValueError(f"{name!r} is not a limit; use {', '.join(_RESOURCES)}, or a file of cgroup v2 (memory.max)")
    if value != "unlimited" and not value.isdecimal():
        raise ValueError(f"{name}: {value!r} is not a whole number; give one, or unlimited")
    number = resource.RLIM_INFINITY if value == "unlimited" else int(value)
    return Limit(name, value, _RESOURCES[name], number)


def exceeds_hard_limit(limit: Limit) -> bool:
    """Return whether the limit is more than this process may grant."""
    hard = resource.getrlimit(limit.resource)[1]
    return hard != resource.RLIM_INFINITY and (limit.number == resource.RLIM_INFINITY or limit.number > hard)
