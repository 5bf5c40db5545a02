"""What if: fork the state at a point, change what a person wants changed, and let the coordinator decide afresh.

Rules
-----
* The changes are made as the log would make them where there is an event for it: a lost node is a NodeLost, an
  added one a NodeJoined. Settings (of a task, of the policy) are changed in the state and the policy themselves.
* Then `needed_solves`, `solve` and `decide` run as they do in the coordinator. The same is done without the
  changes, so that only what follows from them shows as a difference.
* Nothing is appended anywhere.

Pure, but for the CPU time of a plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_type_hints

import msgspec
from msgspec.structs import replace

from unicrond.core.decide import decide, needed_solves
from unicrond.core.fold import fold
from unicrond.core.nodes.liveness import OWN_NAME
from unicrond.core.planning.solver import solve
from unicrond.core.rules.survey import Survey
from unicrond.core.state.policy import Policy
from unicrond.core.state.state import ClusterState, NodeStatus, Plan
from unicrond.core.worth.waf import linear_flops, waf
from unicrond.events import vocabulary as v
from unicrond.events.wire.envelope import Envelope, RecordedEvent
from unicrond.events.wire.schemas import SCHEMA, told_version
from unicrond.intake.task_file import problems

#: Looks of the coordinator until it waits for others: nodes, plan, staff.
_LOOKS_MAX = 10


class InvalidChange(ValueError):
    """A change that cannot be made; names it and the fix."""


@dataclass(frozen=True)
class ReplayChanges:
    """`settings`: (path, value) as people write them, like ("tasks.big.weight", "3"). `lose`: nodes.

    `add_nodes`: how many; `slots` of each (0: as most nodes have).
    """

    settings: Sequence[tuple[str, str]] = ()
    lose: Sequence[str] = ()
    add_nodes: int = 0
    slots: int = 0


@dataclass(frozen=True)
class WhatIfOutcome:
    """What the coordinator decides in a state. `plan`: afterwards. `decisions`: what it appends at once."""

    state: ClusterState
    plan: Plan
    decisions: tuple[v.AnyEvent, ...]


def what_if(state: ClusterState, policy: Policy, changes: ReplayChanges) -> tuple[WhatIfOutcome, WhatIfOutcome]:
    """Return the outcome without the changes, and with them. Raises InvalidChange."""
    changed, changed_policy = change(state, policy, changes)
    return decide_afresh(state, policy), decide_afresh(changed, changed_policy)


def change(state: ClusterState, policy: Policy, changes: ReplayChanges) -> tuple[ClusterState, Policy]:
    """Return the state and the policy with the changes in them. Raises InvalidChange."""
    for path, text in changes.settings:
        head, *rest = path.split(".")
        if head == "policy" and len(rest) == 1:
            policy = _with_setting(policy, rest[0], text, path)
        elif head == "tasks" and len(rest) >= 2:
            state = _with_task_setting(state, rest[0], rest[1:], text, path)
        else:
            raise InvalidChange(f"--set {path}: give tasks.TASK.FIELD=VALUE or policy.FIELD=VALUE")
    for name in changes.lose:
        node = state.nodes.get(name)
        if node is None or node.status is not NodeStatus.UP:
            up = ", ".join(n.name for n in state.nodes.values() if n.status is NodeStatus.UP)
            raise InvalidChange(f"--lose {name}: no such node is up at this point; up are {up or 'none'}")
        event = v.NodeLost(node=name, evidence=v.Evidence(beat_seq=0, beat_at_us=0), reason="what if")
        state = _fold_in(state, event, OWN_NAME)
    for number in range(changes.add_nodes):
        state = _join(state, f"whatif-{number + 1}", changes.slots or _usual_slots(state))
    return state, policy


def decide_afresh(state: ClusterState, policy: Policy) -> WhatIfOutcome:
    """Decide a new plan, whether the nodes and tasks have changed or not, and everything that follows at once."""
    state = replace(state, plan=replace(state.plan, basis=""))
    decided: list[v.AnyEvent] = []
    for _ in range(_LOOKS_MAX):
        survey = Survey(state, policy)
        solutions = {problem: solve(problem) for problem in needed_solves(survey)}
        decisions = decide(survey, solutions)
        if not decisions:
            break
        for decision in decisions:
            state = _fold_in(state, decision, OWN_NAME)
        decided += decisions
    return WhatIfOutcome(state, state.plan, tuple(decided))


def waf_of(state: ClusterState, plan: Plan) -> dict[str, int]:
    """Return the weighted FLOP/s per task that a plan is worth by the tasks' settings in `state`; workers above a
    task's maximum are worth nothing."""
    linear = linear_flops(state)
    return {
        name: waf(task, min(assignment.workers, task.spec.max_workers), linear)
        for name, assignment in plan.assignments.items()
        if (task := state.tasks.get(name)) is not None
    }


def _with_setting(struct: Any, field: str, text: str, path: str) -> Any:
    kinds = get_type_hints(type(struct), include_extras=True)
    if field not in kinds:
        raise InvalidChange(f"--set {path}: no such field; known: {', '.join(kinds)}")
    try:
        return replace(struct, **{field: msgspec.convert(text, kinds[field], strict=False)})
    except msgspec.ValidationError as error:
        raise InvalidChange(f"--set {path}={text}: {error}") from None


def _with_task_setting(state: ClusterState, name: str, fields: list[str], text: str, path: str) -> ClusterState:
    task = state.tasks.get(name)
    if task is None:
        raise InvalidChange(f"--set {path}: no task {name} at this point; tasks are {', '.join(state.tasks)}")
    inner = task.spec
    if fields == ["name"]:
        raise InvalidChange(f"--set {path}: a task's name identifies it in the log; set another field")
    if len(fields) == 2 and isinstance(getattr(inner, fields[0], None), v.Value):
        part = _with_setting(getattr(inner, fields[0]), fields[1], text, path)
        spec = replace(inner, **{fields[0]: part})
    elif len(fields) == 1:
        spec = _with_setting(inner, fields[0], text, path)
    else:
        raise InvalidChange(f"--set {path}: no such field of a task")
    # What was wrong before (a script that is on another machine) is none of our business.
    new_problems = [problem for problem in problems(spec) if problem not in problems(task.spec)]
    if new_problems:
        raise InvalidChange(f"--set {path}={text}: {new_problems[0]}")
    return replace(state, tasks=state.tasks | {name: replace(task, spec=spec)})


def _usual_slots(state: ClusterState) -> int:
    slots = Counter(node.slots for node in state.nodes.values())
    return slots.most_common(1)[0][0] if slots else 1


def _join(state: ClusterState, name: str, slots: int) -> ClusterState:
    event = v.NodeJoined(
        node=name,
        address="127.0.0.1",
        slots=slots,
        store=v.StoreAddress(host="127.0.0.1", port=0),
        agent_boot=1,
        version=told_version("what if", SCHEMA),
    )
    return _fold_in(state, event, name)


def _fold_in(state: ClusterState, event: v.AnyEvent, producer: str) -> ClusterState:
    """Return the state as if the log went on with the event."""
    boot, number = state.last_numbers.get(producer, (1, 0))
    term = state.term if isinstance(event, v.Decision | v.Command) else 0
    envelope = Envelope(
        producer=producer, boot=boot, number=number + 1, term=term, observed_at_us=state.now_us, event=event
    )
    return fold(state, RecordedEvent(state.seq + 1, state.now_us, envelope))
