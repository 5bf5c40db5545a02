"""`unicronctl plan solve`: one plan problem in, one plan out; `ctl/parser.py` describes the file."""

from __future__ import annotations

import json
import re
import sys
from argparse import Namespace
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from unicrond.core.planning.feasibility import Seats, seats_of
from unicrond.core.planning.problem import (
    TURNS_MAX,
    Alternative,
    Curve,
    Pool,
    Prices,
    Problem,
    ProblemError,
    TaskProblem,
)
from unicrond.core.planning.unlimited_integers import solve_precisely
from unicrond.display.plan_explanation import gap_text
from unicrond.display.tables import Table, show
from unicrond.events.cli.command_line import UsageError
from unicrond.events.vocabulary.shape import Shape

_Workers: TypeAlias = Annotated[int, Meta(ge=0, lt=10**15)]
_Number: TypeAlias = int | float
_COUNT = re.compile(r"0|[1-9][0-9]{0,14}")


_Table: TypeAlias = list[_Number] | dict[str, _Number]
_Size: TypeAlias = Annotated[int, Meta(ge=1, lt=10**6)]
_SizeOrUsual: TypeAlias = Annotated[int, Meta(ge=0, lt=10**6)]


class _Layout(msgspec.Struct, forbid_unknown_fields=True):
    T: _Table
    tp: _Size = 1
    pp: _Size = 1
    vpp: _Size = 1
    ep: _Size = 1
    micro_batch: _SizeOrUsual = 0
    cp: _Size = 1
    etp: _SizeOrUsual = 0
    cap: _Workers | None = None
    type: str | None = None


class _TaskRequest(msgspec.Struct, forbid_unknown_fields=True):
    weight: _Number
    x: _Workers
    faulty: bool
    min: _Workers
    T: _Table
    floor: _Workers | None = None
    cap: _Workers | None = None
    unit: Annotated[int, Meta(ge=1, lt=10**15)] = 1
    tp: _Size = 1
    layouts: list[_Layout] = []
    D_trans: _Number | None = None
    D_move: _Number | None = None
    D_reshape: _Number | None = None
    D_restart: _Number | None = None
    turn: Annotated[int, Meta(ge=0, le=TURNS_MAX)] = 0
    priority: Annotated[int, Meta(ge=-(10**6), le=10**6)] = 0
    preemptible: bool = False
    name: Annotated[str, Meta(min_length=1, max_length=63)] | None = None
    type: str | None = None


class _Request(msgspec.Struct, forbid_unknown_fields=True):
    n: _Workers
    D_run: _Number
    D_trans: _Number
    tasks: list[_TaskRequest]
    churn: _Number = 0
    nodes: list[_Workers] = []
    types: dict[str, list[_Workers]] = {}


def read_problem(text: bytes) -> Problem:
    """Read the problem that the JSON states. Raises ProblemError, one line that names the field."""
    try:
        request = msgspec.json.decode(text, type=_Request)
    except msgspec.ValidationError as error:
        raise ProblemError(_field_first(str(error))) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProblemError(f"not JSON: {error}") from None
    for field in ("D_run", "D_trans", "churn"):
        _not_negative(field, getattr(request, field))
    tasks = tuple(_task(f"tasks[{index}]", task, request.types) for index, task in enumerate(request.tasks))
    pools = tuple([Pool(gpu, sum(slots), _seats(slots)) for gpu, slots in request.types.items()])
    if pools and (request.nodes or request.n != sum(pool.workers for pool in pools)):
        slots = sum(pool.workers for pool in pools)
        raise ProblemError(f"types: their nodes have {slots} slots, n is {request.n}; give n = {slots}, and no nodes")
    return Problem(request.n, request.D_run, request.D_trans, tasks, request.churn, _seats(request.nodes), pools)


def _seats(slots: list[int]) -> Seats:
    return seats_of({str(number): count for number, count in enumerate(slots)})


def _type(where: str, gpu: str | None, types: Collection[str]) -> str:
    """Return the type that a task or layout names; "" where there is one. Raises ProblemError."""
    if (gpu or "") not in (types or ("",)):
        raise ProblemError(f"{where}.type: {gpu!r} is no type; give {' or '.join(types) or 'none'}")
    return gpu or ""


