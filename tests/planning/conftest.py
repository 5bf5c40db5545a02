"""What the planner's tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from unicrond.core.planning import kernel_choice as kernel


@pytest.fixture(params=["numpy", "numba"])
def each_kernel(request: pytest.FixtureRequest) -> Iterator[str]:
    """Have the planner use each of its kernels; yield its name."""
    kernel.use(request.param)
    yield request.param
    kernel.use("numpy")
