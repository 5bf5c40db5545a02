"""`unicronctl explain` finds what the runbook says, and the documents that messages name."""

from __future__ import annotations

from typing import get_args

import pytest

from unicrond.core.state.alarms import NAMES
from unicrond.ctl.main import main
from unicrond.events.vocabulary import ErrorKind


@pytest.mark.parametrize("name", [*NAMES, *get_args(ErrorKind)])
def test_every_alarm_and_kind_of_incident_has_a_row(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", name]) == 0
    assert f"`{name}" in capsys.readouterr().out


def test_name_with_its_subject_is_found_and_links_are_plain_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "outbox-backlog:node3"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("docs/operate/alarms.md, Alarms\n") and "](" not in said


def test_message_is_found_by_the_words_that_the_runbook_quotes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "unicronctl: no coordinator at http://127.0.0.1:7470 (refused)"]) == 0
    assert "a restart is safe at any time" in capsys.readouterr().out


def test_state_of_a_node_gets_its_own_row_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "lost"]) == 0
    assert capsys.readouterr().out.count("docs/operate/") == 1


def test_document_that_a_message_names_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "docs/operate/goodput.md#lemon-nodes"]) == 0
    assert capsys.readouterr().out.startswith("# ")


@pytest.mark.parametrize("name", ["nonsense", "docs/operate", "docs/../README.md"])
def test_what_no_document_has_is_refused_with_the_list(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", name]) == 1
    assert "docs/README.md" in capsys.readouterr().err
