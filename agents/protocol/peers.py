"""What processes of different versions on one node say to each other: agents come and go, workers stay.

A younger process understands an older one, which closes the connection at what it does not know. So an agent leaves out
of what it sends to a worker whatever came into the log's vocabulary since the first schema (workers need none of it), a
fork server says what it reads, and both ask which schema their agent reads.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

from events.schemas import FIRST, SCHEMA, lowered_value, since

M = TypeVar("M", bound=msgspec.Struct)


def plain(message: M, schema: int = FIRST) -> M:
    """A message to a process that reads `schema`, or to a worker, which may be older than its agent."""
    return lowered_value(message, schema)


def told_to(schema: int, message: M) -> M | None:
    """A worker's message as an agent that reads `schema` can read it; None for one that it does not know."""
    return lowered_value(message, schema) if since(type(message)) <= schema else None


def write_schema(run_dir: Path, boot: int) -> None:
    """Say in the run directory what the agent of this boot reads. OSError."""
    (run_dir / "agent.schema").write_text(f"{SCHEMA} {boot}\n", "ascii")


def agent_schema(agent_socket: str) -> int:
    """What the agent at this socket reads: as it has said, FIRST where the newest agent has said nothing."""
    run_dir = Path(agent_socket).parent
    try:
        boot = (run_dir / "agent.boot").read_text("ascii").strip()
    except OSError:
        return SCHEMA  # no agent's run directory
    try:
        schema, by = (run_dir / "agent.schema").read_text("ascii").split()
        return int(schema) if by == boot else FIRST
    except (OSError, ValueError):
        return FIRST
