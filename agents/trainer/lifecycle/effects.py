"""What the lifecycle asks its driver to do.

Rules
-----
* `result = yield from Effect(...)` asks the driver; the driver sends the result, or throws one of `failures.py`.
* A *seam* (`Compute`, `Optimize`) is the training loop's own turn; every other effect is the driver's alone.
* An effect is the whole replica's: a driver that runs one shard of several puts what happened to it to the vote of all
  shards, so that all shards get the same result or the same kind of failure.
* Effects that note something (`Send`, `FaultPoint`, `SetPhase`, ...) come in the order in which they are to be noted, and return
  at once.

No IO here: nothing of torch, sockets or clocks.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

from agents.protocol.messages import FromWorker, Membership
from agents.trainer.ledger import IterationLedger, ReplicaAccount, Total
from agents.trainer.lifecycle.candidates import Candidate
from agents.trainer.lifecycle.results import Holdings, LoadedState, SaveSchedule
from agents.trainer.lifecycle.verdict import Position
from agents.trainer.sharded.parts import SpanMove, StatePart
from events import vocabulary as v

if TYPE_CHECKING:
    from agents.protocol.injection import Point

T = TypeVar("T")
R_co = TypeVar("R_co", covariant=True)


class Effect(Generic[R_co]):
    """Something for the driver to do, with a result of type R."""

    __slots__ = ()

    def __iter__(self) -> Generator[Effect[Any], Any, R_co]:
        result: R_co = yield self
        return result


#: A piece of the lifecycle: it asks for effects and returns a T.
Flow: TypeAlias = Generator[Effect[Any], Any, T]


# Seams: the training loop's turn.


@dataclass(frozen=True, slots=True)
class Compute(Effect[None]):
    """Compute the ledger's runs until none is left, and tell it of each micro-batch that is finished. Between
    micro-batches the driver looks for an urgent membership. Before a run it waits for the running sum that another
    member gives, behind it it gives its own away. Throws Broken, Superseded, QuitAsked, Stopped."""

    ledger: IterationLedger


@dataclass(frozen=True, slots=True)
class Optimize(Effect[None]):
    """The gradients are the global batch's mean, everywhere: step the optimizer and the scheduler. Throws Stopped."""

    iteration: int
    loss: float


Seam: TypeAlias = Compute | Optimize


# Noting.


@dataclass(frozen=True, slots=True)
class Send(Effect[None]):
    """Say this to the agent."""

    message: FromWorker


@dataclass(frozen=True, slots=True)
class Log(Effect[None]):
    """A line for the worker's log."""

    text: str


@dataclass(frozen=True, slots=True)
class SetPhase(Effect[None]):
    """The worker's phase mark."""

    phase: v.Phase


@dataclass(frozen=True, slots=True)
class FaultPoint(Effect[None]):
    """A point at which a fault may have been ordered (`injection.py`)."""

    point: Point
    iteration: int
    finished: int = 0


@dataclass(frozen=True, slots=True)
class Idle(Effect[None]):
    """No iteration runs: nothing is late until `StartClock`."""


@dataclass(frozen=True, slots=True)
class StartClock(Effect[None]):
    """An iteration begins, or goes on in another group: its clock starts."""

    iteration: int


@dataclass(frozen=True, slots=True)
class BeginFinalSave(Effect[None]):
    """Training is over; what is left is the last state. `writes`: this replica writes it, others wait."""

    iteration: int
    is_writer: bool


@dataclass(frozen=True, slots=True)
class Observe(Effect[None]):
    """The iteration is committed, after `duration_us`: judge what was seen of it."""

    iteration: int
    total: Total
    duration_us: int
    membership: Membership


@dataclass(frozen=True, slots=True)
class Flush(Effect[None]):
    """Wait until what was told is on its way to the agent, at most so long."""

    timeout_s: float


# From group to group.


