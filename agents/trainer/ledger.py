"""A replica's account of one iteration: what it holds, what it has finished, what came of it."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

from agents.protocol.sampling import DIGEST_MODULUS, Sampling, samples_digest
from agents.trainer.gradients.lanes import AHEAD, Deal, Lanes, Run

#: Losses are counted in these units: float64 sums of them are exact, so they depend on no order, up to 2**29.
_LOSS_UNITS = 2.0**24


def exactly(loss_sum: float) -> float:
    """The loss as it is counted, so that sums of it are the same in any order."""
    return round(loss_sum * _LOSS_UNITS) / _LOSS_UNITS


@dataclass(slots=True)
class Ledger:
    """`held`: micro-batches in the order they were dealt, of which the first `finished` are done.

    `loss_sum`: sum of the token losses; `tokens`: how many; `redone`: held because another replica was lost.
    """

    iteration: int
    held: list[int] = field(default_factory=list)
    finished: int = 0
    loss_sum: float = 0.0
    tokens: int = 0
    redone: int = 0

    @property
    def run(self) -> Run | None:
        """What is to be computed next; None: nothing is left."""
        return Run(0, tuple(self.held)) if self.finished < len(self.held) else None

    @property
    def done(self) -> tuple[int, ...]:
        """With lanes: the micro-batches that are in this replica's sums."""
        return ()

    def todo(self) -> list[int]:
        """The micro-batches of the present run that are not finished, in their order."""
        return self.held[self.finished :]

    def left(self) -> list[int]:
        """All that are not finished, in their order."""
        return self.todo()

    def is_last(self, todo: Sequence[int]) -> bool:
        """Behind these micro-batches no others are left, and what comes of them stays here."""
        return len(todo) == len(self.held) - self.finished

    def add(self, loss_sum: float, tokens: int) -> None:
        """Account for finished micro-batches; `loss_sum` is finite."""
        self.loss_sum += exactly(loss_sum)
        self.tokens += tokens

    def finish(self, micro_batches: int) -> bool:
        """So many are finished. Whether the present run is over."""
        self.finished += micro_batches
        return not self.todo()

    def end_run(self) -> None:
        """The present run is over."""

    def sums(self) -> tuple[float, int]:
        """Loss and tokens of what it holds."""
        return self.loss_sum, self.tokens

    def anew(self, iteration: int) -> Ledger:
        """Another iteration's, with the same to do."""
        return Ledger(iteration, list(self.held))

    def deal(self, micro_batches: Sequence[int], redone: bool) -> None:
        """Hold these too. `redone`: another replica had worked on them."""
        self.held.extend(micro_batches)
        if redone:
            self.redone += len(micro_batches)

    def account(self, sampling: Sampling, surplus: bool = False) -> Account:
        """The finished iteration's account of this replica. `surplus`: its accumulation's."""
        samples = [sample for micro_batch in self.held for sample in sampling.samples(self.iteration, micro_batch)]
        return Account(
            iteration=self.iteration,
            micro_batches=self.finished,
            samples=len(samples),
            samples_digest=samples_digest(self.iteration, samples),
            loss_sum=self.loss_sum,
            tokens=self.tokens,
            redone=self.redone,
            surplus=surplus,
        )


@dataclass(slots=True)
class Running:
    """A running sum of a lane: how many micro-batches are in it, their loss and tokens."""

    length: int = 0
    loss_sum: float = 0.0
    tokens: int = 0


