"""What a coordinator has around it where logins have keys; without, there is nothing of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from events.log import EventLog
from events.vocabulary import AnyEvent


async def _nothing(_: Sequence[AnyEvent]) -> None:
    pass


@dataclass
class Surroundings:
    """`requests`: the log under the login that may write what people ask for. `prepare`: told of what is about to be
    appended, which waits for it (consumers.py). `alarms`: of others in this process."""

    requests: EventLog
    prepare: Callable[[Sequence[AnyEvent]], Awaitable[None]] = _nothing
    alarms: Callable[[], list[str]] = list
