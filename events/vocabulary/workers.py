"""Workers: their processes, from the start to the end."""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta

from unicrond.events.vocabulary.base import PlacedObservation, WorkerObservation
from unicrond.events.vocabulary.field_defaults import always
from unicrond.events.vocabulary.field_types import (
    Duration,
    ErrorKind,
    ExitCause,
    ExitCode,
    Iteration,
    LongText,
    Phase,
    Pid,
    Serial,
    Signal,
    Small,
    StateSource,
    Text,
    WorkerId,
    WorkerOrNone,
)
from unicrond.events.vocabulary.phrases import count, seconds


class WorkerStarted(WorkerObservation, frozen=True, kw_only=True):
    """The fork server has a process for the worker."""

    pid: Pid

    def sentence(self) -> str:
        """Say it in one sentence."""
        return f"worker {self.worker} started on {self.node} as process {self.pid}"


class WorkerReady(WorkerObservation, frozen=True, kw_only=True):
    """The worker has built its model and waits for a membership."""

    def sentence(self) -> str:
        """Say it in one sentence."""
        return f"worker {self.worker} on {self.node} is ready for a membership"


class WorkerJoinedGroup(PlacedObservation, frozen=True, kw_only=True):
    """The worker is a member of `generation`'s group and goes on at `iteration`, the next to commit.

    `micro_batches_assigned`: micro-batches of lost replicas that were assigned to this worker in that iteration.
    `micro_batches_assigned_elsewhere`: those that were assigned to the other members, reported by a leader that
    confirms for all (MembershipDecided.leader_confirms). `duration_us`: from receiving the membership to being in the
    group. `source`: where its state came from.
    """

    micro_batches_assigned: Small
    duration_us: Duration
    source: StateSource
    micro_batches_assigned_elsewhere: Small = 0

    def sentence(self) -> str:
        """Say it in one sentence."""
        shares = [(self.micro_batches_assigned, "it"), (self.micro_batches_assigned_elsewhere, "the others")]
        assignments = [
            f", {count(n, 'micro-batch', 'micro-batches')} assigned to {receiver}" for n, receiver in shares if n
        ]
        where = f"generation {self.generation} at iteration {self.iteration} after {seconds(self.duration_us)}"
        return f"worker {self.worker} is in {where}, state from {self.source}{''.join(assignments)}"


class WorkerPaused(PlacedObservation, frozen=True, kw_only=True):
    """The worker left its group at an iteration boundary for a membership without it, and waits to be ended.

    `iteration`: the last one that it committed.
    """

    def sentence(self) -> str:
        """Say it in one sentence."""
        return (
            f"worker {self.worker} on {self.node} left its group for generation {self.generation}"
            f" after iteration {self.iteration}"
        )


_CAUSES: dict[ExitCause, str] = {
    "unknown": "",
    "exited": "",
    "signalled": "",
    "core_dumped": ", with a core dump",
    "oom_killed": ", from the kernel's OOM killer",
    "maybe_oom_killed": ", maybe from the kernel's OOM killer",
}


class WorkerExited(WorkerObservation, frozen=True, kw_only=True):
    """A worker's process ended. Exactly one of `exit_code` and `signal` is set.

    `iteration`: the one that its mark named, 0 = none. `micro_batches_finished`: how many micro-batches of that it had
    finished, at least; they are lost with it.
    """

    is_noteworthy: ClassVar[bool] = True

    exit_code: ExitCode | None
    signal: Signal | None
    is_expected: bool
    log_tail: LongText = always("")
    cause: ExitCause = always("unknown")
    iteration: Iteration = 0
    micro_batches_finished: Small = 0

    def sentence(self) -> str:
        """Say it in one sentence."""
        how = f"exit code {self.exit_code}" if self.signal is None else f"signal {self.signal}"
        expected = ", as expected" if self.is_expected else ""
        return f"worker {self.worker} on {self.node} ended by {how}{_CAUSES[self.cause]}{expected}"


class ErrorReported(WorkerObservation, frozen=True, kw_only=True):
    """A worker has an error, and still lives or is about to die.

    `generation`: the newest that the worker had joined; a report that is older than its worker is void. `peer`: the
    other end of the connection that broke, where that is known. `lost_peers`: all members of the group whose
    connections were broken by then.
    """

    is_noteworthy: ClassVar[bool] = True

    kind: ErrorKind
    generation: Serial
    iteration: Iteration
    phase: Phase
    message: Text
    detail: LongText = always("")
    peer: WorkerOrNone = always("")
    lost_peers: Annotated[tuple[WorkerId, ...], Meta(max_length=64)] = ()

    def sentence(self) -> str:
        """Say it in one sentence."""
        connection = f", its connection to {self.peer}" if self.peer else ""
        return (
            f"worker {self.worker} on {self.node} reports {self.kind} in {self.phase}"
            f" of iteration {self.iteration}{connection}: {self.message}"
        )


class WorkerBusy(WorkerObservation, frozen=True, kw_only=True):
    """The worker's program is busy with what it has declared, for `limit_us` (hook.section): no hang before that.

    `section` "": it is over. Only what lasts for a while is reported.
    """

    section: Text
    limit_us: Duration

    def sentence(self) -> str:
        """Say it in one sentence."""
        where = f"worker {self.worker} on {self.node}"
        if not self.section:
            return f"{where} is no longer busy"
        return f"{where} is busy with {self.section}, for at most {seconds(self.limit_us)}"


class WorkerWaiting(WorkerObservation, frozen=True, kw_only=True):
    """The worker has answered to the membership of `generation`, and has waited for a while for the others."""

    generation: Serial

    def sentence(self) -> str:
        """Say it in one sentence."""
        return f"worker {self.worker} on {self.node} waits for the others of generation {self.generation}"


class StopRequested(WorkerObservation, frozen=True, kw_only=True):
    """The program wants its training to end before the last iteration (hook.stop), and says why.

    `has_left_loop`: it has left the training loop after `iteration`, which it has committed; its state is saved.
    """

    iteration: Iteration
    reason: Text
    has_left_loop: bool = False

    def sentence(self) -> str:
        """Say it in one sentence."""
        departure = f", and has left the loop after iteration {self.iteration}" if self.has_left_loop else ""
        return f"the program of worker {self.worker} on {self.node} asks to stop training{departure}: {self.reason}"
