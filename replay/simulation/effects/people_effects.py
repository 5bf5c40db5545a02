"""The faults that people cause: they order faults, cordon, plan maintenance, cancel and reshape; restart agents with
other versions, and take nodes away. Rules: `faults.py`."""

from __future__ import annotations

from unicrond.events import vocabulary as v
from unicrond.replay.simulation.cluster.host import Host
from unicrond.replay.simulation.cluster.world import World, hosts_of, until, victims_of
from unicrond.replay.simulation.faults.faults import FAULTY_UNTIL_S, SimulatedFault

#: Seconds from SIGTERM to SIGKILL.
_GRACE_S = 8.0


def order_fault(world: World, fault: SimulatedFault) -> None:
    """Order a fault by unicronctl inject: now, at the next such phase, or in a later iteration."""
    for process in victims_of(world, fault):
        kind, worker = ("kill", "") if fault.how == "kill_node" else (fault.how, process.worker)
        committed = world.checker.committed.get(process.launch.task, 0)
        order = v.Fault(
            kind=kind,  # type: ignore[arg-type]  # `how` is a fault's kind
            worker="" if kind == "drop_network" else worker,
            phase=("", "", "backward", "reduce", "step", "regroup")[fault.pick] if worker else "",
            at_iteration=committed + 2 if worker and fault.pick % 2 else 0,
            seconds=fault.for_s if kind in ("drop_network", "slow") else 0.0,
        )
        world.ask(v.InjectionRequested(node=process.host.name, fault=order))


def cordon(world: World, fault: SimulatedFault) -> None:
    """Cordon the nodes, with or without a drain, and uncordon them after the fault's time."""
    for host in hosts_of(world, fault):
        world.cordoned.add(host.name)
        by_us = world.log_clock.wall_us() + int(fault.for_s / 2 * 1e6) if fault.how == "by" else 0
        drain = fault.how != ""
        world.ask(v.NodeCordoned(node=host.name, drain=drain, reason="simulated", empty_by_us=by_us))
        event = v.NodeUncordoned(node=host.name, reason="simulated")
        until(world, fault, lambda event=event: world.ask(event))  # type: ignore[misc]


def maintain(world: World, fault: SimulatedFault) -> None:
    """Plan a window that begins after half of the fault's time, and ends with it, or is cancelled before."""
    begins_us = world.log_clock.wall_us() + int(fault.for_s / 2 * 1e6)
    until_us = begins_us + int(fault.for_s / 2 * 1e6) + 1
    nodes = tuple(host.name for host in hosts_of(world, fault))
    world.ask(v.MaintenancePlanned(nodes=nodes, from_us=begins_us, until_us=until_us, reason="simulated"))
    if fault.how == "cancelled":
        world.loop.call_later(fault.for_s / 3, world.cancel_maintenance)


def observe(world: World, fault: SimulatedFault) -> None:
    """Have the cluster, or a task, observed for the fault's time, and no longer than there are faults."""
    task = f"t{fault.pick % 3}" if fault.how == "task" else ""
    world.ask(v.ModeRequested(mode="observe", task=task, reason="simulated"))
    for_s = min(fault.for_s, FAULTY_UNTIL_S - fault.at_s)
    world.loop.call_later(for_s, world.ask, v.ModeRequested(mode="heal", task=task, reason="simulated"))


def cancel(world: World, fault: SimulatedFault) -> None:
    """Cancel a task."""
    world.ask(v.TaskCancelled(task=f"t{fault.pick % 3}", reason="simulated"))


def reshape(world: World, fault: SimulatedFault) -> None:
    """Request another tp and pp, one replica or two: no fault, but a disturbance."""
    tp, pp = map(int, fault.how.split())
    most = (1 + fault.pick // 3 % 2) * tp * pp
    task = f"t{fault.pick % 3}"
    world.ask(v.ReshapeRequested(task=task, tp=tp, pp=pp, min_workers=tp * pp, max_workers=most, reason="simulated"))


def restart_agent(world: World, fault: SimulatedFault) -> None:
    """Restart the agents; their workers go on."""
    for host in hosts_of(world, fault):
        if host.agent is not None and host.agent.alive:
            world.loop.create_task(host.agent.hand_over())


def end_agent(world: World, fault: SimulatedFault) -> None:
    """Send SIGTERM, and the node is drained. At the end of the grace time, which an impatient sender cuts short, all
    that is left there gets SIGKILL. The next agent starts then; in another pod, with nothing of the one before."""
    for host in hosts_of(world, fault):
        agent = host.agent
        if agent is None or not agent.alive:
            continue
        host.pod_ends = fault.how.endswith("pod")
        agent.terminate(_GRACE_S)
        patience_s = fault.for_s / 8 if fault.how.startswith("impatient") else _GRACE_S
        world.loop.call_later(patience_s, host.kill, agent)


def change_version(world: World, fault: SimulatedFault) -> None:
    """Install another version, and restart the agent."""
    for host in hosts_of(world, fault):
        host.schema = int(fault.how)
    restart_agent(world, fault)


def leave(world: World, fault: SimulatedFault) -> None:
    """Take the nodes away; some are forgotten, the others come back after the fault's time."""
    for host in hosts_of(world, fault):
        if host.agent is None or not host.agent.alive:
            continue
        if fault.pick == 5:
            forget(world, host, leave=True)
            continue
        host.agent.leave()
        if fault.pick == 4:
            world.loop.call_later(fault.for_s / 2, forget, world, host)
        until(world, fault, host.let_run)


def forget(world: World, host: Host, *, leave: bool = False) -> None:
    """Remove the node by unicronctl forget: a person says that it does not come back, and may err."""
    world.ask(v.ForgetRequested(node=host.name, leave=leave, reason="simulated"))
