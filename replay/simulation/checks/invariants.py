"""The rules that must hold, by name. Each is one small function that returns the story of its breach, or "".

Three moments: when an entry becomes durable, when a part of the cluster acts, and at rest after the faults have
stopped. Facts that are visible only while they happen are collected by checker.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from unicrond.agents.core.state import Action, Append, ArmTimer, Commanded, LogDecision
from unicrond.agents.core.worker_budgets import ReportDrops
from unicrond.agents.trainer.lifecycle.ledger import Total
from unicrond.agents.trainer.lifecycle.optimizer_shards import StatePart
from unicrond.core.decide import decide, needed_solves
from unicrond.core.nodes.gpu_types import node_types
from unicrond.core.nodes.outages import absence
from unicrond.core.planning.placement import place
from unicrond.core.planning.problem import Problem
from unicrond.core.planning.solution import Solution
from unicrond.core.planning.solver import solve
from unicrond.core.replayer import LogStep
from unicrond.core.rules.admission import FOLD_FAILS
from unicrond.core.rules.invariants import InvariantError, check
from unicrond.core.rules.survey import Survey
from unicrond.core.state.policy import Policy
from unicrond.core.state.state import ClusterState, NodeStatus, Severity, Task, TaskStatus
from unicrond.core.state.state_bytes import digest
from unicrond.core.state.work_ledger import open_books
from unicrond.core.tasks.reconcile import leaving_members
from unicrond.core.tasks.reshaping import layouts_of
from unicrond.core.worth.costs import settle
from unicrond.events import vocabulary as v
from unicrond.events.vocabulary.placements import expand, starts
from unicrond.events.wire.codec import encode
from unicrond.events.wire.envelope import Entry, Envelope, RecordedEvent
from unicrond.events.wire.schemas import schema_of
from unicrond.replay.simulation.checks.judgement import JUDGEMENT_RULES
from unicrond.replay.simulation.checks.one_way import ONE_WAY_RULES
from unicrond.replay.simulation.checks.outages import OUTAGE_RULES
from unicrond.replay.simulation.checks.speeds import SPEED_RULES
from unicrond.views.goodput import GoodputTotals, account_step, kinds_of, settle_totals
from unicrond.views.goodput_report import open_report, reading, report

#: Name -> sentence; a test compares docs/design/simulation.md with this table.
RULES: dict[str, str] = {
    "acknowledged_events_stay": "An acknowledged event is in the log, at its acknowledged number.",
    "newest_term_decides": "The log has no decision or command of an older term after a newer claim.",
    "leaders_stay": "No head takes over from one that lives and reaches the log; the log's own outage deposes none.",
    "decisions_take_effect": "Every decision of the ruling coordinator fits the state that it meets; none repeats.",
    "repeats_change_nothing": "An event that is in the log twice changes the state once.",
    "state_is_sound": "The coordinator's own invariants hold after every entry, and no fold raises.",
    "words_stay_at_home": "What a node says changes no task that it has nothing to do with, and no other node; of an"
    " honest one nothing is refused.",
    "costs_are_linear": "What an entry costs, in lines run, memory, decisions and their bytes, is linear in the cluster"
    " and in its own size.",
    "books_close": "What was delivered and each loss are between 0 and the whole, and add up to it.",
    "symptoms_are_no_incidents": "A broken connection opens no second incident of the same generation.",
    "plan_within_healthy_nodes": "A plan uses healthy nodes only, and no more than their slots.",
    "types_stay_apart": "A plan has all replicas of a task on one type of GPU.",
    "commands_can_be_read": "Commands use a schema that the agent reads and the coordinator may write.",
    "cordoned_nodes_stay_empty": "No worker starts on a cordoned node.",
    "innocents_stay": "No node without a fault is clearly to blame for broken connections.",
    "nodes_are_checked_empty": "A node whose failure is only expected is checked when no worker is on it.",
    "unchecked_nodes_stay_out": "A node isolated for its hardware returns after a check, or by an operator.",
    "layouts_are_the_plans": "Without a person no task gets a layout that the plan in force has not chosen.",
    "handovers_are_awaited": "A worker hands over before it is stopped for another layout, its node's deadline aside.",
    "ordered_faults_strike_once": "An ordered fault happens once, whatever is repeated.",
    "stale_commands_never_act": "An agent that has seen a newer term or epoch ignores older commands.",
    "honest_workers_are_heard": "Of what an honest worker says nothing waits or is dropped; fast saves may.",
    "generations_never_go_back": "A worker never gets an older membership after a newer one.",
    "slots_are_held_once": "No two living processes hold one GPU slot, no two one worker id (unless one never built).",
    "steps_have_one_membership": "All replicas that commit an iteration commit the same sums of one membership.",
    "micro_batches_used_once": "After every step the parameters equal those of training with each micro-batch once.",
    "sums_are_the_reference": "A fixed sum is the reference's, whoever computed what; loss and tokens are the batch's.",
    "states_are_whole": "A saved or taken state is whole, sharded or not.",
    "parts_are_of_one_step": "A replica's parts of sharded state are those after the last commit.",
    "parts_are_held_twice": "Members drop old parts only when all have the new ones, each part at two of them.",
    "reports_are_exact": "The samples that the log names for an iteration are exactly those of its global batch.",
    "trainers_agree": "The members of a group never contradict each other.",
    "nothing_crashes": "No input crashes a coordinator, an agent or a worker.",
    "coordinators_decide": "No coordinator stops deciding because of its own decisions.",
    "replay_equals_live": "The state of a living coordinator has the digest of a replay of the log.",
    "planned_ends_are_no_faults": "A node that returns after an end that it announced is no incident and no flap.",
    "incidents_close": "At rest no incident is open.",
    "decide_is_quiet_at_rest": "At rest `decide` asks for nothing.",
    "tasks_train": "At rest a task with enough healthy nodes trains and makes progress.",
    "states_have_copies": "At rest two nodes, if there are two, have a task's newest states in memory.",
    "memory_is_given_back": "At rest no node keeps states of a task that has ended.",
    "no_process_is_left": "At rest the living processes are exactly those in the state.",
    "one_agent_of_a_name": "At rest each node's name has one agent: the older of two has ended itself.",
    "nodes_are_seen": "At rest every node that runs is up and takes work.",
    **JUDGEMENT_RULES,
    **OUTAGE_RULES,
    **SPEED_RULES,
    **ONE_WAY_RULES,
}


_SAVE = v.CheckpointSaved.__name__


class Violation(AssertionError):
    """A rule is broken. `rule` is its name, `story` describes the breach."""

    def __init__(self, rule: str, story: str) -> None:
        super().__init__(f"{rule}: {story}")
        self.rule = rule
        self.story = story


# --- when an entry becomes durable ---------------------------------------------------------------


def planned_ends_are_no_faults(before: ClusterState, after: ClusterState, entry: RecordedEvent) -> str:
    """Check the events after a planned end. `after`: the state after the loss of a node that has announced its end, its
    return, or a report of the next agent before that."""
    event = entry.envelope.event
    if not isinstance(event, v.NodeJoined | v.NodeLost | v.NodeReturned | v.WorkerExited | v.ErrorReported):
        return ""
    node = before.nodes.get(event.node)
    if node is None or not node.left_on_purpose:
        return ""
    if isinstance(event, v.WorkerExited | v.ErrorReported) and entry.envelope.boot <= node.agent.boot:
        return ""  # a failure during the drain is one
    if after.incidents_total != before.incidents_total:
        return f"{type(event).__name__} of {event.node} opens an incident, though it had announced its end"
    node_after = after.nodes.get(event.node, node)
    returns_us = set(node_after.health.returns_us) - set(node.health.returns_us)
    return f"{event.node} has flapped" if returns_us else ""


def newest_term_decides(newest_term: int, entry: Entry) -> str:
    """Check the fence: see events/log/event_log.py."""
    if not isinstance(entry, RecordedEvent) or not isinstance(entry.envelope.event, v.Decision | v.Command):
        return ""
    if isinstance(entry.envelope.event, v.CoordinatorStarted) or entry.envelope.term == newest_term:
        return ""
    kind = type(entry.envelope.event).__name__
    return f"entry {entry.seq}: {kind} of term {entry.envelope.term}, while term {newest_term} rules"


def leaders_stay(claim: v.CoordinatorStarted, sound_for_s: float, limit_s: float) -> str:
    """Check a claim. `claim`: of another head than the one before, which lives. `sound_for_s`: for how long that one's
    link to the log has been sound; the log itself may have been away."""
    if sound_for_s < limit_s:
        return ""
    claimed = f"{claim.process} claims term {claim.term}"
    return f"{claimed} from a head that lives, and has reached the log for {sound_for_s:.1f} s"


def commands_can_be_read(basis: ClusterState, entry: RecordedEvent) -> str:
    """Check the schema of a command or decision. `basis`: the state that it was decided from."""
    event = entry.envelope.event
    if isinstance(event, v.CoordinatorStarted) or not isinstance(event, v.Decision | v.Command):
        return ""
    node = basis.nodes.get(event.node) if isinstance(event, v.Command) else None
    reads = min(basis.schema, node.agent.schema) if node is not None else basis.schema
    needs = schema_of(event)
    where = f"entry {entry.seq}: {type(event).__name__}"
    return f"{where} needs schema {needs}, its reader has {reads}" if needs > reads else ""


def decisions_take_effect(before: ClusterState, basis: ClusterState, entry: Entry) -> str:
    """Check the hold: a coordinator that does not wait for its own events decides again what it has decided. `basis`:
    the state that it was decided in."""
    if not isinstance(entry, RecordedEvent) or entry.envelope.term != before.term:
        return ""
    event, where = entry.envelope.event, f"entry {entry.seq}: {type(entry.envelope.event).__name__}"
    match event:
        case v.PlanAdopted(epoch=epoch) if epoch != before.plan.epoch + 1:
            return f"{where} has epoch {epoch} after {before.plan.epoch}"
        case v.MembershipDecided(task=name, generation=generation):
            task = before.tasks.get(name)
            if task is None or generation != task.generation + 1:
                return f"{where} of {name} has generation {generation} after {task.generation if task else 'nothing'}"
        case v.StartWorker(spec=spec) | v.StartWorkers(spec=spec):
            task, then = before.tasks.get(spec.name), basis.tasks.get(spec.name)
            for start in (event,) if isinstance(event, v.StartWorker) else starts(event):
                number = int(start.worker.rpartition(".")[2])
                if task is not None and start.worker in task.workers:
                    return f"{where} starts {start.worker}, which is there"
                if then is not None and number < then.numbers.next_worker:
                    return f"{where} starts {start.worker}, though {then.numbers.next_worker} is the next free number"
        case v.MembershipPart(task=name, generation=generation, part=part) if part > 1:
            task = before.tasks.get(name)
            telling = task.group.membership_parts if task is not None else None
            if telling is None or (telling.generation, telling.parts + 1) != (generation, part):
                return f"{where} {part} of {name}, generation {generation}, follows {telling}"
        case v.TransitionCompleted(incident=incident) if incident not in before.incidents:
            return f"{where} closes {incident}, which is not open"
    return ""


def repeats_change_nothing(before: ClusterState, after: ClusterState) -> str:
    """Check an entry whose event id was in the log before. `after`: the state with it."""
    names = [name for name in before.__struct_fields__ if name not in ("seq", "now_us", "duplicates")]
    changed = [name for name in names if getattr(before, name) != getattr(after, name)]
    return f"entry {after.seq} is a repetition and changed {', '.join(changed)}" if changed else ""


def state_is_sound(state: ClusterState) -> str:
    """Check the state by unicrond/core/rules/invariants.py, and that its last entry was folded without raising."""
    try:
        check(state)
    except InvariantError as error:
        return str(error)
    newest = state.refusals[-1] if state.refusals else None
    return newest.reason if newest and newest.seq == state.seq and newest.reason.startswith(FOLD_FAILS) else ""


def books_close(state: ClusterState) -> str:
    """Check the ledger of costs up to now."""
    return open_books(settle(state.ledger, state.now_us))


def goodput_closes(states: Sequence[ClusterState], entries: Sequence[Entry]) -> str:
    """Check goodput of the cluster and of each task. The report closes, whatever it is made of: the sums of tasks and
    causes are held against the ledger as well. `states[n]`: after entry n."""
    totals = GoodputTotals()
    for before, entry, after in zip(states, entries, states[1:], strict=False):
        totals = account_step(totals, LogStep(before, entry, after))
    state = states[min(len(states) - 1, len(entries))]
    return open_report(report(reading(totals, state), state)) or _other_books(totals, state)


def _other_books(totals: GoodputTotals, state: ClusterState) -> str:
    """Describe where tasks and causes do not add up to the ledger's parts; "" where they do."""
    ledger, totals = settle(state.ledger, state.now_us), settle_totals(totals, state.now_us)
    hits = [hit for kinds in kinds_of(totals, state).values() for hit in kinds.values()]
    sums = {
        "delivered": sum(map(int, totals.delivered.values())),
        "detection": sum(int(hit.detection) for hit in hits),
        "transition": sum(int(hit.transition) for hit in hits),
        "repeated": sum(int(hit.repeated) for hit in hits),
        "sub_health": sum(int(work) for causes in totals.short.values() for work in causes.values()),
    }
    texts = [f"{name} {work}, not {int(getattr(ledger, name))}" for name, work in sums.items()]
    return "; ".join(text for text, name in zip(texts, sums, strict=True) if sums[name] != int(getattr(ledger, name)))


