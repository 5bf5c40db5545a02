"""A replica's ledger of one iteration: its micro-batches, how many are finished, and their loss and tokens."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

from unicrond.agents.protocol.sampling import DIGEST_MODULUS, Sampling, samples_digest
from unicrond.agents.trainer.lifecycle.lanes import Lanes
from unicrond.agents.trainer.lifecycle.micro_batch_assignment import AHEAD, Assignment, Run

#: Losses are counted in these units: float64 sums of them are exact, so they depend on no order, up to 2**29.
_LOSS_UNITS = 2.0**24


def to_fixed_point(loss_sum: float) -> float:
    """Return the loss as it is counted, so that sums of it are the same in any order."""
    return round(loss_sum * _LOSS_UNITS) / _LOSS_UNITS


@dataclass(slots=True)
class IterationLedger:
    """The ledger where the sum follows the assignment. `assignment`: the replica's micro-batches in the order of their
    assignment, of which the first `finished` are done.

    `loss_sum`: sum of the token losses; `tokens`: how many; `repeated`: micro-batches assigned because another replica
    was lost.
    """

    iteration: int
    assignment: list[int] = field(default_factory=list)
    finished: int = 0
    loss_sum: float = 0.0
    tokens: int = 0
    repeated: int = 0

    @property
    def run(self) -> Run | None:
        """Return what is to be computed next, None where nothing is left."""
        return Run(0, tuple(self.assignment)) if self.finished < len(self.assignment) else None

    @property
    def in_sums(self) -> tuple[int, ...]:
        """Return, with lanes, the micro-batches that are in this replica's sums."""
        return ()

    def todo(self) -> list[int]:
        """Return the micro-batches of the present run that are not finished, in their order."""
        return self.assignment[self.finished :]

    def remaining(self) -> list[int]:
        """Return all micro-batches that are not finished, in their order."""
        return self.todo()

    def is_last(self, todo: Sequence[int]) -> bool:
        """Return whether no micro-batches are left after these, and their sum stays on this replica."""
        return len(todo) == len(self.assignment) - self.finished

    def add(self, loss_sum: float, tokens: int) -> None:
        """Add the loss and tokens of finished micro-batches; `loss_sum` is finite."""
        self.loss_sum += to_fixed_point(loss_sum)
        self.tokens += tokens

    def finish(self, micro_batches: int) -> bool:
        """Note that so many micro-batches are finished; return whether the present run is over."""
        self.finished += micro_batches
        return not self.todo()

    def end_run(self) -> None:
        """End the present run."""

    def sums(self) -> tuple[float, int]:
        """Return the loss and the tokens of its micro-batches."""
        return self.loss_sum, self.tokens

    def for_iteration(self, iteration: int) -> IterationLedger:
        """Return a ledger for another iteration, with the same assignment."""
        return IterationLedger(iteration, list(self.assignment))

    def assign(self, micro_batches: Sequence[int], repeated: bool) -> None:
        """Add these micro-batches to the assignment. `repeated`: another replica had worked on them."""
        self.assignment.extend(micro_batches)
        if repeated:
            self.repeated += len(micro_batches)

    def account(self, sampling: Sampling, surplus: bool = False) -> ReplicaAccount:
        """Return this replica's account of the finished iteration. `surplus`: its accumulation's."""
        samples = [
            sample for micro_batch in self.assignment for sample in sampling.samples(self.iteration, micro_batch)
        ]
        return ReplicaAccount(
            iteration=self.iteration,
            micro_batches=self.finished,
            samples=len(samples),
            samples_digest=samples_digest(self.iteration, samples),
            loss_sum=self.loss_sum,
            tokens=self.tokens,
            repeated=self.repeated,
            surplus=surplus,
        )


@dataclass(slots=True)
class RunningSum:
    """A lane's running sum: the number of micro-batches in it, their loss and tokens."""

    length: int = 0
    loss_sum: float = 0.0
    tokens: int = 0


