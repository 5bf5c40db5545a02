"""Which log this head has worked on, so that it mistakes no other, older or shorter log for it and makes no empty one.

Rules
-----
* `<state_dir>/log.json` holds the event stream's birth and the last entry that was folded. It is written every few
  seconds.
* Before a head begins, the log must be that one: born then, at least as long, with that entry unless that has been
  archived. Else the head waits for a person: the log is restored, or `unicrond run --new-log` takes it as it is. A
  head that knows of no log takes what it finds.
* When a person last took a log by name is remembered too, and goes into every CoordinatorStarted: the agents obey
  another log than theirs for that alone (agents/core/known_event_log.py).
* While it runs, a log that ends before what this head has folded, or that was made anew, stops its deciding
  (stream_probe.py). One that ends before what a node has read is an alarm.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from unicrond.events.log.subjects import EVENT_STREAM
from unicrond.events.nats.connection import Connection, NoReply
from unicrond.events.nats.event_log import stored_entry
from unicrond.events.nats.streams import NO_MESSAGE_FOUND, NO_STREAM, JetStreamError, api, api_once
from unicrond.service.coordinator.follower import CURE
from unicrond.service.coordinator.snapshots import LogMark, mark_of

log = logging.getLogger("unicrond")

FILE = "log.json"
WRITE_EVERY_S = 2.0
_AGAIN_S = 0.5


class LogIdentity(msgspec.Struct, frozen=True):
    """The log that a head knows. `created`: the stream's birth, as NATS tells it. `mark`: the last entry that was
    folded; None: any log is accepted. `adopted_us`: when a person last accepted a log by name (Unix time), 0: never."""

    created: str
    mark: LogMark | None
    adopted_us: int = 0


class KnownLog:
    """The file in which one head remembers its log."""

    def __init__(self, state_dir: Path) -> None:
        self._path = state_dir / FILE

    def take(self, now_us: int) -> None:
        """Accept whatever log there is, because a person has said so. Raises OSError."""
        self.write(LogIdentity("", None, now_us))

    def read(self) -> LogIdentity | None:
        """Return what was written last; None where there is no file, or none that can be read."""
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=LogIdentity)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError) as error:
            log.error("cannot read %s (%s): this head takes the log that it finds", self._path, error)
            return None

    def write(self, identity: LogIdentity) -> None:
        """Replace the file. Raises OSError."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        new = self._path.with_suffix(".new")
        new.write_bytes(msgspec.json.encode(identity))
        new.replace(self._path)

    async def wait(self, connection: Connection, says: Callable[[str], object]) -> None:
        """Wait until the log is the one that is remembered. Calls `says(reason)` while it is not."""
        identity = self.read()
        while identity is not None and (reason := await difference(connection, identity)):
            says(f"{reason}; {CURE}")
            await asyncio.sleep(_AGAIN_S)

    async def keep(
        self, created: Callable[[], str], mark: Callable[[], LogMark | None], sound: Callable[[], bool]
    ) -> None:
        """Write down what was folded, until cancelled; write nothing while the log is not `sound`."""
        previous = self.read()
        adopted_us = previous.adopted_us if previous is not None else 0
        while True:
            now, born = mark(), created()
            if now is not None and born and sound() and (identity := LogIdentity(born, now, adopted_us)) != previous:
                try:
                    self.write(identity)
                    previous = identity
                except OSError as error:
                    log.error("cannot write %s: %s", self._path, error.strerror)
            await asyncio.sleep(WRITE_EVERY_S)


async def difference(connection: Connection, identity: LogIdentity) -> str:
    """Return how the log differs from the one that is remembered, in one line; "" where it does not. Waits for an
    answer."""
    if identity.mark is None:
        return ""
    try:
        info = await api(connection, f"STREAM.INFO.{EVENT_STREAM}", {})
    except JetStreamError as error:
        if error.code != NO_STREAM:
            raise
        return f"NATS has no event log, and this head knows one of {identity.mark.seq} entries"
    if info["created"] != identity.created:
        return f"the event log was made at {info['created']}, and this head knows the one made at {identity.created}"
    if (end := int(info["state"]["last_seq"])) < identity.mark.seq:
        return f"the event log ends at entry {end}, and this head has folded {identity.mark.seq}"
    return await _at_the_mark(connection, identity.mark)


async def _at_the_mark(connection: Connection, mark: LogMark) -> str:
    try:
        reply: dict[str, Any] = await api_once(connection, f"STREAM.MSG.GET.{EVENT_STREAM}", {"seq": mark.seq})
    except JetStreamError as error:
        return "" if error.code == NO_MESSAGE_FOUND else str(error)
    except NoReply as error:
        return str(error)
    matches = mark_of(stored_entry(reply["message"])) == mark
    return "" if matches else f"entry {mark.seq} of the event log is another than the one that this head has folded"
