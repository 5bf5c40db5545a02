"""`make evaluation`: run every study of docs/results/evaluation.md again, and write its tables and figures anew.

    python -m unicrond.replay.evaluation [--only NAME,...] [--seeds N] [--trace FILE] [--processes P]

The prose of docs/results/evaluation.md is written by hand; what stands between `<!-- begin NAME -->` and
`<!-- end NAME -->` is written here, one study per name. Seeds are 1..N and the defaults of `assumptions.py` hold
unless a study says otherwise, so two runs of one version differ in nothing but CPU times.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from unicrond.core.planning import kernel_choice as kernel
from unicrond.replay.evaluation.model.traces import INFINITEHBD_ORIGIN, INFINITEHBD_SHA256, TraceError
from unicrond.replay.evaluation.studies import large_studies, programs, studies
from unicrond.replay.evaluation.studies.comparison import OutcomeCache
from unicrond.replay.evaluation.studies.simulate_cli import runs_bar
from unicrond.replay.evaluation.studies.studies import Bench
from unicrond.replay.options.arguments import TRACE_FILE_VARIABLE

DOCUMENT = Path("docs/results/evaluation.md")
STUDIES: dict[str, Callable[[Bench], str]] = {
    study.__name__.replace("_", "-"): study
    for study in (
        studies.assumptions, studies.prices, studies.trace_a, studies.trace_b, studies.repairs, studies.plan,
        studies.lead, studies.layouts, studies.detection, studies.transition, studies.mtbf, studies.tasks,
        studies.spares, programs.programs, large_studies.size, large_studies.published, large_studies.fleet,
        large_studies.real,
    )
}  # fmt: skip


def replace_block(document: str, name: str, text: str) -> str:
    """Return the document with `text` as the block `name`. Raises ValueError if it has no such block."""
    block = re.compile(rf"(<!-- begin {re.escape(name)} -->\n).*?(<!-- end {re.escape(name)} -->)", re.DOTALL)
    if len(block.findall(document)) != 1:
        raise ValueError(f"{DOCUMENT}: block {name} must stand there once; add <!-- begin {name} --> and its end")
    return block.sub(lambda match: f"{match[1]}{text}\n{match[2]}", document)


def main(argv: Sequence[str]) -> int:
    """Run the studies that `argv` names, or all where it names none, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m unicrond.replay.evaluation", description="Redo docs/results/evaluation.md."
    )
    parser.add_argument("--only", default=",".join(STUDIES), help="studies, with commas (default: all)")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="default: one per core")
    parser.add_argument("--trace", type=Path, help=f"the real trace's file (default: ${TRACE_FILE_VARIABLE})")
    options = parser.parse_args(argv)
    trace_name = options.trace or os.environ.get(TRACE_FILE_VARIABLE)
    trace_file = Path(trace_name) if trace_name else None
    names = options.only.split(",")
    unknown = next((name for name in names if name not in STUDIES), None)
    if unknown is not None:
        print(f"--only {unknown}: no such study; choose from {', '.join(STUDIES)}", file=sys.stderr)
        return 2
    if options.seeds < 1 or options.processes < 1:
        print("--seeds, --processes: give 1 or more", file=sys.stderr)
        return 2
    kernel.warm()
    try:
        _redo(names, range(1, options.seeds + 1), trace_file, options.processes)
    except (TraceError, ValueError) as problem:
        print(f"evaluation: {problem}", file=sys.stderr)
        return 2
    return 0


def _redo(names: Sequence[str], seeds: range, trace_file: Path | None, processes: int) -> None:
    cache: OutcomeCache = {}
    for name in names:
        if name == "real" and (trace_file is None or not trace_file.is_file()):
            print(
                f"real: skipped, the trace is not here: get it from {INFINITEHBD_ORIGIN} (sha256 {INFINITEHBD_SHA256}) "
                f"and name it by --trace FILE or {TRACE_FILE_VARIABLE}"
            )
            continue
        began_s = time.monotonic()
        with runs_bar() as progress:
            text = STUDIES[name](Bench(seeds, progress, trace_file, processes, cache))
        DOCUMENT.write_text(replace_block(DOCUMENT.read_text(), name, text))
        print(f"{name}: written, {time.monotonic() - began_s:.0f} s", flush=True)
