"""A goodput report (views/goodput_report.py) as tables. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from unicrond.display.tables import Table
from unicrond.display.worth import si

#: The most nodes with a score that are shown.
SCORES_SHOWN = 10


def goodput_tables(report: Mapping[str, Any]) -> Iterator[tuple[str, Table]]:
    """Yield title and table of the work's uses, the tasks, their interruptions, and the nodes that stand out."""
    yield "goodput of the cluster", _work_table(report["cluster"])
    if report["tasks"]:
        yield "tasks", _tasks_table(report["tasks"])
        yield "where their time went", _times_table(report["tasks"])
    suspects = [node for node in report["lemons"] if node["score"]]
    if suspects:
        yield "suspect nodes", _lemons_table(suspects)


def hints(report: Mapping[str, Any]) -> list[str]:
    """Return suggestions for the operator; nothing is done automatically."""
    return [
        f"{node['node']} fails far more often than others; have it looked at:"
        f" unicronctl drain {node['node']} --reason 'lemon: {node['score']:g} points'"
        for node in report["lemons"]
        if node["is_lemon"]
    ]


def _work_table(work: Mapping[str, Any]) -> Table:
    rows = [("goodput", "", si(work["goodput_flop"], "FLOP"), _percent(work["goodput"]))]
    rows += [
        (f"badput: {part['group']}", part["cause"], si(part["flop"], "FLOP"), _percent(part["share"]))
        for part in work["badput"]
    ]
    rows.append(("failure-free", "", si(work["failure_free_flop"], "FLOP"), _percent(1.0)))
    return Table(("weighted work", "cause", "amount", "share"), tuple(rows), frozenset({"amount", "share"}))


def _tasks_table(tasks: list[dict[str, Any]]) -> Table:
    rows = [
        (
            task["task"],
            _percent(task["goodput"]),
            _percent(task["ettr"]),
            "-" if task["mfu"] is None else _percent(task["mfu"]),
            si(task["flops_per_worker"], "FLOP/s"),
            str(task["highest_step"]),
            str(task["interruptions"]),
            "-" if task["mtti_us"] is None else seconds(task["mtti_us"]),
            f"{task['iterations_lost']} ({seconds(task['lost_work_us'])})",
            str(task["micro_batches_repeated"]),
            str(task["micro_batches_lost"]),
        )
        for task in tasks
    ]
    headers = (
        "task", "goodput", "ETTR", "MFU", "per worker", "highest step", "interruptions", "mean between", "lost",
        "repeated", "discarded",
    )  # fmt: skip
    return Table(headers, tuple(rows), frozenset(headers[1:]))


def _times_table(tasks: list[dict[str, Any]]) -> Table:
    rows = [
        (
            task["task"],
            activity,
            seconds(duration_us),
            _percent(duration_us / task["wall_us"] if task["wall_us"] else None),
        )
        for task in tasks
        for activity, duration_us in task["times_us"].items()
    ]
    return Table(("task", "in", "time", "share"), tuple(rows), frozenset({"time", "share"}))


def _lemons_table(suspects: list[dict[str, Any]]) -> Table:
    rows = [
        (node["node"], f"{node['score']:g}", "lemon" if node["is_lemon"] else "-", node["reason"])
        for node in suspects[:SCORES_SHOWN]
    ]
    if len(suspects) > SCORES_SHOWN:
        rows.append((f"and {len(suspects) - SCORES_SHOWN} more", "", "", ""))
    return Table(("node", "score", "verdict", "signals"), tuple(rows), frozenset({"score"}))


def seconds(duration_us: int) -> str:
    """Format a duration in the unit that people would use."""
    length_s = duration_us / 1e6
    for unit, size_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if length_s >= 2 * size_s:
            return f"{length_s / size_s:.1f} {unit}"
    return f"{length_s:.3g} s"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.2f} %"
