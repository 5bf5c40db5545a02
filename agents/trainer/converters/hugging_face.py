"""Hugging Face's LlamaForCausalLM and GPT2LMHeadModel: names, and how Megatron's fused tensors are taken apart.

Rules
-----
* Megatron's linear_qkv has the rows of one query group after the other: its queries, its key, its value. Hugging Face
  has all queries, all keys, all values (Llama in three tensors, GPT-2 in one, the other way round).
* linear_fc1 of a gated layer has the gate's rows before the others.
* Rotary embeddings of Megatron's turn the halves of a head, as Hugging Face's; with --rotary-interleaved neighbours, so
  the rows of queries and keys are put in the halves' order.
* The vocabulary is cut to its words, and padded with zeros: no token has those rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec
import torch

from unicrond.agents.trainer.converters import architecture, safetensors_files
from unicrond.agents.trainer.converters.architecture import Architecture
from unicrond.agents.trainer.converters.model_state import ModelState
from unicrond.agents.trainer.converters.safetensors_files import TensorFiles
from unicrond.agents.trainer.states.distributed_format import Reader
from unicrond.agents.trainer.states.state import BadState

CONFIG = "config.json"
_QKV, _PROJECTION = "self_attention.linear_qkv", "self_attention.linear_proj"
_FC1, _FC2 = "mlp.linear_fc1", "mlp.linear_fc2"
_WORDS, _POSITIONS = "embedding.word_embeddings.weight", "embedding.position_embeddings.weight"
_OUTPUT = "output_layer.weight"
_LAYERS = "decoder.layers."
_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
#: Buffers that older files have beside the parameters.
_BUFFERS = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")

#: How one tensor of Megatron's becomes some of Hugging Face's: as it is, transposed, two halves, or queries, keys and
#: values, apart or (GPT-2) side by side.
Kind: TypeAlias = Literal["same", "turned", "halves", "heads", "joined heads"]


class Part(NamedTuple):
    """A tensor of Megatron's, and Hugging Face's names for what is in it. `{n}`: the layer's number."""

    name: str
    counterparts: tuple[str, ...]
    kind: Kind = "same"


_LLAMA = (
    Part(_WORDS, ("model.embed_tokens.weight",)),
    Part(f"{_LAYERS}{_QKV}.layer_norm_weight", ("model.layers.{n}.input_layernorm.weight",)),
    Part(f"{_LAYERS}{_QKV}.weight", tuple(f"model.layers.{{n}}.self_attn.{p}_proj.weight" for p in "qkv"), "heads"),
    Part(f"{_LAYERS}{_PROJECTION}.weight", ("model.layers.{n}.self_attn.o_proj.weight",)),
    Part(f"{_LAYERS}{_FC1}.layer_norm_weight", ("model.layers.{n}.post_attention_layernorm.weight",)),
    Part(
        f"{_LAYERS}{_FC1}.weight", ("model.layers.{n}.mlp.gate_proj.weight", "model.layers.{n}.mlp.up_proj.weight"),
        "halves",
    ),
    Part(f"{_LAYERS}{_FC2}.weight", ("model.layers.{n}.mlp.down_proj.weight",)),
    Part("decoder.final_layernorm.weight", ("model.norm.weight",)),
    Part(_OUTPUT, ("lm_head.weight",)),
)  # fmt: skip
_GPT2 = (
    Part(_WORDS, ("transformer.wte.weight",)),
    Part(_POSITIONS, ("transformer.wpe.weight",)),
    *(
        part
        for field in ("weight", "bias")
        for part in (
            Part(f"{_LAYERS}{_QKV}.layer_norm_{field}", (f"transformer.h.{{n}}.ln_1.{field}",)),
            Part(f"{_LAYERS}{_QKV}.{field}", (f"transformer.h.{{n}}.attn.c_attn.{field}",), "joined heads"),
            Part(f"{_LAYERS}{_PROJECTION}.{field}", (f"transformer.h.{{n}}.attn.c_proj.{field}",), "turned"),
            Part(f"{_LAYERS}{_FC1}.layer_norm_{field}", (f"transformer.h.{{n}}.ln_2.{field}",)),
            Part(f"{_LAYERS}{_FC1}.{field}", (f"transformer.h.{{n}}.mlp.c_fc.{field}",), "turned"),
            Part(f"{_LAYERS}{_FC2}.{field}", (f"transformer.h.{{n}}.mlp.c_proj.{field}",), "turned"),
            Part(f"decoder.final_layernorm.{field}", (f"transformer.ln_f.{field}",)),
        )
    ),
    Part(_OUTPUT, ("lm_head.weight",)),
)  # fmt: skip
_PARTS = {"llama": _LLAMA, "gpt2": _GPT2}


