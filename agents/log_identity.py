"""Which log this is: the event stream's birth, so that an agent does not take a new log for the one it remembers."""

from __future__ import annotations

import asyncio
import logging

from events.nats_connection import Connection, Unanswered
from events.nats_streams import ApiError, api_once
from events.subjects import EVENT_STREAM

logger = logging.getLogger(__name__)

_ATTEMPTS = 3
_PAUSE_S = 0.1
_PAUSE_MAX_S = 2.0


async def log_identity(connection: Connection) -> str:
    """When the event stream was created; waits until there is one.

    "" where the server does not answer though it is connected: the agent may lack the right to ask.
    """
    unanswered = 0
    pause_s = _PAUSE_S
    while unanswered < _ATTEMPTS:
        try:
            return str((await api_once(connection, f"STREAM.INFO.{EVENT_STREAM}", {}))["created"])
        except Unanswered:
            unanswered += connection.is_up
        except ApiError as error:
            if pause_s == _PAUSE_S:
                logger.warning("there is no event log yet (%s); waiting for the coordinator to create it", error)
        await asyncio.sleep(pause_s)
        pause_s = min(pause_s * 2, _PAUSE_MAX_S)
    logger.warning(
        "cannot ask for the event stream's information; allow $JS.API.STREAM.INFO.%s, or remove agent.memory when "
        "you recreate the log",
        EVENT_STREAM,
    )
    return ""
