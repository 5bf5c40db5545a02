"""States of training: in memory and on storage, saved and loaded."""

from __future__ import annotations

from typing import ClassVar

from unicrond.events.vocabulary.base import Observation, WorkerObservation
from unicrond.events.vocabulary.field_defaults import always
from unicrond.events.vocabulary.field_types import (
    Count,
    Duration,
    FailedSources,
    Iteration,
    Micros,
    Name,
    Saver,
    Serial,
    StateSource,
    Text,
    Workers,
)
from unicrond.events.vocabulary.phrases import count, seconds


class CheckpointSaved(WorkerObservation, frozen=True, kw_only=True):
    """The state after `iteration` is durable at `path`."""

    is_noteworthy: ClassVar[bool] = True

    iteration: Iteration
    path: Text
    size_bytes: Count
    duration_us: Duration

    def sentence(self) -> str:
        """Say it in one sentence."""
        return f"task {self.task} saved iteration {self.iteration} to {self.path} ({self.size_bytes} bytes)"


class SaveFailed(WorkerObservation, frozen=True, kw_only=True):
    """The state after `iteration` was not written; the one saved before stays, and training goes on.

    `saver` "unicron": its own checkpoint; "program": one that the program writes by itself (Megatron-LM's `--save`).
    `reason` "": a later one was written, which the program alone tells of so.
    """

    is_noteworthy: ClassVar[bool] = True

    iteration: Iteration
    saver: Saver
    reason: Text

    def sentence(self) -> str:
        """Say it in one sentence."""
        owner = "a checkpoint" if self.saver == "unicron" else "its program's checkpoint"
        if not self.reason:
            return f"task {self.task} saved {owner} again, of iteration {self.iteration}"
        return f"task {self.task} could not save {owner} of iteration {self.iteration}: {self.reason}"


class SnapshotStored(Observation, frozen=True, kw_only=True):
    """The node's memory holds shard `shard` of the task's state after `iteration`. It is reported now and then.

    `origin`: the node whose worker captured it; another one's is a copy. `duration_us`: for how long training stood
    still for it; of a copy, how long it took to come. `shards`: how many make up the state in this layout; 0: not
    known.
    """

    node: Name
    task: Name
    shard: Workers
    iteration: Iteration
    generation: Serial
    origin: Name
    size_bytes: Count
    duration_us: Duration
    shards: Workers = always(0)

    def sentence(self) -> str:
        """Say it in one sentence."""
        copied = f", a copy from {self.origin}" if self.origin != self.node else ""
        return (
            f"node {self.node} keeps the state of task {self.task} after iteration {self.iteration} in memory"
            f" ({self.size_bytes} bytes{copied}, {seconds(self.duration_us)})"
        )


_SOURCES: dict[StateSource, str] = {
    "own": "itself",
    "replica": "a live replica",
    "memory": "its node's memory",
    "peer": "another node's memory",
    "checkpoint": "storage",
    "init": "the seed",
}


class StateLoaded(WorkerObservation, frozen=True, kw_only=True):
    """The worker has the state after `iteration`, of `size_bytes`, from `source` within `duration_us`.

    `failed_sources`: nearer or newer sources that failed, and why. `storage_iteration`: the newest on storage, the
    farthest source, 0 = none, or not seen; `saved_us`: what training again from there would have taken, at the pace
    last measured, 0 where it was not seen.
    `resharded_from`: the layout of what was taken, where it is another than the task's; else "".
    """

    generation: Serial
    source: StateSource
    iteration: Iteration
    size_bytes: Count
    duration_us: Duration
    failed_sources: FailedSources = always(())
    storage_iteration: Iteration = always(0)
    saved_us: Micros = always(0)
    resharded_from: Text = always("")

    def sentence(self) -> str:
        """Say it in one sentence."""
        anew = f", reassembled from shards of {self.resharded_from}" if self.resharded_from else ""
        attempts = f", after {count(len(self.failed_sources), 'source')} that failed" if self.failed_sources else ""
        saved = f"; storage has {self.storage_iteration}, {seconds(self.saved_us)} saved" if self.saved_us else ""
        return (
            f"worker {self.worker} on {self.node} took the state after iteration {self.iteration} from"
            f" {_SOURCES[self.source]} ({self.size_bytes} bytes in {seconds(self.duration_us)}){anew}{attempts}{saved}"
        )
