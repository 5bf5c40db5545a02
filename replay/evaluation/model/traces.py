"""Failure traces: what breaks when, on which node, and for how long. Read from a file or drawn from a seed.

    trace-a                      8 weeks, 10 node faults and 33 others (paper), repair 1 to 7 days
    trace-b[:repair_h=12]        7 days, 26 node faults and 80 others (paper); the repair time is ours
    poisson:mtbf_d=30,...        any rate: see `POISSON`
    meta:rate=6.5,...            Meta's published rate of faults and shares of causes: see `META`
    FILE                         InfiniteHBD's format: fault_start and fault_end per node, in days

A fault is a node's (SEV1: it is away until repaired), a process's (SEV2) or a connection's (SEV3). The
faults of the paper's traces that are not SEV1 are half SEV2, half SEV3 (assumed); times are uniform, the node
of a SEV1 is drawn from those that are there. A trace is made for a cluster's size and knows nothing of what
works where: a fault on an idle node is one that no task feels.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from unicrond.replay.evaluation.model.virtual_time import DAY_US, HOUR_US


class TraceError(ValueError):
    """A trace that cannot be read or drawn; one line that names the place and the fix."""


@dataclass(frozen=True, slots=True)
class TraceFault:
    """A fault on one node. `severity` 1, 2 or 3; `repair_us`: how long the node is away (SEV1 only)."""

    at_us: int
    node: int
    severity: int
    repair_us: int = 0


@dataclass(frozen=True)
class Trace:
    """Faults in order of time on nodes 0..nodes-1, from 0 to `length_us`."""

    name: str
    nodes: int
    length_us: int
    faults: tuple[TraceFault, ...]

    @property
    def node_faults(self) -> int:
        """Count the SEV1 faults."""
        return sum(fault.severity == 1 for fault in self.faults)

    @property
    def node_mtbf_s(self) -> float:
        """Compute the mean time between SEV1 faults of one node; without any, as if the next came at the end."""
        return self.nodes * self.length_us / 1e6 / max(1, self.node_faults)


# --- drawn traces --------------------------------------------------------------------------------

FAULTS_MAX = 2_000_000
#: Names, defaults and meanings of what `poisson:` takes.
POISSON: dict[str, tuple[float, str]] = {
    "mtbf_d": (30.0, "mean days between node faults of one node"),
    "other_mtbf_d": (10.0, "mean days between other faults of one node"),
    "repair_h": (24.0, "hours until a node is back"),
    "days": (28.0, "length of the trace in days"),
}
#: Kokolis et al. 2024 (arXiv 2410.21680): a job on 16,384 GPUs (2,048 nodes) is interrupted every 1.8 h, which is 6.5
#: faults in 1,000 node days. Repair is assumed.
META: dict[str, tuple[float, str]] = {
    "rate": (6.5, "faults in 1,000 node days"),
    "repair_h": (24.0, "hours until a node is back"),
    "days": (7.0, "length of the trace in days"),
}
#: Grattafiori et al. 2024 (arXiv 2407.21783), table 5: 419 unexpected interruptions of 16,384 GPUs in 54 days, by what
#: they ask for. Network and collectives' watchdog: a connection; software: a process; hardware and host: the node.
META_CAUSES = {1: 321, 2: 56, 3: 42}
TRACE_B: dict[str, tuple[float, str]] = {"repair_h": (12.0, "hours until a node is back")}
TRACE_A: dict[str, tuple[float, str]] = {
    "repair_from_d": (1.0, "shortest repair, days"),
    "repair_to_d": (7.0, "longest repair, days"),
}


def trace(spec: str, nodes: int, seed: int) -> Trace:
    """Return the trace that `spec` names (see the module), for a cluster of `nodes`. Raises TraceError."""
    name, _, settings = spec.partition(":")
    if name == "trace-a":
        a = _settings(name, settings, TRACE_A)
        if a["repair_from_d"] > a["repair_to_d"]:
            raise TraceError("--trace trace-a: repair_from_d is above repair_to_d; swap them")
        return _uniform(spec, nodes, seed, 56 * DAY_US, 10, 33, (a["repair_from_d"] * 24, a["repair_to_d"] * 24))
    if name == "trace-b":
        b = _settings(name, settings, TRACE_B)
        return _uniform(spec, nodes, seed, 7 * DAY_US, 26, 80, (b["repair_h"], b["repair_h"]))
    if name == "meta":
        return _meta(spec, nodes, seed, _settings(name, settings, META))
    if name == "poisson":
        return _poisson(spec, nodes, seed, _settings(name, settings, POISSON))
    path = Path(spec)
    if not path.is_file():
        choices = "trace-a, trace-b, poisson:mtbf_d=30,repair_h=24, meta or the path of a trace in InfiniteHBD's format"
        raise TraceError(f"--trace {spec}: no such file or trace; give {choices}")
    return read_infinitehbd(path, nodes, seed)


def _settings(name: str, text: str, defaults: dict[str, tuple[float, str]]) -> dict[str, float]:
    values = {key: default for key, (default, _) in defaults.items()}
    for part in filter(None, text.split(",")):
        key, _, value = part.partition("=")
        if key not in defaults:
            raise TraceError(f"--trace {name}: unknown setting {key!r}; choose from {', '.join(defaults)}")
        try:
            values[key] = float(value)
        except ValueError:
            values[key] = -1.0
        if not 0 < values[key] <= 100_000:
            raise TraceError(f"--trace {name}: {key}={value!r} does not fit; give {defaults[key][1]}, above 0")
    return values


def _draw(name: str, nodes: int, seed: int) -> random.Random:
    """Seed the generator by the kind of the trace: another repair time leaves the times of the faults as they are."""
    return random.Random(f"{name.partition(':')[0]}/{nodes}/{seed}")


def _uniform(
    name: str, nodes: int, seed: int, length_us: int, node_faults: int, other_faults: int, repair_h: tuple[float, float]
) -> Trace:
    """Draw `node_faults` and `other_faults`, at uniform times."""
    draw = _draw(name, nodes, seed)
    times = sorted(
        [(draw.randrange(length_us), 1) for _ in range(node_faults)]
        + [(draw.randrange(length_us), draw.choice((2, 3))) for _ in range(other_faults)]
    )
    return Trace(name, nodes, length_us, _on_nodes(draw, nodes, times, repair_h))


def _poisson(name: str, nodes: int, seed: int, settings: dict[str, float]) -> Trace:
    """Draw independent exponential gaps on the whole cluster. The rate does not fall while nodes are away."""
    draw = _draw(name, nodes, seed)
    length_us = round(settings["days"] * DAY_US)
    times: list[tuple[int, int]] = []
    for mtbf_d, is_node in ((settings["mtbf_d"], True), (settings["other_mtbf_d"], False)):
        at_us = 0.0
        while True:
            at_us += draw.expovariate(nodes / (mtbf_d * DAY_US))
            if at_us >= length_us:
                break
            times.append((int(at_us), 1 if is_node else draw.choice((2, 3))))
            if len(times) > FAULTS_MAX:
                raise TraceError(f"--trace {name}: more than 2 million faults; give a longer mtbf or fewer days")
    return Trace(name, nodes, length_us, _on_nodes(draw, nodes, sorted(times), (settings["repair_h"],) * 2))


def _meta(name: str, nodes: int, seed: int, settings: dict[str, float]) -> Trace:
    """Draw exponential gaps at Meta's rate; the severity of a fault is drawn by META_CAUSES."""
    draw = _draw(name, nodes, seed)
    length_us = round(settings["days"] * DAY_US)
    times: list[tuple[int, int]] = []
    per_us = nodes * settings["rate"] / (1000 * DAY_US)
    at_us = draw.expovariate(per_us)
    while at_us < length_us and len(times) <= FAULTS_MAX:
        times.append((int(at_us), draw.choices(list(META_CAUSES), list(META_CAUSES.values()))[0]))
        at_us += draw.expovariate(per_us)
    if len(times) > FAULTS_MAX:
        raise TraceError(f"--trace {name}: more than 2 million faults; give a lower rate or fewer days")
    return Trace(name, nodes, length_us, _on_nodes(draw, nodes, times, (settings["repair_h"],) * 2))


