"""The whole path, with real parts: nats-server, coordinator, agents, fork servers, Megatron-core training."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest

from tests.integration import chaos


class HeadChaos(chaos.Chaos):
    """The faults that `unicrond demo` has not (test_installed.py runs it): there a worker dies, and a node."""

    KINDS: ClassVar[tuple[str, ...]] = ("coordinator", "nats-server")


@pytest.mark.timeout(600)
async def test_head_heals_after_sigkill_of_either_part(tmp_path: Path) -> None:
    await chaos.run(faults=2, seed=7, directory=tmp_path, of=HeadChaos)


@pytest.mark.matrix
@pytest.mark.timeout(600)
async def test_cluster_heals_after_one_sigkill_of_each_kind(tmp_path: Path) -> None:
    await chaos.run(faults=4, seed=7, directory=tmp_path)
