"""docs/operate/configuration.md has one row for each setting of the code, with its default, and no other."""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from unicrond.agents.shell import cli
from unicrond.agents.trainer.process.context import WorkerSettings
from unicrond.events.log.subjects import BEAT_STREAM, EVENT_STREAM
from unicrond.events.trust.logins import HEADS_BUCKET
from unicrond.intake.config import Config
from unicrond.intake.strict_yaml import parse
from unicrond.service.coordinator.nats_snapshots import BUCKET

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "operate" / "configuration.md").read_text()
ROW = re.compile(r"^\| `([^`]+)` \| (\w+) \| (?:`([^`]*)` )?\| (\S.*) \|$", re.MULTILINE)
#: Names that look like variables, and are what the log and its snapshots are called.
NO_VARIABLES = {EVENT_STREAM, BEAT_STREAM, BUCKET, HEADS_BUCKET}
NO_SETTINGS = {"--help", "--version", "--print-completion"}
VARIABLE = re.compile(r"UNICRON_[A-Z]+(?:_[A-Z]+)*")
WORTH_PARSING = re.compile(r"UNICRON_|environ")
#: Functions of the code that read the variable their first argument names.
READERS = {"_seconds", "_bytes", "_count"}


def settings(*where: str) -> dict[str, str]:
    """Name -> default, as the document has them."""
    return {name: default for name, place, default, _ in ROW.findall(TEXT) if place in where}


def test_document_has_each_setting_once() -> None:
    _, _, section = TEXT.partition("## All settings")
    rows = [line for line in section.partition("\n## ")[0].splitlines() if line.startswith("| `")]
    names = [name for name, *_ in ROW.findall(TEXT)]
    assert len(rows) == len(names) == len(set(names))


def test_document_matches_file_settings_and_defaults() -> None:
    def flat(struct: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
        for name in struct.__struct_fields__:
            value = getattr(struct, name)
            if isinstance(value, msgspec.Struct):
                yield from flat(value, f"{prefix}{name}.")
            else:
                yield f"{prefix}{name}", list(value) if isinstance(value, tuple) else value

    documented = {name: parse(f"value: {default}").value["value"] for name, default in settings("file").items()}
    assert documented == dict(flat(Config()))


def test_document_example_is_valid_configuration() -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
    msgspec.convert(parse(block).value, Config, strict=True)


def test_document_matches_agent_flags_and_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[argparse.ArgumentParser] = []

    def stop(self: argparse.ArgumentParser, *_: Any) -> Any:
        built.append(self)
        raise SystemExit

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    with pytest.raises(SystemExit):
        cli.parse([])
    flags = {
        action.option_strings[-1]: action.default
        for action in built[0]._actions
        if action.help is not argparse.SUPPRESS and not NO_SETTINGS & set(action.option_strings)
    }
    assert settings("agent").keys() == flags.keys()
    assert {name: default for name, default in settings("agent").items() if default} == {
        name: str(default) for name, default in flags.items() if default is not None
    }


def test_document_matches_worker_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    documented = {
        name: default for name, default in settings("worker").items() if name.startswith("UNICRON_") and default
    }
    for name in documented:
        monkeypatch.delenv(name, raising=False)
    built_in = WorkerSettings.from_environment()
    for name, default in documented.items():
        monkeypatch.setenv(name, default)
    assert WorkerSettings.from_environment() == built_in and len(documented) == len(WorkerSettings.__slots__)


def variables_of_the_code() -> set[str]:
    """The environment variables that the code reads, and those that it sets for commands which it runs."""
    found = set()
    paths = [path for package in ("agents", "events", "replay", "unicrond") for path in (ROOT / package).rglob("*.py")]
    for path in [*paths, ROOT / "tests" / "seeds.py"]:
        text = path.read_text()
        if not WORTH_PARSING.search(text):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and VARIABLE.fullmatch(node.value):
                found.add(node.value)
            elif isinstance(node, ast.Call) and node.args and isinstance(first := node.args[0], ast.Constant):
                environ = ast.unparse(node.func) in ("os.environ.get", "environ.get", "os.environ.setdefault")
                if environ or (ast.unparse(node.func) in READERS and VARIABLE.fullmatch(str(first.value))):
                    found.add(str(first.value))
            elif isinstance(node, ast.Subscript) and ast.unparse(node.value) == "os.environ":
                found.add(ast.literal_eval(node.slice))
    return found - NO_VARIABLES


def test_document_lists_environment_variables_of_code() -> None:
    assert set(settings("worker", "node", "client", "study", "given")) == variables_of_the_code()
