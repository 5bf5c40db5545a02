"""`make evaluation`: run every study of docs/results/evaluation.md again, and write its tables and figures anew.

    python -m replay.evaluation [--only NAME,...] [--seeds N] [--trace FILE]

The prose of docs/results/evaluation.md is written by hand; what stands between `<!-- begin NAME -->` and
`<!-- end NAME -->` is written here, one study per name. Seeds are 1..N and the defaults of `assumptions.py` hold
unless a study says otherwise, so two runs of one version differ in nothing but CPU times.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import msgspec

from replay.arguments import TRACE_FILE_VARIABLE
from replay.evaluation import plots as plots
from replay.evaluation.assumptions import DEFAULTS, Assumptions
from replay.evaluation.comparison import HEADERS, Comparison, Row, cells, compare
from replay.evaluation.simulate_cli import runs_bar
from replay.evaluation.traces import INFINITEHBD_ORIGIN, INFINITEHBD_SHA256, TraceError
from replay.evaluation.workload import Cluster, TrainingTask, Workload, six, workload
from unicrond.core.planning import kernel

DOCUMENT = Path("docs/results/evaluation.md")
PLOTS = Path("docs/results/plots")
GPU = "a800-80g"
MAIN = ("unicron", "megatron-wait", "megatron-shrink", "hot-spare", "oobleck", "varuna", "bamboo", "ideal")
PLANS = ("unicron", "unicron-stay", "unicron-equal", "unicron-weighted", "unicron-sized", "ideal")
FEW = ("unicron", "unicron-stay", "megatron-wait", "megatron-shrink", "hot-spare", "ideal")


@dataclass(frozen=True)
class Bench:
    """What a study is run with. `trace_file`: the real trace, None = not here."""

    seeds: range
    told: Callable[[int, int, str], None]
    trace_file: Path | None

    def run(
        self, work: Workload, spec: str, policies: Sequence[str], assumed: Assumptions = DEFAULTS, seeds: int = 0
    ) -> Comparison:
        """`seeds`: fewer than the bench's, where one run is long."""
        few = self.seeds[: seeds or len(self.seeds)]
        return compare(work, spec, policies, few, assumed, progress=self.told)


def small() -> Workload:
    """The paper's size: six GPT-3 tasks on 16 nodes of 8 A800."""
    return workload(Cluster(GPU, 16), six())


# --- the studies ---------------------------------------------------------------------------------


def trace_a(bench: Bench) -> str:
    """All systems on trace-a."""
    return _main(bench, "trace-a")


def trace_b(bench: Bench) -> str:
    """All systems on trace-b."""
    return _main(bench, "trace-b")


def _main(bench: Bench, spec: str) -> str:
    made = bench.run(small(), spec, MAIN)
    plots.costs(made, PLOTS / f"{spec}-costs.png")
    plots.loss_over_time(made, PLOTS / f"{spec}-loss.png")
    return _full_table(made)


def repairs(bench: Bench) -> str:
    """The grid: how long a repair takes, against every baseline."""
    specs = {
        "trace-a, 1 to 7 d": "trace-a",
        "trace-a, 1 d": "trace-a:repair_from_d=1,repair_to_d=1",
        "trace-b, 6 h": "trace-b:repair_h=6",
        "trace-b, 12 h": "trace-b:repair_h=12",
        "trace-b, 24 h": "trace-b:repair_h=24",
    }
    made = {title: bench.run(small(), spec, MAIN) for title, spec in specs.items()}
    return _gain_table(made)


def plan(bench: Bench) -> str:
    """The real core with other plans: what the optimal replan is worth apart from the fast restart."""
    specs = {"trace-a": "trace-a", "trace-b, 12 h": "trace-b", "trace-b, 24 h": "trace-b:repair_h=24"}
    made = {title: bench.run(small(), spec, PLANS) for title, spec in specs.items()}
    idle = ["\nHours that tasks did not train, summed over the six tasks:\n", _head(("plan", *made))]
    for nth, policy in enumerate(PLANS):
        idle.append(_line([policy, *(f"{each.rows[nth].stalled_h:.1f}" for each in made.values())]))
    return _gain_table(made) + "\n" + "\n".join(idle)


