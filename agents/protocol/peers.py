"""What processes of different versions on one node say to each other: agents come and go, workers stay.

A younger process understands an older one, but those of schema 1 close the connection at what they do not know. So an
agent leaves out of what it sends whatever came into the log's vocabulary since then (workers need none of it), and a
worker asks which schema its agent reads.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

from agents.protocol.messages import Busy, CaughtUp, Regrouped, StopWanted, Straggles, Trouble, Waits
from events.schemas import FIRST, LEAD_TELLS, SCHEMA, lowered_value

M = TypeVar("M", bound=msgspec.Struct)
#: Messages of workers that came with schema 2.
_SINCE_2 = (Straggles, CaughtUp, Busy, Waits, StopWanted)


def plain(message: M) -> M:
    """A message to a fork server or a worker, which may be older than its agent."""
    return lowered_value(message, FIRST)


def told_to(schema: int, message: M) -> M | None:
    """A worker's message as an agent that reads `schema` can read it; None for one that it does not know."""
    if isinstance(message, Regrouped) and schema < LEAD_TELLS:
        return msgspec.structs.replace(message, others_dealt=0)
    if schema >= 2:
        return message
    if isinstance(message, _SINCE_2):
        return None
    return msgspec.structs.replace(message, lost=()) if isinstance(message, Trouble) and message.lost else message


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
