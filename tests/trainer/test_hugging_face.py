"""Checkpoints to and from Hugging Face: transformers computes the same, and no bit is lost there and back."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import safetensors.torch
import torch

from tests.trainer.converted_models import GPT, LLAMA, llama, logits, one_worker, saved, state_of, step, varied
from unicrond.agents.trainer.converters import convert, hugging_face, safetensors_files
from unicrond.agents.trainer.converters.model_state import Progress
from unicrond.agents.trainer.converters.safetensors_files import TensorFiles
from unicrond.agents.trainer.loop import pretrain_gpt
from unicrond.agents.trainer.states import checkpoint
from unicrond.agents.trainer.states.resharding import reshard
from unicrond.agents.trainer.states.state import BadState
from unicrond.events.vocabulary import TaskSpec
from unicrond.events.vocabulary.tasks import OptimizerSpec

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
TOKENS = torch.randint(0, 90, (2, 16), generator=torch.Generator().manual_seed(1))
INTERLEAVED = msgspec.structs.replace(LLAMA, args=(*LLAMA.args, "--rotary-interleaved"))
MODELS: dict[str, tuple[TaskSpec, Callable[[], torch.nn.Module]]] = {
    "gpt": (GPT, lambda: pretrain_gpt.build_model(GPT)),
    "llama": (LLAMA, llama),
    "llama, tied": (LLAMA, lambda: llama(is_tied=True)),
    "llama, interleaved": (INTERLEAVED, lambda: llama(is_interleaved=True)),
}


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    with one_worker():
        yield


def built(name: str) -> tuple[TaskSpec, torch.nn.Module]:
    spec, build = MODELS[name]
    return spec, varied(build())


def run(*words: object) -> int:
    return convert.main(["convert", *map(str, words)])


def theirs(directory: Path) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()
    with torch.no_grad():
        return model(TOKENS).logits


def ours(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return logits(model.eval(), TOKENS)


def tensors_in(directory: Path) -> dict[str, torch.Tensor]:
    files = TensorFiles(directory)
    return {name: files.tensor(name) for name in files.tensors}


def equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        first[name].dtype == second[name].dtype and torch.equal(first[name], second[name]) for name in first
    )


@pytest.mark.parametrize("name", MODELS)
def test_exported_model_computes_the_same(name: str, tmp_path: Path) -> None:
    """The logits differ by at most 1e-5, and are far from those of another model."""
    spec, model = built(name)
    source = saved(tmp_path / "big", spec, state_of(spec, model))
    assert run(source, tmp_path / "hf", "--to=hf") == 0
    expected, actual = ours(model), theirs(tmp_path / "hf")
    assert actual.shape[-1] == (96 if name == "gpt" else 90)
    assert expected.std() > 0.1
    assert (expected[..., : actual.shape[-1]] - actual).abs().max() < 1e-5


@pytest.mark.parametrize("name", ["gpt", "llama", "llama, tied"])
def test_way_there_and_back_keeps_every_bit(name: str, tmp_path: Path) -> None:
    spec, model = built(name)
    source = saved(tmp_path / "big", spec, state_of(spec, model))
    assert run(source, tmp_path / "hf", "--to=hf") == 0
    assert run(tmp_path / "hf", tmp_path / "back", "--to=portable", "--pad-vocab=32") == 0
    assert run(tmp_path / "back/iteration-00000001", tmp_path / "again", "--to=hf") == 0
    assert equal(tensors_in(tmp_path / "hf"), tensors_in(tmp_path / "again"))
    assert json.loads((tmp_path / "hf/config.json").read_text()) == json.loads(
        (tmp_path / "again/config.json").read_text()
    )


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_model_of_transformers_is_taken_up_by_a_task(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Made by transformers, in several files: the task computes the same, and trains on."""
    torch.manual_seed(11)
    if kind == "llama":
        config = transformers.LlamaConfig(
            hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2,
            head_dim=16, vocab_size=90, max_position_embeddings=16, rms_norm_eps=1e-6,
            rope_parameters={"rope_type": "default", "rope_theta": 5000.0}, bos_token_id=0, eos_token_id=1,
        )  # fmt: skip
        spec, model = LLAMA, llama()
    else:
        config = transformers.GPT2Config(
            n_embd=48, n_layer=3, n_head=4, n_positions=16, vocab_size=96, activation_function="gelu",
            tie_word_embeddings=False, bos_token_id=0, eos_token_id=1,
        )  # fmt: skip
        spec, model = GPT, pretrain_gpt.build_model(GPT)
    varied(transformers.AutoModelForCausalLM.from_config(config)).save_pretrained(
        tmp_path / "hf", max_shard_size="80KB"
    )
    assert (tmp_path / "hf" / safetensors_files.INDEX).is_file()
    capsys.readouterr()
    assert run(tmp_path / "hf", tmp_path / "small", "--to=portable", "--task=small", "--pad-vocab=32", "--json=1") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["from"], report["iteration"], report["optimizer"]) == ("hf", 1, False)
    tree, _ = checkpoint.load(tmp_path / "small", "small", 1, 0)
    state = state_of(spec, model)
    state.restore(reshard(state.capture(0, 0.0), [tree]))
    expected = theirs(tmp_path / "hf")
    assert expected.std() > 0.1
    assert (ours(model)[..., : expected.shape[-1]] - expected).abs().max() < 1e-5
    losses = [step(state, 1) for _ in range(4)]
    assert losses == sorted(losses, reverse=True)


