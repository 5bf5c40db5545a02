"""Waits between attempts at one thing: drawn at random, longer each time."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

RETRY_DELAY_S = 0.02
RETRY_DELAY_MAX_S = 1.0
LOUD_AFTER_S = 10.0


class Backoff:
    """Waits between attempts at an operation: longer each time, at most a second; warns once if it takes long.

    `jitter`: a number from 0 up to 1, which shortens a wait by up to a half.
    """

    def __init__(self, operation: str, jitter: Callable[[], float] = random.random) -> None:
        self._operation = operation
        self._jitter = jitter
        #: The first failure since the last success.
        self._since: float | None = None
        self._delay_s = RETRY_DELAY_S
        self._was_loud = False

    async def wait_after(self, error: Exception) -> None:
        """Note a failed attempt, and wait before the next."""
        self.note(error)
        await asyncio.sleep(self._delay_s * (1 - self._jitter() / 2))
        self._delay_s = min(self._delay_s * 2, RETRY_DELAY_MAX_S)

    def note(self, error: Exception) -> None:
        """Note a failed attempt; the next one does not wait."""
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        waited_s = now - self._since
        if waited_s > LOUD_AFTER_S and not self._was_loud:
            self._was_loud = True
            logger.warning("%s: no success for %.0f s (%s); still trying", self._operation, waited_s, error)

    def reset(self) -> None:
        """Reset the delay: the operation has succeeded."""
        self._since = None
        self._delay_s = RETRY_DELAY_S
        self._was_loud = False
