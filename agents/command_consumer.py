"""The node's consumer of commands, made before the node joins: one that cannot be commanded must not be planned for.

A server may refuse it: a stream takes a limited number of consumers (`events/nats_streams.py` sets that of the log),
and the agent may lack the right to make one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection

from events.nats_commands import fit_command_consumer
from events.nats_connection import Connection
from events.nats_streams import ApiError

logger = logging.getLogger(__name__)

_PAUSE_S = 0.5
_PAUSE_MAX_S = 15.0


async def until_commands_can_come(connection: Connection, node: str, tasks: Collection[str]) -> None:
    """Make sure that the consumer exists, and follows `tasks`; says loudly each time why not. Waits through outages."""
    pause_s = _PAUSE_S
    while True:
        try:
            await fit_command_consumer(connection, node, tasks)
            return
        except ApiError as error:
            logger.error(
                "NODE %s DOES NOT JOIN: NATS refuses the consumer for its commands (%s); trying again in %.1f s. "
                "If a limit of consumers is reached, raise max_consumers of the stream and of the account",
                node,
                error,
                pause_s,
            )
        await asyncio.sleep(pause_s)
        pause_s = min(pause_s * 2, _PAUSE_MAX_S)
