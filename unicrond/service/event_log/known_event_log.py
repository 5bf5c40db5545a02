"""Which log this head has worked on, so that it mistakes no other, older or shorter log for it and makes no empty one.

Rules
-----
* `<state_dir>/log.json` holds the log's first entry and the last one that was folded, and when its stream was made. It
  is written every few seconds.
* Before a head begins, the log must be that one, by these entries (events/log/log_identity.py). Else the head waits:
  the log is restored, or a person takes it as it is with `unicrond run --new-log`. A head that knows of no log takes
  what it finds.
* When a person last took a log by name is remembered too, and goes into every CoordinatorStarted: the agents obey
  another log than theirs for that alone (agents/core/known_event_log.py).
* While it runs, the same holds on each connection before the first entry is read and before anything is written
  (events/nats/log_proof.py). A log that ends before what this head has folded stops its deciding until it is whole
  (stream_probe.py); another one ends the process, and the state goes with it. One that ends before what a node has
  read is an alarm.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

import msgspec

from unicrond.events.log.log_identity import LogMark
from unicrond.events.nats.connection import Backoff, Connection, NoReply, PublishDenied
from unicrond.events.nats.log_proof import LogProof
from unicrond.events.nats.streams import NO_STREAM, JetStreamError
from unicrond.service.coordinator.follower import CURE

log = logging.getLogger("unicrond")

FILE = "log.json"
WRITE_EVERY_S = 2.0
_AGAIN_S = 0.5


class LogIdentity(msgspec.Struct, frozen=True):
    """The log that a head knows. `created`: when its stream was made, as NATS tells it. `mark`: the last entry that was
    folded; None: any log is accepted. `first`: its first entry, None: not known. `adopted_us`: when a person last
    accepted a log by name (Unix time), 0: never."""

    created: str
    mark: LogMark | None
    adopted_us: int = 0
    first: LogMark | None = None


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

    def proof(self) -> LogProof:
        """Return a proof that begins with what is remembered."""
        identity = self.read()
        if identity is None or identity.mark is None:
            return LogProof()
        return LogProof(identity.created, identity.first, identity.mark)

    async def wait(self, connection: Connection, says: Callable[[str], object]) -> None:
        """Wait until the log is the one that is remembered. Calls `says(reason)` while it is not."""
        proof = self.proof()
        while reason := await difference(connection, proof):
            says(f"{reason}; {CURE}")
            await asyncio.sleep(_AGAIN_S)

    async def keep(self, proof: LogProof, mark: Callable[[], LogMark | None], sound: Callable[[], bool]) -> None:
        """Write down what was folded, until cancelled; write nothing while the log is not `sound`."""
        previous = self.read()
        adopted_us = previous.adopted_us if previous is not None else 0
        while True:
            now = mark()
            if now is not None and proof.created and sound():
                identity = LogIdentity(proof.created, now, adopted_us, proof.first)
                if identity != previous:
                    try:
                        self.write(identity)
                        previous = identity
                    except OSError as error:
                        log.error("cannot write %s: %s", self._path, error.strerror)
            await asyncio.sleep(WRITE_EVERY_S)


async def difference(connection: Connection, proof: LogProof) -> str:
    """Return how the log differs from the known one, in one line; "" where it does not, or nothing is known. Waits for
    an answer. Raises JetStreamError, PublishDenied."""
    if proof.newest is None:
        return ""
    backoff = Backoff("asking for the event log")
    while True:
        try:
            gap = await proof.look(connection)
        except JetStreamError as error:
            if error.code == NO_STREAM:
                return f"NATS has no event log, and this head knows one of {proof.newest.seq} entries"
            if not error.is_transient:
                raise
            await backoff.wait_after(error)
        except PublishDenied:
            raise
        except NoReply as error:
            await backoff.wait_after(error)
        else:
            return gap.reason if gap is not None else ""
