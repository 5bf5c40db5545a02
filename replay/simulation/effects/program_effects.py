"""What people and their programs bring: garbage programs, floods of debug tasks; and nodes that are slow for a while.
Rules: `faults.py`."""

from __future__ import annotations

from unicrond.events import vocabulary as v
from unicrond.replay.simulation.cluster.world import World, hosts_of, until
from unicrond.replay.simulation.faults.faults import SimulatedFault
from unicrond.replay.simulation.trainer.programs import GarbageProgram

_FOREVER = 1_000_000
_FLOOD_EVERY_S = 2.5
_DEBUG_ITERATIONS = 6


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
