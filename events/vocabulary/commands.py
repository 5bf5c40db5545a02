"""Commands to agents."""

from __future__ import annotations

from collections.abc import Iterator

from unicrond.events.vocabulary.base import Command, Value
from unicrond.events.vocabulary.field_defaults import always
from unicrond.events.vocabulary.field_types import Name, Serial, SomeDuration, Text, WorkerId, Workers
from unicrond.events.vocabulary.nodes import StoreAddress
from unicrond.events.vocabulary.phrases import count
from unicrond.events.vocabulary.tasks import TaskSpec


class Start(Value, frozen=True, kw_only=True, array_like=True):
    """One worker to start, by its number in the task (see StartWorker).

    On the wire it is a bare array, and gets no further field.
    """

    number: Serial
    replica: Serial
    shard: Workers
    store: StoreAddress


class StartWorker(Command, frozen=True, kw_only=True):
    """Start a process for shard `shard` of replica `replica`; the replica's own group meets at `store`."""

    spec: TaskSpec
    worker: WorkerId
    replica: Serial
    shard: Workers
    store: StoreAddress

    def sentence(self) -> str:
        """Say it in one sentence."""
        return (
            f"start worker {self.worker} of task {self.spec.name} on {self.node}"
            f" as replica {self.replica}, shard {self.shard}"
        )

    def tasks_named(self) -> Iterator[str]:
        """Yield the tasks that it names."""
        yield self.spec.name


class StartWorkers(Command, frozen=True, kw_only=True):
    """Start several workers of one task on the node: as many StartWorker, in this order
    (events/vocabulary/placements.py: starts).
    """

    spec: TaskSpec
    starts: tuple[Start, ...]

    def sentence(self) -> str:
        """Say it in one sentence."""
        return f"start {count(len(self.starts), 'worker')} of task {self.spec.name} on {self.node}"

    def tasks_named(self) -> Iterator[str]:
        """Yield the tasks that it names."""
        yield self.spec.name


class StopWorker(Command, frozen=True, kw_only=True):
    """End the worker's process: Quit first, then signals after a grace time. `kill`: SIGKILL at once."""

    task: Name
    worker: WorkerId
    reason: Text
    kill: bool = always(False)

    def sentence(self) -> str:
        """Say it in one sentence."""
        return f"stop worker {self.worker} of task {self.task} on {self.node}: {self.reason}"


class DropState(Command, frozen=True, kw_only=True):
    """Forget the task's state in the node's memory: the task has ended."""

    task: Name

    def sentence(self) -> str:
        """Say it in one sentence."""
        return f"drop the state of task {self.task} on {self.node}"


class CheckNode(Command, frozen=True, kw_only=True):
    """Run a health check of the isolated node within `limit_us`, and say NodeChecked. `argv`: the operator's command;
    empty: the agent's own self-test. `reason`: why the node is isolated.
    """

    argv: tuple[Text, ...] = ()
    limit_us: SomeDuration
    reason: Text

    def sentence(self) -> str:
        """Say it in one sentence."""
        request = " ".join(self.argv) if self.argv else "its self-test"
        return f"check node {self.node} by {request}, isolated because: {self.reason}"


class LeaveCluster(Command, frozen=True, kw_only=True):
    """The node is to leave. `for_good`: drained first, within `limit_us`, and its agent is not to come back; else the
    node was forgotten while it was away: what runs there is ended at once, and the next agent joins anew.
    """

    for_good: bool
    limit_us: SomeDuration
    reason: Text

    def sentence(self) -> str:
        """Say it in one sentence."""
        return f"node {self.node} is to leave{' for good' if self.for_good else ''}: {self.reason}"
