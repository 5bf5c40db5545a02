"""`unicron-replay simulate`: run policies through a failure trace in virtual time, and compare what they deliver.

unicron-replay simulate --cluster a800-80g:16x8 --tasks six --trace trace-b --policy unicron,megatron-wait
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from unicrond.core.planning import kernel_choice as kernel
from unicrond.display.plotting import require_matplotlib
from unicrond.display.tables import Table, show
from unicrond.events.cli.command_line import UsageError
from unicrond.replay.evaluation.model.assumptions import DEFAULTS, Assumptions, assume
from unicrond.replay.evaluation.model.traces import INFINITEHBD_ORIGIN, META, POISSON, TRACE_A, TRACE_B
from unicrond.replay.evaluation.model.workload import parse_cluster, parse_tasks, workload
from unicrond.replay.evaluation.simulator.simulator import POLICIES, check_policy
from unicrond.replay.evaluation.studies.comparison import HEADERS, Comparison, as_json, cells, compare
from unicrond.replay.evaluation.studies.plots import loss_over_time
from unicrond.replay.options.arguments import TRACE_FILE_VARIABLE
from unicrond.throughput.presets import GPUS, MODELS

PROGRAM = "unicron-replay simulate"
#: From this size on the compiled kernel pays for its start.
_NODES_FOR_COMPILED = 64


async def simulate_command(options: argparse.Namespace) -> None:
    """Run the policies and print what they deliver."""
    if options.list_assumptions:
        _print_parameters(DEFAULTS)
        return
    gc.enable()  # it may run for hours
    try:
        comparison = _run(options)
        print(json.dumps(as_json(comparison), indent=2)) if options.json else _print(comparison)
        if options.plot is not None:  # last: long results are printed even where drawing fails
            loss_over_time(comparison, options.plot)
    except ValueError as problem:  # TraceError, WorkloadError, PolicyError are ValueErrors
        raise UsageError(str(problem)) from None


def _run(options: argparse.Namespace) -> Comparison:
    cluster = parse_cluster(options.cluster)
    policies = [name for name in options.policy.split(",") if name]
    if not policies:
        raise ValueError(f"--policy: none given; choose from {', '.join(POLICIES)}")
    for name in policies:
        check_policy(name, cluster.nodes)
    if options.plot is not None:
        require_matplotlib()
        if options.plot.is_dir():
            raise ValueError(f"--plot: {options.plot} is a directory; name a file in it")
    assumptions = assume(dict(_setting(text) for text in options.assume))
    work = workload(cluster, parse_tasks(options.tasks))
    spec = options.trace or os.environ.get(TRACE_FILE_VARIABLE)
    if not spec:
        raise ValueError(
            f"--trace: missing; give trace-a, trace-b, poisson:..., meta or a FILE ({TRACE_FILE_VARIABLE})"
        )
    if cluster.nodes >= _NODES_FOR_COMPILED:
        kernel.warm()
    with runs_bar() as progress:
        return compare(
            work,
            spec,
            policies,
            range(options.first_seed, options.first_seed + options.seeds),
            assumptions,
            progress=progress,
            processes=options.processes,
        )


def _setting(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"--assume {text}: give NAME=VALUE; --list-assumptions lists the names")
    return name, value


@contextmanager
def runs_bar() -> Iterator[Callable[[int, int, str], None]]:
    """Yield a function that moves a progress bar on stderr; it draws nothing where stderr is not a terminal. Its
    arguments: runs completed, all runs, the policy of the last one."""
    console = Console(file=sys.stderr)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("simulating", total=None)
        yield lambda completed, total, policy: progress.update(
            task, description=policy, completed=completed, total=total
        )


def epilog() -> str:
    """Return examples, and every trace, policy, model and GPU there is."""
    generators = {"trace-a": TRACE_A, "trace-b": TRACE_B, "poisson": POISSON, "meta": META}
    settings = "\n".join(
        f"  {name}:{key}={default:g}   {meaning}"
        for name, keys in generators.items()
        for key, (default, meaning) in keys.items()
    )
    return f"""\
examples:
  {PROGRAM} --cluster a800-80g:16x8 --tasks six --trace trace-b --seeds 20
  {PROGRAM} --trace trace-b:repair_h=24 --policy unicron,megatron-wait --assume timeout_s=60 --plot waf.png
  {PROGRAM} --cluster a800-80g:400x8 --tasks 'six*4' --trace infinitehbd.json --policy unicron,hot-spare:8 --json
  {PROGRAM} --cluster h100-80g:12500x8 --tasks tasks.yaml --trace meta:days=1 --policy unicron,ft-hsdp --processes 2

traces (a FILE is in InfiniteHBD's format, {INFINITEHBD_ORIGIN}):
{settings}

policies: {", ".join(POLICIES)}; hot-spare:N keeps N nodes
models:   {", ".join(MODELS)}
          (in a file of --tasks: a YAML list of name, model, weight, min_nodes, max_nodes, layout, batch)
GPUs:     {", ".join(GPUS)}"""


# --- output --------------------------------------------------------------------------------------


def _print_parameters(assumptions: Assumptions) -> None:
    print(f"{Assumptions.__doc__}\ndefaults:")
    for name, value in ((field, getattr(assumptions, field)) for field in assumptions.__struct_fields__):
        print(f"  {name} = {value:g}")


def _print(comparison: Comparison) -> None:
    base = comparison.rows[0].policy
    cluster, first = comparison.workload.cluster, comparison.rows[0].outcomes[0].trace
    print(
        f"{cluster.nodes} x {cluster.per_node} {cluster.gpu}, {len(comparison.workload.tasks)} tasks, "
        f"{comparison.trace}: "
        f"{first.length_us / 8.64e10:g} days, {first.node_faults} node faults and "
        f"{len(first.faults) - first.node_faults} others (first of {len(comparison.seeds)} seeds)"
    )
    print("failure-free = delivered + detection + transition + sub-healthy; mean over seeds (range)")
    print("T ratio: before the first fault, over failure-free; ETTR, goodput: arXiv 2410.21680\n")
    headers = (*HEADERS, f"{base} is better by")
    show(
        Table(
            headers, tuple(tuple(cells(comparison, row, base)) for row in comparison.rows), right=frozenset(headers[1:])
        )
    )
    _print_assumptions(comparison)
    for row in comparison.rows:
        core = row.outcomes[0].core
        if core is not None:
            faults = len(row.outcomes[0].trace.faults)
            fault_ms = 1000 * core.core_cpu_s / max(1, faults)
            print(
                f"\n{row.policy}'s core, first seed: {core.events:,} events, {core.plans} plans, {core.memberships} "
                f"memberships; {core.core_cpu_s:.2f} s of CPU, {fault_ms:.1f} ms a fault, "
                f"{core.decide_ms:.2f} ms a decision (median)"
            )


def _print_assumptions(comparison: Comparison) -> None:
    """Print every assumption; those that were changed first."""
    values = {name: getattr(comparison.assumptions, name) for name in comparison.assumptions.__struct_fields__}
    changed = {name: value for name, value in values.items() if value != getattr(DEFAULTS, name)}
    for title, group in (
        ("assumed otherwise", changed),
        ("assumed (--list-assumptions explains each)", {name: values[name] for name in values if name not in changed}),
    ):
        if group:
            print(f"\n{title}: " + ", ".join(f"{name} = {value:g}" for name, value in group.items()))