def test_masters_of_a_model_in_16_bits_follow_from_it(tmp_path: Path) -> None:
    """Its task goes on from the model, and not from what it was built with."""
    model = varied(llama(in_16_bits=True))
    source = saved(tmp_path / "big", LLAMA, state_of(LLAMA, model))
    assert run(source, tmp_path / "hf", "--to=hf") == 0
    assert {tensor.dtype for tensor in tensors_in(tmp_path / "hf").values()} == {torch.bfloat16}
    assert run(tmp_path / "hf", tmp_path / "small", "--to=portable", "--pad-vocab=32") == 0
    tree, _ = checkpoint.load(tmp_path / "small", "converted", 1, 0)
    state = state_of(LLAMA, llama(in_16_bits=True))
    state.restore(reshard(state.capture(0, 0.0), [tree]))
    for group, masters in zip(
        state.optimizer.chained_optimizers[0].float16_groups,
        state.optimizer.chained_optimizers[0].fp32_from_float16_groups,
        strict=True,
    ):
        assert all(torch.equal(model.float(), master) for model, master in zip(group, masters, strict=True))


def test_package_safetensors_reads_what_is_written(tmp_path: Path) -> None:
    tensors = {
        "a": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
        "b": torch.tensor(3.5),
        "c": torch.zeros(0, 4, dtype=torch.int8),
        "d": torch.arange(5),
    }
    empty = {name: tensor.to("meta") for name, tensor in tensors.items()}
    safetensors_files.write(tmp_path, empty, iter(tensors.values()), shard_bytes=20)
    index = json.loads((tmp_path / safetensors_files.INDEX).read_text())
    assert index["metadata"] == {"total_size": 56} and set(index["weight_map"]) == set(tensors)
    loaded = {}
    for path in tmp_path.glob("*.safetensors"):
        loaded |= safetensors.torch.load_file(path)
    assert equal(loaded, tensors) and equal(tensors_in(tmp_path), tensors)
    assert len(set(index["weight_map"].values())) == 2


# --- what is refused -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama as Hugging Face has it."""
    directory = tmp_path_factory.mktemp("models")
    source = saved(directory / "big", LLAMA, state_of(LLAMA, varied(llama())))
    assert run(source, directory / "hf", "--to=hf") == 0
    return directory / "hf"


