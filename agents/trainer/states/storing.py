"""Writes states to storage in a thread of its own, and never waits longer than `UNICRON_SAVE_WAIT_S` says.

Rules
-----
* A write is late after that time, or three times the longest that was made, whichever is more. Then training waits for
  it no longer, and the log says which path, and since when (`SaveFailed`): the head makes an alarm of it. A late
  write goes on, and may end well.
* After ten times as long it is given up: what it reads is let go, so it may publish nothing any more. It looks once,
  when its files are written and nothing is published. Who must have the last word waits as long as that, too.
* The next one has twice the time of one that was given up, until one is made: storage that is slow gets its checkpoint,
  and storage that hung for a day makes nobody wait for a day, even if it then took what had been given up.
* One write at a time: nothing is begun before the thread is back, however long storage hangs.
* A thread that hangs ends with its process, which does not wait for it (`os._exit`).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from datetime import UTC, datetime
from threading import Lock
from typing import Any

from unicrond.agents.protocol.messages import Reporter
from unicrond.agents.trainer.process.context import Context
from unicrond.agents.trainer.states import checkpoint
from unicrond.agents.trainer.states.state import BadState
from unicrond.events.vocabulary import CheckpointSaved, SaveFailed, Saver

_REASON_CHARS = 512
#: How often the longest write may be exceeded before one is late.
_LATE_FACTOR = 3.0
#: How often the time of a late one, before it is given up.
_GIVEN_UP_FACTOR = 10.0


class GivenUp(OSError):
    """The write took too long and may publish nothing any more."""


class StorageWrite:
    """Follow one write. `resources`: what it reads from; `failure`: why it was not made, None: it was, or runs."""

    def __init__(self, job: checkpoint.WriteJob, resources: ExitStack) -> None:
        self.job = job
        self.resources = resources
        self.begun_s = time.monotonic()
        self.begun_at = datetime.now(UTC)
        self.future: Future[None] = Future()
        self.failure: Exception | None = None
        self.is_late = self.is_given_up = False
        self._lock = Lock()

    @property
    def is_over(self) -> bool:
        """Return whether its thread is back."""
        return self.future.done()

    def release(self) -> None:
        """Let go of what it reads from."""
        with self._lock:
            self.resources.close()

    def lateness(self) -> TimeoutError:
        """Return what there is to say of a write that does not end."""
        since, ending = f"{self.begun_at:%Y-%m-%d %H:%M:%S} UTC", "given up" if self.is_given_up else "it goes on"
        place, took_s = self.job.directory, time.monotonic() - self.begun_s
        return TimeoutError(f"{place} has not taken it since {since}, for {took_s:.0f} s; {ending}")


class StorageWriter:
    """Write one worker's states, one after the other."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._thread = ThreadPoolExecutor(1, "store")
        self._write: StorageWrite | None = None
        #: The iteration that was written last; 0: none was.
        self.newest = 0
        #: The seconds that the last write took, and that one took at most; 0: none was made.
        self.last_s = self.longest_s = 0.0
        #: The seconds after which the last write was given up; 0: it was made.
        self._given_up_s = 0.0

    @property
    def is_busy(self) -> bool:
        """Return whether the thread is writing, or hangs."""
        return self._write is not None and not self._write.is_over

    @property
    def is_late(self) -> bool:
        """Return whether the last write was late."""
        return self._write is not None and self._write.is_late

    @property
    def _late_s(self) -> float:
        return max(self._context.settings.save_wait_s, _LATE_FACTOR * self.longest_s)

    @property
    def _limit_s(self) -> float:
        return max(_GIVEN_UP_FACTOR * self._late_s, 2 * self._given_up_s)

    def begin(
        self, job: checkpoint.WriteJob, tree: Callable[[], dict[str, Any]], midway: Callable[[], None],
        resources: ExitStack,
    ) -> StorageWrite:  # fmt: skip
        """Begin to write what `tree` returns; `resources` are closed when it is written, or given up. The thread is
        free, or soon will be."""
        write = StorageWrite(job, resources)
        write.future = self._thread.submit(self._carry_out, write, tree, midway)
        self._write = write
        return write

    def look(self) -> None:
        """Raise what the thread has raised; say that a write is late, or give it up. To be called now and then."""
        write = self._write
        if write is None:
            return
        if write.is_over:
            self._write = None
            write.future.result()
            return
        took_s = time.monotonic() - write.begun_s
        if not write.is_late and took_s >= self._late_s:
            write.is_late = True
            self._report(write, write.lateness())
        if not write.is_given_up and took_s >= self._limit_s:
            self.give_up()

    def wait(self, *, last_word: bool, in_place: bool = False) -> bool:
        """Wait until the thread is back, or the write late (for the last word: given up); return whether it is back.
        `in_place`: it is given up then, so it has twice the time of one that was."""
        limit_s = self._limit_s if last_word else max(self._late_s, 2 * self._given_up_s if in_place else 0.0)
        while (write := self._write) is not None and not write.is_over:
            end_s = write.begun_s + (limit_s if write.is_late else self._late_s)
            wait([write.future], max(0.0, end_s - time.monotonic()))
            self.look()
            if not write.is_over and (write.is_given_up or time.monotonic() >= write.begun_s + limit_s):
                return False
        self.look()
        return True

    def give_up(self) -> Exception | None:
        """Let go of a write that has not ended, which publishes nothing from here on; return why, None if all ended."""
        write = self._write
        if write is None or write.is_over:
            return None
        was_given_up, write.is_given_up = write.is_given_up, True  # before what it reads is overwritten
        write.release()
        failure = write.lateness()
        if not was_given_up:
            self._given_up_s = time.monotonic() - write.begun_s
            self._report(write, failure)
        return failure

    def lateness(self) -> Exception | None:
        """Return what there is to say of the write that runs; None for none."""
        return self._write.lateness() if self._write is not None and self.is_busy else None

    def _carry_out(self, write: StorageWrite, tree: Callable[[], dict[str, Any]], midway: Callable[[], None]) -> None:
        def between() -> None:
            """Go no further where what was read may have changed meanwhile. Raises GivenUp."""
            midway()
            if write.is_given_up:
                raise GivenUp(f"{write.job.directory} took too long")

        try:
            self._save(write, tree(), between)
        except GivenUp as error:
            write.failure = error  # which has been reported
        except (OSError, BadState) as error:
            write.failure = error
            self._report(write, error)
        finally:
            write.release()

    def _save(self, write: StorageWrite, tree: dict[str, Any], between: Callable[[], None]) -> None:
        saved = checkpoint.write(write.job, tree, between)
        took_s = time.monotonic() - write.begun_s
        if not write.is_given_up:  # else it hung, and is no measure of the next
            self.last_s, self.longest_s, self._given_up_s = took_s, max(self.longest_s, took_s), 0.0
        self.newest = write.job.iteration
        if saved is not None:
            self._context.channel.send(
                CheckpointSaved(
                    **self._context.launch.reporter,
                    iteration=write.job.iteration,
                    path=saved.path,
                    size_bytes=saved.size_bytes,
                    duration_us=int(took_s * 1e6),
                )
            )

    def _report(self, write: StorageWrite, error: Exception) -> None:
        iteration, worker = write.job.iteration, self._context.launch.worker
        print(f"{worker}: did not save checkpoint {iteration}: {error}", file=sys.stderr, flush=True)
        self._context.channel.send(unsaved(self._context.launch.reporter, iteration, "unicron", error))


def unsaved(reporter: Reporter, iteration: int, saver: Saver, error: Exception | None = None) -> SaveFailed:
    """Return the event that a save has failed; `error` None: that it is saved again."""
    reason = f"{type(error).__name__}: {error}"[:_REASON_CHARS] if error else ""
    return SaveFailed(**reporter, iteration=iteration, saver=saver, reason=reason)
