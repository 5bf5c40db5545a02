"""A replica's account of one iteration: what it holds, what it has finished, what came of it."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

from agents.protocol.sampling import DIGEST_MODULUS, Sampling, samples_digest

#: Exact accumulation holds sums of gradients up to this (`accumulation.py`).
PEAK_MAX = 2.0**22
#: Losses are counted in these units: float64 sums of them are exact, so they depend on no order, up to 2**29.
_LOSS_UNITS = 2.0**24


class Overflow(ArithmeticError):
    """Gradients that exact accumulation cannot hold."""


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

    def todo(self) -> list[int]:
        """The micro-batches that are held and not finished, in their order."""
        return self.held[self.finished :]

    def add(self, loss_sum: float, tokens: int) -> None:
        """Account for finished micro-batches; `loss_sum` is finite."""
        self.loss_sum += round(loss_sum * _LOSS_UNITS) / _LOSS_UNITS
        self.tokens += tokens

    def deal(self, micro_batches: Sequence[int], redone: bool) -> None:
        """Hold these too. `redone`: another replica had worked on them."""
        self.held.extend(micro_batches)
        if redone:
            self.redone += len(micro_batches)

    def account(self, sampling: Sampling, peak: float = 0.0, surplus: bool = False) -> Account:
        """The finished iteration's account of this replica. `peak`, `surplus`: its accumulation's."""
        samples = [sample for micro_batch in self.held for sample in sampling.samples(self.iteration, micro_batch)]
        return Account(
            iteration=self.iteration,
            micro_batches=self.finished,
            samples=len(samples),
            samples_digest=samples_digest(self.iteration, samples),
            loss_sum=self.loss_sum,
            tokens=self.tokens,
            redone=self.redone,
            peak=peak,
            surplus=surplus,
        )


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
    peak: float = 0.0
    surplus: bool = False

    def row(self) -> list[int]:
        """Nine signed 64-bit integers; floats as the bits of their float64."""
        loss_bits, peak_bits = struct.unpack("<qq", struct.pack("<dd", self.loss_sum, self.peak))
        return [
            self.iteration, self.micro_batches, self.samples, self.samples_digest, loss_bits, self.tokens, self.redone,
            peak_bits, int(self.surplus),
        ]  # fmt: skip

    @staticmethod
    def from_row(row: Sequence[int]) -> Account:
        """The inverse of `row`."""
        iteration, micro_batches, samples, digest, loss_bits, tokens, redone, peak_bits, surplus = row
        loss_sum, peak = struct.unpack("<dd", struct.pack("<qq", loss_bits, peak_bits))
        return Account(
            iteration, micro_batches, samples, digest, loss_sum, tokens, redone, peak, bool(surplus)
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Total:
    """All replicas' accounts of one iteration, in rank order, reduced under `generation`."""

    generation: int
    accounts: tuple[Account, ...]

    def check(self, iteration: int, micro_batches: int) -> None:
        """Every micro-batch of `iteration` exactly once, something to divide by, sums that are right. Raises
        RuntimeError, and Overflow."""
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
        peak = sum(account.peak for account in self.accounts)
        if not peak <= PEAK_MAX:
            raise Overflow(
                f"iteration {iteration}: gradients add up to {peak:.4g}, accumulation: exact holds"
                f" {PEAK_MAX:.0f}; use accumulation: float, or a smaller loss"
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
