"""Incidents are grouped by what their programs died of."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from unicrond.core.state.state import Incident, Severity
from unicrond.views.incident_groups import incident_groups, signature_of

TRACEBACK = """\
loading
Traceback (most recent call last):
  File "/home/{user}/train.py", line {line}, in <module>
    open("{path}")
FileNotFoundError: [Errno 2] No such file or directory: '{path}'
"""
SEGFAULT = """\
Fatal Python error: Segmentation fault

Current thread 0x00007f{number} (most recent call first):
  File "/opt/kernels/{file}", line 9 in {function}
  File "/home/anna/train.py", line 62 in step
"""


def died(number: int, tail: str, message: str = "ended by signal 11 (SIGSEGV)") -> Incident:
    return Incident(
        id=f"i{number}", kind="process_exit", severity=Severity.SEV2, node=f"n{number}", worker=f"big.{number}",
        generations={"big": number}, message=f"worker big.{number} on n{number} {message}", occurred_us=number,
        detected_us=number, log_tail=tail,
    )  # fmt: skip


def segfault(number: int, function: str = "launch", file: str = "kernel.py") -> Incident:
    return died(number, SEGFAULT.format(number=number, function=function, file=file))


def missing(number: int, path: str) -> Incident:
    return died(number, TRACEBACK.format(user=f"u{number}", line=number, path=path), "ended with exit code 1")


def test_one_missing_file_in_several_places_is_one_group() -> None:
    groups = incident_groups([missing(1, "/data/one/part7.bin"), missing(2, "/mnt/other/part12.bin")])
    (group,) = groups
    assert (group.count, group.cause) == (2, "program")
    assert group.signature == "FileNotFoundError: [Errno #] No such file or directory: '/part#.bin'"
    assert len(incident_groups([missing(1, "/data/a.bin"), missing(2, "/data/b.bin")])) == 2


def test_segmentation_faults_are_told_apart_by_their_function() -> None:
    groups = incident_groups([segfault(1), segfault(2), segfault(3, function="copy")])
    assert sorted(group.count for group in groups) == [1, 2]
    assert "signal 11 (SIGSEGV) in launch of kernel.py" in signature_of(segfault(4))
    assert signature_of(died(5, "")).endswith("ended by signal 11 (SIGSEGV)")


@pytest.mark.parametrize("kind", ["ecc_error", "node_lost"])
def test_hardware_is_grouped_by_kind_alone(kind: str) -> None:
    assert signature_of(replace(segfault(1), kind=kind)) == ""


def test_two_real_incidents_stand_before_fifty_of_a_script() -> None:
    scripts = [missing(number, "/data/tokens.bin") for number in range(50)]
    lost, ecc = (
        replace(segfault(number), kind=kind, log_tail="") for number, kind in ((60, "node_lost"), (61, "ecc_error"))
    )
    groups = incident_groups([*scripts[:25], lost, *scripts[25:], ecc])
    assert [(group.cause, group.count) for group in groups] == [("hardware", 1), ("hardware", 1), ("program", 50)]


def test_long_signatures_keep_the_function() -> None:
    incident = died(1, SEGFAULT.format(number=1, function="launch", file="kernel.py"), "x" * 500)
    assert signature_of(incident).endswith("in launch of kernel.py") and len(signature_of(incident)) <= 120
