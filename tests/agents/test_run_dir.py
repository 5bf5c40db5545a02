"""The run directory: lock, boot numbers, memory, and errors that say what to do."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import msgspec
import pytest

from tests.agents.node import Node, start
from unicrond.agents.core.state import Remembered
from unicrond.agents.host.paths import default_run_dir
from unicrond.agents.shell.run_dir import BOOT_LIMIT, BadRunDir, RunDir
from unicrond.events.vocabulary import Boot


def test_boot_numbers_increase_under_any_clock(run_dir: Path) -> None:
    directory = RunDir(run_dir)
    directory.claim()
    assert [directory.next_boot(clock) for clock in (1000, 5, 5000, 0)] == [1000, 1001, 5000, 5001]
    directory.release()


@pytest.mark.parametrize("content", [b"9" * 30, b"9" * 5000, str(2**52).encode(), b"", b"\xff\x00", b"-5", b"1_0"])
def test_damaged_boot_number_is_reported_and_replaced(
    run_dir: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    (run_dir / "agent.boot").write_bytes(content)
    directory = RunDir(run_dir)
    assert [directory.next_boot(clock) for clock in (5000, 10)] == [5000, 5001]
    (said,) = [record.getMessage() for record in caplog.records]
    assert str(run_dir / "agent.boot") in said and "is damaged" in said and len(said) < 400 and "\n" not in said
    assert (run_dir / "agent.boot").read_text() == "5001"


def test_boot_number_limit_matches_vocabulary() -> None:
    boots = msgspec.msgpack.Decoder(Boot)
    assert boots.decode(msgspec.msgpack.encode(BOOT_LIMIT - 1)) == BOOT_LIMIT - 1
    with pytest.raises(msgspec.ValidationError):
        boots.decode(msgspec.msgpack.encode(BOOT_LIMIT))


def test_damaged_exchange_is_recreated(run_dir: Path) -> None:
    (run_dir / "agent.exchange").write_text(f"{10**30} token")
    assert RunDir(run_dir).exchange() == (0, "token")
    (run_dir / "agent.exchange").write_bytes(b"\xff" * 1000)
    assert RunDir(run_dir).exchange()[0] == 0


def test_foreign_link_is_not_followed(run_dir: Path) -> None:
    ours = run_dir / "ours"
    ours.mkdir()
    link = run_dir / "unicron-1"
    link.symlink_to(ours)
    RunDir(link / "n1").claim()  # our own leads where we want
    try:
        os.lchown(link, 12345, 12345)
    except PermissionError:
        pytest.skip("only root can give files away")
    with pytest.raises(BadRunDir, match="symbolic link of uid 12345"):
        RunDir(link / "n2").claim()
    assert not (ours / "n2").exists(), "nothing is made where it leads"


def test_agent_memory_survives_round_trip(run_dir: Path) -> None:
    node = Node()
    node.boot()
    node.command(start("a.1", 1))
    node.fork()
    directory = RunDir(run_dir)
    assert directory.recall() == Remembered()
    directory.remember(node.state.memory)
    assert directory.recall() == node.state.memory


def test_damaged_agent_memory_is_reported(run_dir: Path) -> None:
    (run_dir / "agent.memory").write_bytes(b"\x81\xa1x\x01")
    with pytest.raises(BadRunDir, match="damaged"):
        RunDir(run_dir).recall()


def test_run_directory_serves_one_agent(run_dir: Path) -> None:
    first, second = RunDir(run_dir), RunDir(run_dir)
    first.claim()
    with pytest.raises(BadRunDir, match="another agent"):
        second.claim()
    first.release()
    second.claim()
    second.release()


def test_run_directory_path_must_fit_socket(tmp_path: Path) -> None:
    with pytest.raises(BadRunDir, match=r"run-dir: .* is \d+ bytes too long"):
        RunDir(tmp_path / ("x" * 100))
    base = Path("/" + "y" * (107 - len("/") - len("/agent.sock")))
    assert len(os.fsencode(RunDir(base).agent_socket)) == 107


def test_run_directory_is_private(run_dir: Path) -> None:
    directory = RunDir(run_dir / "n1")
    directory.claim()
    assert stat.S_IMODE((run_dir / "n1").stat().st_mode) == 0o700
    directory.release()


def test_replaceable_run_directory_is_refused(run_dir: Path) -> None:
    open_to_all = run_dir / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    with pytest.raises(BadRunDir, match="others may replace"):
        RunDir(open_to_all / "n1").claim()


def test_default_run_directory_follows_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert default_run_dir("n1") == Path("/run/user/7/unicron/n1")
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert default_run_dir("n1") == Path(f"/tmp/unicron-{os.getuid()}/n1")