def symptoms_are_no_incidents(state: ClusterState) -> str:
    """Check that a mere symptom has no incident beside the one that explains it. That the head hears nobody explains
    nothing: workers train on unheard, and break."""
    incidents = [incident for incident in state.incidents.values() if incident.kind != "head_deaf"]
    for incident in incidents:
        for second in incidents:
            shared = [task for task, broken in incident.generations.items() if second.generations.get(task) == broken]
            if incident is not second and incident.severity is Severity.SEV3 and shared:
                pair = f"{incident.id} ({incident.kind}) and {second.id} ({second.kind})"
                return f"entry {state.seq}: {pair} of {shared[0]} in generation {incident.generations[shared[0]]}"
    return ""


def plan_within_healthy_nodes(basis: ClusterState, plan: v.PlanAdopted, policy: Policy) -> str:
    """Check a plan. `basis`: the state that it was decided in. On nodes of an outage that is held it may leave what the
    plan before it had there."""
    assignments = [expand(assignment) for assignment in plan.assignments]
    absentees = absence(basis, policy).absentees
    seats = Counter(node for assignment in assignments for nodes in assignment.replicas for node in nodes)
    for name, count in seats.items():
        node = basis.nodes.get(name)
        healthy = node is not None and node.status is NodeStatus.UP and not node.isolation.active
        if name in absentees:
            old = _seats_on(name, basis.plan.assignments.values())
            if _seats_on(name, assignments) - old:
                return f"plan {plan.epoch} puts new workers on {name}, which is away"
        elif node is None or not healthy or count > node.slots:
            return f"plan {plan.epoch} puts {count} workers on {name}, which is {node}"
    return ""


