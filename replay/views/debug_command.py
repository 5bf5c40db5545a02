"""`unicronctl debug`: one file with the state of a cluster, for a report. It holds what the API shows, so not the
secrets that the API hides."""

from __future__ import annotations

import argparse
import asyncio
import platform
import sys
import tempfile
import zipfile
from collections.abc import Callable
from contextlib import aclosing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from unicrond import VERSION
from unicrond.core.state.state import ClusterState
from unicrond.ctl.client import ApiError, Client
from unicrond.ctl.client_options import client_of
from unicrond.replay.reading.export import Export
from unicrond.replay.reading.opening import BUNDLED_LOG, as_json, open_source, require_place, say
from unicrond.replay.reading.progress import with_bar
from unicrond.replay.reading.source import read
from unicrond.service.coordinator.code_identity import code_version

#: The bytes at the end of each worker's log that the file holds, and the number of workers.
TAIL_BYTES = 65_536
WORKERS_MAX = 64
_README = """\
A report of a cluster that unicrond coordinates, written by `unicronctl debug` of version {version}.

{log:<16} the event log; unicron-replay opens this whole file: unicron-replay state --log THIS_FILE
state.json       the coordinator's state, and what follows from it
health.json      /healthz
plan_table.json  the plan for each event that may come next
metrics.txt      /metrics
versions.json    of the programs
logs/            the ends of the workers' logs, by task

Secrets in tasks' environments and the tokens of nodes are hidden, as the API hides them. What a program prints
stands in its log: read logs/ before you pass this on.
{missing}"""


async def debug_command(options: argparse.Namespace) -> int:
    """Write the file. The exit code is 0 also where a part is missing, which the report names."""
    path = options.out or Path(f"unicron-debug-{datetime.now(UTC):%Y%m%dT%H%M%SZ}.zip")
    require_place("--out", path)
    client = client_of(options)
    missing: list[str] = []
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as place:
        log, whole = Path(place) / BUNDLED_LOG, Path(place) / "whole"
        last_seq = await _export(options, log)
        state = (await asyncio.to_thread(client.snapshot)).state
        with zipfile.ZipFile(whole, "w", zipfile.ZIP_DEFLATED) as bundle:
            bundle.write(log, BUNDLED_LOG)
            for name, text in (await asyncio.to_thread(_texts, client, state, options, missing)).items():
                bundle.writestr(name, text)
            lacks = "".join(f"Missing: {line}\n" for line in missing)
            bundle.writestr("README.txt", _README.format(version=VERSION, log=BUNDLED_LOG, missing=lacks))
        whole.chmod(0o600)
        whole.replace(path)
    if options.json:
        say(as_json({"path": str(path), "last_seq": last_seq, "missing": missing}))
    else:
        say(f"{path}: entries 1 to {last_seq}; look at it with: unicron-replay state --log {path}")
    for line in missing:
        print(f"unicronctl: missing: {line}", file=sys.stderr)
    return 0


async def _export(options: argparse.Namespace, log: Path) -> int:
    """Write the log into a file, and return its last sequence number."""
    last_seq = 0
    async with open_source(options) as source:
        with Export(log) as export:
            async with aclosing(with_bar(read(source), "exporting")) as chunks:
                async for chunk in chunks:
                    export.write(chunk.entries)
                    last_seq = chunk.entries[-1].seq
    return last_seq


def _texts(client: Client, state: ClusterState, options: argparse.Namespace, missing: list[str]) -> dict[str, str]:
    """Return the other members by name; what cannot be read goes to `missing`."""
    sources: dict[str, Callable[[], str]] = {
        "state.json": lambda: as_json(client.snapshot().body),
        "health.json": lambda: as_json(client.health()),
        "plan_table.json": lambda: as_json(client.plan_table()),
        "metrics.txt": client.metrics,
        "versions.json": lambda: as_json(_versions(state)),
    }
    if not options.no_logs:
        sources |= {
            f"logs/{task.name}/{worker}.log": _log(client, task.name, worker)
            for task in state.tasks.values()
            for worker in _workers(state, task.name)
        }
    texts = {}
    for name, read_source in sources.items():
        try:
            texts[name] = read_source()
        except ApiError as error:
            missing.append(f"{name}: {error}")
    return texts


def _workers(state: ClusterState, task: str) -> list[str]:
    """List the task's workers and those of its incidents; the newest WORKERS_MAX."""
    names = dict.fromkeys(
        incident.worker for incident in state.closed_incidents if incident.worker.rpartition(".")[0] == task
    )
    names |= dict.fromkeys(
        incident.worker for incident in state.incidents.values() if incident.worker.rpartition(".")[0] == task
    )
    return list(names | dict.fromkeys(state.tasks[task].workers))[-WORKERS_MAX:]


def _log(client: Client, task: str, worker: str) -> Callable[[], str]:
    return lambda: str(client.logs(task, worker=worker, tail_bytes=TAIL_BYTES)["text"])


def _versions(state: ClusterState) -> dict[str, Any]:
    return {
        "unicronctl": VERSION,
        "code": code_version(),
        "python": platform.python_version(),
        "machine": platform.platform(),
        "schema": state.schema,
        "agents": {node.name: node.agent.version for node in state.nodes.values()},
    }