@dataclass(frozen=True, slots=True)
class ReportHoldings(Effect[Holdings]):
    """What does this member hold?"""


@dataclass(frozen=True, slots=True)
class KeepOldGroup(Effect[None]):
    """Look for another group. `keep`: the present one is sound and stays open until `DropOldGroup`, else it is closed.
    `bounded`: give up after the fault wait (Stranded)."""

    is_sound: bool
    bounded: bool


@dataclass(frozen=True, slots=True)
class AwaitMembership(Effect[Membership]):
    """The newest membership above the one last followed. Throws Stranded, QuitAsked."""


@dataclass(frozen=True, slots=True)
class FollowMembership(Effect[None]):
    """This membership is tried now; older ones never again."""

    membership: Membership


@dataclass(frozen=True, slots=True)
class FormGroup(Effect[None]):
    """Form the membership's group. Throws Broken, Superseded, QuitAsked."""

    membership: Membership


@dataclass(frozen=True, slots=True)
class ExchangePositions(Effect[Sequence[Position]]):
    """The positions of all members of the new group, in rank order. `sharded`: with their spans. Throws Broken,
    Superseded, QuitAsked."""

    position: Position
    sharded: bool


@dataclass(frozen=True, slots=True)
class DropOldGroup(Effect[None]):
    """Close the group that was set aside."""


@dataclass(frozen=True, slots=True)
class GroupReady(Effect[int]):
    """A group has exchanged positions. `share`: micro-batches of an iteration that fall to a replica; `joins`: there
    are newcomers. Returns the microseconds since the membership was received."""

    membership: Membership
    share: int
    joins: bool


@dataclass(frozen=True, slots=True)
class LeaveGroup(Effect[None]):
    """Leave the present group at once, if there is one."""


@dataclass(frozen=True, slots=True)
class ReportFailure(Effect[None]):
    """Tell the agent of a broken group, unless the answer is already here."""

    failure: str
    iteration: int
    phase: v.Phase


@dataclass(frozen=True, slots=True)
class PrepareStandby(Effect[None]):
    """The group works: prepare for its next loss."""

    membership: Membership


@dataclass(frozen=True, slots=True)
class AwaitQuit(Effect[None]):
    """Nothing is left to do here. Throws QuitAsked."""


@dataclass(frozen=True, slots=True)
class AwaitUrgent(Effect[None]):
    """Wait for an urgent membership or for the agent's word to end, at most so long."""

    timeout_s: float


# Agreeing.


@dataclass(frozen=True, slots=True)
class AnyShard(Effect[bool]):
    """Whether it holds for any shard of this replica."""

    holds: bool


@dataclass(frozen=True, slots=True)
class GatherRows(Effect[Sequence[Sequence[int]]]):
    """Every member's row of signed 64-bit integers, in rank order. Throws Broken, Superseded, QuitAsked."""

    row: Sequence[int]


@dataclass(frozen=True, slots=True)
class PendingGeneration(Effect[int]):
    """The newest membership that every shard of this replica holds and that is not followed yet; 0 for none."""


@dataclass(frozen=True, slots=True)
class GetMembership(Effect[Membership | None]):
    """The membership of that generation, if it was received."""

    generation: int


@dataclass(frozen=True, slots=True)
class Agree(Effect[Sequence[Sequence[int]]]):
    """As `GatherRows`, at the end of an iteration; drivers may add words of their own, which they keep. The point `agreeing`
    is passed while it is under way."""

    row: Sequence[int]


# Gradients.


@dataclass(frozen=True, slots=True)
class Clear(Effect[None]):
    """Begin this iteration: nothing accumulated, nothing summed."""

    iteration: int


@dataclass(frozen=True, slots=True)
class KeepSums(Effect[None]):
    """The sums of these buckets are final; all others are to be made again. `kept`: with lanes, the micro-batches whose
    sums count here."""

    final: frozenset[int]
    valid: frozenset[int]


