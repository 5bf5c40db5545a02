"""A worker's output on disk."""

from __future__ import annotations

from pathlib import Path

from unicrond.agents.host.rotated_output import RotatedLog, tail


def test_rotated_log_is_bounded_and_keeps_recent_lines(tmp_path: Path) -> None:
    path = tmp_path / "a" / "a.1.log"
    log = RotatedLog(path, max_bytes=1000, keep=2)
    lines = [b"line %06d\n" % number for number in range(1000)]
    for line in lines:
        log.write(line)
    log.close()
    parts = [path.with_name("a.1.log.2"), path.with_name("a.1.log.1"), path]
    assert sorted(path.parent.iterdir()) == sorted(parts)
    content = b"".join(part.read_bytes() for part in parts)
    assert all(part.stat().st_size <= 1000 for part in parts)
    assert len(content) > 2000
    assert b"".join(lines).endswith(content)


def test_tail_spans_rotation(tmp_path: Path) -> None:
    path = tmp_path / "a.1.log"
    log = RotatedLog(path, max_bytes=10)
    log.write(b"0123456789")
    log.write(b"abc")
    log.close()
    assert tail(path, 6) == b"789abc"
    assert tail(path, 100) == b"0123456789abc"
    assert tail(tmp_path / "none.log", 5) == b""


def test_rotated_log_appends_to_existing_file(tmp_path: Path) -> None:
    path = tmp_path / "a.1.log"
    for text in (b"one", b"two"):
        log = RotatedLog(path)
        log.write(text)
        log.close()
    assert path.read_bytes() == b"onetwo"


def test_full_disk_loses_only_output() -> None:
    log = RotatedLog(Path("/dev/full"))
    log.write(b"12345")
    assert log.lost_bytes == 5
    log.close()
