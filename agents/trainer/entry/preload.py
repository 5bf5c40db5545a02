"""Imports everything heavy that a worker needs; the fork server imports it once, before it serves.

No thread, no process group, no CUDA context comes of it (a test says so), and no parallel operation of torch runs:
its thread pools are made at the first one, in the child.

Megatron decorates its fused kernels with `torch.compile`, and that alone imports torch's compilers, half of the whole
import. On a node without GPUs they are imported when such a kernel is first called.
"""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch

from unicrond.agents.protocol.gpus import visible_gpus

_compile = torch.compile


def _compile_when_called(function: Callable[..., Any] | None = None, **options: Any) -> Callable[..., Any]:
    """Replace `torch.compile` as a decorator, with or without options."""
    if function is None:
        return functools.partial(_compile_when_called, **options)
    compiled = functools.cache(lambda: _compile(function, **options))

    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        """Compile at the first call, then call."""
        return compiled()(*arguments, **keywords)

    return call


with warnings.catch_warnings():  # Megatron tells every process that Transformer Engine and Apex are not there
    warnings.simplefilter("ignore")
    if not visible_gpus():
        torch.compile = _compile_when_called
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # "No CUDA runtime", of its CUDA build
    try:
        import unicrond.agents.trainer.entry.worker
        import unicrond.agents.trainer.loop.pretrain_gpt  # noqa: F401  # imported for every child
    finally:
        torch.compile = _compile