@dataclass(slots=True)
class LaneLedger(IterationLedger):
    """The ledger where the sum is fixed (`lanes.py`). `assignment`: the micro-batches whose sums are valid here, then
    those of the runs. `lane_assignment`, `rank`: what it was assigned, and as which member. `running`: the running sum
    of each lane that it has any of. `from_peers`: what others have sent of these; the senders account for that, until a
    new assignment says that it is this replica's. `ahead`: accounts of micro-batches of the present run that were
    computed before the sum that they continue was here; `is_ahead`: the last of them is under way."""

    lanes: Lanes = field(kw_only=True)
    lane_assignment: Assignment | None = None
    rank: int = 0
    running: dict[int, RunningSum] = field(default_factory=dict)
    from_peers: dict[int, RunningSum] = field(default_factory=dict)
    ahead: list[RunningSum] = field(default_factory=list)
    is_ahead: bool = False
    _runs: tuple[Run, ...] = ()
    _offset: int = 0

    @property
    def run(self) -> Run | None:
        """Return the next run, also where nothing is to be computed for it."""
        return self._runs[0] if self._runs else None

    @property
    def runs(self) -> tuple[Run, ...]:
        """Return the runs that are not over."""
        return self._runs

    @property
    def in_sums(self) -> tuple[int, ...]:
        """Return the micro-batches that are in this replica's sums, its own and those that peers have sent."""
        return tuple(m for lane, partial in self.running.items() for m in self.lanes.of(lane)[: partial.length])

    def todo(self) -> list[int]:
        """Return the micro-batches of the present run that are not finished, in their order."""
        finished = self._offset + len(self.ahead) - self.is_ahead
        return list(self._runs[0].micro_batches[finished:]) if self._runs else []

    def remaining(self) -> list[int]:
        """Return all micro-batches that are not finished, in their order."""
        return [*self.todo(), *(micro_batch for later in self._runs[1:] for micro_batch in later.micro_batches)]

    def is_last(self, todo: Sequence[int]) -> bool:
        """Return whether no micro-batches are left after these, and their sum stays on this replica."""
        return len(todo) == len(self.assignment) - self.finished and self._runs[0].target is None and not self.ahead

    def add(self, loss_sum: float, tokens: int) -> None:
        """Add the loss and tokens of micro-batches of the present run; `loss_sum` is finite."""
        target = self.ahead[-1] if self.is_ahead else self.running.setdefault(self._runs[0].lane, RunningSum())
        target.loss_sum += to_fixed_point(loss_sum)
        target.tokens += tokens

    def finish(self, micro_batches: int) -> bool:
        """Note that so many micro-batches are finished; return whether the present run is over."""
        if self.is_ahead:
            self.is_ahead = False
            return False
        self.finished += micro_batches
        self._offset += micro_batches
        self.running.setdefault(self._runs[0].lane, RunningSum()).length += micro_batches
        return not self.todo()

    def end_run(self) -> None:
        """End the present run."""
        self._runs, self._offset = self._runs[1:], 0

    def may_go_ahead(self, run: Run) -> bool:
        """Return whether the run waits for a peer's sum, and another of its micro-batches may be computed meanwhile."""
        return (
            run.source is not None and run.lane not in self.from_peers and bool(self.todo()) and len(self.ahead) < AHEAD
        )

    def go_ahead(self) -> None:
        """Note that the next micro-batch is computed ahead."""
        self.ahead.append(RunningSum(1))
        self.is_ahead = True

    def drop_ahead(self) -> None:
        """Drop the micro-batch that is computed ahead: it is to be computed once more."""
        self.ahead.pop()
        self.is_ahead = False

    @property
    def computed_ahead(self) -> tuple[int, ...]:
        """Return the micro-batches of the present run that are in no sum yet."""
        return self._runs[0].micro_batches[self._offset :][: len(self.ahead)] if self.ahead else ()

    def receive(self, lane: int, prefix: RunningSum) -> None:
        """Take the lane's running sum, which has come from a peer, and add to it what was computed ahead."""
        parts = (prefix, *self.ahead)
        self.running[lane] = RunningSum(
            sum(part.length for part in parts), sum(part.loss_sum for part in parts), sum(part.tokens for part in parts)
        )
        self.from_peers[lane] = prefix
        self.finished += len(self.ahead)
        self._offset += len(self.ahead)
        self.ahead = []

    def assign_lanes(self, assignment: Assignment, rank: int, repeated: int = 0) -> None:
        """Set what is valid here and what is to be computed from now on. `repeated`: so many were another replica's."""
        valid = assignment.valid[rank]
        self.lane_assignment, self.rank, self.repeated = assignment, rank, self.repeated + repeated
        self.running = {lane: partial for lane, partial in self.running.items() if self.lanes.of(lane)[0] in valid}
        self.from_peers, self.ahead = {}, []
        self.assignment, self.finished = [*sorted(valid), *assignment.micro_batches(rank)], len(valid)
        self._runs, self._offset = assignment.runs[rank], 0

    def sums(self) -> tuple[float, int]:
        """Return the loss and the tokens that this replica accounts for."""
        own_sums, peer_sums = self.running.values(), self.from_peers.values()
        loss_sum = sum(partial.loss_sum for partial in own_sums) - sum(partial.loss_sum for partial in peer_sums)
        return loss_sum, sum(partial.tokens for partial in own_sums) - sum(partial.tokens for partial in peer_sums)

    def for_iteration(self, iteration: int) -> IterationLedger:
        """Return a ledger for another iteration, with the same assignment."""
        ledger = LaneLedger(iteration, lanes=self.lanes)
        if self.lane_assignment is not None:
            ledger.assign_lanes(self.lane_assignment, self.rank)
        return ledger


