"""What the shapes of a GPT's or Llama's tensors do not tell: heads, norms, activation, rotary embedding, vocabulary.

It stands in the settings that a task's states carry (`training_settings.py`), or in a config.json of Hugging Face's. A
model that needs more than this is neither of the two, and is refused by the name of the setting.

Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from unicrond.agents.trainer.states.state import BadState
from unicrond.events.vocabulary.tasks import ModelSpec

_GIVE = "give --hf-config with a config.json of such a model"
#: Flags of Megatron-LM that make another model, and that no tensor tells of.
_REFUSED = (
    "--num-experts", "--multi-latent-attention", "--qk-layernorm", "--apply-layernorm-1p",
    "--squared-relu", "--rotary-seq-len-interpolation-factor", "--window-size", "--no-rope-freq", "--mtp-num-layers",
    "--apply-residual-connection-post-layernorm", "--attention-output-gate", "--quick-geglu", "--softmax-type",
    "--heterogeneous-layers-config-path", "--spec", "--normalize-embedding", "--qk-l2-norm", "--use-mup",
)  # fmt: skip
#: llama3's scaling of frequencies, as Megatron has it.
_SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
#: Of Hugging Face, by whether it is the exact one.
_GELU = {"gelu": True, "gelu_new": False, "gelu_pytorch_tanh": False}


class Architecture(msgspec.Struct, frozen=True, kw_only=True):
    """Describe a Llama, or a GPT with learned positions. `activation`: as Hugging Face names it. `vocab`: words without
    padding; 0: as many as there are rows. `positions`: the longest sequence; 0: as learned. `rotary_factor`: of
    llama3's scaling; 0: none."""

    family: Literal["llama", "gpt2"]
    heads: int
    activation: str = "silu"
    norm_epsilon: float = 1e-5
    vocab: int = 0
    positions: int = 0
    rotary_base: float = 10000.0
    rotary_factor: float = 0.0
    is_interleaved: bool = False


# --- settings of a task --------------------------------------------------------------------------


def of_settings(settings: Mapping[str, str]) -> Architecture:
    """Return the architecture that a task's settings describe. Raises BadState."""
    if settings.get("entry") == "gpt":
        return Architecture(family="gpt2", heads=int(settings.get("model.heads", ModelSpec().heads)), activation="gelu")
    if "--num-attention-heads" not in settings:
        raise BadState(f"it does not say how many heads its model has (its program is its own); {_GIVE}")
    for flag in _REFUSED:
        if settings.get(flag, "0") != "0":
            raise BadState(f"its model was trained with {flag}, and is neither a GPT nor a Llama")
    positions = settings.get("--position-embedding-type", "learned_absolute")
    is_rotary = positions == "rope" or "--use-rotary-position-embeddings" in settings
    is_llama = settings.get("--normalization") == "RMSNorm" and "--swiglu" in settings
    if is_llama != is_rotary or is_llama != ("--disable-bias-linear" in settings) or positions in ("none", "mrope"):
        raise BadState(
            "its model is neither a Llama (--normalization RMSNorm --swiglu --position-embedding-type rope"
            " --disable-bias-linear) nor a GPT (none of these)"
        )
    if _number(settings, "--rotary-percent", 1.0) != 1.0:
        raise BadState(f"its model has --rotary-percent {settings['--rotary-percent']}; a Llama has 1.0")
    is_padded = settings.get("--tokenizer-type") == "NullTokenizer"  # which adds a word to the flag's
    heads, epsilon = int(_number(settings, "--num-attention-heads", 0)), _number(settings, "--norm-epsilon", 1e-5)
    vocab = 0 if is_padded else int(_number(settings, "--vocab-size", 0))
    if not is_llama:
        is_exact = "--no-bias-gelu-fusion" in settings and "--openai-gelu" not in settings
        activation = "gelu" if is_exact else "gelu_new"
        return Architecture(family="gpt2", heads=heads, activation=activation, norm_epsilon=epsilon, vocab=vocab)
    return Architecture(
        family="llama",
        heads=heads,
        norm_epsilon=epsilon,
        vocab=vocab,
        positions=int(_number(settings, "--max-position-embeddings", _number(settings, "--seq-length", 0))),
        rotary_base=_number(settings, "--rotary-base", 10000.0),
        rotary_factor=_number(settings, "--rope-scaling-factor", 8.0) if "--use-rope-scaling" in settings else 0.0,
        is_interleaved="--rotary-interleaved" in settings,
    )