def changed(directory: Path, to: Path, **fields: Any) -> Path:
    """A copy with another config.json."""
    to.mkdir()
    for path in directory.iterdir():
        (to / path.name).write_bytes(path.read_bytes())
    config = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps({**config, **fields}))
    return to


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"model_type": "mixtral"}, "config.json: model_type 'mixtral' cannot be converted; llama and gpt2 can"),
        ({"attention_bias": True}, "config.json: attention_bias: True cannot be converted; False can"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "cannot be converted; default and llama3 can"),
        ({"num_attention_heads": 5}, "are not of 5 heads in groups"),
        ({"num_key_value_heads": 6}, "num_key_value_heads is 6, the keys have 2"),
        ({"vocab_size": 91}, "model.embed_tokens.weight is (90, 48); vocab_size is 91"),
    ],
)
def test_model_that_does_not_fit_its_config_is_refused(
    fields: dict[str, Any], error: str, model_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = changed(model_directory, tmp_path / "hf", **fields)
    assert run(source, tmp_path / "out", "--to=portable") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert error in line and line.startswith(f"unicronctl: {source}: ")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


def test_torn_and_missing_files_are_named(model_directory: Path, tmp_path: Path) -> None:
    torn = changed(model_directory, tmp_path / "torn")
    whole = (torn / "model.safetensors").read_bytes()
    in_8_bits = safetensors.torch.save({"model.norm.weight": torch.zeros(48, dtype=torch.float8_e4m3fn)})
    torn_file = "model.safetensors: it is not a safetensors file, or torn; fetch it again "
    for content, error in (
        (whole[:-1], torn_file),
        (whole[:5], torn_file),
        (b"\xff" * 100, torn_file),
        (whole[:8] + b"[" + whole[9:], torn_file),
        (in_8_bits, "model.norm.weight: dtype F8_E4M3 cannot be converted; cast the model"),
        (whole.replace(b"layers.2.mlp.up_proj", b"layers.7.mlp.up_proj"), "model.layers.2.mlp.up_proj.weight missing"),
    ):
        (torn / "model.safetensors").write_bytes(content)
        with pytest.raises(BadState, match=error):
            hugging_face.load(torn)
    (torn / "model.safetensors").unlink()
    (torn / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(BadState, match=r"neither model.safetensors nor .* files of pickle .* are not read"):
        hugging_face.load(torn)
    (torn / safetensors_files.INDEX).write_text('{"weight_map": {"a": "../other.safetensors"}}')
    with pytest.raises(BadState, match="has to be the name of a file in the same directory"):
        hugging_face.load(torn)


@pytest.mark.parametrize(
    ("args", "error"),
    [
        (("train.py",), "it does not say how many heads its model has"),
        ((*LLAMA.args, "--num-experts", "8"), "its model was trained with --num-experts, and is neither"),
        ((*LLAMA.args, "--rotary-percent", "0.5"), "--rotary-percent 0.5; a Llama has 1.0"),
        (("pretrain_gpt.py", "--num-attention-heads", "6", "--swiglu", "--disable-bias-linear"), "is neither a Llama"),
        (tuple("7" if arg == "6" else arg for arg in LLAMA.args), "which 7 heads cannot be cut of; give --hf-config"),
    ],
)
def test_task_that_is_neither_gpt_nor_llama_is_refused(
    args: tuple[str, ...], error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = "megatron-lm" if len(args) > 1 else "train.py"
    spec = msgspec.structs.replace(LLAMA, entry=entry, args=args)
    source = saved(tmp_path / "big", spec, state_of(LLAMA, llama()))
    assert run(source, tmp_path / "hf", "--to=hf") == 1
    assert error in capsys.readouterr().err
    assert not (tmp_path / "hf").exists()


def test_config_says_what_the_state_does_not(model_directory: Path, tmp_path: Path) -> None:
    spec = msgspec.structs.replace(LLAMA, entry="train.py", args=())
    model = varied(llama())
    source = saved(tmp_path / "big", spec, state_of(LLAMA, model))
    config = changed(model_directory, tmp_path / "given", eos_token_id=7) / "config.json"
    assert run(source, tmp_path / "hf", "--to=hf", f"--hf-config={config}") == 0
    assert json.loads((tmp_path / "hf/config.json").read_text()) == json.loads(config.read_text())
    assert (ours(model)[..., :90] - theirs(tmp_path / "hf")).abs().max() < 1e-5


def test_destination_that_is_not_empty_stays(
    model_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine").write_text("mine")
    assert run(model_directory, tmp_path / "out", "--to=torch-dist") == 1
    assert "is there and not empty; give another directory, or remove it" in capsys.readouterr().err
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "mine"]
    (tmp_path / "out/mine").unlink()
    assert run(model_directory, tmp_path / "out", "--to=torch-dist") == 0


def test_flag_that_means_nothing_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, error in (
        (("convert", "a", "b"), "--to: give the format"),
        (("convert", "a", "b", "--to=hf", "--pad-vocab=8"), "--pad-vocab: it is for torch-dist and portable alone"),
        (("export", "a", "b", "--vocab-size=8"), "--vocab-size: it is for hf alone"),
        (("import", "a", "b"), "--task: name the one"),
    ):
        with pytest.raises(SystemExit, match="2"):
            convert.main(words)
        assert error in capsys.readouterr().err


def test_interrupted_conversion_leaves_nothing(model_directory: Path, tmp_path: Path) -> None:
    """Ctrl-C while it reads a tensor, which takes its time here: the draft goes, the destination is not there."""
    source = changed(model_directory, tmp_path / "hf")
    script = (
        "import sys, time\n"
        "from unicrond.agents.trainer.converters import convert, hugging_face\n"
        "def slow(files, name):\n"
        "    print(name, flush=True)\n"
        "    time.sleep(60)\n"
        "hugging_face.TensorFiles.tensor = slow\n"
        "sys.exit(convert.main(sys.argv[1:]))\n"
    )
    words = ["convert", str(source), str(tmp_path / "out"), "--to=torch-dist"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, "-c", script, *words], stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None and process.stdout.readline()
        assert len([path for path in tmp_path.iterdir() if path.name.startswith(".out-")]) == 1
        process.send_signal(signal.SIGINT)
        assert process.wait() == 130
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


def test_distributed_optimizer_takes_up_a_model_alone(tmp_path: Path) -> None:
    """It holds everything: masters as the model's parameters, no moments."""
    spec = msgspec.structs.replace(GPT, model=msgspec.structs.replace(GPT.model, precision="bf16"))
    model = varied(pretrain_gpt.build_model(spec))
    source = saved(tmp_path / "big", spec, state_of(spec, model))
    assert run(source, tmp_path / "alone", "--to=portable", "--model-only=1") == 0
    tree, _ = checkpoint.load(tmp_path / "alone", "converted", 7, 0)
    spec = msgspec.structs.replace(spec, optimizer=OptimizerSpec(distributed=True))
    state = state_of(spec, pretrain_gpt.build_model(spec))
    state.restore(reshard(state.capture(0, 0.0), [tree]))
    parameters, expected = (dict(each.named_parameters()) for each in (state.models[0], model))
    assert equal(parameters, expected)
    for number, space in enumerate(state.optimizer.spaces):
        masters, moments = (state.optimizer.read((number, name), 0, space.extent) for name in ("master", "exp_avg"))
        assert torch.equal(masters, space.data.float()) and not moments.any()


def test_long_conversion_says_how_far_it_is() -> None:
    lines: list[str] = []
    progress = Progress(3_000_000_000, say=lines.append)
    progress._due_s = 0.0
    reader = progress.watched(lambda name: torch.empty(250_000_000, device="meta"))
    assert reader("a").numel() == 250_000_000 and reader("b").numel() == 250_000_000
    assert lines == ["1.0 of 3.0 GB"]
