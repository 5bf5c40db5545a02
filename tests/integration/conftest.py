"""What all tests of the trainer share: one fork server that has imported torch and Megatron, and one corpus."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.regroup_rig import ForkServer
from unicrond.agents.trainer.loop import corpus


@pytest.fixture(scope="session")
def server() -> Iterator[ForkServer]:
    """Rigs use it one after the other, in whatever module they stand."""
    with ForkServer() as started:
        yield started


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The prefix of its files; nobody writes to them."""
    prefix = tmp_path_factory.mktemp("corpus") / "stdlib"
    corpus.build(prefix)
    return prefix