@dataclass(slots=True)
class LaneLedger(Ledger):
    """Where the sum is fixed (`lanes.py`). `held` is what is kept, then the runs' micro-batches. `deal`, `rank`: what
    it was dealt. `running`: of each lane that it has any of. `taken`: what others have given of these; the givers
    account for that, until a new deal says that it is this replica's. `ahead`: accounts of micro-batches of the present
    run that were computed before what it goes on with was here.
    """

    lanes: Lanes = field(kw_only=True)
    the_deal: Deal | None = None
    rank: int = 0
    running: dict[int, Running] = field(default_factory=dict)
    taken: dict[int, Running] = field(default_factory=dict)
    ahead: list[Running] = field(default_factory=list)
    _is_ahead: bool = False
    _runs: tuple[Run, ...] = ()
    _into: int = 0

    @property
    def run(self) -> Run | None:
        """The next one, also if nothing is to be computed for it."""
        return self._runs[0] if self._runs else None

    @property
    def runs(self) -> tuple[Run, ...]:
        """Those that are not over."""
        return self._runs

    @property
    def done(self) -> tuple[int, ...]:
        """The micro-batches that are in this replica's sums, its own and those that others have given."""
        return tuple(m for lane, own in self.running.items() for m in self.lanes.of(lane)[: own.length])

    def todo(self) -> list[int]:
        """The micro-batches of the present run that are not finished, in their order."""
        done = self._into + len(self.ahead) - self._is_ahead
        return list(self._runs[0].micro_batches[done:]) if self._runs else []

    def left(self) -> list[int]:
        """All that are not finished, in their order."""
        return [*self.todo(), *(micro_batch for run in self._runs[1:] for micro_batch in run.micro_batches)]

    def is_last(self, todo: Sequence[int]) -> bool:
        """Behind these micro-batches no others are left, and what comes of them stays here."""
        return len(todo) == len(self.held) - self.finished and self._runs[0].target is None and not self.ahead

    def add(self, loss_sum: float, tokens: int) -> None:
        """Account for micro-batches of the present run; `loss_sum` is finite."""
        own = self.ahead[-1] if self._is_ahead else self.running.setdefault(self._runs[0].lane, Running())
        own.loss_sum += exactly(loss_sum)
        own.tokens += tokens

    def finish(self, micro_batches: int) -> bool:
        """So many are finished. Whether the present run is over."""
        if self._is_ahead:
            self._is_ahead = False
            return False
        self.finished += micro_batches
        self._into += micro_batches
        self.running.setdefault(self._runs[0].lane, Running()).length += micro_batches
        return not self.todo()

    def end_run(self) -> None:
        """The present run is over."""
        self._runs, self._into = self._runs[1:], 0

    def may_go_ahead(self, run: Run) -> bool:
        """The run goes on with what is not here yet, and another of its micro-batches may be computed meanwhile."""
        return run.source is not None and run.lane not in self.taken and bool(self.todo()) and len(self.ahead) < AHEAD

    def go_ahead(self) -> None:
        """The next micro-batch is computed ahead."""
        self.ahead.append(Running(1))
        self._is_ahead = True

    @property
    def computed_ahead(self) -> tuple[int, ...]:
        """The micro-batches that are in no sum yet."""
        return self._runs[0].micro_batches[self._into :][: len(self.ahead)] if self.ahead else ()

    def take(self, lane: int, given: Running) -> None:
        """The running sum of the lane is here, and what was computed ahead is added to it."""
        every = (given, *self.ahead)
        self.running[lane] = Running(
            sum(one.length for one in every), sum(one.loss_sum for one in every), sum(one.tokens for one in every)
        )
        self.taken[lane] = given
        self.finished += len(self.ahead)
        self._into += len(self.ahead)
        self.ahead = []

    def hold(self, deal: Deal, rank: int, redone: int = 0) -> None:
        """What counts here, and what is to be computed, from now on. `redone`: that many had been another's."""
        kept = deal.kept[rank]
        self.the_deal, self.rank, self.redone = deal, rank, self.redone + redone
        self.running = {lane: own for lane, own in self.running.items() if self.lanes.of(lane)[0] in kept}
        self.taken, self.ahead = {}, []
        self.held, self.finished = [*sorted(kept), *deal.dealt(rank)], len(kept)
        self._runs, self._into = deal.runs[rank], 0

    def sums(self) -> tuple[float, int]:
        """Loss and tokens of what it accounts for."""
        every, others = self.running.values(), self.taken.values()
        loss_sum = sum(own.loss_sum for own in every) - sum(own.loss_sum for own in others)
        return loss_sum, sum(own.tokens for own in every) - sum(own.tokens for own in others)

    def anew(self, iteration: int) -> Ledger:
        """Another iteration's, with the same to do."""
        fresh = LaneLedger(iteration, lanes=self.lanes)
        if self.the_deal is not None:
            fresh.hold(self.the_deal, self.rank)
        return fresh


@dataclass(frozen=True, slots=True)
class Account:
    """What one replica contributed to an iteration. Travels as a row of signed 64-bit integers."""

    iteration: int
    micro_batches: int
    samples: int
    samples_digest: int
    loss_sum: float
    tokens: int
    redone: int
    surplus: bool = False

    def row(self) -> list[int]:
        """Nine signed 64-bit integers; the loss as the bits of its float64. (Older hooks read a number where 0 is.)"""
        (loss_bits,) = struct.unpack("<q", struct.pack("<d", self.loss_sum))
        return [
            self.iteration, self.micro_batches, self.samples, self.samples_digest, loss_bits, self.tokens, self.redone,
            0, int(self.surplus),
        ]  # fmt: skip

    @staticmethod
    def from_row(row: Sequence[int]) -> Account:
        """The inverse of `row`."""
        iteration, micro_batches, samples, digest, loss_bits, tokens, redone, _, surplus = row
        (loss_sum,) = struct.unpack("<d", struct.pack("<q", loss_bits))
        return Account(iteration, micro_batches, samples, digest, loss_sum, tokens, redone, bool(surplus))


@dataclass(frozen=True, slots=True)
class Total:
    """All replicas' accounts of one iteration, in rank order, reduced under `generation`."""

    generation: int
    accounts: tuple[Account, ...]

    def check(self, iteration: int, micro_batches: int) -> None:
        """Every micro-batch of `iteration` exactly once, something to divide by, sums that are right. Raises
        RuntimeError."""
        counted = sum(account.micro_batches for account in self.accounts)
        if counted != micro_batches or any(account.iteration != iteration for account in self.accounts):
            raise RuntimeError(f"iteration {iteration}: {counted} of {micro_batches} micro-batches: {self.accounts}")
        if self.tokens <= 0:
            raise RuntimeError(f"iteration {iteration}: no tokens were added; call step.add(loss_sum, tokens)")
        if any(account.surplus for account in self.accounts):
            raise RuntimeError(
                f"iteration {iteration}: a parameter got more than one gradient from a micro-batch, after its bucket"
                " had been reduced; attach the hook with overlap=False"
            )

    @property
    def tokens(self) -> int:
        """Over all replicas."""
        return sum(account.tokens for account in self.accounts)

    @property
    def loss(self) -> float:
        """Mean loss per token; summed in rank order, so that all ranks have the same bits."""
        return sum(account.loss_sum for account in self.accounts) / self.tokens

    @property
    def samples(self) -> int:
        """Over all replicas."""
        return sum(account.samples for account in self.accounts)

    @property
    def samples_digest(self) -> int:
        """The sum of the replicas' digests, modulo DIGEST_MODULUS."""
        return sum(account.samples_digest for account in self.accounts) % DIGEST_MODULUS

    @property
    def redone(self) -> int:
        """Micro-batches over all replicas."""
        return sum(account.redone for account in self.accounts)

    @property
    def micro_batches_by_rank(self) -> tuple[int, ...]:
        """How many each replica has done."""
        return tuple(account.micro_batches for account in self.accounts)
