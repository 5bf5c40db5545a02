"""Lemon nodes: how much of the log's trouble stands against each node, signal by signal. Pure.

After Meta's "Revisiting Reliability in Large-Scale Machine Learning Research Clusters" (arXiv 2410.21680, section on
lemon nodes): nodes that fail again and again are some one in a hundred, and a large part of all failures.

Rules
-----
* A signal is counted from the log, once per event or incident; what a person ordered (`unicronctl inject`) is not, nor
  is what a task's own program does (faults/program_faults.py).
* A node's score is the sum over signals of weight x count, each count up to COUNT_MAX: no one signal makes a lemon.
* A lemon has SCORE_MIN points at least, from two signals, and LEMON_RATIO times the median of all nodes with a score.
* A score is a suggestion, and explains itself. Nothing is done because of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import NamedTuple

from unicrond.core.replayer import LogStep
from unicrond.core.state.state import ClusterState, Incident, Node, Worker
from unicrond.events import vocabulary as v

SCORE_MIN = 8.0
LEMON_RATIO = 3.0
COUNT_MAX = 8


class Signal(NamedTuple):
    """A kind of trouble that is counted against nodes. `weight`: points for each; `text`: what it is, for people."""

    weight: float
    text: str


SIGNALS: dict[str, Signal] = {
    "isolated": Signal(3.0, "taken out of service by the coordinator"),
    "cordoned": Signal(2.0, "taken out of service by a person"),
    "check_failed": Signal(3.0, "health check failed"),
    "lost": Signal(2.0, "lost"),
    "xid": Signal(2.0, "accelerator faults reported by the driver"),
    "hardware": Signal(3.0, "incidents of its hardware"),
    "alone": Signal(2.0, "incidents of a task that had no other node"),
    "among_others": Signal(1.0, "incidents of a task on several nodes"),
    "strike": Signal(1.0, "strikes"),
    "straggler": Signal(1.0, "workers slower than the other replicas"),
    "corruption": Signal(3.0, "parameters that no other replica has"),
    "odd_numbers": Signal(1.0, "losses or gradient norms that stand out"),  # a healthy replica's data may explain them
}
_HARDWARE = ("ecc_error", "nvlink_error", "driver_error", "dma_error", "gpu_broken", "gpu_fault")
_Signals = dict[str, dict[str, int]]


class Score(NamedTuple):
    """The points of one node. `parts`: per signal, its count and its points, the most points first."""

    node: str
    score: float
    is_lemon: bool
    parts: tuple[tuple[str, int, float], ...]

    @property
    def reason(self) -> str:
        """Return the parts in words."""
        return "; ".join(f"{SIGNALS[name].text} x{count} = {points:g}" for name, count, points in self.parts)


def count_signals(signals: _Signals, step: LogStep) -> _Signals:
    """Return the counts after a step; the same object where it says nothing of any node."""
    before, _, after = step
    node, name = _signal(before, after, step.event)
    if node and node in after.nodes:
        signals = _add_signal(signals, node, name)
    if after.incidents is not before.incidents:
        for incident in after.incidents.values():
            old = before.incidents.get(incident.id)
            if old is None and not _is_ordered(before, incident) and not incident.is_program_fault:
                signals = _add_signal(signals, incident.node, _incident_signal(before, incident))
            elif old is not None and incident.is_program_fault and not old.is_program_fault:
                signals = _add_signal(signals, old.node, _incident_signal(before, old), -1)
    return signals


def scores(signals: Mapping[str, Mapping[str, int]]) -> list[Score]:
    """Return the scores of all nodes that have one, the highest first."""
    points = {
        node: {name: SIGNALS[name].weight * min(count, COUNT_MAX) for name, count in counts.items() if count > 0}
        for node, counts in signals.items()
    }
    totals = {node: sum(parts.values()) for node, parts in points.items() if parts}
    usual = median(totals.values()) if totals else 0.0
    rows = [
        Score(
            node,
            total,
            total >= SCORE_MIN and len(points[node]) > 1 and (len(totals) < 3 or total >= LEMON_RATIO * usual),
            tuple(
                (name, signals[node][name], part)
                for name, part in sorted(points[node].items(), key=lambda entry: (-entry[1], entry[0]))
            ),
        )
        for node, total in totals.items()
    ]
    return sorted(rows, key=lambda entry: (-entry.score, entry.node))


def _signal(before: ClusterState, after: ClusterState, event: v.AnyEvent | None) -> tuple[str, str]:
    """Return the node that an event speaks against, and the signal; "" where it does not."""
    match event:
        case v.NodeIsolated() if not _was_isolated(before, event.node) and _was_isolated(after, event.node):
            return event.node, "isolated"
        case v.NodeCordoned():
            return event.node, "cordoned"
        case v.NodeChecked(has_passed=False):
            return event.node, "check_failed"
        case v.NodeLost() if (node := before.nodes.get(event.node)) and not _is_excused(before, node):
            return event.node, "lost"
        case v.AcceleratorReported(kind=kind) if kind is not None:
            return event.node, "xid"
        case v.WorkerExited() | v.ErrorReported() if _strikes(after, event) > _strikes(before, event):
            return event.node, "strike"
        case v.StragglerObserved():
            straggler_task = before.tasks.get(event.task)
            stragglers = straggler_task.group.stragglers if straggler_task else {}
            return ("", "") if event.straggler in stragglers else (event.straggler_node, "straggler")
        case v.CorruptionSuspected() if event.suspect:
            task = before.tasks.get(event.task)
            worker = task.workers.get(event.suspect) if task else None
            if event.sign not in ("checksum", "micro_batch"):
                return worker.node if worker else "", "odd_numbers"
            return (worker.node, "corruption") if worker and _is_convicted(after, event, worker) else ("", "")
    return "", ""


def _is_convicted(after: ClusterState, event: v.CorruptionSuspected, worker: Worker) -> bool:
    """Return whether the accusation was the one that took the worker out: each replica brings one, and may lie."""
    task = after.tasks[event.task]
    return worker.alive and (event.suspect not in task.workers or not task.workers[event.suspect].alive)


def _is_excused(state: ClusterState, node: Node) -> bool:
    """Return whether the loss of the node now would say nothing of its machine."""
    return node.health.is_loss_excused or node.may_go or state.silence is not None


def _was_isolated(state: ClusterState, node: str) -> bool:
    return node in state.nodes and state.nodes[node].isolation.active


def _strikes(state: ClusterState, event: v.WorkerExited | v.ErrorReported) -> int:
    task = state.tasks.get(event.task)
    return task.troubles.strikes.get(event.node, 0) if task else 0


def _incident_signal(state: ClusterState, incident: Incident) -> str:
    if incident.kind in _HARDWARE:
        return "hardware"
    nodes = {
        member.node
        for name in incident.tasks
        if name in state.tasks and (membership := state.tasks[name].membership)
        for member in membership.members
    }
    return "among_others" if len(nodes) > 1 else "alone"


def _is_ordered(state: ClusterState, incident: Incident) -> bool:
    """Return whether a person had this happen."""
    task = state.tasks.get(incident.worker.rpartition(".")[0])
    worker = task.workers.get(incident.worker) if task else None
    node = state.nodes.get(incident.node)
    return bool(worker and worker.ordered_fault) or bool(node and node.health.is_loss_excused) or not incident.node


def _add_signal(signals: _Signals, node: str, name: str, more: int = 1) -> _Signals:
    counts = signals.get(node, {})
    return signals | {node: counts | {name: max(0, counts.get(name, 0) + more)}}
