"""How many CUDA devices there are, and what they are called; without making a context in this process."""

from __future__ import annotations

import os

os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import torch

COUNT: int = torch.cuda.device_count() if torch.cuda.is_available() else 0


def missing(wanted: int) -> str:
    """Why tests that want so many devices do not run here; "" if they do."""
    if wanted <= COUNT:
        return ""
    return f"needs {wanted} CUDA device{'s' if wanted > 1 else ''}; torch {torch.__version__} sees {COUNT or 'none'}"
