"""Classifies the exceptions of a training process: one table, read from the top, the first match counts. Reports leave
without the secrets of the task."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Mapping
from dataclasses import dataclass

from msgspec.structs import replace

from unicrond.agents.protocol.messages import Reporter
from unicrond.events.host.masking import Mask, values_in
from unicrond.events.vocabulary import ErrorKind, ErrorReported, Phase, TaskSpec

_MESSAGE_CHARS = 1024
_DETAIL_CHARS = 32768


class NanLoss(ArithmeticError):
    """A micro-batch's loss is not a finite number."""


class LeftEarly(RuntimeError):
    """The program has left hook.steps() before its end, or ended with code 0 in mid-training."""


class TrainsAlone(RuntimeError):
    """The program trains without the hook, in each worker by itself."""


@dataclass(frozen=True, slots=True)
class Symptom:
    """A row: the exception's type name and text (regular expressions, searched), and what they mean.

    `name` is the row's own. `phase` None: the phase in which the worker was.
    """

    name: str
    type_name: str
    text: str
    kind: ErrorKind
    phase: Phase | None = None


SYMPTOMS: tuple[Symptom, ...] = (
    Symptom("left the loop early", r"^LeftEarly$", r"", "left_early"),
    Symptom("loss is not a number", r"^NanLoss$", r"", "nan_loss"),
    Symptom(
        "gradient is not a number",
        r"",
        r"[Ff]ound (NaN|Inf) in local|Unexpected result (nan|inf)",
        "nan_loss",
        "backward",
    ),
    Symptom("memory of the device", r"OutOfMemoryError", r"", "out_of_memory"),
    Symptom("memory of the host", r"^MemoryError$", r"", "out_of_memory"),
    Symptom(
        "memory, by text",
        r"",
        r"can't allocate memory|CUDA out of memory|CUDA error: out of memory|Cannot allocate memory"
        r"|CUBLAS_STATUS_ALLOC_FAILED",
        "out_of_memory",
    ),
    Symptom("ECC", r"", r"uncorrectable ECC|\bECC error", "ecc_error"),
    Symptom("NVLink", r"", r"\bNVLink\b|\bNVSwitch\b", "nvlink_error"),
    Symptom("DMA mapping", r"", r"\bDMA map", "dma_error"),
    Symptom(
        "driver",
        r"",
        r"CUDA driver|driver version|driver shutting down|no CUDA-capable device|GPU is lost|device\(s\) is/are busy"
        r"|system not yet initialized",
        "driver_error",
    ),
    Symptom(
        "illegal memory access",
        r"",
        r"illegal memory access|misaligned address|invalid program counter|illegal instruction was encountered"
        r"|unspecified launch failure",
        "illegal_memory_access",
    ),
    Symptom(
        "NCCL itself",
        r"",
        r"NCCL error.*(unhandled cuda error|internal error|invalid (usage|argument))"
        r"|nccl(UnhandledCudaError|InternalError|InvalidUsage|InvalidArgument)|NCCL communicator cannot be aborted",
        "nccl_error",
    ),
    Symptom("CUDA, by type", r"AcceleratorError", r"", "cuda_error"),
    Symptom("CUDA, by text", r"", r"CUDA error|cuBLAS|CUBLAS_STATUS|cuDNN error|device-side assert", "cuda_error"),
    Symptom("rendezvous store", r"^Dist(Store|Network)Error$", r"", "store_error"),
    Symptom("rendezvous store, by text", r"", r"TCPStore|recvValue failed", "store_error"),
    Symptom(
        "collective timed out",
        r"",
        r"Timed out waiting|collective operation timeout|[Ww]atchdog caught collective|NCCL error: timeout",
        "collective_timeout",
    ),
    Symptom(
        "network",
        r"",
        r"Connection (closed|reset) by peer|gloo.*(EnforceNotMet|IoException)|Broken pipe|NCCL error|ncclRemoteError"
        r"|ncclSystemError|Connection refused|Socket closed|Network is unreachable|No route to host",
        "connection_broken",
    ),
    Symptom("data, by type", r"^(DataError|UnicodeDecodeError|EOFError)$", r"", "data_error", "data"),
    Symptom(
        "data files", r"^(FileNotFoundError|IsADirectoryError|PermissionError)$", r"\.(bin|idx)\b", "data_error", "data"
    ),
    Symptom("data loader", r"", r"DataLoader worker", "data_error", "data"),
)
#: What no row describes: the user's own code, most likely. It keeps its text and its traceback.
DEFAULT: ErrorKind = "exception"


def find_symptom(error: BaseException) -> Symptom | None:
    """Return the row that describes the exception, or else what it was raised from; None for none."""
    visited: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in visited:
        visited.add(id(link))
        symptom = _symptom(type(link).__name__, str(link))
        if symptom is not None:
            return symptom
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return None


def classify(error: BaseException) -> tuple[ErrorKind, Phase | None]:
    """Return the kind of `error`, and the phase where the table knows it better than the worker."""
    symptom = find_symptom(error)
    return (DEFAULT, None) if symptom is None else (symptom.kind, symptom.phase)


def classify_broken(text: str) -> ErrorKind:
    """Return the kind of what broke a group, given as "TypeName: text" or as text alone."""
    name, colon, rest = text.partition(": ")
    symptom = _symptom(name if colon else "", rest if colon else text) or _symptom("", text)
    return "connection_broken" if symptom is None else symptom.kind


def _symptom(name: str, text: str) -> Symptom | None:
    for symptom in SYMPTOMS:
        if re.search(symptom.type_name, name) and re.search(symptom.text, text):
            return symptom
    return None


def error_report(
    reporter: Reporter, error: BaseException, generation: int, iteration: int, phase: Phase
) -> ErrorReported:
    """Return the event that reports `error` to the agent: type and text, and the traceback's end."""
    kind, known_phase = classify(error)
    detail = "".join(traceback.format_exception(error))
    return ErrorReported(
        **reporter,
        kind=kind,
        generation=generation,
        iteration=iteration,
        phase=known_phase or phase,
        message=f"{type(error).__name__}: {error}"[:_MESSAGE_CHARS],
        detail=detail[-_DETAIL_CHARS:],
    )


def mask_of(spec: TaskSpec, environ: Mapping[str, str] = os.environ) -> Mask:
    """Return a mask that hides the secrets of the task, as this worker's environment has them."""
    return Mask([*(environ[name] for name in spec.secrets if name in environ), *values_in(spec.env)])


def redact(report: ErrorReported, mask: Mask) -> ErrorReported:
    """Return the report without the text that the mask hides."""
    return replace(
        report,
        message=mask.text(report.message)[:_MESSAGE_CHARS],
        detail=mask.text(report.detail)[-_DETAIL_CHARS:],
    )