@dataclass(frozen=True, slots=True)
class Sizes:
    """Extents of a model, which its tensors tell. `head`: of one head; `groups`: of queries that share a key."""

    layers: int
    width: int
    feed_forward: int
    heads: int
    groups: int
    head: int
    rows: int

    @staticmethod
    def of(shape: Architecture, tensors: Mapping[str, torch.Tensor]) -> Sizes:
        """Return the sizes of a model under Megatron's names. Raises BadState where they do not fit."""
        names = (_WORDS, f"{_LAYERS}{_QKV}.weight", f"{_LAYERS}{_PROJECTION}.weight", f"{_LAYERS}{_FC2}.weight")
        for name, axes in zip(names, (2, 3, 3, 3), strict=True):
            if name not in tensors:
                raise BadState(f"model: {name} is missing; it is neither a GPT nor a Llama")
            if tensors[name].dim() != axes:
                raise BadState(f"model: {name} is {tuple(tensors[name].shape)}, and has to have {axes} axes")
        rows, width = tensors[_WORDS].shape
        layers, qkv, _ = tensors[names[1]].shape
        of_heads, feed_forward = tensors[names[2]].shape[2], tensors[names[3]].shape[2]
        head, rest = divmod(of_heads, shape.heads) if shape.heads > 0 else (0, 1)
        groups, remainder = divmod(qkv - of_heads, 2 * head) if head and not rest else (0, 1)
        if remainder or groups < 1 or shape.heads % groups:
            raise BadState(
                f"model: {names[1]} has {qkv} rows and {names[2]} {of_heads} columns, which {shape.heads} heads cannot"
                " be cut of; give --hf-config with the model's own heads"
            )
        return Sizes(layers, width, feed_forward, shape.heads, groups, head, rows)

    def shape_of(self, part: Part, positions: int) -> tuple[int, ...]:
        """Return the shape that Megatron's tensor has to have."""
        qkv = (self.heads + 2 * self.groups) * self.head
        gated = 2 if part.kind == "halves" else 1
        rows = {
            _WORDS: (self.rows, self.width), _OUTPUT: (self.rows, self.width), _POSITIONS: (positions, self.width),
            f"{_QKV}.weight": (qkv, self.width), f"{_QKV}.bias": (qkv,),
            f"{_PROJECTION}.weight": (self.width, self.heads * self.head),
            f"{_FC1}.weight": (gated * self.feed_forward, self.width), f"{_FC1}.bias": (self.feed_forward,),
            f"{_FC2}.weight": (self.width, self.feed_forward),
        }  # fmt: skip
        extents = rows.get(part.name.removeprefix(_LAYERS), (self.width,))
        return (self.layers, *extents) if part.name.startswith(_LAYERS) else extents


# --- from Megatron's names -----------------------------------------------------------------------


