"""Lets Megatron-core run without CUDA: replaces every place where it insists on a GPU.

Applied once per process, only where CUDA is absent. No file of Megatron's is changed: names are replaced in its
modules, and in `torch.cuda`, which does nothing useful on such a machine.
Measured on the releases in docs/use/versions.md.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from megatron.core import utils
from megatron.core.optimizer import clip_grads, distrib_optimizer, optimizer
from megatron.core.pipeline_parallel import p2p_communication, schedules
from megatron.core.tensor_parallel import random as parallel_random
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")
_FACTORIES = ("zeros", "ones", "empty", "tensor", "full", "arange")


def apply() -> None:
    """Redirect what Megatron asks of a GPU to the CPU. Harmless to call twice."""
    if torch.cuda.is_available() or getattr(torch.cuda, "current_device", None) is _current_device:
        return
    torch.cuda.current_device = _current_device
    torch.cuda.synchronize = _do_nothing
    torch.cuda.current_stream = _current_stream  # core_v0.19 asks for it at each reduction of gradients
    # torch's build for CUDA knows of CUDA whether it is there or not; `megatron/cpu.py` has it there. Adam asks.
    torch.accelerator.current_accelerator = _no_accelerator
    torch.cuda.manual_seed = torch.random.default_generator.manual_seed
    torch.cuda.manual_seed_all = _seeds_nothing  # a function of its own: torch._dynamo knows them by name
    torch.cuda.get_rng_state = _rng_state
    torch.cuda.set_rng_state = _set_rng_state
    # "CPU RNG state changed within GPU RNG context", at every dropout: here they are one and the same.
    logging.getLogger(parallel_random.__name__).addFilter(_no_rng_warning)
    parallel_random._get_cuda_rng_state = _rng_state
    parallel_random._set_cuda_rng_state = _set_rng_state
    for module in (schedules, p2p_communication, optimizer, clip_grads, utils):
        module.torch = _CpuTorch(torch)
    for module in (optimizer, clip_grads):
        module.clip_grad_by_total_norm_fp32 = _with_cuda_names(module.clip_grad_by_total_norm_fp32)
    for mixed_precision in (optimizer.Float16OptimizerWithFloat16Params, distrib_optimizer.DistributedOptimizer):
        mixed_precision.__init__ = _with_cuda_names(mixed_precision.__init__)


def _current_device() -> torch.device:
    return _CPU


def _current_stream(_device: object = None) -> CpuStream:
    return CpuStream()


def _no_accelerator(check_available: bool = False) -> None:
    pass


def _do_nothing(*_arguments: object) -> None:
    pass


def _seeds_nothing(_seed: int) -> None:
    pass


def _no_rng_warning(record: logging.LogRecord) -> bool:
    return "RNG state changed" not in str(record.msg)


def _rng_state(device: object = None, clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(state: torch.Tensor, device: object = None, graph_safe: bool = False) -> None:
    torch.set_rng_state(state)


class CpuStream:
    """Stands in for a CUDA stream: everything is done when it is asked for."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def wait_stream(self, *_: object) -> None:
        """Return at once."""
        pass

    def synchronize(self) -> None:
        """Return at once."""
        pass

    def record_event(self, *_: object) -> CpuEvent:
        """Return an event that has happened."""
        return CpuEvent()

    def wait_event(self, *_: object) -> None:
        """Return at once."""
        pass


class CpuEvent:
    """Stands in for a CUDA event."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def record(self, *_: object) -> None:
        """Return at once."""
        pass

    def wait(self, *_: object) -> None:
        """Return at once."""
        pass

    def synchronize(self) -> None:
        """Return at once."""
        pass

    def query(self) -> bool:
        """Return that it has happened."""
        return True

    def elapsed_time(self, *_: object) -> float:
        """Return no time."""
        return 0.0


class _CpuTorch(ModuleType):
    """The torch module as Megatron's modules see it: its factories take device="cuda" for the CPU."""

    def __init__(self, original: Any) -> None:
        super().__init__("torch")
        self._original = original
        for name in _FACTORIES:
            setattr(self, name, _on_cpu(getattr(original, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def make(*arguments: Any, **options: Any) -> Any:
        """Call the factory, with the CPU where a CUDA device is asked for."""
        if str(options.get("device", "")).startswith("cuda"):
            options["device"] = _CPU
        return factory(*arguments, **options)

    return make


class _CudaNames(TorchFunctionMode):  # type: ignore[misc]
    """Makes `tensor.type()` name the CUDA type, which gradient clipping and mixed precision assert; a context
    manager."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function is torch.Tensor.type and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.", 1)
        return result


def _with_cuda_names(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def deceived(*arguments: Any, **options: Any) -> Any:
        """Call the function while `tensor.type()` names CUDA types."""
        with _CudaNames():
            return function(*arguments, **options)

    return deceived
