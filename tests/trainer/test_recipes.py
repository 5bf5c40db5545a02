"""The recipes of docs/use/recipes.md, each run as it stands, in a process that unicrond did not start."""

from __future__ import annotations

import difflib
import re
import runpy
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

RECIPES = Path(__file__).parents[2] / "examples" / "recipes"
PROGRAMS = sorted(path.stem for path in RECIPES.glob("*.py"))


def logged(name: str, capsys: pytest.CaptureFixture[str]) -> list[dict[str, float]]:
    """The numbers of each line that the program logs."""
    runpy.run_path(str(RECIPES / f"{name}.py"), run_name="__main__")
    lines = re.findall(r"^iteration (\d+): (.*)$", capsys.readouterr().out, re.MULTILINE)
    return [
        {"iteration": float(iteration), **{part.split()[0]: float(part.split()[1]) for part in told.split(", ")}}
        for iteration, told in lines
    ]


@pytest.fixture(autouse=True)
def _curves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path / "runs"))


def test_document_lists_every_recipe() -> None:
    text = (RECIPES.parents[1] / "docs" / "use" / "recipes.md").read_text()
    assert PROGRAMS and all(f"examples/recipes/{name}.py" in text for name in PROGRAMS)


@pytest.mark.parametrize(
    ("script", "recipe", "lines_gone"), [("plain_torch", "torch_loop", 12), ("fsdp_loop", "fsdp", 20)]
)
def test_port_of_a_script_has_twelve_new_lines_at_most(script: str, recipe: str, lines_gone: int) -> None:
    """Beside the text that says what it is."""
    plain, port = (
        [line.strip() for line in path.read_text().split('"""', 2)[2].splitlines() if line.strip()]
        for path in (RECIPES.parent / f"{script}.py", RECIPES / f"{recipe}.py")
    )
    changes = [line for line in difflib.ndiff(plain, port) if line[0] in "+-"]
    assert sum(line[0] == "+" for line in changes) <= 12, changes
    assert sum(line[0] == "-" for line in changes) <= lines_gone, changes


def test_evaluation_recipe_lowers_loss(capsys: pytest.CaptureFixture[str]) -> None:
    lines = logged("evaluation", capsys)
    assert [line["iteration"] for line in lines] == [10, 20, 30, 40]
    assert lines[-1]["held_out"] < lines[0]["held_out"]


def test_token_budget_recipe_ends_after_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    lines = logged("tokens", capsys)
    assert len(lines) == 40  # 20,000 tokens at 512 each
    assert lines[-1]["loss"] < lines[0]["loss"]


def test_huggingface_recipe_lowers_loss(capsys: pytest.CaptureFixture[str]) -> None:
    lines = logged("huggingface", capsys)
    assert len(lines) == 30
    assert lines[-1]["loss"] < lines[0]["loss"]


def test_curves_recipe_writes_tensorboard(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    lines = logged("curves", capsys)
    written = EventAccumulator(str(tmp_path / "runs")).Reload().Scalars("loss")
    assert [scalar.step for scalar in written] == list(range(1, 41))
    assert [scalar.value for scalar in written] == pytest.approx([line["loss"] for line in lines], rel=1e-4)
