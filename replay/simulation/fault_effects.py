"""What each fault does to the world that it strikes, and when. Rules: `faults.py`."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from agents.state import AcceleratorSaw
from events import vocabulary as v
from events.codec import API_PRODUCER
from replay.simulation.edges import KINDS, STRANGER, Edges
from replay.simulation.faults import FAULT_KINDS, FAULTY_UNTIL_S, Fault

if TYPE_CHECKING:
    from replay.simulation.host import Host
    from replay.simulation.process import Process
    from replay.simulation.world import World

#: What people may ask for by mistake is not drawn: it may do what it says (cancel the last task, drain every node).
EDGE_KINDS = tuple(
    kind
    for kind in KINDS
    # A stranger that joins is planned with until it is lost: another fault than a word too many.
    if kind not in (v.NodeJoined, v.TaskCancelled, v.NodeCordoned, v.MaintenancePlanned, v.InjectionRequested)
    and kind.__name__ != "StopAsked"
)
#: From SIGTERM to SIGKILL.
_GRACE_S = 8.0
#: Faults of the connections between nodes.
_OF_LINKS = ("break_links", "cut_peers", "isolate", "sick_links")


def arrange(world: World, faults: list[Fault]) -> None:
    """Let the faults happen when their time comes."""
    for fault in faults:
        world.witness.touched |= {*fault.nodes}
        if fault.kind in _OF_LINKS:
            world.witness.bad_ends |= {*fault.nodes}
        world.loop.call_at(fault.at_s, _EFFECTS[fault.kind], world, fault)


def _until(world: World, fault: Fault, undo: Callable[[], object]) -> None:
    """The fault ends after its time, but not after the faulty phase: healing has undone it by then."""
    if fault.at_s + fault.for_s < FAULTY_UNTIL_S:
        world.loop.call_later(fault.for_s, undo)


def _hosts(world: World, fault: Fault) -> list[Host]:
    return [world.hosts[name] for name in fault.nodes if name in world.hosts]


def _victims(world: World, fault: Fault) -> list[Process]:
    """One living worker per node."""
    living = [[process for process in host.processes if process.alive] for host in _hosts(world, fault)]
    return [processes[fault.pick % len(processes)] for processes in living if processes]


# --- head and log --------------------------------------------------------------------------------


def _crash_coordinator(world: World, fault: Fault) -> None:
    for head in world.coordinators.living[:1]:
        world.coordinators.crash(head, fault.how)  # type: ignore[arg-type]  # `how` is a boundary


def _second_coordinator(world: World, fault: Fault) -> None:
    """Where heads have a lease, two together are of an older version, which has none."""
    for _ in range(2 if fault.how == "two" else 1):
        world.coordinators.start(is_leased=fault.how != "two")


def _cut_coordinator(world: World, fault: Fault) -> None:
    for link in world.coordinators.links[:1]:
        link.cut = True
        _until(world, fault, lambda link=link: setattr(link, "cut", False))  # type: ignore[misc]


def _crash_log(world: World, fault: Fault) -> None:
    world.server.crash()
    if world.coordinators.lease is not None:
        world.coordinators.lease.forget()
    _until(world, fault, world.server.start)


def _slow_disk(world: World, fault: Fault) -> None:
    sound, world.server.sync_s = (0.0002, 0.002), (0.05, float(fault.how))
    _until(world, fault, lambda: setattr(world.server, "sync_s", sound))


def _forgetful_log(world: World, fault: Fault) -> None:
    world.server.forgets = True
    _until(world, fault, lambda: setattr(world.server, "forgets", False))


def _garbage(world: World, fault: Fault) -> None:
    world.server.garble()


def _edge_events(world: World, fault: Fault) -> None:
    """A stranger, and people, say what is valid by its types alone (edges.py), about everybody."""
    state = world.witness.state
    workers = [name for task in state.tasks.values() for name in task.workers]
    # Of nodes only one that is none: what a node says about itself is believed, be it a lie.
    edges = Edges(world.drawn(f"edges {fault.at_s}"), [STRANGER], [*state.tasks, "t9"], workers)
    for number in range(1, int(fault.how) + 1):
        kind = edges.drawn.choice(EDGE_KINDS)
        boot = edges.drawn.choice((1, 2**52 - 1))
        envelope = edges.envelope(kind, boot=boot, number=edges.drawn.choice((number, 2**53 - 1)))
        if envelope is not None and (envelope.producer == STRANGER or (envelope.producer == API_PRODUCER and boot > 1)):
            world.server.forge(envelope)


def _forged_claim(world: World, fault: Fault) -> None:
    """Somebody claims a term that is nobody's: one far away, or the next under a boot that is none."""
    next_term = world.witness.state.term + 1
    edges = Edges(world.drawn(f"claim {fault.at_s}"), [], [])
    term, boot = (10**9 - 1, 10**9 - 1) if fault.how == "far" else (next_term, 2**52 - 1)
    world.server.forge(edges.claim(term, boot))


