"""The studies of docs/results/evaluation.md on large clusters, one function each (see `studies.py`)."""

from __future__ import annotations

import msgspec

from replay.evaluation import plots
from replay.evaluation.assumptions import DEFAULTS
from replay.evaluation.bench import PLOTS, Bench, plot_shares
from replay.evaluation.comparison import Comparison
from replay.evaluation.published import SETTINGS, Claim, Setting
from replay.evaluation.simulator import Outcome
from replay.evaluation.studies import GPU, LEAD, lead_steps
from replay.evaluation.tables import full_table, head, line
from replay.evaluation.workload import Cluster, TrainingTask, six, workload


def published(bench: Bench) -> str:
    """Others' settings, their figures, and ours under the same assumptions."""
    shares = "published %", "effective %", "ETTR %", "goodput %", "delivered %"
    rows = [head(("setting", "system", *shares, "faults", "events", "core's CPU, s", "CPU per fault, ms"))]
    for setting in SETTINGS:
        work = workload(setting.cluster, (setting.task,))
        for claim in setting.claims:
            assumed = msgspec.structs.replace(DEFAULTS, **claim.changes)
            made = bench.run(work, setting.trace, (claim.policy,), assumed, seeds=1)
            rows.append(line(_claim_cells(setting, claim, made.rows[0].outcomes[0])))
    return "\n".join(rows)


def _claim_cells(setting: Setting, claim: Claim, outcome: Outcome) -> list[str]:
    """`effective`: goodput of the nodes that the job has, spares left out."""
    effective = outcome.goodput * setting.cluster.nodes / setting.task.max_nodes
    core = outcome.core
    shown = f"{claim.published:g}" if claim.published else ""
    shares = (f"{100 * share:.1f}" for share in (effective, outcome.ettr, outcome.goodput, outcome.share))
    faults = len(outcome.trace.faults)
    if core is None:
        return [setting.name, claim.title, shown, *shares, str(faults), "", "", ""]
    fault_ms = 1000 * core.core_cpu_s / max(1, faults)
    return [setting.name, claim.title, shown, *shares, str(faults), str(core.events), f"{core.core_cpu_s:.1f}",
            f"{fault_ms:.0f}"]  # fmt: skip


def fleet_tasks() -> tuple[TrainingTask, ...]:
    """70 tasks that fill 12,500 nodes."""
    kinds = (("llama3-405b", 10, 64, 700), ("llama3-70b", 20, 8, 200), ("llama3-8b", 40, 1, 40))
    return tuple(
        TrainingTask(name=f"{model}-{nth:02d}", model=model, min_nodes=least, max_nodes=most, batch=4096)
        for model, count, least, most in kinds
        for nth in range(count)
    )


def fleet(bench: Bench) -> str:
    """12,500 nodes with 70 tasks, at Meta's rate."""
    work = workload(Cluster("h100-80g", 12_500), fleet_tasks())
    policies = ("unicron", "megatron-wait", "megatron-shrink", "hot-spare:125", "ft-hsdp", "ideal")
    made = bench.run(work, FLEET_TRACE, policies, seeds=1)
    steps = lead_steps(bench, work, FLEET_TRACE, seeds=1)
    shown = [head(("delivered, % (share of the lead)", "12,500 nodes")), *map(line, zip(_titles(), steps, strict=True))]
    return full_table(made) + "\n" + _core_line(made, "3 days") + "\n\n" + "\n".join(shown)


FLEET_TRACE = "meta:days=3"


def _titles() -> list[str]:
    return [title for title, _, _ in LEAD]


def _core_line(made: Comparison, length: str) -> str:
    outcome = made.row("unicron").outcomes[0]
    core, faults = outcome.core, len(outcome.trace.faults)
    assert core is not None
    return (
        f"\nUnicron's core: {core.events:,} events, {core.plans} plans, {core.memberships} memberships, "
        f"{core.incidents} incidents; {core.core_cpu_s:.1f} s of CPU for {length}, "
        f"{1000 * core.core_cpu_s / max(1, faults):.0f} ms a fault ({core.cpu_s:.1f} s with the simulated world); "
        f"{core.decide_ms:.2f} ms for a decision and {core.solve_ms:.2f} ms for a plan (medians)."
    )


def size(bench: Bench) -> str:
    """32 to 10,240 GPUs: is the WAF share stable, and what does the coordinator's core cost?"""
    sizes = (4, 16, 64, 256, 512, 1280)
    made = []
    for nodes in sizes:
        work = workload(Cluster(GPU, nodes), _three(max(1, nodes // 64)))
        made.append(
            bench.run(work, "poisson:days=7", ("unicron", "megatron-wait", "megatron-shrink", "ideal"), seeds=1)
        )
    plot_shares(made, "GPUs", [8.0 * nodes for nodes in sizes], "size", "node MTBF 30 d, repair 24 h, 7 days")
    titles = ("GPUs", "tasks", "faults", "unicron %", "wait %", "shrink %", "ideal %", "events", "plans",
              "CPU per fault, ms", "decision, ms", "plan, ms")  # fmt: skip
    rows = [head(titles)]
    for nodes, each in zip(sizes, made, strict=True):
        outcome = each.row("unicron").outcomes[0]
        core, faults = outcome.core, len(outcome.trace.faults)
        assert core is not None
        shares = [f"{100 * row.mean('delivered'):.2f}" for row in each.rows]
        cpu = f"{1000 * core.core_cpu_s / max(1, faults):.1f}", f"{core.decide_ms:.2f}"
        counts = str(8 * nodes), str(len(each.workload.tasks)), str(faults), *shares, str(core.events), str(core.plans)
        rows.append(line([*counts, *cpu, f"{core.solve_ms:.2f}"]))
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
                "oobleck", "varuna", "bamboo", "recycle", "ft-hsdp", "ideal")  # fmt: skip
    made = bench.run(work, str(bench.trace_file), policies, seeds=1)
    shown = Comparison(made.workload, "InfiniteHBD", made.seeds, made.assumptions, made.rows)
    plots.costs(shown, PLOTS / "real-costs.png")
    plots.loss_over_time(shown, PLOTS / "real-loss.png")
    return full_table(made) + "\n" + _core_line(made, "348 days")
