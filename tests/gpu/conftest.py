"""What the tests on GPUs share: the trainer's fork server and corpus, and what makes GPUs add up to the same bits."""

from __future__ import annotations

from tests.integration.conftest import data, server

__all__ = ["ENV", "data", "server"]

#: cuBLAS is deterministic only with a workspace of its own.
ENV = {"UNICRON_BUCKET_BYTES": "16384", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
