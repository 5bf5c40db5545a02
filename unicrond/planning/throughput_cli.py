"""`unicronctl throughput`: what the throughput model says about a model on some GPUs, and why.

    unicronctl throughput --model gpt3-7b --gpu a100-80g --gpus 8..512

Exit codes: 0 answered, 1 no layout runs on any of the GPU counts asked for, 2 a bad argument (one line
on stderr that names it and the fix).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from rich.console import Console
from rich.table import Table

from unicrond.planning.presets import GIB, GPUS, MODELS, STACKS
from unicrond.planning.throughput import Estimate, Infeasible, Job, best, job

Answer: TypeAlias = Estimate | Infeasible

#: More than any cluster this is for, and small enough to answer at once.
GPUS_MAX = 131072
COUNTS_MAX = 4096

#: Both tables fit into 80 columns.
LAYOUT_HEADERS = ("GPUs", "PFLOP/s", "TFLOP/GPU", "MFU %", "tp x pp x dp", "batches", "chunks", "recompute")
PARTS_HEADERS = ("GPUs", "seconds", "compute", "tp", "transfer", "bubble", "dp", "optimizer", "GiB")

EPILOG = f"""\
example:
  unicronctl throughput --model gpt3-7b --gpu a100-80g --gpus 8..512
  unicronctl throughput --model llama3-70b --gpu h100-80g --gpus 64..128..8 --tp 8 --json

models:  {", ".join(MODELS)}
GPUs:    {", ".join(GPUS)}
stacks:  {", ".join(STACKS)}
"""


class _Parser(argparse.ArgumentParser):
    """argparse, with errors of one line."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message.removeprefix("argument "))


def main(argv: Sequence[str]) -> int:
    """Run the command with `argv` (without the program's name); returns the exit code."""
    try:
        options = _parser().parse_args(argv)
        question = _job(options)
        if options.plot is not None:
            _require_matplotlib()
        answers = [best(question, gpus) for gpus in options.gpus]
        if options.plot is not None:
            _plot(question, answers, options.plot)
    except ValueError as problem:
        print(f"unicronctl throughput: {problem}", file=sys.stderr)
        return 2
    except SystemExit as finished:  # --help
        return int(finished.code or 0)
    if options.json:
        print(json.dumps(as_json(question, answers), indent=2))
    else:
        _print(question, answers)
    return 0 if any(isinstance(answer, Estimate) for answer in answers) else 1


def as_json(question: Job, answers: Sequence[Answer]) -> dict[str, Any]:
    """The answers as plain values: FLOP/s and bytes whole, seconds and utilisation as floats."""
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


# --- arguments -----------------------------------------------------------------------------------


def _parser() -> _Parser:
    parser = _Parser(
        prog="unicronctl throughput",
        description="Achieved model FLOP/s of a GPT on so many GPUs, in the best 3D-parallel layout.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--model", help="preset, see below (required)")
    parser.add_argument("--gpu", help="preset, see below (required)")
    parser.add_argument(
        "--gpus",
        type=gpu_counts,
        metavar="N|A..B|A..B..STEP",
        help="GPU counts, comma-separated: one, doubling from A to B, or in steps (required)",
    )
    parser.add_argument("--tp", type=_whole, help="tensor parallel degree (default: the best)")
    parser.add_argument("--pp", type=_whole, help="pipeline parallel degree (default: the best)")
    parser.add_argument("--micro-batch", type=_whole, help="sequences per micro-batch (default: the best)")
    parser.add_argument("--batch", type=_whole, help="sequences per iteration (default: the model's)")
    parser.add_argument("--seq", type=_whole, help="tokens per sequence (default: the model's)")
    parser.add_argument("--stack", help="software stack it was calibrated on (default: the GPU's usual one)")
    parser.add_argument("--even", action="store_true", help="refuse batches that do not divide among the replicas")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--plot", type=Path, metavar="OUT.png", help="draw throughput over GPUs (needs matplotlib)")
    return parser


