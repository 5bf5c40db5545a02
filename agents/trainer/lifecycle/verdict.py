"""Judges how a new group goes on: the members exchange their positions, and every one draws the same verdict from them.

Rules (all-or-none commit)
--------------------------
* A member's *position* is the iteration it works on (last committed + 1), whether its sums of that iteration are
  complete (every bucket and the account of all replicas have been reduced), and what it holds of it.
* No member passes the agreement that ends an iteration unless all have entered it, and none enters it without
  complete sums. So members with state differ by at most one iteration, and if one has committed iteration `i`,
  each one still at `i` has complete sums of it.
* Then those at `i` *step first*, with the sums they have: no recomputation. The group goes on at `i + 1`.
* If no member has committed `i` but all have complete sums, all step first: after *reduced*, a death changes nothing.
* Else sums that are not final (below) are thrown away (they were copies; the accumulation stays), and what no member
  holds is assigned anew.
* A member without state receives it from the lowest member that has it, once that one stands at the group's iteration.
  If no member has state, member 0 takes it from the newest valid checkpoint, or from the seed, and gives it to all.
* Parameters do not change within an iteration, so a receiver may join in the middle of one.

Rules (who was left behind)
---------------------------
* Members that a planned membership leaves out stand last in an urgent one that takes them in again. Between the two the
  others may have gone on without them: assigned their micro-batches anew, or even committed.
* Such a member shows by what it holds, which a member before it holds too, or by an iteration that it cannot follow. It
  counts as one without state, and receives; what it holds, and its parts of sharded state, count for nothing.

Rules (lanes, `lifecycle/lanes.py`)
-----------------------------------
* With lanes a member says besides what stands in its sums. That counts, not what it was assigned: all else is assigned
  anew. Two members may have the same in their sums, where one has given it to the other; it counts once.
* A sum of such micro-batches has the same bits wherever it was made. So what a member has that was left behind in the
  same iteration is as good as any other's.
* A member may have thrown away what it had of the iteration, since an odd replica's results stood in it. Another may
  not know that yet, when the agreement that showed it broke there. So no member's sums of that iteration count.

Rules (buckets that are final)
------------------------------
* Gradients are reduced bucket by bucket. A member enters a bucket's reduction only with the gradients of all that it
  holds (all of its micro-batches, for that bucket), so a sum that is complete anywhere holds every micro-batch once:
  also those of a member that is lost since.
* A position names the buckets whose sums are complete at that member. Those that are complete at *every* member with
  state are *final*: they are used as they are. All others are thrown away, also where they were complete, and reduced
  again.
* Work that is assigned anew was the lost member's. A final sum has it through the lost member's own share, so what
  comes of the new computation must not reach it; the other sums have lost it, and get it from the members that compute
  it again. Both follow from one rule: an accumulation always takes the gradients of all that its member holds, in every
  bucket, and a final bucket's is not looked at again. So each bucket has every micro-batch exactly once.
* It follows too that a final sum may be given up at any time and made again from the accumulations. That is done where
  a member joins in the middle of an iteration: it has no sums, and reducing costs less than sending them.
* After a verdict every member's complete buckets are exactly the final ones. A member that left a verdict's exchange
  without hearing it (a second fault) has the old, larger set; the next exchange is again an intersection, at least
  one of whose members has heard the verdict or none has. A bucket completes in a generation only if all its members
  have heard the verdict of that generation. So equal names always mean equal sums.
* The accounts (losses, tokens, samples) are gathered when everything is computed and always anew, so each micro-batch
  counts once there as well. Where all buckets are final but accounts were not, the assigned work is computed for its
  account alone.
* Members behind others (above) have the buckets of an earlier iteration: then none of this one's is final, for it
  has not been reduced without them.

Rules (sharded optimizer state, `optimizer_shards.py`)
----------------------------------------------
* A member *has stepped* `i` when it has made that step with the parts that it holds, and waits for the parameters that
  others have stepped. Before it, everybody had complete sums of `i`: it counts as such a member, which need not step.
* No member commits `i` before it has all parameters, so all that are left hold their parts as they are after the
  same step, once those that step first have done so.
* Where those with state do not hold every part between them, the live state is lost: they count as members without
  state, and all take the newest that was saved. With tensor or pipeline parallel replicas that is so for all shards
  where it is so for one (`lifecycle/membership_choice.py` puts it to the vote).

Pure: a function of the rows that the group exchanged. What does not live here: how rows travel (`group.py`), and
what follows from the verdict (`lifecycle/regrouping.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from unicrond.agents.trainer.lifecycle.lanes import Lanes
from unicrond.agents.trainer.lifecycle.micro_batch_assignment import Assignment, Batches, assign
from unicrond.agents.trainer.lifecycle.optimizer_shards import Span
from unicrond.agents.trainer.lifecycle.programme import ALIKE, ORDINARY, Speeds

_WORD_BITS = 62
_FIXED = 4
#: Below them in the row's first number: has_state, has_thrown_away.
_FLAG_BITS = 2


def span_row(spans: Sequence[Span], length: int) -> list[int]:
    """Return the spans as a row of `length` pairs of integers."""
    row = [edge for span in spans for edge in span]
    return row + [0] * (2 * length - len(row))


def spans_of(row: Sequence[int]) -> tuple[Span, ...]:
    """Return the spans of such a row; the inverse of `span_row`."""
    return tuple((start, stop) for start, stop in zip(row[::2], row[1::2], strict=True) if start < stop)


class PositionsContradict(RuntimeError):
    """The members' positions cannot have come from one training: a defect of ours, never of the cluster."""


