"""Links that are broken from outside, again and again: who is isolated for it?

    unshare -rnm python -m tests.integration.links CASE DIR

Every agent has a network namespace of its own (hosts.py); in those of the bad nodes the connections to their peers end
at each iteration's start (link_breaker.py). Prints one JSON object, `Found`.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec
import uvloop

from tests.integration.hosts import Hosts, Namespaces, members
from unicrond.agents.trainer.loop import corpus
from unicrond.core.state.state import ClusterState, TaskStatus
from unicrond.local.dev import SupervisedProcess

#: From here on links break, and so many iterations are made once nobody breaks them any more.
BREAK_FROM, GO_ON_FOR = 5, 12
TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Case:
    """`bad`: node -> the nodes that it loses. `isolated`: who must be, or in their place `other_side`.
    `late`: agents that stand still then."""

    nodes: int
    bad: dict[str, tuple[str, ...]]
    isolated: tuple[str, ...]
    late: tuple[str, ...] = ()
    other_side: tuple[str, ...] = ()


def others(node: str, count: int) -> tuple[str, ...]:
    return tuple(f"n{number}" for number in range(1, count + 1) if f"n{number}" != node)


CASES = {
    "one": Case(3, {"n2": others("n2", 3)}, ("n2",)),
    "one, the innocent tell first": Case(3, {"n2": others("n2", 3)}, ("n2",), late=("n2",)),
    "one, it tells first": Case(3, {"n2": others("n2", 3)}, ("n2",), late=("n1", "n3")),
    "the lead": Case(3, {"n1": others("n1", 3)}, ("n1",)),
    "two of five": Case(5, {"n2": others("n2", 5), "n4": others("n4", 5)}, ("n2", "n4")),
    "a switch": Case(5, {"n1": ("n3", "n4", "n5"), "n2": ("n3", "n4", "n5")}, ("n1", "n2")),
    # Where one end's loss is told before the rest is known, its side goes: one of the two must.
    "a switch between equal sides": Case(
        4, {"n1": ("n2", "n3"), "n4": ("n2", "n3")}, ("n2", "n3"), other_side=("n1", "n4")
    ),
}


class Found(msgspec.Struct):
    """`isolated`: who was, in order. `breaks`: of the group, until the last of them was. `iterations`: made meanwhile.
    `took_s`: from the first break to the end of the last isolation's regroup."""

    isolated: list[str]
    failed: str
    breaks: int
    iterations: int
    took_s: float


async def scenario(case: Case, directory: Path) -> Found:
    data = directory / "stdlib"
    corpus.build(data)
    net = Namespaces(tuple(f"n{number}" for number in range(1, case.nodes + 1)))
    # By default a quarter of the nodes may be out: here two of four or five must go.
    async with Hosts(directory, net, policy={"isolated_share": 0.5}) as hosts:
        await hosts.submit(
            {
                "name": "t",
                "max_workers": case.nodes,
                "global_batch": 24,
                "micro_batch": 1,
                "iterations": 1_000_000,
                "data": str(data),
                "model": {"layers": 2, "hidden": 64, "seq": 64},
            }
        )
        state = await hosts.until(
            lambda s: len(members(s)) == case.nodes and s.tasks["t"].progress.iteration > BREAK_FROM, TIMEOUT_S
        )
        began_at, first = state.now_us, state.tasks["t"].progress.iteration
        breakers = [breaker(case, net, hosts, directory, node) for node in case.bad]
        for part in breakers:
            await part.start()
        try:
            state = await hosts.until(lambda s: over(s, case), TIMEOUT_S)
            reached = state.tasks["t"].progress.iteration
            state = await hosts.until(
                lambda s: (
                    s.tasks["t"].status is not TaskStatus.ACTIVE
                    or s.tasks["t"].progress.iteration > reached + GO_ON_FOR
                ),
                TIMEOUT_S,
            )
        finally:
            for part in breakers:
                await part.stop()
        events = await hosts.events()
    said = [entry["envelope"]["event"] | {"seq": entry["seq"]} for entry in events]
    isolated = [event for event in said if event["type"] == "NodeIsolated"]
    last = max((event["seq"] for event in isolated), default=len(events))
    incidents = {event["incident"] for event in said if event["type"] == "TransitionCompleted" and event["seq"] <= last}
    return Found(
        isolated=list(dict.fromkeys(event["node"] for event in isolated)),
        failed=state.tasks["t"].ending.reason if state.tasks["t"].status is TaskStatus.FAILED else "",
        breaks=len(incidents) + 1,
        iterations=reached - first,
        took_s=round((state.now_us - began_at) / 1e6, 1),
    )


def over(state: ClusterState, case: Case) -> bool:
    """As many as must be isolated are, and the others train; or the task has failed."""
    out = {node.name for node in state.nodes.values() if node.isolation.active}
    if state.tasks["t"].status is not TaskStatus.ACTIVE:
        return True
    return len(out) >= len(case.isolated) and len(members(state)) == case.nodes - len(out) and not state.incidents


def breaker(case: Case, net: Namespaces, hosts: Hosts, directory: Path, node: str) -> SupervisedProcess:
    late = [str(process.pid) for name in case.late if (process := hosts.agents[name].process)]
    command = [
        *net.prefix(node),
        *(sys.executable, "-m", "tests.integration.link_breaker", str(directory / node)),
        *(net.address(peer) for peer in case.bad[node]),
        *(["--late", *late] if late else []),
    ]
    return SupervisedProcess(f"breaker of {node}", command, directory / f"breaker-{node}.log", dict(os.environ))


def main() -> None:
    found = uvloop.run(scenario(CASES[sys.argv[1]], Path(sys.argv[2])))
    print(msgspec.json.encode(found).decode())


if __name__ == "__main__":
    main()
