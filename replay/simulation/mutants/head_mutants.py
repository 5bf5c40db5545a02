"""Planted bugs of the coordinator: its log, its fold and its decisions. See `table.py`."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

from msgspec.structs import replace

from unicrond.agents.shell.duplicate_agent import DuplicateAgents
from unicrond.core import fold
from unicrond.core.deciding import memberships
from unicrond.core.deciding import nodes as deciding_nodes
from unicrond.core.deciding import plans as deciding_plans
from unicrond.core.deciding import worker_placement as staff
from unicrond.core.deciding.batch import DecisionBatch
from unicrond.core.faults import blame
from unicrond.core.folding import deadlines, incidents, plans
from unicrond.core.folding import failure_counts as strikes
from unicrond.core.nodes import drains as departures
from unicrond.core.nodes import isolation, leadership
from unicrond.core.nodes.leadership import Candidacy
from unicrond.core.planning.feasibility import seats_of
from unicrond.core.planning.placement import place
from unicrond.core.planning.problem import Pool
from unicrond.core.rules import admission, plan_problems
from unicrond.core.state import changes, state
from unicrond.core.state.node_parts import Cordon
from unicrond.core.state.state import NodeStatus
from unicrond.core.tasks import reconcile
from unicrond.events import vocabulary as v
from unicrond.events.log.lease import LeaseEntry
from unicrond.replay.simulation.cluster.lease import MemoryLease
from unicrond.replay.simulation.cluster.log_client import Endpoint
from unicrond.replay.simulation.cluster.log_server import LogServer
from unicrond.replay.simulation.mutants.mutation import Mutant, patch, patch_fold
from unicrond.service.coordinator import coordinator, follower

# --- the coordinator -----------------------------------------------------------------------------


def _drop_the_hold() -> None:
    def make(append: Any) -> Any:
        """Wrap `append`."""

        async def without_hold(self: Any, events: Any) -> None:
            """Append, and forget the sequence number to wait for."""
            await append(self, events)
            self._hold_seq = 0

        return without_hold

    patch(coordinator.Coordinator, "_append", make)


def _skip_the_fence() -> None:
    def make(append: Any) -> Any:
        """Wrap `append`."""

        async def unfenced(self: Any, envelopes: Any, *, fence: Any = None) -> Any:
            """Append without the fence."""
            return await append(self, envelopes)

        return unfenced

    patch(Endpoint, "append", make)


def _rule_in_another_name() -> None:
    def make(require_sound_state: Any) -> Any:
        """Wrap `require_sound_state`."""

        def deaf(self: Any) -> None:
            """Adopt the newer term in place of ending."""
            require_sound_state(self)
            self._fence = self._fence._replace(term=max(self._fence.term, self.state.term))

        return deaf

    patch(coordinator.Coordinator, "_require_sound_state", make)


def _depose_at_once() -> None:
    """Acquire the lease as soon as it is free, whatever was the matter with the log."""
    patch(leadership, "GRACE_US", lambda _: 0)
    patch(leadership, "SILENT_US", lambda _: 0)
    patch(Candidacy, "beat", lambda _: lambda self, now_us: None)


def _fight_without_a_lease() -> None:
    """Let a fenced head take over again."""
    patch(Candidacy, "answered", lambda _: lambda self, entry, now_us, **how: "mutant")
    patch(MemoryLease, "acquire_or_renew_now", lambda _: lambda self, holder, after: LeaseEntry(1, holder))


# --- the fold ------------------------------------------------------------------------------------


def _forget_repetitions() -> None:
    original = fold.fold

    def forgetful(before: state.ClusterState, entry: Any) -> state.ClusterState:
        """Fold as if no number had been seen."""
        return original(replace(before, last_numbers={}), entry)

    patch(fold, "fold", lambda _: forgetful)
    patch(follower, "fold", lambda _: forgetful)


def _fold_what_must_not_be() -> None:
    patch(admission, "problem", lambda _: lambda before, event: "")
    patch(fold, "newly_broken", lambda _: lambda before, after, event: "")


def _believe_any_claim() -> None:
    patch(admission, "from_the_future", lambda _: lambda before, envelope: "")


def _skip_the_symptom_merge() -> None:
    patch(incidents, "blame", lambda _: incidents.open_incident)


def _blame_the_peers() -> None:
    def make(judge: Any) -> Any:
        """Wrap `judge`."""

        def other_ends(links: Any, record: Any, quality: Any) -> Any:
            """Blame the peers of the faulty nodes."""
            guilty = judge(links, record, quality).blamed
            peers = tuple(sorted({node for link in links for node in link} - {*guilty}))
            return blame.BlameVerdict(peers, peers)

        return other_ends

    patch(blame, "judge", make)


def _forget_lost_workers() -> None:
    def make(node_lost: Any) -> Any:
        """Wrap `node_lost`."""

        def forgetful(before: Any, event: Any, envelope: Any) -> Any:
            """Fold the loss, and remove the node's workers."""
            after = node_lost(before, event, envelope)
            for task in after.tasks.values():
                workers = [worker.worker for worker in task.workers.values() if worker.node == event.node]
                after = changes.with_task(after, changes.without_workers(task, workers))
            return after

        return forgetful

    patch_fold(v.NodeLost, make)


