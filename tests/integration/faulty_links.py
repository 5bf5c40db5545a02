"""A link between two nodes that loses, delays or limits, one way or both, while all else works: what does it cost?

    unshare -rnm python -m tests.integration.faulty_links CASE DIR

Every agent has a network namespace of its own (hosts.py), and a relay carries what goes between the nodes of the bad
pairs (link_relay.py). Prints one JSON object, `Outcome`.
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from tests.integration.hosts import Hosts, Namespaces, ip, members
from tests.integration.link_relay import Relay
from unicrond.agents.trainer.loop import corpus
from unicrond.core.state.state import ClusterState, TaskStatus

#: So many iterations are made before: without them a task does not know what is usual (detection/baseline.py).
WARM_ITERATIONS = 60
TIMEOUT_S = 120.0
#: After the links are well again, the task is to be whole within this time; it is watched for longer.
WATCH_S = 45.0
SILENT = {"cut": True}


@dataclass(frozen=True)
class Case:
    """`bad`: what is said of the pair. `both`: of both ways. `bad_s`: for so long; then it is well. `times`: so often,
    with `well_s` between. `node`: all links of that node are bad, that to the head too."""

    nodes: int = 3
    pair: tuple[str, str] = ("n1", "n2")
    bad: dict[str, Any] = field(default_factory=lambda: SILENT)
    both: bool = True
    bad_s: float = 30.0
    times: int = 1
    well_s: float = 5.0
    node: str = ""
    spare: int = 0


CASES = {
    "silent": Case(),
    "silent, one way": Case(both=False),
    "silent, the other way": Case(pair=("n2", "n1"), both=False),
    "silent, not the lead": Case(pair=("n2", "n3")),
    "silent, five": Case(nodes=5, pair=("n2", "n4")),
    "silent, one free": Case(nodes=4, spare=1),
    "silent for 10 s": Case(bad_s=10.0),
    "node silent for 10 s": Case(node="n3", bad_s=10.0),
    "flapping": Case(bad_s=6.0, times=5, well_s=6.0),
    "loses 5 %": Case(bad={"loss": 0.05}, bad_s=60.0),
    "loses 25 %": Case(bad={"loss": 0.25}, bad_s=60.0),
    "delays 30 ms": Case(bad={"delay_s": 0.03}, bad_s=60.0),
    "3 Mbit/s": Case(bad={"bytes_per_s": 375_000.0}, bad_s=60.0),
}


class Outcome(msgspec.Struct):
    """`standstill_s`: the longest time without a step while links were bad. `evicted`: how often a worker of a node
    ended. `isolated`: nodes. `whole_s`: from the links' return until all train again; -1: not in time.
    `iteration_ms`: before, and while they were bad. `transitions`: generations decided."""

    case: str
    standstill_s: float
    evicted: dict[str, int]
    isolated: list[str]
    whole_s: float
    iteration_ms: tuple[float, float]
    transitions: int
    sentences: list[str] = []


class Watch:
    """Looks at the task again and again. `gaps`: times without a step."""

    def __init__(self, hosts: Hosts) -> None:
        self._hosts = hosts
        self._loop = asyncio.get_running_loop()
        self.state: ClusterState
        self.iteration = -1
        self.at = self._loop.time()
        self.longest = 0.0

    async def look(self) -> ClusterState:
        """Look once."""
        self.state = await self._hosts.until(lambda _: True, TIMEOUT_S)
        now, iteration = self._loop.time(), self.state.tasks["t"].progress.iteration
        self.longest = max(self.longest, now - self.at)
        if iteration != self.iteration:
            self.iteration, self.at = iteration, now
        await asyncio.sleep(0.05)
        return self.state

    async def over(self, seconds: float) -> None:
        """Look for so long."""
        end = self._loop.time() + seconds
        while self._loop.time() < end:
            await self.look()


async def scenario(name: str, case: Case, directory: Path) -> Outcome:
    data = directory / "stdlib"
    corpus.build(data)
    nodes = tuple(f"n{number}" for number in range(1, case.nodes + 1))
    net = Namespaces(nodes)
    pairs = [(case.node, node) for node in nodes if node != case.node] if case.node else [case.pair]
    workers = case.nodes - case.spare
    async with (
        Relay({node: net.address(node) for node in nodes}, pairs, directory / "relay.log") as relay,
        Hosts(directory, net) as hosts,
    ):
        await hosts.submit(
            {
                "name": "t",
                "max_workers": workers,
                "global_batch": 24,
                "micro_batch": 1,
                "iterations": 1_000_000,
                "data": str(data),
                "model": {"layers": 2, "hidden": 64, "seq": 64},
            }
        )
        state = await hosts.until(
            lambda s: len(members(s)) == workers and s.tasks["t"].progress.iteration > WARM_ITERATIONS, TIMEOUT_S
        )
        before, usual_us = state.seq, state.tasks["t"].pace.iteration_us
        watch = Watch(hosts)
        await watch.look()
        watch.longest = 0.0
        slow: list[int] = []
        for nth in range(case.times):
            if nth:
                await watch.over(case.well_s)
            await switch(relay, pairs, case, case.bad)
            first, since = watch.iteration, watch.state.now_us
            await watch.over(case.bad_s)
            slow.append((watch.state.now_us - since) // max(1, watch.iteration - first))
            await switch(relay, pairs, case, {})
        well_at = asyncio.get_running_loop().time()
        whole_s = -1.0
        while asyncio.get_running_loop().time() < well_at + WATCH_S:
            state = await watch.look()
            if len(members(state)) == workers and not state.incidents:
                whole_s = asyncio.get_running_loop().time() - well_at
                await watch.over(3.0)
                break
        entries = [entry for entry in await hosts.events() if entry["seq"] > before]
        events = [entry["envelope"]["event"] for entry in entries]
        assert watch.state.tasks["t"].status is TaskStatus.ACTIVE, watch.state.tasks["t"].ending
    evicted: dict[str, int] = {}
    for event in events:
        if event["type"] == "WorkerExited":
            evicted[event["node"]] = evicted.get(event["node"], 0) + 1
    return Outcome(
        case=name,
        standstill_s=round(watch.longest, 1),
        evicted=evicted,
        isolated=[event["node"] for event in events if event["type"] == "NodeIsolated"],
        whole_s=round(whole_s, 1),
        iteration_ms=(round(usual_us / 1000, 1), round(sum(slow) / len(slow) / 1000, 1)),
        transitions=sum(event["type"] == "MembershipDecided" for event in events),
        sentences=[
            f"{(entry['recorded_at_us'] - entries[0]['recorded_at_us']) / 1e6:6.2f} {line}"
            for entry in entries
            if (line := shown(entry["envelope"]["event"]))
        ],
    )


def shown(event: dict[str, Any]) -> str:
    """Return what is told of an event, of those that matter here."""
    kinds = ("IncidentEscalated", "NodeIsolated", "MembershipDecided", "PlanAdopted", "ErrorReported", "HangSuspected")
    more = (
        "WorkerExited",
        "TransitionCompleted",
        "ProbeLinks",
        "LinksProbed",
        "WorkersWithdrawn",
        "NodeLost",
        "StartWorker",
    )
    if event["type"] not in kinds + more:
        return ""
    left_out = ("type", "log_tail", "assignments", "store", "peers", "healthy", "seats", "spec")
    return f"{event['type']} " + " ".join(f"{k}={v}" for k, v in event.items() if k not in left_out)[:400]


async def switch(relay: Relay, pairs: list[tuple[str, str]], case: Case, fields: dict[str, Any]) -> None:
    """Make the case's links as `fields` say."""
    for first, second in pairs:
        await relay.set(first, second, both=case.both, **fields)
    if case.node:
        ip("link", "set", f"{case.node}-head", "down" if fields else "up")


def main() -> None:
    found = uvloop.run(scenario(sys.argv[1], CASES[sys.argv[1]], Path(sys.argv[2])))
    print(msgspec.json.encode(found).decode())


if __name__ == "__main__":
    main()
