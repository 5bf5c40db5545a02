"""`make canary`: does the newest megatron-core of the package index have all that the trainer uses of it? One line for
each seam that is lost, by name; exit code 1 then. `MEGATRON`: the folder of a checkout, in place of the newest wheel.

Nothing is installed and nothing is imported: the files' syntax says what is there. Whether it trains, says
`make versions`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from tests.versions.core_seams import ATTRIBUTES, PASSED, USES, lookups_in, lost
from unicrond.agents.trainer.megatron.seams import SEAMS, missing
from unicrond.events.megatron.command_line import TESTED

#: Of the wheel that is asked for: the youngest Python that is tested.
PYTHON = "3.13"


def download(folder: Path) -> str:
    """Unpack the newest wheel into the folder, and return its version. Raises CalledProcessError: pip has said why."""
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:",
         "--python-version", PYTHON, "--dest", folder, "megatron-core"],
        check=True,
    )  # fmt: skip
    [wheel] = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        files.extractall(folder)
    return wheel.name.split("-")[1]


def report(release: Path, version: str) -> list[str]:
    """Return the lines of a release: each lost seam, or that there is none."""
    lines = [*lost(release), *missing(lookups_in(release))]
    count = len(USES) + len(SEAMS) + 1 + sum(map(len, (*ATTRIBUTES.values(), *PASSED.values())))
    known = "tested" if version in TESTED else f"tested are {', '.join(TESTED)}"
    return [*lines, f"megatron-core {version} ({known}): {len(lines)} of {count} seams are lost"]


def main() -> int:
    """Print the report; exit code 1 where a seam is lost."""
    checkout = os.environ.get("MEGATRON", "")
    with tempfile.TemporaryDirectory(prefix="unicron-canary-") as name:
        folder = Path(checkout or name)
        lines = report(folder, f"in {checkout}" if checkout else download(folder))
    print("\n".join(lines))
    return int(len(lines) > 1)


if __name__ == "__main__":
    sys.exit(main())
