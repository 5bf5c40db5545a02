"""Finds a node's GPUs without touching CUDA: a context in the fork server would break every child."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

_DRIVER = Path("/proc/driver/nvidia/gpus")


def visible_gpus(environ: Mapping[str, str] = os.environ, driver: Path = _DRIVER) -> tuple[str, ...]:
    """Return the names for CUDA_VISIBLE_DEVICES, one per slot: its present value, else all GPUs; () on CPU nodes."""
    variable = environ.get("CUDA_VISIBLE_DEVICES")
    if variable is not None:
        return tuple(name.strip() for name in variable.split(",") if name.strip() and name.strip() != "-1")
    try:
        return tuple(str(number) for number in range(len(list(driver.iterdir()))))
    except OSError:
        return ()
