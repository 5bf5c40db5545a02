"""`make versions`: the trainer's tests and the demo with each set of Python, megatron-core and torch that is supported,
from the package index's wheels alone. Environments, one for each Python, and the logs are in build/versions.

`ROW=3.12-0.19.2-2.14.1`: that one. `MEGATRON`: a checkout of Megatron-LM, whose Megatron-core and scripts the row has
in place of the wheel's.

An environment takes up to 6 GB (the index has torch's build for CUDA, which runs here on the CPU), so it is removed
when its rows are done or interrupted; `KEEP=1` leaves it. The last lines are the rows of docs/use/versions.md.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import groupby
from operator import attrgetter
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "versions"
#: Of constraints.txt: what a row has of its own, and what comes with it (torch 2.11 needs an older setuptools).
_OWN = re.compile(r"(setuptools|torch|torchft-nightly|megatron-core|triton|nvidia-(?!ml-py)[a-z0-9-]+|cuda-[a-z]+)==")
_HEAL = "heal_to_bits_of_unbroken_run_and_stock"
_SUITES = (
    "tests/versions", "tests/trainer", "tests/integration/test_plain_megatron.py",
    "tests/integration/test_sharded_optimizer.py", "tests/megatron_lm/test_healing.py",
    "tests/megatron_lm/test_against_stock.py::test_healed_sgd_parameters_match_stock",
    f"tests/megatron_lm/test_shared_sequences.py::test_sharers_of_sequences_{_HEAL}[cp 2]",
    f"tests/megatron_lm/test_spread_experts.py::test_spread_experts_{_HEAL}[ep 2]",
)  # fmt: skip
_MARKS = "not matrix and not gpu and not containers and not kubernetes and not slurm"


@dataclass(frozen=True, slots=True)
class Row:
    """Versions that are tested together."""

    python: str
    core: str
    torch: str

    def __str__(self) -> str:
        return f"{self.python}-{self.core}-{self.torch}"


ROWS = (
    Row("3.11", "0.16.1", "2.13.0"),
    Row("3.12", "0.17.1", "2.14.1"),
    Row("3.12", "0.18.2", "2.14.1"),
    Row("3.12", "0.19.2", "2.11.0"),
    Row("3.12", "0.19.2", "2.14.1"),
    Row("3.13", "0.19.2", "2.14.1"),
)


def constraints(folder: Path) -> Path:
    """Write the versions of all other packages, those of the locks; return the file."""
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not _OWN.match(line)]
    path = folder / "constraints.txt"
    path.write_text("\n".join(lines) + "\n")
    return path


def environment(row: Row, folder: Path) -> Path:
    """Make the row's environment; return its folder of commands. Raises CalledProcessError, or FileNotFoundError
    without such a Python."""
    python = shutil.which(f"python{row.python}")
    if python is None:
        raise FileNotFoundError(f"no python{row.python} in PATH")
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "bin" / "pip").exists():
        subprocess.run([python, "-m", "venv", folder], check=True)
    packages = [f"torch=={row.torch}", f"megatron-core=={row.core}", "--editable", f"{ROOT}[all,dev]"]
    if os.environ.get("MEGATRON"):
        packages.append("pybind11")  # a checkout compiles its helpers at its first run
    pip = [folder / "bin" / "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--constraint", constraints(folder), *packages], check=True, cwd=ROOT)
    return folder / "bin"


def run(row: Row, folder: Path, variables: Mapping[str, str]) -> list[str]:
    """Run the row; return the cells behind its versions: tests, demo."""
    commands = environment(row, folder.parent / f"python{row.python}")
    folder.mkdir(parents=True, exist_ok=True)
    variables = {**variables, "PATH": f"{commands}{os.pathsep}{variables.get('PATH', os.defpath)}"}
    suites = [str(commands / "pytest"), "-q", "-n", "2", "--dist", "loadscope", "-p", "no:cacheprovider", "-m", _MARKS]
    with (folder / "tests.log").open("w") as log:
        subprocess.run([*suites, *_SUITES], cwd=ROOT, env=variables, stdout=log, stderr=subprocess.STDOUT, check=False)
    counts = (folder / "tests.log").read_text().splitlines()
    counted = next((line for line in reversed(counts) if re.search(r"\d+ (passed|failed|error)", line)), "nothing ran")
    with (folder / "demo.log").open("w") as log:
        demo = [commands / "unicrond", "demo"]
        healed = subprocess.run(demo, cwd=folder, env=variables, stdout=log, stderr=subprocess.STDOUT, check=False)
    return [re.sub(r" in .*", "", counted.strip("= ")), "healed" if healed.returncode == 0 else "failed"]


def commit() -> str:
    """Return what the tree is."""
    words = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


def main(names: Sequence[str]) -> int:
    """Run the rows of these names, or all; exit code 0 only if each passed."""
    checkout = os.environ.get("MEGATRON", "")
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    if checkout:
        variables.update(PYTHONPATH=checkout, MEGATRON_LM=checkout)
    if unknown := [name for name in names if name not in map(str, ROWS)]:
        raise SystemExit(f"ROW: {unknown[0]!r} is none of {', '.join(map(str, ROWS))}")
    lines, failed = [], False
    rows = [row for row in ROWS if not names or str(row) in names]
    for python, rows_of_python in groupby(rows, attrgetter("python")):
        try:
            for row in rows_of_python:
                try:
                    cells = run(row, FOLDER / str(row), variables)
                except (OSError, subprocess.CalledProcessError) as error:
                    cells = [f"not run: {error}", ""]
                failed |= "failed" in " ".join(cells) or "error" in " ".join(cells) or "passed" not in cells[0]
                core = f"checkout {checkout}" if checkout else row.core
                cells += [f"{datetime.now(UTC):%Y-%m-%d}, `{commit()}`"]
                lines.append(f"| {row.python} | {core} | {row.torch} | {' | '.join(cells)} |")
                print(lines[-1], flush=True)
        finally:
            if not os.environ.get("KEEP"):
                shutil.rmtree(FOLDER / f"python{python}", ignore_errors=True)
    print(*lines, sep="\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
