"""The figures of the evaluation: small PNGs, one function each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unicrond.display.plotting import canvas, save
from unicrond.replay.evaluation.studies.comparison import Comparison

COLOURS = {
    "unicron": "#0b6e4f",
    "unicron-free": "#2f9e77",
    "unicron-stay": "#6bbf9c",
    "megatron-wait": "#c1292e",
    "megatron-shrink": "#f08a5d",
    "hot-spare": "#b8860b",
    "oobleck": "#5c6bc0",
    "varuna": "#8e6bbf",
    "bamboo": "#9a9a9a",
    "recycle": "#3aa6b9",
    "ft-hsdp": "#d16ba5",
    "ideal": "#000000",
}
PARTS = (
    ("delivered", "#0b6e4f"),
    ("detection", "#c1292e"),
    ("transition", "#f08a5d"),
    ("sub_healthy", "#d9d9d9"),
)


def loss_over_time(comparison: Comparison, path: Path) -> None:
    """Plot the accumulated WAF lost so far, first seed, in % of the whole trace's failure-free; one line per policy."""
    figure, axes = canvas(f"{comparison.trace}, {comparison.workload.cluster.nodes} nodes, seed {comparison.seeds[0]}")
    worth = sum(comparison.workload.failure_free.values())
    for row in comparison.rows:
        outcome = row.outcomes[0]
        start_us, length_us = outcome.rates[0][0], outcome.trace.length_us
        days, losses = [0.0], [0.0]
        ends = [at_us for at_us, _ in outcome.rates[1:]] + [start_us + length_us]
        for (at_us, rate), end_us in zip(outcome.rates, ends, strict=True):
            days.append((end_us - start_us) / 8.64e10)
            losses.append(losses[-1] + 100 * (1 - rate / worth) * (end_us - at_us) / length_us)
        axes.plot(days, losses, linewidth=1.2, **_line(row.policy))
    axes.set(xlabel="days", ylabel="WAF lost so far, % of failure-free")
    axes.legend(fontsize=7)
    save(figure, path)


def costs(comparison: Comparison, path: Path) -> None:
    """Plot where the failure-free WAF goes, per policy: stacked bars, mean over seeds."""
    figure, axes = canvas(
        f"{comparison.trace}, {comparison.workload.cluster.nodes} nodes, {len(comparison.seeds)} seeds"
    )
    names = [row.policy for row in comparison.rows]
    offsets = [0.0] * len(names)
    for part, colour in PARTS:
        widths = [100 * row.mean(part) for row in comparison.rows]
        axes.barh(names, widths, left=offsets, color=colour, label=part.replace("_", "-"))
        offsets = [sum(pair) for pair in zip(offsets, widths, strict=True)]
    axes.invert_yaxis()
    axes.set(xlabel="% of failure-free WAF")
    axes.legend(fontsize=7, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.08))
    save(figure, path)


def lines(
    title: str,
    x_label: str,
    y_label: str,
    x: Sequence[float],
    series: Mapping[str, Sequence[float]],
    path: Path,
    *,
    logarithmic: bool = False,
) -> None:
    """Plot one line per name of `series` over `x`."""
    figure, axes = canvas(title)
    for name, values in series.items():
        axes.plot(x, values, marker="o", markersize=3, linewidth=1.2, **_line(name))
    axes.set(xlabel=x_label, ylabel=y_label)
    if logarithmic:
        axes.set_xscale("log", base=2)
        axes.set_xticks(list(x), labels=[f"{value:g}" for value in x])
        axes.minorticks_off()
    axes.legend(fontsize=7)
    save(figure, path)


def _line(name: str) -> dict[str, Any]:
    colour = COLOURS.get(name.partition(":")[0])
    style = ":" if name == "ideal" else "-"
    return {"label": name, "linestyle": style, **({"color": colour} if colour else {})}
