"""A checksum of a replica's parameters: replicas hold the same bits, or one of them is broken.

Rules
-----
* Sums of the bits taken as integers, each tensor's times its own odd number: exact, in any order, on any device, as
  fast as memory is read.
* The majority is right. Without one, no verdict is possible.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MODULUS = 2**62


def checksum(parameters: Iterable[torch.Tensor]) -> int:
    """Of the tensors' bits, below 2**62 and above 0 (0 says: none was made)."""
    sums = [_bits(parameter).sum(dtype=torch.int64) for parameter in parameters if parameter.numel()]
    if not sums:
        return 1
    total = sum((2 * number + 1) * value for number, value in enumerate(torch.stack(sums).tolist()))
    return int(total % (_MODULUS - 1)) + 1


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().contiguous()
    return plain.view(_INTEGERS[plain.element_size()])


def odd_ones(checksums: Sequence[int]) -> tuple[int, ...] | None:
    """The ranks that differ from the majority; None without a majority."""
    value, count = Counter(checksums).most_common(1)[0]
    if 2 * count <= len(checksums):
        return None
    return tuple(rank for rank, other in enumerate(checksums) if other != value)
