"""The effect of each fault on the world, and its time. Rules: `faults/faults.py`."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from unicrond.agents.core.state import AcceleratorSaw
from unicrond.replay.simulation.cluster.host import Host
from unicrond.replay.simulation.cluster.world import World, hosts_of, until, victims_of
from unicrond.replay.simulation.effects import forgeries, link_effects, people_effects, program_effects
from unicrond.replay.simulation.faults.faults import FAULTY_UNTIL_S, SimulatedFault, is_calm, is_one_way

#: Faults of the connections between nodes.
_OF_LINKS = ("break_links", "cut_peers", "isolate", "sick_links")


def arrange(world: World, faults: list[SimulatedFault]) -> None:
    """Schedule the faults for their times."""
    if any(map(is_one_way, faults)):
        world.checker.ways.alone = all(map(is_one_way, faults))
        link_effects.watch_ways(world)
    for fault in faults:
        world.checker.touched |= {*fault.nodes}
        world.checker.people.calm &= is_calm([fault])
        if fault.kind in _OF_LINKS:
            world.checker.bad_ends |= {*fault.nodes}
        world.loop.call_at(fault.at_s, EFFECTS[fault.kind], world, fault)


# --- head and log --------------------------------------------------------------------------------


def _crash_coordinator(world: World, fault: SimulatedFault) -> None:
    for head in world.coordinators.living[:1]:
        world.coordinators.crash(head, fault.how)  # type: ignore[arg-type]  # `how` is a boundary


def _second_coordinator(world: World, fault: SimulatedFault) -> None:
    """Start a second coordinator; where heads have a lease, two of an older version, which has none."""
    for _ in range(2 if fault.how == "two" else 1):
        world.coordinators.start(is_leased=fault.how != "two")


def _cut_coordinator(world: World, fault: SimulatedFault) -> None:
    for link in world.coordinators.links[:1]:
        link.cut = True
        until(world, fault, lambda link=link: setattr(link, "cut", False))  # type: ignore[misc]


def _crash_log(world: World, fault: SimulatedFault) -> None:
    world.server.crash()
    if world.coordinators.lease is not None:
        world.coordinators.lease.forget()
    until(world, fault, world.server.start)


def _slow_disk(world: World, fault: SimulatedFault) -> None:
    sound, world.server.sync_s = (0.0002, 0.002), (0.05, float(fault.how))
    until(world, fault, lambda: setattr(world.server, "sync_s", sound))


def _forgetful_log(world: World, fault: SimulatedFault) -> None:
    world.server.forgets = True
    until(world, fault, lambda: setattr(world.server, "forgets", False))


def _garbage(world: World, fault: SimulatedFault) -> None:
    world.server.garble()


# --- nodes ---------------------------------------------------------------------------------------


def _crash_agent(world: World, fault: SimulatedFault) -> None:
    for host in hosts_of(world, fault):
        agent = host.agent
        if agent is None or not agent.alive:
            continue
        if fault.how == "":
            agent.crash()
        elif fault.how == "memory":
            agent.crash_before_memory = True
        elif fault.how.startswith("action"):
            agent.crash_after_actions = int(fault.how[-1])
        else:
            agent.log.crash_at = fault.how  # type: ignore[assignment]  # `how` is a boundary


def _agent_away(world: World, fault: SimulatedFault) -> None:
    def back(host: Host) -> None:
        """Start the agent again."""
        host.supervised = True
        host.run_agent()

    for host in hosts_of(world, fault):
        host.supervised = False
        if host.agent is not None:
            host.agent.crash()
        until(world, fault, lambda host=host: back(host))  # type: ignore[misc]


def _second_agent(world: World, fault: SimulatedFault) -> None:
    """Start a second machine under the node's name. It stays, or leaves; or the first one is cut off in the
    meantime."""
    for host in hosts_of(world, fault):
        if not host.on or host.twin is not None:
            continue
        twin = host.start_twin()
        if fault.how == "cut":
            host.link.cut = True
            until(world, fault, lambda host=host: setattr(host.link, "cut", False))  # type: ignore[misc]
        elif fault.how == "leaves":

            def leave(twin: Host = twin) -> None:
                """Let the second machine leave."""
                if twin.agent is not None and twin.agent.alive:
                    twin.agent.leave()

            until(world, fault, leave)


def _crash_fork_server(world: World, fault: SimulatedFault) -> None:
    for host in hosts_of(world, fault):
        if host.fork_server is not None:
            host.fork_server.die()


def _power_off(world: World, fault: SimulatedFault) -> None:
    for host in hosts_of(world, fault):
        host.power_off()
        disk_lost = fault.how == "disk_lost"
        if fault.pick == 5:
            world.loop.call_later(0.8 * fault.for_s, people_effects.forget, world, host)
        until(world, fault, lambda host=host, disk_lost=disk_lost: host.power_on(disk_lost=disk_lost))  # type: ignore[misc]


def _step_clock(world: World, fault: SimulatedFault) -> None:
    for host in hosts_of(world, fault):
        host.clock.step_us = int(fault.how) * 1_000_000
        until(world, fault, lambda host=host: setattr(host.clock, "step_us", 0))  # type: ignore[misc]


def _step_log_clock(world: World, fault: SimulatedFault) -> None:
    world.log_clock.step_us = int(fault.how) * 1_000_000
    until(world, fault, lambda: setattr(world.log_clock, "step_us", 0))


def _disk_full(world: World, fault: SimulatedFault) -> None:
    for host in hosts_of(world, fault):
        host.disk.full = True
        until(world, fault, lambda host=host: setattr(host.disk, "full", False))  # type: ignore[misc]


def _redeliver(world: World, fault: SimulatedFault) -> None:
    """Drop the node's consumer, which is created again: every command of the past arrives again."""
    for host in hosts_of(world, fault):
        world.server.consumers.pop(host.name, None)
        if host.agent is not None:
            host.agent.crash()


