"""Entries that no part of the cluster has sent: of strangers, of a node that lies, of somebody who claims to lead."""

from __future__ import annotations

from unicrond.events import vocabulary as v
from unicrond.events.vocabulary.field_types import SLOTS_MAX
from unicrond.events.wire.codec import API_PRODUCER
from unicrond.events.wire.envelope import Envelope
from unicrond.replay.simulation.cluster.world import World, until
from unicrond.replay.simulation.faults.boundary_events import KINDS, LONG, STRANGER, Edges
from unicrond.replay.simulation.faults.faults import SimulatedFault

#: Requests that people may make by mistake are not drawn: they may do what they say (cancel the last task, drain every
#: node).
EDGE_KINDS = tuple(
    kind
    for kind in KINDS
    # A stranger that joins is used by plans until it is lost: that is another fault than a superfluous event.
    if kind not in (v.NodeJoined, v.TaskCancelled, v.NodeCordoned, v.MaintenancePlanned, v.InjectionRequested)
    and kind.__name__ != "StopRequested"
)
#: What a node may say of itself; it ends with that, or is used by plans.
_OF_ITSELF = (v.NodeJoined, v.NodeLeaving, v.NodeLeft)
#: What it may say of others: all that is no person's request.
LIES = tuple(kind for kind in KINDS if not issubclass(kind, v.Request) and kind not in _OF_ITSELF)


def edge_events(world: World, fault: SimulatedFault) -> None:
    """Send events of a stranger and of people that are valid by their types alone (boundary_events.py), about every
    node and task.
    """
    state = world.checker.state
    workers = [name for task in state.tasks.values() for name in task.workers]
    # The only node is one that does not exist: the coordinator believes what a real node says about itself.
    edges = Edges(world.rng(f"edges {fault.at_s}"), [STRANGER], [*state.tasks, "t9"], workers)
    for number in range(1, int(fault.how) + 1):
        kind = edges.rng.choice(EDGE_KINDS)
        boot = edges.rng.choice((1, 2**52 - 1))
        envelope = edges.envelope(kind, boot=boot, number=edges.rng.choice((number, 2**53 - 1)))
        if envelope is not None and (envelope.producer == STRANGER or (envelope.producer == API_PRODUCER and boot > 1)):
            world.server.forge(envelope)


def lying_node(world: World, fault: SimulatedFault) -> None:
    """Let a node join that no plan uses, and have it say whatever it likes about every task and worker there is, for
    the fault's time. Then a person has it forgotten."""
    _speak(world, fault, Edges(world.rng(f"lies {fault.at_s}"), [STRANGER], []), ())


def large_events(world: World, fault: SimulatedFault) -> None:
    """Send likewise, in events as large as their types allow, from the first on: the node runs a thousand workers that
    nobody has started."""
    edges = Edges(world.rng(f"large {fault.at_s}"), [STRANGER], [], lengths=LONG)
    tasks = [*world.checker.state.tasks] or ["nothing"]
    running = [
        v.RunningWorker(worker=f"{task}.{10_000 + number}", task=task, pid=7, generation=1)
        for number in range(SLOTS_MAX // len(tasks))
        for task in tasks
    ]
    _speak(world, fault, edges, tuple(running))


def _speak(world: World, fault: SimulatedFault, edges: Edges, running: tuple[v.RunningWorker, ...]) -> None:
    """Send the join of a node with these workers, then whatever `edges` draws; then have the node forgotten."""
    rng, count, lengths = edges.rng, int(fault.how), edges.lengths
    joined = v.NodeJoined(
        node=STRANGER, address="10.9.9.9", slots=4, store=v.StoreAddress(host="10.9.9.9", port=1), agent_boot=1,
        version=STRANGER, workers=running,
    )  # fmt: skip
    leaving = v.NodeLeaving(node=STRANGER, grace_us=0, reason="so that no plan uses it")
    numbers = iter(range(1, 3 * count + 10))

    def envelope_of(event: v.AnyObservation) -> Envelope:
        """Return what the node says next."""
        at_us = world.coordinators.clock.wall_us()
        return Envelope(producer=STRANGER, boot=1, number=next(numbers), observed_at_us=at_us, event=event)

    def lie() -> None:
        """Say anything."""
        tasks = world.checker.state.tasks
        if not tasks:
            return
        workers = [name for task in tasks.values() for name in task.workers]
        invented = [f"{task}.{number}" for task in tasks for number in (997, 998, 999)]
        envelope = Edges(rng, [STRANGER], list(tasks), workers + invented * 4, lengths).envelope(rng.choice(LIES))
        if envelope is not None and envelope.producer == STRANGER:
            world.server.forge(envelope_of(envelope.event))  # type: ignore[arg-type]  # LIES are observations

    world.server.forge(envelope_of(joined), envelope_of(leaving))
    for number in range(count):
        world.loop.call_later(fault.for_s * number / count, lie)
    until(world, fault, lambda: world.ask(v.ForgetRequested(node=STRANGER, leave=False, reason="it lied")))


def forged_claim(world: World, fault: SimulatedFault) -> None:
    """Forge the claim of a term: one far away, or the next under a boot that does not exist."""
    next_term = world.checker.state.term + 1
    edges = Edges(world.rng(f"claim {fault.at_s}"), [], [])
    term, boot = (10**9 - 1, 10**9 - 1) if fault.how == "far" else (next_term, 2**52 - 1)
    world.server.forge(edges.claim(term, boot))
