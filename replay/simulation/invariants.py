"""What must hold, by name. Each rule is one small function that returns the story of its breach, or "".

Three moments: when an entry becomes durable, when somebody acts, and at rest after the faults have stopped. What is
only known while it happens is collected by witness.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from agents.state import Action, Append, ArmTimer, Commanded, Told
from agents.trainer.ledger import Total
from agents.trainer.sharded.parts import Part
from events import vocabulary as v
from events.codec import encode
from events.envelope import Entry, Envelope, Recorded
from events.schemas import schema_of
from events.seats import expanded, starts
from unicrond.core.decide import decide, needed_solves
from unicrond.core.gpu_types import told_types
from unicrond.core.invariants import InvariantError, check
from unicrond.core.planning.placement import place
from unicrond.core.planning.problem import Problem
from unicrond.core.planning.solver import Solution, solve
from unicrond.core.policy import Policy
from unicrond.core.reconcile import leaving_members
from unicrond.core.reshaping import layouts_of
from unicrond.core.state import ClusterState, NodeStatus, Severity, Task, TaskStatus
from unicrond.core.state_bytes import digest
from unicrond.core.survey import Survey

#: Name -> what it says; docs/design/simulation.md is held to this table by a test.
RULES: dict[str, str] = {
    "acknowledged_events_stay": "An acknowledged event is in the log, at its acknowledged number.",
    "newest_term_decides": "The log has no decision or command of an older term after a newer claim.",
    "leaders_stay": "No head takes over from one that lives and reaches the log; the log's own outage deposes none.",
    "decisions_take_effect": "Every decision of the ruling coordinator fits the state that it meets; none repeats.",
    "repeats_change_nothing": "An event that is in the log twice changes the state once.",
    "state_is_sound": "The coordinator's own invariants hold after every entry.",
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
}


class Violation(AssertionError):
    """A rule is broken. `rule` is its name, `story` what was seen."""

    def __init__(self, rule: str, story: str) -> None:
        super().__init__(f"{rule}: {story}")
        self.rule = rule
        self.story = story


# --- when an entry becomes durable ---------------------------------------------------------------


def planned_ends_are_no_faults(before: ClusterState, after: ClusterState, entry: Recorded) -> str:
    """`after`: the loss of a node that has announced its end, its return, or what the next agent tells before that."""
    event = entry.envelope.event
    if not isinstance(event, v.NodeJoined | v.NodeLost | v.NodeReturned | v.WorkerExited | v.ErrorReported):
        return ""
    node = before.nodes.get(event.node)
    if node is None or not node.left_on_purpose:
        return ""
    if isinstance(event, v.WorkerExited | v.ErrorReported) and entry.envelope.boot <= node.agent_boot:
        return ""  # a failure during the drain is one
    if after.incidents_total != before.incidents_total:
        return f"{type(event).__name__} of {event.node} opens an incident, though it had announced its end"
    returned = set(after.nodes[event.node].returns_us) - set(node.returns_us) if event.node in after.nodes else None
    return f"{event.node} has flapped" if returned else ""


def newest_term_decides(newest_term: int, entry: Entry) -> str:
    """The fence: see events/log.py."""
    if not isinstance(entry, Recorded) or not isinstance(entry.envelope.event, v.Decision | v.Command):
        return ""
    if isinstance(entry.envelope.event, v.CoordinatorStarted) or entry.envelope.term == newest_term:
        return ""
    kind = type(entry.envelope.event).__name__
    return f"entry {entry.seq}: {kind} of term {entry.envelope.term}, while term {newest_term} rules"


def leaders_stay(claim: v.CoordinatorStarted, well_s: float, sound_s: float) -> str:
    """`claim`: of another head than the one before, which lives. `well_s`: for how long that one's way to the log has
    been sound; the log itself may have been away."""
    if well_s < sound_s:
        return ""
    return (
        f"{claim.process} claims term {claim.term} from a head that lives, and has reached the log for {well_s:.1f} s"
    )


def commands_can_be_read(known: ClusterState, entry: Recorded) -> str:
    """`known`: the state that it was decided from."""
    event = entry.envelope.event
    if isinstance(event, v.CoordinatorStarted) or not isinstance(event, v.Decision | v.Command):
        return ""
    node = known.nodes.get(event.node) if isinstance(event, v.Command) else None
    reads = min(known.schema, node.schema) if node is not None else known.schema
    needs = schema_of(event)
    where = f"entry {entry.seq}: {type(event).__name__}"
    return f"{where} needs schema {needs}, its reader has {reads}" if needs > reads else ""


def decisions_take_effect(before: ClusterState, known: ClusterState, entry: Entry) -> str:
    """The hold: a coordinator that does not wait for its own events decides again what it has decided. `known`: the
    state that it was decided in."""
    if not isinstance(entry, Recorded) or entry.envelope.term != before.term:
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
            task, then = before.tasks.get(spec.name), known.tasks.get(spec.name)
            for start in (event,) if isinstance(event, v.StartWorker) else starts(event):
                number = int(start.worker.rpartition(".")[2])
                if task is not None and start.worker in task.workers:
                    return f"{where} starts {start.worker}, which is there"
                if then is not None and number < then.numbers.next_worker:
                    return f"{where} starts {start.worker}, though {then.numbers.next_worker} is the next free number"
        case v.MembershipPart(task=name, generation=generation, part=part) if part > 1:
            task = before.tasks.get(name)
            telling = task.group.telling if task is not None else None
            if telling is None or (telling.generation, telling.parts + 1) != (generation, part):
                return f"{where} {part} of {name}, generation {generation}, follows {telling}"
        case v.TransitionCompleted(incident=incident) if incident not in before.incidents:
            return f"{where} closes {incident}, which is not open"
    return ""


def repeats_change_nothing(before: ClusterState, after: ClusterState) -> str:
    """`after` an entry whose event id stood in the log before."""
    names = [name for name in before.__struct_fields__ if name not in ("seq", "now_us", "duplicates")]
    changed = [name for name in names if getattr(before, name) != getattr(after, name)]
    return f"entry {after.seq} is a repetition and changed {', '.join(changed)}" if changed else ""


def state_is_sound(state: ClusterState) -> str:
    """unicrond/core/invariants.py."""
    try:
        check(state)
    except InvariantError as error:
        return str(error)
    return ""


def symptoms_are_no_incidents(state: ClusterState) -> str:
    """What is only a symptom stands alone, or belongs to what explains it."""
    incidents = list(state.incidents.values())
    for incident in incidents:
        for other in incidents:
            shared = [task for task, broken in incident.generations.items() if other.generations.get(task) == broken]
            if incident is not other and incident.severity is Severity.SEV3 and shared:
                pair = f"{incident.id} ({incident.kind}) and {other.id} ({other.kind})"
                return f"entry {state.seq}: {pair} of {shared[0]} in generation {incident.generations[shared[0]]}"
    return ""


def plan_within_healthy_nodes(known: ClusterState, plan: v.PlanAdopted) -> str:
    """`known`: the state that the plan was made in."""
    assignments = [expanded(assignment) for assignment in plan.assignments]
    seats = Counter(node for assignment in assignments for nodes in assignment.replicas for node in nodes)
    for name, count in seats.items():
        node = known.nodes.get(name)
        healthy = node is not None and node.status is NodeStatus.UP and not node.isolated
        if node is None or not healthy or count > node.slots:
            return f"plan {plan.epoch} puts {count} workers on {name}, which is {node}"
    return ""


def types_stay_apart(known: ClusterState, plan: v.PlanAdopted) -> str:
    """`known`: the state that the plan was made in."""
    if not told_types(known.nodes.values())[1]:
        return ""
    for each in map(expanded, plan.assignments):
        types = sorted({known.nodes[node].gpu for nodes in each.replicas for node in nodes})
        if len(types) > 1:
            return f"plan {plan.epoch} puts {each.task} on several types of GPU: {', '.join(types)}"
    return ""


def reports_are_exact(report: v.StepCommitted, samples: int, samples_digest: int) -> str:
    """Against what an independent computation says of iterations first..last."""
    if (report.samples, report.samples_digest) == (samples, samples_digest):
        return ""
    return f"{report.task} {report.first}..{report.last}: {report.samples} samples, or the wrong ones"


# --- when somebody acts --------------------------------------------------------------------------


def cordoned_nodes_stay_empty(known: ClusterState, start: v.StartWorker | v.StartWorkers) -> str:
    """`known`: the state that the start was decided in."""
    cordoned = known.nodes[start.node].cordoned
    return f"{start.spec.name} gets workers on {start.node}, which is cordoned" if cordoned else ""


def nodes_are_checked_empty(known: ClusterState, check: v.CheckNode) -> str:
    """`known`: the state that the check was decided in."""
    node = known.nodes[check.node]
    workers = [worker for _, worker in known.by_node.on(node.name)]
    return f"{node.name} is checked, and {', '.join(workers)} on it" if node.foretold and workers else ""


def innocents_stay(
    known: ClusterState, isolated: v.NodeIsolated, touched: Collection[str], bad_ends: Collection[str], strikes_max: int
) -> str:
    """`known`: the state that it was decided in. `touched`: nodes that a fault names; `bad_ends`: those whose
    connections are at fault. Of two ends of a link either may be at fault, and one may be tried: that is a breach only
    if the blame was called clear. Where half of a task's nodes are bad ends, all that it sees accuses the others."""
    if isolated.node in touched:
        return ""
    for task in known.tasks.values():
        nodes = {worker.node for worker in task.workers.values()} | {isolated.node}
        if 2 * len(nodes.intersection(bad_ends)) >= len(nodes):
            continue
        clear = task.troubles.breaks.get(isolated.node, 0) - task.troubles.unclear.get(isolated.node, 0) >= strikes_max
        if clear:
            return f"{isolated.node} is isolated, though it never had a fault: {isolated.reason}"
    return ""


