"""The whole path, with real parts: nats-server, coordinator, agents, fork servers, Megatron-core training."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration import chaos


@pytest.mark.timeout(300)
async def test_one_sigkill_of_each_kind_heals(tmp_path: Path) -> None:
    await chaos.run(faults=4, seed=7, directory=tmp_path)
