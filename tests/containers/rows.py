"""The table in docs/operate/kubernetes.md: what the tests here show.

python -m tests.containers.rows writes it from build/containers/rows.json, once more.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from typing import Any

from tests.containers.image import CONTAINERFILE, base
from tests.containers.oci import cgroup_version, runtime
from tests.integration.installation import ROOT

BUILD = ROOT / "build" / "containers"
ROWS = BUILD / "rows.json"
PAGE = ROOT / "docs" / "operate" / "kubernetes.md"
BEGIN, END = "<!-- make containers writes this table -->", "<!-- end of the table -->"

#: What the test keeps its facts under; the act; what is seen, with the facts' names in braces.
TABLE = (
    (
        "delete",
        "an agent's pod deleted and made anew: other address, empty volumes, the same name",
        "drained at {told} s, the pod gone after {pod_s} s with exit code {code}, whole after {whole} s; no incident, "
        "nothing repeated",
    ),
    (
        "delete",
        "the same, of an indexed Job (the same agent; the Job itself was not run)",
        "exit code {code}: the index has failed, and a Job makes its pod anew",
    ),
    (
        "rollout first",
        "three agents updated one by one in mid-training, the next as soon as one is ready",
        "{left} nodes drained, left and joined; whole after {whole} s; no incident, no flap, nothing repeated",
    ),
    ("rollout second", "the same once more, right after it", "the same; whole after {whole} s"),
    (
        "link",
        "then an agent's link down for 20 s",
        "lost at {told} s, back at {back} s, not isolated; whole after {whole} s",
    ),
    (
        "interrupt",
        "a preStop hook with SIGINT that returns at once, SIGTERM after it",
        "the node leaves at {told} s, the pod is gone after {pod_s} s; no incident; whole after {whole} s",
    ),
    (
        "agent dies",
        "an agent killed in its container (`--supervise`), three times",
        "the next agent has joined after {all} s with the same workers; no incident",
    ),
    (
        "zombies",
        "`kubectl exec` that leaves children, five times each in agent and head",
        "{agent} and {head} zombies",
    ),
    (
        "process 1 killed",
        "process 1 of an agent's container killed from outside",
        "told at {told} s, whole after {whole} s: *{said[0]}*",
    ),
    (
        "limits",
        "memory for states, without `--memory-gib`",
        "{states} MiB under a limit of {limit} MiB, and one warning: *{said}*",
    ),
    ("small shm", "`/dev/shm` as it is without a volume", "*{said}*"),
    (
        "worker oom",
        "a worker eats up to the limit",
        "told at {told} s, whole after {whole} s: *{said[0]}*",
    ),
    (
        "all oom",
        "shared memory fills the limit, the kernel kills all, process 1 too",
        "exit code {code}; told at {told} s, whole after {whole} s, not isolated by then: *{said[0]}*",
    ),
    (
        "force",
        "`delete --force`: the old container still runs beside the new one, under one name",
        "the new one's login ends the old one's, and it has joined at {told} s; whole after {whole} s; the old agent "
        "ends with code {code} once its worker has",
    ),
    (
        "force, cut off",
        "the same, the old one cut off, and back later",
        "whole after {whole} s; the old one is not let in once it is back, and disturbs nothing",
    ),
    (
        "cannot work",
        "an agent with a key that nobody enrolled; one whose torch cannot be loaded",
        "alive, and not ready: *{said[0]}*; *{said[1]}*",
    ),
    (
        "read-only root",
        "a head's first start as uid 10001 on a read-only root",
        "ready after {whole} s; the compiled kernel comes from the image, in {kernel_s} s of CPU",
    ),
    ("head killed", "process 1 of the head's container killed", "ready after {whole} s, no node lost"),
    (
        "server stands still",
        "the head's nats-server stopped (SIGSTOP)",
        "not ready at {told} s, alive at all {live_probes} probes, ready after {whole} s",
    ),
    (
        "head deleted",
        "the head's pod deleted and made on another machine, shared directory",
        "the lease is given back: ready after {whole} s, no node lost",
    ),
    (
        "two heads",
        "two heads on one shared directory (two mounts, no common lock)",
        "the second waits, for the {waited} s that were watched: *{said}*",
    ),
    (
        "head cut off",
        "then the first one's machine cut off, network and storage",
        "its server ends after {old_ended} s, the second head is ready after {whole} s; {lost_events} events lost",
    ),
    (
        "empty volume",
        "a head made anew with an empty volume; agents know another log",
        "the agents live, join nothing, and say so {told} s after the head is ready: *{said}*",
    ),
    (
        "empty volume, back",
        "then the head on its own volume again",
        "ready after {whole} s; faults that the log then names: {faults}",
    ),
    (
        "closed volume",
        "a head whose volume cannot be written",
        "exit code {code} and one line: *{said}*",
    ),
    (
        "started without NATS",
        "a head started while NATS is away",
        "waits and lives ({live_probes} probes); ready {whole} s after NATS has come",
    ),
    (
        "NATS away",
        "NATS outside away, then back",
        "away for {away} s: not ready at {told} s, no restart ({live_probes} probes of head and agents), all ready "
        "{whole} s after its return; training went on",
    ),
    (
        "NATS empty",
        "NATS outside comes back with an empty store, then with its own",
        "said at {told} s, nothing made anew; all ready {whole} s after the store is back; an agent: *{said[1]}*",
    ),
    (
        "standby",
        "the head that leads killed with its pod, another stands by",
        "the other one leads after {whole} s; no node lost",
    ),
)


def missing() -> str:
    """What `make containers` lacks here; "" where all is there."""
    if os.getuid() != 0:
        return "needs root: it makes namespaces, mounts and cgroups"
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    lacks = [name for name in ("debootstrap", "bindfs", "ip") if shutil.which(name, path=path) is None]
    lacks += [] if runtime() else ["runc"]
    if lacks:
        return f"needs {', '.join(lacks)}: apt-get install runc debootstrap bindfs iproute2"
    version = ".".join(map(str, sys.version_info[:2]))
    if version != base()[0]:
        return f"needs a .venv of Python {base()[0]}, as in {CONTAINERFILE.name}; this is {version}"
    return ""


def table(rows: dict[str, dict[str, Any]]) -> str:
    """In Markdown. A row whose test has not passed says so."""
    lines = ["| act | seen |", "|---|---|"]
    for key, act, now in TABLE:
        seen = now.format(**plain(rows[key])) if key in rows else "**not shown by the last run**"
        lines.append(f"| {act} | {seen} |")
    return "\n".join(lines)


def plain(facts: dict[str, Any]) -> dict[str, Any]:
    """As a cell of a table has them."""

    def one(fact: Any) -> Any:
        if isinstance(fact, str):
            if fact.startswith("{"):  # the head's probes answer in JSON
                fact = json.loads(fact)["trouble"]
            return " ".join(fact.split()).replace("|", "/")
        if isinstance(fact, list) and not any(isinstance(each, str) for each in fact):
            return ", ".join(map(str, fact)) or "none"
        return [one(each) for each in fact] or "none" if isinstance(fact, list) else fact

    return {name: one(fact) for name, fact in facts.items()}


def conditions(rows: dict[str, dict[str, Any]]) -> str:
    """Where and when it ran."""
    program = runtime()
    assert program is not None
    said = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
    kernel, loads = platform.release().split("-")[0], [row["load"] for row in rows.values() if "load" in row]
    return (
        f"Run on {max(row.get('day', '') for row in rows.values())}: {said.splitlines()[0]}, Linux {kernel}, cgroup "
        f"{cgroup_version()}, {os.cpu_count()} cores, load {min(loads)} to {max(loads)}."
    )


def write() -> None:
    """Put the table into its page."""
    rows = json.loads(ROWS.read_text())
    replace_table(BEGIN, conditions(rows), table(rows))


def replace_table(begin: str, conditions: str, table: str) -> None:
    """Put a table, and where it was made, between a mark of the page and END."""
    before, _, rest = PAGE.read_text().partition(begin)
    _, mark, after = rest.partition(END)
    assert mark, f"{PAGE} has no place for the table"
    PAGE.write_text(f"{before}{begin}\n{conditions}\n\n{table}\n{END}{after}")


if __name__ == "__main__":
    write()
