"""Phase marks: what is written is what is read, from another process, at any moment."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from unicrond.agents.protocol import marks
from unicrond.agents.protocol.marks import Marker, path_of, read


def test_mark_tells_position_of_worker(tmp_path: Path) -> None:
    path = path_of(str(tmp_path / "agent.sock"), "big.3")
    assert path == tmp_path / "marks" / "big.3" and read(path) is None
    marker = Marker(path)
    mark = read(path)
    assert mark is not None and (mark.phase, mark.limit_us, mark.due_us) == ("start", 0, 0)
    marker.enter_group(4)
    before_us = marks.now_us()
    marker.begin_iteration(17, 5_000)
    marker.begin_micro_batch(2)
    mark = read(path)
    assert mark is not None
    assert (mark.phase, mark.generation, mark.iteration, mark.micro_batch) == ("forward", 4, 17, 2)
    assert before_us <= mark.boundary_us <= mark.changed_us <= marks.now_us()
    assert mark.due_us == mark.boundary_us + 5_000


def test_mark_counts_collectives_per_generation(tmp_path: Path) -> None:
    marker = Marker(tmp_path / "m")
    marker.enter_group(1)
    marker.entering()
    marker.leaving()
    marker.entering()
    mark = read(tmp_path / "m")
    assert mark is not None and (mark.collectives_entered, mark.collectives_finished, mark.is_waiting) == (2, 1, True)
    marker.enter_group(2)
    mark = read(tmp_path / "m")
    assert mark is not None and (mark.collectives_entered, mark.is_waiting) == (0, False)


def test_idle_mark_has_no_limit(tmp_path: Path) -> None:
    marker = Marker(tmp_path / "m")
    marker.begin_iteration(1, 5_000)
    marker.idle()
    mark = read(tmp_path / "m")
    assert mark is not None and mark.due_us == 0


def test_unchanged_phase_writes_no_mark(tmp_path: Path) -> None:
    marker = Marker(tmp_path / "m")
    marker.phase = "backward"
    before = read(tmp_path / "m")
    marker.phase = "backward"
    assert read(tmp_path / "m") == before


def test_marker_survives_unwritable_path(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    marker = Marker(tmp_path / "file" / "m")
    marker.phase = "backward"
    assert marker.phase == "backward"


def test_reader_refuses_invalid_mark(tmp_path: Path) -> None:
    for content in (b"", b"short", os.urandom(96), bytes(96), b"\xff" * 200):
        (tmp_path / "m").write_bytes(content)
        assert read(tmp_path / "m") is None


def test_reader_refuses_torn_mark(tmp_path: Path) -> None:
    """What a reader finds whose copy overtakes the writer's: the end is older than the beginning."""
    Marker(tmp_path / "m").begin_iteration(1, 1)
    older = (tmp_path / "m").read_bytes()
    Marker(tmp_path / "m").phase = "reduce"
    newer = bytearray((tmp_path / "m").read_bytes())
    newer[:8] = (7).to_bytes(8, "little")
    for torn in (bytes(newer), bytes(newer[:48]) + older[48:]):
        (tmp_path / "m").write_bytes(torn)
        assert read(tmp_path / "m") is None


def test_concurrent_reader_never_sees_torn_mark(tmp_path: Path) -> None:
    """Iteration and micro-batch always belong together, while another thread marks as fast as it can."""
    marker, over = Marker(tmp_path / "m"), threading.Event()

    def write() -> None:
        number = 0
        while not over.is_set():
            number += 1
            marker._iteration = marker._micro_batch = marker._entered = number
            marker._mark()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        readings = [mark for _ in range(2000) if (mark := read(tmp_path / "m")) is not None]
    finally:
        over.set()
        writer.join()
    assert len(readings) > 1000
    assert all(mark.iteration == mark.micro_batch == mark.collectives_entered for mark in readings)


@pytest.mark.parametrize("number", [2**53, 2**64 - 1])
def test_reader_refuses_mark_beyond_bounds(tmp_path: Path, number: int) -> None:
    """A task may write anything into its mark; the agent reads it all the same."""
    marker = Marker(tmp_path / "m")
    marker.begin_iteration(7, 1)
    assert read(tmp_path / "m") is not None
    record = bytearray((tmp_path / "m").read_bytes())
    record[4 * 8 : 5 * 8] = number.to_bytes(8, "little")  # the iteration
    (tmp_path / "m").write_bytes(record)
    assert read(tmp_path / "m") is None


def test_reader_never_blocks_on_fifo(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "m")
    assert read(tmp_path / "m") is None


def test_page_of_an_older_fork_server_holds_no_section(tmp_path: Path) -> None:
    """Nor does a mark of an older worker: each goes on with the first record."""
    (tmp_path / "m").write_bytes(bytes(96))
    marker = Marker(tmp_path / "m")
    marker.begin_iteration(17, 5_000)
    marker.enter_section(b"data", 1, 2, 3)
    mark = read(tmp_path / "m")
    assert mark is not None and (mark.iteration, mark.section, mark.section_limit_us) == (17, "", 0)
    assert (tmp_path / "m").stat().st_size == 96


@pytest.mark.parametrize("garbage", [b"\xff" * 72, b"\x01" + bytes(7) + b"a b" + bytes(53) + b"\x01" + bytes(7)])
def test_reader_takes_no_section_from_garbage(tmp_path: Path, garbage: bytes) -> None:
    Marker(tmp_path / "m").begin_iteration(17, 5_000)
    record = (tmp_path / "m").read_bytes()
    (tmp_path / "m").write_bytes(record[:96] + garbage)
    mark = read(tmp_path / "m")
    assert mark is not None and (mark.iteration, mark.section) == (17, "")
