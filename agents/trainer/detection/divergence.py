"""Judges what replicas differ in: is one of them at fault, or the program? Pure; all replicas judge the same rows.

Rules
-----
* *A replica's*: more than half of all replicas have the same, and it has something else. The others accuse it.
* *The program's*: no majority has the same, or no majority is steady and one replica computes something else each time.
  Nobody is accused. So of two replicas neither is.
* A *newcomer* has received its state from a replica that trains. It has had the same parameters as all others in one to
  NEWCOMER_ITERATIONS iterations since. If only newcomers differ, the program keeps something that is not part of the
  state. (Few faults of memory come just then.) So no newcomer is accused, in whichever group it is by then. A replica
  at fault that receives the state anew is no newcomer.
* Gradients of one micro-batch that differ by rounding (ROUNDING of their norm) come from other kernels, devices or
  versions. They count as the same here, though no bits are kept then (`process/determinism.py`). More than half of the
  replicas confirm a result if their norms are close to each other.
* A norm that is not finite is a result like others. If most replicas have one, it says nothing: a loss scale is too
  large at first.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Collection, Sequence
from statistics import median
from typing import NamedTuple

from unicrond.agents.trainer.detection.checksum import minority_ranks
from unicrond.events.vocabulary import DivergenceSign

NEWCOMER_ITERATIONS = 10
ROUNDING = 1e-3
#: Marks a number that holds a norm as well; hooks of before send smaller ones.
_WITH_NORM = 2**62
_BITS = 31
#: Stands for the norms that a float32 does not hold.
_OVERFLOW = 3e38


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
    norm_bits: int = struct.unpack("<I", struct.pack("<f", min(abs(norm), _OVERFLOW)))[0]
    return _WITH_NORM | norm_bits << _BITS | checksum % (1 << _BITS)


def judge_gradients(rows: Sequence[Sequence[int]]) -> ReplicaDifference:
    """Judge the numbers of one micro-batch's gradients (`gradients_number`) that each replica has computed twice."""
    if min(number for row in rows for number in row) < _WITH_NORM:
        return ReplicaDifference()
    norms = [[_norm(number) for number in row] for row in rows]
    overflows = [row for row in norms if not any(map(math.isfinite, row))]
    if 2 * len(overflows) > len(rows):
        return ReplicaDifference()
    steady = sorted(row for row in norms if _are_close(row))
    confirmed = _largest_group(steady)
    if 2 * len(confirmed) > len(rows):
        middle = median(norm for row in confirmed for norm in row)
        return ReplicaDifference(odd=tuple(rank for rank, row in enumerate(norms) if not _are_close([middle, *row])))
    return ReplicaDifference("unequal" if len(steady) + len(overflows) == len(rows) else "unsteady")


def are_equal_but_for_rounding(numbers: Sequence[int]) -> bool:
    """Return whether these numbers of one micro-batch's gradients (`gradients_number`) differ by rounding alone."""
    return _are_close([_norm(number) for number in numbers])


def _largest_group(rows: Sequence[Sequence[float]]) -> Sequence[Sequence[float]]:
    """Return the longest stretch of the rows, which are in ascending order, of which all norms are close."""
    longest, first = rows[:0], 0
    for stop in range(1, len(rows) + 1):
        while not _are_close([norm for row in rows[first:stop] for norm in row]):
            first += 1
        longest = max(longest, rows[first:stop], key=len)
    return longest


def _are_close(norms: Sequence[float]) -> bool:
    """Return whether the norms differ by rounding alone."""
    return all(map(math.isfinite, norms)) and max(norms) - min(norms) <= ROUNDING * max(norms)


def _norm(number: int) -> float:
    """Return the norm of the number; infinity where it overflowed."""
    (norm,) = struct.unpack("<f", struct.pack("<I", (number - _WITH_NORM) >> _BITS))
    return float(norm) if norm < _OVERFLOW / 2 else math.inf