def _seats_on(node: str, assignments: Iterable[v.TaskAssignment]) -> Counter[str]:
    """Count the seats of each task on the node."""
    shares = {assignment.task: assignment.replicas for assignment in assignments}
    return Counter(task for task, replicas in shares.items() for nodes in replicas for name in nodes if name == node)


def types_stay_apart(basis: ClusterState, plan: v.PlanAdopted) -> str:
    """Check a plan. `basis`: the state that it was decided in."""
    if not node_types(basis.nodes.values())[1]:
        return ""
    for assignment in map(expand, plan.assignments):
        types = sorted({basis.nodes[node].gpu for nodes in assignment.replicas for node in nodes})
        if len(types) > 1:
            return f"plan {plan.epoch} puts {assignment.task} on several types of GPU: {', '.join(types)}"
    return ""


def reports_are_exact(report: v.StepCommitted, samples: int, samples_digest: int) -> str:
    """Check a report against an independent computation for iterations first..last."""
    if (report.samples, report.samples_digest) == (samples, samples_digest):
        return ""
    return f"{report.task} {report.first}..{report.last}: {report.samples} samples, or the wrong ones"


# --- when a part of the cluster acts -------------------------------------------------------------


def cordoned_nodes_stay_empty(basis: ClusterState, start: v.StartWorker | v.StartWorkers) -> str:
    """Check a start. `basis`: the state that it was decided in."""
    cordoned = basis.nodes[start.node].cordon.active
    return f"{start.spec.name} gets workers on {start.node}, which is cordoned" if cordoned else ""


