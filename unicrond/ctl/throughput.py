"""`unicronctl throughput`: the throughput model's estimate for a model on some GPUs, and its parts.

    unicronctl throughput --model gpt3-7b --gpu-type a100-80g --gpus 8..512

Exit codes: 0 answered, 1 no layout runs on any of the GPU counts asked for, 2 a bad argument (one line
on stderr that names it and the fix).
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeAlias

from unicrond.display.plotting import canvas, require_matplotlib, save
from unicrond.display.tables import Table, show
from unicrond.events.cli.command_line import UsageError
from unicrond.throughput.layouts import ThroughputQuery, job
from unicrond.throughput.model import Estimate, Infeasible, best
from unicrond.throughput.presets import GIB, GPUS, MODELS, STACKS

Answer: TypeAlias = Estimate | Infeasible

#: Both tables fit into 80 columns.
LAYOUT_HEADERS = ("GPUs", "PFLOP/s", "TFLOP/GPU", "MFU %", "tp x pp x dp", "batches", "chunks", "recompute")
PARTS_HEADERS = ("GPUs", "seconds", "compute", "tp", "transfer", "bubble", "dp", "optimizer", "GiB")


def run(options: Namespace) -> int:
    """Answer what the flags ask (`ctl/parser.py`); return the exit code. Raises UsageError."""
    try:
        question = _job(options)
        if options.plot is not None:
            require_matplotlib()
        answers = [best(question, gpus) for gpus in options.gpus]
        if options.plot is not None:
            _plot(question, answers, options.plot)
    except ValueError as problem:
        raise UsageError(str(problem)) from None
    if options.json:
        print(json.dumps(as_json(question, answers), indent=2))
    else:
        _print(question, answers)
    return 0 if any(isinstance(answer, Estimate) for answer in answers) else 1


def as_json(question: ThroughputQuery, answers: Sequence[Answer]) -> dict[str, Any]:
    """Return the answers as plain values: FLOP/s and bytes whole, seconds and utilisation as floats."""
    return {
        "model": question.model.name,
        "gpu": question.gpu.name,
        "stack": question.stack.name,
        "batch": question.batch,
        "seq": question.seq,
        "flops_per_iteration": question.flops_per_iteration,
        "rows": [_row_json(answer) for answer in answers],
    }


def _row_json(answer: Answer) -> dict[str, Any]:
    if isinstance(answer, Infeasible):
        return {"gpus": answer.gpus, "flops_per_s": 0, "reason": answer.reason}
    return {
        "gpus": answer.gpus,
        "flops_per_s": answer.flops_per_s,
        "mfu": answer.mfu,
        "iteration_s": answer.iteration_s,
        "parts": asdict(answer.parts),
        "layout": {**asdict(answer.layout), "dp": answer.dp},
        "micro_batches": answer.micro_batches,
        "uneven": answer.uneven,
        "memory_bytes": answer.memory_bytes,
    }


def _job(options: Namespace) -> ThroughputQuery:
    for name, presets in (("model", MODELS), ("gpu_type", GPUS), ("stack", STACKS)):
        value = getattr(options, name)
        if value is None and name != "stack":
            raise ValueError(f"--{name.replace('_', '-')}: missing; choose from {', '.join(presets)}")
        if value is not None and value not in presets:
            raise ValueError(f"--{name.replace('_', '-')}: unknown {value!r}; choose from {', '.join(presets)}")
    if options.gpus is None:
        raise ValueError("--gpus: missing; for example --gpus 8..512")
    try:
        return job(
            MODELS[options.model],
            GPUS[options.gpu_type],
            stack=STACKS[options.stack] if options.stack else None,
            batch=options.batch,
            seq=options.seq,
            tp=options.tp,
            pp=options.pp,
            micro_batch=options.micro_batch,
            uneven=not options.even,
        )
    except ValueError as problem:
        field, _, rest = str(problem).partition(":")
        raise ValueError(f"--{field.replace('_', '-')}:{rest}") from problem


# --- output --------------------------------------------------------------------------------------


def _print(question: ThroughputQuery, answers: Sequence[Answer]) -> None:
    estimates = [answer for answer in answers if isinstance(answer, Estimate)]
    print(_title(question))
    if estimates:
        show(_table(LAYOUT_HEADERS, _layout_cells, estimates))
        print("\nSeconds per iteration and where they go (%); memory of the fullest GPU:")
        show(_table(PARTS_HEADERS, _parts_cells, estimates))
    if any(estimate.uneven for estimate in estimates):
        print("* uneven: some replicas run one micro-batch fewer and wait.")
    for answer in answers:
        if isinstance(answer, Infeasible):
            print(f"GPUs = {answer.gpus}: no layout: {answer.reason}.")


def _table(headers: tuple[str, ...], cells: Callable[[Estimate], list[str]], estimates: Sequence[Estimate]) -> Table:
    return Table(headers, tuple(tuple(cells(estimate)) for estimate in estimates), right=frozenset(headers))


def _title(question: ThroughputQuery) -> str:
    return (
        f"{question.model.name} on {question.gpu.name}, {question.stack.name}, "
        f"{question.batch} x {question.seq} tokens per iteration"
    )


def _layout_cells(answer: Estimate) -> list[str]:
    layout = answer.layout
    return [
        f"{answer.gpus}",
        f"{answer.flops_per_s / 1e15:.3f}",
        f"{answer.flops_per_s / answer.gpus / 1e12:.1f}",
        f"{100 * answer.mfu:.1f}",
        f"{layout.tp} x {layout.pp} x {answer.dp}",
        f"{answer.micro_batches} of {layout.micro_batch}{'*' if answer.uneven else ''}",
        f"{layout.chunks}",
        layout.recompute,
    ]


def _parts_cells(answer: Estimate) -> list[str]:
    seconds = answer.iteration_s
    shares = [f"{100 * part / seconds:.1f}" for part in asdict(answer.parts).values()]
    return [f"{answer.gpus}", f"{seconds:.3f}", *shares, f"{answer.memory_bytes / GIB:.0f}"]


def _plot(question: ThroughputQuery, answers: Sequence[Answer], path: Path) -> None:
    """Draw throughput over GPUs, against linear scaling of the first point, as an image at `path`."""
    from matplotlib.ticker import ScalarFormatter

    points = [answer for answer in answers if isinstance(answer, Estimate)]
    if not points:
        return
    gpus = [point.gpus for point in points]
    first = points[0].flops_per_s / points[0].gpus
    figure, axes = canvas(_title(question))
    axes.plot(gpus, [count * first / 1e15 for count in gpus], linestyle=":", color="0.6", label="linear")
    axes.plot(gpus, [point.flops_per_s / 1e15 for point in points], marker="o", markersize=3, label="T(x)")
    axes.set(xlabel="GPUs", ylabel="achieved model PFLOP/s")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(ScalarFormatter())
    axes.legend()
    save(figure, path)
