"""How much of what a worker says goes on to the log. Pure; one worker, and the time comes with each message.

Rules
-----
* Each kind of message has a bucket of its own (BUDGETS), so that no kind empties another's: what decides (an error, the
  wish to stop) is told whatever else the worker says. A bucket holds more than an honest worker ever says in a row, so
  the first of anything is never delayed.
* What finds its bucket empty waits, and the newest of a subject replaces the older one: it is the state of the same
  thing. A subject is a straggler, a suspect, a kind of error, or all of a kind. It goes on when its bucket allows it.
* So many subjects wait at most (WAITING_MAX) of one worker; the next is dropped.
* What answers a membership that the agent has sent, the first of its kind in that generation, is taken from a bucket of
  all answers (ANSWERS) where that has one: the coordinator sets its pace, which is as fast as a group can break.
* The same error within REPEAT_US is dropped: it has been told.
* What waits goes on before the last word of a worker: its completion, its wish to stop, its end.
* What was replaced or dropped is counted by kind, and said once in SAID_EVERY_S: to whoever reads the agent's log, and
  in the heartbeats.
* What the agent sums up or keeps to itself anyway has no bucket: commits, the declared work (WorkerBusy), answers. Of
  commits those have one that would close a sum before its time.
* The socket has a bucket, too (READING): beyond it the agent does not read on, so the kernel holds the worker up.

What does not live here: timers and actions (floods.py), what a message means (reports.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, TypeAlias

import msgspec
from msgspec.structs import replace

from unicrond.agents.protocol.messages import FromWorker
from unicrond.events.log.entrance import Bucket
from unicrond.events.vocabulary import (
    CorruptionSuspected,
    ErrorReported,
    SaveFailed,
    StateLoaded,
    StragglerObserved,
    StragglerRecovered,
    WorkerId,
    WorkerJoinedGroup,
    WorkerPaused,
    WorkerWaiting,
)

WAITING_MAX = 16
SAID_EVERY_S = 60.0
REPEAT_US = 1_000_000

#: "pass": it goes on; "wait": it waits, as the first of its kind or not; "replace": in the place of an older one.
Verdict: TypeAlias = Literal["pass", "wait", "replace", "drop"]


_SECOND_US = 1_000_000

#: What a worker says of a membership, and the bucket of that.
ANSWER_KINDS = (ErrorReported, WorkerJoinedGroup, WorkerPaused, WorkerWaiting, StateLoaded)
ANSWERS = Bucket(512, _SECOND_US // 2)
_ANSWERS = "answers"

#: By kind. A generation is at least a rendezvous apart from the next, a save at least a write.
BUDGETS: Mapping[str, Bucket] = MappingProxyType(
    {
        "ErrorReported": Bucket(16, 5 * _SECOND_US),
        "StopRequested": Bucket(8, 10 * _SECOND_US),
        "WorkerJoinedGroup": Bucket(16, _SECOND_US),
        "WorkerPaused": Bucket(8, 5 * _SECOND_US),
        "WorkerWaiting": Bucket(16, 5 * _SECOND_US),
        "StateLoaded": Bucket(16, 5 * _SECOND_US),
        "CheckpointSaved": Bucket(32, _SECOND_US),
        "SaveFailed": Bucket(16, _SECOND_US),
        "SnapshotStored": Bucket(16, 5 * _SECOND_US),
        "DegradationObserved": Bucket(16, 5 * _SECOND_US),
        "StragglerObserved": Bucket(32, 5 * _SECOND_US),
        "CorruptionSuspected": Bucket(32, 5 * _SECOND_US),
        "DivergenceObserved": Bucket(8, 10 * _SECOND_US),
        "StepCommitted": Bucket(16, _SECOND_US),
    }
)

#: Frames, and 4 KiB of them count as one more. Ten times what the fastest training says, and all that a worker has
#: kept while it had no agent for a minute.
READING = Bucket(4096, 500)
#: A connection counts as so many frames.
GREETING_FRAMES = 200


class WorkerHeldUp(msgspec.Struct, frozen=True, kw_only=True):
    """(input) A worker sends faster than the agent reads: so many frames were read late since the last of these."""

    worker: WorkerId
    frames: int


class ReportDrops(msgspec.Struct, frozen=True, kw_only=True):
    """(action) Say in the agent's log how many messages of the worker, by kind, did not go on."""

    worker: WorkerId
    counts: dict[str, int]