# --- nodes ---------------------------------------------------------------------------------------


def _crash_agent(world: World, fault: Fault) -> None:
    for host in _hosts(world, fault):
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


def _restart_agent(world: World, fault: Fault) -> None:
    for host in _hosts(world, fault):
        if host.agent is not None and host.agent.alive:
            world.loop.create_task(host.agent.hand_over())


def _end_agent(world: World, fault: Fault) -> None:
    """SIGTERM, and the node is drained. At the end of the grace time, which an impatient sender cuts short, all that is
    left there gets SIGKILL. Another agent comes then; in another pod, with nothing of the one before."""
    for host in _hosts(world, fault):
        agent = host.agent
        if agent is None or not agent.alive:
            continue
        host.pod_ends = fault.how.endswith("pod")
        agent.terminate(_GRACE_S)
        patience_s = fault.for_s / 8 if fault.how.startswith("impatient") else _GRACE_S
        world.loop.call_later(patience_s, host.kill, agent)


def _change_version(world: World, fault: Fault) -> None:
    """Another version is installed, and the agent restarted."""
    for host in _hosts(world, fault):
        host.schema = int(fault.how)
    _restart_agent(world, fault)


def _agent_away(world: World, fault: Fault) -> None:
    def back(host: Host) -> None:
        host.supervised = True
        host.run_agent()

    for host in _hosts(world, fault):
        host.supervised = False
        if host.agent is not None:
            host.agent.crash()
        _until(world, fault, lambda host=host: back(host))  # type: ignore[misc]


def _second_agent(world: World, fault: Fault) -> None:
    """A second machine joins under the node's name. It stays, or leaves; or the first one is cut off meanwhile."""
    for host in _hosts(world, fault):
        if not host.on or host.twin is not None:
            continue
        twin = host.start_twin()
        if fault.how == "cut":
            host.link.cut = True
            _until(world, fault, lambda host=host: setattr(host.link, "cut", False))  # type: ignore[misc]
        elif fault.how == "leaves":

            def leave(twin: Host = twin) -> None:
                if twin.agent is not None and twin.agent.alive:
                    twin.agent.leave()

            _until(world, fault, leave)


def _crash_fork_server(world: World, fault: Fault) -> None:
    for host in _hosts(world, fault):
        if host.fork_server is not None:
            host.fork_server.die()


def _power_off(world: World, fault: Fault) -> None:
    for host in _hosts(world, fault):
        host.power_off()
        lost = fault.how == "disk_lost"
        if fault.pick == 5:
            world.loop.call_later(0.8 * fault.for_s, _forget, world, host)
        _until(world, fault, lambda host=host, lost=lost: host.power_on(disk_lost=lost))  # type: ignore[misc]


def _step_clock(world: World, fault: Fault) -> None:
    for host in _hosts(world, fault):
        host.clock.step_us = int(fault.how) * 1_000_000
        _until(world, fault, lambda host=host: setattr(host.clock, "step_us", 0))  # type: ignore[misc]


def _step_log_clock(world: World, fault: Fault) -> None:
    world.log_clock.step_us = int(fault.how) * 1_000_000
    _until(world, fault, lambda: setattr(world.log_clock, "step_us", 0))


def _disk_full(world: World, fault: Fault) -> None:
    for host in _hosts(world, fault):
        host.disk.full = True
        _until(world, fault, lambda host=host: setattr(host.disk, "full", False))  # type: ignore[misc]


def _leave(world: World, fault: Fault) -> None:
    for host in _hosts(world, fault):
        if host.agent is None or not host.agent.alive:
            continue
        if fault.pick == 5:
            _forget(world, host, leave=True)
            continue
        host.agent.leave()
        if fault.pick == 4:
            world.loop.call_later(fault.for_s / 2, _forget, world, host)
        _until(world, fault, host.let_run)


