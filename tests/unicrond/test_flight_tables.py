"""Which rank is behind, by marks and flight recorders (display/flight.py)."""

from __future__ import annotations

from typing import Any

import pytest

from unicrond.display.flight import ENDED_SHOWN, behind, collectives_table, ranks_table


def one(number: int, **fields: Any) -> dict[str, Any]:
    told = {"library": "nccl", "group": 2, "number": number, "is_p2p": False, "name": "all_reduce", "sizes": "Float[8]"}
    return told | {"state": "started", "is_over": False, "since_us": 1_000} | fields


def rank(number: int, *collectives: dict[str, Any]) -> dict[str, Any]:
    return {"rank": number, "worker": f"t.{number}", "node": f"n{number}", "collectives": list(collectives)}


def mark(entered: int, *, waiting: bool = True, generation: int = 4) -> dict[str, Any]:
    told = {
        "phase": "reduce",
        "iteration": 9,
        "collectives_entered": entered,
        "is_waiting": waiting,
        "still_us": 61_000_000,
    }
    return told | {"generation": generation}


def test_collectives_table_shows_open_and_last_finished() -> None:
    rows = collectives_table([one(0), *(one(n, is_over=True) for n in range(1, 9)), one(9, is_p2p=True)]).rows
    assert [row[1] for row in rows] == ["0", *(str(n) for n in range(9 - ENDED_SHOWN, 9)), "p2p 9"]
    assert rows[0][4:] == ("started", "1 ms") and rows[1][4] == "ended"


def test_ranks_table_shows_ranks_side_by_side() -> None:
    ranks = [rank(0, one(7), one(6, is_over=True, name="broadcast")), rank(1)]
    first, second = ranks_table(ranks, {"t.0": mark(7)}).rows
    assert first == ("0", "t.0", "n0", "reduce, iteration 9", "7", "for 61.0 s", "all_reduce Float[8]")
    assert second == ("1", "t.1", "n1", "not known", "", "", "")


_LATE = "behind: rank 1 (t.1 on n1): 6 collectives entered, others 7"


@pytest.mark.parametrize(
    ("marks", "told"),
    [
        (
            {"t.0": mark(7), "t.1": mark(6, waiting=False)},
            _LATE,
        ),
        ({"t.0": mark(7), "t.1": mark(7)}, ""),
        ({"t.0": mark(7, waiting=False), "t.1": mark(6, waiting=False)}, ""),
        ({"t.0": mark(7), "t.1": mark(2, generation=3)}, ""),
        ({}, ""),
    ],
)
def test_behind_names_slow_ranks(marks: dict[str, Any], told: str) -> None:
    assert behind([rank(0), rank(1)], marks) == told
