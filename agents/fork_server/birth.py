"""What a worker is born with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from agents.protocol.identity import Identity
from agents.protocol.messages import Launch


@dataclass(frozen=True, slots=True, kw_only=True)
class Birth:
    """How a worker is born. `output_fd`: its stdout and stderr; `given`: the other descriptors that it keeps. `user`,
    `cgroup`: what it becomes, and where; None: as its parent. `limits`: by number of resource."""

    launch: Launch
    slot: int
    gpus: tuple[str, ...]
    output_fd: int
    given: tuple[int, ...]
    parent_pid: int
    user: Identity | None = None
    cgroup: Path | None = None
    limits: Mapping[int, int] = field(default_factory=dict)
