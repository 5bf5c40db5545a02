"""The comparison of people's own flags with Megatron-LM alone: its table, its options, its refusals, a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.megatron_lm import compare, tables
from tests.megatron_lm.compare import NotCompared
from tests.megatron_lm.runs import RunFailed
from tests.megatron_lm.tables import Row

LOG = (
    " [2026-11-27 20:00:00.1] iteration {0:8d}/       5 | consumed samples: {1:12d} | elapsed time per iteration (ms):"
    " 70.1 | throughput per GPU (TFLOP/s/GPU): 0.0 | learning rate: 1.000000E-03 | lm loss: {2} | grad norm: {3} |"
    " number of skipped iterations:   0 |\n"
)
EVALUATION = " validation loss at iteration 2 on test set | lm loss value: 5.5E+00 | lm loss PPL: 2.4E+02 | \n"
MEMORY = "[Rank 0] (after 2 iterations) memory (MB) | allocated: 0.0 | max allocated: 0.0 |\n"


def log(*lines: tuple[int, str, str]) -> str:
    return "".join(LOG.format(iteration, 6 * iteration, loss, norm) for iteration, loss, norm in lines)


def test_series_hold_what_was_logged_of_training_alone() -> None:
    series = tables.series_of(
        [log((1, "5.50E+00", "2.125")) + EVALUATION, log((2, "5.40E+00", "inf")).strip() + MEMORY]
    )
    assert list(series) == [
        "consumed samples", "learning rate", "lm loss", "grad norm", "number of skipped iterations",
        "validation: lm loss value", "validation: lm loss PPL",
    ]  # fmt: skip
    assert {place: number.value for place, number in series["lm loss"].items()} == {
        "iteration 1": 5.5, "iteration 2": 5.4,
    }  # fmt: skip
    assert series["lm loss"]["iteration 1"].unit == pytest.approx(0.01)
    assert list(series["validation: lm loss value"]) == ["iteration 2 on test set"]


def verdicts(ours: str, *alone: str, tolerance: float = 1e-6, excused: tuple[str, ...] = ()) -> dict[str, str]:
    table = tables.rows(tables.series_of([ours]), [tables.series_of([text]) for text in alone], tolerance, excused)
    return {row.metric: row.verdict for row in table}


def test_last_printed_unit_is_equal_and_two_are_different() -> None:
    one = log((1, "5.500000E+00", "2.125"))
    assert set(verdicts(one, one).values()) == {"equal"}
    assert verdicts(log((1, "5.500001E+00", "2.125")), one)["lm loss"] == "equal"
    assert verdicts(log((1, "5.500010E+00", "2.125")), one)["lm loss"] == "different"
    assert verdicts(log((1, "5.500000E+00", "2.127")), one, tolerance=1e-3)["grad norm"] == "within 0.0021"
    assert verdicts(log((1, "nan", "2.125")), one)["lm loss"] == "different"


def test_own_spread_of_stock_passes_twice() -> None:
    one, other = log((1, "5.500000E+00", "2.125")), log((1, "5.500100E+00", "2.125"))
    assert verdicts(log((1, "5.500250E+00", "2.125")), one, other)["lm loss"] == "within 0.0002"
    assert verdicts(log((1, "5.500350E+00", "2.125")), one, other)["lm loss"] == "different"


def test_missing_place_is_different_unless_it_is_excused() -> None:
    both, less = log((1, "5.5", "2.1"), (2, "5.4", "2.0")), log((2, "5.4", "2.0"))
    assert set(verdicts(less, both).values()) == {"different"} == set(verdicts(both, less).values())
    assert set(verdicts(less, both, excused=("iteration 1",)).values()) == {"equal"}


def test_parameters_are_compared_by_their_largest_difference() -> None:
    stock, ours = [{"w": torch.ones(3), "b": torch.zeros(2)}], [{"w": torch.ones(3), "b": torch.zeros(2)}]
    assert tables.parameters_row(ours, [stock], 1e-6).verdict == "equal"
    ours[0]["w"][1] += 1e-3
    row = tables.parameters_row(ours, [stock], 1e-6)
    assert row.verdict == "different" and row.differences == (pytest.approx(1e-3, rel=1e-3),)
    assert tables.parameters_row(ours, [stock], 1e-2).verdict == "within 0.01"


def test_table_and_json_name_kill_verdict_and_place() -> None:
    equal = Row("lm loss", 5, (0.0, 0.0), "", 0.0, 1e-6, 1e-6)
    other = Row("grad norm", 4, (0.5, 0.25), "iteration 2", 0.0, 1e-3, 1e-3, ("iteration 4",))
    same, apart = (
        tables.Comparison(["--swiglu"], "rank 1 was killed", [3, 1], rows, []) for rows in ([equal], [equal, other])
    )
    assert not same.is_different and same.text().endswith("verdict: equal")
    assert apart.is_different and apart.text().endswith("verdict: different: grad norm")
    assert "grad norm: not logged: iteration 4" in apart.text() and "from 3 ranks  from 1 rank" in apart.text()
    document = json.loads(apart.json())
    assert document["exit_status"] == 1 and document["kill"] == "rank 1 was killed"
    assert document["rows"][1]["differences"] == {"3": 0.5, "1": 0.25}
    assert document["rows"][1]["verdict"] == "different"


def test_flags_left_open_are_those_of_the_tiny_model() -> None:
    request, _, omitted = compare.request_of(
        ["--kill-at", "4", "--", "--train-samples", "60", "--data-path", "x", "--seq-length", "32", "--hidden-size=32",
         "--transformer-impl", "transformer_engine", "--distributed-backend", "nccl", "--lr", "-1"]
    )  # fmt: skip
    words = " ".join(request.flags)
    assert "--train-iters" not in words and "--mock-data" not in words and "--max-position-embeddings 32" in words
    assert words.count("--hidden-size") == 1 and "--num-layers 2" in words and "--lr -1" in words
    assert "transformer_engine" not in words and "nccl" not in words
    assert omitted == ["--transformer-impl", "--distributed-backend"]
    assert (request.kill_at, request.kill_rank, request.replicas, request.joins) == (4, 1, 3, True)
    plain, *_ = compare.request_of(["--plain", "--no-kill", "--", "--num-layers", "2", "--log-interval", "10"])
    assert plain.flags == ["--num-layers", "2", "--log-interval", "10"] and plain.kill_rank is None


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        ("-- --use-megatron-fsdp", "unicrond refuses these flags: --use-megatron-fsdp: FSDP shards what a replica"),
        ("--kill-at 5 --", "--kill-at: 5 is not within training; give an iteration from 1 to 4"),
        ("--kill-rank 3 --", "--kill-rank: 3 is none of the ranks 0 to 2; give one of them"),
        ("--ranks 3 -- --tensor-model-parallel-size 2", "--ranks: 3 is no multiple of a replica's 2 ranks"),
        ("--replicas 1 --kill-rank 0 --", "--replicas: 1 leaves none to heal with; give 2 or more, or --no-kill"),
        ("--checkout /nowhere --", "--script: there is no /nowhere/pretrain_gpt.py; give a script of the checkout"),
        ("-- 5 --swiglu", "the flags cannot be read: '5' stands before the first flag"),
    ],
)  # fmt: skip
def test_refusal_is_one_line_that_names_the_flag(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], argv: str, reason: str
) -> None:
    checkout = compare.checkout()
    monkeypatch.setenv("MEGATRON_LM", str(checkout))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert compare.main(argv.split()) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(f"not compared: {reason}") and printed.err.count("\n") == 1 and not printed.out


@pytest.mark.parametrize(
    ("printed", "reason"),
    [
        ("usage: x\npretrain_gpt.py: error: unrecognized arguments: --foo", "pretrain_gpt.py: error: unrecognized"),
        ("[rank0]:     assert heads % 2 == 0\n[rank0]:            ^^^^\n[rank0]: AssertionError\n",
         "AssertionError: assert heads % 2 == 0"),
        ("ValueError: too small\ntorch.distributed.elastic.ChildFailedError: x\n=====\n", "ValueError: too small"),
        ("args: --fp8-format: fp8 needs a GPU\n", "args: --fp8-format: fp8 needs a GPU"),
        ("Killed\n", "Killed"),
    ],
)  # fmt: skip
def test_reason_of_failed_run_is_its_last_error(printed: str, reason: str) -> None:
    assert RunFailed(printed).reason.startswith(reason)


@pytest.mark.megatron_lm
@pytest.mark.timeout(900)
def test_comparison_of_own_flags_is_equal_and_that_of_another_rate_is_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The leader dies; of what it has logged nothing more is missing than the iteration behind it."""
    monkeypatch.setenv("MEGATRON_LM", str(compare.checkout()))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    flags = "--optimizer sgd --sgd-momentum 0 --swiglu"
    options = f"--kill-rank 0 --kill-at 4 --ranks 3 --keep {tmp_path} --json -- {flags}"
    assert compare.main(options.split()) == 0
    printed = capsys.readouterr()
    document = json.loads(printed.out)
    assert document["verdict"].startswith("equal")
    assert "rank 0 was killed (SIGKILL) in the backward of iteration 4" in document["kill"]
    assert "unicrond, 3 replica(s): it has ended" in printed.err
    ours = tables.series_of([text.read_text() for text in (tmp_path / "unicrond").glob("t.*.log")])
    alone = tables.series_of([(tmp_path / "stock-3" / "log").read_text().replace("1.000000E-04", "1.100000E-04")])
    assert {row.metric for row in tables.rows(ours, [alone], 1e-6) if row.verdict == "different"} >= {"learning rate"}


def test_task_that_is_refused_is_not_compared() -> None:
    request, *_ = compare.request_of(["--", "--use-megatron-fsdp"])
    with pytest.raises(NotCompared, match="unicrond refuses these flags: --use-megatron-fsdp: FSDP shards what"):
        compare.task_of(request)
