"""What a worker shows of itself to people who look at a machine's processes."""

from __future__ import annotations

import subprocess
import sys

import pytest

#: A process that shows itself under a name, and what is read of it then: arguments, command, and that it lives.
_PROGRAM = """
import os, sys
from pathlib import Path
from unicrond.agents.trainer.process.context import show_as
show_as(sys.argv[1])
process = Path(f"/proc/{os.getpid()}")
print(process.joinpath("cmdline").read_bytes().rstrip(b"\\0").decode())
print(process.joinpath("comm").read_text().strip())
print(len(sys.argv[1]), os.environ["HOME"])
"""


@pytest.mark.parametrize("name", ["unicrond: big rank 3", "unicrond: a-task-with-a-longer-name rank 17"])
def test_worker_is_shown_by_task_and_rank(name: str) -> None:
    command = [sys.executable, "-c", _PROGRAM, name, "room " * 20]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, env={"HOME": "/home/of-somebody"})
    arguments, title, rest = shown.stdout.splitlines()
    assert arguments == name and title == name.removeprefix("unicrond: ")[:15].strip()
    assert rest == f"{len(name)} /home/of-somebody", "nothing else of the process has changed"


def test_name_is_cut_where_the_arguments_have_no_room() -> None:
    program = _PROGRAM.replace("show_as(sys.argv[1])", "show_as('unicrond: ' + 'x' * 10_000)")
    shown = subprocess.run(
        [sys.executable, "-c", program, ""], capture_output=True, text=True, check=True, env={"HOME": "h"}
    )
    assert shown.stdout.splitlines()[0].startswith("unicrond: xxx") and shown.stdout.endswith("0 h\n")
