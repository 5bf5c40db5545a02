"""What the trainer uses of Megatron-core, by name, and which of it a release lacks: by the files' syntax, nothing is
imported.

Rules
-----
* USES is what the trainer's files import of `megatron.core`, with the keywords that they call it with, and what they
  ask of `mpu`, as Megatron-LM calls `parallel_state`. A test holds it to these files. PASSED: keywords of what they
  call by another name.
* ATTRIBUTES is what they read and replace of Megatron's objects. STAND_INS: of an object of Megatron's that the trainer
  has one of its own for, what Megatron's functions read.
* Names that are replaced in `megatron.training` are seams of the adapter (`agents/trainer/megatron/seams.py`).
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path

from unicrond.agents.trainer.megatron.seams import Lookups

TRAINER = Path(__file__).parents[2] / "agents" / "trainer"
_PARALLEL = "parallel_state"
#: By name in `megatron.core`: the keywords that it is called with.
USES: dict[str, tuple[str, ...]] = {
    "datasets.indexed_dataset.IndexedDataset": (),
    "datasets.indexed_dataset.IndexedDatasetBuilder": ("dtype",),
    "datasets.utils.compile_helpers": (),
    "dist_checkpointing.dict_utils.nested_values": (),
    "dist_checkpointing.mapping.ShardedBase": (),
    "dist_checkpointing.mapping.ShardedTensor": (),
    "dist_checkpointing.mapping.ShardedTensorFactory": (),
    "distributed.DistributedDataParallelConfig": (
        "overlap_grad_reduce", "overlap_param_gather", "use_distributed_optimizer",
    ),
    "distributed.finalize_model_grads": (),
    "models.gpt.GPTModel": (
        "max_sequence_length", "position_embedding_type", "post_process", "pre_process",
        "share_embeddings_and_output_weights", "vocab_size",
    ),
    "models.gpt.gpt_layer_specs.get_gpt_layer_local_spec": ("normalization",),
    "optimizer.OptimizerConfig": ("bf16", "clip_grad", "lr", "min_lr", "optimizer", "params_dtype", "weight_decay"),
    "optimizer._get_megatron_optimizer_based_on_param_groups": ("intra_dist_opt_group",),
    "optimizer._get_param_groups": (),
    "optimizer.clip_grads.get_grad_norm_fp32": ("grad_stats_parallel_group",),
    "optimizer.distrib_optimizer.DistributedOptimizer": (),
    "optimizer.get_megatron_optimizer": (),
    "optimizer.get_standard_config_overrides": (),
    "optimizer.optimizer.ChainedOptimizer": (),
    "optimizer.optimizer.FP32Optimizer": (),
    "optimizer.optimizer.Float16OptimizerWithFloat16Params": (),
    "optimizer.optimizer.MegatronOptimizer": (),
    "optimizer_param_scheduler.OptimizerParamScheduler": (
        "end_wd", "init_lr", "lr_decay_steps", "lr_decay_style", "lr_warmup_steps", "max_lr", "min_lr",
        "override_opt_param_scheduler", "start_wd", "use_checkpoint_opt_param_scheduler", "wd_incr_steps",
        "wd_incr_style",
    ),
    f"{_PARALLEL}.get_context_parallel_world_size": (),
    f"{_PARALLEL}.get_data_parallel_group": ("with_context_parallel",),
    f"{_PARALLEL}.get_data_parallel_rank": (),
    f"{_PARALLEL}.get_data_parallel_world_size": ("with_context_parallel",),
    f"{_PARALLEL}.get_expert_data_parallel_rank": (),
    f"{_PARALLEL}.get_expert_data_parallel_world_size": (),
    f"{_PARALLEL}.get_expert_model_parallel_world_size": (),
    f"{_PARALLEL}.get_expert_tensor_model_pipeline_parallel_group": (),
    f"{_PARALLEL}.get_model_parallel_group": (),
    f"{_PARALLEL}.get_pipeline_model_parallel_world_size": (),
    f"{_PARALLEL}.get_tensor_model_parallel_rank": (),
    f"{_PARALLEL}.get_tensor_model_parallel_world_size": (),
    f"{_PARALLEL}.initialize_model_parallel": (
        "context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size",
        "pipeline_model_parallel_size", "tensor_model_parallel_size", "virtual_pipeline_model_parallel_size",
    ),
    f"{_PARALLEL}.is_pipeline_first_stage": (),
    f"{_PARALLEL}.is_pipeline_last_stage": ("ignore_virtual",),
    f"{_PARALLEL}.model_parallel_is_initialized": (),
    "pipeline_parallel.get_forward_backward_func": (),
    "pipeline_parallel.schedules.custom_backward": (),
    "pipeline_parallel.schedules.deallocate_output_tensor": (),
    "tensor_parallel.param_is_not_tensor_parallel_duplicate": (),
    "tensor_parallel.random._get_cuda_rng_state": (),
    "tensor_parallel.random._set_cuda_rng_state": (),
    "tensor_parallel.random.get_cuda_rng_tracker": (),
    "tensor_parallel.random.model_parallel_cuda_manual_seed": (),
    "transformer.TransformerConfig": (
        "attention_dropout", "bf16", "bias_dropout_fusion", "calculate_per_token_loss", "gradient_accumulation_fusion",
        "hidden_dropout", "hidden_size", "num_attention_heads", "num_layers", "params_dtype", "persist_layer_norm",
        "pipeline_dtype", "pipeline_model_parallel_size", "tensor_model_parallel_size", "use_cpu_initialization",
    ),
    "transformer.module.Float16Module": (),
    "transformer.module.param_is_not_shared": (),
    "transformer.moe.moe_utils.MoEAuxLossAutoScaler": (),
    "transformer.moe.token_dispatcher.maybe_move_tensor_to_cpu": (),
    "transformer.multi_token_prediction.MTPLossAutoScaler": (),
    "transformer.multi_token_prediction.MTPLossLoggingHelper": (),
    "transformer.torch_norm.WrappedTorchNorm": (),
}  # fmt: skip
PASSED: dict[str, tuple[str, ...]] = {"distributed.finalize_model_grads": ("force_all_reduce",)}
#: Imported where a release has them; the trainer's own words say which.
OPTIONAL = (
    "dist_checkpointing.strategies.filesystem_async._get_write_results_queue",
    "dist_checkpointing.strategies.filesystem_async._results_queue",
    "transformer.moe.moe_logging.get_moe_metrics_tracker",
    "transformer.moe.moe_utils.get_moe_layer_wise_logging_tracker",
    "transformer.moe.moe_utils.te_general_gemm",
)
#: By module: what its classes' objects have. Only this module is looked through.
ATTRIBUTES: dict[str, tuple[str, ...]] = {
    "distributed.distributed_data_parallel": ("buffers", "ddp_config", "expert_parallel_buffers"),
    "distributed.param_and_grad_buffer": (
        "buckets", "grad_data", "gradient_scaling_factor", "numel", "numel_unpadded", "offset", "param_data",
        "param_index_map", "params",
    ),
    "model_parallel_config": ("grad_scale_func", "microbatch_group_size_per_vp_stage", "sequence_parallel"),
    "optimizer.distrib_optimizer": (
        "_get_model_param_range_map", "_set_main_param_and_optimizer_states", "model_float16_groups",
        "model_fp32_groups", "shard_fp32_from_float16_groups", "shard_fp32_groups", "sharded_state_dict",
    ),
    "optimizer.optimizer": (
        "chained_optimizers", "float16_groups", "fp32_from_float16_groups", "get_grad_norm", "is_stub_optimizer",
        "reload_model_params",
    ),
    "transformer.moe.moe_utils": ("main_loss_backward_scale", "set_loss_scale"),
    "transformer.moe.router": ("local_tokens_per_expert",),
    "transformer.multi_token_prediction": ("main_loss_backward_scale", "set_loss_scale", "tracker"),
    "transformer.transformer_config": ("calculate_per_token_loss", "mtp_num_layers", "num_moe_experts"),
}  # fmt: skip
#: Functions of `DistributedOptimizer` that run over stand-ins; what they call these; our class of each.
_SHARDED_OPTIMIZER = "optimizer.distrib_optimizer"
_SHARDED = ("_build_model_gbuf_range", "_build_gbuf_range_map", "__init__")
STAND_INS: dict[str, str] = {"param_and_grad_buffer": "_Buffer", "buffer": "_Buffer", "bucket": "_Bucket"}


# --- of the trainer ------------------------------------------------------------------------------


def uses() -> dict[str, tuple[str, ...]]:
    """Return what the trainer's files import of `megatron.core`, as USES has it, OPTIONAL included."""
    keywords: dict[str, set[str]] = defaultdict(set)
    for path in sorted(TRAINER.rglob("*.py")):
        tree = ast.parse(path.read_text())
        places = dict(_imports(tree))
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and (name := _name(node, places)):
                keywords[name].update()
            if isinstance(node, ast.Call) and (name := _name(node.func, places)):
                keywords[name].update(keyword.arg for keyword in node.keywords if keyword.arg)
        for name in places.values():
            keywords[name].update()
    modules = {name.rpartition(".")[0] for name in keywords}
    return {
        name: tuple(sorted(words))
        for name, words in sorted(keywords.items())
        if name not in modules and not name.rpartition(".")[2].startswith("__") and not _is_module(name)
    }


