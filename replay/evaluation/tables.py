"""Comparisons as Markdown tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from replay.evaluation.comparison import HEADERS, Comparison, Row, cells


def line(parts: Sequence[str]) -> str:
    """A row."""
    return "| " + " | ".join(parts) + " |"


def head(parts: Sequence[str]) -> str:
    """The headers; all columns but the first are right-aligned."""
    return line(parts) + "\n|---" + "|---:" * (len(parts) - 1) + "|"


def full_table(made: Comparison) -> str:
    """Everything that is known of each policy, and how many times the first is as good."""
    base = made.rows[0].policy
    rows = [line(cells(made, row, base)) for row in made.rows]
    return "\n".join([head((*HEADERS, f"{base} is better by")), *rows])


def gain_table(made: Mapping[str, Comparison]) -> str:
    """How many times the first policy is as good as each other one, per column; its own share first."""
    first = next(iter(made.values()))
    base = first.rows[0]
    rows = [head((f"{base.policy} is better by", "T ratio", *made))]
    own = (f"{100 * each.rows[0].mean('delivered'):.1f} %" for each in made.values())
    rows.append(line([f"({base.policy} delivers)", f"{base.ratio:.2f}", *own]))
    for nth, row in enumerate(first.rows[1:], start=1):
        gains = (gain(each, each.rows[nth], base.policy) for each in made.values())
        rows.append(line([row.policy, f"{row.ratio:.2f}", *gains]))
    return "\n".join(rows)


def gain(made: Comparison, row: Row, base: str) -> str:
    """Mean and range over seeds."""
    least, mean, most = made.gain_over(row, base)
    return f"{mean:.3f} ({least:.2f} to {most:.2f})"


def share_table(title: str, points: Sequence[str], made: Sequence[Comparison]) -> str:
    """What each policy delivers at each point, % of failure-free."""
    names = [row.policy for row in made[0].rows]
    rows = [head((f"{title}: delivered, % of failure-free", *names))]
    for point, each in zip(points, made, strict=True):
        rows.append(line([point, *(f"{100 * row.mean('delivered'):.2f}" for row in each.rows)]))
    return "\n".join(rows)
