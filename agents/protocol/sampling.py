"""The samples of an iteration: a pure function of (seed, iteration, micro-batch), shared by all replicas.

Rules
-----
* Positions count through training: sample `j` of micro-batch `m` of iteration `i` (from 1) stands at position
  `(i - 1) * global_batch + m * micro_batch + j`.
* With a data set of `n` samples, position `p` lies in epoch `p // n` and names sample `(a * (p % n) + b) % n`: an
  affine permutation with `gcd(a, n) == 1`, so no sample comes twice within an epoch. `a` and `b` are drawn from
  `blake2b(f"{seed}:{epoch}")`. Without a data set (a stream) the position itself is the sample.
* `sample_hash` and its sum modulo 2**61 stand in the log, so that anybody can recompute what was trained on.

* Where the `ranks` workers of a replica have samples of their own each, micro-batch `m` of the replica is their
  micro-batches `m * ranks` to `m * ranks + ranks - 1`, in the order of their ranks: together the same samples.

No torch here: the tests of the log use this module too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import blake2b
from math import gcd

DIGEST_MODULUS = 2**61


def sample_hash(iteration: int, sample: int) -> int:
    """Return the hash of one use of one sample, in [0, 2**61)."""
    return int.from_bytes(blake2b(f"{iteration}:{sample}".encode(), digest_size=8).digest(), "big") % DIGEST_MODULUS


def samples_digest(iteration: int, samples: Iterable[int]) -> int:
    """Sum the samples' hashes modulo 2**61; the order does not matter, how often each occurs does."""
    return sum(sample_hash(iteration, sample) for sample in samples) % DIGEST_MODULUS


def work_seed(seed: int, iteration: int, micro_batch: int, purpose: str = "work") -> int:
    """Return the seed of every random number for one micro-batch, in [0, 2**62), the same on every replica. `purpose`:
    "data" for those that its loading draws."""
    digest = blake2b(f"{purpose}:{seed}:{iteration}:{micro_batch}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % 2**62


@lru_cache(maxsize=16)
def _epoch_permutation(seed: int, epoch: int, size: int) -> tuple[int, int]:
    digest = blake2b(f"{seed}:{epoch}".encode(), digest_size=16).digest()
    multiplier = int.from_bytes(digest[:8], "big") % size
    while gcd(multiplier, size) != 1:
        multiplier = (multiplier + 1) % size
    return multiplier, int.from_bytes(digest[8:], "big") % size


@dataclass(frozen=True, slots=True)
class Sampling:
    """A task's stream of samples. `dataset_size` in samples; None: endless, the position is the sample. `ranks`:
    workers that share a replica's samples, each of which computes `micro_batch` of them; 1: none do."""

    seed: int
    global_batch: int
    micro_batch: int
    dataset_size: int | None
    ranks: int = 1

    def __post_init__(self) -> None:
        if self.dataset_size is not None and self.dataset_size < 1:
            raise ValueError(
                f"dataset_size: {self.dataset_size} samples; give at least one, for example by a longer text"
            )
        if self.global_batch % self.micro_batch:
            raise ValueError(
                f"global_batch: {self.global_batch} is not a multiple of micro_batch {self.micro_batch}; make it one"
            )

    def samples(self, iteration: int, micro_batch: int) -> tuple[int, ...]:
        """Return the sample indices of one micro-batch, in order."""
        first = (iteration - 1) * self.global_batch + micro_batch * self.micro_batch
        return tuple(self._sample_at(position) for position in range(first, first + self.micro_batch))

    @property
    def of_replica(self) -> Sampling:
        """Return the same stream, by the micro-batches that whole replicas are assigned."""
        return replace(self, micro_batch=self.micro_batch * self.ranks, ranks=1)

    def _sample_at(self, position: int) -> int:
        if self.dataset_size is None:
            return position
        epoch, offset = divmod(position, self.dataset_size)
        multiplier, shift = _epoch_permutation(self.seed, epoch, self.dataset_size)
        return (multiplier * offset + shift) % self.dataset_size
