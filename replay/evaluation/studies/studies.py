"""The studies of docs/results/evaluation.md on the paper's cluster and around it, one function each. `redo.py` puts the
returned text into the document. The large ones: `large_studies.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import msgspec

from unicrond.replay.evaluation.model.assumptions import DEFAULTS, Assumptions
from unicrond.replay.evaluation.model.speeds import Speeds
from unicrond.replay.evaluation.model.workload import Cluster, TrainingTask, Workload, six, workload
from unicrond.replay.evaluation.policies.bamboo import bamboo_speeds
from unicrond.replay.evaluation.policies.oobleck import oobleck_speeds
from unicrond.replay.evaluation.policies.recycle import recycle_speeds
from unicrond.replay.evaluation.policies.varuna import varuna_speeds
from unicrond.replay.evaluation.simulator.simulator import published_ratio
from unicrond.replay.evaluation.studies import plots
from unicrond.replay.evaluation.studies.comparison import (
    Comparison,
    OutcomeCache,
    compare,
    full_table,
    gain_table,
    head,
    line,
    share_table,
)

PLOTS = Path("docs/results/plots")


@dataclass(frozen=True)
class Bench:
    """The settings that all studies share. `progress` is called after each run; `trace_file`: the real trace, None if
    it is not here; `cache`: outcomes so far, so that equal runs are simulated once."""

    seeds: range
    progress: Callable[[int, int, str], None]
    trace_file: Path | None
    processes: int = 1
    cache: OutcomeCache = field(default_factory=dict)

    def run(
        self, work: Workload, spec: str, policies: Sequence[str], assumptions: Assumptions = DEFAULTS, seeds: int = 0
    ) -> Comparison:
        """Compare `policies` on the trace that `spec` names. `seeds`: fewer than the bench's, where one run is long; 0:
        all."""
        few = self.seeds[: seeds or len(self.seeds)]
        return compare(
            work, spec, policies, few, assumptions, progress=self.progress, processes=self.processes, cache=self.cache
        )


def plot_shares(comparisons: Sequence[Comparison], x_label: str, x: Sequence[float], name: str, title: str) -> None:
    """Plot the share of failure-free that each policy delivers over `x`, into PLOTS/`name`.png."""
    series = {
        row.policy: [100 * fmean(comparison.rows[nth].shares) for comparison in comparisons]
        for nth, row in enumerate(comparisons[0].rows)
    }
    plots.lines(title, x_label, "delivered, % of failure-free", x, series, PLOTS / f"{name}.png", logarithmic=True)


GPU = "a800-80g"
MAIN = (
    "unicron", "megatron-wait", "megatron-shrink", "hot-spare", "oobleck", "varuna", "bamboo", "recycle", "ft-hsdp",
    "ideal",
)  # fmt: skip
PLANS = ("unicron", "unicron-stay", "unicron-equal", "unicron-weighted", "unicron-sized", "ideal")
FEW = ("unicron", "unicron-stay", "megatron-wait", "megatron-shrink", "hot-spare", "ideal")


def small() -> Workload:
    """Return the paper's size: six GPT-3 tasks on 16 nodes of 8 A800."""
    return workload(Cluster(GPU, 16), six())


# --- the studies ---------------------------------------------------------------------------------


def trace_a(bench: Bench) -> str:
    """Run all systems on trace-a."""
    return _main(bench, "trace-a")


def trace_b(bench: Bench) -> str:
    """Run all systems on trace-b."""
    return _main(bench, "trace-b")


def _main(bench: Bench, spec: str) -> str:
    comparison = bench.run(small(), spec, MAIN)
    plots.costs(comparison, PLOTS / f"{spec}-costs.png")
    plots.loss_over_time(comparison, PLOTS / f"{spec}-loss.png")
    return full_table(comparison)