def _forget(world: World, host: Host, *, leave: bool = False) -> None:
    """unicronctl forget: a person says that the node does not come back, and may err."""
    world.ask(v.ForgetRequested(node=host.name, leave=leave, reason="simulated"))


def _redeliver(world: World, fault: Fault) -> None:
    """The node's consumer is lost and made anew: every command of the past comes again."""
    for host in _hosts(world, fault):
        world.server.consumers.pop(host.name, None)
        if host.agent is not None:
            host.agent.crash()


# --- workers -------------------------------------------------------------------------------------


def _kill_worker(world: World, fault: Fault) -> None:
    for process in _victims(world, fault):
        if fault.how and process.replica is not None:
            process.replica.die_at = fault.how  # type: ignore[assignment]  # `how` is a moment
        else:
            process.end(signal.SIGKILL)


def _hang_worker(world: World, fault: Fault) -> None:
    """The whole process, shown as stopped or not; or its main thread alone, for a time or for ever."""
    for process in _victims(world, fault):
        process.hung = fault.how in ("", "stopped")
        process.stopped = fault.how == "stopped"
        process.stuck = not process.hung
        process.for_ever = fault.how == "for_ever"
        _until(world, fault, process.go_on)


def _hang_after_join(world: World, fault: Fault) -> None:
    """A worker is killed; who takes its place, or joins a running task on this node, stands still within its first
    iterations, for ever."""
    for node in fault.nodes:
        world.training.join_hangers[node] = 0.1 * fault.pick
        _until(world, fault, lambda node=node: world.training.join_hangers.pop(node, None))  # type: ignore[misc]
    for process in _victims(world, fault):
        process.end(signal.SIGKILL)


def _end_early(world: World, fault: Fault) -> None:
    """The program ends in mid-training, with exit code 0."""
    for process in _victims(world, fault):
        process.end(0)


def _raise_in_worker(world: World, fault: Fault) -> None:
    for process in _victims(world, fault):
        if process.replica is not None:
            process.replica.raise_in(fault.how)  # type: ignore[arg-type]  # `how` is an error kind


def _report_error(world: World, fault: Fault) -> None:
    """The worker tells of an error, and goes on."""
    for process in _victims(world, fault):
        if process.replica is not None:
            process.replica.report(fault.how)  # type: ignore[arg-type]  # `how` is an error kind


def _ill_accelerator(world: World, fault: Fault) -> None:
    """A driver reports an error of an accelerator, somebody's or nobody's; without a kind it is only news, or foretells
    a failure. For a while the node fails its health checks; a GPU that is broken needs a reboot, too."""
    workers = {process.host.name: process.worker for process in _victims(world, fault)}
    for host in _hosts(world, fault):
        if host.agent is not None:
            worker = workers.get(host.name, "") if fault.pick else ""
            foretold = fault.how == "foretold"
            kind: Any = None if foretold else fault.how or None
            needs: Any = "reboot" if kind == "gpu_broken" else ""
            saw = AcceleratorSaw(accelerator="GPU 0", worker=worker, kind=kind, xid=0, message="simulated", needs=needs)
            host.agent.feed(replace(saw, foretells=foretold))
            host.ill = bool(fault.how)
            _until(world, fault, lambda host=host: setattr(host, "ill", False))  # type: ignore[misc]


def _reset_group(world: World, fault: Fault) -> None:
    for process in _victims(world, fault):
        if process.replica is not None:
            process.replica.reset([process.replica.shards.index(process)])


def _sick_links(world: World, fault: Fault) -> None:
    """Whoever trains on the node loses its connections again and again."""

    def again() -> None:
        _reset_group(world, fault)
        if world.loop.time() < min(fault.at_s + fault.for_s, FAULTY_UNTIL_S - 1.0):
            world.loop.call_later(0.1 + 0.2 * fault.pick, again)

    again()


def _break_links(world: World, fault: Fault) -> None:
    """Whoever trains on the nodes loses its connections at each iteration's start."""
    world.training.link_breakers |= {*fault.nodes}
    _until(world, fault, lambda: world.training.link_breakers.difference_update(fault.nodes))


def _break_worker_line(world: World, fault: Fault) -> None:
    for process in _victims(world, fault):
        agent = process.host.agent
        if agent is not None and agent.alive:
            agent.break_worker_line(process.worker)


