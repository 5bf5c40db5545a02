"""The four commands as they start: their version, and one line where the coordinator cannot."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from unicrond import VERSION

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("program", ["unicrond", "unicronctl", "unicron_agent", "unicron_replay"])
def test_command_prints_its_version(program: str) -> None:
    code = f"from unicrond.commands.entry_points import {program}; raise SystemExit({program}())"
    done = subprocess.run([sys.executable, "-c", code, "--version"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, f"{VERSION}\n"), done.stderr


def test_version_matches_package() -> None:
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == VERSION


@pytest.mark.parametrize("directory", ["/proc/nope", "/dev/null/state"])
def test_coordinator_reports_bad_state_directory_in_one_line(directory: str, tmp_path: Path) -> None:
    config = tmp_path / "unicron.yaml"
    config.write_text(f"state_dir: {directory}\n")
    command = [sys.executable, "-m", "unicrond.commands.cli", "run", "--config", str(config)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("unicrond: state_dir: cannot use /") and "set another state_dir" in done.stderr
