"""One simulated cluster: its parts, put together from a seed, and its users."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any, Literal

from msgspec.structs import replace

from unicrond.core.nodes.isolation import IsolationPhase, Repair, needs_hands, phase
from unicrond.core.state.policy import PART_BYTES, Policy
from unicrond.events import vocabulary as v
from unicrond.events.vocabulary.shape import Shape
from unicrond.events.wire.codec import API_PRODUCER
from unicrond.events.wire.envelope import Envelope
from unicrond.events.wire.schemas import FIRST, SCHEMA, lowered
from unicrond.replay.simulation.checks.checker import InvariantChecker
from unicrond.replay.simulation.cluster.coordinators import Coordinators
from unicrond.replay.simulation.cluster.host import Host
from unicrond.replay.simulation.cluster.lease import MemoryLease
from unicrond.replay.simulation.cluster.log_client import Beats, ClusterParts, Endpoint
from unicrond.replay.simulation.cluster.log_server import LogServer
from unicrond.replay.simulation.faults.faults import FAULTY_UNTIL_S, SimulatedFault
from unicrond.replay.simulation.models.network import Link
from unicrond.replay.simulation.models.virtual_time import HostClock, VirtualLoop
from unicrond.replay.simulation.trainer.process import Process
from unicrond.replay.simulation.trainer.replica import begin_replica
from unicrond.replay.simulation.trainer.training import Training

HEARTBEAT_S = 1.0
#: The schemas that agents read.
VERSIONS = (FIRST, SCHEMA, SCHEMA)
#: The share of clusters with two heads and a lease.
LEASED = 0.25
_LEASE_S = 12.0
_FOREVER = 1_000_000


#: The types of GPU of clusters with several.
GPU_TYPES = ("a100-80g", "h100-80g")


class World:
    """One simulated cluster. `shape` draws its form. Every part has its own source of chance, so that what one draws
    does not change when another draws less."""

    def __init__(self, seed: int, loop: VirtualLoop) -> None:
        self.seed = seed
        self.loop = loop
        self.shape = self.rng("shape")
        self.checker = InvariantChecker()
        self.log_clock = HostClock(loop)
        self.server = LogServer(loop, self.log_clock, self.rng("log"), self.checker.on_entry)
        self.beats = Beats(self.server, self.log_clock.wall_us)
        self.policy = self._draw_policy()
        self.checker.policy = self.policy
        self.training = Training(
            loop,
            self.rng("training"),
            self.checker,
            begin_replica,
            micro_batch_s=self.shape.uniform(0.08, 0.25),
            fault_wait_s=self.shape.choice((8.0, 20.0)),
            collective_timeout_s=self.shape.choice((5.0, 15.0)),
            capture_every=self.shape.choice((1, 2, 4)),
        )
        self.checker.reference = self.training
        self.versions = self.rng("versions")
        self.numerics = self.rng("numerics")
        self.sharding = self.rng("sharding")
        self.layouts = self.rng("layouts")
        self.degrees = self.rng("degrees")
        self.gpus = self.rng("gpus")
        self.parts = ClusterParts(
            loop,
            self.server,
            self.beats,
            self.checker,
            heartbeat_s=HEARTBEAT_S,
            lease_s=_LEASE_S,
            start_max_age_s=60.0,
        )
        self.hosts = self._hosts()
        self.training.hosts = self.checker.hosts = self.hosts
        self.coordinators = Coordinators(
            self.parts,
            self.rng("head"),
            self.policy,
            self.rng("heads' versions"),
            self._repair if seed % 2 else None,
            MemoryLease(loop.time) if self.rng("leases").random() < LEASED else None,
        )
        self.checker.on_claim = self.coordinators.on_claim
        self._api = Endpoint(self.server, Link(loop, self.rng("api")), self.checker.acknowledged)
        self._request_count = 0
        self.cordoned: set[str] = set()
        #: The isolations, by node and number, which a person has answered.
        self._calls: set[tuple[str, int]] = set()
        self._requests: set[asyncio.Task[Any]] = set()

    def _draw_policy(self) -> Policy:
        return Policy(
            symptom_window_s=0.3,
            worker_start_s=12.0,
            regroup_s=8.0,
            isolation_s=4.0,
            strikes_max=self.shape.choice((2, 3)),
            stuck_max=self.shape.choice((8, 30)),
            forget_s=5.0,
            part_bytes=self.rng("parts").choice((1, 1, PART_BYTES)),
            isolations_per_hour=self.rng("brakes").choice((1, 2, 10)),
            outage_hold_s=self.rng("hold").choice((0.0, 10.0, 10.0, 25.0)),
        )

    def rng(self, part: str) -> random.Random:
        """Return a part's own source of chance."""
        return random.Random(f"{self.seed}/{part}")

    def _hosts(self) -> dict[str, Host]:
        slots = self.shape.choice((1, 1, 2, 2, 3))
        names = [f"n{number}" for number in range(1, self.shape.randint(2, 5) + 1)]
        self.types: tuple[str, ...] = self.gpus.choice((("",), ("",), ("h100-80g",), GPU_TYPES, GPU_TYPES))
        return {
            name: Host(
                name,
                slots,
                self.parts,
                self.training,
                self.rng(name),
                schema=self.versions.choice(VERSIONS),
                gpu=self.gpus.choice(self.types),
                domain=domain,
            )
            for name, domain in zip(names, self._domains(len(names)), strict=True)
        }

    def _domains(self, nodes: int) -> list[str]:
        """Draw the domain of each node: none, or one of two."""
        rng = self.rng("domains of nodes")
        first = rng.randint(1, nodes - 1)
        return ["rack1"] * first + ["rack2"] * (nodes - first) if rng.random() < 0.6 else [""] * nodes

    # --- people ----------------------------------------------------------------------------------

    def begin(self) -> None:
        """Switch everything on, and submit the tasks of people."""
        self.coordinators.keep()
        self._requests.add(self.loop.create_task(self.coordinators.watch()))
        for host in self.hosts.values():
            self.loop.call_later(self.shape.uniform(0.0, 2.0), host.run_agent)
        for number in range(self.shape.randint(1, 3)):
            iterations = self.shape.choice((30, _FOREVER, _FOREVER))
            self.loop.call_later(self.shape.uniform(0.5, 12.0), self.submit, self._spec(f"t{number}", iterations))

    def submit(self, spec: v.TaskSpec) -> None:
        """Submit a task, as a person."""
        self.ask(v.TaskSubmitted(spec=spec))

    def submit_program(self, spec: v.TaskSpec) -> None:
        """Submit a task that people give up when the faults end."""
        self.checker.people.programs.add(spec.name)
        self.submit(spec)

    def give_up_programs(self) -> None:
        """Cancel the tasks that people have submitted in vain."""
        for name in sorted(self.checker.people.programs):
            self.ask(v.TaskCancelled(task=name, reason="the faults are over"))

    def submit_last(self) -> None:
        """Submit one more task, after all faults: whatever has become of the others, this one must train."""
        self.submit(self._spec("last", _FOREVER))

    async def _repair(self, repair: Repair) -> tuple[bool, str]:
        """Reboot the node as the operator's command, or fail at it: at a node's every second isolation, until the
        faults end."""
        await asyncio.sleep(2.0)
        if repair.node in self.hosts:  # a node that lies has none
            self.hosts[repair.node].is_unhealthy = False
        return bool(repair.isolation % 2) or self.loop.time() >= FAULTY_UNTIL_S, "simulated"

    def uncordon_all(self) -> None:
        """Uncordon every node that people have cordoned, and those that wait for an operator."""
        isolated = (
            node.name for node in self.checker.state.nodes.values() if node.isolation.active and needs_hands(node)
        )
        self.cordoned.update(isolated)
        for name in sorted(self.cordoned):
            self._uncordon(name)
        self.cordoned.clear()

    def answer_calls(self) -> None:
        """Send an answer for each node that waits for a person: one may be isolated after all faults."""
        state = self.checker.state
        waiting = [node for node in state.nodes.values() if phase(state, node) is IsolationPhase.AWAITS_PERSON]
        for node in waiting:
            if (node.name, node.isolation.count) not in self._calls:
                self._uncordon(node.name)

    def _uncordon(self, name: str) -> None:
        """Send the request, and note which isolation it is for."""
        node = self.checker.state.nodes.get(name)
        self._calls.add((name, node.isolation.count if node is not None else 0))
        self.ask(v.NodeUncordoned(node=name, reason="the faults are over"))

    def cancel_maintenance(self) -> None:
        """Cancel all maintenance windows."""
        for window in self.checker.state.windows:
            self.ask(v.MaintenanceCancelled(window=window, reason="simulated"))

    def _spec(self, name: str, iterations: int) -> v.TaskSpec:
        tp, pp = self.shape.choice(((1, 1), (1, 1), (1, 1), (2, 1), (1, 2)))
        if tp > min(host.slots for host in self.hosts.values()):
            tp, pp = 1, 2
        micro_batch = self.shape.choice((1, 2))
        replicas = self.shape.randint(1, 4)
        spec = v.TaskSpec(
            name=name,
            weight=self.shape.choice((1.0, 1.0, 3.0)),
            min_workers=tp * pp,
            max_workers=replicas * tp * pp,
            tp=tp,
            pp=pp,
            global_batch=self.shape.choice((4, 6)) * micro_batch,
            micro_batch=micro_batch,
            iterations=iterations,
            seed=self.shape.randint(0, 1000),
            start_timeout_s=self.versions.choice((None, self.policy.worker_start_s)),
            optimizer=v.OptimizerSpec(distributed=self.sharding.random() < 0.5),
            checkpoint=v.CheckpointSpec(dir="/checkpoints", interval=self.shape.choice((3, 10))),
        )
        lanes = min(self.numerics.choice((replicas, self.numerics.randint(1, 6))), spec.micro_batches)
        accumulation: Literal["exact", "float"] = self.numerics.choice(("exact", "exact", "float"))
        spec = replace(spec, accumulation=accumulation, env={v.LANES: str(lanes)})
        spec = self._with_layouts(spec) if self.layouts.random() < 0.4 else spec
        return self._with_gpus(spec) if len(self.types) > 1 and self.gpus.random() < 0.7 else spec

    def _with_gpus(self, spec: v.TaskSpec) -> v.TaskSpec:
        """Add tables for the types of GPU, of which now one and now the other is the better for the task."""

        def table(unit: int) -> dict[str, int]:
            """Draw the throughput table of a layout."""
            rate = self.gpus.choice((0.5, 1.0, 1.5, 3.0)) * 1e9
            return {str(n): int(rate * n) for n in range(unit, spec.max_workers + 1, unit)}

        shapes = dict.fromkeys([spec.shape, *(layout.shape for layout in spec.layouts)])
        gpus = [
            v.GpuSpec(
                gpu=gpu,
                layouts=tuple(v.LayoutSpec(**shape._asdict(), throughput=table(shape.workers)) for shape in shapes),
            )
            for gpu in self.types
        ]
        return replace(spec, gpus=tuple(gpus))

    def _with_layouts(self, spec: v.TaskSpec) -> v.TaskSpec:
        """Let the plan choose the layout, by tables of which now one and now another is the better."""
        has_tables = self.layouts.random() < 0.7

        def table(unit: int) -> dict[str, int]:
            """Draw the throughput table of a layout; it may be empty."""
            rate = self.layouts.choice((1.0, 1.0, 1.3, 2.5)) * 1e9
            counts = range(unit, spec.max_workers + 1, unit)
            return {str(n): int(rate * n ** self.layouts.choice((0.9, 1.0))) for n in counts} if has_tables else {}

        shapes = list(dict.fromkeys([spec.cut, Shape(), Shape(2), Shape(1, 2)]))
        if self.degrees.random() < 0.5:  # the same workers, another cut
            shapes.append(Shape(1, 2, vpp=2))
        if self.degrees.random() < 0.3:
            double = [shape._replace(micro_batch=2 * spec.micro_batch) for shape in shapes[:1]]
            shapes = [shape._replace(micro_batch=spec.micro_batch) for shape in shapes] + double
        layouts = tuple(v.LayoutSpec(**shape._asdict(), throughput=table(shape.workers)) for shape in shapes)
        least = self.layouts.choice((1, spec.min_workers))
        # No cut is known to be impossible for a script of one's own.
        return replace(spec, entry="/train.py", min_workers=least, throughput=layouts[0].throughput, layouts=layouts)

    def ask(self, event: v.Observation) -> None:
        """Send a person's request through the API; what the coordinator may not write is left out of it."""
        for head in self.coordinators.living:
            event = lowered(event, head.coordinator.state.schema) or event
        self._request_count += 1
        envelope = Envelope(
            producer=API_PRODUCER,
            boot=1,
            number=self._request_count,
            observed_at_us=self.coordinators.clock.wall_us(),
            event=event,  # type: ignore[arg-type]  # every Observation is one of AnyEvent
        )
        request = self.loop.create_task(self._api.append([envelope]))
        self._requests.add(request)
        request.add_done_callback(self._requests.discard)

    # --- the end of all faults -------------------------------------------------------------------

    def links(self) -> list[Link]:
        """List every link to the log."""
        twins = [host.twin.link for host in self.hosts.values() if host.twin is not None]
        return [host.link for host in self.hosts.values()] + twins + self.coordinators.links

    def heal(self) -> None:
        """Stop every fault: what is off is switched on, what hangs resumes, every network carries."""
        self.server.start()
        self.server.forgets = False
        self.server.sync_s = (0.0002, 0.002)
        self.log_clock.step_us = 0
        self.coordinators.clock.step_us = 0
        self.coordinators.keep()
        for link in self.links():
            link.cut = False
            link.hears = link.is_heard = True
            link.heal()
        self.training.reach.heal()
        self.training.link_breakers.clear()
        self.training.join_hangers.clear()
        self.training.slowness.clear()
        for head in self.coordinators.living:
            head.log.crash_at = ""
        for host in self.hosts.values():
            host.clock.step_us = 0
            host.disk.full = False
            host.supervised = True
            host.has_left = False
            host.is_unhealthy = False
            if host.twin is not None:
                host.twin.supervised = False
                self._tell_apart(host)
            host.power_on()
            host.run_agent()
            if host.agent is not None:
                host.agent.log.crash_at = ""
                host.agent.crash_before_memory = False
                host.agent.crash_after_actions = -1
            for process in host.processes:
                process.resume()
                if process.replica is not None:
                    process.replica.die_at = ""

    def _tell_apart(self, host: Host) -> None:
        """Find out, as people do, which machine the name belongs to; where its agent has ended, start it again."""
        if host.superseded:
            host.superseded = False
            host.run_agent()
        self.loop.call_later(5.0, self._tell_apart, host)

    def close(self) -> None:
        """End every coroutine."""
        self.loop.run_until_complete(_end_all())
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()


async def _end_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


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
