"""Which GPUs a node has, without touching CUDA: a context in the fork server would break every child."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

_DRIVER = Path("/proc/driver/nvidia/gpus")


def visible_gpus(environ: Mapping[str, str] = os.environ, driver: Path = _DRIVER) -> tuple[str, ...]:
    """The names that CUDA_VISIBLE_DEVICES may have, one per slot: its own present value, else all; () on CPU nodes."""
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return tuple(name.strip() for name in chosen.split(",") if name.strip() and name.strip() != "-1")
    try:
        return tuple(str(number) for number in range(len(list(driver.iterdir()))))
    except OSError:
        return ()
