"""A head and agents in pods, a task that trains on them, and what the log and a watch say of an act."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from tests.containers.image import Image
from tests.containers.pods import MANIFESTS, Machines, Pod
from tests.integration.live import TIMEOUT_S, Live, members
from unicrond.agents.trainer.loop import corpus
from unicrond.core.state.state import ClusterState, NodeStatus
from unicrond.ctl.client import ApiError, Client
from unicrond.display.event_lines import EventLine

TOKEN = "t" * 48
SECRETS = {"nats-password": "p" * 48 + "\n", "api-token": TOKEN + "\n"}
#: Machines' names have dots, and the log's have none.
NODES = ("gpu1.example", "gpu2.example", "gpu3.example")
TASK = "big"
_ENTRY = Path(__file__).with_name("hungry_gpt.py")
_FAULTS = ("NodeLost", "NodeIsolated", "IncidentEscalated", "ErrorReported", "CommandFailed")


def node_of(machine: str) -> str:
    return machine.replace(".", "-")


def configuration(part: str = "head", **nats: Any) -> str:
    """unicron.yaml as that part of deploy/kubernetes has it, and other settings of NATS."""
    found = yaml.safe_load((MANIFESTS / part / "config.yaml").read_text())["data"]["unicron.yaml"]
    settings = yaml.safe_load(found)
    settings["nats"].update(nats)
    return yaml.safe_dump(settings)


class Cluster(Live):
    """One head and agents, each in a pod of its own. `until`, `training` and `events` are those of a live cluster."""

    def __init__(self, image: Image, directory: Path, config: str | None = None) -> None:
        self.directory = directory
        self.machines = Machines(image, directory, config or configuration(), SECRETS)
        self.agents: dict[str, Pod] = {}
        self.head: Pod
        self._is_outside = False
        self.workers = 0
        self.dev = self  # type: ignore[assignment]  # what Live asks of it: the state
        corpus.build(directory / "checkpoints" / "stdlib")
        (directory / "checkpoints" / "orders").mkdir(mode=0o777)
        (directory / "checkpoints" / "orders").chmod(0o777)
        shutil.copy(_ENTRY, directory / "checkpoints" / "hungry_gpt.py")

    async def __aenter__(self) -> Cluster:
        return self

    async def __aexit__(self, *_: object) -> None:
        for pod in self.machines.pods:
            said = pod.box.said() if hasattr(pod, "box") else ""
            print(f"--- {pod.name}\n{said[-6000:]}")
        await asyncio.to_thread(self.machines.remove)

    # --- pods ------------------------------------------------------------------------------------

    def new_head(self, part: str = "head", **more: Any) -> Pod:
        self._is_outside = part != "head"
        pod = Pod(self.machines, part, "unicron-head-0", memory_mib=1024, **more)
        pod.start()
        return pod

    async def start_head(self, part: str = "head", **more: Any) -> float:
        """The head's pod, to which the Service leads; the seconds until it is ready."""
        began_s = time.monotonic()
        self.lead_to(self.new_head(part, **more))
        await until(lambda: self.head.probe("readinessProbe")[0], TIMEOUT_S, "a head that is ready")
        return time.monotonic() - began_s

    def lead_to(self, pod: Pod) -> None:
        """The Service has this pod behind it from now on."""
        self.head = pod
        self.machines.point("unicron-head", pod.address)

    @property
    def client(self) -> Client:
        """Asks the head to which the Service leads, by what that has made for the people on its machine."""
        url = f"{self.head.address}:7470"
        if self._is_outside:
            return Client(f"http://{url}", TOKEN, 5.0)
        state = self.head.place("log") / "state"
        token, ca = (state / "operator.token").read_text().strip(), state / "tls" / "ca.pem"
        return Client(f"https://{url}", token, 5.0, ca=ca, server_name="unicron-head")

    def start_agent(self, machine: str, **more: Any) -> Pod:
        """A pod of the DaemonSet, on that machine."""
        env = {"UNICRON_HANG_FLOOR_S": "10"} | more.pop("env", {})
        sizes = {"shm": 128} | more.pop("sizes_mib", {})
        name = f"unicron-agent-{node_of(machine)}-{len(self.machines.pods)}"
        if self._is_outside:
            more["overlay"] = "external-nats"
        elif not (ca := self.directory / "ca" / "ca.pem").exists():  # as the README has people do
            shutil.copy(self.head.place("log") / "state" / "tls" / "ca.pem", ca)
            ca.chmod(0o444)
        pod = Pod(self.machines, "agents-daemonset", name, node=machine, sizes_mib=sizes, env=env, **more)
        pod.start()
        self.agents[machine] = pod
        return pod

    async def start_agents(self, *machines: str, **more: Any) -> None:
        for machine in machines:
            self.start_agent(machine, **more)
        for machine in machines:
            await self.until_ready(machine)

    async def until_ready(self, machine: str) -> None:
        """As the readiness probe has it."""
        agent = self.agents[machine]
        await until(lambda: agent.probe("readinessProbe")[0], TIMEOUT_S, f"an agent that is ready on {machine}")

    # --- the task --------------------------------------------------------------------------------

    async def state(self) -> tuple[ClusterState, str]:
        return await asyncio.to_thread(self.client.state)

    async def train(self, workers: int, **fields: Any) -> ClusterState:
        """A task of so many workers, which trains."""
        self.workers = workers
        await asyncio.to_thread(self.client.submit, task_of(workers, **fields))
        return await self.training(0, beyond=5)

    def lines(self, after: int = 0) -> list[EventLine]:
        """The log's entries."""
        return list(self.client.events(after))

    # --- what an act brings about ----------------------------------------------------------------

    async def watch(self) -> Watch:
        """From just before an act."""
        state, _ = await self.state()
        return Watch(self, state, (await asyncio.to_thread(self.lines))[-1].seq)


