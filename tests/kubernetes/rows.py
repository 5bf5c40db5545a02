"""The tables of docs/operate/kubernetes.md that `make kubernetes` writes: acts, and Kubernetes' events.

python -m tests.kubernetes.rows writes them from build/kubernetes, once more. A row that was not run stays as it stands
on the page, with the commit and the load of its own day. Events are those since the last whole run began.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Mapping
from typing import Any

from tests.containers.oci import cgroup_version
from tests.containers.rows import END, PAGE, replace_table
from tests.integration.installation import ROOT

BUILD = ROOT / "build" / "kubernetes"
ROWS = BUILD / "rows.json"
EVENTS = BUILD / "events.json"
BEGIN = "<!-- make kubernetes writes this table -->"
EVENTS_BEGIN = "<!-- make kubernetes writes these events -->"
_MESSAGE_MAX = 120
DRILLS = BUILD / "drills.json"
DRILLS_PAGE = PAGE.with_name("kubernetes-drills.md")
DRILLS_INTRODUCTION = """`make kubernetes` writes this page: the commands of
[recovery by kubectl](kubernetes.md#recovery-by-kubectl) while a task trains, and the last lines of what each said."""


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


def kept_events() -> dict[str, dict[str, Any]]:
    """Return the events of Kubernetes that are kept, by their uid."""
    events: dict[str, dict[str, Any]] = json.loads(EVENTS.read_text()) if EVENTS.exists() else {}
    return events


def keep_events(items: list[dict[str, Any]]) -> None:
    """Keep events of Kubernetes, with those that are kept already."""
    EVENTS.parent.mkdir(parents=True, exist_ok=True)
    EVENTS.write_text(json.dumps(kept_events() | {item["metadata"]["uid"]: item for item in items}))


def events_table(events: Iterable[dict[str, Any]]) -> str:
    """Return in Markdown what happened, sorted by reason: how often, to what, and the newest message."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for event in sorted(events, key=lambda event: str(event["metadata"]["creationTimestamp"])):
        groups.setdefault((event["reason"], event["type"]), []).append(event)
    lines = ["| reason | type | times | of | such as |", "|---|---|---|---|---|"]
    for (reason, kind), group in sorted(groups.items()):
        times = sum(event.get("count") or 1 for event in group)
        objects = ", ".join(sorted({event["involvedObject"]["kind"] for event in group}))
        message = " ".join(str(group[-1].get("message", "")).replace("|", "/").split())
        message = message if len(message) <= _MESSAGE_MAX else f"{message[:_MESSAGE_MAX]}..."
        said = f'"{message}"' if message else ""
        lines.append(f"| {reason} | {kind} | {times} | {objects} | {said} |")
    return "\n".join(lines)


def keep_drill(title: str, transcript: list[str]) -> None:
    """Keep what the commands of a drill have said, in the place of what they said before."""
    drills: dict[str, list[str]] = json.loads(DRILLS.read_text()) if DRILLS.exists() else {}
    DRILLS.write_text(json.dumps(drills | {title: transcript}))


def drills_page(drills: Mapping[str, list[str]]) -> str:
    """Return the page of drills, each with its commands and the end of what they said."""
    parts = ["# Drills on Kubernetes", DRILLS_INTRODUCTION]
    for title, lines in drills.items():
        text = "\n".join(line.rstrip() for line in lines).replace(str(ROOT), ".")
        parts += [f"## {title}", f"```console\n{text}\n```"]
    return "\n\n".join(parts) + "\n"


def write() -> None:
    """Put the tables into their page, and write that of the drills."""
    if DRILLS.exists():
        DRILLS_PAGE.write_text(drills_page(json.loads(DRILLS.read_text())))
    replace_table(BEGIN, conditions(), table(json.loads(ROWS.read_text()), PAGE.read_text()))
    if events := kept_events():
        days = sorted({event["metadata"]["creationTimestamp"][:10] for event in events.values()})
        replace_table(
            EVENTS_BEGIN, f"{' to '.join(dict.fromkeys((days[0], days[-1])))}:", events_table(events.values())
        )


if __name__ == "__main__":
    write()