def _believe_no_stop() -> None:
    patch_fold(v.CommandApplied, lambda _: lambda before, event, envelope: before)


def _fold_by_the_machine() -> None:
    def make(worker_ready: Any) -> Any:
        """Wrap `worker_ready`."""

        def unsteady(before: Any, event: Any, envelope: Any) -> Any:
            """Fold, and put the machine's time into the state."""
            after = worker_ready(before, event, envelope)
            return replace(after, inert=time.perf_counter_ns())

        return unsteady

    patch_fold(v.WorkerReady, make)


# --- decide --------------------------------------------------------------------------------------


def _reuse_a_generation() -> None:
    def make(set_membership: Any) -> Any:
        """Wrap `set_membership`."""

        def reusing(batch: Any, task: Any, members: Any, **how: Any) -> None:
            """Decide the membership with the number of the one before."""
            if task.generation:
                task = replace(task, membership=replace(task.membership, generation=task.generation - 1))
            set_membership(batch, task, members, **how)

        return reusing

    patch(memberships, "set_membership", make)


def _command_in_new_words() -> None:
    patch(DecisionBatch, "add", lambda _: lambda self, event, readers=(): self.events.append(event))


def _double_start() -> None:
    def make(staff: Any) -> Any:
        """Wrap `staff`."""

        def twice(batch: Any, task: Any, policy: Any) -> None:
            """Start the missing workers, and start them again under other numbers."""
            staff(batch, task, policy)
            batch.started.clear()
            numbers = replace(task.numbers, next_worker=task.numbers.next_worker + 8)
            staff(batch, replace(task, numbers=numbers), policy)

        return twice

    patch(staff, "staff", make)


def _plan_with_isolated_nodes() -> None:
    def make(_: Any) -> Any:
        """Build the replacement."""
        return property(lambda self: self.status is not NodeStatus.LEFT)

    patch(state.Node, "schedulable", make)


def _keep_broken_replicas() -> None:
    def make(living_members: Any) -> Any:
        """Wrap `living_members`."""
        return lambda task: task.membership.members if task.membership else ()

    patch(reconcile, "living_members", make)


def _start_on_cordoned_nodes() -> None:
    def make(has_room: Any) -> Any:
        """Wrap `has_room`."""

        def anywhere(batch: Any, nodes: Any) -> bool:
            """Return whether there is room, cordoned nodes included."""
            nodes_in_service = {name: replace(node, cordon=Cordon()) for name, node in batch.state.nodes.items()}
            room = SimpleNamespace(state=replace(batch.state, nodes=nodes_in_service), slots_in_use=batch.slots_in_use)
            return bool(has_room(room, nodes))

        return anywhere

    in_service = property(lambda self: self.status is NodeStatus.UP and not self.isolation.active)
    patch(state.Node, "schedulable", lambda _: in_service)
    patch(reconcile, "schedulable", lambda schedulable: lambda nodes: (schedulable(nodes)[0], []))
    patch(DecisionBatch, "has_room", make)


def _find_no_hang() -> None:
    patch_fold(v.HangSuspected, lambda _: lambda before, event, envelope: before)