def _on_nodes(
    draw: random.Random, nodes: int, times: list[tuple[int, int]], repair_h: tuple[float, float]
) -> tuple[TraceFault, ...]:
    """Draw a node for every fault, from those that are up; with none up nothing can break."""
    away_until: dict[int, int] = {}
    faults = []
    for at_us, severity in times:
        nodes_up = [node for node in range(nodes) if away_until.get(node, 0) <= at_us]
        if not nodes_up:
            continue
        node = draw.choice(nodes_up)
        repair_us = round(draw.uniform(*repair_h) * HOUR_US) if severity == 1 else 0
        if severity == 1:
            away_until[node] = at_us + repair_us
        faults.append(TraceFault(at_us, node, severity, repair_us))
    return tuple(faults)


# --- InfiniteHBD ---------------------------------------------------------------------------------

#: Servers that the published trace observed; those without a fault are not named in it.
INFINITEHBD_NODES = 400
INFINITEHBD_ORIGIN = "github.com/stepfun-ai/InfiniteHBD-Trace"
INFINITEHBD_SHA256 = "5871b881b341c9526223c025eda3a9bd2f0f875cf8d53441688ccd953e11b80d"
TRACE_BYTES_MAX = 64 * 2**20


class _Cause(msgspec.Struct, forbid_unknown_fields=True):
    Level: str
    Class: str
    Desc: str


