"""Checks everything that happens against the rules (invariants.py); the first breach ends the run.

It folds the log by itself, entry by entry, from nothing: that is the replay that living coordinators are compared
with."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from unicrond.agents.core.state import Action, Append, Commanded, Input, LogDecision
from unicrond.agents.protocol.messages import GroupMembership
from unicrond.agents.protocol.sampling import DIGEST_MODULUS
from unicrond.agents.trainer.lifecycle.ledger import Total
from unicrond.agents.trainer.lifecycle.optimizer_shards import StatePart
from unicrond.core import fold as folding
from unicrond.core.state.policy import Policy
from unicrond.core.state.state import ClusterState
from unicrond.events import vocabulary as v
from unicrond.events.wire.codec import COORDINATOR
from unicrond.events.wire.envelope import Entry, Envelope, RecordedEvent
from unicrond.replay.simulation.checks import authority, costs
from unicrond.replay.simulation.checks import invariants as rules
from unicrond.replay.simulation.checks.invariants import Violation
from unicrond.replay.simulation.checks.one_way import OneWayRecord
from unicrond.replay.simulation.checks.outages import OutageRecord
from unicrond.replay.simulation.checks.people_record import PeopleRecord
from unicrond.replay.simulation.checks.ports import CheckedHost, CheckedProcess, CheckedReplica, Reference
from unicrond.replay.simulation.checks.speeds import SpeedRecord
from unicrond.replay.simulation.faults.boundary_events import is_forged
from unicrond.replay.simulation.models.weights import Blocks, WeightsState

#: No history comes near this.
_ENTRIES_MAX = 20_000


class InvariantChecker:
    """Receives every event of a simulation. `states[n]`: the replay after entry n. `breach` is set by the first
    breach."""

    def __init__(self) -> None:
        self.breach = asyncio.Event()
        self.violation: Violation | None = None
        self.states: list[ClusterState] = [ClusterState()]
        self.acknowledgements: list[tuple[int, Envelope]] = []
        self.reference: Reference
        self.hosts: Mapping[str, CheckedHost] = {}
        #: The newest iteration that any replica committed, per task.
        self.committed: dict[str, int] = {}
        self.steps = 0
        #: Per node, the boot of its last join.
        self.joined: dict[str, int] = {}
        #: Nodes that a fault names.
        self.touched: set[str] = set()
        self.bad_ends: set[str] = set()
        self.policy = Policy()
        #: What people bring: their tasks, and whether nothing but these may fail.
        self.people = PeopleRecord()
        self.outages = OutageRecord()
        self.ways = OneWayRecord()
        self.speeds = SpeedRecord()
        #: Called with each term that is claimed.
        self.on_claim: Callable[[v.CoordinatorStarted], object] = lambda _: None
        #: What was decided last on one state.
        self._batch: list[Envelope] = []
        self._ids: set[str] = set()
        self._term = 0
        self._spawned: dict[str, dict[str, CheckedProcess]] = {}
        self._fences: dict[str, tuple[int, int]] = {}
        self._generations: dict[str, int] = {}
        self._injections: set[str] = set()
        self._steps: dict[tuple[str, int, int], list[tuple[Total, int, str]]] = {}
        self._lineages = 0
        self._cleared: dict[str, set[str]] = {}
        self._checks: set[str] = set()
        #: By task and generation, what each member has staged, one division after the other.
        self._staged: dict[tuple[str, int], dict[int, list[tuple[StatePart, ...]]]] = {}

    @property
    def state(self) -> ClusterState:
        """Return the replay of all that is durable."""
        return self.states[-1]

    def record_breach(self, rule: str, story: str) -> None:
        """Record the breach of a rule, if `story` is not empty."""
        if story and self.violation is None:
            self.violation = Violation(rule, story)
            self.breach.set()

    # --- the log ---------------------------------------------------------------------------------

    def acknowledged(self, envelopes: Sequence[Envelope], seqs: Sequence[int]) -> None:
        """Note that a client received the acknowledgement of these."""
        for envelope, seq in zip(envelopes, seqs, strict=True):
            self.acknowledgements.append((seq, envelope))

    def on_entry(self, entry: Entry) -> None:  # noqa: C901  # one branch for each rule
        """Check an entry that has become durable."""
        before = self.state
        if isinstance(entry, RecordedEvent):
            after, story = costs.fold_exceeds(before, entry)
            self.record_breach("costs_are_linear", story or self._answers(before, entry, after))
        else:
            after = folding.fold(before, entry)
        self.states.append(after)
        if len(self.states) > _ENTRIES_MAX:
            self.record_breach(
                "decide_is_quiet_at_rest", f"more than {_ENTRIES_MAX} entries: something answers without end"
            )
        self.record_breach("state_is_sound", rules.state_is_sound(after))
        if after.ledger is not before.ledger:
            self.record_breach("books_close", rules.books_close(after))
        if not isinstance(entry, RecordedEvent):
            return
        envelope, event = entry.envelope, entry.envelope.event
        self.record_breach("words_stay_at_home", authority.words_stay_at_home(before, entry, after))
        if is_forged(envelope):
            return  # a stranger's events are subject to one rule alone: that the state is sound
        if envelope.event_id in self._ids:
            self.record_breach("repeats_change_nothing", rules.repeats_change_nothing(before, after))
            return
        self._ids.add(envelope.event_id)
        if isinstance(event, v.CoordinatorStarted):
            self._term = max(self._term, event.term)
            self.on_claim(event)
        if isinstance(event, v.NodeJoined):
            self.joined[event.node] = event.agent_boot
        self.record_breach("planned_ends_are_no_faults", rules.planned_ends_are_no_faults(before, after, entry))
        self.record_breach("newest_term_decides", rules.newest_term_decides(self._term, entry))
        self.record_breach("symptoms_are_no_incidents", rules.symptoms_are_no_incidents(after))
        if envelope.term and envelope.term == before.term:
            basis = self.states[envelope.based_on]
            self.record_breach("decisions_take_effect", rules.decisions_take_effect(before, basis, entry))
            self.record_breach("layouts_are_the_plans", rules.layouts_are_the_plans(before, entry))
            self.record_breach("commands_can_be_read", rules.commands_can_be_read(basis, entry))
        self._readmission(before, event, is_ruling=envelope.term == before.term)
        if isinstance(event, v.PlanAdopted):
            basis = self.states[envelope.based_on]
            self.record_breach("plan_within_healthy_nodes", rules.plan_within_healthy_nodes(basis, event, self.policy))
            self.record_breach("types_stay_apart", rules.types_stay_apart(basis, event))
        for rule, story in self.people.on_entry(before, self.states, entry, self.touched):
            self.record_breach(rule, story)
        for rule, story in self.outages.on_entry(before, self.states, entry, self.touched, self.policy):
            self.record_breach(rule, story)
        for rule, story in self.ways.on_entry(event):
            self.record_breach(rule, story)
        if envelope.term == before.term:
            self._ruling(self.states[envelope.based_on], event)
        if isinstance(event, v.StepCommitted) and event.task in after.tasks:
            spec = after.tasks[event.task].spec
            iterations = range(event.first, event.last + 1)
            expected = sum(self.reference.digest(spec, iteration) for iteration in iterations) % DIGEST_MODULUS
            samples = len(iterations) * spec.global_batch
            self.record_breach("reports_are_exact", rules.reports_are_exact(event, samples, expected))

    def _answers(self, before: ClusterState, entry: RecordedEvent, after: ClusterState) -> str:
        """Check what follows from an entry: of a stranger's what would be decided, of a decision those beside it."""
        envelope = entry.envelope
        if is_forged(envelope):
            boot, _ = after.last_numbers.get(COORDINATOR, (0, 0))
            return costs.look_exceeds(before, entry, after, self.policy) if boot == after.term > 0 else ""
        if not envelope.term or envelope.term != before.term:
            return ""
        if self._batch and (self._batch[0].term, self._batch[0].based_on) != (envelope.term, envelope.based_on):
            self._batch = []
        self._batch.append(envelope)
        return costs.decisions_exceed(self.states[envelope.based_on], self._batch)

    def _ruling(self, basis: ClusterState, event: v.AnyEvent) -> None:
        """Check a decision of the coordinator in office. `basis`: the state that it was decided in."""
        match event:
            case v.NodeIsolated():
                story = rules.innocents_stay(basis, event, self.touched, self.bad_ends, self.policy.strikes_max)
                self.record_breach("innocents_stay", story)
            case v.StartWorker() | v.StartWorkers():
                self.record_breach("cordoned_nodes_stay_empty", rules.cordoned_nodes_stay_empty(basis, event))
            case v.CheckNode():
                self.record_breach("nodes_are_checked_empty", rules.nodes_are_checked_empty(basis, event))
            case v.StopWorker():
                self.record_breach("handovers_are_awaited", rules.handovers_are_awaited(basis, event))

    def _readmission(self, before: ClusterState, event: v.AnyEvent, *, is_ruling: bool) -> None:
        match event:
            case v.NodeIsolated(node=node) if is_ruling:
                self._cleared[node] = set()
            case v.CheckNode(command_id=command_id) if is_ruling:
                self._checks.add(command_id)
            case v.NodeChecked(node=node, command_id=command_id, has_passed=True) if command_id in self._checks:
                self._cleared.setdefault(node, set()).add("check")
            case v.RepairEnded(node=node, has_passed=True) if is_ruling:
                self._cleared.setdefault(node, set()).add("repair")
            case v.NodeUncordoned(node=node):
                self._cleared.setdefault(node, set()).add("person")
            case v.NodeReadmitted(node=node) if is_ruling:
                cleared = self._cleared.get(node, set())
                self.record_breach("unchecked_nodes_stay_out", rules.unchecked_nodes_stay_out(before, node, cleared))

    # --- agents ----------------------------------------------------------------------------------

    def agent_acts(self, host: CheckedHost, agent_input: Input, actions: Sequence[Action]) -> None:
        """Check what an agent does on an input."""
        self.record_breach("honest_workers_are_heard", rules.honest_workers_are_heard(host.name, actions))
        # Without a memory the fence that it saw may not be written, or another machine of its name saw it.
        if isinstance(agent_input, Commanded | LogDecision) and host.remembers:
            highest = self._fences.get(host.name, (0, 0))
            story = rules.stale_commands_never_act(host.name, highest, agent_input, actions)
            self.record_breach("stale_commands_never_act", story)
            self._fences[host.name] = max(highest, rules.fence_of(agent_input, highest))
        if isinstance(agent_input, Commanded) and isinstance(agent_input.command, v.InjectFault) and host.remembers:
            self._strikes(agent_input.command, actions)

    def _strikes(self, command: v.InjectFault, actions: Sequence[Action]) -> None:
        if any(not isinstance(action, Append) for action in actions):
            if command.injection in self._injections:
                self.record_breach("ordered_faults_strike_once", f"{command.injection} strikes {command.node} again")
            self._injections.add(command.injection)

    def disk_lost(self, host: CheckedHost) -> None:
        """Note that the node has lost its memory, or will not store the next one."""
        self._fences.pop(host.name, None)
        self._spawned.pop(host.name, None)

    def worker_spawned(self, host: CheckedHost, process: CheckedProcess) -> None:
        """Check a process that a fork server starts."""
        for resident in host.processes:
            if resident.alive and resident.slot == process.slot:
                story = f"{host.name}: slot {process.slot} is given to {process.worker}; {resident.worker} holds it"
                self.record_breach("slots_are_held_once", story)
        machines = [node for node in self.hosts.values() if not (host.is_twin and node.name == host.name)]
        living = [p for node in machines for p in node.processes if p.alive]
        if any(resident.worker == process.worker for resident in living):
            self.record_breach("slots_are_held_once", f"{host.name}: {process.worker} is started while it lives")
        if host.remembers:
            processes = self._spawned.setdefault(host.name, {})
            earlier = processes.get(process.worker)
            if earlier is not None and earlier.has_built:  # else it died before it could do or report anything
                self.record_breach("slots_are_held_once", f"{host.name}: {process.worker} is started a second time")
            processes[process.worker] = process
        # Where a node has forgotten everything, an old command starts its worker once more: that process knows nothing.
        self._generations.pop(process.worker, None)

    def membership_received(self, task: str, worker: str, membership: GroupMembership) -> None:
        """Check a membership that a worker receives for the first time."""
        before = self._generations.get(worker, 0)
        if membership.generation < before:
            story = f"{worker} gets generation {membership.generation} of {task} after {before}"
            self.record_breach("generations_never_go_back", story)
        self._generations[worker] = max(before, membership.generation)

    # --- training --------------------------------------------------------------------------------

    def new_lineage(self, task: str) -> int:
        """Return the number of a training that begins, from the seed or from a checkpoint."""
        self._lineages += 1
        return self._lineages

    def regrouped(self, replica: CheckedReplica, membership: GroupMembership) -> None:
        """Check that the log holds the membership of the group that a replica has joined."""
        task = self.state.tasks.get(replica.task)
        if task is None or membership.generation > task.generation:
            story = f"{replica.lead_worker} trains in generation {membership.generation}, which the log does not hold"
            self.record_breach("steps_have_one_membership", story)

    def step_committed(
        self, replica: CheckedReplica, iteration: int, lineage: int, total: Total, params: Blocks
    ) -> None:
        """Check a step of a replica."""
        self.steps += 1
        where = f"{replica.lead_worker} at iteration {iteration}: "
        steps = self._steps.setdefault((replica.task, lineage, iteration), [])
        steps.append((total, replica.generation, replica.lead_worker))
        task = self.state.tasks.get(replica.task)
        alive = {name for name, worker in task.workers.items() if worker.alive} if task is not None else set()
        if story := rules.steps_have_one_membership(steps, alive):
            self.record_breach("steps_have_one_membership", where + story)
        if story := rules.micro_batches_used_once(params, self.reference.expected(replica.spec, iteration)):
            self.record_breach("micro_batches_used_once", where + story)
        self.committed[replica.task] = max(iteration, self.committed.get(replica.task, 0))

    def check_deal(
        self, replica: CheckedReplica, counts: Sequence[int], paces_s: tuple[float, ...], now_s: float
    ) -> None:
        """Check how an iteration was dealt that this replica's group has committed."""
        story = self.speeds.slow_is_dealt_less((replica.task, replica.generation), counts, paces_s, now_s)
        self.record_breach("slow_is_dealt_less", story)

    def summed(self, replica: CheckedReplica, total: Total, *, is_right: bool) -> None:
        """Check the sums of an iteration with which a replica is to step."""
        story = rules.sums_are_the_reference(replica.spec, total, is_right=is_right)
        self.record_breach("sums_are_the_reference", story and f"{replica.lead_worker}: {story}")

    def state_used(self, replica: CheckedReplica, action: str, iteration: int, state: WeightsState) -> None:
        """Check a whole state that is saved or loaded."""
        story = rules.states_are_whole(state.params, state.optimizer, self.reference.expected(replica.spec, iteration))
        self.record_breach(
            "states_are_whole", story and f"{replica.lead_worker} {action} iteration {iteration}: {story}"
        )

    def parts_staged(self, replica: CheckedReplica, rank: int, parts: Sequence[StatePart]) -> None:
        """Record the parts that a member of the present group has staged beside the old ones."""
        self._staged.setdefault((replica.task, replica.generation), {}).setdefault(rank, []).append(tuple(parts))

    def parts_adopted(
        self, replica: CheckedReplica, rank: int, size: int, iteration: int, blocks: Mapping[int, int]
    ) -> None:
        """Check that it has exactly what it had staged: these blocks of the optimizer's state, after `iteration`.
        `size`: members of its group."""
        where = f"{replica.lead_worker} after iteration {iteration}: "
        if story := rules.parts_are_of_one_step(blocks, self.reference.expected(replica.spec, iteration)):
            self.record_breach("parts_are_of_one_step", where + story)
        staged = self._staged[replica.task, replica.generation]
        division = len(staged[rank]) - 1
        if story := rules.parts_are_held_twice([staged.get(member, [])[division:] for member in range(size)]):
            self.record_breach("parts_are_held_twice", where + story)