def _task(where: str, task: _TaskRequest, types: Collection[str]) -> TaskProblem:
    gpu = _type(where, task.type, types)
    _not_negative(f"{where}.weight", task.weight)
    for field in ("D_trans", "D_move", "D_reshape", "D_restart"):
        _not_negative(f"{where}.{field}", getattr(task, field) or 0)
    alternatives = [
        Alternative(
            Shape(layout.tp, layout.pp, layout.vpp, layout.ep, layout.micro_batch, layout.cp, layout.etp).plain,
            _curve(f"{where}.layouts[{n}]", layout.T),
            layout.cap,
            gpu if layout.type is None else _type(f"{where}.layouts[{n}]", layout.type, types),
        )
        for n, layout in enumerate(task.layouts)
    ]
    return TaskProblem(
        name=task.name or where,
        weight=task.weight,
        workers=task.x,
        throughput=_curve(where, task.T),
        faulty=task.faulty,
        min_workers=task.min,
        max_workers=task.cap,
        floor=task.floor or 0,
        unit=task.unit,
        d_transition_us=task.D_trans,
        tp=task.tp,
        alternatives=tuple(alternatives),
        prices=Prices(task.D_move, task.D_reshape, task.D_restart),
        turn=task.turn,
        gpu=gpu,
        priority=task.priority,
        preemptible=task.preemptible,
    )


def _curve(where: str, table: _Table) -> Curve:
    points = table if isinstance(table, dict) else {str(k): flops for k, flops in enumerate(table)}
    for count, flops in points.items():
        if not _COUNT.fullmatch(count):
            raise ProblemError(f'{where}.T: {count!r} is not a number of workers; give keys like "8"')
        _not_negative(f"{where}.T[{count}]", flops)
    return Curve({int(count): flops for count, flops in points.items()})


def _not_negative(field: str, number: _Number) -> None:
    if number < 0:
        raise ProblemError(f"{field}: {number}; give a number >= 0")


def _field_first(message: str) -> str:
    """Convert msgspec's "Expected `int`, got `str` - at `$.tasks[0].x`" to "tasks[0].x: expected int, got str"."""
    text, _, where = message.replace("`", "").partition(" - at ")
    if missing := re.search(r"required field (\w+)", text):
        field = f"{where}.{missing[1]}" if where else missing[1]
        text = "is missing; give it"
    elif unknown := re.search(r"unknown field (\w+)", text):
        field, text = f"{where}.{unknown[1]}" if where else unknown[1], "no such field; remove it"
    else:
        field, text = where, text[:1].lower() + text[1:]
    field = field.replace("key in ", "").removeprefix("$").removeprefix(".")
    return f"{field or 'the file'}: {text}"


def run(options: Namespace) -> None:
    """Solve the problem that the command line names. Raises UsageError."""
    try:
        text = sys.stdin.buffer.read() if options.problem == "-" else Path(options.problem).read_bytes()
        solution = solve_precisely(read_problem(text))
    except ProblemError as error:
        raise UsageError(f"{options.problem}: {' '.join(str(error).split())}") from None
    except OSError as error:
        raise UsageError(f"{options.problem}: {error.strerror}; give a readable JSON file") from None
    if options.json or not sys.stdout.isatty():
        answer = {"objective": solution.objective, "plan": list(solution.workers), "reason": solution.reason}
        if any(task.alternatives for task in solution.problem.tasks):
            answer["layouts"] = [str(shape) for shape in solution.shapes]
        if solution.problem.pools:
            answer |= {"types": list(solution.gpus), "proven": not solution.gap_ppm, "gap_ppm": solution.gap_ppm}
        print(json.dumps(answer))
    else:
        headers = ("task", "before", "after", "WAF, FLOP/s")
        rows = (
            (
                task.name,
                f"{task.workers}{' (faulty)' if task.faulty else ''}",
                f"{workers} in {shape}" if task.alternatives and workers else str(workers),
                f"{waf:.4g}",
            )
            for (task, workers), waf, shape in zip(solution, solution.waf_of, solution.shapes, strict=True)
        )
        proof = f", {gap_text(solution.gap_ppm)}" if solution.problem.pools else ""
        show(Table(headers, tuple(rows)), f"objective {solution.objective:.12g}{proof}")
        print(solution.reason)
