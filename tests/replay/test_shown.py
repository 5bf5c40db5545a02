"""No command of `unicron-replay` shows a secret that the log tells, nor what looks like one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.replay.logs import troubled, write_log
from unicrond.events import vocabulary as v
from unicrond.events.wire.envelope import Entry, RecordedEvent
from unicrond.replay.cli import main

VALUE = 'va"lue-of-\\a-secret'
LOOKING = "hf_abcdefghijklmnopqrstuvwxyz0123"
TOKEN = "t0ken-of-a-memory"


def secretive(entries: list[RecordedEvent]) -> list[Entry]:
    """The log, with a secret in each task's environment and arguments, and in what is told of each death."""
    found: list[Entry] = []
    for entry in entries:
        event = entry.envelope.event
        spec = getattr(event, "spec", None)
        if isinstance(spec, v.TaskSpec):
            env = {**spec.env, "DB_PASSWORD": VALUE}
            arguments = ("--api-key", VALUE, "--x", LOOKING)
            event = replace(event, spec=replace(spec, env=env, entry="/train.py", args=arguments))
        elif isinstance(event, v.ErrorReported):
            event = replace(event, message=f"cannot log in as {LOOKING}", detail=f"{VALUE}\n{LOOKING}")
        elif isinstance(event, v.NodeJoined):
            event = replace(event, memory=v.MemoryService(node=event.node, host="h", port=1, token=TOKEN))
        found.append(replace(entry, envelope=replace(entry.envelope, event=event)))
    return found


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_log(tmp_path_factory.mktemp("shown") / "log.bin", secretive(list(troubled(3).log)))


def leaks(text: str) -> list[str]:
    escaped = json.dumps(VALUE)[1:-1]
    return [one for one in (VALUE, escaped, LOOKING, TOKEN) if one in text]


@pytest.mark.parametrize(
    "command",
    [
        "state",
        "state --json",
        "digest",
        "events",
        "events --json",
        "story task big",
        "story task big --json",
        "diff 5 60",
        "diff 5 60 --json",
        "timeline",
        "timeline --json",
        "verify",
        "whatif --json",
    ],
)
def test_command_output_hides_secrets(log: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    words = command.split()
    main([*words, "--log", str(log)])
    said = capsys.readouterr()
    assert said.out and not leaks(said.out + said.err)
    if "--json" in words:
        for line in said.out.splitlines():
            json.loads(line)


def test_timeline_page_hides_secrets(log: Path, tmp_path: Path) -> None:
    assert main(["timeline", "--log", str(log), "--html", str(tmp_path / "page.html")]) == 0
    assert not leaks((tmp_path / "page.html").read_text())


def test_masked_export_hides_secrets_and_verifies(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, masked = tmp_path / "plain.log", tmp_path / "masked.log"
    assert main(["export", str(plain), "--log", str(log)]) == 0
    assert main(["export", str(masked), "--masked", "--log", str(log)]) == 0
    assert all(one.encode() in plain.read_bytes() for one in (VALUE, LOOKING, TOKEN))
    assert not any(one.encode() in masked.read_bytes() for one in (VALUE, LOOKING, TOKEN))
    capsys.readouterr()
    assert main(["verify", "--json", "--log", str(plain)]) == main(["verify", "--json", "--log", str(masked)])
    first, second = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert first["decisions"] == second["decisions"] and first["verified"] == second["verified"]
