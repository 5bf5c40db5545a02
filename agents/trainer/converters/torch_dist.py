"""Megatron's torch_dist checkpoints, as `--save` writes them and `--load` reads them.

    DIR/latest_checkpointed_iteration.txt      the iteration
    DIR/iter_0000120/metadata.json             names the format (DIR/release/: of a model alone)
    DIR/iter_0000120/common.pt                 iteration, arguments, scheduler, the optimizer's groups
    DIR/iter_0000120/.metadata, *.distcp       torch's distributed format, under Megatron's global names

Rules
-----
* Megatron reads in any layout what is written here, since every tensor is whole.
* A moment of a parameter is `optimizer.state.exp_avg.NAME`, its fp32 master `optimizer.state.fp32_param.NAME`, as of
  Megatron's plain optimizers. What the distributed optimizer keeps has other names and is not converted.
* Optimizer and scheduler are as Megatron's own state dictionaries, since ours are, too.
* The arguments in common.pt are those that Megatron-LM compares or goes on from; no random generators are written
  (`no_save_rng`), which differ from rank to rank.
* Pickles that are read execute nothing (`inert_pickle.py`).
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch

from unicrond.agents.trainer.converters import inert_pickle
from unicrond.agents.trainer.converters.model_state import TENSORS, ModelState, to_tree, whole_layout
from unicrond.agents.trainer.states.distributed_format import (
    Reader,
    TensorLocation,
    read_tensor,
    write_distributed_format,
)
from unicrond.agents.trainer.states.resharding import layout_in, value_at
from unicrond.agents.trainer.states.state import BadState
from unicrond.agents.trainer.states.state_bytes import named_tensors
from unicrond.events.vocabulary.tasks import ModelSpec

_TRACKER, _COMMON, _METADATA, _FORMAT = "latest_checkpointed_iteration.txt", "common.pt", ".metadata", "metadata.json"
_STATE, _MASTER = "optimizer.state.", "fp32_param"
_MASTERS, _LAYERS = "fp32_from_fp16_params", "decoder.layers."
_CONFIG = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch",
           "common_backend_version": 1}  # fmt: skip
#: Arguments of Megatron-LM that say which model it is, and their flags.
_FLAGS = {
    field: f"--{field.replace('_', '-')}"
    for field in (
        "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels", "num_query_groups",
        "max_position_embeddings", "seq_length", "normalization", "norm_epsilon", "swiglu", "position_embedding_type",
        "rotary_base", "rotary_percent", "rotary_interleaved", "use_rope_scaling", "rope_scaling_factor", "vocab_size",
        "tokenizer_type", "untie_embeddings_and_output_weights", "global_batch_size", "openai_gelu", "num_experts",
        "multi_latent_attention", "qk_layernorm", "apply_layernorm_1p", "squared_relu",
        "rotary_seq_len_interpolation_factor", "window_size", "no_rope_freq", "mtp_num_layers",
        "apply_residual_connection_post_layernorm", "attention_output_gate", "quick_geglu", "spec", "qk_l2_norm",
    )
}  # fmt: skip
_NEGATIVE = {"add_bias_linear": "--disable-bias-linear", "bias_gelu_fusion": "--no-bias-gelu-fusion"}
#: Megatron's name for a model without an iteration and an optimizer's state: training begins from it.
_RELEASE = "release"
_ITERATION = re.compile(r"iter_([0-9]{7,})")


# --- writing -------------------------------------------------------------------------------------


def save(directory: Path, model: ModelState) -> None:
    """Write the state, as `--load` names it, into a directory that is there and empty. Raises OSError, BadState."""
    common: dict[str, Any] = {
        "checkpoint_version": 3.0,
        "iteration": model.iteration,
        "num_floating_point_operations_so_far": 0,
        "args": _arguments(model),
    }
    tensors, moments = dict(model.tensors), dict[str, str]()
    if model.tree is not None and model.state_reader is not None:
        moments = _moments(model.tree)
        tree = dict(named_tensors(model.tree))
        tensors |= {name: tree[path] for name, path in moments.items()}
        common["optimizer"] = _common_optimizer(model.tree, model.state_reader)
        common["opt_param_scheduler"] = _plain(model.tree["scheduler"], "scheduler", model.state_reader)

    def content(name: str) -> torch.Tensor:
        """Return a tensor by Megatron's name."""
        if name in moments and model.state_reader is not None:
            return model.state_reader(moments[name])
        return model.reader(name)

    name = f"{model.iteration}" if model.tree is not None else _RELEASE
    folder = directory / (name if name == _RELEASE else f"iter_{model.iteration:07d}")
    folder.mkdir()
    write_distributed_format(folder, folder.name, {**tensors, **_extra_states(model)}, content)
    torch.save(common, folder / _COMMON)
    (folder / _FORMAT).write_bytes(msgspec.json.encode(_CONFIG))
    (directory / _TRACKER).write_text(name)