# --- workers -------------------------------------------------------------------------------------


def _kill_worker(world: World, fault: SimulatedFault) -> None:
    for process in victims_of(world, fault):
        if fault.how and process.replica is not None:
            process.replica.die_at = fault.how  # type: ignore[assignment]  # `how` is a moment
        else:
            process.end(signal.SIGKILL)


def _hang_worker(world: World, fault: SimulatedFault) -> None:
    """Hang the whole process, shown as stopped or not; or its main thread alone, for a time or for ever."""
    for process in victims_of(world, fault):
        process.hung = fault.how in ("", "stopped")
        process.sigstopped = fault.how == "stopped"
        process.stuck = not process.hung
        process.for_ever = fault.how == "for_ever"
        until(world, fault, process.resume)


def _hang_after_join(world: World, fault: SimulatedFault) -> None:
    """Kill a worker; the worker that takes its place, or joins a running task on this node, stands still within its
    first iterations, for ever."""
    for node in fault.nodes:
        world.training.join_hangers[node] = 0.1 * fault.pick
        until(world, fault, lambda node=node: world.training.join_hangers.pop(node, None))  # type: ignore[misc]
    for process in victims_of(world, fault):
        process.end(signal.SIGKILL)


def _end_early(world: World, fault: SimulatedFault) -> None:
    """End the program in mid-training, with exit code 0."""
    for process in victims_of(world, fault):
        process.end(0)


def _raise_in_worker(world: World, fault: SimulatedFault) -> None:
    for process in victims_of(world, fault):
        if process.replica is not None:
            process.replica.raise_in(fault.how)  # type: ignore[arg-type]  # `how` is an error kind


def _report_error(world: World, fault: SimulatedFault) -> None:
    """Report an error of the worker, which continues."""
    for process in victims_of(world, fault):
        if process.replica is not None:
            process.replica.report(fault.how)  # type: ignore[arg-type]  # `how` is an error kind