def task_of(workers: int, **fields: Any) -> dict[str, Any]:
    """Return the description of a task of so many workers that trains for ever."""
    return {
        "name": TASK,
        "max_workers": workers,
        "model": {"layers": 1, "hidden": 32, "heads": 2, "seq": 32, "vocab": 256},
        "data": "/checkpoints/stdlib",
        "entry": "/checkpoints/hungry_gpt.py",
        "args": ["/checkpoints/orders"],
        "global_batch": 12,
        "iterations": 1_000_000,
        "checkpoint": {"interval": 0},
        **fields,
    }


class Watch:
    """What happens from its birth on."""

    def __init__(self, cluster: Cluster, before: ClusterState, seq: int) -> None:
        self.cluster, self.before, self.seq = cluster, before, seq
        self.began_s, self.began_us = time.monotonic(), time.time_ns() // 1000

    def act(self) -> None:
        """The act is now."""
        self.began_s, self.began_us = time.monotonic(), time.time_ns() // 1000

    async def whole(self, *, also: Callable[[ClusterState], bool] = lambda _: True, workers: int = 0) -> float:
        """The seconds until a newer membership of all is confirmed and has committed, no incident is open, and
        `also` holds."""
        old = self.before.tasks[TASK].generation
        wanted = workers or self.cluster.workers

        def holds(state: ClusterState) -> bool:
            task = state.tasks[TASK]
            fresh = task.generation > old and task.progress.committed_generation == task.generation
            return fresh and task.confirmed and len(members(state)) == wanted and not state.incidents and also(state)

        await self.cluster.until("the task is whole", holds)
        return time.monotonic() - self.began_s

    def lines(self, *types: str) -> list[EventLine]:
        return [line for line in self.cluster.lines(self.seq) if not types or line.type in types]

    def told(self, *types: str) -> float:
        """The seconds from the act to the first event of these types."""
        first = self.lines(*types)
        assert first, f"no {types} in {[line.type for line in self.lines()]}"
        return (first[0].recorded_at_us - self.began_us) / 1e6

    def said(self, *types: str) -> list[str]:
        """What the log says of these, as people read it."""
        return [line.summary for line in self.lines(*types)]

    async def damage(self) -> dict[str, Any]:
        """What must not follow from a planned end."""
        state, _ = await self.cluster.state()
        lines = await asyncio.to_thread(self.lines)
        events = [(line.type, line.envelope["event"]) for line in lines]
        repeated = sum(event["micro_batches_repeated"] for kind, event in events if kind == "StepCommitted")
        assigned = sum(event.get("micro_batches_assigned", 0) for kind, event in events if kind == "WorkerJoinedGroup")
        return {
            "incidents": len(state.closed_incidents)
            + len(state.incidents)
            - len(self.before.closed_incidents)
            - len(self.before.incidents),
            "faults": [kind for kind, _ in events if kind in _FAULTS],
            "failures": state.ledger.failures - self.before.ledger.failures,
            "flaps": sum(len(node.health.returns_us) for node in state.nodes.values())
            - sum(len(node.health.returns_us) for node in self.before.nodes.values()),
            "repeated": repeated + assigned,
        }

    async def clean(self) -> str:
        """Say that nothing followed from a planned end, which is asserted."""
        assert await self.damage() == NO_DAMAGE, self.said()
        return "no incident, nothing repeated"


NO_DAMAGE: dict[str, Any] = {"incidents": 0, "faults": [], "failures": 0, "flaps": 0, "repeated": 0}


def is_up(machine: str, boot_after: int = 0) -> Callable[[ClusterState], bool]:
    """Its agent is there, a newer one than that."""

    def holds(state: ClusterState) -> bool:
        node = state.nodes.get(node_of(machine))
        return node is not None and node.status is NodeStatus.UP and node.agent.boot > boot_after

    return holds


async def until(holds: Callable[[], bool], limit_s: float, what: str) -> float:
    """Seconds until `holds()`, which may block."""
    began_s = time.monotonic()
    while True:
        with contextlib.suppress(ApiError):
            if await asyncio.to_thread(holds):
                return time.monotonic() - began_s
        assert time.monotonic() - began_s < limit_s, f"no {what} within {limit_s:g} s"
        await asyncio.sleep(0.1)
