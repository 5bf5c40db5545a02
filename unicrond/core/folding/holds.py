"""Holds: decisions that are not carried out, and what the brakes count. The rules: nodes/brakes.py."""

from __future__ import annotations

from msgspec.structs import replace

from unicrond.core.folding import failure_counts as strikes
from unicrond.core.folding import incidents
from unicrond.core.folding.incidents import Fact
from unicrond.core.nodes import brakes, isolation
from unicrond.core.state.changes import with_task
from unicrond.core.state.holds import StandingHold
from unicrond.core.state.state import ClusterState, Worker
from unicrond.events import vocabulary as v
from unicrond.events.wire.envelope import Envelope


def decision_held(state: ClusterState, event: v.DecisionHeld, _: Envelope) -> ClusterState:
    """Note what is not done, and why."""
    old, node = state.holds.get(event.key), state.nodes.get(event.node)
    hold = StandingHold(
        action=event.action,
        limit=event.limit,
        reason=event.reason,
        since_us=old.since_us if old else state.now_us,
        node=event.node,
        task=event.task,
        worker=event.worker,
        cause=isolation.cause_beside_forecast(state, node) if node and event.action == "isolation" else "",
        blows_over=old.blows_over if old else 0,
    )
    return replace(state, holds=state.holds | {event.key: hold})


def mode_requested(state: ClusterState, event: v.ModeRequested, _: Envelope) -> ClusterState:
    """Set the mode of the cluster, or of one task."""
    if not event.task:
        return replace(state, mode=event.mode)
    task = state.tasks.get(event.task)
    return state if task is None else with_task(state, replace(task, mode=event.mode))


def hold_lifted(state: ClusterState, event: v.HoldLifted, _: Envelope) -> ClusterState:
    """Drop the hold."""
    return without_hold(state, event.key)


def without_hold(state: ClusterState, key: str) -> ClusterState:
    """Return the state without the hold of this key."""
    if key not in state.holds:
        return state
    return replace(state, holds={name: hold for name, hold in state.holds.items() if name != key})


def without_node(state: ClusterState, name: str) -> ClusterState:
    """Return the state without what is held about the node."""
    if not any(hold.node == name for hold in state.holds.values()):
        return state
    return replace(state, holds={key: hold for key, hold in state.holds.items() if hold.node != name})


def count_isolation(state: ClusterState, name: str) -> ClusterState:
    """Count an isolation, which ends the hold on it; not that of a node which a person has drained."""
    state = without_hold(state, v.hold_key("isolation", node=name))
    if brakes.is_drained(state, name):
        return state
    return replace(state, isolations_us=(*brakes.within_hour(state.isolations_us, state.now_us), state.now_us))


def acquit_node(state: ClusterState, name: str) -> ClusterState:
    """Return the state after a person has said that the node may work: what is held against it is forgotten."""
    if brakes.isolation_hold(state, name) is None:
        return state
    for task in state.tasks.values():
        if task.troubles.names(name) or name in task.troubles.ends:
            state = with_task(state, replace(task, troubles=strikes.readmit(task.troubles, name)))
    return without_hold(state, v.hold_key("isolation", node=name))


def count_eviction(state: ClusterState, name: str) -> ClusterState:
    """Count that workers of the task are given up on suspicion."""
    task = state.tasks[name]
    times_us = brakes.with_eviction(task, state.now_us)
    return with_task(state, replace(task, troubles=replace(task.troubles, evictions_us=times_us)))


def suspect(
    state: ClusterState, name: str, worker: Worker, kind: v.ErrorKind, failure: str, occurred_us: int
) -> ClusterState:
    """Give the worker up on suspicion; where a limit holds that, an incident has it, and `decide` waits for the limit.
    `failure`: what the worker does, in words."""
    task = state.tasks[name]
    if brakes.eviction_limit(state, task) is None:
        return strikes.give_up(count_eviction(state, name), name, worker, kind, failure, occurred_us)
    fact = Fact(
        kind=kind,
        node=worker.node,
        worker=worker.worker,
        generations={name: incidents.broken_generation(task, [worker.worker])},
        message=f"worker {worker.worker} on {worker.node} {failure}"[:1024],
        occurred_us=occurred_us,
    )
    return incidents.blame(state, fact)


def deadline_passed(state: ClusterState, kind: str, subject: str) -> ClusterState:
    """Fold the end of `hold:` or `brake:`; one that no longer stands changes nothing."""
    name, _, number = subject.rpartition("#")
    if kind == "hold":
        hold = state.holds.get(name)
        if hold is None or str(brakes.blows_of(state, hold)) != number:
            return state
        return replace(state, holds=state.holds | {name: replace(hold, blows_over=int(number))})
    if not name:
        return replace(state, isolations_us=_after(state.isolations_us, number))
    task = state.tasks.get(name)
    if task is None:
        return state
    times_us = _after(task.troubles.evictions_us, number)
    return with_task(state, replace(task, troubles=replace(task.troubles, evictions_us=times_us)))


def _after(times_us: tuple[int, ...], time: str) -> tuple[int, ...]:
    """Return the times without the one that is an hour ago now."""
    return tuple([time_us for time_us in times_us if str(time_us) != time])
