"""Comparisons as Markdown tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from unicrond.replay.evaluation.studies.comparison import HEADERS, Comparison, PolicyRow, cells


def line(parts: Sequence[str]) -> str:
    """Format a row."""
    return "| " + " | ".join(parts) + " |"


def head(parts: Sequence[str]) -> str:
    """Format the headers; all columns but the first are right-aligned."""
    return line(parts) + "\n|---" + "|---:" * (len(parts) - 1) + "|"


def full_table(comparison: Comparison) -> str:
    """Format all figures of each policy, and how many times as good the first one is."""
    base = comparison.rows[0].policy
    rows = [line(cells(comparison, row, base)) for row in comparison.rows]
    return "\n".join([head((*HEADERS, f"{base} is better by")), *rows])


def gain_table(comparisons: Mapping[str, Comparison]) -> str:
    """Format how many times as good as each other policy the first one is, per column; its own share first."""
    first = next(iter(comparisons.values()))
    base = first.rows[0]
    rows = [head((f"{base.policy} is better by", "T ratio", *comparisons))]
    base_shares = (f"{100 * comparison.rows[0].mean('delivered'):.1f} %" for comparison in comparisons.values())
    rows.append(line([f"({base.policy} delivers)", f"{base.ratio:.2f}", *base_shares]))
    for nth, row in enumerate(first.rows[1:], start=1):
        gains = (gain(comparison, comparison.rows[nth], base.policy) for comparison in comparisons.values())
        rows.append(line([row.policy, f"{row.ratio:.2f}", *gains]))
    return "\n".join(rows)


def gain(comparison: Comparison, row: PolicyRow, base: str) -> str:
    """Format the mean gain of `base` over the row, and its range over seeds."""
    least, mean, most = comparison.gain_over(row, base)
    return f"{mean:.3f} ({least:.2f} to {most:.2f})"


def share_table(title: str, points: Sequence[str], comparisons: Sequence[Comparison]) -> str:
    """Format what each policy delivers at each point, % of failure-free."""
    names = [row.policy for row in comparisons[0].rows]
    rows = [head((f"{title}: delivered, % of failure-free", *names))]
    for point, comparison in zip(points, comparisons, strict=True):
        rows.append(line([point, *(f"{100 * row.mean('delivered'):.2f}" for row in comparison.rows)]))
    return "\n".join(rows)
