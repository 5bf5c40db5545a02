"""`docs/one-failure.md` is true of a worker that dies now: the same functions make, fold and take each entry."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tour.document import load_recording
from tests.tour.trace import record
from tests.tour.way import Json, way
from unicrond.agents.trainer.lifecycle import effects
from unicrond.agents.trainer.loop.handlers import HANDLERS

#: What depends on the moment of the death. A survivor reports a broken connection only where the next membership is not
#: there yet; it keeps sums only if some are complete, and computes only if some are not.
MAY_LACK = {"ErrorReported connection_broken", "ReportFailure", "LeaveGroup", "KeepSums", "Compute"}


def parts(recording: Json) -> dict[str, tuple[object, ...]]:
    """What the document names of each entry and effect that does not depend on who was quicker."""
    entries = {
        entry["key"]: (entry["made"][0], entry["fold"], [step["functions"] for step in entry["taken"][:1]])
        for entry in recording["entries"]
    }
    rows = {row["effect"]: (row["asked"], row["carried_out"]) for row in recording["survivor"]}
    return {**entries, **rows}


@pytest.mark.timeout(600)
async def test_a_failure_takes_the_way_of_the_tour(tmp_path: Path) -> None:
    now, written = parts(way(await record(tmp_path / "trace"))), parts(load_recording())
    assert now.keys() ^ written.keys() <= MAY_LACK
    changed = {name: (written[name], now[name]) for name in now.keys() & written.keys() if now[name] != written[name]}
    assert not changed, "make tour records the failure anew"


def test_effects_of_the_tour_are_carried_out_by_their_handlers() -> None:
    for row in load_recording()["survivor"]:
        if row["carried_out"]:
            handler = HANDLERS[getattr(effects, row["effect"])]
            assert row["carried_out"].endswith(f":{handler.__qualname__}")
