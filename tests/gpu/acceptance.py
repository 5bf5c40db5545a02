"""`make gpu-acceptance`: what a machine's GPUs can show of the CUDA and NCCL paths, and a record of it.

    python -m tests.gpu.acceptance [--record FILE]     # gpu-acceptance.json

Exit codes: 0 everything ran and passed; 1 something failed; 2 there is no GPU, nothing ran; 3 what ran passed, but NCCL
needs two devices.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import torch

from tests.gpu import devices

TESTS = ("tests/gpu", "tests/agents/accelerators/test_nvml.py")


def main(arguments: list[str] | None = None) -> int:
    """Run them, and write the record; the exit code."""
    parser = argparse.ArgumentParser(description="Run the CUDA, NCCL and NVML paths on this machine's GPUs.")
    parser.add_argument("--record", type=Path, default=Path("gpu-acceptance.json"), metavar="FILE")
    record = parser.parse_args(arguments).record
    if not devices.COUNT:
        print(f"gpu-acceptance: nothing was run: {devices.missing(1)}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-m", "", f"--junitxml={report}", *TESTS]
        status = subprocess.run(command, check=False).returncode
        results = _results(report) if report.exists() else []
    record.write_text(json.dumps({"machine": _machine(), "status": status, "tests": results}, indent=1) + "\n")
    print(f"gpu-acceptance: recorded in {record}")
    if status:
        return 1
    if devices.COUNT < 2:
        print(f"gpu-acceptance: passed on one device; NCCL was not run: {devices.missing(2)}", file=sys.stderr)
        return 3
    return 0


def _machine() -> dict[str, Any]:
    names = [torch.cuda.get_device_name(number) for number in range(devices.COUNT)]
    return {
        "date": time.strftime("%Y-%m-%d"),
        "gpus": names,
        "driver": _driver(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else None,
        "python": platform.python_version(),
    }


def _driver() -> str:
    try:
        return Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    except OSError:
        return "unknown"


def _results(report: Path) -> list[dict[str, Any]]:
    """What the tests' own report says, one entry per test."""
    found = []
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        outcome = next((kind for kind in ("failure", "error", "skipped") if case.find(kind) is not None), "passed")
        measured = {one.get("name", ""): one.get("value") for one in case.iter("property")}
        name = f"{case.get('classname')}::{case.get('name')}"
        found.append({"test": name, "outcome": outcome, "seconds": float(case.get("time", 0)), **measured})
    return found


if __name__ == "__main__":
    sys.exit(main())
