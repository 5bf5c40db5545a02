"""The rows of `make versions`: pyproject.toml allows them, and the page has their results."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tests.versions import matrix
from tests.versions.matrix import _OWN, _SUITES, ROOT, ROWS, constraints
from unicrond.events.megatron.command_line import TESTED

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PAGE = (ROOT / "docs" / "use" / "versions.md").read_text()


def test_rows_are_allowed_by_pyproject() -> None:
    needs = {need.name: need.specifier for need in map(Requirement, PROJECT["optional-dependencies"]["node"])}
    for row in ROWS:
        assert SpecifierSet(PROJECT["requires-python"]).contains(row.python)
        assert needs["megatron-core"].contains(row.core) and needs["torch"].contains(row.torch), row


def test_pyproject_allows_no_release_that_no_row_has() -> None:
    needs = {need.name: need.specifier for need in map(Requirement, PROJECT["optional-dependencies"]["node"])}
    for name, releases in (("megatron-core", {row.core for row in ROWS}), ("torch", {row.torch for row in ROWS})):
        minors = {tuple(map(int, release.split(".")[:2])) for release in releases}
        below, beyond = min(minors), max(minors)
        assert not needs[name].contains(f"{below[0]}.{below[1] - 1}.9")
        assert not needs[name].contains(f"{beyond[0]}.{beyond[1] + 1}.0")


def test_every_tested_release_of_core_has_a_row() -> None:
    assert {row.core for row in ROWS} == set(TESTED)


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_page_has_result_of_row(row: object) -> None:
    python, core, torch = str(row).split("-")
    line = next(line for line in PAGE.splitlines() if line.startswith(f"| {python} | {core} | {torch} | "))
    assert re.search(r"\| (20\d\d-\d\d-\d\d, `[0-9a-f]{8}`|not run) \|$", line), line


def test_constraints_of_row_leave_its_own_versions_out(tmp_path: Path) -> None:
    text = constraints(tmp_path).read_text()
    assert "nvidia-ml-py==" in text and "pytest==" in text
    assert [line for line in text.splitlines() if _OWN.match(line)] == []
    assert not re.search(r"^(torch|megatron-core|triton|nvidia-cublas|cuda-toolkit)==", text, re.MULTILINE)


@pytest.mark.parametrize("suite", _SUITES)
def test_suites_are_there(suite: str) -> None:
    file, _, test = suite.partition("::")
    name, _, case = test.removesuffix("]").partition("[")
    assert (ROOT / file).exists()
    text = (ROOT / file).read_text() if test else ""
    assert not test or (f"def {name}(" in text and f'"{case}' in text)


@pytest.mark.parametrize("keep", ["", "1"])
def test_interrupted_row_leaves_no_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: str) -> None:
    """It takes 6 GB."""

    def interrupted(row: matrix.Row, folder: Path, variables: object) -> list[str]:
        (folder.parent / f"python{row.python}" / "bin").mkdir(parents=True)
        raise KeyboardInterrupt

    monkeypatch.setattr(matrix, "FOLDER", tmp_path)
    monkeypatch.setattr(matrix, "run", interrupted)
    monkeypatch.setenv("KEEP", keep)
    with pytest.raises(KeyboardInterrupt):
        matrix.main([str(ROWS[0])])
    assert (tmp_path / f"python{ROWS[0].python}").exists() is bool(keep)