def repairs(bench: Bench) -> str:
    """Vary how long a repair takes, against every baseline."""
    specs = {
        "trace-a, 1 to 7 d": "trace-a",
        "trace-a, 1 d": "trace-a:repair_from_d=1,repair_to_d=1",
        "trace-b, 6 h": "trace-b:repair_h=6",
        "trace-b, 12 h": "trace-b:repair_h=12",
        "trace-b, 24 h": "trace-b:repair_h=24",
    }
    comparisons = {title: bench.run(small(), spec, MAIN) for title, spec in specs.items()}
    return gain_table(comparisons)


def plan(bench: Bench) -> str:
    """Run the real core with other plans: what is the optimal replan worth apart from the fast restart?"""
    specs = {"trace-a": "trace-a", "trace-b, 12 h": "trace-b", "trace-b, 24 h": "trace-b:repair_h=24"}
    comparisons = {title: bench.run(small(), spec, PLANS) for title, spec in specs.items()}
    idle = ["\nHours that tasks did not train, summed over the six tasks:\n", head(("plan", *comparisons))]
    for nth, policy in enumerate(PLANS):
        idle.append(line([policy, *(f"{comparison.rows[nth].stalled_h:.1f}" for comparison in comparisons.values())]))
    return gain_table(comparisons) + "\n" + "\n".join(idle)


def prices(_: Bench) -> str:
    """Compute the failure-free throughput over Megatron's that each mechanism leaves."""
    counts = (1, 2, 4, 8)
    systems = (oobleck_speeds, varuna_speeds, bamboo_speeds, recycle_speeds)
    models = dict.fromkeys(task.model for task in six())
    work = workload(
        Cluster(GPU, counts[-1] * len(models)),
        tuple(TrainingTask(name=model.replace(".", "-"), model=model, max_nodes=counts[-1]) for model in models),
    )
    tables = [speeds(work) for speeds in systems]
    rows = [head(("model", "nodes", "Megatron, TFLOP/s a GPU", *(name.partition("_")[0] for name in _names(systems))))]
    for task in work.tasks:
        for nodes in counts:
            megatron = work.throughput[task.name][nodes]
            if not megatron:
                continue
            ratios = (speeds_of[task.name].flops[nodes] / megatron for speeds_of in tables)
            ratio_cells = (f"{ratio:.2f}" if ratio else "does not fit" for ratio in ratios)
            rows.append(line([task.model, str(nodes), f"{megatron / nodes / 8e12:.0f}", *ratio_cells]))
    published = (published_ratio(name.partition("_")[0], DEFAULTS) for name in _names(systems))
    rows.append(line(["published (all sizes)", "", "", *(f"{ratio:g}" if ratio else "none" for ratio in published)]))
    return "\n".join(rows)


def _names(systems: Sequence[Callable[[Workload], Speeds]]) -> list[str]:
    return [system.__name__ for system in systems]


#: From the compared system to unicron, one part at a time: what changes, the policy, the assumptions. A row here is all
#: that another part of the lead needs.
LEAD: tuple[tuple[str, str, dict[str, float]], ...] = (
    ("megatron-shrink", "megatron-shrink", {}),
    ("+ detection in band", "megatron-shrink", {"timeout_s": DEFAULTS.node_detect_s}),
    ("+ restart in place", "unicron-stay", {}),
    ("+ plan = unicron", "unicron", {}),
    ("(+ layouts, at no cost: a bound)", "unicron-free", {}),
)


def lead(bench: Bench) -> str:
    """Split the lead over a Megatron that shrinks into detection, restart and plan."""
    steps_by_trace = {spec: lead_steps(bench, small(), spec) for spec in ("trace-a", "trace-b", "trace-b:repair_h=24")}
    rows = [head(("delivered, % (share of the lead)", *steps_by_trace))]
    for nth, (title, _, _) in enumerate(LEAD):
        rows.append(line([title, *(steps[nth] for steps in steps_by_trace.values())]))
    return "\n".join(rows)


