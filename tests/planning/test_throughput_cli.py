"""`unicronctl throughput` as a user meets it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from unicrond.ctl.main import main as unicronctl
from unicrond.ctl.parser import gpu_counts
from unicrond.throughput.layouts import job
from unicrond.throughput.model import Estimate, best
from unicrond.throughput.presets import GPUS, MODELS


def main(arguments: list[str]) -> int:
    return unicronctl(["throughput", *arguments])


SEVEN = ["--model", "gpt3-7b", "--gpu-type", "a100-80g"]


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("8", [8]),
        ("8..64", [8, 16, 32, 64]),
        ("8..50", [8, 16, 32, 50]),
        ("8..24..8", [8, 16, 24]),
        ("8,4..8,100", [4, 8, 100]),
    ],
)
def test_gpu_counts_parse_ranges(text: str, counts: list[int]) -> None:
    assert gpu_counts(text) == counts


@pytest.mark.parametrize(
    "text", ["", "0", "8..", "-8", "8..4", "1..2..3..4", "8..9..0", "1e3", "999999999", "1..99999..1"]
)
def test_gpu_counts_refuse_bad_text(text: str) -> None:
    with pytest.raises(ValueError):
        gpu_counts(text)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ["--model", "gpt5", "--gpu-type", "a100-80g", "--gpus", "8"],
            "--model: unknown 'gpt5'; choose from gpt3-1.3b",
        ),
        (["--model", "gpt3-7b", "--gpu-type", "tpu", "--gpus", "8"], "--gpu-type: unknown 'tpu'; choose from a100-40g"),
        (["--gpu-type", "a100-80g", "--gpus", "8"], "--model: missing; choose from"),
        (SEVEN, "--gpus: missing; for example"),
        ([*SEVEN, "--gpus", "512..8"], "--gpus: '512..8' runs downwards; write 8..512"),
        ([*SEVEN, "--gpus", "8", "--tp", "3"], "--tp: 3 does not divide gpt3-7b on a100-80g; choose from [1, 2, 4, 8]"),
        ([*SEVEN, "--gpus", "8", "--pp", "5"], "--pp: 5 does not divide the 32 layers"),
        ([*SEVEN, "--gpus", "8", "--batch", "-1"], "--batch: "),
        ([*SEVEN, "--gpus", "8", "--micro-batch", "3"], "--micro-batch: 3 does not divide batch 1024"),
        ([*SEVEN, "--gpus", "8", "--stack", "x"], "--stack: unknown 'x'; choose from megatron-2021"),
        ([*SEVEN, "--gpus", "8", "--nonsense"], "unrecognized arguments: --nonsense"),
    ],
)
def test_bad_arguments_print_one_line(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    streams = capsys.readouterr()
    assert streams.out == ""
    assert streams.err.startswith("unicronctl: ")
    assert streams.err.count("\n") == 1
    assert says in streams.err


def test_help_has_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "unicronctl throughput --model gpt3-7b --gpu-type a100-80g --gpus 8..512" in capsys.readouterr().out


def test_throughput_table_fits_80_columns_and_explains_itself(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main([*SEVEN, "--gpus", "1,64..1024,100"]) == 0
    out = capsys.readouterr().out
    assert "…" not in out
    assert "gpt3-7b on a100-80g, megatron-2023, 1024 x 2048 tokens per iteration" in out
    assert "* uneven" in out
    assert "GPUs = 1: no layout: needs" in out
    answer = best(job(MODELS["gpt3-7b"], GPUS["a100-80g"]), 128)
    assert isinstance(answer, Estimate)
    assert f"{answer.flops_per_s / 1e15:.3f}" in out


def test_json_output_matches_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SEVEN, "--gpus", "1,64", "--tp", "2", "--pp", "2", "--batch", "512", "--seq", "1024", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["batch"], answer["seq"]) == (512, 1024)
    none, row = answer["rows"]
    assert none["flops_per_s"] == 0
    assert none["reason"]
    expected = best(job(MODELS["gpt3-7b"], GPUS["a100-80g"], batch=512, seq=1024, tp=2, pp=2), 64)
    assert isinstance(expected, Estimate)
    assert row["flops_per_s"] == expected.flops_per_s
    assert row["layout"]["tp"] == row["layout"]["pp"] == 2
    assert sum(row["parts"].values()) == pytest.approx(row["iteration_s"])


def test_infeasible_model_exits_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "gpt3-175b", "--gpu-type", "a100-40g", "--gpus", "8"]) == 1
    assert "no layout" in capsys.readouterr().out


def test_even_flag_refuses_uneven_batches(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SEVEN, "--gpus", "13", "--even"]) == 1
    assert main([*SEVEN, "--gpus", "13"]) == 0


def test_plot_without_matplotlib_names_extra(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main([*SEVEN, "--gpus", "8..64", "--plot", str(tmp_path / "t.png")]) == 2
    assert "--plot: matplotlib is missing; install it with: pip install 'unicrond[plot]'" in capsys.readouterr().err


def test_plot_writes_image(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra [plot] is not installed")
    path = tmp_path / "t.png"
    assert main([*SEVEN, "--gpus", "8..64", "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert main([*SEVEN, "--gpus", "8..64", "--plot", str(tmp_path / "missing" / "t.png")]) == 2
    assert "--plot: cannot write" in capsys.readouterr().err