@dataclass(frozen=True, slots=True)
class Position:
    """A member's progress, as it tells a new group. Without state, `iteration` is 0 and the rest is empty.

    `assignment`: the micro-batches assigned to it. `in_sums`: with lanes, those in its sums, which may be others' as
    well. `complete`: the buckets whose sums are complete here. `sums_complete`: all are, and the accounts.
    `has_stepped`: it has stepped the parts that it holds. `spans`: those parts; they travel in a row of their own.
    `has_thrown_away`: what it had of the iteration; `factor`: by which it was dealt (`deal.py`), ORDINARY without
    state, 0: its hook knows no deals. Both travel with `has_state`, where hooks of before read over them; that it knows
    deals, in the highest bit of the first word of `assignment`, likewise.
    """

    has_state: bool
    iteration: int
    sums_complete: bool
    assignment: tuple[int, ...]
    complete: tuple[int, ...] = ()
    in_sums: tuple[int, ...] = ()
    has_stepped: bool = False
    spans: tuple[Span, ...] = ()
    has_thrown_away: bool = False
    factor: int = 0

    def row(self, micro_batches: int, buckets: int, *, lanes: bool = False) -> list[int]:
        """Return it as signed 64-bit integers: has_state, iteration, sums_complete, has_stepped, then `assignment`,
        with lanes `in_sums`, and `complete` as words of 62 bits."""
        has_state = self.has_state + 2 * self.has_thrown_away + (self.factor << _FLAG_BITS if self.has_state else 0)
        fixed = [has_state, self.iteration, int(self.sums_complete), int(self.has_stepped)]
        assignment_words = _words(self.assignment, micro_batches)
        assignment_words[0] |= bool(self.factor) << _WORD_BITS
        sum_words = _words(self.in_sums, micro_batches) if lanes else []
        return [*fixed, *assignment_words, *sum_words, *_words(self.complete, buckets)]

    @staticmethod
    def from_row(row: Sequence[int], micro_batches: int, *, lanes: bool = False) -> Position:
        """Return the position of such a row, with numbers in ascending order; the inverse of `row`."""
        sums_start = _FIXED + _word_count(micro_batches)
        complete_start = sums_start + (_word_count(micro_batches) if lanes else 0)
        return Position(
            has_state=bool(row[0] & 1),
            has_thrown_away=bool(row[0] & 2),
            factor=(row[0] >> _FLAG_BITS or ORDINARY) if row[_FIXED] >> _WORD_BITS else 0,
            iteration=row[1],
            sums_complete=bool(row[2]),
            has_stepped=bool(row[3]),
            assignment=_numbers(row[_FIXED:sums_start]),
            in_sums=_numbers(row[sums_start:complete_start]),
            complete=_numbers(row[complete_start:]),
        )