@dataclass(frozen=True, slots=True)
class ReplicaAccount:
    """What one replica contributed to an iteration. Travels as a row of signed 64-bit integers."""

    iteration: int
    micro_batches: int
    samples: int
    samples_digest: int
    loss_sum: float
    tokens: int
    repeated: int
    surplus: bool = False

    def row(self) -> list[int]:
        """Return nine signed 64-bit integers; the loss as the bits of its float64. (Older hooks read a number where 0
        is.)"""
        (loss_bits,) = struct.unpack("<q", struct.pack("<d", self.loss_sum))
        return [
            self.iteration, self.micro_batches, self.samples, self.samples_digest, loss_bits, self.tokens,
            self.repeated, 0, int(self.surplus),
        ]  # fmt: skip

    @staticmethod
    def from_row(row: Sequence[int]) -> ReplicaAccount:
        """Return the account of such a row; the inverse of `row`."""
        iteration, micro_batches, samples, digest, loss_bits, tokens, repeated, _, surplus = row
        (loss_sum,) = struct.unpack("<d", struct.pack("<q", loss_bits))
        return ReplicaAccount(iteration, micro_batches, samples, digest, loss_sum, tokens, repeated, bool(surplus))


@dataclass(frozen=True, slots=True)
class Total:
    """All replicas' accounts of one iteration, in rank order, reduced under `generation`."""

    generation: int
    accounts: tuple[ReplicaAccount, ...]

    def check(self, iteration: int, micro_batches: int) -> None:
        """Require every micro-batch of `iteration` exactly once, tokens to divide by, and sums that are right. Raises
        RuntimeError."""
        count = sum(account.micro_batches for account in self.accounts)
        if count != micro_batches or any(account.iteration != iteration for account in self.accounts):
            raise RuntimeError(
                f"iteration {iteration}: the replicas account for {count} of {micro_batches} micro-batches:"
                f" {self.accounts}"
            )
        if self.tokens <= 0:
            raise RuntimeError(f"iteration {iteration}: no tokens were added; call step.add(loss_sum, tokens)")
        if any(account.surplus for account in self.accounts):
            raise RuntimeError(
                f"iteration {iteration}: a parameter got more than one gradient from a micro-batch, after its bucket"
                " had been reduced; attach the hook with overlap=False"
            )

    @property
    def tokens(self) -> int:
        """Return the tokens over all replicas."""
        return sum(account.tokens for account in self.accounts)

    @property
    def loss(self) -> float:
        """Return the mean loss per token; summed in rank order, so that all ranks have the same bits."""
        return sum(account.loss_sum for account in self.accounts) / self.tokens

    @property
    def samples(self) -> int:
        """Return the samples over all replicas."""
        return sum(account.samples for account in self.accounts)

    @property
    def samples_digest(self) -> int:
        """Return the sum of the replicas' digests, modulo DIGEST_MODULUS."""
        return sum(account.samples_digest for account in self.accounts) % DIGEST_MODULUS

    @property
    def repeated(self) -> int:
        """Return the micro-batches that were computed again, over all replicas."""
        return sum(account.repeated for account in self.accounts)

    @property
    def micro_batches_by_rank(self) -> tuple[int, ...]:
        """Return how many micro-batches each replica has computed."""
        return tuple(account.micro_batches for account in self.accounts)
