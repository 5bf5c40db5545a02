"""Users' programs that are garbage: they end, hang or leak by themselves, wherever they run and whoever runs them.

The healthy program of every other task is the lifecycle itself (`driver.py`).
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import Literal, TypeAlias

import msgspec

from unicrond.events.vocabulary import ErrorKind, ErrorReported
from unicrond.replay.simulation.trainer.process import Process

ProgramFlaw: TypeAlias = Literal["raise_at_start", "raise", "nan", "hang", "leave", "leak"]
_MESSAGE = "FileNotFoundError: [Errno 2] No such file or directory: 'corpus.txt'"
_TRACEBACK = f'Traceback (most recent call last):\n  File "/train.py", line 7, in <module>\n{_MESSAGE}\n'
#: Iterations that one process of a leaking program computes before the kernel ends it.
_LEAK_ITERATIONS = 4


class GarbageProgram(msgspec.Struct, frozen=True):
    """A program with a flaw, which shows in `iteration`; a leak in each process after some iterations of its own."""

    flaw: ProgramFlaw
    iteration: int

    def starts(self, process: Process) -> bool:
        """Return whether a process gets as far as its training; else it ends with an exception."""
        if self.flaw != "raise_at_start":
            return True
        process.send(
            ErrorReported(
                **process.reporter,
                kind="exception",
                generation=0,
                iteration=0,
                phase="start",
                message=_MESSAGE,
                detail=_TRACEBACK,
            )
        )
        process.host.loop.call_later(0.01, process.end, 1 << 8)
        return False

    def error(self, iteration: int, micro_batch: int) -> ErrorKind | None:
        """Return the error with which the program ends in this micro-batch. A loss is NaN in one of them alone."""
        if iteration < self.iteration:
            return None
        if self.flaw == "nan" and micro_batch == 0 and iteration == self.iteration:
            return "nan_loss"
        return "exception" if self.flaw == "raise" else None

    def strike(self, shards: Sequence[Process], iteration: int, iterations_done: int) -> None:
        """Let the processes of a replica hang or end by what the program does in this iteration."""
        if self.flaw == "hang" and iteration == self.iteration:
            for shard in shards:
                shard.stand_still()
        elif self.flaw == "leave" and iteration >= self.iteration:
            _end(shards, 0)
        elif self.flaw == "leak" and iterations_done >= _LEAK_ITERATIONS:
            _end(shards[:1], signal.SIGKILL)


def _end(shards: Sequence[Process], status: int) -> None:
    for shard in shards:
        shard.host.loop.call_soon(shard.end, status)
