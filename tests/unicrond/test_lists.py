"""Lists in `--json` are lists, and are what `unicronctl schema` says of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.unicrond.serving import Served, healed_cluster, serving
from unicrond.ctl.lists import ROWS, schema
from unicrond.ctl.main import main
from unicrond.ctl.parser import SCHEMA_NAMES


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    cluster = healed_cluster()
    async with serving(tmp_path, cluster.log) as served:
        yield served


def validate(value: Any, command: str) -> None:
    """Check a command's output against the types of its rows, and against the schema where jsonschema is there."""
    row = ROWS[command]
    rows = msgspec.convert(value, row if command == "events" else list[row], strict=True)  # type: ignore[valid-type]
    assert rows
    try:
        import jsonschema
    except ModuleNotFoundError:
        return
    jsonschema.validate(value, schema(command))


async def output(served: Served, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    await asyncio.to_thread(main, ["--url", served.url, *words, "--json"])
    return capsys.readouterr().out


async def test_output_validates(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    window = ("maintain", "n3", "--from", "3h", "--duration", "90m")
    assert json.loads(await output(served, capsys, *window))["nodes"] == ["n3"]
    for command in ("nodes", "tasks", "workers", "incidents", "maintain"):
        value = json.loads(await output(served, capsys, command))
        assert isinstance(value, list), command
        validate(value, command)
    for line in (await output(served, capsys, "events", "--limit", "5")).splitlines():
        validate(json.loads(line), "events")
    for command in ("cordon", "uncordon", "drain"):
        validate(json.loads(await output(served, capsys, command, "n1")), command)
    drained = json.loads(await output(served, capsys, "drain", "n1", "--wait", "--timeout-s", "0"))
    validate(drained, "drain")
    assert drained[0]["node"] == "n1"
    validate(json.loads(await output(served, capsys, "wait", "--all", "--timeout-s", "0")), "wait")


async def test_names_are_fields(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    state = served.coordinator.state
    nodes = json.loads(await output(served, capsys, "nodes"))
    tasks = json.loads(await output(served, capsys, "tasks"))
    assert [node["name"] for node in nodes] == list(state.nodes)
    assert [task["name"] for task in tasks] == list(state.tasks)


def test_schema_of_each_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert set(SCHEMA_NAMES) == set(ROWS)
    for command in ROWS:
        assert main(["schema", command]) == 0
        kind = json.loads(capsys.readouterr().out)
        assert command == "events" or kind["type"] == "array"
    assert main(["schema"]) == 0 and json.loads(capsys.readouterr().out) == list(ROWS)
