"""Adapts messages between processes of different versions on one node: agents come and go, workers stay.

A younger process understands an older one, but those of schema 1 close the connection at an unknown message. So an
agent leaves out of its messages to workers every later addition to the log's vocabulary (workers need none of them),
a fork server names the schema that it reads, and both ask which schema their agent reads.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

from agents.protocol.flight import Flight
from agents.protocol.messages import (
    Busy,
    Committed,
    ErrorReport,
    Inventory,
    MembershipWait,
    Regrouped,
    SaveError,
    StopRequest,
    StragglerCleared,
    StragglerReport,
)
from events.schemas import FIRST, LEAD_TELLS, SCHEMA, lowered_value, since
from events.vocabulary import SaveFailed

M = TypeVar("M", bound=msgspec.Struct)
#: Messages of workers that came with schema 2.
_SINCE_2 = (StragglerReport, StragglerCleared, Busy, MembershipWait, StopRequest)


#: From this schema on agents understand a worker with a flight recorder.
FLIGHT = 4
#: From this schema on fork servers fork a process that sums with other nodes.
SUMS = 4


def plain(message: M, schema: int = FIRST) -> M:
    """Return the message for a fork server that reads `schema`, or for a worker, which may be older than its agent."""
    return lowered_value(message, schema)


def greeting_of(inventory: Inventory, schema: int) -> Inventory:
    """Return a fork server's inventory as an agent that reads `schema` can read it."""
    return inventory if schema >= 2 else msgspec.structs.replace(inventory, schema=FIRST, separates=False)


def message_for(schema: int, message: M) -> M | None:
    """Return a worker's message as an agent that reads `schema` can read it; None for one that it does not know."""
    if isinstance(message, Regrouped) and schema < LEAD_TELLS:
        return msgspec.structs.replace(message, others_dealt=0)
    if isinstance(message, Committed) and schema < LEAD_TELLS:
        return msgspec.structs.replace(message, checked=0, checksum=0, sums=0)
    if isinstance(message, SaveError) and schema < since(SaveFailed):
        return None
    if isinstance(message, Flight) and schema < FLIGHT:
        return None
    if schema >= 2:
        return message
    if isinstance(message, _SINCE_2):
        return None
    return msgspec.structs.replace(message, lost=()) if isinstance(message, ErrorReport) and message.lost else message


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
