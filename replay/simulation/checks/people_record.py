"""What people bring to a simulation, and what is known of it: which tasks are garbage, and which of them fail now."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

from unicrond.core.state.state import ClusterState
from unicrond.events import vocabulary as v
from unicrond.events.wire.envelope import RecordedEvent
from unicrond.replay.simulation.checks import judgement as rules
from unicrond.replay.simulation.checks.judgement import PlanCauses


class PeopleRecord:
    """Checks every entry by the rules of judgement. `programs`: tasks that are garbage, or debug. `calm`: nothing of
    the cluster itself fails in this history."""

    def __init__(self) -> None:
        self.programs: set[str] = set()
        self.calm = True
        #: By task whose replicas differ here and there, the nodes that were to be checked for it.
        self.odd: dict[str, set[str]] = {}
        #: Whether a node whose last beat came at that time of the log was cut off together with all others, which still
        #: are.
        self.silenced: Callable[[int], bool] = lambda _: False
        #: Of `programs`, how often each has failed since its last step. Workers that end together are one failure: one
        #: that was started after it makes the next.
        self._failures: dict[str, int] = {}
        #: Of `programs`, the number of the first worker that is started after its last failure.
        self._next_worker: dict[str, int] = {}
        self._best: dict[str, int] = {}
        self._causes: PlanCauses | None = None
        #: When nodes were isolated, by the log's clock.
        self._isolations_us: list[int] = []
        #: Since when a node has been idle though a task wants it, seconds.
        self._idle_since_s: dict[str, float] = {}
        #: Since when a task has had more members than it may have.
        self._above_since_s: dict[str, float] = {}

    def on_entry(
        self, before: ClusterState, states: Sequence[ClusterState], entry: RecordedEvent, touched: Collection[str]
    ) -> Iterator[tuple[str, str]]:
        """Check an entry that has become durable, and yield (rule, story). `states`: see InvariantChecker."""
        event = entry.envelope.event
        match event:
            case v.WorkerExited(is_expected=False) | v.HangSuspected() if event.task in self.programs:
                self._count_failure(before, event)
            case v.StepCommitted(task=task, last=last) if last > self._best.get(task, 0):
                self._best[task] = last
                self._failures.pop(task, None)
        if not entry.envelope.term or entry.envelope.term != before.term:
            return
        basis = states[entry.envelope.based_on]
        yield "deaf_heads_judge_nobody", rules.deaf_heads_judge_nobody(basis, event, self.silenced)
        yield "observation_moves_nothing", rules.observation_moves_nothing(basis, event)
        match event:
            case v.NodeIsolated():
                accuser, is_for_bits, _ = event.reason.partition(": its replica ")
                if is_for_bits:
                    checked = self.odd.get(accuser.partition(" ")[0], set())
                    checked.add(event.node)
                    yield "other_bits_cost_one_check", rules.other_bits_cost_one_check(basis, event, accuser, checked)
                story = rules.programs_accuse_no_node(basis, event, self.programs, touched, calm=self.calm)
                yield "programs_accuse_no_node", story
                if event.node in before.nodes and not before.nodes[event.node].cordon.draining:
                    self._isolations_us.append(max(entry.recorded_at_us, before.now_us))
                story = rules.brakes_hold(before, basis, event.node, self._isolations_us)
                yield "brakes_hold", story
            case v.PlanAdopted():
                failing = {task.name: self._failures[task.name] for task in basis.active if task.name in self._failures}
                causes = rules.causes_of(basis)
                story = rules.programs_move_no_others(basis, event, failing, self._causes, causes)
                yield "programs_move_no_others", story
                yield "production_goes_first", rules.production_goes_first(basis, event, self.programs)
                self._causes = causes

    def _count_failure(self, before: ClusterState, event: v.WorkerExited | v.HangSuspected) -> None:
        if event.task in before.tasks and int(event.worker.rpartition(".")[2]) >= self._next_worker.get(event.task, 0):
            self._failures[event.task] = self._failures.get(event.task, 0) + 1
            self._next_worker[event.task] = before.tasks[event.task].numbers.next_worker

    def at_look(self, state: ClusterState, now_s: float) -> Iterator[tuple[str, str]]:
        """Look at the time that things have taken by now, and yield (rule, story)."""
        demand = rules.idle_nodes(state, self.programs) if self.calm else {}
        self._idle_since_s = {name: self._idle_since_s.get(name, now_s) for name in demand}
        idle_s = {name: now_s - since_s for name, since_s in self._idle_since_s.items()}
        yield "nodes_are_used", rules.nodes_are_used(idle_s, demand, rules.USED_WITHIN_S)
        above = rules.above_max(state)
        self._above_since_s = {name: self._above_since_s.get(name, now_s) for name in above}
        above_s = {name: now_s - since_s for name, since_s in self._above_since_s.items()}
        within_s = rules.HANDED_OVER_WITHIN_S if self.calm else rules.USED_WITHIN_S
        yield "members_stay_within_max", rules.members_stay_within_max(above_s, above, within_s)

    def unrest(self) -> Iterator[tuple[str, str]]:
        """Yield (rule, story) of what has yet to come to rest, by the last look."""
        yield "nodes_are_used", ", ".join(f"{name} is idle and wanted" for name in self._idle_since_s)
        yield "members_stay_within_max", ", ".join(f"{name} has too many members" for name in self._above_since_s)
