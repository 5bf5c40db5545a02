"""One grammar for the commands of the four programs: shared_flags.py and exit_codes.py of events/cli, commands.md."""

from __future__ import annotations

import argparse
import inspect
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.events.command_lines import PARSERS, commands_of, document, flags_of, is_group, parser_of
from unicrond.events.cli.command_line import Parser, add_command, kind_among, name, run
from unicrond.events.cli.exit_codes import COMMON, MEANINGS, TIMEOUT, exit_codes
from unicrond.events.cli.shared_flags import SHARED, SharedFlag

ROOT = Path(__file__).parent.parent.parent
COMMANDS = {command.prog: command for program in PARSERS for command in commands_of(parser_of(program))}
#: What a summary begins with: what the command does.
WORDS = """
    archive cancel check compare copy cordon decide drain empty end fix forget give list make order plan predict print
    repeat restore run see serve show simulate solve submit take tell train wait write change"""
VERBS = set(WORDS.split())


def value_of(read: Any) -> str:
    """Return what a type of argparse makes of a text, by its annotation."""
    if read is None:
        return "str"
    if inspect.isclass(read):
        return read.__name__
    result = inspect.signature(read).return_annotation
    return str(getattr(result, "__name__", result))


def test_flags_of_several_commands_are_shared() -> None:
    places = defaultdict(list)
    for prog, command in COMMANDS.items():
        for flag in flags_of(command):
            places[flag].append(prog)
    several = {flag for flag, progs in places.items() if len(progs) > 1}
    assert several - {"--help", "--version", "--print-completion"} <= set(SHARED)
    assert set(SHARED) <= set(places), "a flag of SHARED that no command has"


@pytest.mark.parametrize("prog", COMMANDS)
def test_shared_flag_has_one_type_and_one_meaning(prog: str) -> None:
    for flag, action in flags_of(COMMANDS[prog]).items():
        if flag not in SHARED:
            continue
        entry: SharedFlag = SHARED[flag]
        assert str(action.help).startswith(entry.meaning), f"{prog} {flag}"
        assert str(action.metavar or "").startswith(entry.metavar or ""), f"{prog} {flag}"
        assert (action.nargs == 0) is (entry.metavar is None), f"{prog} {flag}"
        assert isinstance(action, argparse._AppendAction) is (entry.action == "append"), f"{prog} {flag}"
        if entry.metavar is not None:
            assert value_of(action.type) == value_of(entry.type), f"{prog} {flag}"


@pytest.mark.parametrize("prog", [prog for prog in COMMANDS if " " in prog])
def test_summary_begins_with_verb(prog: str) -> None:
    first = str(COMMANDS[prog].description).split()[0].lower().rstrip(",")
    assert first in VERBS | {prog.rpartition(" ")[2]}, f"{prog}: {first}"


@pytest.mark.parametrize("prog", COMMANDS)
def test_help_ends_with_exit_codes_of_the_table(prog: str) -> None:
    last = COMMANDS[prog].format_help().rstrip().rpartition("\n")[2]
    assert last.startswith("exit codes: 0 done, 1 failed"), prog
    codes = dict(re.findall(r"(\d+) ([^,(]+)", re.sub(r"\([^)]*\)", "", last)))
    assert {int(code): meaning.strip() for code, meaning in codes.items()}.items() <= MEANINGS.items(), prog
    assert set(COMMON) <= set(map(int, codes)), prog


@pytest.mark.parametrize("prog", [prog for prog in COMMANDS if prog != "unicron-agent"])
def test_help_has_examples(prog: str) -> None:
    assert "example" in COMMANDS[prog].format_help()


def test_exit_codes_of_a_command() -> None:
    line = exit_codes(TIMEOUT, failed="a task ended otherwise")
    assert line == "exit codes: 0 done, 1 failed (a task ended otherwise), 2 bad usage, 3 timed out, 130 interrupted"


def test_arguments_are_kind_and_name_or_name() -> None:
    wants_kind = set()
    for prog, command in COMMANDS.items():
        words = [action.metavar for action in command._actions if not action.option_strings and not is_group(command)]
        if "KIND" in words:
            assert words == ["KIND", "NAME"], prog
            wants_kind.add(prog)
    assert wants_kind == {"unicronctl describe", "unicronctl story", "unicron-replay story"}


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("i52", "did you mean incident i52?"),
        ("7", "did you mean plan 7?"),
        ("tsk", "did you mean task?"),
        ("gpu07", "did you mean task gpu07 or node gpu07?"),
    ],
)
def test_missing_kind_is_guessed(text: str, hint: str) -> None:
    with pytest.raises(ValueError, match=re.escape(hint)):
        kind_among(("node", "task", "incident", "plan"))(text)


def test_needless_kind_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    root = Parser(prog="x")
    add_command(root.commands(), "cancel", "cancel it", None).add_argument("task", metavar="TASK", type=name)
    assert run("x", lambda: root.parse_args(["cancel", "task", "big"]) and 0) == 2
    assert "give big alone, without task" in capsys.readouterr().err


def test_document_is_the_parsers() -> None:
    path = ROOT / "docs" / "operate" / "commands.md"
    assert path.read_text() == document(), "python -m tests.events.command_lines > docs/operate/commands.md"
