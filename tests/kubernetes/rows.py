"""The table of docs/operate/kubernetes.md that `make kubernetes` writes.

python -m tests.kubernetes.rows writes it from build/kubernetes/rows.json, once more.
"""

from __future__ import annotations

import json
import os
import platform
from typing import Any

from tests.containers.oci import cgroup_version
from tests.containers.rows import replace_table
from tests.integration.installation import ROOT

BUILD = ROOT / "build" / "kubernetes"
ROWS = BUILD / "rows.json"
EVENTS = BUILD / "events.txt"
BEGIN = "<!-- make kubernetes writes this table -->"


def conditions(rows: dict[str, dict[str, Any]]) -> str:
    """Say where and when it ran."""
    days, commits = ({row[name] for row in rows.values()} for name in ("day", "commit"))
    loads = [row["load"] for row in rows.values()]
    kernel = platform.release().split("-")[0]
    return (
        f"`make kubernetes` at {', '.join(sorted(commits))}, {', '.join(sorted(days))}: Linux {kernel}, cgroup "
        f"{cgroup_version()}, {os.cpu_count()} cores, load {min(loads)} to {max(loads)}."
    )


def table(rows: dict[str, dict[str, Any]]) -> str:
    """Return the rows in Markdown."""
    lines = ["| act | seen |", "|---|---|"]
    lines += [f"| {act} | {row['seen'].replace('|', '/')} |" for act, row in rows.items()]
    return "\n".join(lines)


def write() -> None:
    """Put the table into its page."""
    rows = json.loads(ROWS.read_text())
    replace_table(BEGIN, conditions(rows), table(rows))


if __name__ == "__main__":
    write()
