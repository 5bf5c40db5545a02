"""A checkpoint without its layout: from any form, into any other, by storage."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given

from tests.trainer.test_resharding import WHOLE, forms, grouped, same, shards, state
from unicrond.agents.trainer.converters import convert
from unicrond.agents.trainer.states import checkpoint, portable
from unicrond.agents.trainer.states.checkpoint import WriteJob
from unicrond.agents.trainer.states.resharding import WHOLE as MARK
from unicrond.agents.trainer.states.resharding import reshard
from unicrond.agents.trainer.states.state import BadState
from unicrond.events.vocabulary.shape import Shape


@given(forms, forms)
def test_portable_state_converts_between_any_layouts(before: tuple[int, int], after: tuple[int, int]) -> None:
    tree = portable.whole(shards(before))
    assert tree.pop(MARK) is True
    assert {name: tensor.tolist() for name, tensor in tree["tensors"].items()} == {
        name: tensor.tolist() for name, tensor in WHOLE.items()
    }
    for shard in range(after[0] * after[1]):
        assert same(reshard(state(after, shard, trained=False), [tree]), state(after, shard))


def saved(directory: Path, form: tuple[int, int]) -> str:
    for shard, tree in enumerate(shards(form)):
        checkpoint.write(WriteJob(directory, "big", 7, 1, shard, Shape(*form), "test", 2), tree)
    return str(directory / "iteration-00000007")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_exported_checkpoint_is_readable_and_importable(tmp_path: Path) -> None:
    """torch reads what is exported; another task finds it under its own name."""
    exported = portable.export_to(saved(tmp_path / "big", (2, 2)), str(tmp_path / "out"))
    into = {"tensors.layers.weight": torch.zeros(WHOLE["layers.weight"].shape)}
    dcp.load(into, checkpoint_id=f"{exported}/shard-0", no_dist=True)
    assert torch.equal(into["tensors.layers.weight"], WHOLE["layers.weight"])
    portable.import_to(exported, str(tmp_path / "other"), "small")
    assert checkpoint.newest_iterations(tmp_path / "other", "small") == {7: Shape()}
    tree, _ = checkpoint.load(tmp_path / "other", "small", 7, 0)
    assert same(reshard(state((1, 2), 1, trained=False), [tree]), state((1, 2), 1))


def test_export_keeps_existing_and_names_invalid_directories(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = saved(tmp_path / "big", (1, 1))
    portable.export_to(source, str(tmp_path / "out"))
    with pytest.raises(BadState, match="is there already"):
        portable.export_to(source, str(tmp_path / "out"))
    assert convert.main(["import", source, str(tmp_path / "other"), "--task=small"]) == 1
    assert convert.main(["export", str(tmp_path), str(tmp_path / "other")]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert "is a task's own checkpoint; export it first" in lines[0] and "is no checkpoint's directory" in lines[1]
    assert not (tmp_path / "other").exists()


def test_portable_state_refuses_split_experts() -> None:
    apart, together = (grouped((1, 1), 0, trained=True, apart=apart, masters=False) for apart in (True, False))
    assert portable.whole([together])[MARK]
    with pytest.raises(BadState, match="as of experts over several workers; reshape the task to ep 1 first"):
        portable.whole([apart])
