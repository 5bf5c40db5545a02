"""Planted bugs by which somebody pays for another's program. See `table.py`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from unicrond.core.deciding import batch, memberships
from unicrond.core.faults import local_faults
from unicrond.core.folding import nodes, silence
from unicrond.core.nodes import brakes, outages
from unicrond.core.nodes.deafness import Deafness
from unicrond.core.nodes.liveness import Liveness
from unicrond.core.planning.problem import TURNS_MAX, TaskProblem
from unicrond.core.rules import admission, pinning, plan_problems
from unicrond.core.state.changes import with_node
from unicrond.core.tasks import starvation
from unicrond.events import vocabulary as v
from unicrond.replay.simulation.mutants.mutation import Mutant, patch, patch_fold


def _blame_hardware_for_exceptions() -> None:
    def make(error_reported: Any) -> Any:
        """Wrap `error_reported`."""

        def accusing(before: Any, event: Any, envelope: Any) -> Any:
            """Fold an exception as an error of the node's memory."""
            if event.kind == "exception":
                event = msgspec.structs.replace(event, kind="ecc_error")
            return error_reported(before, event, envelope)

        return accusing

    patch_fold(v.ErrorReported, make)


def _prefer_what_fails() -> None:
    def make(ranks: Any) -> Any:
        """Wrap `ranks`."""

        def failing_first(state: Any) -> Any:
            """Give the tasks that have failed since their last iteration the highest turns."""
            failing = [task.name for task in state.active if task.troubles.stuck]
            return ranks(state) | {name: TURNS_MAX - place for place, name in enumerate(failing)}

        return failing_first

    patch(starvation, "ranks", make)


def _let_leavers_stay() -> None:
    def make(set_membership: Any) -> Any:
        """Wrap `set_membership`."""

        def crowded(batch: Any, task: Any, members: Any, **how: Any) -> None:
            """Decide the membership with all present members in it."""
            present = task.membership.members if task.membership and members and not how["urgent"] else ()
            staying = tuple([member for member in present if member not in members])
            set_membership(batch, task, members + staying, **how)

        return crowded

    patch(memberships, "set_membership", make)


def _forget_priorities() -> None:
    patch(TaskProblem, "priority_class", lambda _: property(lambda problem: (0, 0)))


def _never_grow() -> None:
    def make(task_problem: Any) -> Any:
        """Wrap `task_problem`."""

        def modest(survey: Any, task: Any, **how: Any) -> Any:
            """Return the problem of a task that wants no more than it has."""
            problem = task_problem(survey, task, **how)
            if not problem.workers:
                return problem
            return replace(problem, max_workers=min(problem.max_workers, max(problem.workers, problem.min_workers)))

        return modest

    patch(plan_problems, "_task_problem", make)


def _judge_when_deaf() -> None:
    patch(Deafness, "look", lambda _: lambda *_, **__: "judges")


def _release_brakes() -> None:
    patch(brakes, "limit_on", lambda _: lambda *decision: None)


def _act_while_observing() -> None:
    patch(brakes, "observes", lambda _: lambda *_: False)
    patch(brakes, "_watcher_of", lambda _: lambda *_: "")
    patch(pinning, "observes", lambda _: lambda *_: False)


def _believe_anybody() -> None:
    patch(admission, "AUTHORITY", lambda table: dict.fromkeys(table, lambda *_: ""))


def _await_nobody() -> None:
    patch(outages, "absence", lambda _: lambda *_: outages.NOBODY)


def _count_each_return() -> None:
    def make(absence: Any) -> Any:
        """Wrap `absence`."""
        return lambda *situation: absence(*situation)._replace(arrivals=frozenset())

    patch(outages, "absence", make)


def _hold_against_the_domain() -> None:
    def make(excused: Any) -> Any:
        """Wrap `excused`."""

        def accused(state: Any, name: str) -> Any:
            """Return the state in which the node's loss is its own, and its return a flap more than is allowed."""
            node = state.nodes[name]
            returns_us = (*node.health.returns_us, *[state.now_us] * 3)
            health = msgspec.structs.replace(node.health, returns_us=returns_us)
            return with_node(state, msgspec.structs.replace(node, health=health))

        return accused

    patch(silence, "excused", make)


def _end_all_strays() -> None:
    patch(batch, "STRAY_STOPS_MAX", lambda _: 10**6)


def _believe_the_deaf() -> None:
    patch(v.Heartbeat, "echo_lag", lambda _: property(lambda beat: 0))


def _blame_returns() -> None:
    def make(count_return: Any) -> Any:
        """Wrap `_count_return`."""

        def flapping(state: Any, node: Any) -> Any:
            """Count the return as often as a node may return, and once more."""
            for _ in range(4):
                node = count_return(state, node)
            return node

        return flapping

    patch(nodes, "_count_return", make)


def _ignore_returns() -> None:
    patch(Liveness, "_beats_again", lambda _: lambda *situation: False)


def _forget_convictions() -> None:
    def make(convicted: Any) -> Any:
        """Wrap `convicted`."""

        def newest_alone(task: Any, *conviction: Any) -> Any:
            """Note the conviction as if no replica had been convicted before."""
            troubles = msgspec.structs.replace(task.troubles, convictions_us={})
            return convicted(msgspec.structs.replace(task, troubles=troubles), *conviction)

        return newest_alone

    patch(local_faults, "convicted", make)


JUDGEMENT_MUTANTS: dict[str, Mutant] = {
    "blame_hardware_for_exceptions": Mutant(
        "an exception of a program counts as the hardware's", _blame_hardware_for_exceptions
    ),
    "prefer_what_fails": Mutant("the floor of a task that fails goes before all others", _prefer_what_fails),
    "let_leavers_stay": Mutant("members that are to leave stay beside those that replace them", _let_leavers_stay),
    "forget_priorities": Mutant("the plan ignores priorities", _forget_priorities),
    "release_brakes": Mutant("every decision passes the brakes", _release_brakes),
    "act_while_observing": Mutant("mode observe has no effect", _act_while_observing),
    "never_grow": Mutant("a task that has workers never gets more", _never_grow),
    "believe_anybody": Mutant("a node's word counts for tasks that it does not carry", _believe_anybody),
    "await_nobody": Mutant("the plan does without nodes that were lost together at once", _await_nobody),
    "count_each_return": Mutant("a node that is back is planned for before the others", _count_each_return),
    "hold_against_the_domain": Mutant("a node that is lost with others flaps by it", _hold_against_the_domain),
    "end_all_strays": Mutant("each process that a node invents is ordered to end, all at once", _end_all_strays),
    "believe_the_deaf": Mutant("a node that is heard and hears nothing is well", _believe_the_deaf),
    "blame_returns": Mutant("a node that has been away once has flapped", _blame_returns),
    "ignore_returns": Mutant("a lost node whose beats are heard again stays lost", _ignore_returns),
    "forget_convictions": Mutant("nodes on which replicas differ are checked one by one", _forget_convictions),
    "judge_when_deaf": Mutant("a head that hears no node declares each of them lost", _judge_when_deaf),
}
