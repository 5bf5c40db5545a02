"""docs/operate/faults.md and docs/design/detection.md say what the code does; severities in the configuration."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from unicrond.core.faults.severity import RESPONSE, SEVERITY
from unicrond.core.state.policy import Policy
from unicrond.events.vocabulary import ErrorKind, FaultKind, FaultPhase
from unicrond.intake.config import Config, ConfigError, load

DOCS = Path(__file__).parents[2] / "docs"
FAULTS = (DOCS / "operate" / "faults.md").read_text()
DETECTION = (DOCS / "design" / "detection.md").read_text()


def rows(columns: int) -> list[tuple[str, ...]]:
    """The rows of the document's tables of so many columns that begin with `code`."""
    cell = r"([^|]*)\|"
    found = re.findall(r"^\|" + cell * columns + "$", FAULTS, re.MULTILINE)
    return [tuple(text.strip() for text in row) for row in found if row[0].strip().startswith("`")]


def test_document_severity_table_matches_code() -> None:
    table = {kind.strip("`"): (severity, response) for kind, severity, response in rows(3)}
    assert table == {kind: (severity.name, RESPONSE[severity]) for kind, severity in SEVERITY.items()}


def test_severity_covers_every_error_kind() -> None:
    assert set(SEVERITY) == set(get_args(ErrorKind))


def test_document_tells_every_fault_and_phase() -> None:
    assert [kind.strip("`") for kind, _ in rows(2)] == [kind.replace("_", "-") for kind in get_args(FaultKind)]
    for phase in filter(None, get_args(FaultPhase)):
        assert f"`{phase}` (" in " ".join(FAULTS.split())


def test_document_names_existing_policy_fields() -> None:
    named = set(re.findall(r"`(?:policy\.)?(\w+_(?:s|max))`", FAULTS + DETECTION))
    assert named <= set(Policy.__struct_fields__) and len(named) > 6


# --- severities in the configuration -------------------------------------------------------------


def config(tmp_path: Path, text: str) -> Config:
    path = tmp_path / "unicron.yaml"
    path.write_text(text)
    return load(path)


def test_configuration_reads_severities(tmp_path: Path) -> None:
    assert config(tmp_path, "severity: {nan_loss: 1, store_error: 2}").severity == {"nan_loss": 1, "store_error": 2}
    assert config(tmp_path, "injection: true").injection


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("severity: {nan_los: 1}", ["nan_los", "nan_loss"]),
        ("severity: {nan_loss: 4}", ["nan_loss", "4"]),
        ("severity: {node_lost: 2}", ["severity.node_lost", "use 1"]),
        ("severity: {process_exit: 3}", ["severity.process_exit", "use 1 or 2"]),
        ("injection: yes", ["injection", "true or false"]),
        ("policy: {flaps_max: 99}", ["flaps_max"]),
    ],
)
def test_configuration_refuses_bad_severity_in_one_line(tmp_path: Path, text: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        config(tmp_path, text)
    assert "\n" not in str(caught.value) and all(word in str(caught.value) for word in words), caught.value
