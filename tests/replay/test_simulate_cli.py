"""`unicron-replay simulate`: a table, JSON, a plot; and one clear line for what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from unicrond.replay.cli import main as replay_main
from unicrond.replay.evaluation.model.workload import (
    Cluster,
    TrainingTask,
    WorkloadError,
    parse_cluster,
    parse_tasks,
    six,
    workload,
)
from unicrond.replay.evaluation.studies.redo import DOCUMENT, STUDIES, replace_block
from unicrond.replay.options.arguments import TRACE_FILE_VARIABLE


def main(arguments: list[str]) -> int:
    return replay_main(["simulate", *arguments])


TASKS = """
- {name: small, model: gpt3-1.3b, weight: 2}
- {name: large, model: gpt3-7b, min_nodes: 2, max_nodes: 4}
"""


def test_simulate_prints_table_with_policies_and_assumptions(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--trace", "trace-b", "--policy", "megatron-wait,varuna"]) == 0
    told = capsys.readouterr()
    rows = {line.split()[0]: float(line.split()[1]) for line in told.out.splitlines() if line.startswith(("m", "v"))}
    assert rows["megatron-wait"] == 1.0
    assert 0.4 < rows["varuna"] < 1.0
    assert "varuna_morph_s = 300" in told.out
    assert "26 node faults and 80 others" in told.out
    assert told.err == ""


def test_simulate_json_holds_identity_and_assumptions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tasks.yaml").write_text(TASKS)
    given = ["--cluster", "h100-80g:6x8", "--tasks", str(tmp_path / "tasks.yaml"), "--trace", "poisson:days=3"]
    assert main([*given, "--policy", "unicron,hot-spare:2", "--seeds", "2", "--assume", "regroup_s=7", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["assumptions"]["regroup_s"] == 7
    assert told["rows"][0]["core"][0]["cpu_s"] > 0
    assert [task["name"] for task in told["tasks"]] == ["small", "large"]
    for row in told["rows"]:
        assert len(row["seeds"]) == 2
        for seed in row["seeds"]:
            free = int(seed.pop("failure_free"))
            assert free == sum(map(int, seed.values()))


def test_number_of_processes_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    told = []
    for processes in ("1", "2"):
        given = ["--trace", "meta:rate=500,days=2", "--policy", "megatron-wait,ft-hsdp", "--seeds", "2", "--json"]
        assert main([*given, "--processes", processes]) == 0
        told.append(capsys.readouterr().out)
    assert told[0] == told[1]


def test_simulate_plot_is_small_png(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "out.png"
    assert main(["--trace", "trace-b", "--policy", "megatron-wait,ideal", "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size < 100_000
    capsys.readouterr()


def test_environment_names_trace_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(TRACE_FILE_VARIABLE, str(tmp_path / "away.json"))
    assert main([]) == 2
    assert "away.json: no such file" in capsys.readouterr().err


def test_replay_passes_options_to_simulate(capsys: pytest.CaptureFixture[str]) -> None:
    assert replay_main(["simulate", "--trace", "trace-b:repair=1"]) == 2
    assert "unknown setting 'repair'" in capsys.readouterr().err


def test_help_and_parameters_list_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "unicron-replay simulate --cluster a800-80g:16x8" in capsys.readouterr().out
    assert main(["--list-assumptions"]) == 0
    assert "regroup_s = 15" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("", "--trace: missing"),
        ("--trace trace-b --policy unicorn", "did you mean unicron"),
        ("--trace trace-b --policy hot-spare:16", "1 to 15"),
        ("--trace trace-b --policy unicron:2", "unknown 'unicron:2'"),
        ("--trace trace-b --policy ,", "--policy: none given"),
        ("--trace trace-b --cluster a800:16", "unknown GPU 'a800'; did you mean a800-80g"),
        ("--trace trace-b --cluster 16x8", "give GPU:NODESxGPUS"),
        ("--trace trace-b --cluster a800-80g:4x8", "at least 9 nodes"),
        ("--trace trace-b --cluster a800-80g:0x8", "0 GPUs"),
        ("--trace trace-b --tasks nowhere.yaml", "cannot be read"),
        ("--trace trace-b --tasks six*0", "no tasks"),
        ("--trace trace-b --assume regroup=1", "--assume regroup: unknown"),
        ("--trace trace-b --assume regroup_s=-1", "give seconds"),
        ("--trace trace-b --assume oobleck_ratio=2", "give a ratio"),
        ("--trace trace-b --assume ft_hsdp_replica_nodes=-2", "give nodes"),
        ("--trace meta:rate=0", "rate='0' does not fit; give faults in 1,000 node days"),
        ("--trace trace-b --assume regroup_s", "give NAME=VALUE"),
        ("--trace trace-b --seeds 0", "--seeds: '0' is not a whole number of 1 to 10000"),
        ("--trace trace-b --seeds two", "--seeds: 'two' is not a whole number"),
        ("--trace trace-b --what", "unrecognized arguments: --what"),
    ],
)
def test_simulate_error_is_one_line(
    arguments: str, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(TRACE_FILE_VARIABLE, raising=False)
    assert main(arguments.split()) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert told in said.err
    assert said.err.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a: 1", "expected a list"),
        ("- {name: a}", "line 1: \\[0\\].model: missing"),
        ("- {name: a, model: gpt3-7b, weigth: 2}", "did you mean weight"),
        ("- {name: a, model: gpt3-8b}", "did you mean gpt3-7b"),
        ("- {name: a, model: gpt3-7b}\n- {name: a, model: gpt3-7b}", "appears twice"),
        ("- {name: a, model: gpt3-7b, weight: 0}", "line 1"),
        ("- [", "line"),
    ],
)
def test_task_list_error_names_place(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "t.yaml").write_text(text)
    with pytest.raises(WorkloadError, match=told):
        parse_tasks(str(tmp_path / "t.yaml"))


def test_workload_refuses_model_that_fits_nowhere() -> None:
    with pytest.raises(WorkloadError, match="does not fit on these GPUs"):
        workload(Cluster("a800-80g", 1), (TrainingTask(name="t", model="gpt3-175b"),))


def test_more_nodes_never_slow_task() -> None:
    made = workload(parse_cluster("a800-80g:16x8"), six())
    for curve in made.throughput.values():
        assert list(curve) == sorted(curve)
        assert len(curve) == 17


# --- the write-up --------------------------------------------------------------------------------


def test_document_has_block_for_each_study() -> None:
    text = DOCUMENT.read_text()
    for name in STUDIES:
        replace_block(text, name, "")


def test_replace_block_changes_only_its_block() -> None:
    text = "a\n<!-- begin x -->\nold\n<!-- end x -->\nb\n"
    assert replace_block(text, "x", "new \\1") == "a\n<!-- begin x -->\nnew \\1\n<!-- end x -->\nb\n"
    with pytest.raises(ValueError, match="block y"):
        replace_block(text, "y", "new")
