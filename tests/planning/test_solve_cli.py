"""`plan solve`, through its `main`: what it prints, and the one line it says to what makes no sense."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from random import Random

import pytest

from tests.planning.clusters import random_problem, random_seats, with_layouts
from tests.planning.oracle import brute_force, brute_force_in
from tests.planning.pools import random_pools
from unicrond.core.planning.problem import Problem
from unicrond.core.planning.solver import solve
from unicrond.ctl import solve as solve_cli
from unicrond.ctl.main import main
from unicrond.ctl.parser import _SOLVE_EPILOG

TASK = '{"weight": 1, "x": 0, "faulty": false, "min": 0, "T": [0, 5]}'
GOOD = '{"n": 3, "D_run": 10, "D_trans": 1, "tasks": [' + TASK + "]}"


def solve_file(tmp_path: Path, text: str, *flags: str) -> int:
    path = tmp_path / "problem.json"
    path.write_text(text)
    return main(["plan", "solve", str(path), *flags])


def as_json(problem: Problem) -> str:
    tasks = []
    for index, task in enumerate(problem.tasks):
        told = {
            "weight": task.weight,
            "x": task.workers,
            "faulty": task.faulty,
            "min": task.min_workers,
            "floor": task.floor,
            "cap": task.max_workers,
            "unit": task.unit,
            "T": list(task.curve.points.values()),
        }
        if index % 2:
            told["T"] = {str(workers): flops for workers, flops in task.curve.points.items() if flops}
        tasks.append(told)
    head = {"n": problem.workers, "D_run": problem.d_running_us, "D_trans": problem.d_transition_us}
    return json.dumps({**head, "churn": problem.churn_us, "tasks": tasks})


def in_layouts(problem: Problem) -> str:
    """As JSON, with all that layouts are about."""
    told = json.loads(as_json(problem))
    told["nodes"] = [slots for slots, nodes in problem.seats for _ in range(nodes)]
    for task, one in zip(problem.tasks, told["tasks"], strict=True):
        one |= {"tp": task.tp, "turn": task.turn, "D_trans": task.d_transition_us}
        one |= {"D_move": task.prices.move_us, "D_reshape": task.prices.reshape_us, "D_restart": task.prices.restart_us}
        one["layouts"] = [
            {
                **other.shape._asdict(),
                "cap": other.most,
                "T": {str(k): flops for k, flops in other.curve.points.items()},
            }
            for other in task.alternatives
        ]
    return json.dumps(told)


@pytest.mark.parametrize("seed", range(20))
def test_solve_command_matches_brute_force_with_layouts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], seed: int
) -> None:
    rng = Random(seed)
    problem = random_problem(rng)
    problem = replace(problem, tasks=tuple(with_layouts(rng, task, problem.workers) for task in problem.tasks))
    problem = replace(problem, seats=random_seats(rng, problem.workers))
    assert solve_cli.read_problem(in_layouts(problem).encode()).seats == problem.seats
    assert solve_file(tmp_path, in_layouts(problem), "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    workers, layouts, value = brute_force_in(problem)
    assert answer["plan"] == list(workers)
    assert answer["objective"] == pytest.approx(float(value), rel=1e-12)
    if any(task.alternatives for task in problem.tasks):
        shapes = [task.shape_of(layout) for task, layout in zip(problem.tasks, layouts, strict=True)]
        assert answer["layouts"] == [str(shape) for shape in shapes]


def test_solve_command_takes_types(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The plan, its types and its proof; what cannot be is named."""
    for seed in range(10):
        problem = random_pools(Random(seed), 4, 2, 3)
        request = json.loads(in_layouts(problem))
        del request["nodes"]
        request["types"] = {pool.gpu: [8] * (pool.workers // 8) for pool in problem.pools}
        for task, entry in zip(problem.tasks, request["tasks"], strict=True):
            entry["type"] = task.gpu
            entry["T"] = {str(k): flops for k, flops in task.curve.points.items()}
            for option, layout in zip(task.alternatives, entry["layouts"], strict=True):
                layout["type"] = option.gpu
        assert solve_file(tmp_path, json.dumps(request), "--json") == 0
        answer, solution = json.loads(capsys.readouterr().out), solve(problem)
        assert answer["plan"] == list(solution.workers) and answer["types"] == list(solution.gpus)
        assert answer["proven"] is (solution.gap == 0) and answer["gap_ppm"] == solution.gap_ppm
    request["n"] += 1
    assert solve_file(tmp_path, json.dumps(request)) == 2
    assert "types: their nodes have" in capsys.readouterr().err
    request["tasks"][0]["type"] = "b200"
    assert solve_file(tmp_path, json.dumps(request)) == 2
    assert "tasks[0].type: 'b200' is no type; give a100-80g or h100-80g" in capsys.readouterr().err


def test_solve_command_matches_its_help(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = r"\n  \$ unicronctl plan solve problem.json --json\n"
    shown = re.search(rf"\$ cat problem.json\n(.*){command}(.*)", _SOLVE_EPILOG, re.S)
    assert shown
    assert solve_file(tmp_path, shown[1], "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    promised = json.loads(shown[2])
    assert list(answer) == ["objective", "plan", "reason"]
    assert (answer["objective"], answer["plan"]) == (promised["objective"], promised["plan"])
    assert answer["reason"].startswith(promised["reason"].removesuffix("..."))


def test_solve_command_prints_exact_objective(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in range(150):
        problem = random_problem(Random(seed), most_tasks=3)
        text = as_json(problem)
        problem = solve_cli.read_problem(text.encode())
        assert solve_file(tmp_path, text, "--json") == 0
        answer = json.loads(capsys.readouterr().out)
        optimum = brute_force(problem)[1]
        assert abs(Fraction(answer["objective"]) - optimum) <= Fraction(1e-12) * abs(optimum), seed
        recomputed = sum(problem.gain(t, k) for t, k in zip(problem.tasks, answer["plan"], strict=True))
        assert answer["objective"] == float(recomputed)


def changed(old: str, new: str) -> str:
    assert old in GOOD
    return GOOD.replace(old, new)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not JSON"),
        ("[]", "the file: expected object"),
        (changed('"n": 3, ', ""), "n: is missing"),
        (changed('"n": 3', '"n": "3"'), "n: expected int, got str"),
        (changed('"n": 3', '"n": -3'), "n: expected int >= 0"),
        (changed('"n": 3', '"n": 2.5'), "n: expected int, got float"),
        (changed('"n": 3', '"n": 3, "m": 1'), "m: no such field"),
        (changed('"D_run": 10', '"D_run": -10'), "D_run: -10; give a number >= 0"),
        (changed('"D_run": 10', '"D_run": null'), "D_run: expected int | float, got null"),
        (changed('"D_run": 10', '"D_run": 1e999'), "D_run: number out of range"),
        (changed('"D_trans": 1', '"D_trans": "soon"'), "D_trans: expected int | float, got str"),
        (changed('"weight": 1', '"weight": -1'), r"tasks\[0\].weight: -1; give a number >= 0"),
        (changed('"x": 0', '"x": 0.5'), r"tasks\[0\].x: expected int, got float"),
        (changed('"faulty": false', '"faulty": 0'), r"tasks\[0\].faulty: expected bool, got int"),
        (changed('"min": 0, ', ""), r"tasks\[0\].min: is missing"),
        (changed('"min": 0', '"min": 0, "cap": -1'), r"tasks\[0\].cap: expected int >= 0"),
        (changed('"min": 0', '"min": 0, "max": 1'), r"tasks\[0\].max: no such field"),
        (changed("[0, 5]", "[0, -5]"), r"tasks\[0\].T\[1\]: -5; give a number >= 0"),
        (changed("[0, 5]", "[0, true]"), r"tasks\[0\].T\[1\]: expected int | float, got bool"),
        (changed("[0, 5]", "7"), r"tasks\[0\].T: expected object | array, got int"),
        (changed("[0, 5]", '{"one": 5}'), r"tasks\[0\].T: 'one' is not a number of workers"),
        (changed("[0, 5]", '{"01": 5}'), r"tasks\[0\].T: '01' is not a number of workers"),
        (changed("[0, 5]", "[0, 1e308]"), "tasks: weight . throughput . duration is beyond"),
    ],
)
def test_solve_command_names_bad_field_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    assert solve_file(tmp_path, text) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert re.search(said, err), err


def test_solve_command_reports_missing_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "solve", "no-such.json"]) == 2
    assert capsys.readouterr().err == "unicronctl: no-such.json: No such file or directory; give a readable JSON file\n"


def test_solve_command_reports_bad_flag_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "solve", "--fast"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
