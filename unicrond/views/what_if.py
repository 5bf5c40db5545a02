"""What-if questions: what the coordinator would decide if nodes, tasks or its policy were otherwise.

`what_if` takes a state, makes the changes in a copy, and lets the coordinator's own core decide there. It serves
`unicronctl plan whatif` (of now and of the past), the API, the page and `unicron-replay whatif`.

Rules
-----
* Nodes change as the log would have it: a lost node is a `NodeLost`, an added one a `NodeJoined`, both folded.
  Settings of a task or of the policy are changed in the state and the policy themselves.
* Then `needed_solves`, `solve` and `decide` run as they do in the coordinator, until it would wait for others.
* Nothing is appended anywhere, and the disk is not looked at.
* Without changes the answer is what the coordinator would plan afresh: to compare with, so that only what follows
  from the changes shows as a difference.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import count, islice
from typing import Annotated, Any, NamedTuple, TypeVar, get_type_hints

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from unicrond.core.decide import decide, needed_solves
from unicrond.core.fold import fold
from unicrond.core.nodes.liveness import OWN_NAME
from unicrond.core.planning.solver import solve
from unicrond.core.rules.survey import Survey
from unicrond.core.state.field_faults import faults
from unicrond.core.state.ordered_map import put_all
from unicrond.core.state.policy import Policy
from unicrond.core.state.state import ClusterState, Node, NodeStatus, Plan, Task, TaskStatus
from unicrond.core.tasks.task_validation import task_problems
from unicrond.core.worth.waf import linear_flops, waf, waf_unit
from unicrond.events import vocabulary as v
from unicrond.events.vocabulary.phrases import guess
from unicrond.events.wire.envelope import Envelope, RecordedEvent
from unicrond.events.wire.schemas import SCHEMA, told_version

#: More nodes than any question needs; a planner's row has one entry per worker.
NODES_MAX = 10_000
#: What a node may have (`Slots` of the vocabulary).
SLOTS_MAX = 1024
#: Looks of the coordinator until it waits for others: nodes, plan, staff.
_LOOKS_MAX = 10

_Struct = TypeVar("_Struct", bound=msgspec.Struct)


class WhatIfError(ValueError):
    """A change that cannot be made; the message is one line: the field of ClusterChanges, what is wrong, the fix."""


class ClusterChanges(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the cluster should differ.

    `lose`: nodes. `add_nodes`: how many, of `slots` each (0: as most nodes have), with GPUs of type `gpu` ("": as most
    nodes have). `set`: new values by path, "tasks.TASK.FIELD" or "policy.FIELD", as people write them.
    """

    lose: tuple[v.Name, ...] = ()
    add_nodes: Annotated[int, Meta(ge=0, le=NODES_MAX)] = 0
    slots: Annotated[int, Meta(ge=0, le=SLOTS_MAX)] = 0
    gpu: v.Gpu = ""
    set: dict[str, str | int | float] = {}


class WhatIfOutcome(NamedTuple):
    """What the coordinator would do at once: its decisions in order, and the state after them."""

    state: ClusterState
    decisions: tuple[v.AnyEvent, ...]

    @property
    def plan(self) -> Plan:
        """Return the plan after the decisions."""
        return self.state.plan

    @property
    def counts(self) -> dict[str, int]:
        """Count the decisions of each type, but for the plan."""
        return dict(Counter(type(event).__name__ for event in self.decisions if not isinstance(event, v.PlanAdopted)))


def changes_of(value: Any) -> ClusterChanges:
    """Read the changes that JSON states. Raise WhatIfError."""
    for fault in faults(value, ClusterChanges):
        raise WhatIfError(str(fault))
    return msgspec.convert(value, ClusterChanges, strict=True)


def what_if(state: ClusterState, policy: Policy, changes: ClusterChanges) -> WhatIfOutcome:
    """Return what the coordinator would decide after the changes, beginning with a new plan. Raise WhatIfError, and
    ProblemError where the changed cluster poses no valid problem. Takes a plan's time."""
    state, policy = with_changes(state, policy, changes)
    state = replace(state, plan=replace(state.plan, basis=""))  # a plan is made even where the old one fits
    decisions: list[v.AnyEvent] = []
    for _ in range(_LOOKS_MAX):
        survey = Survey(state, policy)
        batch = decide(survey, {problem: solve(problem) for problem in needed_solves(survey)})
        if not batch:
            break
        for decision in batch:
            state = _fold_in(state, decision, OWN_NAME)
        decisions += batch
    return WhatIfOutcome(state, tuple(decisions))


def answer(state: ClusterState, outcome: WhatIfOutcome) -> dict[str, Any]:
    """Return what is told of an outcome: the plan that `state` has and the one that it would have, what the former is
    worth per task under the changed settings, the unit in which people read both, and how many other decisions of each
    type there would be at once."""
    return {
        "now": state.plan,
        "then": outcome.plan,
        "waf_now": waf_of(outcome.state, state.plan),
        "unit": waf_unit(outcome.state),
        "decisions": outcome.counts,
    }


def waf_of(state: ClusterState, plan: Plan) -> dict[str, int]:
    """Return the weighted FLOP/s per task that a plan is worth by the tasks' settings in `state`; workers above a
    task's maximum are worth nothing."""
    linear = linear_flops(state)
    return {
        name: waf(task, min(assignment.workers, task.spec.max_workers), linear)
        for name, assignment in plan.assignments.items()
        if (task := state.tasks.get(name)) is not None
    }