class WorkerBudget(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker has said lately; the next agent begins anew."""

    #: By kind, see Bucket.
    paid_us: dict[str, int] = {}
    #: By kind, the newest generation that an answer was taken for.
    answered: dict[str, int] = {}
    #: By kind and subject, what waits, the longest unchanged first.
    waiting: dict[tuple[str, str], FromWorker] = {}
    #: The last error that went on, and when.
    error: ErrorReported | None = None
    error_us: int = 0
    #: By kind, what was replaced or dropped and is not said yet; how much was said last.
    unsaid: dict[str, int] = {}
    said_count: int = 0
    #: The timer of the next line runs.
    is_timed: bool = False

    @property
    def dropped_count(self) -> int:
        """Return how many messages did not go on within the last minute or two."""
        return self.said_count + sum(self.unsaid.values())


def kind_of(message: FromWorker) -> str:
    """Return the bucket that the message is taken from."""
    return "StragglerObserved" if isinstance(message, StragglerRecovered) else type(message).__name__


def subject_of(message: FromWorker) -> str:
    """Return what the message tells the state of, within its kind."""
    match message:
        case StragglerObserved() | StragglerRecovered():
            return message.straggler
        case CorruptionSuspected():
            return f"{message.sign} {message.suspect}"
        case ErrorReported():
            return message.kind
        case SaveFailed():
            return message.saver
        case _:
            return ""


def spend(budget: WorkerBudget, kind: str, now_us: int) -> tuple[WorkerBudget, bool]:
    """Take one message of the kind from its bucket; return whether it had one."""
    bucket, paid_us = BUDGETS[kind], budget.paid_us.get(kind, 0)
    if bucket.pause_us(paid_us, now_us):
        return budget, False
    return replace(budget, paid_us={**budget.paid_us, kind: bucket.paid_us(paid_us, now_us)}), True


def judge(
    budget: WorkerBudget, message: FromWorker, now_us: int, sent_generation: int = 0
) -> tuple[WorkerBudget, Verdict]:
    """Judge one message of a kind that has a bucket; return the budget after it. `sent_generation`: of the newest
    membership that the worker was sent."""
    kind, key = kind_of(message), (kind_of(message), subject_of(message))
    if isinstance(message, ANSWER_KINDS) and budget.answered.get(kind, 0) < message.generation <= sent_generation:
        paid_us = budget.paid_us.get(_ANSWERS, 0)
        if not ANSWERS.pause_us(paid_us, now_us) and not is_waiting(budget, kind):
            payments_us = {**budget.paid_us, _ANSWERS: ANSWERS.paid_us(paid_us, now_us)}
            return replace(budget, paid_us=payments_us, answered={**budget.answered, kind: message.generation}), "pass"
    is_error = isinstance(message, ErrorReported)
    if is_error and message == budget.error and now_us - budget.error_us < REPEAT_US:
        return count_dropped(budget, kind), "drop"
    if key in budget.waiting:
        rest = {k: m for k, m in budget.waiting.items() if k != key}
        return count_dropped(replace(budget, waiting={**rest, key: message}), kind), "replace"
    bucket, paid_us = BUDGETS[kind], budget.paid_us.get(kind, 0)
    if not bucket.pause_us(paid_us, now_us) and not is_waiting(budget, kind):
        budget = replace(budget, paid_us={**budget.paid_us, kind: bucket.paid_us(paid_us, now_us)})
        return (replace(budget, error=message, error_us=now_us) if is_error else budget), "pass"
    if len(budget.waiting) < WAITING_MAX:
        return replace(budget, waiting={**budget.waiting, key: message}), "wait"
    return count_dropped(budget, kind), "drop"


def is_waiting(budget: WorkerBudget, kind: str) -> bool:
    """Return whether anything of the kind waits."""
    return any(waiting_kind == kind for waiting_kind, _ in budget.waiting)


def release(budget: WorkerBudget, kind: str) -> tuple[WorkerBudget, FromWorker | None]:
    """Return the message of the kind that has waited longest, whose time has come; None where none waits."""
    key = next((key for key in budget.waiting if key[0] == kind), None)
    if key is None:
        return budget, None
    waiting = {k: message for k, message in budget.waiting.items() if k != key}
    paid_us = {**budget.paid_us, kind: budget.paid_us.get(kind, 0) + BUDGETS[kind].every_us}
    return replace(budget, waiting=waiting, paid_us=paid_us), budget.waiting[key]


def count_dropped(budget: WorkerBudget, kind: str, count: int = 1) -> WorkerBudget:
    """Count messages that did not go on."""
    return replace(budget, unsaid={**budget.unsaid, kind: budget.unsaid.get(kind, 0) + count})


def say(budget: WorkerBudget) -> WorkerBudget:
    """Return the budget after a line has said what did not go on."""
    return replace(budget, unsaid={}, said_count=sum(budget.unsaid.values()))
