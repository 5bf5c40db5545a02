"""What one member knows of itself between two effects: iteration, state, group, and what it owes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from agents.protocol.messages import Committed, Launch, Membership, StopWanted
from agents.trainer.gradients.lanes import Lanes
from agents.trainer.gradients.lanes import begin as dealt_fairly
from agents.trainer.ledger import LaneLedger, Ledger, Total
from agents.trainer.lifecycle.effects import Begun, Clear, Flow, Leave, Report, Tell
from agents.trainer.lifecycle.results import NOTHING, Due, Stock
from agents.trainer.lifecycle.shares import Shares
from agents.trainer.lifecycle.table import FOLLOWS, State
from agents.trainer.lifecycle.verdict import Position, Verdict
from events.vocabulary import Member, Phase, StateSource, TaskSpec

_REASON_CHARS = 512


@dataclass(slots=True)
class Turn:
    """What the last verdict left to do: a transfer that is owed, and, if `deals_next`, the next iteration's
    micro-batches. `tried`: a micro-batch has been computed for its bits alone (`detection/determinism.py`)."""

    verdict: Verdict
    transfer_owed: bool
    deals_next: bool = False
    tried: bool = False


@dataclass(slots=True)
class Books:
    """`clock`: monotonic seconds. `buckets`: of gradients. `extents`: elements of each space of the sharded optimizer
    state; none: it is not sharded. `brings`: the program came with the state after this iteration, 0: with the seed's;
    None: no program of this task brings any.

    `ledger`: of the iteration that is worked on, the last committed + 1. `total`: its sums, once they are complete.
    `stepped`: the loop has stepped it. `trained`: parameters are no longer those of the seed. `target`: the generation
    to follow at the next boundary. `whole`: this member has assembled the whole state after the last commit. `saves`:
    after which iterations the program saves the sharded state itself, and at the end; None: it never does.
    """

    launch: Launch
    buckets: int
    clock: Callable[[], float]
    extents: Sequence[int] = ()
    state: State = "new"
    membership: Membership | None = None
    generation: int = 0
    ledger: Ledger = field(default_factory=lambda: Ledger(iteration=0))
    total: Total | None = None
    agreed: bool = False
    turn: Turn | None = None
    target: int = 0
    has_state: bool = False
    origin: StateSource = "own"
    loss: float = 0.0
    pace_s: float = 0.0
    shares: Shares | None = None
    stepped: bool = False
    trained: bool = False
    whole: bool = False
    due: Due = NOTHING
    committed: Committed | None = None
    committed_told: bool = False
    stop_reason: str = ""
    stopped: bool = False
    boundary_s: float = 0.0
    brings: int | None = None
    saves: Callable[[int], bool] | None = None

    def __post_init__(self) -> None:
        self.shares = Shares(self.extents) if self.extents else None
        self.boundary_s = self.clock()

    def enter(self, state: State) -> None:
        """Go to another state. Raises RuntimeError where the table has no such step: a defect of ours."""
        if state not in FOLLOWS[self.state]:
            raise RuntimeError(f"the lifecycle goes from {self.state} to {state}, a step that its table lacks")
        self.state = state

    # --- this member's place ---------------------------------------------------------------------

    @property
    def worker(self) -> str:
        """The id of this worker."""
        return self.launch.worker

    @property
    def peers(self) -> list[Member]:
        """The group's members in rank order, itself among them: all of its shard."""
        members = () if self.membership is None else self.membership.members
        return [member for member in members if member.shard == self.launch.shard]

    @property
    def rank(self) -> int:
        """Its place among the group's replicas."""
        return [member.worker for member in self.peers].index(self.worker)

    @property
    def is_lead(self) -> bool:
        """Whether this worker is the first member."""
        return self.membership is not None and self.membership.members[0].worker == self.worker

    @property
    def in_lead_replica(self) -> bool:
        """Whether this worker is in the first member's replica."""
        members = () if self.membership is None else self.membership.members
        mine = [member.replica for member in members if member.worker == self.worker]
        return bool(mine) and mine[0] == members[0].replica

    # --- where it stands -------------------------------------------------------------------------

    @property
    def goes_on(self) -> bool:
        """Iterations are left."""
        return self.ledger.iteration <= self.launch.spec.iterations and not self.stopped

    @property
    def last(self) -> int:
        """The last committed iteration, 0 before the first."""
        return max(0, self.ledger.iteration - 1)

    def program_saves(self, iteration: int) -> bool:
        """Whether the program saves the sharded state itself after `iteration`."""
        return self.saves is not None and self.saves(iteration)

    @property
    def micro_batches(self) -> int:
        """Of one iteration, over all replicas."""
        return self.launch.spec.micro_batches

    def position(self, stock: Stock) -> Position:
        """What it tells the next group."""
        return Position(
            has_state=self.has_state,
            iteration=self.ledger.iteration if self.has_state else 0,
            sums_complete=self.total is not None,
            held=tuple(self.ledger.held) if self.has_state else (),
            done=self.ledger.done if self.has_state else (),
            complete=stock.complete if self.has_state else (),
            stepped=self.stepped,
            spans=stock.spans if self.has_state else (),
        )

    @property
    def is_new(self) -> bool:
        """No member of the present group had state when it met, and none has computed anything yet."""
        return self.turn is not None and self.turn.verdict.fresh and not self.turn.tried

    @property
    def lanes(self) -> Lanes | None:
        """None: the sum follows the deal."""
        return lanes_of(self.launch.spec)

    def hold(self, verdict: Verdict | None, *, redone: bool = False) -> None:
        """Hold what the verdict deals this member, or a fair share of an iteration (what is dealt to empty hands).
        `redone`: what is new to it was another's."""
        rank, size, ledger = self.rank, len(self.peers), self.ledger
        if isinstance(ledger, LaneLedger):
            deal = dealt_fairly(size, ledger.lanes) if verdict is None else verdict.deal
            assert deal is not None
            ledger.hold(deal, rank, verdict.redone[rank] if verdict is not None and redone else 0)
        else:
            ledger.deal(range(rank, self.micro_batches, size) if verdict is None else verdict.dealt[rank], redone)

    def stop(self, reason: str) -> StopWanted | None:
        """The program wants training to end; what is to be told of it. None: it has been told."""
        if self.stop_reason:
            return None
        self.stop_reason = reason[:_REASON_CHARS]
        return StopWanted(iteration=self.last, reason=self.stop_reason)