def _words(numbers: Sequence[int], limit: int) -> list[int]:
    words = [0] * _word_count(limit)
    for number in numbers:
        words[number // _WORD_BITS] |= 1 << (number % _WORD_BITS)
    return words


def _numbers(words: Sequence[int]) -> tuple[int, ...]:
    numbers = []
    for word, bits in enumerate(words):
        rest = bits & ((1 << _WORD_BITS) - 1)
        while rest:  # of many members each holds little: nearly all words are 0
            lowest = rest & -rest
            numbers.append(word * _WORD_BITS + lowest.bit_length() - 1)
            rest ^= lowest
    return tuple(numbers)


def _word_count(limit: int) -> int:
    return -(-limit // _WORD_BITS)


@dataclass(frozen=True, slots=True)
class GroupVerdict:
    """How a new group goes on.

    `iteration`: where all go on; 0 where no member has state (the checkpoint tells). `step_first`: members that first
    step with the sums they have. `source`: the member whose state the receivers take. `receivers`: members without
    state. `additions[m]`: micro-batches of `iteration` newly assigned to member m, on top of what it then has.
    `repeated[m]`: how many of these are another's whose result was lost. `lane_assignment`: with lanes, who has and
    does what. `fresh`: no member has state. `final`: the buckets whose sums of `iteration` stand. `shares`: the spans
    that each member holds (sharded optimizer state). `factors`: of all members' speeds, as they say (`Position`).
    """

    iteration: int
    step_first: frozenset[int]
    source: int
    receivers: frozenset[int]
    additions: Batches
    fresh: bool
    repeated: tuple[int, ...] = ()
    final: frozenset[int] = frozenset()
    shares: tuple[tuple[Span, ...], ...] = ()
    lane_assignment: Assignment | None = None
    factors: tuple[int, ...] = ()

    def valid_sums(self, member: int) -> frozenset[int]:
        """Return, with lanes, the micro-batches in those of the member's sums that count."""
        return frozenset() if self.lane_assignment is None else self.lane_assignment.valid[member]


def find_left_behind(positions: Sequence[Position], *, lanes: bool = False) -> frozenset[int]:
    """Find the members, of those with state, that others have gone on without. `positions`: in rank order."""
    late: set[int] = set()
    assigned: set[int] = set()
    top = -1
    for member, position in enumerate(positions):
        if not position.has_state:
            continue
        if position.iteration > top:
            top, assigned = position.iteration, set(position.assignment)
        elif position.iteration == top and (lanes or assigned.isdisjoint(position.assignment)):
            assigned.update(position.assignment)
        elif position.iteration == top or position.iteration < top - 1 or not position.sums_complete:
            late.add(member)
    return frozenset(late)


def judge(
    positions: Sequence[Position], micro_batches: int, *, whole: bool = True, lanes: Lanes | None = None, fill: int = 0
) -> GroupVerdict:
    """Return the verdict on the members' positions, in rank order. `whole`: they hold all parts between them. `lanes`:
    of a fixed sum. `fill`: of a pipeline (`Speeds`). Raises PositionsContradict."""
    factors = tuple(position.factor for position in positions)
    speeds = Speeds(factors, fill) if all(factors) else ALIKE
    late = find_left_behind(positions, lanes=lanes is not None)
    able_members = [member for member, position in enumerate(positions) if position.has_state and member not in late]
    with_state = able_members if whole else []
    receivers = frozenset(range(len(positions))).difference(with_state)
    if not with_state:
        additions, lane_assignment = assign([()] * len(positions), [()] * len(positions), micro_batches, lanes, speeds)
        return GroupVerdict(
            iteration=0,
            step_first=frozenset(),
            source=0,
            receivers=receivers,
            additions=additions,
            fresh=True,
            lane_assignment=lane_assignment,
            factors=factors,
        )
    top = max(positions[member].iteration for member in with_state)
    members_behind = frozenset(member for member in with_state if positions[member].iteration < top)
    for member in members_behind:
        if positions[member].iteration < top - 1 or not positions[member].sums_complete:
            raise PositionsContradict(f"member {member} cannot follow to iteration {top}: {list(positions)}")
    step_first, iteration = members_behind, top
    if not members_behind and all(positions[member].sums_complete for member in with_state):
        step_first, iteration = frozenset(with_state), top + 1
    if not step_first.issuperset(member for member in with_state if positions[member].has_stepped):
        raise PositionsContradict(f"a member has stepped what others have not reduced: {list(positions)}")
    going_on = [member in with_state and member not in step_first for member in range(len(positions))]
    assignments = [
        position.assignment if goes_on else () for position, goes_on in zip(positions, going_on, strict=True)
    ]
    counts = not any(positions[member].has_thrown_away for member in with_state)
    in_sums = [
        position.in_sums if counts and goes_on else () for position, goes_on in zip(positions, going_on, strict=True)
    ]
    complete = [frozenset(positions[member].complete) for member in with_state]
    additions, lane_assignment = assign(assignments, in_sums, micro_batches, lanes, speeds)
    unassigned = set(range(micro_batches)).difference(*assignments)
    return GroupVerdict(
        iteration=iteration,
        step_first=step_first,
        source=with_state[0],
        receivers=receivers,
        additions=additions,
        fresh=False,
        repeated=tuple(
            len(unassigned.intersection(new_batches)) if old_batches else 0
            for old_batches, new_batches in zip(assignments, additions, strict=True)
        ),
        final=frozenset() if step_first or receivers or not counts else frozenset.intersection(*complete),
        shares=tuple(position.spans if member in with_state else () for member, position in enumerate(positions)),
        lane_assignment=lane_assignment,
        factors=factors,
    )
