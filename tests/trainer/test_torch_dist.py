"""Megatron's torch_dist: Megatron reads what is written here, and what it writes is read here, to the last bit."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing

from tests.trainer.converted_models import GPT, LLAMA, llama, one_worker, saved, state_of, step, varied
from unicrond.agents.trainer.converters import convert, torch_dist
from unicrond.agents.trainer.loop import pretrain_gpt
from unicrond.agents.trainer.states import checkpoint
from unicrond.agents.trainer.states.resharding import reshard
from unicrond.agents.trainer.states.state import BadState, TrainingState
from unicrond.agents.trainer.states.state_bytes import named_tensors
from unicrond.events.vocabulary import TaskSpec

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
MODELS: dict[str, tuple[TaskSpec, Callable[[], torch.nn.Module]]] = {
    "gpt": (GPT, lambda: pretrain_gpt.build_model(GPT)),
    "llama": (LLAMA, llama),
    "llama, bf16": (LLAMA, lambda: llama(in_16_bits=True)),
}


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    with one_worker():
        yield


def run(*words: object) -> int:
    return convert.main(["convert", *map(str, words)])


def trained(name: str) -> TrainingState:
    """Three steps on."""
    spec, build = MODELS[name]
    state = state_of(spec, varied(build()))
    for number in range(3):
        step(state, number)
    return state


def of_megatron(state: TrainingState, *, is_loading: bool) -> dict[str, Any]:
    """What Megatron-LM saves and loads, without its arguments."""
    tree: dict[str, Any] = {"model": state.models[0].sharded_state_dict()}
    tree["optimizer"] = state.optimizer.sharded_state_dict(tree, is_loading=is_loading)
    return {**tree, "opt_param_scheduler": state.scheduler.state_dict(), "iteration": 7, "checkpoint_version": 3.0}


def restored(spec: TaskSpec, model: torch.nn.Module, directory: Path) -> TrainingState:
    tree, _ = checkpoint.load(directory, "converted", 7, 0)
    state = state_of(spec, model)
    state.restore(reshard(state.capture(0, 0.0), [tree]))
    return state


def goes_on_alike(state: TrainingState, other: TrainingState) -> bool:
    losses = [[step(each, number) for number in range(3, 6)] for each in (state, other)]
    return losses[0] == losses[1] and state.params_digest() == other.params_digest()


@pytest.mark.parametrize("name", MODELS)
def test_megatron_goes_on_from_what_is_written(name: str, tmp_path: Path) -> None:
    """Same losses, same bits, with optimizer and schedule; Megatron reads what its loader asks for."""
    state, (spec, build) = trained(name), MODELS[name]
    source = saved(tmp_path / "big", spec, state)
    assert run(source, tmp_path / "megatron", "--to=torch-dist") == 0
    assert (tmp_path / "megatron/latest_checkpointed_iteration.txt").read_text() == "7"
    other = state_of(spec, build())
    loaded = dist_checkpointing.load(of_megatron(other, is_loading=True), str(tmp_path / "megatron/iter_0000007"))
    other.models[0].load_state_dict(loaded["model"])
    other.optimizer.load_state_dict(loaded["optimizer"])
    other.scheduler.load_state_dict(loaded["opt_param_scheduler"])
    arguments = vars(loaded["args"])
    assert (arguments["num_layers"], arguments["consumed_train_samples"]) == (3, 7 * spec.global_batch)
    assert arguments["no_save_rng"] and not arguments["no_save_optim"]
    assert goes_on_alike(state, other)


@pytest.mark.parametrize("name", MODELS)
def test_task_goes_on_from_what_megatron_wrote(name: str, tmp_path: Path) -> None:
    state, (spec, build) = trained(name), MODELS[name]
    folder = tmp_path / "megatron/iter_0000007"
    folder.mkdir(parents=True)
    dist_checkpointing.save(of_megatron(state, is_loading=False), str(folder))
    (folder.parent / "latest_checkpointed_iteration.txt").write_text("7")
    assert run(folder.parent, tmp_path / "small", "--to=portable") == 0
    assert goes_on_alike(state, restored(spec, build(), tmp_path / "small"))


def by_name(path: Path, task: str) -> dict[str, torch.Tensor]:
    """The tensors of a portable state: those of the optimizer by their parameters' names."""
    tree, _ = checkpoint.load(path, task, 7, 0)
    owners = tree["layout"]["optimizer"]
    tensors = dict(named_tensors({"tensors": tree["tensors"], "optimizer": tree["optimizer"]}))
    named = {}
    for place, tensor in tensors.items():
        owner = next((path for path in owners if f"{place}.".startswith(f"optimizer.{path}.")), None)
        role = place if owner is None else f"{owners[owner]}:{place.removeprefix(f'optimizer.{owner}')}"
        named[role] = tensor
    return named


