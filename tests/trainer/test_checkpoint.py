"""State trees and checkpoints: what goes in comes out, and damage is seen."""

from __future__ import annotations

from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from unicrond.agents.trainer.states import checkpoint, state_bytes
from unicrond.agents.trainer.states.state import BadState, TrainingState, flatten, shapes, unflatten
from unicrond.events.vocabulary.shape import Shape


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
def test_state_tree_survives_flattening(tree: Any) -> None:
    skeleton, flat = flatten(tree)
    assert shapes(skeleton) == [(tensor.dtype, tuple(tensor.shape)) for tensor in flat]
    assert same(unflatten(skeleton, flat), tree)


def test_flatten_names_unsupported_type() -> None:
    with pytest.raises(BadState, match="set"):
        flatten({"a": {1}})
    assert same(unflatten(*flatten(OrderedDict(a=1))), {"a": 1})


def test_invalid_skeleton_is_refused() -> None:
    for skeleton in (b"", b"\xc1", b"\xd4\x05\x00"):
        with pytest.raises(BadState):
            shapes(skeleton)


def tree(iteration: int) -> dict[str, Any]:
    return {
        "iteration": iteration,
        "loss": 0.5,
        "tensors": {"x": torch.arange(5.0) * iteration, "empty": torch.empty(0), "one": torch.tensor(3)},
        "optimizer": {"betas": (0.9, 0.99), "state": {0: {"m": torch.ones(2, 3, dtype=torch.bfloat16)}}},
        "scheduler": None,
    }


def job(directory: Path, iteration: int, shard: int = 0, shards: int = 1, keep: int = 2) -> checkpoint.WriteJob:
    return checkpoint.WriteJob(directory, "t", iteration, 3, shard, Shape(shards, vpp=3), "0-3", keep)


def write(directory: Path, *iterations: int) -> None:
    for iteration in iterations:
        saved = checkpoint.write(job(directory, iteration), tree(iteration))
        assert saved is not None and Path(saved.path) == directory / f"iteration-{iteration:08d}"
        assert saved.size_bytes == sum(file.stat().st_size for file in Path(saved.path, "shard-0").iterdir())


def load(directory: Path, iteration: int) -> dict[str, Any]:
    return checkpoint.load(directory, "t", iteration, 0)[0]


def test_checkpoint_keeps_newest_and_removes_older(tmp_path: Path) -> None:
    (tmp_path / ".draft-00000001-9-1").mkdir()
    write(tmp_path, 1, 2, 3)
    assert list(checkpoint.newest_iterations(tmp_path, "t")) == [3, 2]
    assert same(load(tmp_path, 3), tree(3))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iteration-00000002", "iteration-00000003"]


def test_repeated_save_replaces_iteration(tmp_path: Path) -> None:
    write(tmp_path, 1)
    write(tmp_path, 1)
    assert same(load(tmp_path, 1), tree(1))
    assert [path.name for path in tmp_path.iterdir()] == ["iteration-00000001"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_checkpoint_is_readable_by_torch_alone(tmp_path: Path) -> None:
    """With nothing but torch: what makes the format worth its name."""
    write(tmp_path, 7)
    into = {"tensors.x": torch.zeros(5), "optimizer.state.0.m": torch.zeros(2, 3, dtype=torch.bfloat16)}
    dcp.load(into, checkpoint_id=tmp_path / "iteration-00000007" / "shard-0", no_dist=True)
    assert torch.equal(into["tensors.x"], torch.arange(5.0) * 7)
    assert torch.equal(into["optimizer.state.0.m"], torch.ones(2, 3, dtype=torch.bfloat16))


def test_last_shard_publishes_checkpoint(tmp_path: Path) -> None:
    assert checkpoint.write(job(tmp_path, 5, 1, 2), tree(5)) is None
    assert checkpoint.newest_iterations(tmp_path, "t") == {}
    saved = checkpoint.write(job(tmp_path, 5, 0, 2), tree(5))
    assert saved is not None
    assert checkpoint.newest_iterations(tmp_path, "t") == {5: Shape(2, vpp=3)}


def test_concurrent_shards_publish_once(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda shard: checkpoint.write(job(tmp_path, 5, shard, 4), tree(5)), range(4)))
    assert sum(result is not None for result in results) == 1
    for shard in range(4):
        assert same(checkpoint.load(tmp_path, "t", 5, shard)[0], tree(5))


@pytest.mark.parametrize("damage", ["cut", "no file", "no manifest", "bad manifest", "other task", "outside"])
def test_incomplete_checkpoint_is_skipped(tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, 1, 2)
    newest = tmp_path / "iteration-00000002"
    data, manifest = newest / "shard-0" / "__0_0.distcp", newest / "manifest.json"
    if damage == "cut":
        data.write_bytes(data.read_bytes()[:-1])
    elif damage == "no file":
        data.unlink()
    elif damage == "no manifest":
        manifest.unlink()
    elif damage == "bad manifest":
        manifest.write_text("{")
    elif damage == "outside":
        manifest.write_text(manifest.read_text().replace("shard-0/", "../"))
    else:
        manifest.write_text(manifest.read_text().replace('"t"', '"u"'))
    assert checkpoint.newest_iterations(tmp_path, "t") == {1: Shape(vpp=3)}
    assert "skipping checkpoint" in capsys.readouterr().err


