"""What the built-in GPT's log says of training, and how often."""

from __future__ import annotations

import pytest

from unicrond.agents.trainer.loop.progress_lines import LOG_EVERY_S, ProgressLog


def test_progress_log_prints_first_and_every_ten_seconds() -> None:
    now_s = 1000.0
    progress = ProgressLog(lambda: now_s)
    told = []
    for made in range(1, 251):
        now_s += 0.1
        if line := progress.after(5.0 - made / 100):
            told.append((made, line))
    assert [made for made, _ in told] == [1, 101, 201]
    assert told[0][1] == {"loss": 4.99}
    for made, line in told[1:]:
        assert line == {"loss": pytest.approx(5.0 - made / 100), "iteration_s": pytest.approx(0.1)}


def test_progress_log_prints_each_long_iteration() -> None:
    now_s = 0.0
    progress = ProgressLog(lambda: now_s)
    for _ in range(3):
        now_s += 2 * LOG_EVERY_S
        assert progress.after(1.0)["loss"] == 1.0
    assert progress.after(1.0) == {}, "no time has passed"