def _break_fork_line(world: World, fault: Fault) -> None:
    for host in _hosts(world, fault):
        if host.agent is not None and host.agent.alive:
            host.agent.lose_fork_server(has_died=False)


# --- networks ------------------------------------------------------------------------------------


def _cut_log(world: World, fault: Fault) -> None:
    """From the log alone: their workers go on with their peers."""
    for host in _hosts(world, fault):
        host.link.cut = True
        if fault.pick == 5:
            world.loop.call_later(0.8 * fault.for_s, _forget, world, host)
        _until(world, fault, lambda host=host: setattr(host.link, "cut", False))  # type: ignore[misc]


def _cut_peers(world: World, fault: Fault) -> None:
    """From the peers alone."""
    reach = world.training.reach
    for host in _hosts(world, fault):
        for other in world.hosts:
            reach.cut(host.name, other)
            _until(world, fault, lambda one=host.name, other=other: reach.mend(one, other))  # type: ignore[misc]


def _isolate(world: World, fault: Fault) -> None:
    _cut_log(world, fault)
    _cut_peers(world, fault)


def _bad_weather(world: World, fault: Fault) -> None:
    hosts = _hosts(world, fault)
    for link in [host.link for host in hosts] + world.coordinators.links:
        if fault.how in ("loss", "all"):
            link.loss = 0.25
        if fault.how in ("repeats", "all"):
            link.repeats = 0.3
            link.in_order = False
        if fault.how in ("delay", "all"):
            link.delay_s = (0.001, 0.7)
            link.in_order = False
        _until(world, fault, link.heal)


# --- people --------------------------------------------------------------------------------------


def _order_fault(world: World, fault: Fault) -> None:
    """unicronctl inject: now, at the next such phase, or in an iteration to come."""
    for process in _victims(world, fault):
        kind, worker = ("kill", "") if fault.how == "kill_node" else (fault.how, process.worker)
        committed = world.witness.committed.get(process.launch.task, 0)
        ordered = v.Fault(
            kind=kind,  # type: ignore[arg-type]  # `how` is a fault's kind
            worker="" if kind == "drop_network" else worker,
            phase=("", "", "backward", "reduce", "step", "regroup")[fault.pick] if worker else "",
            at_iteration=committed + 2 if worker and fault.pick % 2 else 0,
            seconds=fault.for_s if kind in ("drop_network", "slow") else 0.0,
        )
        world.ask(v.InjectionRequested(node=process.host.name, fault=ordered))


def _cordon(world: World, fault: Fault) -> None:
    for host in _hosts(world, fault):
        world.cordoned.add(host.name)
        by_us = world.log_clock.wall_us() + int(fault.for_s / 2 * 1e6) if fault.how == "by" else 0
        drain = fault.how != ""
        world.ask(v.NodeCordoned(node=host.name, drain=drain, reason="simulated", empty_by_us=by_us))
        uncordoned = v.NodeUncordoned(node=host.name, reason="simulated")
        _until(world, fault, lambda uncordoned=uncordoned: world.ask(uncordoned))  # type: ignore[misc]


def _maintain(world: World, fault: Fault) -> None:
    """A window that begins after half of the fault's time, and ends with it, or is cancelled before."""
    begins_us = world.log_clock.wall_us() + int(fault.for_s / 2 * 1e6)
    until_us = begins_us + int(fault.for_s / 2 * 1e6) + 1
    nodes = tuple(host.name for host in _hosts(world, fault))
    world.ask(v.MaintenancePlanned(nodes=nodes, from_us=begins_us, until_us=until_us, reason="simulated"))
    if fault.how == "cancelled":
        world.loop.call_later(fault.for_s / 3, world.cancel_maintenance)


def _cancel(world: World, fault: Fault) -> None:
    world.ask(v.TaskCancelled(task=f"t{fault.pick % 3}", reason="simulated"))


def _reshape(world: World, fault: Fault) -> None:
    """No fault, but no quiet either: another tp and pp, one replica or two."""
    tp, pp = map(int, fault.how.split())
    most = (1 + fault.pick // 3 % 2) * tp * pp
    task = f"t{fault.pick % 3}"
    world.ask(v.ReshapeRequested(task=task, tp=tp, pp=pp, min_workers=tp * pp, max_workers=most, reason="simulated"))


_EFFECTS: dict[str, Callable[[World, Fault], None]] = {kind: globals()[f"_{kind}"] for kind in FAULT_KINDS}
