"""The recipes of docs/use/recipes.md as tasks: healed, they log what they log alone (tests/trainer/test_recipes.py)."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from tests.integration.regroup_rig import ForkServer, Rig
from unicrond.events.vocabulary import LANES, CheckpointSpec, TaskSpec

RECIPES = Path(__file__).parents[2] / "examples" / "recipes"


def lines(text: str) -> list[str]:
    return re.findall(r"^iteration \d+: .*$", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("name", "iterations", "global_batch", "micro_batch"),
    [
        ("evaluation", 40, 32, 8),
        ("tokens", 1000, 16, 4),
        ("huggingface", 30, 16, 4),
        ("curves", 40, 32, 8),
        ("torch_loop", 24, 16, 4),
    ],
)
def test_recipe_heals_and_logs_as_alone(
    server: ForkServer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    iterations: int,
    global_batch: int,
    micro_batch: int,
) -> None:
    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path / "alone"))
    program = str(RECIPES / f"{name}.py")
    runpy.run_path(program, run_name="__main__")
    alone = lines(capsys.readouterr().out)
    env = {LANES: "1", "OMP_NUM_THREADS": "1", "TENSORBOARD_DIR": str(tmp_path)}
    spec = TaskSpec(
        name="t", max_workers=2, entry=program, global_batch=global_batch, micro_batch=micro_batch,
        iterations=iterations, accumulation="exact", env=env,
        checkpoint=CheckpointSpec(interval=0, memory_interval=0),
    )  # fmt: skip
    with Rig(server, tmp_path, spec) as rig:
        rig.start("t.1")
        rig.start("t.2", fault="kill@iteration=15,micro_batch=1")
        rig.until(lambda: rig.ready("t.1", "t.2"))
        rig.tell(1, ["t.1", "t.2"])
        rig.until(lambda: "t.2" in rig.exits)
        rig.tell(2, ["t.1"], urgent=True)
        rig.until(lambda: rig.completed and "t.1" in rig.exits)
        assert rig.exits["t.1"] == 0
    assert lines((tmp_path / "t.1.log").read_text()) == alone
