"""Judges what replicas differ in: is one of them at fault, or the program? Pure; all replicas judge the same rows.

Rules
-----
* *A replica's*: more than half of all replicas have the same, and it has something else. It is accused by the others.
* *The program's*: no majority has the same; or a result differs on one and the same replica, where no majority is
  steady. Nobody is accused. So of two replicas neither is.
* A *newcomer* has received its state from a replica that trains, has had the same parameters as all others since, and
  that in NEWCOMER_ITERATIONS at most. Where none but newcomers differ, the program keeps something that is not part of
  the state. (Of faults of memory few come just then.) So no newcomer is accused, in whichever group it is by then. A
  replica that receives the state because it was at fault is none.
* Gradients of one micro-batch that differ by rounding (ROUNDING of their norm) are other kernels, devices or versions:
  no bits are kept then (`process/determinism.py`), but it is the same training.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple

from unicrond.agents.trainer.detection.checksum import minority_ranks
from unicrond.events.vocabulary import DivergenceSign

NEWCOMER_ITERATIONS = 10
ROUNDING = 1e-3
#: Marks a number that holds a norm as well; hooks of before send smaller ones.
_WITH_NORM = 2**62
_BITS = 31


class ReplicaDifference(NamedTuple):
    """Say what replicas differ in. `sign`: of the program's divergence, None where it is not the program's. `odd`: the
    ranks of replicas at fault."""

    sign: DivergenceSign | None = None
    odd: tuple[int, ...] = ()


def judge_parameters(checksums: Sequence[int], newcomers: Collection[int]) -> ReplicaDifference:
    """Judge the checksums of all replicas' parameters, in rank order; 0: a replica made none. `newcomers`: their
    ranks."""
    if 0 in checksums or len(set(checksums)) < 2:
        return ReplicaDifference()
    settled = {number for rank, number in enumerate(checksums) if rank not in newcomers}
    if len(settled) < 2:
        return ReplicaDifference("newcomer")
    minority = minority_ranks(checksums)
    if minority is None:
        return ReplicaDifference("parameters")
    return ReplicaDifference(odd=tuple(rank for rank in minority if rank not in newcomers))


def gradients_number(checksum: int, norm: float) -> int:
    """Return checksum and norm of a micro-batch's gradients as one positive number of 63 bits."""
    norm_bits: int = struct.unpack("<I", struct.pack("<f", min(abs(norm), 3e38)))[0]
    return _WITH_NORM | norm_bits << _BITS | checksum % (1 << _BITS)


def judge_gradients(rows: Sequence[Sequence[int]]) -> ReplicaDifference:
    """Judge the numbers of one micro-batch's gradients (`gradients_number`) that each replica has computed twice."""
    numbers = [number for row in rows for number in row]
    if len(set(numbers)) == 1 or min(numbers) < _WITH_NORM or _are_close(numbers):
        return ReplicaDifference()
    steady = Counter(row[0] for row in rows if len(set(row)) == 1)
    confirmed, count = steady.most_common(1)[0] if steady else (0, 0)
    if 2 * count > len(rows):
        return ReplicaDifference(odd=tuple(rank for rank, row in enumerate(rows) if not _are_close([confirmed, *row])))
    return ReplicaDifference("unequal" if all(_are_close(row) for row in rows) else "unsteady")


def _are_close(numbers: Sequence[int]) -> bool:
    """Return whether the norms differ by rounding alone. Those that overflow, as with a loss scale, say nothing."""
    norms = [_norm(number) for number in numbers]
    return not all(map(math.isfinite, norms)) or max(norms) - min(norms) <= ROUNDING * max(norms)


def _norm(number: int) -> float:
    (norm,) = struct.unpack("<f", struct.pack("<I", (number - _WITH_NORM) >> _BITS))
    return float(norm)
