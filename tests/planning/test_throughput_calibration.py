"""The model against published runs: in sample, left out, and what the documentation says of both."""

from __future__ import annotations

from pathlib import Path

import pytest

from unicrond.replay.evaluation.studies.calibration import (
    ROWS,
    Efficiencies,
    PublishedRun,
    error,
    fit,
    predict,
    report,
    rows_of,
)
from unicrond.throughput.presets import STACKS

DOCUMENT = Path(__file__).parents[2] / "docs" / "results" / "calibration.md"
IN_SAMPLE, LEFT_OUT = 0.10, 0.10


def fitted(stack: str) -> Efficiencies:
    return Efficiencies(STACKS[stack].gemm_efficiency, STACKS[stack].nic_efficiency)


@pytest.fixture(scope="module")
def reported() -> str:
    """The calibration's own table; computing it fits every stack once per row."""
    return report()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.stack}-{row.label}")
def test_fitted_row_is_within_a_tenth(row: PublishedRun) -> None:
    assert abs(error(row, fitted(row.stack))) < IN_SAMPLE


def test_omitted_row_is_within_a_tenth(reported: str) -> None:
    left_out = [float(line.split("|")[7]) for line in reported.splitlines()[2:]]
    assert len(left_out) == len(ROWS)
    assert max(map(abs, left_out)) < 100 * LEFT_OUT


@pytest.mark.parametrize("stack", STACKS)
def test_presets_match_fit(stack: str) -> None:
    found = fit(stack, rows_of(stack))
    assert (found.gemm, found.nic) == pytest.approx((fitted(stack).gemm, fitted(stack).nic), abs=0.002)


def test_document_carries_calibration_table(reported: str) -> None:
    assert reported in DOCUMENT.read_text(), (
        "put the output of: python -m unicrond.replay.evaluation.studies.calibration into it"
    )


def test_predicted_layouts_match_published() -> None:
    for row in ROWS:
        layout = predict(row, fitted(row.stack)).layout
        for name in ("tp", "pp", "micro_batch", "chunks", "recompute"):
            published = getattr(row, name)
            assert published is None or getattr(layout, name) == published, row.label


def test_hardware_flops_match_narayanan() -> None:
    """96 B s l h^2 (1 + s / 6h + V / 16 l h), equation 3 of Narayanan et al. 2021, turned into seconds."""
    row = next(row for row in ROWS if row.label == "145.6B")
    s, layers, h, v = 2048, 80, 12288, 51200
    flops = 96 * 2304 * s * layers * h * h * (1 + s / (6 * h) + v / (16 * layers * h))
    assert row.measured_s == pytest.approx(flops / (1536 * 148e12), rel=1e-12)


@pytest.mark.parametrize(
    ("label", "utilisation"),
    [("22B selective", 0.415), ("175B selective", 0.514), ("530B selective", 0.560), ("1000B selective", 0.563)],
)
def test_derived_times_give_published_utilisation(label: str, utilisation: float) -> None:
    row = next(row for row in ROWS if row.label == label)
    flops = row.batch * row.model.flops_per_sequence(2048)
    assert flops / (row.gpus * 312e12 * row.measured_s) == pytest.approx(utilisation, abs=0.002)


def test_parameter_counts_match_published() -> None:
    """The labels are rounded (1.652 B is called 1.7 B)."""
    for row in ROWS:
        if row.stack == "megatron-2021" and row.measure == "hardware_flops":
            assert row.model.parameters / 1e9 == pytest.approx(float(row.label.removesuffix("B")), rel=0.03)
