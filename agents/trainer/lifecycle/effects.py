"""The effects: what the lifecycle asks its driver to do, and what each returns or throws.

Rules
-----
* `result = yield from Effect(...)` asks the driver; the driver sends the result, or throws one of `results.py`.
* A *seam* (`Compute`, `Optimize`) is the training loop's own turn; every other effect is the driver's alone.
* An effect is the whole replica's: a driver that runs one shard of several puts what happened to it to the vote of all
  shards, so that all shards get the same result or the same kind of failure.
* Effects that note something (`Send`, `FaultPoint`, `SetPhase`, ...) come in the order in which they are to be noted,
  and return at once.

No IO here: nothing of torch, sockets or clocks.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

from unicrond.agents.protocol.messages import FromWorker, GroupMembership
from unicrond.agents.trainer.lifecycle.candidates import Candidate
from unicrond.agents.trainer.lifecycle.ledger import IterationLedger, ReplicaAccount, Total
from unicrond.agents.trainer.lifecycle.optimizer_shards import SpanMove, StatePart
from unicrond.agents.trainer.lifecycle.results import Holdings, LoadedState, ReplicaWord, SaveSchedule
from unicrond.agents.trainer.lifecycle.verdict import Position
from unicrond.events import vocabulary as v

if TYPE_CHECKING:
    from unicrond.agents.protocol.injection import Point

T = TypeVar("T")
R_co = TypeVar("R_co", covariant=True)


class Effect(Generic[R_co]):
    """A request to the driver, with a result of type R."""

    __slots__ = ()

    def __iter__(self) -> Generator[Effect[Any], Any, R_co]:
        result: R_co = yield self
        return result


#: A piece of the lifecycle: it asks for effects and returns a T.
Flow: TypeAlias = Generator[Effect[Any], Any, T]


# Seams: the training loop's turn.


@dataclass(frozen=True, slots=True)
class Compute(Effect[None]):
    """Compute the ledger's runs until none is left, and note each micro-batch that is finished in it. Between
    micro-batches the driver looks for an urgent membership. Before a run it waits for the running sum that another
    member sends, after it it sends its own on. Throws GroupBroken, MembershipSuperseded, QuitRequested,
    ProgramLeftLoop."""

    ledger: IterationLedger


@dataclass(frozen=True, slots=True)
class Optimize(Effect[None]):
    """Step the optimizer and the scheduler: the gradients are the global batch's mean, everywhere. Throws
    ProgramLeftLoop."""

    iteration: int
    loss: float


Seam: TypeAlias = Compute | Optimize


# Notes.


@dataclass(frozen=True, slots=True)
class Send(Effect[None]):
    """Send this message to the agent."""

    message: FromWorker


@dataclass(frozen=True, slots=True)
class Log(Effect[None]):
    """Print a line into the worker's log."""

    text: str


@dataclass(frozen=True, slots=True)
class SetPhase(Effect[None]):
    """Set the worker's phase mark."""

    phase: v.Phase


@dataclass(frozen=True, slots=True)
class FaultPoint(Effect[None]):
    """Pass a point at which a fault may have been ordered (`injection.py`)."""

    point: Point
    iteration: int
    finished: int = 0


@dataclass(frozen=True, slots=True)
class Idle(Effect[None]):
    """Mark that no iteration runs: nothing is late until `StartClock`."""


@dataclass(frozen=True, slots=True)
class StartClock(Effect[None]):
    """Start the iteration's clock: it begins, or goes on in another group."""

    iteration: int


@dataclass(frozen=True, slots=True)
class BeginFinalSave(Effect[None]):
    """Begin the end of training, when only the last state is left to save. `is_writer`: this replica writes it, others
    wait."""

    iteration: int
    is_writer: bool


@dataclass(frozen=True, slots=True)
class Observe(Effect[None]):
    """Judge what was seen of the iteration, which is committed, after `duration_us`."""

    iteration: int
    total: Total
    duration_us: int
    membership: GroupMembership


@dataclass(frozen=True, slots=True)
class Flush(Effect[None]):
    """Wait until what was sent is on its way to the agent, at most so long."""

    timeout_s: float


# The way from group to group.


@dataclass(frozen=True, slots=True)
class ReportHoldings(Effect[Holdings]):
    """Return what this member holds."""