def nodes_are_checked_empty(basis: ClusterState, check: v.CheckNode) -> str:
    """Check the order of a health check. `basis`: the state that it was decided in."""
    node = basis.nodes[check.node]
    workers = [worker for _, worker in basis.by_node.on(node.name)]
    return f"{node.name} is checked, and {', '.join(workers)} on it" if node.health.failure_forecast and workers else ""


def innocents_stay(
    basis: ClusterState, isolated: v.NodeIsolated, touched: Collection[str], bad_ends: Collection[str], strikes_max: int
) -> str:
    """Check an isolation. `basis`: the state that it was decided in. `touched`: nodes that a fault names; `bad_ends`:
    those whose connections are at fault. Of two ends of a link either may be at fault, and one may be tried: that is a
    breach only if the blame was called clear. Where half of a task's nodes are bad ends, all its evidence accuses the
    others."""
    if isolated.node in touched:
        return ""
    for task in basis.tasks.values():
        nodes = {worker.node for worker in task.workers.values()} | {isolated.node}
        if 2 * len(nodes.intersection(bad_ends)) >= len(nodes):
            continue
        clear = (
            task.troubles.breaks.get(isolated.node, 0) - task.troubles.unclear_breaks.get(isolated.node, 0)
            >= strikes_max
        )
        if clear:
            return f"{isolated.node} is isolated, though it never had a fault: {isolated.reason}"
    return ""


