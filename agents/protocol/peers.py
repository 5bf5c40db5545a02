"""What processes of different versions on one node say to each other: agents come and go, workers stay.

A younger process understands an older one, but those of schema 1 close the connection at what they do not know. So an
agent leaves out of what it sends to a worker whatever came into the log's vocabulary since then (workers need none of
it), a fork server says what it reads, and both ask which schema their agent reads.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

from agents.protocol.flight import Flight
from agents.protocol.messages import (
    Busy,
    CaughtUp,
    Committed,
    Inventory,
    Regrouped,
    StopWanted,
    Straggles,
    Trouble,
    Unsaved,
    Waits,
)
from events.schemas import FIRST, LEAD_TELLS, SCHEMA, lowered_value, since
from events.vocabulary import SaveFailed

M = TypeVar("M", bound=msgspec.Struct)
#: Messages of workers that came with schema 2.
_SINCE_2 = (Straggles, CaughtUp, Busy, Waits, StopWanted)


#: From here on agents understand a worker that says it has a flight recorder.
FLIGHT = 4
#: From here on fork servers fork a process that sums with other nodes.
SUMS = 4


def plain(message: M, schema: int = FIRST) -> M:
    """A message to a fork server that reads `schema`, or to a worker, which may be older than its agent."""
    return lowered_value(message, schema)


def greeting_of(inventory: Inventory, schema: int) -> Inventory:
    """A fork server's inventory as an agent that reads `schema` can read it."""
    return inventory if schema >= 2 else msgspec.structs.replace(inventory, schema=FIRST, separates=False)


def told_to(schema: int, message: M) -> M | None:
    """A worker's message as an agent that reads `schema` can read it; None for one that it does not know."""
    if isinstance(message, Regrouped) and schema < LEAD_TELLS:
        return msgspec.structs.replace(message, others_dealt=0)
    if isinstance(message, Committed) and schema < LEAD_TELLS:
        return msgspec.structs.replace(message, checked=0, checksum=0, sums=0)
    if isinstance(message, Unsaved) and schema < since(SaveFailed):
        return None
    if isinstance(message, Flight) and schema < FLIGHT:
        return None
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
