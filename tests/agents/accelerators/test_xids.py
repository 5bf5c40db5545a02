"""The XID table, row by row, and what a document says of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from unicrond.agents.accelerators.diagnosis import History, diagnose
from unicrond.agents.accelerators.driver import XidEvent
from unicrond.agents.accelerators.xids import XIDS, Xid, is_known, xid
from unicrond.core.faults.severity import SEVERITY

FAULTS = (Path(__file__).parents[3] / "docs" / "operate" / "faults.md").read_text()
#: code -> severity of a single one, where the driver says nothing more: None, it is told and nothing follows.
EXPECTED: dict[int, int | None] = {
    **dict.fromkeys((13, 31, 8, 11, 32, 39, 40, 41, 69, 94), 2),
    **dict.fromkeys((43, 45, 63, 92, 137), None),
    **dict.fromkeys((48, 171, 172, 64, 95, 74, *range(144, 151), 79, 46, 62, 109, 110, 119, 120), 1),
    **dict.fromkeys((136, 140, 143, 155, 156, 158, 154), 1),
}


@pytest.mark.parametrize("code", EXPECTED)
def test_xid_has_expected_severity(code: int) -> None:
    _, (finding,) = diagnose(History(), XidEvent(code=code), ("big.1",), 100.0)
    assert (SEVERITY[finding.kind].value if finding.kind else None) == EXPECTED[code]
    assert f"XID {code}: {xid(code).meaning}" in finding.message and finding.xid == code


def test_xid_table_is_unique_and_fully_tested() -> None:
    codes = [code for row in XIDS for code in row.codes]
    assert len(codes) == len(set(codes)) and set(codes) == EXPECTED.keys()


def test_unknown_xid_restarts_one_process_and_is_named() -> None:
    assert not is_known(777)
    history, (finding,) = diagnose(History(), XidEvent(code=777), ("big.1",), 100.0)
    assert (finding.kind, finding.warning) == ("gpu_fault", True) and "XID 777: unknown" in finding.message
    _, (again,) = diagnose(history, XidEvent(code=777), ("big.2",), 200.0)
    assert again.kind == "gpu_broken"


def test_document_matches_xid_table() -> None:
    section = FAULTS.partition("## Accelerators")[2].partition("\n## ")[0]
    told = re.findall(r"^\| ([\d, ]+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", section, re.MULTILINE)
    table = [(", ".join(map(str, row.codes)), row.meaning, row.advice, _response(row)) for row in XIDS]
    assert [tuple(cell.strip() for cell in row) for row in told] == table


def _response(row: Xid) -> str:
    if row.kind is None:
        return "[foretells a failure](#a-failure-that-is-foretold)" if row.predicts_failure else "reported only"
    return f"`{row.kind}`, {SEVERITY[row.kind].name}" + ("; SEV1 when it recurs" if row.recurring else "")