def unchecked_nodes_stay_out(before: ClusterState, node: str, cleared: Collection[str]) -> str:
    """Check a readmission. `cleared`: what has happened to the node since it was isolated: "check", "repair",
    "person"."""
    previous = before.nodes.get(node)
    probation = previous.isolation.probation if previous else None
    if previous is None or probation is None or probation.cause != "hardware" or "person" in cleared:
        return ""
    if not before.check_limit_us:
        return ""  # the head has no checks
    if previous.health.repair_need in ("reboot", "replace", "other") and "repair" not in cleared:
        return f"{node} is readmitted, which needs {previous.health.repair_need}, and no operator has been there"
    return "" if "check" in cleared else f"{node} is readmitted unchecked: {previous.reason}"


def layouts_are_the_plans(before: ClusterState, entry: RecordedEvent) -> str:
    """Check a reshaping. `before`: the state that the entry meets."""
    event = entry.envelope.event
    if not isinstance(event, v.TaskReshaped) or not event.plan or entry.envelope.term != before.term:
        return ""
    assignment = before.plan.assignments.get(event.task)
    if assignment is not None and (before.plan.epoch, assignment.shape) == (event.plan, event.shape):
        return ""
    return f"entry {entry.seq} gives {event.task} {event.shape}, which plan {before.plan.epoch} has not chosen"


def handovers_are_awaited(basis: ClusterState, stop: v.StopWorker) -> str:
    """Check a stop. `basis`: the state that it was decided in."""
    task = basis.tasks.get(stop.task)
    if task is None or task.status is not TaskStatus.ACTIVE or task.reshaping.reshape is None:
        return ""
    if basis.nodes[stop.node].cordon.overdue:
        return ""  # a person wanted the node empty by then
    whole = [member.worker for member in leaving_members(task)]
    return f"{stop.worker} is stopped on its way out of its group" if stop.worker in whole else ""


def honest_workers_are_heard(node: str, actions: Sequence[Action]) -> str:
    """Check that an agent lets through what its workers say. Small models save more often than once a second, which is
    all that a worker has for it: the newest save stands for those before it."""
    for action in actions:
        if isinstance(action, ReportDrops) and set(action.counts) != {_SAVE}:
            return f"{node} drops what {action.worker} says: {action.counts}"
        if isinstance(action, ArmTimer) and action.name == "budget" and not action.key.endswith(f"/{_SAVE}"):
            return f"{node} holds back what a worker says: {action.key}"
    return ""


def fence_of(order: Commanded | LogDecision, highest: tuple[int, int]) -> tuple[int, int]:
    """Return the (term, epoch) of an order; a decision that a node reads holds in every epoch of its term."""
    if isinstance(order, Commanded):
        return order.term, order.command.epoch
    return order.term, highest[1] if order.term == highest[0] else 0


def stale_commands_never_act(
    node: str, highest: tuple[int, int], order: Commanded | LogDecision, actions: Sequence[Action]
) -> str:
    """Check the actions of an agent. `highest`: the newest (term, epoch) that the node ever received."""
    fence = fence_of(order, highest)
    acts = [action for action in actions if not isinstance(action, Append | ArmTimer)]
    if fence >= highest or not acts:
        return ""
    kind = type(order.command if isinstance(order, Commanded) else order.event).__name__
    return f"{node}: {kind} of {fence} after {highest} led to {acts[0]}"


