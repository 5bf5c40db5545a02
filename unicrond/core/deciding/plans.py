"""The plan: which problems must be solved for it, and what is adopted of their answers."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

from msgspec.structs import replace

from events import vocabulary as v
from events.seats import compact
from unicrond.core.plan_problems import healthy_problem_of, present_replicas, problem_of
from unicrond.core.planning.placement import Shape, place
from unicrond.core.planning.problem import Problem
from unicrond.core.planning.solver import Solution
from unicrond.core.state import ClusterState, Node, NodeStatus
from unicrond.core.survey import Survey
from unicrond.core.waf import waf

_SECOND_US = 1_000_000
#: What the log's integers hold; a sum beyond it (9.2e18 weighted FLOP/s) is cut to it.
FLOPS_MAX = 2**63 - 1


def needed_solves(survey: Survey) -> list[Problem]:
    """Plan problems that must be solved before `decide` can go on: the plan's, and the healthy cluster's."""
    return [] if survey.fresh else [problem_of(survey), healthy_problem_of(survey)]


def planned(survey: Survey, solutions: Mapping[Problem, Solution]) -> v.PlanAdopted | None:
    """The plan for the present nodes and tasks, whether it is needed or not; None without its `solutions`."""
    solution, healthy = solutions.get(problem_of(survey)), solutions.get(healthy_problem_of(survey))
    if solution is None or healthy is None:
        return None
    state, active = survey.state, survey.active
    shapes = {task.name: Shape(task.spec.tp, task.spec.pp) for task in active}
    counts = {
        task.name: workers // task.spec.replica_workers for task, workers in zip(active, solution.workers, strict=True)
    }
    placed = place(counts, shapes, survey.capacity, {task.name: present_replicas(survey, task) for task in active})
    assignments = []
    for task in active:
        replicas = placed.replicas[task.name]
        workers = len(replicas) * task.spec.replica_workers
        if workers < task.spec.min_workers:
            replicas, workers = (), 0  # what could not be seated together is worth nothing
        assignments.append(
            v.TaskAssignment(task=task.name, workers=workers, replicas=replicas, waf=waf(task, workers, survey.linear))
        )
    short = "".join(f"; no seat for {count} replicas of {task}" for task, count in placed.short.items())
    return v.PlanAdopted(
        epoch=state.plan.epoch + 1,
        assignments=tuple(assignments),
        waf=min(sum(assignment.waf for assignment in assignments), FLOPS_MAX),
        basis=survey.basis,
        trigger=_trigger(state),
        reason=(solution.reason + short)[:1024],
        healthy={task.name: workers for task, workers in healthy},
        healthy_waf=min(healthy.waf, FLOPS_MAX),
        transition_flop=_transition_flop(solution),
    )


def in_runs(survey: Survey, plan: v.PlanAdopted) -> v.PlanAdopted:
    """The plan with runs of nodes instead of a name for each worker."""
    sizes = {task.name: task.spec.replica_workers for task in survey.active}
    return replace(plan, assignments=tuple([compact(each, sizes[each.task]) for each in plan.assignments]))


def _transition_flop(solution: Solution) -> float:
    """What the change is expected to cost: what its tasks would have achieved meanwhile."""
    problem = solution.problem
    moved = [task for task, workers in solution if task.faulty or workers != task.workers]
    cost = sum((task.waf(task.workers) * Fraction(problem.transition_of(task)) for task in moved), Fraction(0))
    return float(cost / _SECOND_US)


def _trigger(state: ClusterState) -> str:
    """What changed since the last plan, in words."""
    planned = {node for a in state.plan.assignments.values() for nodes in a.replicas for node in nodes}
    changes = [f"node {n.name} {_why_not(n)}" for n in state.nodes.values() if n.name in planned and not n.schedulable]
    changes += [f"node {n.name} joined" for n in state.nodes.values() if n.joined_us > state.plan.adopted_us]
    changes += [f"task {t.name} reshaped" for t in state.active if t.reshaping.reshaped_us > state.plan.adopted_us]
    changes += [f"node {n.name} cordoned" for n in state.nodes.values() if n.cordoned and n.schedulable]
    active = [task.name for task in state.active]
    changes += [f"task {name} launched" for name in active if name not in state.plan.assignments]
    changes += [
        f"task {name} {state.tasks[name].status.value}" for name in state.plan.assignments if name not in active
    ]
    return ", ".join(changes)[:1024] or "nodes changed"


def _why_not(node: Node) -> str:
    """Why the node is not schedulable."""
    if node.status is not NodeStatus.UP:
        return node.status.value
    return "isolated" if node.isolated else "drained"
