"""`make resolve`: does pip find, from nothing, a set of versions for the base install and for each extra?

It asks the package index and downloads no more than it must to know; only the base install is made and started.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from tests.integration.installation import ROOT, build, must, run


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
        failed += not _base_starts(directory, wheel)
    return 1 if failed else 0


def _resolves(directory: Path, wheel: Path, extra: str) -> bool:
    report = directory / "report.json"
    done = _pip_install(
        directory, "--dry-run", "--ignore-installed", "--report", report, f"{wheel}[{extra}]" if extra else wheel
    )
    if done.returncode:
        print(f"{extra or 'base'}: {done.stderr.strip()}", file=sys.stderr)
        return False
    found = {item["metadata"]["name"].lower() for item in json.loads(report.read_text())["install"]}
    pinned = {line.partition("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines()}
    loose = sorted(name for name in found - pinned - {"unicrond"} if not name.startswith(("nvidia-", "cuda-")))
    told = f", not pinned by constraints.txt: {', '.join(loose)}" if loose else ""
    print(f"{extra or 'base'}: {len(found)} packages{told}", flush=True)
    return True


def _base_starts(directory: Path, wheel: Path) -> bool:
    done = _pip_install(directory, wheel)
    if done.returncode == 0:
        done = run(directory / "env" / "bin" / "unicronctl", "--help", cwd=directory)
    print("base: installed and started" if done.returncode == 0 else f"base: {done.stderr.strip()}", flush=True)
    return done.returncode == 0


def _pip_install(directory: Path, *more: object) -> subprocess.CompletedProcess[str]:
    constraint = ("--quiet", "--constraint", ROOT / "constraints.txt")
    return run(directory / "env" / "bin" / "pip", "install", *constraint, *more, cwd=directory)


if __name__ == "__main__":
    sys.exit(main())
