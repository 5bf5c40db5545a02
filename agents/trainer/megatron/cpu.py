"""Lets Megatron-LM's training code run without CUDA: replaces what it asks of a GPU, beyond what Megatron-core asks
(`cpu_shim.py`).

Applied in the worker of a task that runs Megatron-LM, only where CUDA is absent. `torch.cuda` then says that there is a
GPU, and every tensor "on" it is on the CPU. Flags that only a GPU can do are set to what a CPU does; one line says so.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import sys
import typing
from collections import defaultdict
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from unicrond.agents.trainer.process import cpu_shim

#: Parsed arguments, and what they must be without a GPU.
FLAGS: dict[str, object] = {
    "distributed_backend": "gloo",
    "transformer_impl": "local",
    "use_cpu_initialization": True,
    "gradient_accumulation_fusion": False,
    "persist_layer_norm": False,
    "no_persist_layer_norm": True,
    "bias_dropout_fusion": False,
    "bias_gelu_fusion": False,
    "bias_swiglu_fusion": False,
    "masked_softmax_fusion": False,
    "apply_rope_fusion": False,
}
_SILENT = ("set_device", "synchronize", "empty_cache", "check_error", "set_stream", "reset_peak_memory_stats")
_ZERO = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "device_memory_used")
_applied: list[bool] = []


def apply() -> None:
    """Redirect what Megatron-LM asks of a GPU to the CPU, in this process, for good. Call it once `cpu_shim` is
    applied, before `megatron.training` is imported. Harmless to call twice."""
    if _applied:
        return
    _applied.append(True)
    cpu_shim.apply()
    if not hasattr(typing, "override"):  # core_v0.18 and newer are written for Python 3.12
        typing.override = lambda method: method  # type: ignore[attr-defined,unused-ignore]
    torch.compiler.set_stance("force_eager")
    cuda: Any = torch.cuda
    # torch._dynamo asserts that no two names are one object, so each is a function of its own.
    cuda.is_available = lambda: True
    cuda.device_count = lambda: 1
    for name in _SILENT:
        setattr(cuda, name, _returning(None))
    for name in _ZERO:
        setattr(cuda, name, _returning(0))
    cuda.is_current_stream_capturing = _returning(False)  # Adam asks, until torch 2.12
    cuda.get_device_capability = _returning((0, 0))
    cuda.get_device_properties = _returning(
        SimpleNamespace(name="cpu", major=10, minor=0, total_memory=0, multi_processor_count=1)
    )
    cuda.memory_stats = lambda *_, **__: defaultdict(int)
    cuda.Stream, cuda.Event = cpu_shim.CpuStream, cpu_shim.CpuEvent
    cuda.default_stream = lambda *_: cpu_shim.CpuStream()
    cuda.stream = lambda _: contextlib.nullcontext()
    torch.nn.Module.cuda = lambda module, device=None: module
    _stub_kernels()
    _norms_for_sequence_parallelism()
    _OnCpu().__enter__()
    _checkpoints_by_fork()


def set_flags(args: Any) -> list[str]:
    """Set what a CPU cannot do otherwise; return the arguments that were changed."""
    changed = [name for name, value in FLAGS.items() if hasattr(args, name) and getattr(args, name) != value]
    for name in changed:
        setattr(args, name, FLAGS[name])
    return [f"{name}={FLAGS[name]}" for name in changed]


def apply_after_import() -> None:
    """Redirect what can be redirected only once `megatron.training` is imported."""
    fused = sys.modules.get("megatron.legacy.fused_kernels")  # it asks nvcc for its version; gone in core_v0.19
    if fused is not None:
        fused.load = lambda _: None  # type: ignore[attr-defined]
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    # Outputs are freed while gloo may still send them: CUDA's streams would keep the order.
    schedules.deallocate_output_tensor = lambda *_, **__: None
    schedules.custom_backward = _backward
    if not hasattr(moe_utils, "te_general_gemm"):  # asked for without Transformer Engine too
        moe_utils.te_general_gemm = None
    if hasattr(
        token_dispatcher, "maybe_move_tensor_to_cpu"
    ):  # what is there already stays a tensor, which gloo refuses
        token_dispatcher.maybe_move_tensor_to_cpu = _as_numbers
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(
        lambda record: "RNG state changed" not in str(record.msg)
    )


def _backward(output: torch.Tensor, gradient: torch.Tensor | None) -> None:
    """Run the backward, of a loss without a gradient, as Megatron's function does, which wants the output freed.
    `torch.autograd.backward` would leave `_OnCpu` for as long as it takes, and what is computed again in it would go
    to a GPU."""
    torch.autograd.Variable._execution_engine.run_backward(
        (output,),
        (torch.ones_like(output) if gradient is None else gradient,),
        False,
        False,
        (),
        allow_unreachable=True,
        accumulate_grad=True,
    )


def _as_numbers(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Return the tensor, or its numbers, as if it had come from a GPU."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _returning(value: object) -> Callable[..., object]:
    return lambda *_, **__: value


class _OnCpu(TorchFunctionMode):  # type: ignore[misc]
    """Puts on the CPU whatever is to be on a GPU, or in memory pinned for one."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.cuda:
            return args[0]
        if kwargs:
            if str(kwargs.get("device", "")).startswith("cuda"):
                kwargs = {**kwargs, "device": "cpu"}
            if kwargs.get("pin_memory"):
                kwargs = {**kwargs, "pin_memory": False}
        return function(*args, **(kwargs or {}))


def _stub_kernels() -> None:
    """Replace a module that imports triton without asking whether it is there."""
    name = "megatron.core.transformer.custom_layers.batch_invariant_kernels"
    stub: Any = ModuleType(name)
    stub.enable_batch_invariant_mode = stub.disable_batch_invariant_mode = _returning(None)
    stub.is_batch_invariant_mode_enabled = lambda: False
    sys.modules.setdefault(name, stub)


def _norms_for_sequence_parallelism() -> None:
    """Make torch's norms, which refuse sequence parallelism: they do what they are to do there once their parameters
    are marked, as Apex's are."""
    from megatron.core.transformer import torch_norm

    plain = torch_norm.WrappedTorchNorm.__new__

    def marked(cls: type, config: Any, *arguments: Any, **options: Any) -> torch.nn.Module:
        """Make the norm without sequence parallelism, and mark its parameters."""
        is_parallel, config.sequence_parallel = config.sequence_parallel, False
        try:
            norm: torch.nn.Module = plain(cls, config, *arguments, **options)
        finally:
            config.sequence_parallel = is_parallel
        for parameter in norm.parameters():
            parameter.sequence_parallel = is_parallel
        return norm

    torch_norm.WrappedTorchNorm.__new__ = staticmethod(marked)


def _checkpoints_by_fork() -> None:
    """Have the queue of torch_dist checkpoints forked, when the first one is written: a spawned process would import
    the script again, without all this."""
    with contextlib.suppress(ImportError):
        from megatron.core.dist_checkpointing.strategies import filesystem_async

        def queue() -> Any:
            """Return the queue of a forked manager."""
            if filesystem_async._results_queue is None:
                filesystem_async._results_queue = multiprocessing.get_context("fork").Manager().Queue()
            return filesystem_async._results_queue

        if hasattr(filesystem_async, "_get_write_results_queue"):
            filesystem_async._get_write_results_queue = queue
