"""A stranger's package with one of our names is noticed at start-up, also one that pip has written into ours."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import unicrond
from unicrond import origin

FOREIGN = 'raise SystemExit("a stranger\'s code ran")\n'


def test_our_own_packages_are_ours() -> None:
    origin.check()


def run(program: str, home: Path) -> subprocess.CompletedProcess[str]:
    """The command's first steps, with `home` before everything else on the path."""
    return subprocess.run(
        [
            sys.executable,
            "-c",
            f"from unicrond.commands.entry_points import {program}; raise SystemExit({program}())",
            "--version",
        ],
        cwd=home,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("program", ["unicrond", "unicronctl", "unicron_agent", "unicron_replay"])
def test_a_strangers_package_before_ours_is_refused_with_one_line(program: str, tmp_path: Path) -> None:
    (tmp_path / "agents").mkdir()
    (tmp_path / "agents" / "__init__.py").write_text(FOREIGN)
    done = run(program, tmp_path)
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert f"package agents in {tmp_path} is not unicrond's" in done.stderr
    assert "an environment of its own" in done.stderr


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A directory that holds our four packages and their record, as pip leaves them."""
    for name in origin.PACKAGES:
        package = Path(unicrond.__file__).parents[1] / name
        shutil.copytree(package, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    record(tmp_path, "unicrond", [f"{name}/__init__.py" for name in origin.PACKAGES])
    return tmp_path


def record(site: Path, name: str, files: list[str]) -> None:
    directory = site / f"{name}-1.0.dist-info"
    directory.mkdir()
    (directory / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (directory / "RECORD").write_text("".join(f"{file},,\n" for file in files))


def test_an_installation_in_order_starts(site: Path) -> None:
    done = run("unicrond", site)
    assert done.returncode == 0 and not done.stderr, done.stderr


@pytest.mark.parametrize("package", ["agents", "events", "replay"])
def test_a_package_that_a_stranger_has_overwritten_is_named_with_the_stranger(package: str, site: Path) -> None:
    (site / package / "__init__.py").write_text(FOREIGN)
    record(site, "openai-agents", [f"{package}/__init__.py"])
    done = run("unicron_agent", site)
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert f"another project (openai-agents) has overwritten {package}/__init__.py" in done.stderr
    assert "pip uninstall openai-agents, then install unicrond again" in done.stderr


def test_a_package_that_a_strangers_removal_has_damaged_is_named(site: Path) -> None:
    (site / "agents" / "__init__.py").unlink()
    done = run("unicrond", site)
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert "package agents in" in done.stderr and "install unicrond again" in done.stderr


def test_packages_of_two_installations_are_refused(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    second = site / "second"
    shutil.move(site / "replay", second / "replay")
    monkeypatch.setenv("PYTHONPATH", str(second))
    done = run("unicrond", site)
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert f"package replay comes from {second}" in done.stderr
