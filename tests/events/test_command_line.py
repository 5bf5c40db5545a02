"""What the four commands share on their command lines."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.events.command_lines import PARSERS
from unicrond.events.cli.command_line import Parser, UsageError, add_command, existing_file, number, run, whole


@pytest.mark.parametrize("program", PARSERS)
def test_command_has_manual_page(program: str, tmp_path: Path) -> None:
    page = tmp_path / "page.1"
    made = [Path(sys.executable).parent / "argparse-manpage", "--module", PARSERS[program], "--function", "parser"]
    subprocess.run([*made, "--prog", program, "--output", page], check=True, capture_output=True, timeout=60)
    assert "exit codes" in page.read_text() and ".SH DESCRIPTION" in page.read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["rnu"], "no command 'rnu'; did you mean run?"),
        (["run", "--count", "0"], "--count: '0' is not a whole number of 1 to 9"),
        (["run", "--count", "9" * 5000], f"--count: '{'9' * 40}' is not a whole number of 1 to 9"),
        (["run", "--share", "nan"], "--share: 'nan' is not within 0 to 1 parts"),
        (["run", "--file", "/nowhere"], "--file: '/nowhere' is not a file"),
        (["run", "--kind", "rde"], "--kind: unknown 'rde'; did you mean red?"),
    ],
)
def test_bad_usage_prints_one_line_and_exits_with_2(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    root = Parser(prog="x")
    command = add_command(root.commands(), "run", "run it", None)
    command.add_argument("--count", type=whole(1, 9))
    command.add_argument("--share", type=number(0, 1, "parts"))
    command.add_argument("--file", type=existing_file)
    command.add_argument("--kind", choices=("red", "blue"))
    assert run("x", lambda: root.parse_args(arguments) and 0) == 2
    line = capsys.readouterr().err
    assert line.startswith(f"x: {said}") and line.count("\n") == 1, line


def test_run_maps_errors_to_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    def ends_by(error: BaseException) -> int:
        def work() -> int:
            raise error

        return run("x", work, OSError)

    assert run("x", lambda: None) == 0 and run("x", lambda: 1) == 1
    assert ends_by(UsageError("--a: wrong")) == 2 and ends_by(OSError("gone")) == 1
    assert ends_by(KeyboardInterrupt()) == 130
    assert capsys.readouterr().err == "x: --a: wrong\nx: gone\n"
    with pytest.raises(ValueError):
        ends_by(ValueError())
