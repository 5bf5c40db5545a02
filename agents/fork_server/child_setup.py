"""The setup of a worker's process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from unicrond.agents.protocol.messages import Identity, Launch


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSetup:
    """The setup of a worker's process. `output_fd`: its stdout and stderr; `inherited_fds`: the other descriptors that
    it keeps. `user`, `cgroup`: its user and cgroup; None: its parent's. `limits`: by number of resource."""

    launch: Launch
    slot: int
    gpus: tuple[str, ...]
    output_fd: int
    inherited_fds: tuple[int, ...]
    parent_pid: int
    user: Identity | None = None
    cgroup: Path | None = None
    limits: Mapping[int, int] = field(default_factory=dict)
