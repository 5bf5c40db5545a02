"""The nodes and workers that a simulated fault concerns, and the end of a fault."""

from __future__ import annotations

from collections.abc import Callable

from unicrond.replay.simulation.cluster.host import Host
from unicrond.replay.simulation.cluster.world import World
from unicrond.replay.simulation.faults.faults import FAULTY_UNTIL_S, SimulatedFault
from unicrond.replay.simulation.trainer.process import Process


def until(world: World, fault: SimulatedFault, undo: Callable[[], object]) -> None:
    """Undo a fault after its time, unless the faulty phase ends before: healing has undone it by then."""
    if fault.at_s + fault.for_s < FAULTY_UNTIL_S:
        world.loop.call_later(fault.for_s, undo)


def hosts_of(world: World, fault: SimulatedFault) -> list[Host]:
    """Return the fault's nodes."""
    return [world.hosts[name] for name in fault.nodes if name in world.hosts]


def victims_of(world: World, fault: SimulatedFault) -> list[Process]:
    """Return one living worker per node."""
    living = [[process for process in host.processes if process.alive] for host in hosts_of(world, fault)]
    return [processes[fault.pick % len(processes)] for processes in living if processes]