def unchecked_nodes_stay_out(before: ClusterState, node: str, cleared: Collection[str]) -> str:
    """`cleared`: what has happened to the node since it was isolated: "check", "repair", "person"."""
    known = before.nodes.get(node)
    if known is None or known.isolation is None or known.isolation.cause != "hardware" or "person" in cleared:
        return ""
    if not before.check_limit_us:
        return ""  # the head has no checks
    if known.needs in ("reboot", "replace", "other") and "repair" not in cleared:
        return f"{node} is readmitted, which needs {known.needs}, and no operator has been there"
    return "" if "check" in cleared else f"{node} is readmitted unchecked: {known.reason}"


def layouts_are_the_plans(before: ClusterState, entry: Recorded) -> str:
    """`before`: the state that the entry meets."""
    event = entry.envelope.event
    if not isinstance(event, v.TaskReshaped) or not event.plan or entry.envelope.term != before.term:
        return ""
    chosen = before.plan.assignments.get(event.task)
    if chosen is not None and (before.plan.epoch, chosen.shape) == (event.plan, event.shape):
        return ""
    return f"entry {entry.seq} gives {event.task} {event.shape}, which plan {before.plan.epoch} has not chosen"


def handovers_are_awaited(known: ClusterState, stop: v.StopWorker) -> str:
    """`known`: the state that the stop was decided in."""
    task = known.tasks.get(stop.task)
    if task is None or task.status is not TaskStatus.ACTIVE or task.reshaping.reshape is None:
        return ""
    if known.nodes[stop.node].overdue:
        return ""  # a person wanted the node empty by then
    whole = [member.worker for member in leaving_members(task)]
    return f"{stop.worker} is stopped on its way out of its group" if stop.worker in whole else ""


