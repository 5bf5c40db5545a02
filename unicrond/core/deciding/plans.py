"""The plan: which problems must be solved for it, and how their solutions become a plan.

How a plan was found (looked up or solved, and in which time) is the shell's own knowledge: it is written into the
decision for people, and a repeated decision is compared without it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple, TypeVar

from msgspec.structs import replace

from unicrond.core.deciding import links
from unicrond.core.faults.program_faults import is_failing
from unicrond.core.nodes import drains as departures
from unicrond.core.nodes.gpu_types import on_type
from unicrond.core.planning.placement import Placement, Replica, place_apart, staying_replicas
from unicrond.core.planning.problem import Problem
from unicrond.core.planning.solution import Solution
from unicrond.core.rules.pinning import (
    Pins,
    changes,
    kept_text,
    observed,
    open_capacity,
    outage_pins,
    pins_of,
    shape_of,
)
from unicrond.core.rules.plan_problems import healthy_problem_of, present_replicas, problem_of
from unicrond.core.rules.survey import Survey
from unicrond.core.state.state import ClusterState, Node, NodeStatus, Task
from unicrond.core.tasks import starvation as turns
from unicrond.core.worth.waf import waf
from unicrond.events import vocabulary as v
from unicrond.events.vocabulary import AnyEvent, PlanAdopted, PlanMethod
from unicrond.events.vocabulary.placements import compact
from unicrond.events.vocabulary.shape import Shape

E = TypeVar("E", bound=AnyEvent)
_SECOND_US = 1_000_000
#: What the log's integers hold; a sum beyond it (9.2e18 weighted FLOP/s) is cut to it.
FLOPS_MAX = 2**63 - 1
#: How many tasks are moved alone, to find seats for another; the failing first, then those of low priority and weight.
ALONE_MAX = 16


def needed_solves(survey: Survey) -> list[Problem]:
    """Return the plan problems that must be solved before `decide` can go on: the plan's, and the healthy cluster's."""
    if survey.fresh:
        return []
    pins = pins_of(survey)
    problems = [problem_of(survey, pins), healthy_problem_of(survey)]
    return [*problems, problem_of(survey, outage_pins(survey))] if observed(survey, pins) else problems


def build_plan(survey: Survey, solutions: Mapping[Problem, Solution], pins: Pins | None = None) -> v.PlanAdopted | None:
    """Return the plan for the present nodes and tasks, whether it is needed or not; None if `solutions` lacks one of
    its problems. `pins`: see `problem_of`."""
    pins = pins_of(survey) if pins is None else pins
    solution, healthy = solutions.get(problem_of(survey, pins)), solutions.get(healthy_problem_of(survey))
    if solution is None or healthy is None:
        return None
    state, active = survey.state, [task for task in survey.active if task.name not in pins]
    capacity = open_capacity(survey, pins)
    shapes = {task.name: shape for task, shape in zip(active, solution.shapes, strict=True)}
    counts = {
        task.name: workers // shapes[task.name].workers for task, workers in zip(active, solution.workers, strict=True)
    }
    current = {
        task.name: [] if layout else present_replicas(survey, task)
        for task, layout in zip(active, solution.layouts, strict=True)
    }
    current = {name: links.together(survey, state.tasks[name], replicas) for name, replicas in current.items()}
    types = survey.gpus, dict(zip(counts, solution.gpus, strict=True))
    placed = _placed(survey, solution, capacity, (counts, shapes, current), types)
    assignments = []
    for task in survey.active:
        is_pinned = task.name in pins
        replicas = pins[task.name] if is_pinned else placed.replicas[task.name]
        shape = shape_of(survey, task) if is_pinned else shapes[task.name]
        workers = len(replicas) * shape.workers
        if workers < task.spec.min_workers and not is_pinned:
            replicas, workers = (), 0  # what could not be seated together is worth nothing
        layout_choice = shape if task.spec.layouts and workers else None
        task_on_gpu = on_type(task, types[1][task.name] if survey.types and not is_pinned else survey.type_of(task))
        assignments.append(
            v.TaskAssignment(
                task=task.name,
                workers=workers,
                replicas=replicas,
                waf=waf(task_on_gpu, workers, survey.linear, layout_choice)
                if task.name not in survey.failing
                else int(task.spec.weight * workers),
                **(layout_choice._asdict() if layout_choice else {}),
            )
        )
    in_health = {task.name: workers for task, workers in healthy}
    is_short = any(assignment.workers < in_health.get(assignment.task, 0) for assignment in assignments)
    short = "".join(f"; no seat for {count} replicas of {task}" for task, count in placed.short.items())
    keeps = kept_text(survey, pins)
    return v.PlanAdopted(
        epoch=state.plan.epoch + 1,
        assignments=tuple(assignments),
        waf=min(sum(assignment.waf for assignment in assignments), FLOPS_MAX),
        basis=survey.short_basis if is_short else survey.basis,
        trigger=_trigger(survey),
        reason=(keeps + solution.reason + short)[:1024],
        healthy=in_health,
        waf_if_healthy=min(healthy.waf, FLOPS_MAX),
        transition_flop=_transition_flop(solution),
        gap_ppm=solution.gap_ppm,
        healthy_gpus={t.name: gpu for (t, k), gpu in zip(healthy, healthy.gpus, strict=True) if k and gpu},
    )


def _placed(
    survey: Survey,
    solution: Solution,
    slots: Mapping[str, int],
    demand: tuple[Mapping[str, int], Mapping[str, Shape], Mapping[str, Sequence[Replica]]],
    types: tuple[Mapping[str, str], Mapping[str, str]],
) -> Placement:
    """Place the tasks; where one finds no seats so, with more that move, if all find some then: with the fewest workers
    of tasks that do not fail, then with the fewest of all."""
    counts, shapes, current = demand
    placed = _placed_elsewhere(survey, slots, demand, types)
    if not placed.short:
        return placed

    def moves(placement: Placement) -> tuple[int, int]:
        """Return the key: the workers that start anew, of tasks that do not fail and of all."""
        starts = {
            name: (Counter(replicas) - Counter(current[name])).total() * shapes[name].workers
            for name, replicas in placement.replicas.items()
        }
        return sum(workers for name, workers in starts.items() if name not in survey.failing), sum(starts.values())

    placements = [
        place_apart(counts, shapes, slots, staying, types, survey.barred_pairs, survey.nodes.cordoned)
        for staying in _other_stays(survey, solution, slots, counts, current)
    ]
    return min((placement for placement in placements if not placement.short), key=moves, default=placed)


def _other_stays(
    survey: Survey,
    solution: Solution,
    slots: Mapping[str, int],
    counts: Mapping[str, int],
    current: Mapping[str, Sequence[Replica]],
) -> Iterator[Mapping[str, Sequence[Replica]]]:
    """Yield the replicas that stay, where not all that might stay leave room for the others: residents before others;
    of one task residents alone; of all tasks residents alone."""
    cordoned, tasks = frozenset(survey.nodes.cordoned), survey.state.tasks
    residents: dict[str, list[Replica]] = {}
    stays: dict[str, list[Replica]] = {}
    for name, replicas in current.items():
        whole_replicas = [nodes for nodes in replicas if all(node in slots for node in nodes)]
        on_cordoned = [nodes for nodes in whole_replicas if not cordoned.isdisjoint(nodes)]
        on_cordoned.sort(key=lambda nodes: -sum(node in cordoned for node in nodes))
        on_open = [nodes for nodes in whole_replicas if cordoned.isdisjoint(nodes)]
        residents[name] = on_cordoned[: counts[name]]
        stays[name] = [*residents[name], *staying_replicas(on_open, counts[name] - len(residents[name]), slots)]
    if cordoned:
        yield stays
    has_seats = bool(solution.problem.seats or any(pool.seats for pool in solution.problem.pools))
    if has_seats or survey.barred_pairs:  # one that stands on a free node may take the place of another
        names = [name for name in current if len(stays[name]) > len(residents[name])]
        names.sort(key=lambda name: (name not in survey.failing, tasks[name].spec.priority, tasks[name].spec.weight))
        yield from ({**stays, name: residents[name]} for name in names[:ALONE_MAX])
    if has_seats:
        yield residents


def _placed_elsewhere(
    survey: Survey,
    slots: Mapping[str, int],
    demand: tuple[Mapping[str, int], Mapping[str, Shape], Mapping[str, Sequence[Replica]]],
    types: tuple[Mapping[str, str], Mapping[str, str]],
) -> Placement:
    """Place the tasks; those that avoid nodes elsewhere, where there is room. On an avoided node only the other tasks'
    present workers have seats then, and on one whose isolation is held only workers that live."""
    counts, shapes, current = demand
    apart, closed = survey.barred_pairs, survey.nodes.cordoned
    placed = place_apart(counts, shapes, slots, current, types, apart, closed)
    avoided = {node for name in counts for node in survey.avoided.get(name, ())} | {*survey.held_nodes}
    if not avoided:
        return placed
    stays = {
        name: [nodes for nodes in replicas if not set(survey.avoided.get(name, ())).intersection(nodes)]
        for name, replicas in current.items()
    }
    for name in stays if survey.held_nodes else ():
        for nodes in survey.staffing(survey.state.tasks[name]).missing:
            if nodes in stays[name] and not set(survey.held_nodes).isdisjoint(nodes):
                stays[name].remove(nodes)
    seats = Counter(node for replicas in stays.values() for nodes in replicas for node in nodes)
    capacity = {node: min(free, seats[node]) if node in avoided else free for node, free in slots.items()}
    elsewhere = place_apart(counts, shapes, capacity, stays, types, apart, closed)
    return placed if elsewhere.short else elsewhere


def held_changes(survey: Survey, solutions: Mapping[Problem, Solution]) -> str:
    """Say which workers a plan would move that modes hold in their places; "" for none."""
    pins = observed(survey, pins_of(survey))
    plan = build_plan(survey, solutions, outage_pins(survey)) if pins else None
    return changes(survey, pins, {share.task: share.replicas for share in plan.assignments}) if plan else ""


def compact_plan(survey: Survey, plan: v.PlanAdopted) -> v.PlanAdopted:
    """Return the plan with runs of nodes instead of one name for each worker."""
    sizes = {task.name: task.spec.replica_workers for task in survey.active}
    runs = [
        compact(assignment, sizes[assignment.task] if (shape := assignment.shape) is None else shape.workers)
        for assignment in plan.assignments
    ]
    return replace(plan, assignments=tuple(runs))


def _transition_flop(solution: Solution) -> float:
    """Return the expected cost of the change in weighted FLOP: what its tasks would have achieved meanwhile."""
    problem, cost = solution.problem, Fraction(0)
    for (task, workers), layout in zip(solution, solution.layouts, strict=True):
        if task.faulty or layout or workers != task.workers:
            cost += task.waf(task.workers) * Fraction(problem.time_of(task, workers, layout))
    return float(cost / _SECOND_US)


def _has_begun_to_fail(state: ClusterState, task: Task) -> bool:
    crashes = task.troubles.crashes
    return crashes is not None and is_failing(task) and crashes.last_us > state.plan.adopted_us


def _trigger(survey: Survey) -> str:
    """Describe what has changed since the last plan."""
    state = survey.state
    planned = {node for a in state.plan.assignments.values() for nodes in a.replicas for node in nodes}
    changes = [
        f"node {n.name} {_unschedulable_reason(n)}"
        for n in state.nodes.values()
        if n.name in planned and not n.schedulable and n.name not in survey.absence.absentees
    ]
    changes += [f"node {n.name} joined" for n in state.nodes.values() if n.joined_us > state.plan.adopted_us]
    changes += links.changes_since(state, state.plan.adopted_us)
    changes += [f"task {t.name} has other settings" for t in state.active if t.updated_us > state.plan.adopted_us]
    changes += [f"task {t.name} reshaped" for t in state.active if _was_reshaped(state, t)]
    changes += [f"task {name} is measured anew" for name in (state.plan.revised_for,) if name]
    changes += [f"task {t.name} fails without progress" for t in state.active if _has_begun_to_fail(state, t)]
    changes += [f"node {n.name} cordoned" for n in state.nodes.values() if n.cordon.active and n.schedulable]
    changes += [change for t in state.active if (change := turns.changed_since(state, t, state.plan.adopted_us))]
    active = [task.name for task in state.active]
    changes += [f"task {name} launched" for name in active if name not in state.plan.assignments]
    changes += [
        f"task {name} {state.tasks[name].status.value}" for name in state.plan.assignments if name not in active
    ]
    return ", ".join(changes)[:1024] or "nodes changed"


def _was_reshaped(state: ClusterState, task: Task) -> bool:
    """Return whether a person has given the task another layout or other bounds since the last plan."""
    assignment = state.plan.assignments.get(task.name)
    by_plan = assignment is not None and assignment.shape == task.spec.shape
    return task.reshaping.reshaped_us > state.plan.adopted_us and not by_plan


def _unschedulable_reason(node: Node) -> str:
    """Return why the node is not schedulable."""
    if node.status is not NodeStatus.UP:
        return node.status.value
    if node.isolation.active or not node.cordon.draining:
        return "isolated" if node.isolation.active else "leaving"
    return f"drained ({departures.departure_text(node)})" if node.cordon.empty_by_us else "drained"


class PlanAnswer(NamedTuple):
    """A plan problem's answer. `took_us`: from the question to the answer. `rows_reused`: of the solver's rows."""

    solution: Solution
    method: PlanMethod = "fresh"
    took_us: int = 0
    rows_reused: int = 0


def with_provenance(event: E, answered: PlanAnswer) -> E:
    """Return the event; a plan with how it was made."""
    if isinstance(event, PlanAdopted):
        return replace(event, method=answered.method, duration_us=answered.took_us, rows_reused=answered.rows_reused)
    return event
