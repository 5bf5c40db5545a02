"""Which log this head has worked on: so that it takes no other, older or shorter one for it, and makes no empty one.

Rules
-----
* `<state_dir>/log.json` holds the event stream's birth and the last entry that was folded. It is written every few
  seconds.
* Before a head begins, the log must be that one: born then, at least as long, with that entry unless that has been
  archived. Else the head waits for a person: the log is restored, or `unicrond run --new-log` takes it as it is. A
  head that knows of no log takes what it finds.
* When a person last took a log by name is remembered too, and goes into every CoordinatorStarted: the agents obey
  another log than theirs for that alone (agents/known_log.py).
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

from events.nats_connection import Connection, Unanswered
from events.nats_log import stored_entry
from events.nats_streams import NO_MESSAGE_FOUND, NO_STREAM, ApiError, api, api_once
from events.subjects import EVENT_STREAM
from unicrond.service.follower import CURE
from unicrond.service.snapshots import Mark, mark_of

log = logging.getLogger("unicrond")

FILE = "log.json"
WRITE_EVERY_S = 2.0
_AGAIN_S = 0.5


class Known(msgspec.Struct, frozen=True):
    """`created`: the stream's birth, as NATS tells it. `mark`: the last entry that was folded; None: any log is the
    known one. `taken_us`: when a person last took a log by name (Unix time), 0: never."""

    created: str
    mark: Mark | None
    taken_us: int = 0


class KnownLog:
    """The memory of one head."""

    def __init__(self, state_dir: Path) -> None:
        self._path = state_dir / FILE

    def take(self, now_us: int) -> None:
        """A person has said so: whatever log there is. Raises OSError."""
        self.write(Known("", None, now_us))

    def read(self) -> Known | None:
        """What was written last; None where there is none, or none that can be read."""
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=Known)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError) as error:
            log.error("cannot read %s (%s): this head takes the log that it finds", self._path, error)
            return None

    def write(self, known: Known) -> None:
        """Put it in the place of the one before. Raises OSError."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        new = self._path.with_suffix(".new")
        new.write_bytes(msgspec.json.encode(known))
        new.replace(self._path)

    async def wait(self, connection: Connection, says: Callable[[str], object]) -> None:
        """Until the log is the known one. `says(why)` while it is not."""
        known = self.read()
        while known is not None and (why := await difference(connection, known)):
            says(f"{why}; {CURE}")
            await asyncio.sleep(_AGAIN_S)

    async def keep(
        self, created: Callable[[], str], mark: Callable[[], Mark | None], sound: Callable[[], bool]
    ) -> None:
        """Write down what was folded, until cancelled; nothing while the log is not `sound`."""
        written = self.read()
        taken_us = written.taken_us if written is not None else 0
        while True:
            now, born = mark(), created()
            if now is not None and born and sound() and (known := Known(born, now, taken_us)) != written:
                try:
                    self.write(known)
                    written = known
                except OSError as error:
                    log.error("cannot write %s: %s", self._path, error.strerror)
            await asyncio.sleep(WRITE_EVERY_S)


async def difference(connection: Connection, known: Known) -> str:
    """In what the log is not the known one, in one line; "" where it is. Waits for an answer."""
    if known.mark is None:
        return ""
    try:
        info = await api(connection, f"STREAM.INFO.{EVENT_STREAM}", {})
    except ApiError as error:
        if error.code != NO_STREAM:
            raise
        return f"NATS has no event log, and this head knows one of {known.mark.seq} entries"
    if info["created"] != known.created:
        return f"the event log was made at {info['created']}, and this head knows the one made at {known.created}"
    if (end := int(info["state"]["last_seq"])) < known.mark.seq:
        return f"the event log ends at entry {end}, and this head has folded {known.mark.seq}"
    return await _at_the_mark(connection, known.mark)


async def _at_the_mark(connection: Connection, mark: Mark) -> str:
    try:
        got: dict[str, Any] = await api_once(connection, f"STREAM.MSG.GET.{EVENT_STREAM}", {"seq": mark.seq})
    except ApiError as error:
        return "" if error.code == NO_MESSAGE_FOUND else str(error)
    except Unanswered as error:
        return str(error)
    same = mark_of(stored_entry(got["message"])) == mark
    return "" if same else f"entry {mark.seq} of the event log is another than the one that this head has folded"
