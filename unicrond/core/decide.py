"""Decide: reconcile the whole state with what should be; `decide(survey, solutions) -> decisions`.

Rules
-----
* Level-triggered: nothing is remembered between calls. What is wrong in the state is decided upon; once
  those decisions are folded, decide is quiet. A burst coalesces, a restart needs no memory.
* Pure and quick: plan problems that the state poses (`needed_solves`) are solved elsewhere and handed in.
* What is returned is one batch: a membership and the commands that carry it commit together.
* While the head hears none of its nodes (nodes/deafness.py) nothing is decided about nodes, workers and plans: nobody
  would hear it, and what is believed of them may be wrong.
* A regroup never waits for a plan: survivors go on at once, with what they have. Everything else
  (workers to start, to add, to leave) waits for the plan that fits the present nodes and tasks.

Order in one call: give up workers, fail tasks, isolate, readmit and empty nodes, withdraw workers from bad links, each
as far as the brakes allow (nodes/brakes.py); adopt a plan; probe links; per task regroup, staff; end what is unwanted;
close incidents; pass on ordered faults; forget nodes; where none of this is asked for, learn.

Which response a failure gets (reattempt in place, restart, reconfigure, the end of the task): deciding/response.py.

A task's membership changes for five reasons:
  a member is gone            -> urgent, without its replica, at once
  the group broke, all live   -> urgent, same members (SEV3 reattempt in place)
  no member has state         -> all that are ready; state from a checkpoint, or from the seed
  the plan says otherwise     -> planned, at an iteration boundary, when all newcomers are ready
  it is to have another layout -> planned, with no members at all: all hand over at an iteration boundary and park.
                                 When the last has ended the task is described anew, and planned for: unless the plan
                                 itself has chosen them.
"""

from __future__ import annotations

from collections.abc import Mapping

from unicrond.core.deciding import incident_closing as closing
from unicrond.core.deciding import links, memberships, nodes, plans, response
from unicrond.core.deciding import worker_placement as staff
from unicrond.core.deciding.batch import DecisionBatch
from unicrond.core.deciding.plans import needed_solves
from unicrond.core.planning.problem import Problem
from unicrond.core.planning.solution import Solution
from unicrond.core.rules import healing_proofs as proofs
from unicrond.core.rules.estimates import corrections, failure_rate
from unicrond.core.rules.survey import Survey
from unicrond.core.state.state import Task, TaskStatus
from unicrond.events import vocabulary as v

__all__ = ["decide", "needed_solves"]


def decide(survey: Survey, solutions: Mapping[Problem, Solution], *, gathering: bool = False) -> list[v.AnyEvent]:
    """Return the decisions that the surveyed state asks for, in order; empty at rest.

    `solutions`: answers to `needed_solves(survey)`, as far as they are known. `gathering`: a node was lost and others
    are late (liveness.py): no plan is made for less than all of them.
    """
    batch = DecisionBatch(survey)
    if survey.state.silence is None:
        nodes.end_departures(batch)
        return batch.events or _reconcile(batch, solutions, gathering=gathering)  # nothing is decided with who is gone
    nodes.forget_nodes(batch)
    return batch.events


def _reconcile(batch: DecisionBatch, solutions: Mapping[Problem, Solution], *, gathering: bool) -> list[v.AnyEvent]:
    survey, state, policy = batch.survey, batch.state, batch.survey.policy
    response.respond(batch)
    nodes.readmit_nodes(batch)
    nodes.begin_drains(batch)
    links.withdraw_workers(batch)
    batch.tell_holds()
    if batch.events:
        return batch.events  # the usable nodes have changed: plan with them
    fresh = survey.fresh
    if not fresh and not gathering:
        plan = plans.build_plan(survey, solutions)
        if plan is not None:
            batch.add(plans.compact_plan(survey, plan))
            batch.tell_plan(plans.held_changes(survey, solutions))
    links.probe_groups(batch)
    unsettled = [task for task in state.open_tasks if not memberships.settled(survey, task)]
    for task in unsettled:
        request = task.reshaping.reshape
        if task.status is TaskStatus.ACTIVE and request is not None and (fresh or not task.reshaping.plan):
            memberships.reshape(batch, task, request)  # what an outdated plan has chosen, the next one may not want
        elif task.status is TaskStatus.ACTIVE:
            memberships.regroup(batch, task, fresh)
            if fresh:
                staff.staff(batch, task, policy)
    for task in unsettled:
        staff.end_unwanted(batch, task)
    batch.end_strays()
    links.watch_links(batch)
    for task in state.open_tasks:
        memberships.tell_peers(batch, task)
        memberships.drop_state(batch, task)
        _prove(batch, task)
    for incident in state.incidents.values():
        closing.close_incident(batch, incident, fresh)
    _inject(batch)
    nodes.forget_nodes(batch)
    if not batch.events and fresh:
        _learn(batch)
    return batch.events


def _learn(batch: DecisionBatch) -> None:
    """Decide, at rest, what the next plan is to know better (see estimates.py)."""
    for correction in corrections(batch.survey):
        batch.add(correction)
    estimate = failure_rate(batch.survey)
    if estimate is not None:
        batch.add(estimate)


def _prove(batch: DecisionBatch, task: Task) -> None:
    """Order the fault of a task that is to prove that it heals, once nothing else is to be done for it."""
    proof = task.troubles.proof
    if proof is None or proof.worker or not memberships.settled(batch.survey, task):
        return
    if task.membership is not None and task.membership.members and not proofs.missing(batch.state, task):
        batch.add(proofs.order(batch.state, task, batch.command_id(task.membership.members[-1].node)))


def _inject(batch: DecisionBatch) -> None:
    for name, injection in batch.state.injections.items():
        batch.add(
            v.InjectFault(
                command_id=batch.command_id(injection.node),
                node=injection.node,
                epoch=batch.state.plan.epoch,
                injection=name,
                fault=injection.fault,
            )
        )
