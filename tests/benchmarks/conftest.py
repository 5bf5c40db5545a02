"""Benchmarks take minutes and assert next to nothing: they run when they are named, never in the plain suite."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignore everything here, unless an argument names this directory or something in it."""
    named = (config.invocation_params.dir / argument.partition("::")[0] for argument in config.args)
    return None if any(path.resolve().is_relative_to(HERE) for path in named) else True
