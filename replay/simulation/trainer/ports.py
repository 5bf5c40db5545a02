"""What training needs of the parts above it: of its nodes, of the checker, and a replica's parts of the replica."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from unicrond.agents.protocol.messages import FromWorker, GroupMembership
from unicrond.agents.trainer.lifecycle.ledger import Total
from unicrond.agents.trainer.lifecycle.optimizer_shards import StatePart
from unicrond.events.vocabulary import ErrorKind, ErrorReported, Phase, TaskSpec
from unicrond.replay.simulation.models.memory import Copy, MemoryHost
from unicrond.replay.simulation.models.weights import Blocks, WeightsState
from unicrond.replay.simulation.trainer.process import Moment, Process
from unicrond.replay.simulation.trainer.progress import ReplicaProgress


class TrainingHost(MemoryHost, Protocol):
    """A node, as other nodes' training meets it."""

    def store_serves(self, port: int) -> bool:
        """Return whether the node's rendezvous store answers at the port."""
        ...

    def accept_copy(self, origin: str, task: str, shard: int, copy: Copy) -> bool:
        """Store a copy of a state of `origin`, and return whether the node accepts it."""
        ...


class GroupMember(Protocol):
    """A replica, as a group meets it."""

    lead_worker: str

    @property
    def shards(self) -> Sequence[Process]:
        """Return its processes, in shard order."""
        ...

    def wake(self) -> None:
        """Wake the main thread: something has happened that it may wait for."""
        ...

    def reaches(self, peer: GroupMember) -> bool:
        """Return whether the network carries between the two, for every shard."""
        ...


class ReplicaThread(GroupMember, Protocol):
    """A replica's main thread, as what it computes needs it."""

    task: str
    spec: TaskSpec
    progress: ReplicaProgress

    @property
    def generation(self) -> int:
        """Return the generation of the membership last tried."""
        ...

    async def wait(self, is_done: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Wait for `is_done`; return False if it takes longer than `timeout_s`. Raises QuitRequested."""
        ...

    async def work(self, duration_s: float) -> None:
        """Compute: nothing interrupts it but the process's end."""
        ...

    async def work_slowly(self) -> None:
        """Wait for as long as a fault slows every micro-batch."""
        ...

    def on_moment(self, moment: Moment) -> None:
        """Inject the ordered faults of a moment of the training."""
        ...

    def check_quit(self) -> None:
        """Raise QuitRequested if the agent wants a shard to end."""
        ...

    def run_program(self, iteration: int, micro_batch: int) -> None:
        """Let a program that is garbage fail where it does."""
        ...

    def raise_injected(self) -> None:
        """Raise the error with which a fault lets the micro-batch fail."""
        ...

    def reset(self, shards: Sequence[int]) -> None:
        """Reset the connections of these of its shards."""
        ...

    def newest(self, above: int, urgent_only: bool = False) -> int:
        """Return the newest generation above `above` that any shard received."""
        ...

    def send_all(self, message: FromWorker) -> None:
        """Send `message` from every shard's process to its agent."""
        ...

    def error_report(self, kind: ErrorKind, message: str, phase: Phase) -> ErrorReported:
        """Return a report of an error in the present iteration."""
        ...


class TrainingChecker(Protocol):
    """The checker, as training tells it what happens."""

    def record_breach(self, rule: str, story: str) -> None:
        """Record the breach of a rule, if `story` is not empty."""
        ...

    def new_lineage(self, task: str) -> int:
        """Return the number of a training that begins, from the seed or from a checkpoint."""
        ...

    def regrouped(self, replica: ReplicaThread, membership: GroupMembership) -> None:
        """Check the membership of the group that a replica has joined."""
        ...

    def check_deal(
        self, replica: ReplicaThread, counts: Sequence[int], paces_s: tuple[float, ...], now_s: float
    ) -> None:
        """Check how an iteration was dealt that this replica's group has committed. `paces_s`: by replica, how long it
        takes for a micro-batch."""
        ...

    def summed(self, replica: ReplicaThread, total: Total, *, is_right: bool) -> None:
        """Check the sums of an iteration with which a replica is to step."""
        ...

    def step_committed(
        self, replica: ReplicaThread, iteration: int, lineage: int, total: Total, params: Blocks
    ) -> None:
        """Check a step of a replica."""
        ...

    def state_used(self, replica: ReplicaThread, action: str, iteration: int, state: WeightsState) -> None:
        """Check a whole state that is saved or loaded."""
        ...

    def parts_staged(self, replica: ReplicaThread, rank: int, parts: Sequence[StatePart]) -> None:
        """Record the parts that a member of the present group has staged beside the old ones."""
        ...

    def parts_adopted(
        self, replica: ReplicaThread, rank: int, size: int, iteration: int, blocks: Mapping[int, int]
    ) -> None:
        """Check that it has exactly what it had staged."""
        ...
