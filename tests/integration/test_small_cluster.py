"""The whole path, with real parts: nats-server, coordinator, agents, fork servers, Megatron-core training."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest

from tests.integration import chaos


class HeadChaos(chaos.Chaos):
    """The faults that `unicrond demo` has not (test_installed.py runs it): there a worker dies, and a node."""

    KINDS: ClassVar[tuple[str, ...]] = ("coordinator", "nats-server")


@pytest.mark.timeout(300)
async def test_a_sigkill_of_either_part_of_the_head_heals(tmp_path: Path) -> None:
    await chaos.run(faults=2, seed=7, directory=tmp_path, of=HeadChaos)


@pytest.mark.matrix
@pytest.mark.timeout(300)
async def test_one_sigkill_of_each_kind_heals(tmp_path: Path) -> None:
    await chaos.run(faults=4, seed=7, directory=tmp_path)