@dataclass(frozen=True, slots=True)
class KeepOldGroup(Effect[None]):
    """Look for another group. `is_sound`: the present one stays open until `DropOldGroup`, else it is closed now.
    `bounded`: give up after the fault wait (RendezvousTimedOut)."""

    is_sound: bool
    bounded: bool


@dataclass(frozen=True, slots=True)
class AwaitMembership(Effect[GroupMembership]):
    """Return the newest membership above the one last followed. Throws RendezvousTimedOut, QuitRequested."""


@dataclass(frozen=True, slots=True)
class FollowMembership(Effect[None]):
    """Note that this membership is tried now; older ones are never tried again."""

    membership: GroupMembership


@dataclass(frozen=True, slots=True)
class FormGroup(Effect[None]):
    """Form the membership's group. Throws GroupBroken, MembershipSuperseded, QuitRequested."""

    membership: GroupMembership


@dataclass(frozen=True, slots=True)
class ExchangePositions(Effect[Sequence[Position]]):
    """Return the positions of all members of the new group, in rank order. `sharded`: with their spans. Throws
    GroupBroken, MembershipSuperseded, QuitRequested."""

    position: Position
    sharded: bool


@dataclass(frozen=True, slots=True)
class DropOldGroup(Effect[None]):
    """Close the group that was kept."""


@dataclass(frozen=True, slots=True)
class GroupReady(Effect[int]):
    """Note that a group has exchanged positions. `share`: micro-batches of an iteration for each replica. Returns the
    microseconds since the membership was received."""

    membership: GroupMembership
    share: int


@dataclass(frozen=True, slots=True)
class LeaveGroup(Effect[None]):
    """Leave the present group at once, if there is one."""


@dataclass(frozen=True, slots=True)
class ReportFailure(Effect[None]):
    """Report a broken group to the agent, unless the answer is already here."""

    failure: str
    iteration: int
    phase: v.Phase


@dataclass(frozen=True, slots=True)
class PrepareStandby(Effect[None]):
    """Prepare for the group's next loss, now that it works."""

    membership: GroupMembership


@dataclass(frozen=True, slots=True)
class AwaitQuit(Effect[None]):
    """Wait for the agent's order to end. Throws QuitRequested."""


@dataclass(frozen=True, slots=True)
class AwaitUrgent(Effect[None]):
    """Wait for an urgent membership or for the agent's order to end, at most so long."""

    timeout_s: float


# Agreeing.


@dataclass(frozen=True, slots=True)
class AnyShard(Effect[bool]):
    """Return whether `holds` is true for any shard of this replica."""

    holds: bool


@dataclass(frozen=True, slots=True)
class AgreeInReplica(Effect[ReplicaWord]):
    """Return the word of the whole replica on an iteration that it has computed: whether any shard asks to `stop`, what
    the slowest took for a micro-batch, and `number`, if all shards have the same."""

    stop: bool
    number: int


@dataclass(frozen=True, slots=True)
class GatherRows(Effect[Sequence[Sequence[int]]]):
    """Return every member's row of signed 64-bit integers, in rank order. Throws GroupBroken, MembershipSuperseded,
    QuitRequested."""

    row: Sequence[int]


@dataclass(frozen=True, slots=True)
class PendingGeneration(Effect[int]):
    """Return the newest membership that every shard of this replica has and that is not followed yet; 0 for none."""


@dataclass(frozen=True, slots=True)
class GetMembership(Effect[GroupMembership | None]):
    """Return the membership of that generation, if it was received."""

    generation: int


@dataclass(frozen=True, slots=True)
class Agree(Effect[Sequence[Sequence[int]]]):
    """Gather the rows as `GatherRows` does, at the end of an iteration; drivers may append words of their own, which
    they keep. The point `agreeing` is passed while it is under way."""

    row: Sequence[int]


# Gradients.


@dataclass(frozen=True, slots=True)
class Clear(Effect[None]):
    """Begin this iteration: clear accumulation and sums."""

    iteration: int


@dataclass(frozen=True, slots=True)
class KeepSums(Effect[None]):
    """Keep the sums of these buckets as final; all others are to be made again. `valid`: with lanes, the micro-batches
    whose sums count here."""

    final: frozenset[int]
    valid: frozenset[int]


