"""State trees and checkpoints: what goes in comes out, and damage is seen."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agents.trainer import checkpoint
from agents.trainer.state import BadState, TrainingState, flatten, shapes, unflatten


class Alone:
    size, shard = 1, 0

    def all_true(self, value: bool) -> bool:
        return value

    def gather(self, row: bytes) -> list[bytes]:
        return [row]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and bool(torch.equal(one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


tensors = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]).flatmap(
    lambda dtype: st.lists(st.integers(0, 3), max_size=3).map(lambda shape: torch.ones(shape).to(dtype))
)
trees = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | st.text() | tensors,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text() | st.integers(0, 9), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(trees)
def test_trees_survive_flattening(tree: Any) -> None:
    skeleton, flat = flatten(tree)
    assert shapes(skeleton) == [(tensor.dtype, tuple(tensor.shape)) for tensor in flat]
    assert same(unflatten(skeleton, flat), tree)


def test_what_cannot_be_saved_is_named() -> None:
    with pytest.raises(BadState, match="set"):
        flatten({"a": {1}})
    assert same(unflatten(*flatten(OrderedDict(a=1))), {"a": 1})


def test_skeletons_that_are_none_are_refused() -> None:
    for skeleton in (b"", b"\xc1", b"\xd4\x05\x00"):
        with pytest.raises(BadState):
            shapes(skeleton)


def tree(iteration: int) -> dict[str, Any]:
    return {"iteration": iteration, "x": torch.arange(5.0) * iteration, "empty": torch.empty(0), "betas": (0.9, 0.99)}


def write(directory: Path, *iterations: int, keep: int = 2) -> None:
    for iteration in iterations:
        checkpoint.save(directory, "t", iteration, tree(iteration), Alone(), "t.1", keep)


def test_the_newest_is_loaded_and_old_ones_go(tmp_path: Path) -> None:
    (tmp_path / ".draft-00000001-t.9").mkdir()
    write(tmp_path, 1, 2, 3)
    assert same(checkpoint.load_newest(tmp_path, "t", Alone()), tree(3))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iteration-00000002", "iteration-00000003"]


def test_saving_an_iteration_again_replaces_it(tmp_path: Path) -> None:
    write(tmp_path, 1)
    write(tmp_path, 1)
    assert same(checkpoint.load_newest(tmp_path, "t", Alone()), tree(1))
    assert [path.name for path in tmp_path.iterdir()] == ["iteration-00000001"]


@pytest.mark.parametrize("damage", ["flip", "cut", "no file", "no manifest", "bad manifest", "other task"])
def test_a_damaged_one_is_passed_over(tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, 1, 2)
    newest = tmp_path / "iteration-00000002"
    shard, manifest = newest / "shard-0.bin", newest / "manifest.json"
    data = shard.read_bytes()
    if damage == "flip":
        shard.write_bytes(data[:-3] + bytes([data[-3] ^ 4]) + data[-2:])
    elif damage == "cut":
        shard.write_bytes(data[:-1])
    elif damage == "no file":
        shard.unlink()
    elif damage == "no manifest":
        manifest.unlink()
    elif damage == "bad manifest":
        manifest.write_text("{")
    else:
        manifest.write_text(manifest.read_text().replace('"t"', '"u"'))
    assert same(checkpoint.load_newest(tmp_path, "t", Alone()), tree(1))
    assert "is passed over" in capsys.readouterr().err


def test_none_is_none(tmp_path: Path) -> None:
    assert checkpoint.load_newest(tmp_path / "nowhere", "t", Alone()) is None


def state(width: int = 3) -> TrainingState:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(width, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    return TrainingState([model], optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1))


def test_a_restored_worker_steps_like_the_one_it_came_from() -> None:
    source, target = state(), state()
    batch = torch.ones(4, 3) * torch.arange(4.0)[:, None]

    def step(one: TrainingState) -> None:
        one.optimizer.zero_grad()
        one.models[0](batch).square().sum().backward()
        one.optimizer.step()
        one.scheduler.step()

    step(source)
    skeleton, flat = flatten(source.capture(1, 0.5))
    assert target.restore(unflatten(skeleton, [tensor.clone() for tensor in flat])) == (1, 0.5)
    step(source)
    step(target)
    assert source.params_digest() == target.params_digest()
    assert same(source.capture(2, 0.0), target.capture(2, 0.0))


def test_a_state_of_another_model_is_refused_untouched() -> None:
    target = state(width=4)
    before = target.params_digest()
    with pytest.raises(BadState, match=r"0\.weight"):
        target.restore(state(width=3).capture(1, 0.0))
    assert target.params_digest() == before
