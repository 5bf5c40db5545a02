"""Checks Megatron's parsed arguments: refuses some, switches off what unicrond does instead, and compares the rest with
the task's.

Every line names the flag. The table of what is refused: `events/megatron/command_line.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unicrond.events.megatron.command_line import (
    CHECKED_FLAGS,
    MOE_OVERLAP,
    REFUSED_FLAGS,
    TESTED,
    WITHOUT_EFFECT,
    chunks_of,
    refusals,
    without_effect,
)
from unicrond.events.megatron.layouts import stage_without_experts
from unicrond.events.vocabulary import TaskSpec

__all__ = [
    "TESTED", "FlagsRefused", "ReplacedFlags", "apply_task_layout", "divides_evaluation", "drop_without_effect",
    "newest_checkpoint", "require", "require_experts", "take_over",
]  # fmt: skip


_BATCH_SIZES = ("global_batch_size", "micro_batch_size")


class FlagsRefused(SystemExit):
    """Training with these flags would not be what Megatron alone does, or not what the task says; the text is one
    line."""


@dataclass(slots=True)
class ReplacedFlags:
    """What the flags ask for and unicrond does in Megatron's place. `exit_after_s`: of one process; 0: never."""

    overlap: bool
    distributed: bool
    exit_after_s: float
    exit_interval: int
    exit_signal: bool


def apply_task_layout(args: Any, spec: TaskSpec) -> Iterator[str]:
    """Set the layout to the task's, which may have been reshaped since it was submitted; yield what was changed. The
    vocabulary stays padded as for the flags' own tp: the model is the same in every layout. Where the task says nothing
    of vpp and ep, the flags hold."""
    if spec.vpp and spec.vpp != (flags_vpp := _vpp_of(args)):
        args.num_layers_per_virtual_pipeline_stage = None
        args.num_virtual_stages_per_pipeline_rank = spec.vpp if spec.vpp > 1 else None
        yield f"{spec.vpp} chunks of the model in a pipeline stage, as the task says ({flags_vpp} on the command line)"
    cut = spec.cut._replace(ep=spec.ep or args.expert_model_parallel_size)
    # Megatron cuts experts in tp parts where no flag says otherwise.
    if (cut.ep, cut.expert_tp) != (args.expert_model_parallel_size, args.expert_tensor_parallel_size or spec.tp):
        args.expert_model_parallel_size, args.expert_tensor_parallel_size = cut.ep, cut.expert_tp
        yield f"experts over {cut.ep} workers, each cut in {cut.expert_tp}, as the task says"
    if args.tensor_model_parallel_size != spec.tp:
        padded_to = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
        if padded_to % spec.tp:
            raise FlagsRefused(f"args: --make-vocab-size-divisible-by: {padded_to} does not divide among tp {spec.tp}")
        args.make_vocab_size_divisible_by = padded_to // spec.tp
    flags_cut = (args.tensor_model_parallel_size, args.context_parallel_size)
    if flags_cut != (spec.tp, spec.cp) and max(spec.tp, spec.cp) > 1:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # Megatron asserts it, up to Hopper
    for name, expected in (
        ("tensor_model_parallel_size", spec.tp),
        ("pipeline_model_parallel_size", spec.pp),
        ("context_parallel_size", spec.cp),
        ("micro_batch_size", spec.micro_batch),
    ):
        if getattr(args, name) != expected:
            flag, value = name.replace("_", "-"), getattr(args, name)
            yield f"--{flag}: {expected}, as the task says ({value} on the command line)"
            setattr(args, name, expected)


def drop_without_effect(args: Any) -> Iterator[str]:
    """Unset what would save time or memory alone and is not done here; yield a line for each."""
    values = {flag.flag: getattr(args, flag.name, None) for flag in WITHOUT_EFFECT}
    for flag, text in without_effect(values):
        setattr(args, flag.name, flag.harmless[0] if flag.harmless else False)
        if flag.flag == MOE_OVERLAP and max(args.tensor_model_parallel_size, args.context_parallel_size) > 1:
            os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"  # more are for this overlap
        yield text


