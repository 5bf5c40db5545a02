"""One seed for every generator that a micro-batch may draw from."""

from __future__ import annotations

import random

import numpy
import torch
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed


def seed_all(seed: int) -> None:
    """Seed Python's, numpy's, torch's and Megatron's (tensor-parallel) generators. `seed` in [0, 2**62)."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)
