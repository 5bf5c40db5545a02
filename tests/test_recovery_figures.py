"""The figures of `make bench-recovery` follow from what was witnessed; one cell that fails does not end the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks.recovery import measure, report
from tests.benchmarks.recovery.figures import NotYet, budget, lost_ms, recovery, steady_ms
from tests.benchmarks.recovery.witness import Line

FULL = 4


def lines(text: str) -> list[Line]:
    """`MS PROCESS WORD NUMBER ...` each."""
    found = []
    for line in filter(str.strip, text.splitlines()):
        at_ms, process, word, *numbers = line.split()
        found.append(Line(process, word, int(float(at_ms) * 1000), tuple(map(int, numbers))))
    return sorted(found, key=lambda line: line.at_us)


BEFORE = """
    50 a.1 computing 6 0
    60 a.1 computed 6 0
    60 a.1 computing 6 2
    70 a.1 computed 6 2
    90 a.1 stepped 6 4
    90 b.2 stepped 6 4
    91 a.1 computing 7 0
    91 b.2 computing 7 1
    110 a.1 computed 7 0
    111 b.2 computed 7 1
    110 a.1 computing 7 2
    111 b.2 computing 7 3
    115 b.2 killed 7
"""


def killed(all_lines: list[Line]) -> Line:
    return next(line for line in all_lines if line.word == "killed")


def test_recovery_figures_follow_continuing_survivor() -> None:
    """The step is made of all micro-batches; what died with its rank is computed again, and nothing else."""
    seen = lines(
        BEFORE
        + """
        51 c.3 computing 6 1
        116 c.3 stepped 6 4
        130 a.1 computed 7 2
        131 a.1 leaving
        135 a.1 seated 2 125000
        136 a.1 computing 7 1
        146 a.1 computed 7 1
        146 a.1 computing 7 3
        156 a.1 computed 7 3
        160 a.1 agreed 7
        163 a.1 stepped 7 4
        """
    )
    found = recovery(seen, killed(seen), FULL)
    assert (found.next_step_ms, found.full_step_ms, found.new_step_ms) == (48.0, 48.0, 48.0)
    assert (found.again, found.again_survivors, found.rolled_back, found.missing) == (1, 0, 0, 0)
    assert found.other_ms == 48.0 - 15 - 10 - 10 - 3
    stages = budget(seen, found, {"detect": 117_000, "log": 119_000, "decide": 120_000})
    assert {stage: ms for stage, (ms, _) in stages.items()} == {
        "detect": 2, "log": 2, "decide": 1, "command": 5, "stop": 6, "regroup": 4, "own": 0, "redo": 21, "reduce": 4,
        "step": 3,
    }  # fmt: skip
    assert sum(spent for _, spent in stages.values()) == 15 + 10 + 10 + 3
    assert stages["stop"] == (6.0, 5.0)


def test_recovery_figures_follow_discarded_step() -> None:
    seen = lines(
        BEFORE
        + """
        130 a.1 computed 7 2
        131 a.1 discarded 7 2
        132 a.1 computing 7 0
        142 a.1 computed 7 0
        142 a.1 computing 7 2
        152 a.1 computed 7 2
        160 a.1 stepped 7 2
        """
    )
    with pytest.raises(NotYet):
        recovery(seen, killed(seen), FULL)
    seen += lines("400 a.1 stepped 8 4\n401 b.3 stepped 8 4")
    found = recovery(seen, killed(seen), FULL)
    assert (found.next_step_ms, found.full_step_ms) == (45.0, 286.0)
    assert (found.again, found.again_survivors, found.rolled_back, found.missing) == (2, 2, 0, 2)
    # From 90 to 401 ms one and a half iterations of 40 ms were made.
    assert lost_ms(seen, killed(seen), 500_000, FULL, 40.0) == 311 - 60


def test_recovery_figures_follow_return_to_checkpoint() -> None:
    seen = lines(
        BEFORE
        + """
        3000 a.4 computing 6 0
        3010 a.4 computed 6 0
        3100 a.4 stepped 6 4
        3101 b.5 stepped 6 4
        3200 a.4 stepped 7 4
        3201 b.5 stepped 7 4
        """
    )
    found = recovery(seen, killed(seen), FULL)
    assert (found.next_step_ms, found.new_step_ms, found.rolled_back) == (2986.0, 3086.0, 1)
    assert (found.again, found.again_survivors) == (1, 1)
    assert lost_ms(seen, killed(seen), 5_000_000, FULL, 40.0) == 3111 - 40


def test_steady_pace_counts_only_undisturbed_iterations() -> None:
    seen = lines("10 a.1 stepped 1 4\n20 a.1 stepped 2 4\n35 a.1 stepped 3 4\n50 a.1 stepped 4 4")
    assert steady_ms(seen, [(0, 40_000)]) == [10.0, 15.0]


def test_recovery_report_refuses_missing_results_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        report.main(["--results", str(tmp_path / "none.jsonl")])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("--results: ") and line.endswith("measure first, or name another file")


def test_recovery_report_separates_paced_runs() -> None:
    rows = [
        {"fault": "node", "paced_s": paced_s, "faults": [{"detected_ms": ms, "next_step_ms": ms}]}
        for paced_s, ms in ((0.0, 10.0), (0.5, 900.0))
    ]
    assert report.moves_table(rows, 0.0)[2:] == [
        "| node loss: kill to NodeLost in the log | 1 | 10 |",
        "| node loss: kill to the next step, at the full batch | 1 | 10 |",
    ]


def test_recovery_benchmark_continues_after_failed_cell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """There is no python where the peers should be."""
    results = tmp_path / "results.jsonl"
    chosen = ["--systems", "torchrun", "torchft", "--ranks", "2", "--rounds", "1", "--repetitions", "1"]
    with pytest.raises(SystemExit) as ended:
        measure.main([*chosen, "--peers", str(tmp_path), "--results", str(results)])
    assert ended.value.code == 1 and not results.exists()
    assert capsys.readouterr().err.splitlines()[-1] == "failed: kill-torchrun-2-0, kill-torchft-2-0"
