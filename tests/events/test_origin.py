"""A stranger's package with one of our names is noticed at start-up."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from events import origin


def test_our_own_packages_come_from_one_place() -> None:
    origin.check()


def test_a_strangers_package_is_refused_with_one_line(tmp_path: Path) -> None:
    (tmp_path / "agents").mkdir()
    (tmp_path / "agents" / "__init__.py").touch()
    done = subprocess.run(
        [sys.executable, "-c", "from unicrond.cli import main; raise SystemExit(main(['run']))"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "package agents comes from" in done.stderr and "Traceback" not in done.stderr