def fence_of(given: Commanded | Told, highest: tuple[int, int]) -> tuple[int, int]:
    """The (term, epoch) of what a node is told; a decision that it reads holds in every epoch of its term."""
    if isinstance(given, Commanded):
        return given.term, given.command.epoch
    return given.term, highest[1] if given.term == highest[0] else 0


def stale_commands_never_act(
    node: str, highest: tuple[int, int], given: Commanded | Told, actions: Sequence[Action]
) -> str:
    """`highest`: the newest (term, epoch) that the node was ever told."""
    fence = fence_of(given, highest)
    acts = [action for action in actions if not isinstance(action, Append | ArmTimer)]
    if fence >= highest or not acts:
        return ""
    kind = type(given.command if isinstance(given, Commanded) else given.event).__name__
    return f"{node}: {kind} of {fence} after {highest} led to {acts[0]}"


def steps_have_one_membership(steps: Sequence[tuple[Total, int, str]], alive: Collection[str]) -> str:
    """`steps`: the commits of one iteration of one training: the sums, the generation of the group, the worker.

    `alive`: workers that the log does not hold for lost or stopped. A node that is cut from the log may go on alone
    with a membership that rules no more; what the log holds for lost is left out, all others must agree.
    """
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
    """Training is a function of the samples: one too many, too few or twice shows."""
    return "" if params == expected else "the parameters are not those of a training without faults"


def sums_are_the_reference(spec: v.TaskSpec, total: Total, *, is_right: bool) -> str:
    """`is_right`: every bucket's sum is what it has to be."""
    if not spec.lanes:
        return ""
    if not is_right:
        return "a bucket's sum has another order, or other brackets, than the reference"
    counted = total.loss * total.tokens, total.tokens
    batch = float(spec.micro_batches), spec.global_batch
    return "" if counted == batch else f"loss and tokens are {counted}, not {batch}"


def states_are_whole(params: Sequence[int], optimizer: Sequence[int], expected: Sequence[int]) -> str:
    """`optimizer`: the whole state of a sharded optimizer, () of another. `expected`: both, after that iteration."""
    for name, blocks in (("parameters", params), ("optimizer's state", optimizer)):
        if (blocks or name == "parameters") and tuple(blocks) != tuple(expected):
            wrong = [n for n, (one, other) in enumerate(zip(blocks, expected, strict=False)) if one != other]
            return f"blocks {wrong} of the {name} are of another step"
    return ""


def parts_are_of_one_step(blocks: Mapping[int, int], expected: Sequence[int]) -> str:
    """`blocks`: what is held of the optimizer's state, by number."""
    wrong = [block for block, value in blocks.items() if value != expected[block]]
    return f"blocks {wrong} of the optimizer's state are of another step" if wrong else ""