@dataclass(frozen=True, slots=True)
class LastStage(Effect[tuple[float, int]]):
    """Return the loss sum and the tokens as the replica's last pipeline stage has them."""

    loss_sum: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Reduce(Effect[Sequence[ReplicaAccount]]):
    """Complete all buckets' sums over the members; return their accounts of the iteration, in rank order. The point
    `reducing` is passed while it is under way. Throws GroupBroken, MembershipSuperseded, QuitRequested."""

    ledger: IterationLedger


@dataclass(frozen=True, slots=True)
class Settle(Effect[None]):
    """Divide the sums by the tokens and make them the gradients."""

    total: Total


# State.


@dataclass(frozen=True, slots=True)
class CheckPeers(Effect[Sequence[int]]):
    """Return what this replica can offer (`candidates.row_of`). `is_first`: it also asks peers and looks at storage.
    `must_see_storage`: however long that takes."""

    is_first: bool
    membership: GroupMembership
    must_see_storage: bool = False


@dataclass(frozen=True, slots=True)
class LoadState(Effect[LoadedState | str]):
    """Load the candidate's state, in all shards or none; return why not, where it is not sound for all."""

    candidate: Candidate


@dataclass(frozen=True, slots=True)
class BroadcastState(Effect[None]):
    """Broadcast this member's state after `iteration`. Throws GroupBroken, MembershipSuperseded, QuitRequested."""

    iteration: int
    loss: float
    origin: v.StateSource


@dataclass(frozen=True, slots=True)
class ReceiveState(Effect[LoadedState | None]):
    """Take part in the broadcast of member `source`; `keep`: and load its state. Throws GroupBroken,
    MembershipSuperseded, QuitRequested."""

    source: int
    keep: bool


@dataclass(frozen=True, slots=True)
class ParamsDigest(Effect[str]):
    """Return the digest of this shard's parameters."""


# Saving.


@dataclass(frozen=True, slots=True)
class AskSaveSchedule(Effect[SaveSchedule]):
    """Return what is to be saved after `iteration`, with sharded optimizer state."""

    iteration: int
    membership: GroupMembership
    in_leader_replica: bool


@dataclass(frozen=True, slots=True)
class Save(Effect[None]):
    """Save what is due at the boundary after `iteration`. `schedule` None: the driver finds out."""

    iteration: int
    duration_us: int
    loss: float
    membership: GroupMembership
    in_leader_replica: bool
    schedule: SaveSchedule | None


@dataclass(frozen=True, slots=True)
class SaveAndWait(Effect[None]):
    """Save the state after `iteration` and return when it is on storage. `handover`: memory will do, where it has
    room."""

    iteration: int
    loss: float
    handover: bool


# Sharded optimizer state.


@dataclass(frozen=True, slots=True)
class GatherParameters(Effect[None]):
    """Give each move's stretch of the parameters, from its source to all members. The point `gathering` is passed while
    it is under way. Throws GroupBroken, MembershipSuperseded, QuitRequested."""

    moves: Sequence[SpanMove]


@dataclass(frozen=True, slots=True)
class StageFirst(Effect[None]):
    """Stage these parts as training begins: made from the parameters."""

    parts: Sequence[StatePart]


@dataclass(frozen=True, slots=True)
class Stage(Effect[int]):
    """Stage these parts beside what is held, from what is held and from the moves; return the bytes received. Throws
    GroupBroken, MembershipSuperseded, QuitRequested."""

    parts: Sequence[StatePart]
    moves: Sequence[SpanMove]


@dataclass(frozen=True, slots=True)
class Adopt(Effect[None]):
    """Replace the parts that this member holds by the staged ones: all members have staged theirs."""


@dataclass(frozen=True, slots=True)
class DropParts(Effect[None]):
    """Drop all parts of the sharded optimizer state."""


@dataclass(frozen=True, slots=True)
class Assemble(Effect[None]):
    """Put the whole optimizer state together at the first member, for `Save` and `SaveAndWait`. `at_boundary`: the
    clock of a checkpoint runs. Throws GroupBroken, MembershipSuperseded, QuitRequested."""

    moves: Sequence[SpanMove]
    at_boundary: bool
