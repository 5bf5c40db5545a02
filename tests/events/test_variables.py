"""Environment variables in place of flags (events/cli/environment_flags.py)."""

from __future__ import annotations

from pathlib import Path

import pytest

from unicrond.events.cli import environment_flags as variables
from unicrond.events.cli.command_line import Parser, SettableParser, add, add_command, option, repeated, switch, whole
from unicrond.events.cli.environment_flags import BadVariable


@pytest.fixture
def root() -> Parser:
    made = SettableParser(prog="prog-a", version="1")
    commands = made.commands()
    add_command(
        commands,
        "run",
        "run",
        None,
        option("--size-mb", "N", "size", type=whole(1, 9), required=True),
        option("--way", None, "way", choices=("left", "right"), default="left"),
        option("--file", "FILE", "a file", type=Path),
        switch("--loud", "loud"),
        repeated("--skip", "SEQ", "skip", type=whole(1)),
    )
    add_command(commands, "stop", "stop", None, option("--size-mb", "N", "size", type=whole(1, 9), default=1))
    return made


def test_flag_overrides_variable_and_variable_overrides_default(root: Parser, monkeypatch: pytest.MonkeyPatch) -> None:
    assert root.parse_args(["stop"]).size_mb == 1
    for name, value in {"SIZE_MB": "3", "WAY": "right", "FILE": "/x", "LOUD": "Yes", "SKIP": "7"}.items():
        monkeypatch.setenv(f"PROG_A_{name}", value)
    found = root.parse_args(["run"])
    assert (found.size_mb, found.way, found.file, found.loud, found.skip) == (3, "right", Path("/x"), True, [7])
    found = root.parse_args(["run", "--size-mb", "4", "--way", "left", "--skip", "8"])
    assert (found.size_mb, found.way, found.skip) == (4, "left", [7, 8])


def test_variable_with_command_overrides_general_one(root: Parser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROG_A_SIZE_MB", "3")
    monkeypatch.setenv("PROG_A_RUN_SIZE_MB", "5")
    assert (root.parse_args(["run"]).size_mb, root.parse_args(["stop"]).size_mb) == (5, 3)


def test_empty_variable_counts_as_absent(root: Parser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROG_A_SIZE_MB", "")
    assert root.parse_args(["stop"]).size_mb == 1


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("PROG_A_SIZE_MB", "0", "prog-a: PROG_A_SIZE_MB: '0' is not a whole number of 1 to 9"),
        ("PROG_A_WAY", "lefd", "prog-a: PROG_A_WAY: unknown 'lefd'; did you mean left?"),
        ("PROG_A_LOUD", "perhaps", "prog-a: PROG_A_LOUD: 'perhaps' is neither yes nor no"),
    ],
)
def test_bad_variable_makes_one_line_with_its_name(
    root: Parser, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, value: str, said: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        root.parse_args(["run", "--size-mb", "2"])
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"{said}; see prog-a run --help\n"


def test_program_without_variables_reads_none(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Parser(prog="plain")
    add(plain, option("--size", "N", "size", type=whole(), default=2))
    monkeypatch.setenv("PLAIN_SIZE", "x")
    assert plain.parse_args([]).size == 2


def test_unknown_variable_is_refused(root: Parser) -> None:
    known = variables.program_variables(root)
    assert {"PROG_A_SIZE_MB", "PROG_A_RUN_SIZE_MB", "PROG_A_STOP_SIZE_MB", "PROG_A_LOUD"} <= known
    assert not any("HELP" in name or "COMPLETION" in name or "VERSION" in name for name in known)
    variables.check("prog-a", known, {"PROG_A_LOUD": "1", "PROG_B": "1", "PATH": "/bin"})
    with pytest.raises(
        BadVariable, match=r"^PROG_A_SIZEMB: prog-a knows no such variable; did you mean PROG_A_SIZE_MB\?"
    ):
        variables.check("prog-a", known, {"PROG_A_SIZEMB": "1"})


@pytest.mark.parametrize(
    "name", ["SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_API", "PORT", "PORT_4222_TCP", "PORT_4222_TCP_ADDR"]
)
def test_kubernetes_service_variables_are_ignored(root: Parser, name: str) -> None:
    variables.check("prog-a", variables.program_variables(root), {f"PROG_A_{name}": "tcp://10.0.0.1:4222"})


def test_child_gets_no_program_variables() -> None:
    environ = {"PROG_A_X": "1", "PROG_B_X": "2", "PATH": "/bin"}
    assert variables.without(environ, "prog-a") == {"PROG_B_X": "2", "PATH": "/bin"}