class _TraceEvent(msgspec.Struct, forbid_unknown_fields=True):
    node_id: str
    event_time: Annotated[float, Meta(ge=0.0, le=100_000.0)]
    event_type: Literal["fault_start", "fault_end"]
    fault_type: _Cause


def read_infinitehbd(path: Path, nodes: int, seed: int) -> Trace:
    """Read a trace in InfiniteHBD's format, on `nodes` servers drawn by `seed` from the observed ones.

    A file that names fewer than 400 servers was watching 400 (the publication's number), the rest without a fault.
    Times are days; the trace begins at 0 and ends, in whole days, with its last entry. All faults are the node's
    (SEV1). Raises TraceError."""
    entries = _entries(path)
    faulty = sorted({entry.node_id for entry in entries})
    population = max(INFINITEHBD_NODES, len(faulty))
    if nodes > population:
        raise TraceError(f"--trace {path.name}: it observed {population} nodes; give a cluster of at most that many")
    length_us = _whole_days(max(entry.event_time for entry in entries)) * DAY_US
    sample = random.Random(f"infinitehbd/{nodes}/{seed}").sample(range(population), nodes)
    place = {faulty[server]: node for node, server in enumerate(sample) if server < len(faulty)}
    faults = []
    for name, start_us, end_us in _outages(path, entries, length_us):
        if name in place:
            faults.append(TraceFault(start_us, place[name], 1, end_us - start_us))
    return Trace(path.name, nodes, length_us, tuple(sorted(faults, key=lambda fault: (fault.at_us, fault.node))))


def _whole_days(days: float) -> int:
    return max(1, int(days))


def _entries(path: Path) -> list[_TraceEvent]:
    try:
        if path.stat().st_size > TRACE_BYTES_MAX:
            raise TraceError(f"--trace {path.name}: larger than 64 MiB; it is not a trace of nodes")
        data: Any = json.loads(path.read_bytes())
    except OSError as error:
        raise TraceError(f"--trace {path.name}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise TraceError(f"--trace {path.name}: not JSON: {error}; give InfiniteHBD's format") from None
    if not isinstance(data, list) or not data:
        raise TraceError(f"--trace {path.name}: expected a list of events; give InfiniteHBD's format")
    entries = []
    for index, item in enumerate(data):
        try:
            entries.append(msgspec.convert(item, _TraceEvent, strict=True))
        except msgspec.ValidationError as error:
            raise TraceError(f"--trace {path.name}: event {index}: {error}; fix or remove it") from None
    return sorted(entries, key=lambda entry: entry.event_time)  # equal times stay in the file's order


def _outages(path: Path, entries: list[_TraceEvent], length_us: int) -> list[tuple[str, int, int]]:
    """Return (node, start, end): overlapping faults of a node are one outage, an open one lasts to the end."""
    open_faults: Counter[str] = Counter()
    began: dict[str, int] = {}
    outages = []
    for entry in entries:
        at_us, name = round(entry.event_time * DAY_US), entry.node_id
        if entry.event_type == "fault_start":
            if not open_faults[name]:
                began[name] = at_us
            open_faults[name] += 1
            continue
        if not open_faults[name]:
            raise TraceError(f"--trace {path.name}: a fault of {name} ends on day {entry.event_time:g} unbegun")
        open_faults[name] -= 1
        if not open_faults[name]:
            outages.append((name, began.pop(name), at_us))
    outages += [(name, start_us, max(length_us, start_us)) for name, start_us in began.items()]
    return [outage for outage in outages if outage[1] < length_us]