def save(directory: Path, model: ModelState, config: Mapping[str, Any] | None, vocab: int = 0) -> None:
    """Write the model into a directory that is there and empty. `config`: a config.json that says what the model's
    settings do not, or say otherwise; `vocab`: words without padding, 0: as these say. Raises OSError, BadState."""
    shape = architecture.of_settings(model.settings) if config is None else architecture.of_config(config)
    sizes, parts = _checked(shape, model.tensors)
    words = vocab or shape.vocab or sizes.rows
    if words > sizes.rows:
        raise BadState(f"its vocabulary has {sizes.rows} rows, and {words} are asked for; see --vocab-size")
    take = partial(_taken_apart, shape, sizes, words)
    tensors = {name: tensor for part in parts for name, tensor in take(part, model.tensors[part.name])}
    contents = (tensor for part in parts for _, tensor in take(part, model.reader(part.name)))
    safetensors_files.write(directory, tensors, contents)
    positions = model.tensors[_POSITIONS].shape[0] if _POSITIONS in model.tensors else 0
    fields = _fields(shape, sizes, words, positions)
    fields |= {"tie_word_embeddings": _OUTPUT not in model.tensors, "torch_dtype": _DTYPES[model.tensors[_WORDS].dtype]}
    content = {**(config or {}), **architecture.to_config(shape, fields)}
    for name in ("bos_token_id", "eos_token_id"):
        content[name] = (config or {}).get(name)
    content.pop("dtype", None)  # the newer name of what is said here
    if config is not None and config.get("rope_parameters"):
        content["rope_parameters"] = config["rope_parameters"]
    (directory / CONFIG).write_bytes(msgspec.json.format(msgspec.json.encode(content)) + b"\n")


def _fields(shape: Architecture, sizes: Sizes, words: int, positions: int) -> dict[str, Any]:
    if shape.family == "gpt2":
        return {
            "n_embd": sizes.width, "n_layer": sizes.layers, "n_positions": positions, "n_inner": sizes.feed_forward,
            "vocab_size": words,
        }  # fmt: skip
    return {
        "hidden_size": sizes.width, "num_hidden_layers": sizes.layers, "intermediate_size": sizes.feed_forward,
        "num_key_value_heads": sizes.groups, "head_dim": sizes.head, "vocab_size": words,
    }  # fmt: skip


def _checked(shape: Architecture, tensors: Mapping[str, torch.Tensor]) -> tuple[Sizes, list[Part]]:
    """Return the model's sizes and its parts. Raises BadState unless its tensors are those of the family."""
    sizes = Sizes.of(shape, tensors)
    if shape.family == "gpt2" and (sizes.groups != sizes.heads or sizes.heads * sizes.head != sizes.width):
        raise BadState("model: its queries are grouped, or its heads are of a width of their own; a GPT-2 has neither")
    if next(iter(tensors.values())).dtype not in _DTYPES:
        raise BadState(f"model: {next(iter(tensors))} is {next(iter(tensors.values())).dtype}; cast the model first")
    parts = [part for part in _PARTS[shape.family] if part.name != _OUTPUT or _OUTPUT in tensors]
    names = {part.name for part in parts}
    if missing := sorted(names - tensors.keys()):
        raise BadState(f"model: {missing[0]} is missing, and {len(missing) - 1} more; a {shape.family} has them")
    if extra := sorted(tensors.keys() - names):
        raise BadState(f"model: {extra[0]}, and {len(extra) - 1} more: a {shape.family} has no such tensor")
    positions = tensors[_POSITIONS].shape[0] if _POSITIONS in names else 0
    for part in parts:
        expected, actual = sizes.shape_of(part, positions), tuple(tensors[part.name].shape)
        if expected != actual:
            raise BadState(f"model: {part.name} is {actual}; beside the others it has to be {expected}")
    return sizes, parts