def _number(settings: Mapping[str, str], flag: str, default: float) -> float:
    try:
        return float(settings.get(flag, default))
    except ValueError:
        raise BadState(f"its setting {flag} is {settings[flag]!r}, no number; {_GIVE}") from None


def to_settings(shape: Architecture, sizes: Mapping[str, int]) -> dict[str, str]:
    """Return the flags of Megatron-LM that make this model. `sizes`: by flag."""
    settings = {flag: str(size) for flag, size in sizes.items()}
    settings |= {"--num-attention-heads": str(shape.heads), "--norm-epsilon": f"{shape.norm_epsilon:g}"}
    if shape.vocab:
        settings["--vocab-size"] = str(shape.vocab)
    if shape.family == "gpt2":
        return {**settings, **({"--no-bias-gelu-fusion": ""} if _GELU[shape.activation] else {})}
    scaling = {"--use-rope-scaling": "", "--rope-scaling-factor": f"{shape.rotary_factor:g}"}
    return {
        **settings,
        "--max-position-embeddings": str(shape.positions),
        "--normalization": "RMSNorm",
        "--swiglu": "",
        "--disable-bias-linear": "",
        "--position-embedding-type": "rope",
        "--rotary-base": f"{shape.rotary_base:.12g}",
        **(scaling if shape.rotary_factor else {}),
    }


# --- config.json ---------------------------------------------------------------------------------


def of_config(config: Mapping[str, Any]) -> Architecture:
    """Return the architecture that a config.json describes. Raises BadState."""
    kind = config.get("model_type")
    if kind not in ("llama", "gpt2"):
        raise BadState(f"config.json: model_type {kind!r} cannot be converted; llama and gpt2 can")
    expected: dict[str, Any] = {"attention_bias": False, "mlp_bias": False, "hidden_act": "silu"}
    if kind == "gpt2":
        expected = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False}
    for name, value in expected.items():
        if config.get(name, value) != value:
            raise BadState(f"config.json: {name}: {config[name]!r} cannot be converted; {value!r} can")
    try:
        return _of_llama(config) if kind == "llama" else _of_gpt2(config)
    except KeyError as error:
        raise BadState(f"config.json: {error.args[0]} is missing") from None
    except (TypeError, ValueError, AttributeError) as error:
        raise BadState(f"config.json: {error}") from None


def _of_gpt2(config: Mapping[str, Any]) -> Architecture:
    activation = config.get("activation_function", "gelu_new")
    if activation not in _GELU:
        raise BadState(f"config.json: activation_function: {activation!r} cannot be converted; {list(_GELU)} can")
    return Architecture(
        family="gpt2",
        heads=int(config["n_head"]),
        activation=activation,
        norm_epsilon=float(config.get("layer_norm_epsilon", 1e-5)),
        vocab=int(config["vocab_size"]),
    )


def _of_llama(config: Mapping[str, Any]) -> Architecture:
    rotary = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rotary.get("rope_type", rotary.get("type", "default"))
    if kind not in ("default", "llama3") or float(rotary.get("partial_rotary_factor", 1.0)) != 1.0:
        raise BadState(f"config.json: rope_parameters: {dict(rotary)} cannot be converted; default and llama3 can")
    if kind == "llama3" and any(float(rotary[name]) != value for name, value in _SCALING.items()):
        raise BadState(f"config.json: rope_parameters: of llama3 only {_SCALING} can be converted")
    return Architecture(
        family="llama",
        heads=int(config["num_attention_heads"]),
        norm_epsilon=float(config.get("rms_norm_eps", 1e-6)),
        vocab=int(config["vocab_size"]),
        positions=int(config.get("max_position_embeddings", 2048)),
        rotary_base=float(rotary.get("rope_theta", config.get("rope_theta", 10000.0))),
        rotary_factor=float(rotary["factor"]) if kind == "llama3" else 0.0,
    )


def to_config(shape: Architecture, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of this model. `fields`: those that the tensors tell."""
    if shape.family == "gpt2":
        return {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "activation_function": shape.activation,
            "n_head": shape.heads,
            "layer_norm_epsilon": shape.norm_epsilon,
            "bos_token_id": None,  # GPT-2's own are words that this vocabulary may not have
            "eos_token_id": None,
            **fields,
        }
    scaling = {"rope_type": "llama3", "factor": shape.rotary_factor, **_SCALING} if shape.rotary_factor else None
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "num_attention_heads": shape.heads,
        "rms_norm_eps": shape.norm_epsilon,
        "rope_theta": shape.rotary_base,
        "rope_scaling": scaling,
        "max_position_embeddings": shape.positions or 2048,
        "bos_token_id": None,
        "eos_token_id": None,
        **fields,
    }