def with_changes(state: ClusterState, policy: Policy, changes: ClusterChanges) -> tuple[ClusterState, Policy]:
    """Return the state and the policy with the changes made. Raise WhatIfError."""
    tasks = dict(state.tasks)
    for path, value in changes.set.items():
        head, *fields = path.split(".")
        if head == "policy" and len(fields) == 1:
            policy = _with_field(policy, fields, value, path)
        elif head == "tasks" and len(fields) >= 2:
            tasks[fields[0]] = _with_task_field(state, tasks.get(fields[0]), fields, value, path)
        else:
            raise WhatIfError(f"set: {path}: no such setting; give tasks.TASK.FIELD or policy.FIELD")
    for name, task in tasks.items():
        _require_valid(state.tasks[name], task)
    state = replace(state, tasks=put_all(state.tasks, tasks))
    for name in changes.lose:
        state = _without_node(state, name)
    return _with_nodes(state, changes), policy


def _with_field(struct: _Struct, fields: Sequence[str], value: object, path: str) -> _Struct:
    """Return the struct with another value in the field, or in a field of one of its parts."""
    name, *inner = fields
    kinds = get_type_hints(type(struct), include_extras=True)
    if name not in kinds:
        raise WhatIfError(f"set: {path}: no such field; {guess(name, list(kinds))}")
    part = getattr(struct, name)
    if inner:
        if not isinstance(part, v.Value):
            raise WhatIfError(f"set: {path}: {name} has no fields; set all of it")
        return replace(struct, **{name: _with_field(part, inner, value, path)})
    try:
        return replace(struct, **{name: msgspec.convert(value, kinds[name], strict=False)})
    except msgspec.ValidationError as error:
        raise WhatIfError(f"set: {path}={value}: {error}") from None


def _with_task_field(state: ClusterState, task: Task | None, fields: Sequence[str], value: object, path: str) -> Task:
    """Return the task with another value in a field of its description; `fields` begins with the task's name."""
    name, *inner = fields
    if task is None or task.status is not TaskStatus.ACTIVE:
        active = [task.name for task in state.active]
        raise WhatIfError(f"set: {path}: {name} is not active; {guess(name, active, '' if active else 'no task is')}")
    if inner == ["name"]:
        raise WhatIfError(f"set: {path}: a task's name identifies it in the log; set another field")
    return replace(task, spec=_with_field(task.spec, inner, value, path))


def _require_valid(before: Task, after: Task) -> None:
    """Check that the changed settings of a task agree. What was wrong before is not the question."""
    if after is not before:
        old_faults = {str(fault) for fault in task_problems(before.spec)}
        for fault in task_problems(after.spec):
            if str(fault) not in old_faults:
                raise WhatIfError(f"set: tasks.{after.name}.{fault}")


def _without_node(state: ClusterState, name: str) -> ClusterState:
    node = state.nodes.get(name)
    if node is None or node.status is not NodeStatus.UP:
        up = [node.name for node in state.nodes.values() if node.status is NodeStatus.UP]
        raise WhatIfError(f"lose: {name} is not a node that is up; {guess(name, up, '' if up else 'none is')}")
    event = v.NodeLost(node=name, evidence=v.Evidence(beat_seq=0, beat_at_us=0), reason="what if")
    return _fold_in(state, event, OWN_NAME)


def _with_nodes(state: ClusterState, changes: ClusterChanges) -> ClusterState:
    """Return the state with the new nodes, "new-1", "new-2", ..."""
    present = [node for node in state.nodes.values() if node.status is not NodeStatus.LEFT]
    slots, gpu = changes.slots or _usual_slots(present), changes.gpu or _usual_gpu(present)
    if changes.add_nodes and not slots:
        raise WhatIfError("slots: there is no node to take their number from; say how many")
    names = (name for number in count(1) if (name := f"new-{number}") not in state.nodes)
    for name in islice(names, changes.add_nodes):
        event = v.NodeJoined(
            node=name,
            address="127.0.0.1",
            slots=slots,
            store=v.StoreAddress(host="127.0.0.1", port=0),
            agent_boot=1,
            version=told_version("what if", SCHEMA),
            gpu=gpu,
        )
        state = _fold_in(state, event, name)
    return state


def _usual_slots(nodes: Sequence[Node]) -> int:
    """Return the slots that most nodes have; the larger of two as frequent, 0 without nodes."""
    slots = Counter(node.slots for node in nodes)
    return max(slots, key=lambda number: (slots[number], number), default=0)


def _usual_gpu(nodes: Sequence[Node]) -> str:
    """Return the type of GPU that most nodes have; the first by name of two as frequent."""
    types = Counter(node.gpu for node in nodes)
    return min(types, key=lambda gpu: (-types[gpu], gpu), default="")


def _fold_in(state: ClusterState, event: v.AnyEvent, producer: str) -> ClusterState:
    """Return the state as if the log went on with the event."""
    boot, number = state.last_numbers.get(producer, (1, 0))
    term = state.term if isinstance(event, v.Decision | v.Command) else 0
    envelope = Envelope(
        producer=producer, boot=boot, number=number + 1, term=term, observed_at_us=state.now_us, event=event
    )
    return fold(state, RecordedEvent(state.seq + 1, state.now_us, envelope))