def layouts(bench: Bench) -> str:
    """One tp x pp per task for good, as today's trainer has it."""
    fixed = workload(Cluster(GPU, 16), six(layout="fixed"))
    return _gain_table(
        {
            "trace-a, best layouts": bench.run(small(), "trace-a", FEW),
            "trace-a, fixed layouts": bench.run(fixed, "trace-a", FEW),
            "trace-b, best layouts": bench.run(small(), "trace-b", FEW),
            "trace-b, fixed layouts": bench.run(fixed, "trace-b", FEW),
        }
    )


def detection(bench: Bench) -> str:
    """The baselines' detection: what if they noticed sooner than by a collective's timeout?"""
    times_s = (1800.0, 300.0, 60.0, 5.6)
    made = {
        f"timeout {time_s:g} s": bench.run(
            small(), "trace-b", FEW[:5], msgspec.structs.replace(DEFAULTS, timeout_s=time_s)
        )
        for time_s in times_s
    }
    return _gain_table(made)


def transition(bench: Bench) -> str:
    """Unicron's own times, multiplied: regroup, transfer, redeal, start."""
    factors = (1, 2, 4, 8, 16)
    made = {f"x {factor}": bench.run(small(), "trace-b", ("unicron", "ideal"), _slower(factor)) for factor in factors}
    rows = [_head(("unicron's times", "regroup + transfer + redeal, s", "start, s", "delivered %", "transition %"))]
    for (title, each), factor in zip(made.items(), factors, strict=True):
        assumed, row = _slower(factor), each.row("unicron")
        stop_s = assumed.regroup_s + assumed.transfer_s + assumed.redeal_s
        share = f"{100 * row.mean('delivered'):.2f}", f"{100 * row.mean('transition'):.2f}"
        rows.append(_line([title, f"{stop_s:g}", f"{assumed.start_s:g}", *share]))
    shares = {"unicron": [100 * each.row("unicron").mean("delivered") for each in made.values()]}
    shares["ideal"] = [100 * each.row("ideal").mean("delivered") for each in made.values()]
    plots.lines(
        "trace-b: unicron's transition times, multiplied", "factor", "delivered, % of failure-free",
        [float(factor) for factor in factors], shares, PLOTS / "transition.png", logarithmic=True,
    )  # fmt: skip
    return "\n".join(rows)


def _slower(factor: int) -> Assumptions:
    return msgspec.structs.replace(
        DEFAULTS,
        regroup_s=DEFAULTS.regroup_s * factor,
        transfer_s=DEFAULTS.transfer_s * factor,
        redeal_s=DEFAULTS.redeal_s * factor,
        start_s=DEFAULTS.start_s * factor,
    )


def mtbf(bench: Bench) -> str:
    """How often nodes fail."""
    days = (4, 8, 16, 32, 64, 128)
    made = [bench.run(small(), f"poisson:mtbf_d={d},other_mtbf_d={d / 3:.3g},repair_h=24", FEW, seeds=5) for d in days]
    _plot_shares(made, "node MTBF, days", [float(d) for d in days], "mtbf", "16 nodes, 28 days, repair 24 h")
    return _share_table("node MTBF, days", [str(d) for d in days], made)


def tasks(bench: Bench) -> str:
    """How many tasks share one cluster."""
    copies = (1, 2, 4, 7)
    made = [bench.run(workload(Cluster(GPU, 64), six(n)), "poisson:days=14", FEW, seeds=5) for n in copies]
    return _share_table("tasks on 64 nodes", [str(6 * n) for n in copies], made)


def spares(bench: Bench) -> str:
    """How many nodes are kept idle."""
    counts = (1, 2, 4, 8, 12)
    policies = ("unicron", "megatron-wait", *(f"hot-spare:{n}" for n in counts))
    made = bench.run(workload(Cluster(GPU, 64), six(4)), "poisson:days=28", policies, seeds=5)
    return _full_table(made)


