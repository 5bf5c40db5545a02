"""Completion as shells ask for it: bash runs the script that `--print-completion` prints, against a served API."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.events.command_lines import PARSERS
from tests.unicrond.serving import Served, serving
from unicrond.events.cli.completion import LIMIT_S, SHELLS, script

PROGRAMS = Path(sys.executable).parent


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async with serving(tmp_path) as served:
        yield served


def complete(line: str, url: str = "", directory: Path | None = None) -> list[str]:
    """Return what bash offers for the last word of a line."""
    *before, current = line.split(" ")
    words = " ".join(f"'{word}'" for word in [*before, current])
    commands = (
        f"source <({before[0]} --print-completion bash); COMP_WORDS=({words}); COMP_CWORD={len(before)}; "
        f'_{before[0].replace("-", "_")}; printf "%s\\n" "${{COMPREPLY[@]}}"'
    )
    environment = {"PATH": f"{PROGRAMS}:{os.environ['PATH']}", "UNICRON_URL": url, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        ["bash", "--norc", "-c", commands], env=environment, capture_output=True, text=True, timeout=60, cwd=directory
    )
    assert done.returncode == 0 and done.stderr == "", done
    return done.stdout.split()


@pytest.mark.parametrize("program", PARSERS)
@pytest.mark.parametrize("shell", SHELLS)
def test_script_is_valid(program: str, shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    subprocess.run([shell, "-n"], input=script(program, shell), text=True, check=True)


def test_commands_flags_and_choices_complete() -> None:
    assert complete("unicronctl un") == ["uncordon"]
    assert complete("unicronctl plan s") == ["show", "spares", "solve"]
    assert complete("unicronctl events --si") == ["--since"]
    assert complete("unicronctl wait big --for tr") == ["training"]
    assert complete("unicron-agent --probe re") == ["ready"]
    assert complete("unicrond check-config --d") == ["--defaults"]


def test_files_and_directories_complete(tmp_path: Path) -> None:
    (tmp_path / "incident.log").touch()
    (tmp_path / "inside").mkdir()
    assert complete("unicron-replay state --log in", directory=tmp_path) == ["incident.log", "inside"]
    assert complete("unicron-replay state --state-dir in", directory=tmp_path) == ["inside"]


async def test_names_of_what_runs_complete(served: Served) -> None:
    async def offered(line: str) -> list[str]:
        return await asyncio.to_thread(complete, line, served.url)

    state = served.coordinator.state
    nodes, tasks = sorted(state.nodes), sorted(state.tasks)
    assert nodes and tasks
    assert sorted(await offered("unicronctl cordon ")) == nodes
    assert sorted(await offered(f"unicronctl drain {nodes[0]} ")) == nodes
    assert sorted(await offered("unicronctl describe task ")) == tasks
    assert sorted(await offered("unicronctl events --node ")) == nodes
    assert await offered(f"unicronctl --url {served.url} cancel {tasks[0]}") == [tasks[0]]


def test_silent_in_time_without_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:  # takes connections, and never answers
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        environment = {**os.environ, "_UNICRON_COMPLETE": "1", "UNICRON_URL": url}
        began_s = time.monotonic()
        command = [PROGRAMS / "unicronctl", "cordon", "n"]
        done = subprocess.run(command, env=environment, capture_output=True, timeout=60)
        assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
        assert time.monotonic() - began_s > LIMIT_S / 2
    gone = subprocess.run(command, env=environment, capture_output=True, timeout=60)
    assert (gone.returncode, gone.stdout, gone.stderr) == (0, b"", b"")