def _taken_apart(
    shape: Architecture, sizes: Sizes, words: int, part: Part, tensor: torch.Tensor
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield Hugging Face's names and tensors of one of Megatron's."""
    if not part.name.startswith(_LAYERS):
        yield part.counterparts[0], tensor[:words] if part.name in (_WORDS, _OUTPUT) else tensor
        return
    for number, layer in enumerate(tensor):
        for name, piece in zip(part.counterparts, _SPLIT[part.kind](layer, shape, sizes), strict=True):
            yield name.format(n=number), piece


def _heads_of(layer: torch.Tensor, shape: Architecture, sizes: Sizes) -> list[torch.Tensor]:
    queries = sizes.heads // sizes.groups
    grouped = layer.reshape(sizes.groups, queries + 2, sizes.head, *layer.shape[1:])
    pieces = [grouped[:, :queries], grouped[:, queries : queries + 1], grouped[:, queries + 1 :]]
    if shape.is_interleaved:
        pieces[:2] = [torch.cat((piece[:, :, 0::2], piece[:, :, 1::2]), 2) for piece in pieces[:2]]
    return [piece.reshape(-1, *layer.shape[1:]) for piece in pieces]


_SPLIT: dict[Kind, Callable[[torch.Tensor, Architecture, Sizes], list[torch.Tensor]]] = {
    "same": lambda layer, shape, sizes: [layer],
    "turned": lambda layer, shape, sizes: [layer.t()],
    "halves": lambda layer, shape, sizes: list(layer.chunk(2)),
    "heads": _heads_of,
    "joined heads": lambda layer, shape, sizes: [torch.cat(_heads_of(layer, shape, sizes)).t()],
}


# --- to Megatron's names -------------------------------------------------------------------------


def load(directory: Path, vocab_multiple: int = 1) -> ModelState:
    """Return the model in the directory, with its vocabulary padded to a multiple. Raises OSError, BadState."""
    try:
        config = msgspec.json.decode((directory / CONFIG).read_bytes(), type=dict[str, Any])
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BadState(f"{CONFIG}: {error}") from None
    shape, files = architecture.of_config(config), TensorFiles(directory)
    names = _own_names(shape, config, files)
    parts = _PARTS[shape.family]
    layers = _layers(parts, names)
    missing = [
        name.format(n=n) for part in parts for name in part.counterparts
        for n in (range(layers) if "{n}" in name else (0,))
        if name.format(n=n) not in names and part.name != _OUTPUT
    ]  # fmt: skip
    if missing or not layers:
        names_missing = ", ".join(missing[:2]) or "the first layer"
        raise BadState(f"{names_missing} missing, of {layers} layers; fetch the files again")
    parts = tuple(part for part in parts if part.name != _OUTPUT or "lm_head.weight" in names)
    rows = -(-shape.vocab // vocab_multiple) * vocab_multiple
    joined = partial(_put_together, shape, config, layers, rows)
    expected = {name.format(n=n) for part in parts for name in part.counterparts for n in range(layers)}
    if extra := sorted(names.keys() - expected):
        raise BadState(f"{extra[0]}, and {len(extra) - 1} more: a {shape.family} of {layers} layers has no such tensor")
    try:
        tensors = {part.name: joined(part, lambda name: files.tensors[names[name]]) for part in parts}
    except RuntimeError as error:  # torch's, of shapes that do not fit
        raise BadState(f"{CONFIG} and the tensors do not fit: {error}") from None
    by_name = {part.name: part for part in parts}
    sizes, _ = _checked(shape, tensors)
    flags = {
        "--num-layers": layers, "--hidden-size": sizes.width, "--ffn-hidden-size": sizes.feed_forward,
        "--kv-channels": sizes.head,
        **({"--max-position-embeddings": tensors[_POSITIONS].shape[0]} if _POSITIONS in tensors else {}),
    }  # fmt: skip
    settings = architecture.to_settings(shape, flags)
    if sizes.groups != sizes.heads:
        settings |= {"--group-query-attention": "", "--num-query-groups": str(sizes.groups)}
    if _OUTPUT in tensors:
        settings["--untie-embeddings-and-output-weights"] = ""
    return ModelState(
        0, settings, tensors, lambda name: joined(by_name[name], lambda counterpart: files.tensor(names[counterpart]))
    )


def _own_names(shape: Architecture, config: Mapping[str, Any], files: TensorFiles) -> dict[str, str]:
    """Return the files' names of the parameters, by those of the whole model: OpenAI's GPT-2 has no `transformer.`"""
    is_bare = shape.family == "gpt2" and "wte.weight" in files.tensors
    names = {f"transformer.{name}" if is_bare and name != "lm_head.weight" else name: name for name in files.tensors}
    is_tied = config.get("tie_word_embeddings", shape.family == "gpt2")
    return {
        name: file_name for name, file_name in names.items()
        if not name.endswith(_BUFFERS) and not (is_tied and name == "lm_head.weight")
    }  # fmt: skip


def _layers(parts: Sequence[Part], names: Mapping[str, str]) -> int:
    layer = next(name for part in parts for name in part.counterparts if "{n}" in name)
    count = 0
    while layer.format(n=count) in names:
        count += 1
    return count


def _put_together(
    shape: Architecture, config: Mapping[str, Any], layers: int, rows: int, part: Part,
    reader: Reader,
) -> torch.Tensor:  # fmt: skip
    """Return one tensor of Megatron's from Hugging Face's."""
    if not part.name.startswith(_LAYERS):
        tensor = reader(part.counterparts[0])
        if part.name not in (_WORDS, _OUTPUT):
            return tensor
        if tensor.dim() != 2 or tensor.shape[0] != shape.vocab:
            raise BadState(f"{part.counterparts[0]} is {tuple(tensor.shape)}; vocab_size is {shape.vocab}")
        padding = torch.zeros(rows - shape.vocab, tensor.shape[1], dtype=tensor.dtype, device=tensor.device)
        return torch.cat((tensor, padding)) if len(padding) else tensor
    stack: torch.Tensor | None = None
    for number in range(layers):
        layer = _JOIN[part.kind]([reader(name.format(n=number)) for name in part.counterparts], shape, config)
        if stack is None:
            stack = torch.empty((layers, *layer.shape), dtype=layer.dtype, device=layer.device)
        if (layer.shape, layer.dtype) != (stack.shape[1:], stack.dtype):
            raise BadState(f"{part.counterparts[0].format(n=number)} has another shape or dtype than in layer 0")
        stack[number] = layer
    assert stack is not None
    return stack


def _qkv_of(pieces: Sequence[torch.Tensor], shape: Architecture, config: Mapping[str, Any]) -> torch.Tensor:
    query, key, value = pieces
    head = query.shape[0] // shape.heads
    groups = key.shape[0] // head if head else 0
    if not groups or shape.heads % groups or value.shape != key.shape or query.shape[0] != shape.heads * head:
        raise BadState(
            f"queries of {tuple(query.shape)}, keys of {tuple(key.shape)} and values of {tuple(value.shape)} are not of"
            f" {shape.heads} heads in groups"
        )
    if config.get("num_key_value_heads", groups) not in (groups, None):
        raise BadState(f"num_key_value_heads is {config['num_key_value_heads']}, the keys have {groups}")
    rest = query.shape[1:]
    grouped = [piece.reshape(groups, -1, head, *rest) for piece in (query, key, value)]
    return torch.cat(grouped, 1).reshape(-1, *rest)


def _joined_qkv(pieces: Sequence[torch.Tensor], shape: Architecture, config: Mapping[str, Any]) -> torch.Tensor:
    rows = pieces[0].t()
    if rows.shape[0] % 3:
        raise BadState(f"c_attn of {tuple(pieces[0].shape)} has no three parts")
    return _qkv_of(rows.chunk(3), shape, {})


_JOIN: dict[Kind, Callable[[Sequence[torch.Tensor], Architecture, Mapping[str, Any]], torch.Tensor]] = {
    "same": lambda pieces, shape, config: pieces[0],
    "turned": lambda pieces, shape, config: pieces[0].t(),
    "halves": lambda pieces, shape, config: torch.cat(list(pieces)),
    "heads": _qkv_of,
    "joined heads": _joined_qkv,
}