def parts_are_held_twice(staged: Sequence[Sequence[tuple[Part, ...]]]) -> str:
    """`staged[m]`: what member m has staged in this division, then in later ones; nothing if it has not yet."""
    if waiting := [member for member, divisions in enumerate(staged) if not divisions]:
        return f"parts are dropped before members {waiting} have theirs"
    holders = Counter(part for divisions in staged for part in divisions[0])
    count = max(part.count for part in holders)
    few = [index for index in range(count) if holders[Part(count, index)] < min(2, count)]
    return f"parts {few} of {count} have too few holders" if few else ""


# --- at rest -------------------------------------------------------------------------------------


def acknowledged_events_stay(entries: Sequence[Entry], acknowledged: Iterable[tuple[int, Envelope]]) -> str:
    """With the numbers that the log gave them."""
    for seq, envelope in acknowledged:
        entry = entries[seq - 1] if seq <= len(entries) else None
        if not isinstance(entry, Recorded) or not _same(entry.envelope, envelope):
            return f"{envelope.event_id} was acknowledged as entry {seq}; there stands {entry}"
    return ""


def _same(one: Envelope, other: Envelope) -> bool:
    return one == other or encode(one) == encode(other)  # a loss may be NaN


def replay_equals_live(live: ClusterState, replayed: ClusterState) -> str:
    """Both at one entry."""
    if live.seq == replayed.seq and digest(live) == digest(replayed):
        return ""
    return f"entry {live.seq}: live {digest(live)}, replay {digest(replayed)} at {replayed.seq}"


def incidents_close(state: ClusterState) -> str:
    """None is open."""
    return "; ".join(f"{i.id} {i.kind} of {i.node}: {i.message}" for i in state.incidents.values())


def decide_is_quiet_at_rest(state: ClusterState, policy: Policy) -> str:
    """Nothing is asked for, with every plan problem answered."""
    survey = Survey(state, policy)
    solutions: dict[Problem, Solution] = {problem: solve(problem) for problem in needed_solves(survey)}
    try:
        asked = decide(survey, solutions)
    except Exception as error:  # a defect of ours, whatever it is, is what is looked for
        return f"it fails: {error!r}"
    return f"it asks for {asked[0]}" if asked else ""


def tasks_train(state: ClusterState, is_training: Mapping[str, bool]) -> str:
    """`is_training`: tasks that have committed steps lately."""
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
    types = told_types(state.nodes.values())[1]
    for shape in layouts_of(task.spec):
        wanted = -(-task.spec.min_workers // shape.workers)
        within = wanted * shape.workers <= task.spec.max_workers
        for gpu in sorted(set(types.values())) or [""]:
            there = {name: count for name, count in slots.items() if types.get(name, "") == gpu}
            if within and not place({task.name: wanted}, {task.name: shape}, there, {}).short:
                return True
    return False


def states_have_copies(state: ClusterState, copies: Mapping[str, int]) -> str:
    """`copies`: per task that trains, on how many nodes a new state of its every shard lies, at least."""
    wanted = min(2, sum(node.status is NodeStatus.UP for node in state.nodes.values()))
    few = {task: count for task, count in copies.items() if count < wanted}
    return "; ".join(f"new states of {task} lie on {count} of {wanted} nodes" for task, count in few.items())


def memory_is_given_back(state: ClusterState, keeping: Sequence[tuple[str, str]]) -> str:
    """`keeping`: (node, task) of every state in memory."""
    ended = {task.name for task in state.tasks.values() if task.status is not TaskStatus.ACTIVE}
    return "; ".join(f"{node} keeps states of {task}" for node, task in sorted(keeping) if task in ended)


def no_process_is_left(state: ClusterState, living: Sequence[tuple[str, str, str]]) -> str:
    """`living`: (node, task, worker) of every process."""
    known = {(w.node, task.name, w.worker) for task in state.tasks.values() for w in task.workers.values()}
    strays = [process for process in living if process not in known]
    missing = [worker for worker in known if worker not in living]
    parts = [f"{w} lives on {n} unknown" for n, _, w in strays] + [f"{w} on {n} does not live" for n, _, w in missing]
    return "; ".join(sorted(parts))


def one_agent_of_a_name(second: Sequence[str]) -> str:
    """`second`: names under which another machine's agent still lives beside the node's own."""
    return "; ".join(f"two agents of the name {name} live" for name in second)


def nodes_are_seen(state: ClusterState, running: Sequence[str]) -> str:
    """`running`: nodes whose agent runs and can reach the log."""
    unseen = [name for name in running if name not in state.nodes or not state.nodes[name].schedulable]
    return "; ".join(f"{name} runs, and is {state.nodes.get(name)}" for name in unseen)