def steps_have_one_membership(steps: Sequence[tuple[Total, int, str]], alive: Collection[str]) -> str:
    """Compare the commits of one iteration of one training. `steps`: the sums, the generation of the group, the worker
    of each.

    `alive`: workers that are not lost or stopped in the log. A node that is cut from the log may continue alone with a
    membership that is no longer in force; workers that the log considers lost are left out, all others must agree."""
    newest = max(generation for _, generation, _ in steps)
    ruling = [step for step in steps if step[1] == newest or step[2] in alive]
    for total, generation, worker in ruling:
        if total != ruling[0][0]:
            return (
                f"{worker} committed in generation {generation} with the sums of {total.generation}, "
                f"{ruling[0][2]} in generation {ruling[0][1]} with those of {ruling[0][0].generation}"
            )
    return ""


def micro_batches_used_once(params: Sequence[int], expected: Sequence[int]) -> str:
    """Compare the parameters: training is a function of the samples, so one too many, too few or twice shows."""
    return "" if params == expected else "the parameters are not those of a training without faults"


def sums_are_the_reference(spec: v.TaskSpec, total: Total, *, is_right: bool) -> str:
    """Check an iteration's sums. `is_right`: every bucket's sum is what it has to be."""
    if not spec.lanes:
        return ""
    if not is_right:
        return "a bucket's sum has another order, or other brackets, than the reference"
    actual = total.loss * total.tokens, total.tokens
    batch = float(spec.micro_batches), spec.global_batch
    return "" if actual == batch else f"loss and tokens are {actual}, not {batch}"


def states_are_whole(params: Sequence[int], optimizer: Sequence[int], expected: Sequence[int]) -> str:
    """Check a state. `optimizer`: the whole state of a sharded optimizer, () of another. `expected`: both, after that
    iteration."""
    for name, blocks in (("parameters", params), ("optimizer's state", optimizer)):
        if (blocks or name == "parameters") and tuple(blocks) != tuple(expected):
            wrong = [
                n
                for n, (block, expected_block) in enumerate(zip(blocks, expected, strict=False))
                if block != expected_block
            ]
            return f"blocks {wrong} of the {name} are of another step"
    return ""


def parts_are_of_one_step(blocks: Mapping[int, int], expected: Sequence[int]) -> str:
    """Check sharded state. `blocks`: the blocks of the optimizer's state that are present, by number."""
    wrong = [block for block, value in blocks.items() if value != expected[block]]
    return f"blocks {wrong} of the optimizer's state are of another step" if wrong else ""


def parts_are_held_twice(staged: Sequence[Sequence[tuple[StatePart, ...]]]) -> str:
    """Check the holders of the parts. `staged[m]`: what member m has staged in this division, then in later ones;
    nothing if it has not yet."""
    if waiting := [member for member, divisions in enumerate(staged) if not divisions]:
        return f"parts are dropped before members {waiting} have theirs"
    holders = Counter(part for divisions in staged for part in divisions[0])
    count = max(part.count for part in holders)
    few = [index for index in range(count) if holders[StatePart(count, index)] < min(2, count)]
    return f"parts {few} of {count} have too few holders" if few else ""


# --- at rest -------------------------------------------------------------------------------------


def acknowledged_events_stay(entries: Sequence[Entry], acknowledged: Iterable[tuple[int, Envelope]]) -> str:
    """Check that acknowledged events are in the log, with the numbers that it gave them."""
    for seq, envelope in acknowledged:
        entry = entries[seq - 1] if seq <= len(entries) else None
        if not isinstance(entry, RecordedEvent) or not _equal(entry.envelope, envelope):
            return f"{envelope.event_id} was acknowledged as entry {seq}; there stands {entry}"
    return ""


def _equal(logged: Envelope, acknowledged: Envelope) -> bool:
    return logged == acknowledged or encode(logged) == encode(acknowledged)  # a loss may be NaN


def replay_equals_live(live: ClusterState, replayed: ClusterState) -> str:
    """Compare the digests of two states at one entry."""
    if live.seq == replayed.seq and digest(live) == digest(replayed):
        return ""
    return f"entry {live.seq}: live {digest(live)}, replay {digest(replayed)} at {replayed.seq}"


