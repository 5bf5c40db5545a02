"""The state of one member of a task's group: iteration, group, ledger, and the work that is pending."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from unicrond.agents.protocol.messages import GroupMembership, IterationCommitted, Launch
from unicrond.agents.trainer.lifecycle.deal import Dealing
from unicrond.agents.trainer.lifecycle.effects import (
    Clear,
    DropParts,
    Flow,
    LeaveGroup,
    ReportFailure,
    Send,
    StartClock,
)
from unicrond.agents.trainer.lifecycle.lanes import Lanes
from unicrond.agents.trainer.lifecycle.ledger import IterationLedger, LaneLedger, Total
from unicrond.agents.trainer.lifecycle.micro_batch_assignment import deal_counts, initial_assignment
from unicrond.agents.trainer.lifecycle.programme import ORDINARY
from unicrond.agents.trainer.lifecycle.results import NO_SAVE, Holdings, SaveSchedule
from unicrond.agents.trainer.lifecycle.shares import Shares
from unicrond.agents.trainer.lifecycle.verdict import GroupVerdict, Position
from unicrond.events.vocabulary import Member, Phase, StateSource, StopRequested, TaskSpec

#: A member's part in training; the package's essay says what happens in each.
State: TypeAlias = Literal[
    "new", "regrouping", "transferring", "computing", "reducing", "agreeing", "stepping", "gathering", "committing",
    "ending", "parked", "stranded", "over",
]  # fmt: skip
#: The states that may follow: the table of the package's essay, as data.
FOLLOWS: dict[State, frozenset[State]] = {
    "new": frozenset({"regrouping"}),
    "regrouping": frozenset({"transferring", "computing", "stepping", "gathering", "ending", "parked", "stranded"}),
    "transferring": frozenset({"regrouping", "computing", "ending"}),
    "computing": frozenset({"reducing", "regrouping", "ending"}),
    "reducing": frozenset({"agreeing", "regrouping"}),
    "agreeing": frozenset({"stepping", "regrouping"}),
    "stepping": frozenset({"gathering", "committing"}),
    "gathering": frozenset({"committing", "regrouping"}),
    "committing": frozenset({"transferring", "computing", "regrouping", "ending"}),
    "ending": frozenset({"over", "regrouping"}),
    "parked": frozenset(),
    "stranded": frozenset(),
    "over": frozenset(),
}
_REASON_CHARS = 512


@dataclass(slots=True)
class PendingWork:
    """The work that the last verdict has left to do: a transfer, and, if `assigns_next`, the assignment of the next
    iteration's micro-batches. `bits_tested`: a micro-batch has been computed for its bits alone
    (`process/determinism.py`)."""

    verdict: GroupVerdict
    transfer_pending: bool
    assigns_next: bool = False
    bits_tested: bool = False


@dataclass(slots=True)
class MemberState:
    """One member's state. `clock`: monotonic seconds. `buckets`: of gradients. `extents`: elements of each space of the
    sharded optimizer state; none: it is not sharded. `loaded_iteration`: the program came with the state after this
    iteration, 0: with the seed's; None: no program of this task loads any.

    `ledger`: of the iteration that is worked on, the last committed + 1. `total`: its sums, once they are complete.
    `has_stepped`: the loop has stepped it. `has_trained`: parameters are no longer those of the seed. `target`: the
    generation to follow at the next boundary. `has_whole_state`: this member has assembled the whole state after the
    last commit. `has_thrown_away`: it has thrown away what it had of this iteration (`verdict.py`). `saves`: after
    which iterations the program saves the sharded state itself, and at the end; None: it never does. `dealing`: the
    deals of the present group.
    """

    launch: Launch
    buckets: int
    clock: Callable[[], float]
    extents: Sequence[int] = ()
    state: State = "new"
    membership: GroupMembership | None = None
    generation: int = 0
    ledger: IterationLedger = field(default_factory=lambda: IterationLedger(iteration=0))
    total: Total | None = None
    agreed: bool = False
    pending_work: PendingWork | None = None
    target: int = 0
    has_state: bool = False
    origin: StateSource = "own"
    loss: float = 0.0
    pace_s: float = 0.0
    shares: Shares | None = None
    has_stepped: bool = False
    has_trained: bool = False
    has_whole_state: bool = False
    has_thrown_away: bool = False
    save_schedule: SaveSchedule = NO_SAVE
    last_commit: IterationCommitted | None = None
    commit_reported: bool = False
    stop_reason: str = ""
    stop_agreed: bool = False
    boundary_s: float = 0.0
    loaded_iteration: int | None = None
    saves: Callable[[int], bool] | None = None
    dealing: Dealing = field(init=False)

    def __post_init__(self) -> None:
        spec, stages = self.launch.spec, self.launch.spec.cut.pp
        least = stages if spec.cut.vpp > 1 else 1
        self.dealing = Dealing(spec.micro_batches, lanes_of(spec), stages - 1, least)
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
        """Return the id of this worker."""
        return self.launch.worker

    @property
    def peers(self) -> list[Member]:
        """Return the group's members in rank order, itself among them: all of its shard."""
        members = () if self.membership is None else self.membership.members
        return [member for member in members if member.shard == self.launch.shard]

    @property
    def rank(self) -> int:
        """Return its rank among the group's replicas."""
        return [member.worker for member in self.peers].index(self.worker)

    @property
    def is_leader(self) -> bool:
        """Return whether this worker is the first member."""
        return self.membership is not None and self.membership.members[0].worker == self.worker

    @property
    def in_leader_replica(self) -> bool:
        """Return whether this worker is in the first member's replica."""
        members = () if self.membership is None else self.membership.members
        replicas = [member.replica for member in members if member.worker == self.worker]
        return bool(replicas) and replicas[0] == members[0].replica

    # --- where it stands -------------------------------------------------------------------------

    @property
    def is_training(self) -> bool:
        """Return whether iterations are left."""
        return self.ledger.iteration <= self.launch.spec.iterations and not self.stop_agreed

    @property
    def last_iteration(self) -> int:
        """Return the last committed iteration, 0 before the first."""
        return max(0, self.ledger.iteration - 1)

    def program_saves(self, iteration: int) -> bool:
        """Return whether the program saves the sharded state itself after `iteration`."""
        return self.saves is not None and self.saves(iteration)

    @property
    def micro_batches(self) -> int:
        """Return the micro-batches of one iteration, over all replicas."""
        return self.launch.spec.micro_batches

    def position(self, stock: Holdings) -> Position:
        """Return what it tells the next group."""
        return Position(
            has_state=self.has_state,
            iteration=self.ledger.iteration if self.has_state else 0,
            sums_complete=self.total is not None,
            assignment=tuple(self.ledger.assignment) if self.has_state else (),
            in_sums=self.ledger.in_sums if self.has_state else (),
            complete=stock.complete if self.has_state else (),
            has_stepped=self.has_stepped,
            has_thrown_away=self.has_state and self.has_thrown_away,
            spans=stock.spans if self.has_state else (),
            factor=self.dealing.factor(self.rank) if self.membership is not None else ORDINARY,
        )

    @property
    def is_new(self) -> bool:
        """Return whether no member of the present group had state when it met, and none has computed anything yet."""
        return self.pending_work is not None and self.pending_work.verdict.fresh and not self.pending_work.bits_tested

    @property
    def lanes(self) -> Lanes | None:
        """Return the lanes of the sum; None: the sum follows the assignment."""
        return lanes_of(self.launch.spec)

    def assign(self, verdict: GroupVerdict | None, *, repeated: bool = False) -> None:
        """Assign what the verdict gives this member, or its share, by the deal, of an iteration of which no member has
        anything. `repeated`: what is new to it was another replica's."""
        rank, ledger, deal = self.rank, self.ledger, self.dealing.deal
        if isinstance(ledger, LaneLedger):
            if verdict is None:
                lane_assignment = initial_assignment(len(self.peers), ledger.lanes, deal.speeds, deal.counts)
            else:
                assert verdict.lane_assignment is not None
                lane_assignment = verdict.lane_assignment
            ledger.assign_lanes(
                lane_assignment, rank, verdict.repeated[rank] if verdict is not None and repeated else 0
            )
        else:
            additions = deal_counts(deal.counts) if verdict is None else verdict.additions
            ledger.assign(additions[rank], repeated)

    def stop(self, reason: str) -> StopRequested | None:
        """Note that the program wants training to end; return the event about it, None where it has been sent."""
        if self.stop_reason:
            return None
        self.stop_reason = reason[:_REASON_CHARS]
        return StopRequested(**self.launch.reporter, iteration=self.last_iteration, reason=self.stop_reason)


