"""A user's folders `agents/`, `events/` and `replay/` are the user's: ours neither hide them nor run their code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

#: What a user's project may be called; each says so where somebody imports it who should not.
FOREIGN = ("agents", "events", "replay", "numpy", "msgspec")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A working folder with packages of the user's own, whose code leaves a trace where it runs."""
    for name in FOREIGN:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write({name!r})\n")
    (tmp_path / "agents" / "policy.py").write_text("NAME = 'my own policy'\n")
    return tmp_path


def run(project: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command in the user's folder."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(words, cwd=project, env=environment, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("program", ["unicrond", "unicronctl", "unicron-agent", "unicron-replay"])
def test_commands_run_no_code_of_the_working_folder(project: Path, program: str) -> None:
    completed = run(project, str(Path(sys.executable).parent / program), "--help")
    assert completed.returncode == 0, completed.stderr
    assert not (project / "ran").exists()


@pytest.mark.parametrize("module", ["unicrond.agents.fork_server", "unicrond.agents.health.self_test"])
def test_processes_of_an_agent_run_no_code_of_the_working_folder(project: Path, module: str) -> None:
    completed = run(project, sys.executable, "-P", "-m", module, "--help")
    assert completed.returncode == 0, completed.stderr
    assert not (project / "ran").exists()


def test_script_of_a_worker_imports_the_packages_beside_it(project: Path) -> None:
    (project / "train.py").write_text("from agents.policy import NAME\nprint(NAME)\n")
    lines = (
        "from unicrond.agents.trainer.entry.worker import run_script",
        "run_script('train.py', [])",
    )
    completed = run(project, sys.executable, "-P", "-c", "\n".join(lines))
    assert "my own policy" in completed.stdout, completed.stderr