def lead_steps(bench: Bench, work: Workload, spec: str, seeds: int = 0) -> list[str]:
    """Return, for each row of LEAD, what is delivered and which part of the way to unicron the step is."""
    delivered = []
    for _, policy, changes in LEAD:
        assumed = msgspec.structs.replace(DEFAULTS, **changes)
        delivered.append(100 * bench.run(work, spec, (policy,), assumed, seeds).rows[0].mean("delivered"))
    whole = delivered[[policy for _, policy, _ in LEAD].index("unicron")] - delivered[0]
    steps = [after - before for before, after in pairwise(delivered)]
    return [f"{delivered[0]:.2f}"] + [
        f"{after:.2f} ({100 * step / whole:+.0f} %)" for after, step in zip(delivered[1:], steps, strict=True)
    ]


def layouts(bench: Bench) -> str:
    """Compare the best layout at every size, taken at no cost, with one layout for good."""
    policies = ("unicron-free", "unicron", "unicron-stay", "ideal")
    specs = {"trace-a": "trace-a", "trace-b, 12 h": "trace-b", "trace-b, 24 h": "trace-b:repair_h=24"}
    return gain_table({title: bench.run(small(), spec, policies) for title, spec in specs.items()})


def detection(bench: Bench) -> str:
    """Vary the baselines' detection: what if they noticed sooner than by a collective's timeout?"""
    times_s = (1800.0, 300.0, 60.0, 5.6)
    comparisons = {
        f"timeout {time_s:g} s": bench.run(
            small(), "trace-b", FEW[:5], msgspec.structs.replace(DEFAULTS, timeout_s=time_s)
        )
        for time_s in times_s
    }
    return gain_table(comparisons)


def transition(bench: Bench) -> str:
    """Multiply Unicron's own times: regroup, transfer, redeal, start."""
    factors = (1, 2, 4, 8, 16)
    comparisons = {
        f"x {factor}": bench.run(small(), "trace-b", ("unicron", "ideal"), _slower(factor)) for factor in factors
    }
    rows = [head(("unicron's times", "regroup + transfer + redeal, s", "start, s", "delivered %", "transition %"))]
    for (title, comparison), factor in zip(comparisons.items(), factors, strict=True):
        assumed, row = _slower(factor), comparison.row("unicron")
        stop_s = assumed.regroup_s + assumed.transfer_s + assumed.redeal_s
        share = f"{100 * row.mean('delivered'):.2f}", f"{100 * row.mean('transition'):.2f}"
        rows.append(line([title, f"{stop_s:g}", f"{assumed.start_s:g}", *share]))
    shares = {"unicron": [100 * comparison.row("unicron").mean("delivered") for comparison in comparisons.values()]}
    shares["ideal"] = [100 * comparison.row("ideal").mean("delivered") for comparison in comparisons.values()]
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
    """Vary how often nodes fail."""
    days = (4, 8, 16, 32, 64, 128)
    comparisons = [
        bench.run(small(), f"poisson:mtbf_d={d},other_mtbf_d={d / 3:.3g},repair_h=24", FEW, seeds=5) for d in days
    ]
    plot_shares(comparisons, "node MTBF, days", [float(d) for d in days], "mtbf", "16 nodes, 28 days, repair 24 h")
    return share_table("node MTBF, days", [str(d) for d in days], comparisons)


def tasks(bench: Bench) -> str:
    """Vary how many tasks share one cluster."""
    copies = (1, 2, 4, 7)
    comparisons = [bench.run(workload(Cluster(GPU, 64), six(n)), "poisson:days=14", FEW, seeds=5) for n in copies]
    return share_table("tasks on 64 nodes", [str(6 * n) for n in copies], comparisons)


def spares(bench: Bench) -> str:
    """Vary how many nodes are kept idle."""
    counts = (1, 2, 4, 8, 12)
    policies = ("unicron", "megatron-wait", *(f"hot-spare:{n}" for n in counts))
    comparison = bench.run(workload(Cluster(GPU, 64), six(4)), "poisson:days=28", policies, seeds=5)
    return full_table(comparison)


def assumptions(_: Bench) -> str:
    """List the defaults."""
    names = DEFAULTS.__struct_fields__
    return "\n".join([head(("assumption", "value")), *(line([n, f"{getattr(DEFAULTS, n):g}"]) for n in names)])
