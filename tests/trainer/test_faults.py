"""What exceptions mean: at least one real message per row of the table, and what no row describes."""

from __future__ import annotations

import re

import pytest
import torch

from unicrond.agents.protocol.messages import Reporter
from unicrond.agents.trainer.loop import corpus
from unicrond.agents.trainer.process import faults
from unicrond.agents.trainer.process.faults import SYMPTOMS
from unicrond.core.faults.severity import SEVERITY

REPORTER = Reporter(node="n", task="t", worker="t.1")


class DistNetworkError(RuntimeError):
    """As torch names it."""


class DistStoreError(RuntimeError):
    """As torch names it."""


class AcceleratorError(RuntimeError):
    """As torch names it."""


#: Row -> exceptions that it must be the first to describe.
EXAMPLES: dict[str, list[BaseException]] = {
    "left the loop early": [faults.LeftEarly("the program left the loop over hook.steps() in iteration 3")],
    "loss is not a number": [faults.NanLoss("the loss of a micro-batch of iteration 3 is nan")],
    "gradient is not a number": [
        RuntimeError("found NaN in local grad norm for bucket #0 in backward pass before data-parallel communication"),
        RuntimeError("Rank 0, node n1, device 0, iteration 7: Unexpected result nan (message='found NaN in loss')"),
    ],
    "memory of the device": [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")],
    "memory of the host": [MemoryError()],
    "memory, by text": [
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you"),
        RuntimeError("CUDA error: out of memory"),
        OSError(12, "Cannot allocate memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
    "ECC": [AcceleratorError("CUDA error: uncorrectable ECC error encountered")],
    "NVLink": [AcceleratorError("CUDA error: uncorrectable NVLink error detected during the execution")],
    "DMA mapping": [RuntimeError("CUDA error: invalid DMA mapping")],
    "driver": [
        RuntimeError("CUDA driver error: unknown error"),
        RuntimeError("The NVIDIA driver on your system is too old; CUDA driver version is insufficient"),
        AcceleratorError("CUDA error: driver shutting down"),
        RuntimeError("No CUDA GPUs are available: no CUDA-capable device is detected"),
        RuntimeError("Unable to determine the device handle for GPU 0000:3B:00.0: GPU is lost. Reboot the system"),
    ],
    "illegal memory access": [
        AcceleratorError("CUDA error: an illegal memory access was encountered"),
        AcceleratorError("CUDA error: misaligned address"),
        AcceleratorError("CUDA error: unspecified launch failure"),
    ],
    "NCCL itself": [
        RuntimeError("NCCL error in: ProcessGroupNCCL.cpp:1970, unhandled cuda error, NCCL version 2.20.5"),
        RuntimeError("ncclInternalError: Internal check failed."),
        RuntimeError("NCCL error in: NCCLUtils.hpp:121, invalid usage (run with NCCL_DEBUG=WARN for details)"),
    ],
    "CUDA, by type": [AcceleratorError("an error without further words")],
    "CUDA, by text": [
        RuntimeError("CUDA error: device-side assert triggered"),
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_MAPPING_ERROR"),
    ],
    "rendezvous store": [
        DistNetworkError("The client socket has failed to connect to any network address of (n1, 4000)"),
        DistStoreError("wait timeout after 100ms, keys: /gen/t/3/here/1"),
    ],
    "rendezvous store, by text": [RuntimeError("failed to recv, got 0 bytes. recvValue failed on SocketImpl(fd=13)")],
    "collective timed out": [
        RuntimeError("[/p/unbound_buffer.cc:84] Timed out waiting 1800000ms for recv operation to complete"),
        RuntimeError("[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE)"),
    ],
    "network": [
        RuntimeError("[/p/gloo/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:5"),
        RuntimeError("Connection reset by peer"),
        RuntimeError("NCCL error: unhandled system error, ncclSystemError"),
        RuntimeError("NCCL error in: NCCLUtils.cpp:53, remote process exited or there was a network error"),
        ConnectionRefusedError(111, "Connection refused"),
        OSError(113, "No route to host"),
    ],
    "data, by type": [corpus.DataError("data: no x.idx"), UnicodeDecodeError("utf-8", b"\x80", 0, 1, "bad")],
    "data files": [FileNotFoundError(2, "No such file or directory", "/data/corpus.bin")],
    "data loader": [RuntimeError("DataLoader worker (pid 77) is killed by signal: Killed.")],
}
KINDS = {symptom.name: symptom.kind for symptom in SYMPTOMS}


def test_symptom_has_examples_and_unique_name() -> None:
    assert list(EXAMPLES) == [symptom.name for symptom in SYMPTOMS]
    assert len(KINDS) == len(SYMPTOMS)


@pytest.mark.parametrize("name", EXAMPLES)
def test_symptom_matches_its_examples_first(name: str) -> None:
    for error in EXAMPLES[name]:
        row = faults.find_symptom(error)
        assert row is not None and row.name == name, f"{error!r}"
        told = faults.error_report(REPORTER, error, 3, 7, "step")
        assert (told.kind, told.phase) == (row.kind, row.phase or "step")
        assert type(error).__name__ in told.message and str(error)[:900] in told.message
        assert (told.generation, told.iteration) == (3, 7)


def test_error_kinds_have_severity() -> None:
    assert {*KINDS.values(), faults.DEFAULT} <= SEVERITY.keys()


@pytest.mark.parametrize(
    "error",
    [ValueError("anything else"), KeyError("loss"), AssertionError(), RuntimeError("x" * 5000), Exception("é\0")],
)
def test_unknown_error_takes_default_kind_and_keeps_text(error: BaseException) -> None:
    assert faults.find_symptom(error) is None
    told = faults.error_report(REPORTER, error, 1, 1, "backward")
    assert (told.kind, told.phase) == ("exception", "backward")
    assert told.message == f"{type(error).__name__}: {error}"[:1024]


def test_error_cause_counts_if_more_specific() -> None:
    def wrapped(cause: BaseException, explicit: bool) -> BaseException:
        try:
            try:
                raise cause
            except RuntimeError as error:
                if explicit:
                    raise ValueError("the step failed") from error
                raise ValueError("the step failed")  # noqa: B904 (that is the case)
        except ValueError as outer:
            return outer

    cause = AcceleratorError("CUDA error: uncorrectable ECC error encountered")
    for explicit in (True, False):
        error = wrapped(cause, explicit)
        told = faults.error_report(REPORTER, error, 1, 1, "step")
        assert told.kind == "ecc_error" and told.message == "ValueError: the step failed"
        assert "uncorrectable ECC" in told.detail, "the traceback holds both"
    outer = wrapped(cause, True)
    outer.__cause__, outer.__suppress_context__ = None, True  # raise ... from None
    assert faults.classify(outer)[0] == "exception"


def test_circular_cause_ends() -> None:
    one, other = ValueError("one"), ValueError("other")
    one.__cause__, other.__cause__ = other, one
    assert faults.classify(one)[0] == "exception"


def test_error_phase_comes_from_worker_unless_table_knows() -> None:
    assert faults.error_report(REPORTER, ValueError("x"), 1, 1, "checkpoint").phase == "checkpoint"
    assert faults.error_report(REPORTER, corpus.DataError("x"), 1, 1, "forward").phase == "data"


def test_symptoms_have_valid_expressions() -> None:
    for symptom in SYMPTOMS:
        assert symptom.type_name or symptom.text
        re.compile(symptom.type_name), re.compile(symptom.text)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("[/p/pair.cc:553] Connection closed by peer [127.0.0.1]:5. This is typically a crash", "connection_broken"),
        ("[/p/unbound_buffer.cc:84] Timed out waiting 100ms for recv operation to complete", "collective_timeout"),
        ("DistNetworkError: The client socket has timed out", "store_error"),
        ("not all members of generation 3 joined within 120 s", "connection_broken"),
    ],
)
def test_broken_group_error_is_classified(text: str, kind: str) -> None:
    assert faults.classify_broken(text) == kind


def test_error_report_fits_its_message() -> None:
    told = faults.error_report(REPORTER, ValueError("x" * 100_000), 1, 1, "step")
    assert len(told.message) == 1024 and len(told.detail) <= 32768
