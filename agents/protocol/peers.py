"""Adapts messages between processes of different versions on one node: agents come and go, workers stay.

A younger process understands an older one, which closes the connection at an unknown message. So an agent leaves out of
its messages to workers every addition to the log's vocabulary since the first schema (workers need none of them), a
fork server names the schema that it reads, and both ask which schema their agent reads.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

from unicrond.events.wire.schemas import FIRST, SCHEMA, lowered_value, since

M = TypeVar("M", bound=msgspec.Struct)


def plain(message: M, schema: int = FIRST) -> M:
    """Return the message for a process that reads `schema`, or for a worker, which may be older than its agent."""
    return lowered_value(message, schema)


def message_for(schema: int, message: M) -> M | None:
    """Return a worker's message as an agent that reads `schema` can read it; None for one that it does not know."""
    return lowered_value(message, schema) if since(type(message)) <= schema else None


def write_schema(run_dir: Path, boot: int) -> None:
    """Record in the run directory which schema the agent of this boot reads. Raise OSError."""
    (run_dir / "agent.schema").write_text(f"{SCHEMA} {boot}\n", "ascii")


def agent_schema(agent_socket: str) -> int:
    """Return the schema that the agent at this socket reads: as recorded, FIRST where the newest agent recorded
    none."""
    run_dir = Path(agent_socket).parent
    try:
        boot = (run_dir / "agent.boot").read_text("ascii").strip()
    except OSError:
        return SCHEMA  # no agent's run directory
    try:
        schema, writer_boot = (run_dir / "agent.schema").read_text("ascii").split()
        return int(schema) if writer_boot == boot else FIRST
    except (OSError, ValueError):
        return FIRST