@dataclass(frozen=True, slots=True)
class LastStage(Effect[tuple[float, int]]):
    """Loss sum and tokens, as the replica's last pipeline stage has them."""

    loss_sum: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Reduce(Effect[Sequence[ReplicaAccount]]):
    """Complete all buckets' sums over the members; their accounts of the iteration, in rank order. The point
    `reducing` is passed while it is under way. Throws Broken, Superseded, QuitAsked."""

    ledger: IterationLedger


@dataclass(frozen=True, slots=True)
class Settle(Effect[None]):
    """Sums / tokens are the gradients."""

    total: Total


# State.


@dataclass(frozen=True, slots=True)
class CheckPeers(Effect[Sequence[int]]):
    """What this replica can offer (`candidates.row_of`). `is_first`: it also asks peers and looks at storage."""

    is_first: bool
    membership: Membership


@dataclass(frozen=True, slots=True)
class LoadState(Effect[LoadedState | str]):
    """Live in the candidate's state, all shards or none; why not, where it is not sound for all."""

    candidate: Candidate


@dataclass(frozen=True, slots=True)
class BroadcastState(Effect[None]):
    """Broadcast this member's state after `iteration`. Throws Broken, Superseded, QuitAsked."""

    iteration: int
    loss: float
    origin: v.StateSource


@dataclass(frozen=True, slots=True)
class ReceiveState(Effect[LoadedState | None]):
    """Take part in member `source`'s broadcast; `keep`: and live in it. Throws Broken, Superseded, QuitAsked."""

    source: int
    keep: bool


@dataclass(frozen=True, slots=True)
class ParamsDigest(Effect[str]):
    """The digest of this shard's parameters."""


# Saving.


@dataclass(frozen=True, slots=True)
class AskSaveSchedule(Effect[SaveSchedule]):
    """What is to be saved after `iteration`, with sharded optimizer state. `leads`: this is the lead's replica."""

    iteration: int
    membership: Membership
    in_leader_replica: bool


@dataclass(frozen=True, slots=True)
class Save(Effect[None]):
    """The boundary after `iteration`: save what is due. `due` None: the driver finds out."""

    iteration: int
    duration_us: int
    loss: float
    membership: Membership
    in_leader_replica: bool
    schedule: SaveSchedule | None


@dataclass(frozen=True, slots=True)
class SaveAndWait(Effect[None]):
    """Have the state after `iteration` on storage when this returns. `handover`: in memory, where it has room."""

    iteration: int
    loss: float
    handover: bool


# Sharded optimizer state.


@dataclass(frozen=True, slots=True)
class GatherParameters(Effect[None]):
    """Each move's stretch of the parameters, from its source to all members. The point `gathering` is passed while it
    is under way. Throws Broken, Superseded, QuitAsked."""

    moves: Sequence[SpanMove]


@dataclass(frozen=True, slots=True)
class StageFirst(Effect[None]):
    """Stage these parts as training begins: made from the parameters."""

    parts: Sequence[StatePart]


@dataclass(frozen=True, slots=True)
class Stage(Effect[int]):
    """Stage these parts beside what is held, from what is held and from the moves; the bytes received. Throws Broken,
    Superseded, QuitAsked."""

    parts: Sequence[StatePart]
    moves: Sequence[SpanMove]


@dataclass(frozen=True, slots=True)
class Adopt(Effect[None]):
    """All members have staged theirs: hold what is staged, and nothing else."""


@dataclass(frozen=True, slots=True)
class DropParts(Effect[None]):
    """Drop all parts."""


@dataclass(frozen=True, slots=True)
class Assemble(Effect[None]):
    """The first member puts the whole optimizer state together, for `Save` and `SaveAndWait`. `at_boundary`: the
    clock of a checkpoint runs. Throws Broken, Superseded, QuitAsked."""

    moves: Sequence[SpanMove]
    at_boundary: bool
