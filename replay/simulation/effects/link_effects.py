"""The effects of faults of networks: links to the log, and links between nodes. Rules: `faults/faults.py`."""

from __future__ import annotations

from functools import partial

from msgspec.structs import replace

from unicrond.replay.simulation.checks.one_way import Way
from unicrond.replay.simulation.cluster.host import Host
from unicrond.replay.simulation.cluster.world import World, hosts_of, until
from unicrond.replay.simulation.effects import people_effects
from unicrond.replay.simulation.faults.faults import SimulatedFault

#: A node that lives beats once in this time.
_BEAT_US = 1_100_000
#: How often links are looked at that may carry one way only; and the slowest disk that is not slow.
_LOOK_S, _QUICK_SYNC_S = 0.25, 0.01


def watch_ways(world: World) -> None:
    """Look at all links to the log, now and again and again, by the rules of links that carry one way only."""
    heads, server = world.coordinators, world.server
    judges = server.up and server.sync_s[1] <= _QUICK_SYNC_S and heads.leads and all(k.is_sound for k in heads.links)
    ways = {host.name: _way_of(host) for host in world.hosts.values()}
    checker = world.checker
    for rule, story in checker.ways.at_look(checker.state, ways, world.loop.time(), judges=judges):
        checker.record_breach(rule, story)
    world.loop.call_later(_LOOK_S, watch_ways, world)


def _way_of(host: Host) -> Way:
    agent, link = host.agent, host.link
    runs = host.on and not host.shares_name and agent is not None and agent.alive and agent.has_joined.is_set()
    if not runs or link.loss or not link.in_order or not link.carries():
        return "bad"
    return "sound" if link.carries(back=True) else "deaf"


def cut_log(world: World, fault: SimulatedFault) -> None:
    """Cut the nodes off from the log alone: their workers continue with their peers. `hears`, `is_heard`: that way
    only."""
    for host in hosts_of(world, fault):
        if fault.how:
            setattr(host.link, fault.how, False)
            until(world, fault, lambda host=host: setattr(host.link, fault.how, True))  # type: ignore[misc]
            continue
        host.link.cut = True
        if fault.pick == 5:
            world.loop.call_later(0.8 * fault.for_s, people_effects.forget, world, host)
        until(world, fault, lambda host=host: setattr(host.link, "cut", False))  # type: ignore[misc]


def all_silent(world: World, fault: SimulatedFault) -> None:
    """Cut all nodes off from the log at once, as a wrong password or name does; `head_anew`: the head begins anew
    meanwhile."""
    since_us = world.log_clock.wall_us()

    def silenced(beat_at_us: int) -> bool:
        """Return whether a node whose last beat came then was cut off with all others, and all still are."""
        machines = [*world.hosts.values(), *(host.twin for host in world.hosts.values() if host.twin is not None)]
        with_others = -_BEAT_US < beat_at_us - since_us < _BEAT_US
        return with_others and all(host.link.cut for host in machines)

    for host in world.hosts.values():
        host.link.cut = True
        until(world, fault, lambda host=host: setattr(host.link, "cut", False))  # type: ignore[misc]
    world.checker.people.silenced = silenced
    if fault.how == "head_anew":
        for head in world.coordinators.living[:1]:
            world.coordinators.crash(head)


def domain_down(world: World, fault: SimulatedFault) -> None:
    """Switch the nodes of a domain off, and on again, together or `late`: one after the other; or `cut` them off from
    the log and the others. Without domains, or with one of all nodes: all but the first."""
    names = sorted({host.domain for host in world.hosts.values()})
    hosts = [host for host in world.hosts.values() if host.domain == names[fault.pick % len(names)]]
    hosts = hosts[1:] if len(hosts) == len(world.hosts) else hosts
    if fault.how == "cut":
        isolate(world, replace(fault, how="", nodes=tuple(host.name for host in hosts), pick=0))
        return
    for place, host in enumerate(hosts):
        host.power_off()
        for_s = fault.for_s + (2.5 * place if fault.how == "late" else 0.0)
        until(world, replace(fault, for_s=for_s), host.power_on)


def cut_peers(world: World, fault: SimulatedFault) -> None:
    """Cut the nodes off from their peers alone; two that are a `pair`, or cut `one_way`, from each other. `one_way`:
    what the first sends does not arrive, or (`pick` is odd) nothing arrives there."""
    reach, one_way = world.training.reach, fault.how == "one_way"
    pairs = [(host.name, peer) for host in hosts_of(world, fault) for peer in world.hosts]
    if fault.how == "pair" or (one_way and len(fault.nodes) == 2):
        pairs = [(fault.nodes[0], fault.nodes[1])]
    for node, peer in pairs:
        ends = (peer, node) if one_way and fault.pick % 2 else (node, peer)
        reach.cut(*ends, one_way=one_way)
        until(world, fault, partial(reach.mend, *ends, one_way=one_way))


def isolate(world: World, fault: SimulatedFault) -> None:
    """Cut the nodes off from the log and from their peers."""
    cut_log(world, fault)
    cut_peers(world, fault)


def bad_weather(world: World, fault: SimulatedFault) -> None:
    """Lose, repeat or delay what passes between the log and the nodes, and the heads."""
    hosts = hosts_of(world, fault)
    for link in [host.link for host in hosts] + world.coordinators.links:
        if fault.how in ("loss", "all"):
            link.loss = 0.25
        if fault.how in ("repeats", "all"):
            link.repeats = 0.3
            link.in_order = False
        if fault.how in ("delay", "all"):
            link.delay_s = (0.001, 0.7)
            link.in_order = False
        until(world, fault, link.heal)