def _extra_states(model: ModelState) -> dict[str, list[None]]:
    """Return what Megatron asks for beside a layer's tensors: the states of 8-bit scales, of which there are none."""
    modules = ("self_attention.linear_qkv", "self_attention.core_attention", "self_attention.linear_proj")
    names = [f"{_LAYERS}{module}" for module in (*modules, "mlp.linear_fc1", "mlp.linear_fc2")]
    layers = next((len(tensor) for name, tensor in model.tensors.items() if name.startswith(_LAYERS)), 0)
    return {f"{name}._extra_state/shard_{n}_{layers}": [None] for name in names for n in range(layers)}


def _arguments(model: ModelState) -> argparse.Namespace:
    """Return what Megatron-LM compares with its own flags, and goes on from."""
    settings, is_whole = model.settings, model.tree is not None
    layers, width, rows = 0, 0, 0
    for name, tensor in model.tensors.items():
        layers = len(tensor) if name.startswith(_LAYERS) else layers
        rows, width = tensor.shape if name == "embedding.word_embeddings.weight" else (rows, width)
    batch = int(settings.get("--global-batch-size", settings.get("global_batch", "0")))
    default = ModelSpec().heads if settings.get("entry") == "gpt" else 0
    return argparse.Namespace(
        num_layers=layers,
        hidden_size=width,
        num_attention_heads=int(settings.get("--num-attention-heads", settings.get("model.heads", default))),
        padded_vocab_size=rows,
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        no_save_rng=True,
        no_save_optim=not is_whole,
        consumed_train_samples=model.iteration * batch if is_whole else 0,
        skipped_train_samples=0,
        consumed_valid_samples=0,
        unicrond_settings=settings,
    )


def _moments(tree: dict[str, Any]) -> dict[str, str]:
    """Return the path in the state of each tensor that the optimizer keeps in a parameter's shape, by Megatron's
    name."""
    moments = {}
    for path, name in layout_in(tree).optimizer.items():
        value = value_at(tree["optimizer"], path)
        for role, tensor in value.items() if isinstance(value, dict) else [(_MASTER, value)]:
            if isinstance(tensor, torch.Tensor) and tensor.shape == tree["tensors"][name].shape and tensor.dim():
                place = f"optimizer.{path}.{role}" if isinstance(value, dict) else f"optimizer.{path}"
                moments[f"{_STATE}{role}.{name}"] = place
    return moments


def _common_optimizer(tree: dict[str, Any], reader: Reader) -> dict[str, Any]:
    """Return what the optimizer keeps beside these tensors. Raises BadState where Megatron has no place for it."""
    optimizer, is_mixed = tree["optimizer"], _MASTERS in tree["optimizer"]
    inner, path = (optimizer["optimizer"], "optimizer.optimizer") if is_mixed else (optimizer, "optimizer")
    steps = {
        float(_plain(entry["step"], f"{path}.state.{number}.step", reader))
        for number, entry in inner["state"].items()
        if "step" in entry
    }
    if len(steps) > 1:
        raise BadState(f"optimizer: its parameters have made {sorted(steps)} steps; Megatron has one number for all")
    groups = [
        {
            key: _plain(value, f"{path}.param_groups.{n}.{key}", reader)
            for key, value in group.items()
            if key != "params"
        }
        for n, group in enumerate(inner["param_groups"])
    ]
    plain = {"state": {"common_step": torch.tensor(steps.pop())} if steps else {}, "param_groups": groups}
    if not is_mixed:
        return plain
    rest = optimizer.keys() - {"optimizer", _MASTERS}
    return {"optimizer": plain, **{key: _plain(optimizer[key], f"optimizer.{key}", reader) for key in rest}}


def _plain(value: Any, path: str, reader: Reader) -> Any:
    """Return the value with its tensors read."""
    if isinstance(value, torch.Tensor):
        return reader(path) if value.is_meta else value
    if isinstance(value, dict):
        return {key: _plain(inner, f"{path}.{key}", reader) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_plain(inner, f"{path}.{number}", reader) for number, inner in enumerate(value))
    return value


