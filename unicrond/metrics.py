"""Prometheus metrics: computed from the folded state at each scrape, so that they cannot drift from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from unicrond.alarms import Alarms
from unicrond.cluster_tables import stragglers
from unicrond.costs import costs_at
from unicrond.isolation import phase
from unicrond.liveness import KeptBack
from unicrond.state import ClusterState, NodeStatus, Task, TaskStatus, WorkerStatus
from unicrond.work import achieved_waf, delivered_flop


class StateCollector(Collector):
    """The state, as Prometheus sees it. `get` returns the present state, `fault` why nothing is decided any more."""

    def __init__(
        self,
        get: Callable[[], ClusterState],
        alarms: Alarms,
        fault: Callable[[], str] = str,
        trouble: Callable[[], str] = str,
        kept_back: Callable[[], Mapping[str, KeptBack]] = dict,
    ) -> None:
        self._get = get
        self._alarms = alarms
        self._fault = fault
        self._trouble = trouble
        self._kept_back = kept_back

    def collect(self) -> Iterator[Metric]:
        """One family per question that a dashboard asks."""
        state = self._get()
        yield _gauge("unicron_sequence", "Sequence number of the last folded entry", state.seq)
        yield _gauge("unicron_deciding", "0 once the coordinator has stopped deciding", 0 if self._fault() else 1)
        yield _gauge("unicron_term", "Term of the active coordinator", state.term)
        yield _gauge("unicron_plan_epoch", "Epoch of the adopted plan", state.plan.epoch)
        yield _gauge("unicron_plan_waf_flops", "Planned weighted achieved FLOP/s", state.plan.waf)
        yield _gauge("unicron_plan_healthy_waf_flops", "WAF of a plan for healthy nodes", state.plan.healthy_waf)
        yield _gauge("unicron_plan_took_seconds", "From the question to the adopted plan", state.plan.took_us / 1e6)
        yield _gauge("unicron_log_takes_appends", "1, or 0 where the log takes nothing", float(not self._trouble()))
        yield from self._kept()
        yield self._costs(state)
        yield _counter("unicron_quarantined", "Messages in the log that are no valid events", state.quarantined)
        yield self._refused()
        yield _counter("unicron_duplicates", "Events delivered again and ignored", state.duplicates)
        yield _counter("unicron_inert_decisions", "Decisions of an old term, ignored", state.inert)
        yield _counter("unicron_incidents", "Incidents ever opened", state.incidents_total)
        yield _gauge("unicron_incidents_open", "Incidents not yet healed", len(state.incidents))
        yield _by("unicron_nodes", "Nodes by status", "status", NodeStatus, [n.status for n in state.nodes.values()])
        yield _by("unicron_tasks", "Tasks by status", "status", TaskStatus, [t.status for t in state.tasks.values()])
        statuses = [w.status for t in state.tasks.values() for w in t.workers.values()]
        yield _by("unicron_workers", "Workers by status", "status", WorkerStatus, statuses)
        yield from self._isolated(state)
        yield from self._tasks(state)
        yield self._stragglers(state)
        yield from self._last_incident(state)

    def _refused(self) -> Metric:
        text = "Messages that are no valid events, of those whom the cluster knows: facts or orders are missing"
        family = CounterMetricFamily("unicron_quarantined_known", text, labels=["producer"])
        for producer, refused in self._alarms.refused.items():
            family.add_metric([producer], refused.count)
        return family

    def _kept(self) -> Iterator[Metric]:
        entries = GaugeMetricFamily("unicron_kept_back", "Observations that a node cannot append", labels=["node"])
        oldest = GaugeMetricFamily("unicron_kept_back_seconds", "Age of the oldest of them", labels=["node"])
        for node, kept in self._kept_back().items():
            entries.add_metric([node], kept.entries)
            oldest.add_metric([node], kept.oldest_us / 1e6)
        yield entries
        yield oldest

    def _costs(self, state: ClusterState) -> Metric:
        text = "Weighted FLOP: delivered and the three losses add up to failure_free (docs/design/planning.md)"
        family = GaugeMetricFamily("unicron_work_flop", text, labels=["kind"])
        for name, flop in costs_at(state, state.now_us)._asdict().items():
            family.add_metric([name.removesuffix("_flop")], float(flop))
        return family

    def _isolated(self, state: ClusterState) -> Iterator[Metric]:
        """What isolated nodes wait for, and how often that came to nothing."""
        waits = GaugeMetricFamily("unicron_node_isolated", "Isolated nodes, by phase", labels=["node", "phase"])
        failed = GaugeMetricFamily("unicron_node_failed_checks", "Checks and repairs without success", labels=["node"])
        for node in state.nodes.values():
            if node.isolated:
                waits.add_metric([node.name, phase(state, node).value], 1.0)
                failed.add_metric([node.name], float(node.isolation.attempts if node.isolation else 0))
        yield waits
        yield failed

    def _tasks(self, state: ClusterState) -> Iterator[Metric]:
        families: dict[str, tuple[str, Callable[[Task], float]]] = {
            "unicron_task_iteration": ("Last committed iteration", lambda t: t.iteration),
            "unicron_task_loss": ("Loss of the last committed iteration", lambda t: t.loss or 0.0),
            "unicron_task_iteration_seconds": ("Duration of an iteration", lambda t: t.iteration_us / 1e6),
            "unicron_task_generation": ("Generation of the membership", lambda t: t.generation),
            "unicron_task_members": (
                "Workers in the membership",
                lambda t: len(t.membership.members) if t.membership else 0,
            ),
            "unicron_task_waf_flops": (
                "Achieved weighted FLOP/s since the first step",
                lambda t: achieved_waf(t, state.now_us),
            ),
            "unicron_task_delivered_flop": ("Weighted FLOP committed", delivered_flop),
        }
        for name, (text, value) in families.items():
            family = GaugeMetricFamily(name, text, labels=["task"])
            for task in state.tasks.values():
                family.add_metric([task.name], float(value(task)))
            yield family

    def _stragglers(self, state: ClusterState) -> Metric:
        text = "How many times as long as the other replicas a straggler takes per micro-batch; none: nobody straggles"
        family = GaugeMetricFamily("unicron_straggler_factor", text, labels=["task", "worker", "rank", "node"])
        for rank, one in stragglers(state):
            family.add_metric([one.worker.rpartition(".")[0], one.worker, str(rank), one.node], one.factor)
        return family

    def _last_incident(self, state: ClusterState) -> Iterator[Metric]:
        if state.closed:
            last = state.closed[-1]
            yield _gauge("unicron_last_detection_seconds", "Detection time, last incident", last.detection_us / 1e6)
            yield _gauge("unicron_last_transition_seconds", "Transition time, last incident", last.transition_us / 1e6)


def exposition(
    get: Callable[[], ClusterState],
    alarms: Alarms | None = None,
    fault: Callable[[], str] = str,
    trouble: Callable[[], str] = str,
    kept_back: Callable[[], Mapping[str, KeptBack]] = dict,
) -> Callable[[], bytes]:
    """A function that renders the text exposition format. `trouble`: why the log takes nothing, or ""."""
    registry = CollectorRegistry(auto_describe=False)
    collector = StateCollector(get, alarms or Alarms(), fault, trouble, kept_back)
    registry.register(collector)  # type: ignore[no-untyped-call,unused-ignore]
    return lambda: generate_latest(registry)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, value=value)


def _counter(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(name, text, value=value)


def _by(name: str, text: str, label: str, kinds: type, values: Iterable[str]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=[label])
    counts = Counter(values)
    for kind in kinds:  # type: ignore[attr-defined]
        family.add_metric([kind.value], counts[kind])
    return family
