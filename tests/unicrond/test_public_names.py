"""What a training script imports from the package."""

from __future__ import annotations

import subprocess
import sys

import pytest

import unicrond
from unicrond.agents.trainer.loop.hook import Hook


def test_package_exports_hook_and_loads_torch_lazily() -> None:
    program = (
        "import sys, unicrond; assert 'torch' not in sys.modules; from unicrond import Hook; assert 'torch' in"
        " sys.modules; print(Hook.__module__)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() == "unicrond.agents.trainer.loop.hook", done.stderr
    assert unicrond.Hook is Hook


def test_package_refuses_unknown_names() -> None:
    with pytest.raises(AttributeError, match="module 'unicrond' has no attribute 'hook'"):
        unicrond.hook  # type: ignore[attr-defined]  # noqa: B018