# --- reading -------------------------------------------------------------------------------------


class StoredTensors:
    """Read the tensors of a folder in torch's distributed format; `tensors`: on the meta device, by name. Raises
    OSError, BadState."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with (folder / _METADATA).open("rb") as file:
            metadata = inert_pickle.load(file)
        self.tensors: dict[str, torch.Tensor] = {}
        self._chunks: dict[str, list[tuple[Any, Any, TensorLocation]]] = {}
        try:
            places = {
                (index.fqn, _ints(getattr(index, "offset", None))): info
                for index, info in metadata.storage_data.items()
            }
            for name, entry in metadata.state_dict_metadata.items():
                if hasattr(entry, "chunks"):  # else an object, such as the state of random generators
                    self._note(str(name), entry, places)
        except (AttributeError, TypeError, KeyError, ValueError) as error:
            raise BadState(f"{_METADATA}: not of a release that can be read: {error!r}") from None

    def _note(self, name: str, entry: Any, places: Mapping[Any, Any]) -> None:
        dtype = entry.properties.dtype if hasattr(entry.properties, "dtype") else entry.properties.state[0]
        self.tensors[name] = torch.empty(_ints(entry.size), dtype=dtype, device="meta")
        self._chunks[name] = []
        for chunk in entry.chunks:
            info = places[name, _ints(chunk.offsets)]
            if Path(info.relative_path).name != info.relative_path or getattr(info, "transform_descriptors", None):
                raise ValueError(f"{info.relative_path!r} has to be the name of a file in the same directory")
            location = TensorLocation(info.relative_path, int(info.offset), int(info.length))
            self._chunks[name].append((_ints(chunk.offsets), _ints(chunk.sizes), location))

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor. Raises OSError, BadState."""
        like, whole = self.tensors[name], None
        count = 0
        for offsets, extents, location in self._chunks[name]:
            chunk = read_tensor(self._folder, location)
            if (tuple(chunk.shape), chunk.dtype) != (extents, like.dtype):
                raise BadState(f"{name}: {location.file} has another shape or dtype than {_METADATA} names")
            if extents == tuple(like.shape):
                return chunk
            whole = torch.empty(like.shape, dtype=like.dtype) if whole is None else whole
            box = tuple(slice(at, at + extent) for at, extent in zip(offsets, extents, strict=True))
            if whole[box].shape != chunk.shape:
                raise BadState(f"{name}: a part of {location.file} lies outside of it")
            whole[box] = chunk
            count += chunk.numel()
        if whole is None or count != like.numel():
            raise BadState(f"{name}: {count} of {like.numel()} numbers are present")
        return whole


def _ints(values: Any) -> tuple[int, ...]:
    return tuple(int(value) for value in (() if values is None else values))


def folder_of(source: Path) -> Path:
    """Return the folder of one checkpoint: the path itself, or the newest below it, as `--save` names it. Raises
    BadState."""
    if (source / _FORMAT).is_file() or _ITERATION.fullmatch(source.name):
        return source
    try:
        text = (source / _TRACKER).read_text("ascii").strip()
    except FileNotFoundError:
        raise BadState(f"it is not a checkpoint of Megatron's: neither {_FORMAT} nor {_TRACKER} is there") from None
    if not text.isdecimal() and text != _RELEASE:
        raise BadState(f"{_TRACKER}: {text[:40]!r} is not an iteration")
    return source / (text if text == _RELEASE else f"iter_{int(text):07d}")


def load(source: Path, *, model_only: bool) -> ModelState:
    """Return the state that Megatron has saved there. Raises OSError, BadState."""
    folder = folder_of(source)
    for name in (_FORMAT, _METADATA, _COMMON):
        if not (folder / name).is_file():
            raise BadState(f"{folder.name}/{name} is missing: not torch_dist, or a save that has not finished")
    try:
        kind = msgspec.json.decode((folder / _FORMAT).read_bytes())
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BadState(f"{folder.name}/{_FORMAT}: {error}") from None
    if not isinstance(kind, dict) or kind.get("sharded_backend") != "torch_dist":
        raise BadState(f"{folder.name}/{_FORMAT}: only torch_dist can be converted; save with --ckpt-format torch_dist")
    stored, common = StoredTensors(folder), inert_pickle.load_saved(folder / _COMMON)
    try:
        return _state_of(stored, common, model_only=model_only)
    except BadState:
        raise
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:  # others wrote it
        raise BadState(f"{folder.name}/{_COMMON}: not of a release that can be read: {error!r}") from None


