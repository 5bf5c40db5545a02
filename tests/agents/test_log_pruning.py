"""Logs of workers that have ended go by age, by size, and where the disk is full; those of living ones never."""

from __future__ import annotations

import os
from pathlib import Path

from unicrond.agents.output.output_pruning import Limits, prune

DAY_S = 86_400.0
NOW_S = 1_000 * DAY_S
BIG = 2**40
KIB = 1024


def written(logs: Path, worker: str, age_days: float, *, parts: int = 1, size_bytes: int = 64 * KIB) -> None:
    task = worker.rpartition(".")[0]
    (logs / task).mkdir(parents=True, exist_ok=True)
    for number in range(parts):
        path = logs / task / (f"{worker}.log" + (f".{number}" if number else ""))
        path.write_bytes(b"x" * size_bytes)
        os.utime(path, (0, NOW_S - age_days * DAY_S))


def left(logs: Path) -> set[str]:
    return {path.name for path in logs.rglob("*") if path.is_file()}


def limits(max_age_days: float = 14, max_bytes: int = BIG, reserve_bytes: int = 0) -> Limits:
    return Limits(max_age_s=max_age_days * DAY_S, max_bytes=max_bytes, reserve_bytes=reserve_bytes)


def test_pruning_removes_old_logs_with_all_parts(tmp_path: Path) -> None:
    written(tmp_path, "a.1", 20, parts=3)
    written(tmp_path, "a.2", 20)
    written(tmp_path, "b.1", 20)
    written(tmp_path, "a.3", 1)
    assert prune(tmp_path, {"a.2"}, limits(), NOW_S) == (2, 4 * 64 * KIB)
    assert left(tmp_path) == {"a.2.log", "a.3.log"}
    assert not (tmp_path / "b").exists()
    assert prune(tmp_path, {"a.2"}, limits(), NOW_S) == (0, 0)


def test_pruning_removes_oldest_until_rest_fits(tmp_path: Path) -> None:
    for number, age_days in ((1, 3), (2, 1), (3, 2), (4, 9)):
        written(tmp_path, f"a.{number}", age_days)
    prune(tmp_path, {"a.4"}, limits(max_bytes=2 * 64 * KIB), NOW_S)
    assert left(tmp_path) == {"a.2.log", "a.4.log"}, "the living one counts, and stays"


def test_pruning_frees_full_disk(tmp_path: Path) -> None:
    for number in range(1, 6):
        written(tmp_path, f"a.{number}", number)

    def free_bytes(_: Path) -> int:
        return 10 * KIB + 64 * KIB * (5 - len(left(tmp_path)))

    prune(tmp_path, set(), limits(reserve_bytes=130 * KIB), NOW_S, free_bytes)
    assert left(tmp_path) == {"a.1.log", "a.2.log", "a.3.log"}


def test_pruning_leaves_other_files(tmp_path: Path) -> None:
    written(tmp_path, "a.1", 99)
    (tmp_path / "a" / "notes.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    elsewhere = tmp_path.parent / "elsewhere"
    written(elsewhere, "b.1", 99)
    (tmp_path / "b").symlink_to(elsewhere / "b")
    prune(tmp_path, set(), limits(), NOW_S)
    assert left(tmp_path) == {"notes.txt", "file"} and left(elsewhere) == {"b.1.log"}
    assert prune(tmp_path / "nowhere", set(), limits(), NOW_S) == (0, 0)
    assert Limits.of(tmp_path, None, None).max_age_s == 14 * DAY_S
