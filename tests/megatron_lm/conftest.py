from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.regroup_rig import ForkServer


@pytest.fixture(scope="session")
def server() -> Iterator[ForkServer]:
    with ForkServer() as server:
        yield server
