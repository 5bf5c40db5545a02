"""Simulated runs of seeds: one, from the first event to rest, or many on all cores.

A run has a faulty phase; then there are no more faults, and a bounded time to come to rest.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import msgspec

from unicrond.core.state.state import ClusterState, TaskStatus
from unicrond.core.state.state_bytes import digest
from unicrond.replay.simulation.checks import invariants as rules
from unicrond.replay.simulation.cluster.world import World
from unicrond.replay.simulation.effects.fault_effects import arrange
from unicrond.replay.simulation.faults.faults import FAULTY_UNTIL_S, SimulatedFault, history_of
from unicrond.replay.simulation.models.virtual_time import VirtualLoop

#: The longest time from the last fault to rest (isolations double; several may be in force at the end).
REST_WITHIN_S = 240.0
#: The cluster is at rest when no rule complains for so long.
_QUIET_S = 4.0
_LOOK_S = 0.5
#: Rules of rest that compare with the tasks' progress when rest began: they hold for a quiet cluster alone.
_GETTING_ON = ("tasks_train", "states_have_copies")


class RunOutcome(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The outcome of a seed. `rule` "": every rule held. `faults`: those that were played.

    `rest_s`: from the last fault to rest. `digest`: of the final state; equal runs have equal digests.
    `micro_batches_repeated`: micro-batches computed again, `iterations_lost`: both of closed incidents."""

    seed: int
    faults: tuple[SimulatedFault, ...]
    rule: str = ""
    story: str = ""
    at_s: float = 0.0
    rest_s: float = 0.0
    entries: int = 0
    steps: int = 0
    incidents: int = 0
    generations: int = 0
    digest: str = ""
    micro_batches_repeated: int = 0
    iterations_lost: int = 0


def history(seed: int) -> list[SimulatedFault]:
    """Return the faults that the seed draws."""
    with _world(seed) as world:
        return history_of(world.rng, list(world.hosts))


def simulate(seed: int, faults: Sequence[SimulatedFault] | None = None) -> RunOutcome:
    """Play a seed, with its own faults or with a part of them."""
    with _world(seed) as world:
        active = tuple(history_of(world.rng, list(world.hosts)) if faults is None else faults)
        arrange(world, list(active))
        world.loop.run_until_complete(_play(world))
        state, violation = world.checker.state, world.checker.violation
        return RunOutcome(
            seed=seed,
            faults=active,
            rule=violation.rule if violation else "",
            story=violation.story if violation else "",
            at_s=round(world.loop.time(), 3),
            rest_s=round(max(0.0, world.loop.time() - FAULTY_UNTIL_S), 3),
            entries=len(world.server.entries),
            steps=world.checker.steps,
            incidents=state.incidents_total,
            generations=sum(task.generation for task in state.tasks.values()),
            digest=digest(state),
            micro_batches_repeated=sum(incident.micro_batches_repeated for incident in state.closed_incidents),
            iterations_lost=sum(incident.iterations_lost for incident in state.closed_incidents),
        )


