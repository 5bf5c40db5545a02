"""Which samples an iteration must use, computed without the trainer's code (see agents/protocol/sampling.py)."""

from __future__ import annotations

from hashlib import blake2b
from math import gcd
from pathlib import Path


def samples_in_corpus(prefix: Path, seq: int) -> int:
    """Windows of `seq` bytes (and the one after them) in an indexed data set of bytes."""
    return (prefix.with_name(prefix.name + ".bin").stat().st_size - 1) // seq


def expected_digest(seed: int, first: int, last: int, global_batch: int, dataset_size: int) -> tuple[int, int]:
    """(digest, number) of the samples of iterations first..last."""
    total = number = 0
    for iteration in range(first, last + 1):
        for position in range((iteration - 1) * global_batch, iteration * global_batch):
            epoch, offset = divmod(position, dataset_size)
            drawn = blake2b(f"{seed}:{epoch}".encode(), digest_size=16).digest()
            step = int.from_bytes(drawn[:8], "big") % dataset_size
            while gcd(step, dataset_size) != 1:
                step = (step + 1) % dataset_size
            sample = (step * offset + int.from_bytes(drawn[8:], "big") % dataset_size) % dataset_size
            word = blake2b(f"{iteration}:{sample}".encode(), digest_size=8).digest()
            total += int.from_bytes(word, "big") % 2**61
            number += 1
    return total % 2**61, number
