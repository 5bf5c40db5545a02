"""What an exception in a training process most likely means: one table, read from the top, the first match counts."""

from __future__ import annotations

import re
import traceback
from dataclasses import dataclass

from agents.trainer.messages import Trouble
from events.vocabulary import ErrorKind, Phase

_MESSAGE_CHARS = 1024
_DETAIL_CHARS = 32768


class NanLoss(ArithmeticError):
    """A micro-batch's loss is not a finite number."""


@dataclass(frozen=True, slots=True)
class Symptom:
    """A row: the exception's type name and text (regular expressions, searched), and what they mean.

    `phase` None: the phase in which the worker was.
    """

    type_name: str
    text: str
    kind: ErrorKind
    phase: Phase | None = None


SYMPTOMS: tuple[Symptom, ...] = (
    Symptom(r"^NanLoss$", r"", "nan_loss"),
    Symptom(r"OutOfMemoryError", r"", "out_of_memory"),
    Symptom(r"^MemoryError$", r"", "out_of_memory"),
    Symptom(r"", r"DefaultCPUAllocator: can't allocate|CUDA out of memory|Cannot allocate memory", "out_of_memory"),
    Symptom(r"", r"uncorrectable ECC|CUDA error: uncorrectable|\bECC error", "ecc_error"),
    Symptom(r"", r"\bNVLink\b", "nvlink_error"),
    Symptom(r"", r"CUDA driver|driver version|no CUDA-capable device|GPU is lost", "driver_error"),
    Symptom(r"AcceleratorError", r"", "cuda_error"),
    Symptom(r"", r"CUDA error|cuBLAS|CUBLAS_STATUS|cuDNN error|device-side assert", "cuda_error"),
    Symptom(r"^DistStoreError$", r"", "store_error"),
    Symptom(r"^DistNetworkError$", r"", "store_error"),
    Symptom(r"", r"TCPStore|recvValue failed", "store_error"),
    Symptom(r"", r"Timed out waiting|collective operation timeout|[Ww]atchdog caught collective", "collective_timeout"),
    Symptom(
        r"",
        r"Connection (closed|reset) by peer|gloo.*(EnforceNotMet|IoException)|Broken pipe|NCCL error|ncclRemoteError"
        r"|ncclSystemError|Connection refused|Socket closed",
        "connection_broken",
    ),
    Symptom(r"^(DataError|UnicodeDecodeError|EOFError)$", r"", "data_error", "data"),
    Symptom(r"^(FileNotFoundError|IsADirectoryError|PermissionError)$", r"\.(bin|idx)\b", "data_error", "data"),
)


def classify(error: BaseException) -> tuple[ErrorKind, Phase | None]:
    """The kind of `error`, and the phase where the table knows it better than the worker."""
    symptom = _symptom(type(error).__name__, str(error))
    return ("exception", None) if symptom is None else (symptom.kind, symptom.phase)


def classify_broken(text: str) -> ErrorKind:
    """The kind of what broke a group, told as "TypeName: text" or as text alone."""
    name, colon, rest = text.partition(": ")
    symptom = _symptom(name if colon else "", rest if colon else text) or _symptom("", text)
    return "connection_broken" if symptom is None else symptom.kind


def _symptom(name: str, text: str) -> Symptom | None:
    for symptom in SYMPTOMS:
        if re.search(symptom.type_name, name) and re.search(symptom.text, text):
            return symptom
    return None


def trouble(error: BaseException, generation: int, iteration: int, phase: Phase) -> Trouble:
    """The message that tells the agent of `error`: type and text, and the traceback's end."""
    kind, known_phase = classify(error)
    detail = "".join(traceback.format_exception(error))
    return Trouble(
        kind=kind,
        generation=generation,
        iteration=iteration,
        phase=known_phase or phase,
        message=f"{type(error).__name__}: {error}"[:_MESSAGE_CHARS],
        detail=detail[-_DETAIL_CHARS:],
    )