def test_damaged_manifest_falls_back_to_older_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, 1, 2)
    manifest = tmp_path / "iteration-00000002" / "manifest.json"
    whole = manifest.read_bytes()
    for place in range(0, len(whole), 5):
        # 0x80 makes it no UTF-8, 1 another digit or name, 0x20 no JSON.
        for bit in (0x80, 0x20, 1):
            manifest.write_bytes(whole[:place] + bytes([whole[place] ^ bit]) + whole[place + 1 :])
            found = list(checkpoint.newest_iterations(tmp_path, "t"))
            assert found[-1:] == [1], f"bit {bit} of byte {place}"
            if found != [1]:  # it looks whole: what is read is held against digests and shapes
                try:
                    assert same(load(tmp_path, 2), tree(2))
                except (OSError, BadState):
                    continue
            else:
                assert f"skipping checkpoint {manifest.parent}: " in capsys.readouterr().err
    capsys.readouterr()
    manifest.write_bytes(b"\xff" + whole)
    assert list(checkpoint.newest_iterations(tmp_path, "t")) == [1]
    assert f"skipping checkpoint {manifest.parent}: manifest.json: " in capsys.readouterr().err
    for size in (0, 1, len(whole) // 2, len(whole) - 3):
        manifest.write_bytes(whole[:size])
        assert list(checkpoint.newest_iterations(tmp_path, "t")) == [1]


def test_manifest_with_invalid_file_name_is_skipped(tmp_path: Path) -> None:
    write(tmp_path, 1, 2)
    manifest = tmp_path / "iteration-00000002" / "manifest.json"
    manifest.write_text(manifest.read_text().replace("shard-0/__0_0", "shard-0/\\u0000"))
    assert list(checkpoint.newest_iterations(tmp_path, "t")) == [1]


def test_flipped_bit_fails_digest(tmp_path: Path) -> None:
    write(tmp_path, 1)
    file = tmp_path / "iteration-00000001" / "shard-0" / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)
    with pytest.raises(BadState, match="digest"):
        load(tmp_path, 1)


def test_nonfinite_state_is_refused(tmp_path: Path) -> None:
    sick = tree(1)
    sick["optimizer"]["state"][0]["m"][1, 1] = float("nan")
    checkpoint.write(job(tmp_path, 1), sick)
    with pytest.raises(BadState, match=r"optimizer\.state\.0\.m"):
        load(tmp_path, 1)


def test_missing_directory_has_no_checkpoints(tmp_path: Path) -> None:
    assert checkpoint.newest_iterations(tmp_path / "nowhere", "t") == {}


# --- as bytes ------------------------------------------------------------------------------------


def test_state_survives_bytes_round_trip() -> None:
    flat = state_bytes.Flat.of(tree(4))
    data = memoryview(bytearray(flat.size_bytes))
    flat.write(data)
    assert same(state_bytes.read(data, copy=True), tree(4))
    alias = state_bytes.read(data, copy=False)
    state_bytes.Flat.of(tree(5)).write(data)
    assert same(alias, {**tree(5), "iteration": 4})


@pytest.mark.parametrize("size_bytes", [0, 15, 40, -1])
def test_truncated_state_bytes_are_refused(size_bytes: int) -> None:
    flat = state_bytes.Flat.of(tree(4))
    data = bytearray(flat.size_bytes)
    flat.write(memoryview(data))
    with pytest.raises(BadState):
        state_bytes.read(memoryview(data[:size_bytes]), copy=True)


def state(width: int = 3) -> TrainingState:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(width, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    return TrainingState([model], optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1))


def test_restored_worker_steps_like_its_source() -> None:
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


def test_state_of_other_model_is_refused_untouched() -> None:
    target = state(width=4)
    before = target.params_digest()
    with pytest.raises(BadState, match=r"0\.weight"):
        target.restore(state(width=3).capture(1, 0.0))
    assert target.params_digest() == before


def test_state_restores_under_changed_learning_rate() -> None:
    """`unicronctl set TASK --lr`: the schedule is the program's, where it stands is the state's."""

    def trained(rate: float, iterations: int) -> tuple[TrainingState, OptimizerParamScheduler]:
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD([{"params": [*model.parameters()], "max_lr": rate, "min_lr": 0.0}], rate)
        scheduler = OptimizerParamScheduler(
            optimizer, init_lr=0.0, max_lr=rate, min_lr=0.0, lr_warmup_steps=0, lr_decay_steps=iterations,
            lr_decay_style="linear", start_wd=0.0, end_wd=0.0, wd_incr_steps=0, wd_incr_style="constant",
            use_checkpoint_opt_param_scheduler=False, override_opt_param_scheduler=True,
        )  # fmt: skip
        return TrainingState([model], optimizer, scheduler), scheduler

    before, scheduler = trained(0.5, 100)
    scheduler.step(50)
    assert before.optimizer.param_groups[0]["lr"] == 0.25
    after, scheduler = trained(0.1, 200)
    assert after.restore(before.capture(50, 1.0))[0] == 50
    assert scheduler.num_steps == 50
    assert after.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 150 / 200)
