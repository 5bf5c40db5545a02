"""Audits: now and then all replicas compute one and the same micro-batch, and the bits of its gradients are compared
before anything of the iteration is added up. Pure; all members judge the same rows.

Rules
-----
* One replica, another one each time, computes the micro-batch for its own sums, so what counts is compared. The others
  compute it for its bits alone. An audit judges all of them alike.
* That costs each the time of one micro-batch. So it is done as seldom as the budget says (`interval`); the leader asks
  for it in the agreement before. It asks sooner, ATTENTION times, after a loss or a norm that stands out.
* Every member says in that agreement whether it can. Without one (an older hook) there is none, nor in the first
  iteration of a group.
* More than half have the same bits, and one has others: that one is at fault. It is given up before its sums count.
* Without a majority (as with two replicas), or if the replica that differs has never had the others' bits, every
  replica computes the micro-batch twice more. A replica that gets other bits each time is at fault if another one gets
  the same each time; so is a replica whose bits differed once.
* Other bits each time for everybody come from the program; steady bits that are close to the others', of a replica
  that never had theirs, from another kernel. Then, and where two replicas stand against each other, there are no
  more audits in that group. Where a task begins with bits that differ there are none at all.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

from unicrond.agents.trainer.detection.checksum import minority_ranks
from unicrond.agents.trainer.detection.divergence import are_equal_but_for_rounding

#: In the word that each member says in an agreement: it can audit; the next iteration is to be audited (the leader's).
_ABLE, _ASKED = 8, 16
#: Iterations that are audited one after the other where something stood out.
ATTENTION = 3
#: Why an audit tells nothing: the program has other bits each time, two steady replicas stand against each other, or
#: some compute on something else.
AuditDoubt: TypeAlias = Literal["", "unsteady", "unequal", "deviating"]


class AuditVerdict(NamedTuple):
    """`odd`: ranks of replicas at fault. `is_open`: all are to compute it twice more. `doubt`: there are to be no more
    audits in this group."""

    odd: tuple[int, ...] = ()
    is_open: bool = False
    doubt: AuditDoubt = ""


def interval(micro_batches: int, members: int, budget: float) -> int:
    """Return from how many iterations one is audited, so that it costs at most the part `budget` of the time; 0 for
    none. `micro_batches`: of an iteration."""
    if members < 2 or budget <= 0.0:
        return 0
    return max(1, math.ceil(members / (micro_batches * budget)))


def judge(rows: Sequence[Sequence[int]]) -> AuditVerdict:
    """Judge what the replicas have computed, in rank order: the micro-batch's number (`gradients_number`; 0: it had no
    room for it), and how often the replica has had the same bits as the others."""
    ranks = [rank for rank, row in enumerate(rows) if row[0]]
    minority = minority_ranks([rows[rank][0] for rank in ranks]) if ranks else ()
    if minority is None or any(not rows[ranks[place]][1] for place in minority):
        return AuditVerdict(is_open=True)
    return AuditVerdict(odd=tuple(ranks[place] for place in minority))


def judge_again(rows: Sequence[Sequence[int]]) -> AuditVerdict:
    """Judge what they have computed all in all: three numbers, and how often the replica has had the others' bits."""
    ranks = [rank for rank, row in enumerate(rows) if all(row[:3])]
    numbers = {rank: set(rows[rank][:3]) for rank in ranks}
    steady = Counter(next(iter(numbers[rank])) for rank in ranks if len(numbers[rank]) == 1)
    if not steady:
        return AuditVerdict(doubt="unsteady" if ranks else "")
    truth, count = steady.most_common(1)[0]
    if len(steady) > 1 and 2 * count <= len(ranks):
        return AuditVerdict(doubt="unequal")
    odd = [rank for rank in ranks if numbers[rank] != {truth}]
    if len(odd) > max(1, (len(ranks) - 1) // 2):
        return AuditVerdict(doubt="unsteady")
    deviating = [
        rank
        for rank in odd
        if not rows[rank][3] and len(numbers[rank]) == 1 and are_equal_but_for_rounding([truth, *numbers[rank]])
    ]
    return AuditVerdict(
        odd=tuple(rank for rank in odd if rank not in deviating), doubt="deviating" if deviating else ""
    )


class Audits:
    """One worker's part in audits. `budget`: the part of the time that they may cost. `is_able`: this worker can make
    them at all."""

    def __init__(self, budget: float, *, is_able: bool) -> None:
        self._budget = budget
        self._is_able = is_able
        #: The task's replicas had other bits than each other where it began.
        self.bits_differ = False
        #: How often this replica has had the same bits as the others.
        self.passed = 0
        #: In which generation audits have told nothing.
        self._doubtful_generation = 0
        #: (generation, iteration) that is to be audited.
        self._due: tuple[int, int] | None = None
        self._attention = 0

    def words(self) -> Mapping[str, Any]:
        """Return what a newcomer is to know; travels with the state."""
        return {"bits_differ": self.bits_differ}

    def inherit(self, words: Any) -> None:
        """Inherit the words that came with the state that was loaded."""
        self.bits_differ = isinstance(words, Mapping) and bool(words.get("bits_differ", False))

    def attend(self) -> None:
        """Note that something stood out: audit the next iterations."""
        self._attention = ATTENTION

    def word(self, iteration: int, generation: int, micro_batches: int, members: int) -> int:
        """Return what this member says in the agreement on `iteration`, about the next one."""
        if not self._is_able or self.bits_differ or self._doubtful_generation == generation:
            return 0
        every = interval(micro_batches, members, self._budget)
        attention, self._attention = self._attention, max(0, self._attention - 1)
        asks = bool(every) and ((iteration + 1) % every == 0 or attention > 0)
        return _ABLE + _ASKED * asks

    def agree(self, words: Sequence[int], iteration: int, generation: int) -> None:
        """Note what all members have said in the agreement on `iteration`, in rank order: the leader's word first."""
        is_due = bool(words[0] & _ASKED) and all(word & _ABLE for word in words)
        self._due = (generation, iteration + 1) if is_due else None

    def is_due(self, iteration: int, generation: int) -> bool:
        """Return whether this iteration of this group is audited."""
        return self._due == (generation, iteration)

    def end(self, verdict: AuditVerdict, generation: int) -> None:
        """Note how an audit in which this replica took part ended."""
        self._due = None
        self.passed += verdict == AuditVerdict()
        if verdict.doubt:
            self._doubtful_generation = generation