def _vpp_of(args: Any) -> int:
    """Return what the flags come to, before Megatron has validated them."""
    if layout := getattr(args, "pipeline_model_parallel_layout", None):
        return int(chunks_of(layout) // args.pipeline_model_parallel_size)
    stage_layers, chunks = args.num_layers_per_virtual_pipeline_stage, args.num_virtual_stages_per_pipeline_rank
    if stage_layers is None:
        return int(chunks or 1)
    layers = (args.num_layers or getattr(args, "encoder_num_layers", None) or 0) + sum(
        bool(getattr(args, name, False))
        for name in ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
    )
    return int(layers // args.pipeline_model_parallel_size // stage_layers)


def require(args: Any, spec: TaskSpec, *, on_gpu: bool) -> None:
    """Raise FlagsRefused where training with these flags is refused."""
    for reason in _reasons(args, spec, on_gpu=on_gpu):
        raise FlagsRefused(f"args: {reason}")


def require_experts(args: Any, has_some: bool, all_true: Callable[[bool], bool]) -> None:
    """Raise FlagsRefused where a pipeline stage has no experts (`has_some`: this one has) and others have some of those
    that are spread over workers. `all_true`: the vote of the replica's shards."""
    ep = args.expert_model_parallel_size
    if ep > 1 and not (all_true(has_some) or all_true(not has_some)):
        raise FlagsRefused(f"args: {stage_without_experts(args.pipeline_model_parallel_size, ep)}")


def _reasons(args: Any, spec: TaskSpec, *, on_gpu: bool) -> Iterator[str]:
    values = {refusal.flag: getattr(args, refusal.name, None) for refusal in REFUSED_FLAGS}
    for flag in CHECKED_FLAGS:
        values[flag] = getattr(args, _argument(flag), None)
    yield from refusals(values)
    if getattr(args, "fp8", None) and not on_gpu:
        yield "--fp8-format: fp8 needs a GPU"
    for flag, actual, expected in (
        ("--global-batch-size", args.global_batch_size, spec.global_batch),
        ("--seed", args.seed, spec.seed),
    ):
        if actual != expected:
            yield f"{flag}: Megatron reads {actual}, the task says {expected}; submit the task again"
    iterations = args.train_iters or (args.train_samples or 0) // args.global_batch_size
    if iterations != spec.iterations:
        yield f"--train-iters: Megatron reads {iterations}, the task says {spec.iterations}; submit the task again"


def _argument(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def save_predicate(args: Any) -> Callable[[int], bool] | None:
    """Return whether Megatron writes a checkpoint after an iteration, as a function; None: it never does."""
    intervals = [getattr(args, name, None) for name in ("save_interval", "non_persistent_save_interval")]
    if not args.save:
        return None
    return lambda iteration: any(interval and iteration % interval == 0 for interval in intervals)


def divides_evaluation(args: Any) -> bool:
    """Return whether each replica evaluates on its share of the data: of one set, by means that add up, in
    micro-batches of training's sizes."""
    sizes = [getattr(args, f"eval_{name}", None) or getattr(args, name) for name in _BATCH_SIZES]
    return not (
        args.full_validation
        or getattr(args, "multiple_validation_sets", False)
        or getattr(args, "sft", False)
        or isinstance(args.eval_iters, list)
        or sizes != [getattr(args, name) for name in _BATCH_SIZES]
    )


def take_over(args: Any, say: Any) -> ReplacedFlags:
    """Switch off what unicrond does. `say`: takes one line for each thing that a person may miss."""
    replaced = ReplacedFlags(
        overlap=bool(args.overlap_grad_reduce),
        distributed=bool(args.use_distributed_optimizer),
        exit_after_s=60.0 * (args.exit_duration_in_mins or 0.0),
        exit_interval=args.exit_interval or 0,
        exit_signal=bool(args.exit_signal_handler),
    )
    args.rerun_mode = "disabled"
    args.align_grad_reduce = args.align_param_gather = args.overlap_param_gather = False
    args.exit_duration_in_mins = None
    args.ddp_average_in_collective = False  # a replica's own reduction is a sum (`buffers.py`)
    if getattr(args, "log_straggler", False):
        args.log_straggler = False
        say("--log-straggler is off: unicrond compares the replicas itself")
    if not args.accumulate_allreduce_grads_in_fp32:
        args.accumulate_allreduce_grads_in_fp32 = True
        args.grad_reduce_in_bf16 = False
        if args.bf16 or args.fp16:
            say("gradients are added and reduced in fp32 (--accumulate-allreduce-grads-in-fp32)")
    return replaced


def newest_checkpoint(directory: str) -> int:
    """Return after which iteration the checkpoint was saved that `--load` would load now; 0 for none."""
    try:
        text = (Path(directory) / "latest_checkpointed_iteration.txt").read_text().strip()
    except (OSError, UnicodeDecodeError):
        return 0
    return int(text) if text.isdecimal() else 0
