"""What a worker's mark says of the end of training."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from agents.trainer.baseline import LAST_WRITE_US
from agents.trainer.context import Patience
from agents.trainer.detection import Detection
from agents.trainer.marks import Marker
from events.vocabulary import TaskSpec

START_US = 600_000_000


@pytest.mark.parametrize(
    ("longest_s", "limit_us"),
    [(None, START_US + LAST_WRITE_US), (0.0, 2 * START_US), (20.0, START_US + 6 * 20_000_000)],
    ids=["others write", "it wrote none yet", "it has written"],
)
def test_the_end_has_a_limit_and_no_collective_gives_up_before_it(longest_s: float | None, limit_us: int) -> None:
    mark, limits_s = Marker(None), list[float]()
    patience = Patience(fault_wait_s=120.0, lease_s=60.0, collective_timeout_s=600.0)
    context: Any = SimpleNamespace(
        patience=patience, launch=SimpleNamespace(spec=TaskSpec(name="t")), mark=mark, channel=None
    )
    group: Any = SimpleNamespace(limit=limits_s.append)
    Detection(context, []).ending(13, group, longest_s)
    assert mark.limit_us == limit_us, "nothing is known of the iterations"
    (limit_s,) = limits_s
    assert limit_s * 1e6 > 10 * limit_us