def _ill_accelerator(world: World, fault: SimulatedFault) -> None:
    """Report an error of an accelerator by its driver, with or without a worker; without a kind it is only information,
    or predicts a failure. For a while the node fails its health checks; a GPU that is broken needs a reboot, too."""
    workers = {process.host.name: process.worker for process in victims_of(world, fault)}
    for host in hosts_of(world, fault):
        if host.agent is not None:
            worker = workers.get(host.name, "") if fault.pick else ""
            is_forecast = fault.how == "foretold"
            kind: Any = None if is_forecast else fault.how or None
            needs: Any = "reboot" if kind == "gpu_broken" else ""
            saw = AcceleratorSaw(
                accelerator="GPU 0", worker=worker, kind=kind, xid=0, message="simulated", repair_need=needs
            )
            host.agent.feed(replace(saw, predicts_failure=is_forecast))
            host.is_unhealthy = bool(fault.how)
            until(world, fault, lambda host=host: setattr(host, "is_unhealthy", False))  # type: ignore[misc]


def _reset_group(world: World, fault: SimulatedFault) -> None:
    for process in victims_of(world, fault):
        if process.replica is not None:
            process.replica.reset([process.replica.shards.index(process)])


def _sick_links(world: World, fault: SimulatedFault) -> None:
    """Reset the connections of the node's replica again and again."""

    def again() -> None:
        """Reset the group, and schedule the next reset."""
        _reset_group(world, fault)
        if world.loop.time() < min(fault.at_s + fault.for_s, FAULTY_UNTIL_S - 1.0):
            world.loop.call_later(0.1 + 0.2 * fault.pick, again)

    again()


def _break_links(world: World, fault: SimulatedFault) -> None:
    """Break the connections of the nodes' replicas at each iteration's start."""
    world.training.link_breakers |= {*fault.nodes}
    until(world, fault, lambda: world.training.link_breakers.difference_update(fault.nodes))


def _break_worker_line(world: World, fault: SimulatedFault) -> None:
    for process in victims_of(world, fault):
        agent = world.hosts[process.host.name].agent
        if agent is not None and agent.alive:
            agent.break_worker_line(process.worker)


def _break_fork_line(world: World, fault: SimulatedFault) -> None:
    for host in hosts_of(world, fault):
        if host.agent is not None and host.agent.alive:
            host.agent.lose_fork_server(has_died=False)


#: The effect of each kind of fault of faults.py.
EFFECTS: dict[str, Callable[[World, SimulatedFault], None]] = {
    "crash_coordinator": _crash_coordinator,
    "second_coordinator": _second_coordinator,
    "cut_coordinator": _cut_coordinator,
    "crash_log": _crash_log,
    "slow_disk": _slow_disk,
    "forgetful_log": _forgetful_log,
    "garbage": _garbage,
    "edge_events": forgeries.edge_events,
    "forged_claim": forgeries.forged_claim,
    "lying_node": forgeries.lying_node,
    "large_events": forgeries.large_events,
    "crash_agent": _crash_agent,
    "restart_agent": people_effects.restart_agent,
    "end_agent": people_effects.end_agent,
    "change_version": people_effects.change_version,
    "agent_away": _agent_away,
    "second_agent": _second_agent,
    "crash_fork_server": _crash_fork_server,
    "power_off": _power_off,
    "kill_worker": _kill_worker,
    "end_early": _end_early,
    "hang_worker": _hang_worker,
    "hang_after_join": _hang_after_join,
    "raise_in_worker": _raise_in_worker,
    "report_error": _report_error,
    "ill_accelerator": _ill_accelerator,
    "order_fault": people_effects.order_fault,
    "cordon": people_effects.cordon,
    "maintain": people_effects.maintain,
    "reset_group": _reset_group,
    "sick_links": _sick_links,
    "break_links": _break_links,
    "break_worker_line": _break_worker_line,
    "break_fork_line": _break_fork_line,
    "cut_log": link_effects.cut_log,
    "all_silent": link_effects.all_silent,
    "domain_down": link_effects.domain_down,
    "cut_peers": link_effects.cut_peers,
    "isolate": link_effects.isolate,
    "bad_weather": link_effects.bad_weather,
    "step_clock": _step_clock,
    "step_log_clock": _step_log_clock,
    "redeliver": _redeliver,
    "disk_full": _disk_full,
    "leave": people_effects.leave,
    "cancel": people_effects.cancel,
    "reshape": people_effects.reshape,
    "observe": people_effects.observe,
    "bad_program": program_effects.bad_program,
    "flood": program_effects.flood,
    "other_bits": program_effects.other_bits,
    "slow_node": program_effects.slow_node,
}
