"""What a training script imports from the package."""

from __future__ import annotations

import subprocess
import sys

import pytest

import unicrond
from unicrond.agents.trainer.loop.hook import Hook


def test_the_hook_is_there_and_torch_comes_only_with_it() -> None:
    program = (
        "import sys, unicrond; assert 'torch' not in sys.modules; from unicrond import Hook; assert 'torch' in"
        " sys.modules; print(Hook.__module__)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() == "unicrond.agents.trainer.loop.hook", done.stderr
    assert unicrond.Hook is Hook


def test_other_names_are_refused_as_by_any_module() -> None:
    with pytest.raises(AttributeError, match="module 'unicrond' has no attribute 'hook'"):
        unicrond.hook  # type: ignore[attr-defined]  # noqa: B018
