"""A driver's names for GPUs in the words of the presets."""

from __future__ import annotations

import msgspec
import pytest

from unicrond.agents.accelerators.driver import gpu_type
from unicrond.events.vocabulary import Gpu
from unicrond.throughput.presets import GPUS


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("NVIDIA A100-SXM4-40GB", "a100-40g"),
        ("NVIDIA A100-PCIE-40GB", "a100-40g"),
        ("NVIDIA A100-SXM4-80GB", "a100-80g"),
        ("NVIDIA A100 80GB PCIe", "a100-80g"),
        ("NVIDIA A800-SXM4-80GB", "a800-80g"),
        ("NVIDIA H100 80GB HBM3", "h100-80g"),
        ("NVIDIA H100 PCIe", "h100-80g"),
        ("NVIDIA H200", "h200-141g"),
    ],
)
def test_gpu_type_matches_presets(name: str, preset: str) -> None:
    assert gpu_type([name] * 8) == preset
    assert preset in GPUS


def test_gpu_type_names_other_gpus_and_mixed_nodes() -> None:
    assert gpu_type([]) == ""
    assert gpu_type(["NVIDIA L40S"]) == "l40s"
    assert gpu_type(["NVIDIA H200", "NVIDIA L40S", "NVIDIA H200"]) == "h200-141g_l40s"
    for names in (["NVIDIA RTX A6000 (Ada)"], ["", ""], ["", "NVIDIA H200"], ["NVIDIA " + "x" * 100]):
        msgspec.convert(gpu_type(names), Gpu)