@contextmanager
def _world(seed: int) -> Iterator[World]:
    """Yield a world in its own loop; nothing of it outlives the block. Garbage collection waits: most objects are not
    garbage."""
    logging_was, collecting = logging.root.manager.disable, gc.isenabled()
    logging.disable(logging.CRITICAL)
    gc.disable()
    loop = VirtualLoop()
    try:
        world = World(seed, loop)

        def failed(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
            """Record an exception that reached the loop."""
            error = context.get("exception")
            world.checker.record_breach("nothing_crashes", f"{type(error).__name__}: {error} ({context['message']})")

        loop.set_exception_handler(failed)
        try:
            yield world
        finally:
            loop.set_exception_handler(lambda *_: None)
            world.close()
    finally:
        logging.disable(logging_was)
        if collecting:
            gc.enable()


async def _play(world: World) -> None:
    world.begin()
    if await _broke_within(world, FAULTY_UNTIL_S):
        return
    world.heal()
    world.uncordon_all()
    world.give_up_programs()
    world.submit_last()
    resting_since_s, before = -1.0, dict(world.checker.committed)
    while world.loop.time() < FAULTY_UNTIL_S + REST_WITHIN_S:
        if await _broke_within(world, _LOOK_S):
            return
        world.answer_calls()
        for rule, story in world.checker.people.at_look(world.checker.state, world.loop.time()):
            world.checker.record_breach(rule, story)
        if _unrest(world, {}) not in ("", *_GETTING_ON):
            resting_since_s, before = -1.0, dict(world.checker.committed)
        elif resting_since_s < 0:
            resting_since_s = world.loop.time()
        elif world.loop.time() - resting_since_s >= _QUIET_S and not _unrest(world, before):
            _at_rest(world)
            return
    rule = _unrest(world, before) or "decide_is_quiet_at_rest"
    world.checker.record_breach(rule, f"not at rest after {REST_WITHIN_S:g} s: {_unrest_reason(world, before)}")


async def _broke_within(world: World, duration_s: float) -> bool:
    try:
        async with asyncio.timeout(duration_s):
            await world.checker.breach.wait()
    except TimeoutError:
        return False
    return True


def _complaints(world: World, before: dict[str, int]) -> Iterator[tuple[str, str]]:
    state = world.checker.state
    faults = [head.coordinator.fault for head in world.coordinators.living]
    yield "coordinators_decide", "; ".join(fault for fault in faults if fault)
    twins = [host.twin for host in world.hosts.values() if host.twin is not None]
    yield (
        "one_agent_of_a_name",
        rules.one_agent_of_a_name([twin.name for twin in twins if twin.agent and twin.agent.alive]),
    )
    yield "nodes_are_seen", rules.nodes_are_seen(state, [host.name for host in world.hosts.values() if host.on])
    yield "memory_is_given_back", rules.memory_is_given_back(state, _keeping(world))
    yield "incidents_close", rules.incidents_close(state)
    living = [
        (host.name, process.launch.task, process.worker)
        for host in [*world.hosts.values(), *twins]
        for process in host.processes
        if process.alive or not host.is_twin  # a second machine's fork server has no agent once that has ended
    ]
    yield "no_process_is_left", rules.no_process_is_left(state, living)
    yield "decide_is_quiet_at_rest", rules.decide_is_quiet_at_rest(state, world.policy)
    yield from world.checker.people.unrest()
    yield "tasks_train", rules.tasks_train(state, _training(world, state, before))
    yield "states_have_copies", rules.states_have_copies(state, _copies(world, state, before))


def _copies(world: World, state: ClusterState, before: dict[str, int]) -> dict[str, int]:
    """Return, per active task with workers, how many nodes have a state of a shard not much older than `before`; the
    least."""
    counts = {}
    for name, task in state.tasks.items():
        assignment = state.plan.assignments.get(name)
        if task.status is TaskStatus.ACTIVE and assignment is not None and assignment.workers:
            since = before.get(name, 0) - 2 * world.training.capture_every
            shards = range(task.spec.replica_workers)
            counts[name] = min(_count_holders(world, name, shard, since) for shard in shards)
    return counts


def _count_holders(world: World, task: str, shard: int, since: int) -> int:
    """Count the nodes that have a state of the shard after `since` or a later iteration."""
    servers = [host.fork_server for host in world.hosts.values() if host.fork_server is not None]
    return sum(any(copy.iteration >= since for copy in server.memory.copies_of(task, shard)) for server in servers)


def _keeping(world: World) -> list[tuple[str, str]]:
    """List the (node, task) of every state in memory."""
    servers = {name: host.fork_server for name, host in world.hosts.items()}
    return [(name, task) for name, server in servers.items() if server is not None for task in server.memory.tasks]


def _training(world: World, state: ClusterState, before: dict[str, int]) -> dict[str, bool]:
    """Return whether each task has committed since `before`."""
    committed = world.checker.committed
    return {
        name: committed.get(name, 0) > before.get(name, 0)
        for name, task in state.tasks.items()
        if task.status is TaskStatus.ACTIVE
    }


def _unrest(world: World, before: dict[str, int]) -> str:
    """Return the first rule of rest that does not hold yet; "" at rest."""
    return next((rule for rule, story in _complaints(world, before) if story), "")


def _unrest_reason(world: World, before: dict[str, int]) -> str:
    stories = [(rule, story) for rule, story in _complaints(world, before) if story]
    unquiet = [story for rule, story in stories if rule not in _GETTING_ON]
    return "; ".join(unquiet or [story for _, story in stories])[:2000]


def _at_rest(world: World) -> None:
    checker = world.checker
    story = rules.acknowledged_events_stay(world.server.entries, checker.acknowledgements)
    checker.record_breach("acknowledged_events_stay", story)
    checker.record_breach("books_close", rules.goodput_closes(checker.states, world.server.entries))
    for head in world.coordinators.living:
        state = head.coordinator.state
        checker.record_breach("replay_equals_live", rules.replay_equals_live(state, checker.states[state.seq]))


_CHUNK = 8


def outcomes(
    seeds: Sequence[int], processes: int, apply_mutant: Callable[[], object] | None = None
) -> Iterator[RunOutcome]:
    """Yield the outcomes in no certain order. `apply_mutant`: puts a deliberate bug (table.py) into every process."""
    # Spawned, not forked: the caller may have threads, and nothing of it shall be in the simulation.
    context = multiprocessing.get_context("spawn")
    at_once = 1 if apply_mutant else _CHUNK  # a search for a bug stops at the first seed that shows it
    with context.Pool(processes, _prepare, (apply_mutant,)) as pool:
        yield from pool.imap_unordered(simulate, seeds, chunksize=at_once)


def cores() -> int:
    """Count the cores that this process may use."""
    with suppress(AttributeError):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _prepare(apply_mutant: Callable[[], object] | None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and ends us
    if apply_mutant:
        apply_mutant()
