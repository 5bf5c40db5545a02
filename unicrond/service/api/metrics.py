"""Prometheus metrics: computed from the folded state at each scrape, so that they cannot drift from it."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import StrEnum
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from unicrond.core.nodes.isolation import phase
from unicrond.core.nodes.liveness import OutboxBacklog
from unicrond.core.state.node_parts import Probation
from unicrond.core.state.state import ClusterState, Task, TaskStatus, WorkerStatus
from unicrond.core.state.work import achieved_waf, delivered_flop
from unicrond.core.worth.costs import costs_at
from unicrond.display.cluster_tables import NODE_STATUSES, node_status, stragglers
from unicrond.service.coordinator.alarms import Alarms
from unicrond.service.coordinator.code_identity import code_version
from unicrond.service.coordinator.surroundings import HeadViews
from unicrond.views.goodput_report import reading, report

TASK_GAUGES: dict[str, tuple[str, Callable[[Task], float]]] = {
    "unicron_task_iteration": ("Last committed iteration", lambda task: task.progress.iteration),
    "unicron_task_loss": ("Loss of the last committed iteration", lambda task: task.progress.loss or 0.0),
    "unicron_task_iteration_seconds": ("Duration of an iteration", lambda task: task.pace.iteration_us / 1e6),
    "unicron_task_generation": ("Generation of the membership", lambda task: task.generation),
    "unicron_task_members": (
        "Workers in the membership",
        lambda task: len(task.membership.members) if task.membership and task.status is TaskStatus.ACTIVE else 0,
    ),
    "unicron_task_delivered_flop": ("Weighted FLOP committed", delivered_flop),
}


class StateCollector(Collector):
    """The state, as Prometheus sees it. `get` returns the present state, `fault` why nothing is decided any more."""

    def __init__(
        self,
        get: Callable[[], ClusterState],
        alarms: Alarms,
        fault: Callable[[], str] = str,
        trouble: Callable[[], str] = str,
        outbox_backlog: Callable[[], Mapping[str, OutboxBacklog]] = dict,
        more: Callable[[], Iterable[Metric]] = list,
        leads: Callable[[], bool] = lambda: True,
        views: HeadViews | None = None,
    ) -> None:
        self._leads = leads
        self._get = get
        self._views = HeadViews() if views is None else views
        self._alarms = alarms
        self._fault = fault
        self._trouble = trouble
        self._outbox_backlog = outbox_backlog
        self._more = more

    def collect(self) -> Iterator[Metric]:
        """Yield one metric family for each question that a dashboard asks."""
        state = self._get()
        yield from self._process(state)
        yield _gauge("unicron_sequence", "Sequence number of the last folded entry", state.seq)
        yield _gauge("unicron_deciding", "0 once the coordinator has stopped deciding", 0 if self._fault() else 1)
        yield _gauge("unicron_leads", "1, or 0 while this head stands by", float(self._leads()))
        yield _gauge("unicron_term", "Term of the active coordinator", state.term)
        yield _gauge("unicron_plan_epoch", "Epoch of the adopted plan", state.plan.epoch)
        yield _gauge("unicron_plan_waf_flops", "Planned weighted achieved FLOP/s", state.plan.waf)
        yield _gauge("unicron_plan_healthy_waf_flops", "WAF of a plan for healthy nodes", state.plan.waf_if_healthy)
        yield _gauge("unicron_plan_took_seconds", "From the question to the adopted plan", state.plan.duration_us / 1e6)
        yield _gauge("unicron_log_takes_appends", "1, or 0 while the log accepts nothing", float(not self._trouble()))
        backlogs = self._outbox_backlog().items()
        text = "Observations that a node holds back"
        yield _labelled("unicron_outbox_backlog", text, "node", ((node, backlog.entries) for node, backlog in backlogs))
        text = "Age of the oldest of them"
        ages = ((node, backlog.oldest_us / 1e6) for node, backlog in backlogs)
        yield _labelled("unicron_outbox_backlog_seconds", text, "node", ages)
        text = "Weighted FLOP: delivered and the losses add up to failure_free (docs/design/planning.md)"
        costs = costs_at(state, state.now_us)._asdict().items()
        yield _labelled("unicron_work_flop", text, "kind", ((name.removesuffix("_flop"), flop) for name, flop in costs))
        yield from self._goodput(state)
        yield _counter("unicron_quarantined", "Messages in the log that are no events", state.quarantined_messages)
        text = "Invalid messages from known producers: facts or orders are missing"
        unreadable = ((producer, messages.count) for producer, messages in self._alarms.unreadable.items())
        yield _labelled("unicron_quarantined_known", text, "producer", unreadable, CounterMetricFamily)
        yield _counter("unicron_duplicates", "Events delivered again and ignored", state.duplicates)
        yield _counter("unicron_inert_decisions", "Decisions of an old term, ignored", state.inert)
        yield _counter("unicron_incidents", "Incidents ever opened", state.incidents_total)
        yield _gauge("unicron_incidents_open", "Incidents not yet healed", len(state.incidents))
        nodes, tasks = state.nodes.values(), state.tasks.values()
        by_status = Counter(node_status(node) for node in nodes)
        counts = ((status, by_status[status]) for status in NODE_STATUSES)
        yield _labelled("unicron_nodes", "Nodes by status, as unicronctl shows it", "status", counts)
        yield _by("unicron_tasks", "Tasks by status", "status", TaskStatus, [task.status for task in tasks])
        statuses = [worker.status for task in tasks for worker in task.workers.values()]
        yield _by("unicron_workers", "Workers by status", "status", WorkerStatus, statuses)
        isolated = [node for node in nodes if node.isolation.active]
        waits = ((node.name, phase(state, node).value, 1) for node in isolated)
        yield _labelled("unicron_node_isolated", "Isolated nodes, by phase", "node phase", waits)
        yield from _holds(state)
        failed = ((node.name, (node.isolation.probation or Probation()).attempts) for node in isolated)
        yield _labelled("unicron_node_failed_checks", "Failed checks and repairs", "node", failed)
        for name, (text, value) in TASK_GAUGES.items():
            yield _labelled(name, text, "task", ((task.name, value(task)) for task in tasks))
        text = "Achieved weighted FLOP/s since the first step"
        achieved = ((task.name, achieved_waf(task, state.now_us)) for task in tasks)
        yield _labelled("unicron_task_waf_flops", text, "task", achieved)
        text = "How many times as long as the other replicas a straggler takes per micro-batch; none: no straggler"
        slow = (
            (worker.worker.rpartition(".")[0], worker.worker, rank, worker.node, worker.factor)
            for rank, worker in stragglers(state)
        )
        yield _labelled("unicron_straggler_factor", text, "task worker rank node", slow)
        if state.closed_incidents:
            last = state.closed_incidents[-1]
            yield _gauge("unicron_last_detection_seconds", "Detection time, last incident", last.detection_us / 1e6)
            yield _gauge("unicron_last_transition_seconds", "Transition time, last incident", last.transition_us / 1e6)
        yield from self._more()

    def _process(self, state: ClusterState) -> Iterator[Metric]:
        """Yield what concerns this process, and what it has observed."""
        about = {"version": code_version(), "schema": str(state.schema), "python": platform.python_version()}
        yield InfoMetricFamily("unicron_build", "The coordinator's code", value=about)
        text = "Transitions by phase, since this process began (docs/operate/traces.md)"
        phases = SummaryMetricFamily("unicron_transition_phase_seconds", text, labels=["phase"])
        for name, lasted in self._views.spans.phases.items():
            phases.add_metric([name], lasted.times, lasted.total_us / 1e6)
        yield phases

    def _goodput(self, state: ClusterState) -> Iterator[Metric]:
        """Yield what `unicronctl goodput` says."""
        totals = self._views.goodput.totals
        if totals is None:
            return
        goodput = report(reading(totals, state), state)
        text = "Weighted FLOP: goodput and the badput by cause add up to failure_free (docs/operate/goodput.md)"
        work = goodput["cluster"]
        rows = [("goodput", "", work["goodput_flop"])]
        rows += [(part["group"], part["cause"], part["flop"]) for part in work["badput"]]
        yield _labelled("unicron_goodput_flop", text, "group cause", rows)
        tasks = goodput["tasks"]
        text = "Effective training time ratio since the task's submission"
        yield _labelled("unicron_task_ettr", text, "task", ((task["task"], task["ettr"] or 0.0) for task in tasks))
        times = ((task["task"], place, us / 1e6) for task in tasks for place, us in task["times_us"].items())
        yield _labelled("unicron_task_time_seconds", "Where the task's time went", "task in", times)
        text = "Times that an incident stopped the task's training"
        stops = ((task["task"], kind, n) for task in tasks for kind, n in task["interruptions_by_kind"].items())
        yield _labelled("unicron_task_interruptions", text, "task kind", stops, CounterMetricFamily)
        text = "Committed iterations that were trained again"
        iterations_lost = ((task["task"], task["iterations_lost"]) for task in tasks)
        yield _labelled("unicron_task_iterations_lost", text, "task", iterations_lost, CounterMetricFamily)
        text = "Closed incidents by kind and severity"
        closed = ((*kind.rsplit(" ", 1), n) for kind, n in goodput["incidents"].items())
        yield _labelled("unicron_incidents_closed", text, "kind severity", closed, CounterMetricFamily)
        text = "Points against a node (docs/operate/goodput.md#lemon-nodes)"
        scores = ((node["node"], node["score"]) for node in goodput["lemons"])
        yield _labelled("unicron_node_lemon_score", text, "node", scores)


def exposition(
    get: Callable[[], ClusterState],
    alarms: Alarms | None = None,
    fault: Callable[[], str] = str,
    trouble: Callable[[], str] = str,
    outbox_backlog: Callable[[], Mapping[str, OutboxBacklog]] = dict,
    more: Callable[[], Iterable[Metric]] = list,
    leads: Callable[[], bool] = lambda: True,
    views: HeadViews | None = None,
) -> Callable[[], bytes]:
    """Return a function that renders the text exposition format. `trouble`: why the log takes nothing, or "". `more`:
    the metrics of other parts of this process."""
    registry = CollectorRegistry(auto_describe=False)
    collector = StateCollector(get, alarms or Alarms(), fault, trouble, outbox_backlog, more, leads, views)
    registry.register(collector)  # type: ignore[no-untyped-call,unused-ignore]
    return lambda: generate_latest(registry)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, value=value)


def _holds(state: ClusterState) -> Iterator[Metric]:
    """Yield the mode, and the number of held decisions by action and limit."""
    yield _gauge("unicron_observes", "1 where the cluster is in mode observe", float(state.mode == "observe"))
    kinds = Counter((hold.action, hold.limit) for hold in state.holds.values()).items()
    numbers = ((action, limit, number) for (action, limit), number in kinds)
    yield _labelled("unicron_held_decisions", "Decisions that are held", "action limit", numbers)


def _counter(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(name, text, value=value)


def _by(name: str, text: str, label: str, kinds: type[StrEnum], values: Iterable[str]) -> Metric:
    counts = Counter(values)
    return _labelled(name, text, label, ((kind.value, counts[kind]) for kind in kinds))


def _labelled(
    name: str,
    text: str,
    labels: str,
    rows: Iterable[tuple[Any, ...]],
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily] = GaugeMetricFamily,
) -> Metric:
    """Return a family of `labels`, named with blanks between; in each row their values come first, then the number."""
    family = kind(name, text, labels=labels.split())
    for *values, number in rows:
        family.add_metric([str(value) for value in values], float(number))
    return family
