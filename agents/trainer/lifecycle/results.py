"""What a driver gives the lifecycle for an effect: results that have parts, and the failures that it throws instead."""

from __future__ import annotations

from dataclasses import dataclass

from unicrond.agents.trainer.lifecycle.optimizer_shards import Span
from unicrond.events.vocabulary import StateSource


@dataclass(frozen=True, slots=True)
class Holdings:
    """What a member holds. `complete`: buckets of the present iteration whose sums are complete here. `spans`: of the
    sharded optimizer state, in elements, staged ones included."""

    complete: tuple[int, ...]
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class LoadedState:
    """The state that a member has loaded: the state after `iteration`. `size_bytes`: what was read for it. `pace_s`: of
    an iteration, 0 where it is not known. `resharded_from`: the other layout that it was kept in."""

    iteration: int
    loss: float
    size_bytes: int
    origin: StateSource = "replica"
    pace_s: float = 0.0
    resharded_from: str = ""


@dataclass(frozen=True, slots=True)
class SaveSchedule:
    """Where the state after an iteration is to be saved: in the nodes' memory, on storage, in both or nowhere."""

    to_memory: bool
    to_storage: bool

    @property
    def is_due(self) -> bool:
        """Return whether anything is to be saved."""
        return self.to_memory or self.to_storage

    def word(self) -> int:
        """Return it as an integer, for the agreement."""
        return int(self.to_memory) + 2 * int(self.to_storage)

    @staticmethod
    def of(word: int) -> SaveSchedule:
        """Return the schedule of a word with bit 0 for memory and bit 1 for storage."""
        return SaveSchedule(bool(word & 1), bool(word & 2))


NO_SAVE = SaveSchedule(False, False)

#: In a replica's word: behind the lowest bit two of others (`detection/audits.py`), then a deal's number, then a time.
_NUMBER_START, _NUMBER_BITS = 3, 20
_PACE_START = _NUMBER_START + _NUMBER_BITS


@dataclass(frozen=True, slots=True)
class ReplicaWord:
    """A replica's word in the agreement that ends an iteration, the same in the groups of all its shards. `stop`: its
    program asks for the end. `pace_us`: what its slowest shard took for a micro-batch, 0: unknown. `number`: of the
    deal that it proposes (`deal.py`), 0: none."""

    stop: bool
    pace_us: int = 0
    number: int = 0

    def word(self) -> int:
        """Return it as an integer. Older hooks read its lowest bit, and over the others."""
        return int(self.stop) + (self.number << _NUMBER_START) + (self.pace_us << _PACE_START)

    @staticmethod
    def of(word: int) -> ReplicaWord:
        """Return what such an integer says; the inverse of `word`."""
        number = (word >> _NUMBER_START) & ((1 << _NUMBER_BITS) - 1)
        return ReplicaWord(bool(word & 1), word >> _PACE_START, number)


class GroupBroken(Exception):
    """A collective, or the forming of the group, failed: most likely a member is lost."""


class ReplicaDiffers(GroupBroken):
    """A replica has other parameters than the majority, so that no sum of this iteration counts. `is_own`: it is this
    one, whose state does not count either."""

    def __init__(self, message: str, *, is_own: bool) -> None:
        super().__init__(message)
        self.is_own = is_own


class MembershipSuperseded(Exception):
    """A newer membership has come; this group is of no use any more."""


class RendezvousTimedOut(Exception):
    """No membership came in time."""


class ProgramLeftLoop(Exception):
    """At a seam: the program has called `stop` and has left its loop."""


class QuitRequested(BaseException):
    """The agent has asked the worker to end. No Exception: a training script must not catch it by accident."""


class StateLost(RuntimeError):
    """All holders of a part of the optimizer's state are lost, nothing was saved, and no process has the seed's
    parameters any more: training has to begin anew, in new processes."""