def _end_all_late_workers() -> None:
    def make(_: Any) -> Any:
        """Build the replacement."""

        def harsh(before: Any, task: Any, observed_at_us: int) -> Any:
            """Give up every late worker."""
            for worker in task.workers.values():
                if worker.alive and deadlines._is_late(task, worker):
                    before = strikes.give_up(before, task.name, worker, "hang", "is late", observed_at_us)
            return before

        return harsh

    patch(deadlines, "_meeting_missed", make)


def _order_again() -> None:
    patch_fold(v.InjectFault, lambda _: lambda before, event, envelope: before)


def _keep_states() -> None:
    patch(memberships, "drop_state", lambda _: lambda batch, task: None)


def _share_a_name() -> None:
    patch(DuplicateAgents, "note_beat", lambda _: lambda names, boot, now_s: None)


def _tell_no_peers() -> None:
    patch(memberships, "tell_peers", lambda _: lambda batch, task: None)


def _hurry_a_handover() -> None:
    def make(reshape: Any) -> Any:
        """Wrap `reshape`."""

        def at_once(batch: Any, task: Any, request: Any) -> None:
            """Reshape, and stop the leaving workers at once."""
            reshape(batch, task, request)
            for worker in task.leavers:
                batch.stop(task, worker, "hurry")

        return at_once

    patch(memberships, "reshape", make)


def _keep_an_old_choice() -> None:
    def make(request_layout: Any) -> Any:
        """Wrap `request_layout`."""

        def stubborn(before: Any, assignment: Any, epoch: int) -> Any:
            """Ignore the layout of a newer plan."""
            task = before.tasks.get(assignment.task)
            if task is not None and task.reshaping.plan:
                return before
            return request_layout(before, assignment, epoch)

        return stubborn

    patch(plans, "_request_layout", make)


def _mix_types() -> None:
    def make(_: Any) -> Any:
        """Build the replacement."""
        return lambda counts, shapes, nodes, current, types, *rules: place(counts, shapes, nodes, current, *rules)

    patch(deciding_plans, "place_apart", make)


def _one_pool_is_all() -> None:
    """Give the first type's pool the slots of all."""

    def make(room: Any) -> Any:
        """Wrap `room`."""

        def wide(survey: Any, slots: Any, tasks: Any, closed: Any = ()) -> Any:
            """Return the room with all slots in the first pool."""
            fields = room(survey, slots, tasks, closed)
            if not fields["pools"]:
                return fields
            first, *rest = fields["pools"]
            seats = seats_of(slots) if first.seats else ()
            return {**fields, "pools": (Pool(first.gpu, sum(slots.values()), seats), *rest)}

        return wide

    patch(plan_problems, "_room", make)


def _readmit_unchecked() -> None:
    def make(phase: Any) -> Any:
        """Wrap `phase`."""

        def trusting(cluster: Any, node: Any) -> Any:
            """Return the phase, with a check that is still to come as passed."""
            present = phase(cluster, node)
            return isolation.IsolationPhase.CLEARED if present is isolation.IsolationPhase.TO_CHECK else present

        return trusting

    patch(isolation, "phase", make)


def _believe_any_check() -> None:
    patch_fold(
        v.NodeChecked, lambda fold: lambda before, event, env: fold(before, replace(event, has_passed=True), env)
    )


def _check_what_needs_hands() -> None:
    patch(isolation, "needs_hands", lambda _: lambda node: False)


def _never_check() -> None:
    patch(deciding_nodes, "_check", lambda _: lambda batch, node: None)


def _no_deadlines() -> None:
    patch(coordinator, "deadlines", lambda _: lambda survey: {})


# --- the log -------------------------------------------------------------------------------------


def _acknowledge_before_the_disk() -> None:
    def make(_: Any) -> Any:
        """Build the replacement."""
        return lambda self, say: say()

    patch(LogServer, "_when_durable", make)


def _take_a_claim_for_another() -> None:
    def make(claim: Any) -> Any:
        """Wrap `claim`."""

        def by_id(self: Any, envelope: Any, reply: Any) -> None:
            """Claim with the newest claim of the same id."""
            newest = self._claims[-1].envelope if self._claims else envelope
            claim(self, newest if newest.event_id == envelope.event_id else envelope, reply)

        return by_id

    patch(LogServer, "claim", make)