def _state_of(stored: StoredTensors, common: Any, *, model_only: bool) -> ModelState:
    """Return the state of which these are the tensors, and the rest. Raises BadState; what it raises beside that is an
    error in `common`."""
    optimizers = ("optimizer.", "chained_")
    tensors = {name: tensor for name, tensor in stored.tensors.items() if not name.startswith(optimizers)}
    iteration = common.get("iteration", 0)
    model = ModelState(iteration if type(iteration) is int else 0, _settings_of(common), tensors, stored.tensor)
    optimizer = common.get("optimizer")
    if model_only or not optimizer:
        return model
    if not isinstance(optimizer, dict) or "param_state_sharding_type" in optimizer or 0 in optimizer:
        raise BadState(
            "its optimizer's state is of --use-distributed-optimizer, or of several optimizers, and cannot be"
            " converted; give --model-only"
        )
    model.tree, paths = _tree(model, optimizer, common.get("opt_param_scheduler"), stored)

    def state_reader(path: str) -> torch.Tensor:
        """Return a tensor of the state by its path."""
        return stored.tensor(paths.get(path, path.removeprefix(TENSORS)))

    model.state_reader = state_reader
    return model


def _tree(
    model: ModelState, optimizer: dict[str, Any], scheduler: Any, stored: StoredTensors
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the portable state, and Megatron's name of each of the optimizer's tensors, by path. Raises BadState."""
    is_mixed = "optimizer" in optimizer
    inner = optimizer["optimizer"] if is_mixed else optimizer
    prefix = "optimizer." if is_mixed else ""
    masters = [name for name in model.tensors if f"{_STATE}{_MASTER}.{name}" in stored.tensors]
    owners, paths, state = dict[str, str](), dict[str, str](), dict[int, dict[str, Any]]()
    moments: dict[str, dict[str, str]] = {}
    for whole in stored.tensors:
        if whole.startswith(_STATE):
            role, _, name = whole.removeprefix(_STATE).partition(".")
            if name not in model.tensors or stored.tensors[whole].shape != model.tensors[name].shape:
                raise BadState(f"{whole} is of no tensor of the model; give --model-only")
            if role != _MASTER:
                moments.setdefault(name, {})[role] = whole
    step = inner.get("state", {}).get("common_step")
    for number, (name, roles) in enumerate(moments.items()):
        owners[f"{prefix}state.{number}"] = name
        state[number] = {role: stored.tensors[whole] for role, whole in roles.items()}
        paths |= {f"optimizer.{prefix}state.{number}.{role}": whole for role, whole in roles.items()}
        if step is not None:
            state[number]["step"] = torch.tensor(float(step))
    owners |= {f"{_MASTERS}.0.{number}": name for number, name in enumerate(masters)}
    paths |= {f"optimizer.{_MASTERS}.0.{n}": f"{_STATE}{_MASTER}.{name}" for n, name in enumerate(masters)}
    groups = [{**group, "params": []} for group in inner["param_groups"]]
    whole_state: dict[str, Any] = {"state": state, "param_groups": groups}
    if is_mixed:
        rest = {key: value for key, value in optimizer.items() if key not in ("optimizer", _MASTERS)}
        of_masters = [stored.tensors[f"{_STATE}{_MASTER}.{name}"] for name in masters]
        whole_state = {"optimizer": whole_state, _MASTERS: [of_masters], **rest}
    tree, _ = to_tree(model.alone())
    layout = msgspec.to_builtins(whole_layout(model.tensors, owners))
    return {**tree, "layout": layout, "optimizer": whole_state, "scheduler": scheduler}, paths


def _settings_of(common: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings that the arguments of Megatron-LM amount to, as its flags."""
    arguments = vars(common.get("args", argparse.Namespace()))
    settings = arguments.get("unicrond_settings")
    if isinstance(settings, dict) and all(isinstance(text, str) for pair in settings.items() for text in pair):
        return dict(settings)
    settings = {}
    for field, flag in _FLAGS.items():
        value = arguments.get(field)
        if value not in (None, False):
            settings[flag] = "" if value is True else str(value)
    for field, flag in _NEGATIVE.items():
        if arguments.get(field) is False:
            settings[flag] = ""
    return settings