@pytest.mark.parametrize("name", MODELS)
def test_way_there_and_back_keeps_every_bit(name: str, tmp_path: Path) -> None:
    spec, _ = MODELS[name]
    source = saved(tmp_path / "big", spec, trained(name))
    assert run(source, tmp_path / "first", "--to=portable") == 0
    assert run(tmp_path / "first/iteration-00000007", tmp_path / "megatron", "--to=torch-dist") == 0
    assert run(tmp_path / "megatron", tmp_path / "second", "--to=portable") == 0
    first, second = (by_name(tmp_path / place, "converted") for place in ("first", "second"))
    assert first.keys() == second.keys() and len(first) > 20
    assert all(first[each].dtype == second[each].dtype and torch.equal(first[each], second[each]) for each in first)
    settings = torch_dist.load(tmp_path / "megatron", model_only=True).settings
    assert settings and settings == checkpoint.load(tmp_path / "second", "converted", 7, 0)[0]["settings"]


def test_model_alone_is_a_release(tmp_path: Path) -> None:
    """Megatron-LM begins from it at iteration 0, and asks for no optimizer."""
    source = saved(tmp_path / "big", LLAMA, trained("llama"))
    assert run(source, tmp_path / "megatron", "--to=torch-dist", "--model-only=1") == 0
    assert (tmp_path / "megatron/latest_checkpointed_iteration.txt").read_text() == "release"
    model = torch_dist.load(tmp_path / "megatron", model_only=False)
    assert model.tree is None and len(model.tensors) == 9


class Harm:
    """What a pickle may order its reader to do."""

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.mkdir, ("harmed",)


def test_pickles_of_others_do_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    source = saved(tmp_path / "big", LLAMA, trained("llama"))
    assert run(source, tmp_path / "megatron", "--to=torch-dist") == 0
    folder = tmp_path / "megatron/iter_0000007"
    common = torch.load(folder / "common.pt", weights_only=False)
    torch.save({**common, "rerun_state_machine": Harm()}, folder / "common.pt")
    assert run(folder, tmp_path / "first", "--to=portable") == 0
    metadata = (folder / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(pickle.dumps([Harm()]))
    with pytest.raises(BadState, match="not of a release that can be read"):
        torch_dist.load(folder, model_only=True)
    (folder / ".metadata").write_bytes(metadata[:100])
    with pytest.raises(BadState, match="not a pickle that can be read here"):
        torch_dist.load(folder, model_only=True)
    assert not (tmp_path / "harmed").exists()


def test_checkpoint_that_cannot_be_converted_is_named(tmp_path: Path) -> None:
    source = saved(tmp_path / "big", LLAMA, trained("llama"))
    assert run(source, tmp_path / "megatron", "--to=torch-dist") == 0
    folder = tmp_path / "megatron/iter_0000007"
    common = torch.load(folder / "common.pt", weights_only=False)
    torch.save({**common, "optimizer": {"param_state_sharding_type": "x", "optimizer": {}}}, folder / "common.pt")
    with pytest.raises(BadState, match=r"^its optimizer's state is of --use-.* give --model-only"):
        torch_dist.load(folder, model_only=False)
    assert torch_dist.load(folder, model_only=True).tensors
    for wrong in ([1], {**common, "args": 5}, {**common, "optimizer": {"optimizer": 3}}):
        torch.save(wrong, folder / "common.pt")
        with pytest.raises(BadState, match=r"common.pt: not of a release that can be read: "):
            torch_dist.load(folder, model_only=False)
    (folder / "metadata.json").write_text("{")
    with pytest.raises(BadState, match=r"metadata.json: Input data was truncated"):
        torch_dist.load(folder, model_only=True)
    (folder / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    with pytest.raises(BadState, match="save with --ckpt-format torch_dist"):
        torch_dist.load(folder, model_only=True)
    (folder / ".metadata").unlink()
    with pytest.raises(BadState, match="a save that has not finished"):
        torch_dist.load(folder, model_only=True)
    with pytest.raises(BadState, match="it is not a checkpoint of Megatron's"):
        torch_dist.load(tmp_path / "big", model_only=True)