def _keep_nodes_after_maintenance() -> None:
    def make(_: Any) -> Any:
        """Build the replacement."""

        def over(state: Any, window: str) -> Any:
            """Remove the window, and leave the nodes as they are."""
            return replace(state, windows={name: entry for name, entry in state.windows.items() if name != window})

        return over

    patch(departures, "_over", make)


HEAD_MUTANTS: dict[str, Mutant] = {
    "drop_the_hold": Mutant("the coordinator decides before it has read its own events", _drop_the_hold),
    "skip_the_fence": Mutant("appends carry no fence", _skip_the_fence),
    "rule_in_another_name": Mutant("an old coordinator reads a newer term and continues", _rule_in_another_name),
    "depose_at_once": Mutant("a head that stands by takes the lease as soon as it is free", _depose_at_once),
    "fight_without_a_lease": Mutant("every head gets the lease", _fight_without_a_lease),
    "forget_repetitions": Mutant("the fold counts a repeated event again", _forget_repetitions),
    "fold_what_must_not_be": Mutant("the fold accepts an event that breaks the state", _fold_what_must_not_be),
    "believe_any_claim": Mutant("a claim of any term counts, with any boot number", _believe_any_claim),
    "skip_the_symptom_merge": Mutant("every symptom opens its own incident", _skip_the_symptom_merge),
    "blame_the_peers": Mutant("the wrong endpoint of a broken link is evicted", _blame_the_peers),
    "forget_lost_workers": Mutant("the workers of a lost node are forgotten", _forget_lost_workers),
    "believe_no_stop": Mutant("the answer to a stop changes nothing", _believe_no_stop),
    "fold_by_the_machine": Mutant("the fold reads a clock", _fold_by_the_machine),
    "reuse_a_generation": Mutant("a membership gets the number of the one before", _reuse_a_generation),
    "double_start": Mutant("missing workers are started twice", _double_start),
    "plan_with_isolated_nodes": Mutant("plans use lost and isolated nodes", _plan_with_isolated_nodes),
    "keep_broken_replicas": Mutant("dead members stay members", _keep_broken_replicas),
    "command_in_new_words": Mutant("every node gets commands in the newest schema", _command_in_new_words),
    "start_on_cordoned_nodes": Mutant("cordoned nodes get workers", _start_on_cordoned_nodes),
    "keep_nodes_after_maintenance": Mutant("nodes stay empty after their window", _keep_nodes_after_maintenance),
    "find_no_hang": Mutant("no hang is ever found", _find_no_hang),
    "end_all_late_workers": Mutant("a regroup ends waiting workers with the late one", _end_all_late_workers),
    "order_again": Mutant("the coordinator repeats the command of an ordered fault", _order_again),
    "keep_states": Mutant("states of ended tasks stay in memory", _keep_states),
    "share_a_name": Mutant("an agent ignores a newer agent of its name", _share_a_name),
    "tell_no_peers": Mutant("copies of states ignore nodes that joined or left", _tell_no_peers),
    "hurry_a_handover": Mutant("a worker is stopped before it has handed its state over", _hurry_a_handover),
    "keep_an_old_choice": Mutant("a task gets the layout of an older plan", _keep_an_old_choice),
    "mix_types": Mutant("workers of a task are placed on any type of GPU", _mix_types),
    "one_pool_is_all": Mutant("the plan takes all nodes for the first type's", _one_pool_is_all),
    "readmit_unchecked": Mutant("an isolated node returns without a check", _readmit_unchecked),
    "believe_any_check": Mutant("a failed health check counts as passed", _believe_any_check),
    "check_what_needs_hands": Mutant("a node that needs a reboot returns after a check alone", _check_what_needs_hands),
    "never_check": Mutant("no health check is ordered", _never_check),
    "no_deadlines": Mutant("no deadline ever passes", _no_deadlines),
    "take_a_claim_for_another": Mutant("the log knows a claim by its id alone", _take_a_claim_for_another),
    "acknowledge_before_the_disk": Mutant("the log acknowledges what a crash can lose", _acknowledge_before_the_disk),
}
