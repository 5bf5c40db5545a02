"""Figures out of what a soak has seen, as JSON, as a table and as a plot."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.soak.run import Soak

DAY_S = 86_400
#: From a worker's fault: the log has stored it, the coordinator has decided, the log has stored that.
WAY = ("stored", "decided", "told")


def percentile(values: list[float], share: float) -> float | None:
    """None of no values."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]


def spread_ms(values: list[float | None]) -> dict[str, Any]:
    known = [value for value in values if value is not None]
    return {
        "count": len(known),
        **{name: _ms(percentile(known, share)) for name, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))},
    }


def _ms(value_s: float | None) -> float | None:
    return None if value_s is None else round(value_s * 1000, 1)


def slope(points: list[tuple[float, float]]) -> tuple[float, float]:
    """Least squares: per unit of x, and half of the 95 % interval. Of residuals that depend on each other the
    interval is too narrow: give points far apart."""
    count = len(points)
    if count < 3:
        return 0.0, math.inf
    mean_x, mean_y = sum(x for x, _ in points) / count, sum(y for _, y in points) / count
    over = sum((x - mean_x) ** 2 for x, _ in points)
    rise = sum((x - mean_x) * (y - mean_y) for x, y in points) / over
    rest = sum((y - mean_y - rise * (x - mean_x)) ** 2 for x, y in points)
    return rise, 1.96 * math.sqrt(rest / (count - 2) / over)


def figures(soak: Soak) -> dict[str, Any]:
    samples = soak.samples
    faults = [{**fault, **soak.memberships.reached(fault)} for fault in soak.faults]
    by_phase = {phase: [s for s in samples if s["phase"] == phase] for phase in ("staffing", "rest", "faults")}
    found: dict[str, Any] = {
        "faults": [{k: v for k, v in fault.items() if k != "before"} for fault in faults],
        **{f"{name}_ms": spread_ms([f.get(f"{name}_s") for f in faults if f["kind"] == "worker"]) for name in WAY},
        "first_node_ms": spread_ms([f["first_s"] for f in faults if f["kind"] == "worker" and f["first_s"]]),
        "last_node_ms": spread_ms([f["last_s"] for f in faults if f["kind"] == "worker" and f["last_s"]]),
        "node_loss_last_node_ms": spread_ms([f["last_s"] for f in faults if f["kind"] == "node" and f["last_s"]]),
        "in_the_takeover_last_node_ms": spread_ms([f["last_s"] for f in faults if f["kind"] == "takeover"]),
        "in_the_leader_change_last_node_ms": spread_ms([f["last_s"] for f in faults if f["kind"] == "leader change"]),
        "whole_again_ms": spread_ms([f["whole_s"] for f in faults if f["whole_s"]]),
        "phases": {phase: _phase(some) for phase, some in by_phase.items() if len(some) > 1},
        "loop_delay_ms": _delays(soak.directory / "delays.jsonl", by_phase),
        "samples": samples,
    }
    rest, busy = found["phases"].get("rest"), found["phases"].get("faults")
    if rest and busy:
        extra = (busy["event_bytes_per_s"] - rest["event_bytes_per_s"]) * busy["seconds"]
        found["log_bytes_per_fault"] = round(extra / max(1, len(faults)))
        found["log_bytes_per_node_and_day_at_rest"] = round(rest["event_bytes_per_s"] * DAY_S / soak.options.agents)
        found["log_bytes_per_node_and_day"] = round(busy["event_bytes_per_s"] * DAY_S / soak.options.agents)
    found["memory"] = _memory(samples)
    return found


def _phase(samples: list[dict[str, Any]]) -> dict[str, Any]:
    first, last = samples[0], samples[-1]
    seconds = last["s"] - first["s"]
    rates = {f"{name}_per_s": (last[name] - first[name]) / seconds for name in ("events", "beats")}
    cpu = {}
    for name in ("coordinator", "nats", "fleet"):
        # Of a process that was replaced, what the new one has used since.
        used = [max(0.0, b[f"{name}_cpu_s"] - a[f"{name}_cpu_s"]) for a, b in pairwise(samples)]
        cpu[f"{name}_cpu_percent"] = round(100 * sum(used) / seconds, 1)
    return {
        "seconds": round(seconds, 1),
        **cpu,
        **{name: round(rate, 1) for name, rate in rates.items()},
        "synced_writes_per_s": round(sum(rates.values()), 1),
        "event_bytes_per_s": round((last["events_bytes"] - first["events_bytes"]) / seconds, 1),
        "coordinator_mb": round(last["coordinator_mb"], 1),
        "nats_mb": round(last["nats_mb"], 1),
    }