def size(bench: Bench) -> str:
    """32 to 10,240 GPUs: is the WAF share stable, and what does the coordinator's core cost?"""
    sizes = (4, 16, 64, 256, 512, 1280)
    made = []
    for nodes in sizes:
        work = workload(Cluster(GPU, nodes), _three(max(1, nodes // 64)))
        made.append(
            bench.run(work, "poisson:days=7", ("unicron", "megatron-wait", "megatron-shrink", "ideal"), seeds=1)
        )
    _plot_shares(made, "GPUs", [8.0 * nodes for nodes in sizes], "size", "node MTBF 30 d, repair 24 h, 7 days")
    head = ("GPUs", "tasks", "faults", "unicron %", "wait %", "shrink %", "ideal %", "events", "plans",
            "CPU per fault, ms", "decision, ms", "plan, ms")  # fmt: skip
    rows = [_head(head)]
    for nodes, each in zip(sizes, made, strict=True):
        outcome = each.row("unicron").outcomes[0]
        core, faults = outcome.core, len(outcome.trace.faults)
        assert core is not None
        shares = [f"{100 * row.mean('delivered'):.2f}" for row in each.rows]
        cpu = f"{1000 * core.cpu_s / max(1, faults):.1f}", f"{core.decide_ms:.2f}"
        counts = str(8 * nodes), str(len(each.workload.tasks)), str(faults), *shares, str(core.events), str(core.plans)
        rows.append(_line([*counts, *cpu, f"{core.solve_ms:.2f}"]))
    return "\n".join(rows)


def _three(copies: int) -> tuple[TrainingTask, ...]:
    """Three tasks that fit on 4 nodes, so many times."""
    kinds = (("gpt-1b", "gpt3-1.3b", 2.0), ("gpt-7b", "gpt3-7b", 1.5), ("gpt-13b", "gpt3-13b", 1.0))
    return tuple(
        TrainingTask(name=f"{name}-{copy:03d}", model=model, weight=weight)
        for copy in range(copies)
        for name, model, weight in kinds
    )


def real(bench: Bench) -> str:
    """400 nodes for 348 days, as they really failed."""
    assert bench.trace_file is not None
    work = workload(Cluster(GPU, 400), six(4))
    policies = ("unicron", "unicron-stay", "megatron-wait", "megatron-shrink", "hot-spare:8", "hot-spare:24",
                "oobleck", "varuna", "bamboo", "ideal")  # fmt: skip
    made = bench.run(work, str(bench.trace_file), policies, seeds=1)
    shown = Comparison(made.workload, "InfiniteHBD", made.seeds, made.assumptions, made.rows)
    plots.costs(shown, PLOTS / "real-costs.png")
    plots.loss_over_time(shown, PLOTS / "real-loss.png")
    core = made.row("unicron").outcomes[0].core
    assert core is not None
    told = (
        f"\nUnicron's core: {core.events:,} events, {core.plans} plans, {core.memberships} memberships, "
        f"{core.incidents} incidents; {core.cpu_s:.1f} s of CPU for 348 days, the simulation included; "
        f"{core.decide_ms:.2f} ms for a decision and {core.solve_ms:.2f} ms for a plan (medians)."
    )
    return _full_table(made) + "\n" + told


def assumptions(_: Bench) -> str:
    """The defaults."""
    names = DEFAULTS.__struct_fields__
    return "\n".join([_head(("assumption", "value")), *(_line([n, f"{getattr(DEFAULTS, n):g}"]) for n in names)])


STUDIES: dict[str, Callable[[Bench], str]] = {
    study.__name__.replace("_", "-"): study
    for study in (
        assumptions, trace_a, trace_b, repairs, plan, layouts, detection, transition, mtbf, tasks, spares, size, real,
    )
}  # fmt: skip


# --- tables --------------------------------------------------------------------------------------


def _line(parts: Sequence[str]) -> str:
    return "| " + " | ".join(parts) + " |"


def _head(parts: Sequence[str]) -> str:
    return _line(parts) + "\n|---" + "|---:" * (len(parts) - 1) + "|"


def _full_table(made: Comparison) -> str:
    base = made.rows[0].policy
    rows = [_line(cells(made, row, base)) for row in made.rows]
    return "\n".join([_head((*HEADERS, f"{base} is better by")), *rows])


def _gain_table(made: dict[str, Comparison]) -> str:
    """How many times the first policy is as good as each other one, per column; its own share first."""
    first = next(iter(made.values()))
    base = first.rows[0]
    rows = [_head((f"{base.policy} is better by", "T ratio", *made))]
    own = (f"{100 * each.rows[0].mean('delivered'):.1f} %" for each in made.values())
    rows.append(_line([f"({base.policy} delivers)", "1", *own]))
    for nth, row in enumerate(first.rows[1:], start=1):
        gains = (_gain(each, each.rows[nth], base.policy) for each in made.values())
        rows.append(_line([row.policy, f"{row.ratio:.2g}", *gains]))
    return "\n".join(rows)


def _gain(made: Comparison, row: Row, base: str) -> str:
    least, mean, most = made.gain_over(row, base)
    return f"{mean:.3f} ({least:.2f} to {most:.2f})"


def _share_table(title: str, points: Sequence[str], made: Sequence[Comparison]) -> str:
    names = [row.policy for row in made[0].rows]
    rows = [_head((f"{title}: delivered, % of failure-free", *names))]
    for point, each in zip(points, made, strict=True):
        rows.append(_line([point, *(f"{100 * row.mean('delivered'):.2f}" for row in each.rows)]))
    return "\n".join(rows)


def _plot_shares(made: Sequence[Comparison], x_label: str, x: Sequence[float], name: str, title: str) -> None:
    series = {row.policy: [100 * fmean(each.rows[nth].shares) for each in made] for nth, row in enumerate(made[0].rows)}
    plots.lines(title, x_label, "delivered, % of failure-free", x, series, PLOTS / f"{name}.png", logarithmic=True)


# --- writing -------------------------------------------------------------------------------------


def replaced(document: str, name: str, text: str) -> str:
    """The document with `text` as the block `name`. Raises ValueError if it has no such block."""
    block = re.compile(rf"(<!-- begin {re.escape(name)} -->\n).*?(<!-- end {re.escape(name)} -->)", re.DOTALL)
    if len(block.findall(document)) != 1:
        raise ValueError(f"{DOCUMENT}: block {name} must stand there once; add <!-- begin {name} --> and its end")
    return block.sub(lambda match: f"{match[1]}{text}\n{match[2]}", document)


def main(argv: Sequence[str]) -> int:
    """Run the studies that `argv` names, all without; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m replay.evaluation", description="Redo docs/results/evaluation.md.")
    parser.add_argument("--only", default=",".join(STUDIES), help="studies, with commas (default: all)")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--trace", type=Path, help=f"the real trace's file (default: ${TRACE_FILE_VARIABLE})")
    options = parser.parse_args(argv)
    named = options.trace or os.environ.get(TRACE_FILE_VARIABLE)
    trace_file = Path(named) if named else None
    names = options.only.split(",")
    unknown = next((name for name in names if name not in STUDIES), None)
    if unknown is not None or options.seeds < 1:
        print(f"--only {unknown}: no such study; choose from {', '.join(STUDIES)}", file=sys.stderr)
        return 2
    kernel.warm()
    try:
        _redo(names, range(1, options.seeds + 1), trace_file)
    except (TraceError, ValueError) as problem:
        print(f"evaluation: {problem}", file=sys.stderr)
        return 2
    return 0


def _redo(names: Sequence[str], seeds: range, trace_file: Path | None) -> None:
    for name in names:
        if name == "real" and (trace_file is None or not trace_file.is_file()):
            print(
                f"real: skipped, the trace is not here: get it from {INFINITEHBD_ORIGIN} (sha256 {INFINITEHBD_SHA256}) "
                f"and name it by --trace FILE or {TRACE_FILE_VARIABLE}"
            )
            continue
        with runs_bar() as told:
            text = STUDIES[name](Bench(seeds, told, trace_file))
        DOCUMENT.write_text(replaced(DOCUMENT.read_text(), name, text))
        print(f"{name}: written", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
