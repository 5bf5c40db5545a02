"""What people and their programs bring: garbage programs, floods of debug tasks; nodes that are slow for a while, and
replicas that compute other bits. Rules: `faults.py`."""

from __future__ import annotations

from collections import Counter

from unicrond.core.state.state import Task
from unicrond.core.state.workers import Membership
from unicrond.events import vocabulary as v
from unicrond.replay.simulation.cluster.world import World, hosts_of, until
from unicrond.replay.simulation.faults.faults import FAULTY_UNTIL_S, SimulatedFault
from unicrond.replay.simulation.trainer.programs import GarbageProgram

_FOREVER = 1_000_000
_FLOOD_EVERY_S = 2.5
_DEBUG_ITERATIONS = 6
_BITS_EVERY_S = 1.5
#: Of fewer replicas none is convicted.
_MOST_MIN = 3


def bad_program(world: World, fault: SimulatedFault) -> None:
    """Submit a task whose program is garbage, of the others' priority or a lower one, which may be worth more."""
    spec = v.TaskSpec(
        name=f"garbage{round(fault.at_s * 1000)}",
        weight=(1.0, 1.0, 3.0)[fault.pick % 3],
        priority=-(fault.pick % 2),
        max_workers=1 + fault.pick // 3,
        global_batch=4,
        iterations=_FOREVER,
        checkpoint=v.CheckpointSpec(dir="/checkpoints", interval=3),
    )
    program = GarbageProgram(fault.how, 1 + 2 * fault.pick)  # type: ignore[arg-type]  # `how` is a flaw
    world.training.programs[spec.name] = program
    world.submit_program(spec)


def flood(world: World, fault: SimulatedFault) -> None:
    """Submit a debug task every few seconds: one worker, worth next to nothing, over soon."""
    for number in range(1 + int(fault.for_s / _FLOOD_EVERY_S)):
        spec = v.TaskSpec(
            name=f"debug{round(fault.at_s * 1000)}x{number}",
            weight=0.01,
            priority=-(fault.pick % 2),
            global_batch=4,
            iterations=_DEBUG_ITERATIONS,
            checkpoint=v.CheckpointSpec(dir="/checkpoints", interval=3),
        )
        world.loop.call_later(number * _FLOOD_EVERY_S, world.submit_program, spec)


def slow_node(world: World, fault: SimulatedFault) -> None:
    """Make the nodes compute more slowly; after the fault's time they are as fast as before."""
    for host in hosts_of(world, fault):
        world.training.slowness[host.name] = float(fault.how)
        until(world, fault, lambda name=host.name: world.training.slowness.pop(name, None))  # type: ignore[misc]


def other_bits(world: World, fault: SimulatedFault) -> None:
    """Have one replica of a task accused of other bits every few seconds, as the others do in an iteration: the one on
    the fault's node, or by turns one on each of the task's nodes."""
    is_programs, times = fault.how == "program", Counter[str]()

    def again() -> None:
        """Send the accusations once, and schedule the next time."""
        for task in world.checker.state.active:
            if task.membership is None or not task.confirmed or task.membership.replica_count < _MOST_MIN:
                continue
            nodes = {member.node for member in task.membership.members}
            suspects = sorted(nodes if is_programs else nodes & {*fault.nodes})
            if suspects:
                node = min(suspects, key=times.__getitem__)
                times[node] += 1
                if is_programs:
                    world.checker.people.odd.setdefault(task.name, set())
                _accuse(world, task, task.membership, node)
                break
        if world.loop.time() < min(fault.at_s + fault.for_s, FAULTY_UNTIL_S - 1.0):
            world.loop.call_later(_BITS_EVERY_S, again)

    again()


def _accuse(world: World, task: Task, membership: Membership, node: str) -> None:
    """Have each other replica say that one on the node has other parameters."""
    suspect = next(member for member in membership.members if member.node == node)
    processes = {process.worker: process for host in world.hosts.values() for process in host.processes}
    for member in membership.members:
        process = processes.get(member.worker)
        if member.shard != suspect.shard or member is suspect or process is None or not process.alive:
            continue
        process.send(
            v.CorruptionSuspected(
                **process.reporter,
                generation=membership.generation,
                iteration=task.progress.iteration + 1,
                sign="checksum",
                suspect=suspect.worker,
                value=1.0,
                usual=0.0,
            )
        )