def incidents_close(state: ClusterState) -> str:
    """List the open incidents."""
    return "; ".join(f"{i.id} {i.kind} of {i.node}: {i.message}" for i in state.incidents.values())


def decide_is_quiet_at_rest(state: ClusterState, policy: Policy) -> str:
    """Check that `decide` returns nothing, with every plan problem solved."""
    survey = Survey(state, policy)
    solutions: dict[Problem, Solution] = {problem: solve(problem) for problem in needed_solves(survey)}
    try:
        decisions = decide(survey, solutions)
    except Exception as error:  # a defect of ours, whatever it is, is what is looked for
        return f"it fails: {error!r}"
    return f"it asks for {decisions[0]}" if decisions else ""


def tasks_train(state: ClusterState, is_training: Mapping[str, bool]) -> str:
    """Check that tasks progress. `is_training`: tasks that have committed steps lately."""
    for task in state.tasks.values():
        if task.status is TaskStatus.ACTIVE and not is_training.get(task.name):
            assignment = state.plan.assignments.get(task.name)
            if assignment is not None and assignment.workers:
                return f"{task.name} has {assignment.workers} workers in the plan and commits no step"
            if _has_room(state, task):
                return f"{task.name} gets no workers, though {task.spec.min_workers} would find a seat"
    return ""


def _has_room(state: ClusterState, task: Task) -> bool:
    free = Counter({node.name: node.slots for node in state.nodes.values() if node.schedulable})
    for assignment in state.plan.assignments.values():
        free.subtract(node for nodes in assignment.replicas for node in nodes)
    slots = {name: max(0, count) for name, count in free.items()}
    types = node_types(state.nodes.values())[1]
    for shape in layouts_of(task.spec):
        replicas = -(-task.spec.min_workers // shape.workers)
        within = replicas * shape.workers <= task.spec.max_workers
        for gpu in sorted(set(types.values())) or [""]:
            pool = {name: count for name, count in slots.items() if types.get(name, "") == gpu}
            if within and not place({task.name: replicas}, {task.name: shape}, pool, {}).short:
                return True
    return False


def states_have_copies(state: ClusterState, copies: Mapping[str, int]) -> str:
    """Count the copies of states. `copies`: per task that trains, on how many nodes a new state of its every shard
    lies, at least."""
    required = min(2, sum(node.status is NodeStatus.UP for node in state.nodes.values()))
    few = {task: count for task, count in copies.items() if count < required}
    return "; ".join(f"new states of {task} lie on {count} of {required} nodes" for task, count in few.items())


def memory_is_given_back(state: ClusterState, keeping: Sequence[tuple[str, str]]) -> str:
    """Look for states of ended tasks. `keeping`: (node, task) of every state in memory."""
    ended = {task.name for task in state.tasks.values() if task.status is not TaskStatus.ACTIVE}
    return "; ".join(f"{node} keeps states of {task}" for node, task in sorted(keeping) if task in ended)


def no_process_is_left(state: ClusterState, living: Sequence[tuple[str, str, str]]) -> str:
    """Compare the processes with the state. `living`: (node, task, worker) of every process."""
    listed = {(w.node, task.name, w.worker) for task in state.tasks.values() for w in task.workers.values()}
    doomed = {(node.name, stray.task, stray.worker) for node in state.nodes.values() for stray in node.strays.values()}
    strays = [process for process in living if process not in listed | doomed]
    missing = [worker for worker in listed if worker not in living]
    parts = [f"{w} lives on {n} unknown" for n, _, w in strays] + [f"{w} on {n} does not live" for n, _, w in missing]
    return "; ".join(sorted(parts))


def one_agent_of_a_name(second: Sequence[str]) -> str:
    """Look for duplicate agents. `second`: names under which another machine's agent still lives beside the node's
    own."""
    return "; ".join(f"two agents of the name {name} live" for name in second)


def nodes_are_seen(state: ClusterState, running: Sequence[str]) -> str:
    """Check that running nodes are schedulable. `running`: nodes whose agent runs and can reach the log."""
    unseen = [name for name in running if name not in state.nodes or not state.nodes[name].schedulable]
    return "; ".join(f"{name} runs, and is {state.nodes.get(name)}" for name in unseen)
