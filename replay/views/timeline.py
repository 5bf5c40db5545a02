"""The course of a log as spans of time: what each node did, what each task had, the incidents, the WAF. Pure.

A span says the same thing from `start_us` to `end_us`, by the log's time. It is drawn by `timeline_text.py` and
`timeline_drawing.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from unicrond.core.replayer import LogStep
from unicrond.core.state.state import ClusterState, Incident, Node, NodeStatus, Task, TaskStatus, WorkerStatus
from unicrond.core.worth.waf import linear_flops, waf
from unicrond.events import vocabulary as v
from unicrond.views.view import View

#: The condition of a node that runs no task; that of a node which does is the names of its tasks.
NODE_IDLE, NODE_LOST, NODE_LEFT, NODE_ISOLATED = "idle", "lost", "left", "isolated"
TRAINING, REGROUPING, WAITING = "training", "regrouping", "waiting"
#: These change nothing that is drawn.
_ROUTINE = (v.StepCommitted, v.CommandApplied, v.CheckpointSaved)


class TimelineSpan(NamedTuple):
    """A stretch of time in one condition. `what`: for a node its condition, for a task TRAINING, REGROUPING, WAITING or
    its end. `workers`: of a task.

    `tasks`: those whose workers a node carries.
    """

    start_us: int
    end_us: int
    what: str
    workers: int = 0
    tasks: tuple[str, ...] = ()


class WafPoint(NamedTuple):
    """The WAF from `at_us` on, weighted FLOP/s. `planned`: what the plan promises; `running`: what the groups that
    train reach."""

    at_us: int
    planned: int
    running: int


@dataclass
class Timeline(View):
    """The course of a log. Feed it every step in order, then call `finish`."""

    start_us: int = 0
    end_us: int = 0
    nodes: dict[str, list[TimelineSpan]] = field(default_factory=dict)
    tasks: dict[str, list[TimelineSpan]] = field(default_factory=dict)
    incidents: list[Incident] = field(default_factory=list)
    waf: list[WafPoint] = field(default_factory=list)
    state: ClusterState = field(default_factory=ClusterState)

    def feed(self, step: LogStep) -> None:
        """Add the next step."""
        before, _, self.state = step
        self.start_us = self.start_us or self.state.now_us
        self.end_us = self.state.now_us
        if isinstance(step.event, _ROUTINE):
            return
        if self.state.closed_incidents is not before.closed_incidents and self.state.closed_incidents:
            self.incidents.append(self.state.closed_incidents[-1])
        now_us = self.state.now_us
        if self.state.nodes is not before.nodes or self.state.tasks is not before.tasks:
            for node in self.state.nodes.values():
                _extend(self.nodes.setdefault(node.name, []), _node_span(self.state, node, now_us))
            for task in self.state.tasks.values():
                _extend(self.tasks.setdefault(task.name, []), _task_span(task, now_us))
        point = WafPoint(now_us, self.state.plan.waf, _running_waf(self.state))
        if not self.waf or self.waf[-1][1:] != point[1:]:
            self.waf.append(point)

    def finish(self) -> Timeline:
        """Close the timeline after the last entry: what is open lasts until the end."""
        for spans in (*self.nodes.values(), *self.tasks.values()):
            spans[-1] = spans[-1]._replace(end_us=self.end_us)
        self.incidents += self.state.incidents.values()
        return self


def _extend(spans: list[TimelineSpan], now: TimelineSpan) -> None:
    """End the last span where another condition begins."""
    if not spans:
        spans.append(now)
    elif spans[-1][2:] != now[2:]:
        spans[-1] = spans[-1]._replace(end_us=now.start_us)
        spans.append(now)


def _node_span(state: ClusterState, node: Node, now_us: int) -> TimelineSpan:
    tasks = tuple(
        task.name
        for task in state.tasks.values()
        if any(worker.node == node.name and worker.status is not WorkerStatus.LOST for worker in task.workers.values())
    )
    if node.status is NodeStatus.LOST:
        return TimelineSpan(now_us, now_us, NODE_LOST)
    if node.status is NodeStatus.LEFT:
        return TimelineSpan(now_us, now_us, NODE_LEFT)
    if node.isolation.active:
        return TimelineSpan(now_us, now_us, NODE_ISOLATED, tasks=tasks)
    return TimelineSpan(now_us, now_us, ", ".join(tasks) or NODE_IDLE, tasks=tasks)


def _task_span(task: Task, now_us: int) -> TimelineSpan:
    if task.status is not TaskStatus.ACTIVE:
        return TimelineSpan(now_us, now_us, task.status.value)
    members = task.membership.members if task.membership else ()
    if not members:
        return TimelineSpan(now_us, now_us, WAITING)
    whole = task.confirmed and all(task.workers[member.worker].can_train for member in members)
    return TimelineSpan(now_us, now_us, TRAINING if whole else REGROUPING, len(members))


def _running_waf(state: ClusterState) -> int:
    running, linear = 0, linear_flops(state)
    for task in state.tasks.values():
        span = _task_span(task, 0)
        if span.what == TRAINING:
            running += waf(task, span.workers, linear)
    return running
