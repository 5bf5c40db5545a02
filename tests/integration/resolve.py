"""`make resolve`: does pip find, from nothing, a set of versions for the base install, each extra and unicrond-lab?

It asks the package index and downloads no more than it must to know; only the base install is made and started, beside
the packages of others that have the names of this project's folders.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from tests.integration.installation import LABORATORY, ROOT, build, must, run

#: Of others, by the import name, which is the name of a folder at the top of this repository.
NEIGHBOURS = {"agents": "openai-agents", "events": "Events", "replay": "replay-rec"}


def main() -> int:
    """Exit code 0 only if everything resolved."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    failed = 0
    with tempfile.TemporaryDirectory(prefix="unicron-resolve-") as name:
        directory = Path(name)
        must(sys.executable, "-m", "venv", directory / "env", cwd=directory)
        _, wheel = build(directory)
        for extra in ("", *extras):
            failed += not _resolves(directory, wheel, extra)
        failed += not _resolves(directory, build(directory, LABORATORY)[1], "", "--find-links", wheel.parent)
        failed += not _base_starts(directory, wheel)
        failed += not _stands_beside_neighbours(directory)
    return 1 if failed else 0


def _resolves(directory: Path, wheel: Path, extra: str, *more: object) -> bool:
    """Print how many packages the wheel brings with this extra ("": none), or what pip says instead."""
    report = directory / "report.json"
    name = extra or wheel.name.partition("-")[0]
    words = ("--dry-run", "--ignore-installed", "--report", report, *more, f"{wheel}[{extra}]" if extra else wheel)
    done = _pip_install(directory, *words)
    if done.returncode:
        print(f"{name}: {done.stderr.strip()}", file=sys.stderr)
        return False
    found = {item["metadata"]["name"].lower() for item in json.loads(report.read_text())["install"]}
    pinned = {line.partition("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines()}
    loose = sorted(package for package in found - pinned if not package.startswith(("nvidia-", "cuda-", "unicrond")))
    told = f", not pinned by constraints.txt: {', '.join(loose)}" if loose else ""
    print(f"{name}: {len(found)} packages{told}", flush=True)
    return True


def _base_starts(directory: Path, wheel: Path) -> bool:
    done = _pip_install(directory, wheel)
    if done.returncode == 0:
        done = run(directory / "env" / "bin" / "unicronctl", "--help", cwd=directory)
    print("base: installed and started" if done.returncode == 0 else f"base: {done.stderr.strip()}", flush=True)
    return done.returncode == 0


def _stands_beside_neighbours(directory: Path) -> bool:
    """Install the neighbours beside unicrond, have one process import all of them, and start unicronctl again."""
    done = run(directory / "env" / "bin" / "pip", "install", "--quiet", *NEIGHBOURS.values(), cwd=directory)
    if done.returncode == 0:
        modules = ", ".join((*NEIGHBOURS, "unicrond.agents", "unicrond.events", "unicrond.replay"))
        done = run(directory / "env" / "bin" / "python", "-P", "-c", f"import {modules}", cwd=directory)
    if done.returncode == 0:
        done = run(directory / "env" / "bin" / "unicronctl", "--help", cwd=directory)
    names = ", ".join(NEIGHBOURS.values())
    print(f"{names} beside it: {'all imported' if done.returncode == 0 else done.stderr.strip()}", flush=True)
    return done.returncode == 0


def _pip_install(directory: Path, *more: object) -> subprocess.CompletedProcess[str]:
    constraint = ("--quiet", "--constraint", ROOT / "constraints.txt")
    return run(directory / "env" / "bin" / "pip", "install", *constraint, *more, cwd=directory)


if __name__ == "__main__":
    sys.exit(main())
