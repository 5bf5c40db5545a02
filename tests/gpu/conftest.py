"""What the tests on GPUs share: the workers' helper process, the data, and what makes GPUs add up to the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from agents.trainer import corpus
from tests.integration.regroup_rig import ForkServer

#: cuBLAS is deterministic only with a workspace of its own.
ENV = {"UNICRON_BUCKET_BYTES": "16384", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with ForkServer() as started:
        yield started


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    prefix = tmp_path_factory.mktemp("corpus") / "stdlib"
    corpus.build(prefix)
    return prefix
