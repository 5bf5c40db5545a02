"""Sees everything that happens and holds it against the rules (invariants.py); the first breach ends the run.

It folds the log by itself, entry by entry, from nothing: that is the replay that living coordinators are compared with.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from agents.protocol.messages import Membership
from agents.protocol.sampling import DIGEST_MODULUS
from agents.state import Action, Append, Commanded, Input, Told
from agents.trainer.ledger import Total
from agents.trainer.sharded.parts import Part
from events import vocabulary as v
from events.envelope import Entry, Envelope, Recorded
from replay.simulation import invariants as rules
from replay.simulation.edges import is_forged
from replay.simulation.invariants import Violation
from replay.simulation.weights import Blocks, State
from unicrond.core import fold as folding
from unicrond.core.state import ClusterState

if TYPE_CHECKING:
    from replay.simulation.host import Host
    from replay.simulation.process import Process
    from replay.simulation.replica import Replica
    from replay.simulation.training import Training

#: No history comes near this.
_ENTRIES_MAX = 20_000


class Witness:
    """`states[n]`: the replay after entry n. `over` is set by the first breach."""

    def __init__(self) -> None:
        self.over = asyncio.Event()
        self.violation: Violation | None = None
        self.states: list[ClusterState] = [ClusterState()]
        self.acknowledgements: list[tuple[int, Envelope]] = []
        self.training: Training
        #: The newest iteration that any replica committed, per task.
        self.committed: dict[str, int] = {}
        self.steps = 0
        #: Per node, the boot of its last join.
        self.joined: dict[str, int] = {}
        #: Nodes that a fault names.
        self.touched: set[str] = set()
        self.bad_ends: set[str] = set()
        self.strikes_max = 1
        #: Told of each term that is claimed.
        self.on_claim: Callable[[v.CoordinatorStarted], object] = lambda _: None
        self._ids: set[str] = set()
        self._term = 0
        self._spawned: dict[str, dict[str, Process]] = {}
        self._fences: dict[str, tuple[int, int]] = {}
        self._told: dict[str, int] = {}
        self._struck: set[str] = set()
        self._steps: dict[tuple[str, int, int], list[tuple[Total, int, str]]] = {}
        self._lineages = 0
        self._cleared: dict[str, set[str]] = {}
        self._checks: set[str] = set()
        #: By task and generation, what each member has staged, one division after the other.
        self._staged: dict[tuple[str, int], dict[int, list[tuple[Part, ...]]]] = {}

    @property
    def state(self) -> ClusterState:
        """The replay of all that is durable."""
        return self.states[-1]

    def broke(self, rule: str, story: str) -> None:
        """A rule is broken, if there is a story to tell."""
        if story and self.violation is None:
            self.violation = Violation(rule, story)
            self.over.set()

    # --- the log ---------------------------------------------------------------------------------

    def acknowledged(self, envelopes: Sequence[Envelope], seqs: Sequence[int]) -> None:
        """A client was told that these are durable."""
        for envelope, seq in zip(envelopes, seqs, strict=True):
            self.acknowledgements.append((seq, envelope))

    def on_entry(self, entry: Entry) -> None:  # noqa: C901  # one branch for each rule
        """An entry has become durable."""
        before = self.state
        after = folding.fold(before, entry)
        self.states.append(after)
        if len(self.states) > _ENTRIES_MAX:
            self.broke("decide_is_quiet_at_rest", f"more than {_ENTRIES_MAX} entries: something answers without end")
        self.broke("state_is_sound", rules.state_is_sound(after))
        if not isinstance(entry, Recorded):
            return
        envelope, event = entry.envelope, entry.envelope.event
        if is_forged(envelope):
            return  # no rule is about what a stranger says, but that the state is sound
        if envelope.event_id in self._ids:
            self.broke("repeats_change_nothing", rules.repeats_change_nothing(before, after))
            return
        self._ids.add(envelope.event_id)
        if isinstance(event, v.CoordinatorStarted):
            self._term = max(self._term, event.term)
            self.on_claim(event)
        if isinstance(event, v.NodeJoined):
            self.joined[event.node] = event.agent_boot
        self.broke("planned_ends_are_no_faults", rules.planned_ends_are_no_faults(before, after, entry))
        self.broke("newest_term_decides", rules.newest_term_decides(self._term, entry))
        self.broke("symptoms_are_no_incidents", rules.symptoms_are_no_incidents(after))
        if envelope.term and envelope.term == before.term:
            known = self.states[envelope.based_on]
            self.broke("decisions_take_effect", rules.decisions_take_effect(before, known, entry))
            self.broke("layouts_are_the_plans", rules.layouts_are_the_plans(before, entry))
            self.broke("commands_can_be_read", rules.commands_can_be_read(known, entry))
        self._readmission(before, event, is_ruling=envelope.term == before.term)
        if isinstance(event, v.PlanAdopted):
            known = self.states[envelope.based_on]
            self.broke("plan_within_healthy_nodes", rules.plan_within_healthy_nodes(known, event))
            self.broke("types_stay_apart", rules.types_stay_apart(known, event))
        if isinstance(event, v.NodeIsolated) and envelope.term == before.term:
            known = self.states[envelope.based_on]
            story = rules.innocents_stay(known, event, self.touched, self.bad_ends, self.strikes_max)
            self.broke("innocents_stay", story)
        if isinstance(event, v.StartWorker | v.StartWorkers) and envelope.term == before.term:
            known = self.states[envelope.based_on]
            self.broke("cordoned_nodes_stay_empty", rules.cordoned_nodes_stay_empty(known, event))
        if isinstance(event, v.CheckNode) and envelope.term == before.term:
            known = self.states[envelope.based_on]
            self.broke("nodes_are_checked_empty", rules.nodes_are_checked_empty(known, event))
        if isinstance(event, v.StopWorker) and envelope.term == before.term:
            known = self.states[envelope.based_on]
            self.broke("handovers_are_awaited", rules.handovers_are_awaited(known, event))
        if isinstance(event, v.StepCommitted) and event.task in after.tasks:
            spec = after.tasks[event.task].spec
            iterations = range(event.first, event.last + 1)
            expected = sum(self.training.digest(spec, iteration) for iteration in iterations) % DIGEST_MODULUS
            samples = len(iterations) * spec.global_batch
            self.broke("reports_are_exact", rules.reports_are_exact(event, samples, expected))

    def _readmission(self, before: ClusterState, event: v.AnyEvent, *, is_ruling: bool) -> None:
        match event:
            case v.NodeIsolated(node=node) if is_ruling:
                self._cleared[node] = set()
            case v.CheckNode(command_id=command_id) if is_ruling:
                self._checks.add(command_id)
            case v.NodeChecked(node=node, command_id=command_id, passed=True) if command_id in self._checks:
                self._cleared.setdefault(node, set()).add("check")
            case v.RepairEnded(node=node, passed=True) if is_ruling:
                self._cleared.setdefault(node, set()).add("repair")
            case v.NodeUncordoned(node=node):
                self._cleared.setdefault(node, set()).add("person")
            case v.NodeReadmitted(node=node) if is_ruling:
                cleared = self._cleared.get(node, set())
                self.broke("unchecked_nodes_stay_out", rules.unchecked_nodes_stay_out(before, node, cleared))

    # --- agents ----------------------------------------------------------------------------------

    def agent_acts(self, host: Host, given: Input, actions: Sequence[Action]) -> None:
        """An agent has handled an input."""
        # Without a memory the fence that it saw may not be written, or another machine of its name saw it.
        if isinstance(given, Commanded | Told) and host.remembers:
            highest = self._fences.get(host.name, (0, 0))
            story = rules.stale_commands_never_act(host.name, highest, given, actions)
            self.broke("stale_commands_never_act", story)
            self._fences[host.name] = max(highest, rules.fence_of(given, highest))
        if isinstance(given, Commanded) and isinstance(given.command, v.InjectFault) and host.remembers:
            self._strikes(given.command, actions)

    def _strikes(self, command: v.InjectFault, actions: Sequence[Action]) -> None:
        if any(not isinstance(action, Append) for action in actions):
            if command.injection in self._struck:
                self.broke("ordered_faults_strike_once", f"{command.injection} strikes {command.node} again")
            self._struck.add(command.injection)

    def disk_lost(self, host: Host) -> None:
        """The node remembers nothing, or will not remember what comes."""
        self._fences.pop(host.name, None)
        self._spawned.pop(host.name, None)

    def worker_spawned(self, host: Host, process: Process) -> None:
        """A fork server starts a process."""
        for other in host.processes:
            if other.alive and other.slot == process.slot:
                story = f"{host.name}: slot {process.slot} is given to {process.worker}; {other.worker} holds it"
                self.broke("slots_are_held_once", story)
        others = [node for node in self.training.hosts.values() if not (host.is_twin and node.name == host.name)]
        living = [p for node in others for p in node.processes if p.alive]
        if any(other.worker == process.worker for other in living):
            self.broke("slots_are_held_once", f"{host.name}: {process.worker} is started while it lives")
        if host.remembers:
            spawned = self._spawned.setdefault(host.name, {})
            earlier = spawned.get(process.worker)
            if earlier is not None and earlier.has_built:  # else it died before it could do anything, or be heard of
                self.broke("slots_are_held_once", f"{host.name}: {process.worker} is started a second time")
            spawned[process.worker] = process
        # Where a node has forgotten everything, an old command starts its worker once more: that process knows nothing.
        self._told.pop(process.worker, None)

    def worker_told(self, task: str, worker: str, membership: Membership) -> None:
        """A worker hears of a membership for the first time."""
        before = self._told.get(worker, 0)
        if membership.generation < before:
            story = f"{worker} gets generation {membership.generation} of {task} after {before}"
            self.broke("generations_never_go_back", story)
        self._told[worker] = max(before, membership.generation)

    # --- training --------------------------------------------------------------------------------

    def new_lineage(self, task: str) -> int:
        """A training begins, from the seed or from a checkpoint; its number."""
        self._lineages += 1
        return self._lineages

    def regrouped(self, replica: Replica, membership: Membership) -> None:
        """A replica is in a group: the log must hold its membership."""
        task = self.state.tasks.get(replica.task)
        if task is None or membership.generation > task.generation:
            story = f"{replica.lead_worker} trains in generation {membership.generation}, which the log does not hold"
            self.broke("steps_have_one_membership", story)

    def step_committed(self, replica: Replica, iteration: int, lineage: int, total: Total, params: Blocks) -> None:
        """A replica has stepped."""
        self.steps += 1
        where = f"{replica.lead_worker} at iteration {iteration}: "
        steps = self._steps.setdefault((replica.task, lineage, iteration), [])
        steps.append((total, replica.generation, replica.lead_worker))
        task = self.state.tasks.get(replica.task)
        alive = {name for name, worker in task.workers.items() if worker.alive} if task is not None else set()
        if story := rules.steps_have_one_membership(steps, alive):
            self.broke("steps_have_one_membership", where + story)
        if story := rules.micro_batches_used_once(params, self.training.expected(replica.spec, iteration)):
            self.broke("micro_batches_used_once", where + story)
        self.committed[replica.task] = max(iteration, self.committed.get(replica.task, 0))

    def summed(self, replica: Replica, total: Total, *, is_right: bool) -> None:
        """A replica has an iteration's sums, and goes on to step with them."""
        story = rules.sums_are_the_reference(replica.spec, total, is_right=is_right)
        self.broke("sums_are_the_reference", story and f"{replica.lead_worker}: {story}")

    def state_used(self, replica: Replica, what: str, iteration: int, state: State) -> None:
        """A whole state is saved, or taken."""
        story = rules.states_are_whole(state.params, state.optimizer, self.training.expected(replica.spec, iteration))
        self.broke("states_are_whole", story and f"{replica.lead_worker} {what} iteration {iteration}: {story}")

    def parts_staged(self, replica: Replica, rank: int, parts: Sequence[Part]) -> None:
        """A member of the present group has these parts beside the old ones."""
        self._staged.setdefault((replica.task, replica.generation), {}).setdefault(rank, []).append(tuple(parts))

    def parts_adopted(self, replica: Replica, rank: int, size: int, iteration: int, blocks: Mapping[int, int]) -> None:
        """It holds what it has staged, and nothing else: these blocks of the optimizer's state, after `iteration`.
        `size`: members of its group."""
        where = f"{replica.lead_worker} after iteration {iteration}: "
        if story := rules.parts_are_of_one_step(blocks, self.training.expected(replica.spec, iteration)):
            self.broke("parts_are_of_one_step", where + story)
        staged = self._staged[replica.task, replica.generation]
        division = len(staged[rank]) - 1
        if story := rules.parts_are_held_twice([staged.get(member, [])[division:] for member in range(size)]):
            self.broke("parts_are_held_twice", where + story)
