"""The studies of docs/results/evaluation.md on large clusters, one function each (see `studies.py`)."""

from __future__ import annotations

import msgspec

from unicrond.replay.evaluation.model.assumptions import DEFAULTS
from unicrond.replay.evaluation.model.workload import Cluster, TrainingTask, six, workload
from unicrond.replay.evaluation.simulator.simulator import SimulationOutcome
from unicrond.replay.evaluation.studies import plots
from unicrond.replay.evaluation.studies.comparison import Comparison, full_table, head, line
from unicrond.replay.evaluation.studies.published import SETTINGS, Claim, Setting
from unicrond.replay.evaluation.studies.studies import GPU, LEAD, PLOTS, Bench, lead_steps, plot_shares


def published(bench: Bench) -> str:
    """Compare others' settings and figures with ours under the same assumptions."""
    shares = "published %", "effective %", "ETTR %", "goodput %", "delivered %"
    rows = [head(("setting", "system", *shares, "faults", "events", "core's CPU, s", "CPU per fault, ms"))]
    for setting in SETTINGS:
        work = workload(setting.cluster, (setting.task,))
        for claim in setting.claims:
            assumed = msgspec.structs.replace(DEFAULTS, **claim.changes)
            comparison = bench.run(work, setting.trace, (claim.policy,), assumed, seeds=1)
            rows.append(line(_claim_cells(setting, claim, comparison.rows[0].outcomes[0])))
    return "\n".join(rows)


def _claim_cells(setting: Setting, claim: Claim, outcome: SimulationOutcome) -> list[str]:
    """Return the cells of one claim. `effective` is the goodput of the nodes that the job has, spares left out."""
    effective = outcome.goodput * setting.cluster.nodes / setting.task.max_nodes
    core = outcome.core
    published_cell = f"{claim.published:g}" if claim.published else ""
    shares = (f"{100 * share:.1f}" for share in (effective, outcome.ettr, outcome.goodput, outcome.share))
    faults = len(outcome.trace.faults)
    if core is None:
        return [setting.name, claim.title, published_cell, *shares, str(faults), "", "", ""]
    fault_ms = 1000 * core.core_cpu_s / max(1, faults)
    return [setting.name, claim.title, published_cell, *shares, str(faults), str(core.events), f"{core.core_cpu_s:.1f}",
            f"{fault_ms:.0f}"]  # fmt: skip


def fleet_tasks() -> tuple[TrainingTask, ...]:
    """Return 70 tasks that fill 12,500 nodes."""
    kinds = (("llama3-405b", 10, 64, 700), ("llama3-70b", 20, 8, 200), ("llama3-8b", 40, 1, 40))
    return tuple(
        TrainingTask(name=f"{model}-{nth:02d}", model=model, min_nodes=least, max_nodes=most, batch=4096)
        for model, count, least, most in kinds
        for nth in range(count)
    )


def fleet(bench: Bench) -> str:
    """Run 12,500 nodes with 70 tasks, at Meta's rate."""
    work = workload(Cluster("h100-80g", 12_500), fleet_tasks())
    policies = ("unicron", "megatron-wait", "megatron-shrink", "hot-spare:125", "ft-hsdp", "ideal")
    comparison = bench.run(work, FLEET_TRACE, policies, seeds=1)
    steps = lead_steps(bench, work, FLEET_TRACE, seeds=1)
    lead_rows = [
        head(("delivered, % (share of the lead)", "12,500 nodes")),
        *map(line, zip(_titles(), steps, strict=True)),
    ]
    return full_table(comparison) + "\n" + _core_line(comparison, "3 days") + "\n\n" + "\n".join(lead_rows)


FLEET_TRACE = "meta:days=3"


def _titles() -> list[str]:
    return [title for title, _, _ in LEAD]


def _core_line(comparison: Comparison, length: str) -> str:
    outcome = comparison.row("unicron").outcomes[0]
    core, faults = outcome.core, len(outcome.trace.faults)
    assert core is not None
    return (
        f"\nUnicron's core: {core.events:,} events, {core.plans} plans, {core.memberships} memberships, "
        f"{core.incidents} incidents; {core.core_cpu_s:.1f} s of CPU for {length}, "
        f"{1000 * core.core_cpu_s / max(1, faults):.0f} ms a fault ({core.cpu_s:.1f} s with the simulated world); "
        f"{core.decide_ms:.2f} ms for a decision and {core.solve_ms:.2f} ms for a plan (medians)."
    )


def size(bench: Bench) -> str:
    """Run 32 to 10,240 GPUs: is the WAF share stable, and what does the coordinator's core cost?"""
    sizes = (4, 16, 64, 256, 512, 1280)
    comparisons = []
    for nodes in sizes:
        work = workload(Cluster(GPU, nodes), _three(max(1, nodes // 64)))
        comparisons.append(
            bench.run(work, "poisson:days=7", ("unicron", "megatron-wait", "megatron-shrink", "ideal"), seeds=1)
        )
    plot_shares(comparisons, "GPUs", [8.0 * nodes for nodes in sizes], "size", "node MTBF 30 d, repair 24 h, 7 days")
    titles = ("GPUs", "tasks", "faults", "unicron %", "wait %", "shrink %", "ideal %", "events", "plans",
              "CPU per fault, ms", "decision, ms", "plan, ms")  # fmt: skip
    rows = [head(titles)]
    for nodes, comparison in zip(sizes, comparisons, strict=True):
        outcome = comparison.row("unicron").outcomes[0]
        core, faults = outcome.core, len(outcome.trace.faults)
        assert core is not None
        shares = [f"{100 * row.mean('delivered'):.2f}" for row in comparison.rows]
        cpu = f"{1000 * core.core_cpu_s / max(1, faults):.1f}", f"{core.decide_ms:.2f}"
        counts = (
            str(8 * nodes),
            str(len(comparison.workload.tasks)),
            str(faults),
            *shares,
            str(core.events),
            str(core.plans),
        )
        rows.append(line([*counts, *cpu, f"{core.solve_ms:.2f}"]))
    return "\n".join(rows)


def _three(copies: int) -> tuple[TrainingTask, ...]:
    """Return three tasks that fit on 4 nodes, `copies` times."""
    kinds = (("gpt-1b", "gpt3-1.3b", 2.0), ("gpt-7b", "gpt3-7b", 1.5), ("gpt-13b", "gpt3-13b", 1.0))
    return tuple(
        TrainingTask(name=f"{name}-{copy:03d}", model=model, weight=weight)
        for copy in range(copies)
        for name, model, weight in kinds
    )


def real(bench: Bench) -> str:
    """Run 400 nodes for 348 days, as they really failed."""
    assert bench.trace_file is not None
    work = workload(Cluster(GPU, 400), six(4))
    policies = ("unicron", "unicron-stay", "megatron-wait", "megatron-shrink", "hot-spare:8", "hot-spare:24",
                "oobleck", "varuna", "bamboo", "recycle", "ft-hsdp", "ideal")  # fmt: skip
    comparison = bench.run(work, str(bench.trace_file), policies, seeds=1)
    titled_copy = Comparison(
        comparison.workload, "InfiniteHBD", comparison.seeds, comparison.assumptions, comparison.rows
    )
    plots.costs(titled_copy, PLOTS / "real-costs.png")
    plots.loss_over_time(titled_copy, PLOTS / "real-loss.png")
    return full_table(comparison) + "\n" + _core_line(comparison, "348 days")
