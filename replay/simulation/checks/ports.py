"""What the checker needs of the parts that it watches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from unicrond.events.vocabulary import TaskSpec
from unicrond.replay.simulation.models.weights import Blocks


class CheckedProcess(Protocol):
    """A worker's process, as the checker looks at it."""

    worker: str
    slot: int

    @property
    def alive(self) -> bool:
        """Check that the process exists."""
        ...

    @property
    def has_built(self) -> bool:
        """Check that it has been ready to train."""
        ...


class CheckedHost(Protocol):
    """A node, as the checker looks at it. `is_twin`: another node has the same name."""

    name: str
    is_twin: bool

    @property
    def remembers(self) -> bool:
        """Check that every memory that its agents wrote was stored."""
        ...

    @property
    def processes(self) -> Sequence[CheckedProcess]:
        """List the node's workers."""
        ...


class CheckedReplica(Protocol):
    """A replica of a task, as the checker looks at it."""

    task: str
    spec: TaskSpec
    lead_worker: str

    @property
    def generation(self) -> int:
        """Return the generation of the membership last tried."""
        ...


class Reference(Protocol):
    """The right results of training, which are known beforehand."""

    def expected(self, spec: TaskSpec, iteration: int) -> Blocks:
        """Return the parameters after `iteration`."""
        ...

    def digest(self, spec: TaskSpec, iteration: int) -> int:
        """Return the digest of all samples of an iteration."""
        ...