def gpu_counts(text: str) -> list[int]:
    """`8`, `8..512` (doubling, 512 included) or `8..512..8` (steps), comma-separated; ascending, no repeats.

    Raises argparse.ArgumentTypeError, which names the fix.
    """
    counts: set[int] = set()
    for part in text.split(","):
        numbers = [_whole(number) for number in part.split("..")]
        if len(numbers) > 3:
            raise argparse.ArgumentTypeError(f"{part!r} is not N, A..B or A..B..STEP; for example 8..512")
        low, high = numbers[0], numbers[1] if len(numbers) > 1 else numbers[0]
        if high < low:
            raise argparse.ArgumentTypeError(f"{part!r} runs downwards; write {high}..{low}")
        if high > GPUS_MAX:
            raise argparse.ArgumentTypeError(f"{high} is more than {GPUS_MAX}; ask for fewer GPUs")
        if len(numbers) == 3:
            counts.update(range(low, high + 1, numbers[2]))
        else:
            counts.update(_doubling(low, high))
    if len(counts) > COUNTS_MAX:
        raise argparse.ArgumentTypeError(f"{len(counts)} counts are more than {COUNTS_MAX}; use a larger step")
    return sorted(counts)


def _doubling(low: int, high: int) -> list[int]:
    counts = []
    while low < high:
        counts.append(low)
        low *= 2
    return [*counts, high]


def _whole(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 12 or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


def _job(options: argparse.Namespace) -> Job:
    for name, presets in (("model", MODELS), ("gpu", GPUS), ("stack", STACKS)):
        value = getattr(options, name)
        if value is None and name != "stack":
            raise ValueError(f"--{name}: missing; choose from {', '.join(presets)}")
        if value is not None and value not in presets:
            raise ValueError(f"--{name}: unknown {value!r}; choose from {', '.join(presets)}")
    if options.gpus is None:
        raise ValueError("--gpus: missing; for example --gpus 8..512")
    try:
        return job(
            MODELS[options.model],
            GPUS[options.gpu],
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


def _print(question: Job, answers: Sequence[Answer]) -> None:
    console = Console()
    estimates = [answer for answer in answers if isinstance(answer, Estimate)]
    console.print(_title(question), highlight=False)
    if estimates:
        console.print(_grid(LAYOUT_HEADERS, [_layout_cells(estimate) for estimate in estimates]))
        console.print("\nSeconds per iteration and where they go (%); memory of the fullest GPU:")
        console.print(_grid(PARTS_HEADERS, [_parts_cells(estimate) for estimate in estimates]))
    if any(estimate.uneven for estimate in estimates):
        console.print("* uneven: some replicas run one micro-batch fewer and wait.")
    for answer in answers:
        if isinstance(answer, Infeasible):
            console.print(f"GPUs = {answer.gpus}: no layout: {answer.reason}.", highlight=False)


def _grid(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    grid = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for header in headers:
        grid.add_column(header, justify="right", no_wrap=True)
    for row in rows:
        grid.add_row(*row)
    return grid


def _title(question: Job) -> str:
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


def _require_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ValueError("--plot: matplotlib is missing; install it with: pip install 'unicrond[plot]'") from None


def _plot(question: Job, answers: Sequence[Answer], path: Path) -> None:
    """Throughput over GPUs, against the same throughput per GPU all the way, as an image at `path`."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import ScalarFormatter

    points = [answer for answer in answers if isinstance(answer, Estimate)]
    if not points:
        return
    gpus = [point.gpus for point in points]
    first = points[0].flops_per_s / points[0].gpus
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(gpus, [count * first / 1e15 for count in gpus], linestyle=":", color="0.6", label="linear")
    axes.plot(gpus, [point.flops_per_s / 1e15 for point in points], marker="o", markersize=3, label="T(x)")
    axes.set(title=_title(question), xlabel="GPUs", ylabel="achieved model PFLOP/s")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(ScalarFormatter())
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        figure.savefig(path)
    except (OSError, ValueError) as problem:
        raise ValueError(f"--plot: cannot write {path}: {problem}") from problem


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