def lanes_of(spec: TaskSpec) -> Lanes | None:
    """Of the task's sums; None: they follow the deal."""
    return Lanes(spec.micro_batches, spec.lanes) if spec.lanes else None


def begin(books: Books, iteration: int) -> Flow[None]:
    """Another iteration, with empty hands."""
    yield from Clear(iteration)
    lanes = books.lanes
    books.ledger = Ledger(iteration) if lanes is None else LaneLedger(iteration, lanes=lanes)


def stand_after(books: Books, iteration: int) -> Flow[None]:
    """It has the state after `iteration`; what it was dealt stays dealt."""
    before = books.ledger
    yield from begin(books, iteration + 1)
    books.ledger = before.anew(iteration + 1)
    books.has_state = True


def start_clock(books: Books) -> Flow[None]:
    """The iteration begins now."""
    yield from Begun(books.ledger.iteration)


def tell_committed(books: Books) -> Flow[None]:
    """The lead tells the newest commit, once; a new lead the one that the old lead may have taken with it."""
    if books.committed is not None and not books.committed_told and books.is_lead:
        yield from Tell(books.committed)
        books.committed_told = True


def leave_broken(books: Books, failure: str, phase: Phase) -> Flow[None]:
    """The group is broken: leave it before anything else, and tell."""
    yield from Leave()
    yield from Report(failure, books.ledger.iteration, phase)