def lanes_of(spec: TaskSpec) -> Lanes | None:
    """Return the lanes of the task's sums; None: they follow the assignment."""
    return Lanes(spec.micro_batches, spec.lanes) if spec.lanes else None


def begin_iteration(member: MemberState, iteration: int) -> Flow[None]:
    """Begin another iteration, with no micro-batches assigned."""
    yield from Clear(iteration)
    member.has_thrown_away = False
    lanes = member.lanes
    member.ledger = IterationLedger(iteration) if lanes is None else LaneLedger(iteration, lanes=lanes)


def resume_after(member: MemberState, iteration: int) -> Flow[None]:
    """Continue from the state after `iteration`; micro-batches stay assigned."""
    previous = member.ledger
    yield from begin_iteration(member, iteration + 1)
    member.ledger = previous.for_iteration(iteration + 1)
    member.has_state = True


def discard_iteration(member: MemberState, *, keeps_state: bool) -> Flow[None]:
    """Begin the same iteration again, with nothing computed or assigned; without `keeps_state`, with no state."""
    member.total = None
    yield from begin_iteration(member, member.ledger.iteration)
    member.has_thrown_away = True
    if not keeps_state:
        yield from DropParts()
        member.has_state = False


def start_clock(member: MemberState) -> Flow[None]:
    """Start the clock of the iteration."""
    yield from StartClock(member.ledger.iteration)


def report_commit(member: MemberState) -> Flow[None]:
    """Report the newest commit, once, as the leader; a new leader reports the one that the old leader may have taken
    with it."""
    if member.last_commit is not None and not member.commit_reported and member.is_leader:
        yield from Send(member.last_commit)
        member.commit_reported = True


def leave_broken_group(member: MemberState, failure: str, phase: Phase) -> Flow[None]:
    """Leave the group, which is broken, before anything else, and report it."""
    yield from LeaveGroup()
    yield from ReportFailure(failure, member.ledger.iteration, phase)