def _delays(path: Path, by_phase: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    looks = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    found = {}
    for phase, samples in by_phase.items():
        if samples:
            here = [look for look in looks if samples[0]["s"] <= look["s"] <= samples[-1]["s"]]
            late = sorted(delay for look in here for delay in look["late"])
            count = sum(look["looks"] for look in here)
            beyond = max(1, count // 100)
            found[phase] = {
                "max": max((look["max"] for look in here), default=None),
                "p99": late[-beyond] if len(late) >= beyond else 1.0,
                "above_50_ms": sum(delay > 50 for delay in late),
            }
    return found


def _memory(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """MB per hour, of each process; of the coordinator that worked longest. Its first fifth is left out."""
    found = {}
    steady = [s for s in samples if s["phase"] in ("rest", "faults")]
    pids = [s["pid"] for s in steady]
    longest = max(set(pids), key=pids.count, default=0)
    for name, some in (("coordinator", [s for s in steady if s["pid"] == longest]), ("nats", steady)):
        some = some[len(some) // 5 :]
        step = max(1, len(some) // 60)
        rise, half = slope([(s["s"] / 3600, s[f"{name}_mb"]) for s in some[::step]])
        if math.isfinite(half):
            found[name] = {"mb_per_hour": round(rise, 1), "plus_minus": round(half, 1), "samples": len(some[::step])}
    return found


def table(found: dict[str, Any]) -> str:
    lines = []
    for name in (
        *("failed", "joining_s", "whole_after_last_join_s", "whole_after_submission_s"),
        *("stored_ms", "decided_ms", "told_ms", "first_node_ms"),
        *("last_node_ms", "node_loss_last_node_ms", "in_the_takeover_last_node_ms", "whole_again_ms", "takeover_s"),
        *("in_the_leader_change_last_node_ms", "leader_changes", "phases", "loop_delay_ms"),
        *("fsyncs_per_s_at_rest", "log_bytes_per_fault", "log_bytes_per_node_and_day_at_rest"),
        *("log_bytes_per_node_and_day", "memory", "fold", "log", "fleets", "nothing_lost", "all_healed"),
    ):
        value = found.get(name)
        if isinstance(value, dict) and any(isinstance(inner, dict) for inner in value.values()):
            lines += [f"{name} {key}: {json.dumps(inner)}" for key, inner in value.items()]
        elif value is not None:
            lines.append(f"{name}: {json.dumps(value)}")
    return "\n".join(lines)


def plot(found: dict[str, Any], path: Path) -> None:
    """Nothing where matplotlib is missing, or there is nothing to show."""
    samples = found.get("samples") or []
    try:
        import matplotlib
    except ImportError:
        return
    if len(samples) < 3:
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    begin_s = samples[0]["s"]
    minutes = [(s["s"] - begin_s) / 60 for s in samples]
    figure, (latency, cpu, memory) = pyplot.subplots(3, 1, figsize=(9, 9), sharex=True)
    for kind, colour in (("worker", "tab:blue"), ("node", "tab:red"), ("takeover", "black"), ("leader change", "grey")):
        some = [f for f in found["faults"] if f["kind"] == kind and f["last_s"]]
        latency.scatter(
            [(f["s"] - begin_s) / 60 for f in some], [f["last_s"] * 1000 for f in some], 12, colour, label=kind
        )
    latency.set_yscale("log")
    latency.set_ylabel("fault to membership\nat the last node, ms")
    latency.legend(loc="upper right")
    for name in ("coordinator", "nats", "fleet"):
        used = [
            100 * max(0.0, b[f"{name}_cpu_s"] - a[f"{name}_cpu_s"]) / (b["s"] - a["s"]) for a, b in pairwise(samples)
        ]
        cpu.plot(minutes[1:], used, label=name, linewidth=0.8)
    cpu.set_ylabel("CPU, % of a core")
    cpu.legend(loc="upper right")
    for name in ("coordinator", "nats"):
        memory.plot(minutes, [s[f"{name}_mb"] for s in samples], label=name)
    memory.set_ylabel("resident memory, MB")
    memory.set_xlabel("minutes")
    memory.legend(loc="upper left")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