def _imports(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield local names, and what they stand for in `megatron.core`."""
    prefix = "megatron.core"
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(prefix):
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"[len(prefix) + 1 :]
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith(prefix + ".") and alias.asname:
                    yield alias.asname, alias.name[len(prefix) + 1 :]


def _name(node: ast.expr, places: dict[str, str]) -> str:
    """Return what the expression names in `megatron.core`; "" for others, and for attributes of its functions."""
    match node:
        case ast.Name(id=name):
            return places.get(name, "")
        case ast.Attribute(value=ast.Name(id="mpu") | ast.Attribute(attr="mpu"), attr=name):
            return f"{_PARALLEL}.{name}"
        case ast.Attribute(value=ast.Name(id=module), attr=name) if _is_module(places.get(module, "")):
            return f"{places[module]}.{name}"
    return ""


def installed() -> Path:
    """Return the folder that has the installed `megatron`."""
    import megatron.core

    return Path(megatron.core.__file__).parents[2]


@cache
def _is_module(name: str) -> bool:
    return bool(name) and name not in USES and _file(installed(), name) is not None


# --- of a release --------------------------------------------------------------------------------


def lost(release: Path) -> Iterator[str]:
    """Yield what the trainer uses and the `megatron.core` in this folder lacks, one line each."""
    for name, keywords in {**USES, **PASSED}.items():
        module, _, own = name.rpartition(".")
        definition = _definition(release, module, own)
        if definition is None:
            yield f"megatron.core.{name} is not there"
        elif missing := sorted(set(keywords) - (_parameters(release, *definition) or set(keywords))):
            yield f"megatron.core.{name} does not take {', '.join(missing)}"
    for module, attributes in ATTRIBUTES.items():
        there = _members(release, module)
        for attribute in attributes:
            if attribute not in there:
                yield f"megatron.core.{module} has no object with .{attribute}"
    yield from _unanswered(release)


def _unanswered(release: Path) -> Iterator[str]:
    """Yield what Megatron's distributed optimizer asks of stand-ins that have no answer."""
    ours = ast.parse((TRAINER / "sharded" / "optimizer.py").read_text())
    answers = {node.name: _attributes(node) for node in ours.body if isinstance(node, ast.ClassDef)}
    functions = [node for node in ast.walk(_tree(release, _SHARDED_OPTIMIZER)) if isinstance(node, ast.FunctionDef)]
    for function in (function for function in functions if function.name in _SHARDED):
        for node in ast.walk(function):
            match node:
                case ast.Attribute(value=ast.Name(id=name), attr=attribute) if name in STAND_INS:
                    if attribute not in answers[STAND_INS[name]]:
                        place = f"megatron.core.{_SHARDED_OPTIMIZER}.{function.name}"
                        yield f"{place} asks for {name}.{attribute}, which our {STAND_INS[name]} lacks"


def _file(release: Path, module: str) -> Path | None:
    place = release.joinpath("megatron", "core", *module.split("."))
    return next((path for path in (place.with_suffix(".py"), place / "__init__.py") if path.is_file()), None)


@cache
def _tree(release: Path, module: str) -> ast.Module:
    """Return the syntax of a module; of none, an empty one."""
    path = _file(release, module)
    return ast.parse("" if path is None else path.read_text())


def _definition(release: Path, module: str, name: str) -> tuple[str, ast.AST] | None:
    """Return the module in which a name of this one is defined, and where; imports are followed in `megatron.core`."""
    for node in ast.walk(_tree(release, module)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return module, node
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            return module, node
        if isinstance(node, ast.ImportFrom) and any((alias.asname or alias.name) == name for alias in node.names):
            origin = _origin(release, module, node)
            if origin and (definition := _definition(release, origin, name)) is not None:
                return definition
    return None


def _origin(release: Path, module: str, node: ast.ImportFrom) -> str:
    """Return the module in `megatron.core` that an import names; "" for others."""
    if not node.level:
        return (node.module or "").removeprefix("megatron.core.") if (node.module or "").startswith("megatron.") else ""
    path = _file(release, module)
    folder = module.split(".") if path is not None and path.name == "__init__.py" else module.split(".")[:-1]
    return ".".join([*folder[: len(folder) - node.level + 1], *([node.module] if node.module else [])])


def _parameters(release: Path, module: str, node: ast.AST) -> set[str]:
    """Return the keywords that a function, or a class when it is made, takes, those of its bases included; none where
    it takes any."""
    if isinstance(node, ast.FunctionDef):
        return set() if node.args.kwarg else {argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)}
    if not isinstance(node, ast.ClassDef):
        return set()
    names = {field.target.id for field in node.body if isinstance(field, ast.AnnAssign)
             and isinstance(field.target, ast.Name)}  # fmt: skip
    for method in node.body:
        if isinstance(method, ast.FunctionDef) and method.name == "__init__":
            names |= _parameters(release, module, method)
    for base in node.bases:
        if isinstance(base, ast.Name) and (definition := _definition(release, module, base.id)) is not None:
            names |= _parameters(release, *definition)
    return names


def _members(release: Path, module: str) -> set[str]:
    """Return every name that a class of the module has: methods, fields, attributes that are set, buffers."""
    return set().union(
        *(_attributes(node) for node in _tree(release, module).body if isinstance(node, ast.ClassDef)), ()
    )


def _attributes(tree: ast.ClassDef) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        match node:
            case (
                ast.FunctionDef(name=name)
                | ast.Name(id=name, ctx=ast.Store())
                | ast.Attribute(attr=name, ctx=ast.Store())
                | ast.Call(func=ast.Attribute(attr="register_buffer"), args=[ast.Constant(value=str(name)), *_])
            ):
                names.add(name)
    return names


def lookups_in(checkout: Path) -> Lookups:
    """Return the lookups of the files of `megatron.training`, as `seams.lookups_of` does of modules."""

    def lookups(module: str) -> dict[str, Collection[str]] | None:
        path = checkout / "megatron" / "training" / f"{module}.py"
        if not path.is_file():
            return None
        tree = ast.parse(path.read_text())
        functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
        named = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                named |= {alias.asname or alias.name for alias in node.names}
        return {"": named, **{function.name: _looked_up(function) for function in functions}}

    return lookups


def _looked_up(function: ast.FunctionDef) -> set[str]:
    """Names that are read in it and are not its own."""
    nodes = [node for node in ast.walk(function) if isinstance(node, ast.Name)]
    arguments = {argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)}
    own = {node.id for node in nodes if isinstance(node.ctx, ast.Store)} | arguments
    return {node.id for node in nodes if isinstance(node.ctx, ast.Load)} - own
