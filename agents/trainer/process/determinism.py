"""Tests, where a task begins, whether a micro-batch has the same bits wherever it is computed.

Rules
-----
* Where no member of a new group has state of its own, each computes one micro-batch, the same on all, twice, for its
  bits alone. They are compared with each other, and with the other replicas'.
* Bits differ where kernels are not deterministic, or where GPUs are of different types. Then no sum keeps its bits over
  a change of the assignment; one line says so. `require` has the worker end instead; `off` leaves the check out.
* A worker that joins later computes none twice: all would wait. Each says with its position on what it computes
  (`environment`: the device's type, the versions of torch, CUDA and megatron-core, numerics flags, and on the CPU its
  instructions and threads). Where that is other than the first member's, each member reports it, and with `require` the
  worker that differs ends.

What computes the micro-batch: `hook.py`.
"""

from __future__ import annotations

import platform
import sys
import zlib
from collections.abc import Sequence

import torch

#: The one that is computed.
MICRO_BATCH = 0


class NotDeterministic(RuntimeError):
    """The task requires the same bits on all workers, and these compute different ones."""


class Diverged(RuntimeError):
    """The program trains something else on each replica, or each time (`detection/divergence.py`)."""


def compare_checksums(rows: Sequence[Sequence[int]]) -> str:
    """Return in words how the replicas' checksums differ, each of both times, in rank order; "" where all are the
    same."""
    unsteady = [rank for rank, (first, second) in enumerate(rows) if first != second]
    if unsteady:
        return (
            f"on {_replicas(unsteady)} a micro-batch computed twice has different bits: use deterministic kernels"
            " (torch.use_deterministic_algorithms)"
        )
    deviating = [rank for rank, row in enumerate(rows) if row != rows[0]]
    if deviating:
        subject = f"{_replicas(deviating)} {_compute(deviating)}"
        return f"{subject} other bits than replica 0: use GPUs of one type, and equal software"
    return ""


def environment() -> str:
    """Describe what the bits of this process's kernels depend on."""
    if torch.cuda.is_initialized():
        versions = f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {versions}{_core()}{_flags()}"
    processor = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return f"{processor}, {torch.get_num_threads()} threads, torch {torch.__version__}{_core()}{_flags()}"


def _core() -> str:
    """Return the text that names megatron-core's release, since each trains differently; "" where the program has not
    loaded it. "" for 0.16 too: older hooks run with 0.16 alone and name no release, and do not deviate by that."""
    version = str(getattr(sys.modules.get("megatron.core"), "__version__", ""))
    return f", megatron-core {version}" if version and not version.startswith("0.16.") else ""


def _flags() -> str:
    """Name the numerics flags that are not torch's defaults, which older hooks do not describe."""
    precision = torch.get_float32_matmul_precision()
    flags = {
        f"{precision} precision of float32": precision != "highest",
        "cuDNN's benchmark": torch.backends.cudnn.benchmark,
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
    }
    return "".join(f", {name}" for name, is_set in flags.items() if is_set)


def environment_number(description: str) -> int:
    """Return a description as a number to compare, above 0."""
    return zlib.crc32(description.encode()) + 1


def deviating_ranks(numbers: Sequence[int]) -> tuple[int, ...]:
    """Return the ranks whose environment is not the first one's; 0: an older hook says none."""
    first = next((number for number in numbers if number), 0)
    return tuple(rank for rank, number in enumerate(numbers) if number not in (0, first))


def describe_deviation(ranks: Sequence[int], rank: int, description: str) -> str:
    """Return one line for the log of the worker of that rank."""
    this_worker = "this one too" if rank in ranks else "this one not"
    return f"{_replicas(ranks)} {_compute(ranks)} on something else than replica 0 ({this_worker}: {description})"


def _compute(ranks: Sequence[int]) -> str:
    return "compute" if len(ranks) > 1 else "computes"


def _replicas(ranks: Sequence[int]) -> str:
    return f"replica{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
