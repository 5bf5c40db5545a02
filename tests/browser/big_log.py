"""A simulated log of a large cluster: 1,000 nodes of 8 slots, 20 tasks; steps, deaths that heal, nodes taken out.

python -m tests.browser.big_log FILE [NODES [ENTRIES]]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from tests.benchmarks.scale import TASKS, Cluster
from tests.replay.logs import write_log
from unicrond.core.state.work import LINEAR_FLOPS
from unicrond.events.vocabulary.placements import runs_of
from unicrond.events.wire.envelope import RecordedEvent

_BEGIN_US = 1_790_000_000_000_000
_STEP_US = 30_000
_FAULTS = 30


class BigCluster(Cluster):
    """Keeps what was told; 30 ms pass from entry to entry."""

    def __init__(self, nodes: int) -> None:
        self.log: list[RecordedEvent] = []
        super().__init__(nodes)

    def entry(self, event: Any, producer: str = "", seq: int = 0) -> RecordedEvent:
        if isinstance(event, self.v.PlanAdopted):
            event = self._worth_something(event)
        entry = super().entry(event, producer, seq)
        now_us = _BEGIN_US + entry.seq * _STEP_US
        return RecordedEvent(entry.seq, now_us, replace(entry.envelope, observed_at_us=now_us))

    def tell(self, event: Any, producer: str = "") -> None:
        from unicrond.core.fold import fold

        entry = self.entry(event, producer)
        self.state = fold(self.state, entry)
        self.log.append(entry)

    def _worth_something(self, plan: Any) -> Any:
        """As many workers as there are in health, each of the same worth."""
        shares = tuple(replace(share, waf=int(share.workers * LINEAR_FLOPS)) for share in plan.assignments)
        waf, workers = sum(share.waf for share in shares), sum(share.workers for share in shares)
        return replace(
            plan,
            assignments=shares,
            waf=waf,
            healthy={share.task: share.workers for share in shares},
            waf_if_healthy=waf,
            trigger=f"{len(shares)} tasks launched",
            reason=f"{workers} of {workers} workers in use",
            duration_us=840_000,
        )

    def steps(self, iteration: int) -> None:
        """One of every task."""
        for task in self.members:
            step = self.step(task, iteration)
            loss = 2.0 + 8.0 / (1 + iteration / 50)
            self.say(step.node, replace(step, loss=loss, duration_us=600_000 + 997 * (iteration % 50), samples=400))

    def death(self, task: str, iteration: int) -> None:
        """A worker dies; the others go on without it."""
        v, generation = self.v, self.state.tasks[task].generation + 1
        victim, *rest = self.members[task][1:]
        rest = (self.members[task][0], *rest)
        self.say(
            victim.node,
            v.WorkerExited(
                node=victim.node, task=task, worker=victim.worker, exit_code=None, signal=9, is_expected=False,
                log_tail="RuntimeError: CUDA error: an illegal memory access was encountered",
            ),
        )  # fmt: skip
        incident = f"i{self.state.seq}"
        decided = v.MembershipDecided(
            task=task, generation=generation, size=1, seats=runs_of(rest, (), 1), urgent=True,
            store=v.StoreAddress(host="10.0.0.1", port=1), incident=incident, reason="one replica fewer",
        )  # fmt: skip
        self.tell(decided)
        for member in rest:
            self.say(member.node, replace(self.regrouped(task, member, generation), iteration=iteration))
        self.tell(
            v.TransitionCompleted(
                incident=incident, response="restart the process", detection_us=40_000, transition_us=12_000_000,
                micro_batches_repeated=1, reason="the task trains again",
            )
        )  # fmt: skip
        self.members[task] = rest

    def out(self, number: int) -> None:
        """Nodes that people or the coordinator take out."""
        v, name = self.v, self.names[number * 37 % len(self.names)]
        if number % 3:
            self.tell(v.NodeIsolated(node=name, until_us=None, reason="GPU 3: XID 79, has fallen off the bus"))
        else:
            self.say("api", v.NodeCordoned(node=name, drain=False, reason="new fan"))


def entries(nodes: int, count: int) -> list[RecordedEvent]:
    """So many."""
    cluster = BigCluster(nodes)
    begun, iteration, faults = len(cluster.log), 0, 0
    while len(cluster.log) < count:
        iteration += 1
        cluster.steps(iteration)
        if len(cluster.log) > begun + (faults + 1) * (count - begun) // (_FAULTS + 1):
            cluster.death(f"t{faults % TASKS}", iteration + 1)
            cluster.out(faults)
            faults += 1
    return cluster.log[:count]


def write(path: Path, nodes: int = 1000, count: int = 100_000) -> Path:
    """The log as a file."""
    return write_log(path, list(entries(nodes, count)), 1000)


if __name__ == "__main__":
    write(Path(sys.argv[1]), *map(int, sys.argv[2:]))
