"""The table of docs/operate/kubernetes.md that `make kubernetes` writes.

python -m tests.kubernetes.rows writes it from build/kubernetes/rows.json, once more. A row that was not run stays as it
stands on the page, with the commit and the load of its own day.
"""

from __future__ import annotations

import json
import os
import platform
from typing import Any

from tests.containers.oci import cgroup_version
from tests.containers.rows import END, PAGE, replace_table
from tests.integration.installation import ROOT

BUILD = ROOT / "build" / "kubernetes"
ROWS = BUILD / "rows.json"
EVENTS = BUILD / "events.txt"
BEGIN = "<!-- make kubernetes writes this table -->"


def conditions() -> str:
    """Say on what it ran."""
    machine = f"Linux {platform.release().split('-')[0]}, cgroup {cgroup_version()}, {os.cpu_count()} cores"
    return f"`make kubernetes`, {machine}; each row with its own run."


def lines_of(page: str) -> dict[str, str]:
    """Return the rows of the page's table, by their act."""
    table = page.partition(BEGIN)[2].partition(END)[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")]
    return {line.split(" | ")[0].removeprefix("| "): line for line in rows[1:]}


def table(rows: dict[str, dict[str, Any]], page: str) -> str:
    """Return in Markdown the rows of the page, with what `rows` says in the place of theirs, and those that are new."""
    lines = lines_of(page)
    for act, row in rows.items():
        run = f"{row['day']}, {row['commit']}, load {row['load']}"
        lines[act] = f"| {act} | {row['seen'].replace('|', '/')} | {run} |"
    return "\n".join(["| act | seen | run |", "|---|---|---|", *lines.values()])


def write() -> None:
    """Put the table into its page."""
    replace_table(BEGIN, conditions(), table(json.loads(ROWS.read_text()), PAGE.read_text()))


if __name__ == "__main__":
    write()
