"""The tour is true: what it names exists and is registered, and the document is what the recording says.

`tests/integration/test_one_failure.py` lets the worker die again and compares.
"""

from __future__ import annotations

import copy

import pytest

from tests.tour import document
from tests.tour.trace import ROOT
from tests.tour.way import Json, function_name, functions_of
from unicrond.core.fold import FOLDS
from unicrond.events import vocabulary as v

HINT = "make tour records the failure anew"


@pytest.fixture(scope="module")
def recording() -> Json:
    return document.load_recording()


def missing(recording: Json) -> list[str]:
    """The functions that the tour names and the tree lacks."""
    named = sorted(name.partition(":") for name in document.all_functions(recording))
    trees = {file: functions_of(file) if (ROOT / file).exists() else {} for file, _, _ in named}
    return [f"{file}:{name}" for file, _, name in named if name not in trees[file]]


def unregistered(recording: Json) -> list[str]:
    """The entries whose fold is another function than the one in FOLDS."""
    named = {entry["key"].partition(" ")[0]: entry["fold"] for entry in recording["entries"]}
    registered = {name: function_name(FOLDS[getattr(v, name)]) for name in named}
    return [name for name, fold in named.items() if "<" not in registered[name] and registered[name] != fold]


def test_every_function_of_the_tour_exists(recording: Json) -> None:
    assert not missing(recording), HINT


def test_every_fold_of_the_tour_is_registered(recording: Json) -> None:
    assert not unregistered(recording), HINT


def test_document_is_what_the_recording_says(recording: Json) -> None:
    written = document.write_document(recording) + "\n"
    assert document.DOCUMENT.read_text() == written, "python -m tests.tour --write"


def test_every_entry_of_the_tour_has_its_note(recording: Json) -> None:
    without_note = {entry["key"] for entry in recording["entries"]} ^ document.NOTES.keys()
    assert without_note <= {"ErrorReported connection_broken"}, "a survivor that computes hears of the membership first"


def test_a_renamed_function_and_another_fold_are_noticed(recording: Json) -> None:
    renamed = copy.deepcopy(recording)
    entry = next(entry for entry in renamed["entries"] if entry["key"] == "WorkerExited")
    maker, fold = entry["made"][0], entry["fold"]
    entry["made"][0] = f"{maker}_of_old"
    assert missing(renamed) == [f"{maker}_of_old"]
    entry["fold"] = fold.replace("worker_exited", "worker_started")
    assert unregistered(renamed) == ["WorkerExited"]


def test_tour_has_the_whole_way(recording: Json) -> None:
    """From the report of the death to the closing of the incident, with the commands and the group in between."""
    types = [entry["key"].partition(" ")[0] for entry in recording["entries"]]
    for name in ("ErrorReported", "WorkerExited", "MembershipDecided", "StartWorker", "WorkerJoinedGroup"):
        assert name in types
    assert types[-1] == "TransitionCompleted"
    effects = [row["effect"] for row in recording["survivor"]]
    assert effects.index("FollowMembership") < effects.index("FormGroup") < effects.index("Optimize")
