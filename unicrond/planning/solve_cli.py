"""`unicronctl plan solve PROBLEM.json [--json]`: one plan problem in, one plan out.

The file holds `{"n": workers after the event, "D_run": number, "D_trans": number, "tasks": [{"weight": w,
"x": workers before, "faulty": bool, "min": int, "floor": int?, "cap": int?, "T": [T(0), T(1), ...] or
{"8": T(8), ...}}]}`; entries of T that are missing are 0. Further, if wanted: "churn" beside "D_trans"
(what moving a healthy task costs on top), "unit" (workers come in multiples of it) and "name" per task.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Annotated, NoReturn, TypeAlias

import msgspec
from msgspec import Meta

from unicrond.planning.exact import solve_precisely
from unicrond.planning.problem import Curve, Problem, ProblemError, TaskProblem
from unicrond.planning.solver import Solution

_Workers: TypeAlias = Annotated[int, Meta(ge=0, lt=10**15)]
_Number: TypeAlias = int | float
_COUNT = re.compile(r"0|[1-9][0-9]{0,14}")

EXAMPLE = """example:
  $ cat problem.json
  {"n": 3, "D_run": 1000, "D_trans": 10, "tasks": [
    {"weight": 2, "x": 2, "faulty": true, "min": 1, "floor": 1, "cap": 3, "T": [0, 10, 19, 27]},
    {"weight": 1, "x": 2, "faulty": false, "min": 1, "floor": 1, "T": {"1": 10, "2": 20}}]}
  $ unicronctl plan solve problem.json --json
  {"objective": 47420.0, "plan": [2, 1], "reason": "3 of 3 workers in use, WAF 48 FLOP/s: ..."}
"""


class _Task(msgspec.Struct, forbid_unknown_fields=True):
    weight: _Number
    x: _Workers
    faulty: bool
    min: _Workers
    T: list[_Number] | dict[str, _Number]
    floor: _Workers | None = None
    cap: _Workers | None = None
    unit: Annotated[int, Meta(ge=1, lt=10**15)] = 1
    name: Annotated[str, Meta(min_length=1, max_length=63)] | None = None


class _Request(msgspec.Struct, forbid_unknown_fields=True):
    n: _Workers
    D_run: _Number
    D_trans: _Number
    tasks: list[_Task]
    churn: _Number = 0


def read_problem(text: bytes) -> Problem:
    """The problem that the JSON states. Raises ProblemError, one line that names the field."""
    try:
        request = msgspec.json.decode(text, type=_Request)
    except msgspec.ValidationError as error:
        raise ProblemError(_field_first(str(error))) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProblemError(f"not JSON: {error}") from None
    for field in ("D_run", "D_trans", "churn"):
        _not_negative(field, getattr(request, field))
    tasks = tuple(_task(f"tasks[{index}]", task) for index, task in enumerate(request.tasks))
    return Problem(request.n, request.D_run, request.D_trans, tasks, request.churn)


def _task(where: str, task: _Task) -> TaskProblem:
    _not_negative(f"{where}.weight", task.weight)
    points = task.T if isinstance(task.T, dict) else {str(k): flops for k, flops in enumerate(task.T)}
    for count, flops in points.items():
        if not _COUNT.fullmatch(count):
            raise ProblemError(f'{where}.T: {count!r} is no number of workers; give keys like "8"')
        _not_negative(f"{where}.T[{count}]", flops)
    return TaskProblem(
        name=task.name or where,
        weight=task.weight,
        workers=task.x,
        throughput=Curve({int(count): flops for count, flops in points.items()}),
        faulty=task.faulty,
        min_workers=task.min,
        max_workers=task.cap,
        floor=task.floor or 0,
        unit=task.unit,
    )


def _not_negative(field: str, number: _Number) -> None:
    if number < 0:
        raise ProblemError(f"{field}: {number}; give a number >= 0")


def _field_first(message: str) -> str:
    """msgspec's "Expected `int`, got `str` - at `$.tasks[0].x`" as "tasks[0].x: expected int, got str"."""
    said, _, where = message.replace("`", "").partition(" - at ")
    if missing := re.search(r"required field (\w+)", said):
        field = f"{where}.{missing[1]}" if where else missing[1]
        said = "is missing; give it"
    elif unknown := re.search(r"unknown field (\w+)", said):
        field, said = f"{where}.{unknown[1]}" if where else unknown[1], "no such field; remove it"
    else:
        field, said = where, said[:1].lower() + said[1:]
    field = field.replace("key in ", "").removeprefix("$").removeprefix(".")
    return f"{field or 'the file'}: {said}"


class _Parser(argparse.ArgumentParser):
    """A bad flag is told in one line, too."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"plan solve: {message}; see --help\n")


def main(argv: list[str] | None = None) -> int:
    """Run the command; 0, or 2 with one line on stderr."""
    parser = _Parser(
        prog="unicronctl plan solve",
        description="Solve one plan problem exactly. " + __doc__.partition("\n\n")[2].replace("`", ""),
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("problem", metavar="PROBLEM.json", help="the problem's file, - for standard input")
    parser.add_argument("--json", action="store_true", help="JSON on one line (the default unless on a terminal)")
    options = parser.parse_args(argv)
    try:
        text = sys.stdin.buffer.read() if options.problem == "-" else Path(options.problem).read_bytes()
        solution = solve_precisely(read_problem(text))
    except ProblemError as error:
        return _refuse(f"{options.problem}: {error}")
    except OSError as error:
        return _refuse(f"{options.problem}: {error.strerror}; give a readable JSON file")
    if options.json or not sys.stdout.isatty():
        answer = {"objective": solution.objective, "plan": list(solution.workers), "reason": solution.reason}
        print(json.dumps(answer))
    else:
        _print_table(solution)
    return 0


def _refuse(line: str) -> int:
    print(f"plan solve: {' '.join(line.split())}", file=sys.stderr)
    return 2


def _print_table(solution: Solution) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("task", "before", "after", "WAF, FLOP/s", title=f"objective {solution.objective:.12g}")
    for (task, workers), waf in zip(solution, solution.waf_of, strict=True):
        before = f"{task.workers}{' (faulty)' if task.faulty else ''}"
        table.add_row(task.name, before, str(workers), f"{waf:.4g}")
    console = Console()
    console.print(table)
    console.print(solution.reason, markup=False)


if __name__ == "__main__":
    sys.exit(main())
