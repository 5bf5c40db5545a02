"""What an event costs the pure core as the cluster grows: 20 tasks over all nodes, 8 slots a node.

    python -m tests.benchmarks.scale --nodes 100 1000 10000 [--base TREE]

`--base`: another checkout, measured in the same run, in turns with this one (by its own modules, with this script).
Median microseconds of CPU time of one thread; and megabytes of the process. Numbers and what they mean:
docs/results/scale.md.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

TASKS = 20
SLOTS = 8


class Cluster:
    """A cluster at rest, as the log tells of it: every task has all its workers, in one group."""

    def __init__(self, nodes: int) -> None:
        from events import vocabulary as v
        from unicrond.core.state import ClusterState

        self.v = v
        self.state: Any = ClusterState()
        self.numbers: dict[str, int] = {}
        self.names = [f"node{number:05}" for number in range(nodes)]
        store = v.StoreAddress(host="10.0.0.1", port=1)
        self.tell(v.CoordinatorStarted(term=1, version="benchmark"))
        for name in self.names:
            self.say(
                name,
                v.NodeJoined(node=name, address=name, slots=SLOTS, store=store, agent_boot=1, version="benchmark"),
            )
        share = nodes // TASKS * SLOTS
        assignments, members = [], {}
        for task in range(TASKS):
            spec = v.TaskSpec(
                name=f"t{task}", min_workers=1, max_workers=share, global_batch=share, throughput={str(share): 10**15}
            )
            self.tell(v.TaskSubmitted(spec=spec))
            here = [name for name in self.names[task * share // SLOTS :][: share // SLOTS] for _ in range(SLOTS)]
            seats = tuple((node,) for node in here)
            assignments.append(v.TaskAssignment(task=spec.name, workers=share, replicas=seats, waf=1))
            members[spec.name] = tuple(
                v.Member(worker=f"{spec.name}.{number + 1}", node=node, replica=number, shard=0)
                for number, node in enumerate(here)
            )
        self._plan(assignments)
        for name, every in members.items():
            for member in every:
                self._start(self.state.tasks[name].spec, member, store)
            decided = v.MembershipDecided(
                task=name, generation=1, members=every, joiners=tuple(member.worker for member in every), urgent=True,
                store=store, incident="", reason="benchmark",
            )  # fmt: skip
            self.tell(decided)
            for member in every:
                self.say(member.node, self.regrouped(name, member, 1))
        self.members = members

    def _plan(self, assignments: list[Any]) -> None:
        from unicrond.core.policy import Policy
        from unicrond.core.survey import Survey

        self.policy = Policy(worker_mtbf_s=10**7)
        basis = Survey(self.state, self.policy).basis
        self.tell(
            self.v.PlanAdopted(
                epoch=1, assignments=tuple(assignments), waf=1, basis=basis, trigger="benchmark", reason="benchmark"
            )
        )

    def _start(self, spec: Any, member: Any, store: Any) -> None:
        v, node = self.v, member.node
        number = self.state.nodes[node].commands + 1
        self.tell(
            v.StartWorker(
                command_id=f"1.1.{node}.{number}",
                node=node,
                epoch=1,
                spec=spec,
                worker=member.worker,
                replica=member.replica,
                shard=0,
                store=store,
            )
        )
        self.say(node, v.WorkerStarted(node=node, task=spec.name, worker=member.worker, pid=1))
        self.say(node, v.WorkerReady(node=node, task=spec.name, worker=member.worker))

    def regrouped(self, task: str, member: Any, generation: int) -> Any:
        return self.v.WorkerRegrouped(
            node=member.node, task=task, worker=member.worker, generation=generation, iteration=1, dealt=0,
            duration_us=1, source="own",
        )  # fmt: skip

    def step(self, task: str, iteration: int) -> Any:
        lead = self.members[task][0]
        return self.v.StepCommitted(
            node=lead.node, task=task, worker=lead.worker, generation=self.state.tasks[task].generation,
            first=iteration, last=iteration, samples=8, samples_digest=0, loss=1.0, duration_us=1000,
            micro_batches_by_rank=(1,),
        )  # fmt: skip

    def say(self, producer: str, event: Any) -> None:
        self.tell(event, producer)

    def tell(self, event: Any, producer: str = "") -> None:
        from unicrond.core.fold import fold

        self.state = fold(self.state, self.entry(event, producer))

    def entry(self, event: Any, producer: str = "", seq: int = 0) -> Any:
        from events.envelope import Envelope, Recorded

        v = self.v
        ours = isinstance(event, v.Decision | v.Command | v.CoordinatorStarted)
        producer = producer or ("coordinator" if ours else "api")
        number = self.numbers[producer] = self.numbers.get(producer, 0) + 1
        seq = seq or self.state.seq + 1
        envelope = Envelope(
            producer=producer, boot=1, number=number, term=1 if ours else 0, observed_at_us=seq, event=event
        )
        return Recorded(seq, seq, envelope)


def timed(run: Callable[[int], object], rounds: int) -> float:
    """Median microseconds of CPU time of one call."""
    found = []
    for number in range(rounds):
        began_ns = time.thread_time_ns()
        run(number)
        found.append(time.thread_time_ns() - began_ns)
    return statistics.median(found) / 1000


def measure(nodes: int, rounds: int) -> dict[str, float]:
    from unicrond.core.deadlines import deadlines
    from unicrond.core.decide import decide
    from unicrond.core.fold import fold
    from unicrond.core.invariants import check
    from unicrond.core.survey import Survey

    cluster = Cluster(nodes)
    v, policy = cluster.v, cluster.policy
    began = cluster.state
    found: dict[str, float] = {}

    def folds(make: Callable[[int], tuple[str, Any]]) -> float:
        cluster.state, entries = began, []
        for number in range(rounds):
            producer, event = make(number)
            entries.append(cluster.entry(event, producer, began.seq + 1 + number))

        def run(number: int) -> None:
            cluster.state = fold(cluster.state, entries[number])

        return timed(run, rounds)

    def member(number: int) -> tuple[str, Any]:
        task = f"t{number % TASKS}"
        return task, cluster.members[task][number // TASKS % len(cluster.members[task])]

    def of_member(make: Callable[[str, Any], Any]) -> Callable[[int], tuple[str, Any]]:
        return lambda number: (member(number)[1].node, make(*member(number)))

    found["fold StepCommitted"] = folds(lambda n: (member(n)[1].node, cluster.step(f"t{n % TASKS}", n + 1)))
    found["fold WorkerRegrouped"] = folds(of_member(lambda t, m: cluster.regrouped(t, m, 1)))
    found["fold WorkerStarted"] = folds(
        of_member(lambda t, m: v.WorkerStarted(node=m.node, task=t, worker=m.worker, pid=7))
    )
    found["fold CommandApplied"] = folds(
        of_member(lambda t, m: v.CommandApplied(node=m.node, command_id=f"1.1.{m.node}.99"))
    )
    found["fold StateKept"] = folds(
        of_member(
            lambda t, m: v.StateKept(
                node=m.node, task=t, shard=0, iteration=1, generation=1, origin="own", size_bytes=1, duration_us=1
            )
        )
    )
    found["fold WorkerExited"] = folds(
        of_member(
            lambda t, m: v.WorkerExited(node=m.node, task=t, worker=m.worker, exit_code=None, signal=9, expected=False)
        )
    )
    found["fold NodeLost"] = folds(
        lambda n: (
            "",
            v.NodeLost(
                node=cluster.names[n * 7 % nodes], evidence=v.Evidence(beat_seq=1, beat_at_us=1), reason="benchmark"
            ),
        )
    )

    states = [began]
    cluster.state = began
    for number in range(rounds):
        producer, event = member(number)[1].node, cluster.step(f"t{number % TASKS}", number + 1)
        cluster.say(producer, event)
        states.append(cluster.state)
    since = "since" in check.__code__.co_varnames
    found["check"] = timed(lambda n: check(states[n + 1], states[n]) if since else check(states[n + 1]), rounds)  # type: ignore[call-arg]
    surveys: list[Any] = [Survey(began, policy)]
    decide(surveys[0], {})
    found["survey"] = timed(lambda n: surveys.append(Survey(states[n + 1], policy, surveys[-1])), rounds)
    found["deadlines at rest"] = timed(lambda n: deadlines(surveys[n + 1]), rounds)
    found["decide at rest"] = timed(lambda n: decide(surveys[n + 1], {}), rounds)
    found["memory, MB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[100, 1000, 10_000])
    parser.add_argument("--base", type=Path, help="another checkout to measure beside this one")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measure(given.one, given.rounds)))
        return
    trees = {"base": given.base, "now": Path.cwd()} if given.base else {"now": Path.cwd()}
    for nodes in given.nodes:
        told: dict[str, list[dict[str, float]]] = {name: [] for name in trees}
        for _ in range(given.turns if nodes < 5000 else 1):
            for name, tree in trees.items():
                command = [sys.executable, __file__, "--one", str(nodes), "--rounds", str(given.rounds)]
                answer = subprocess.run(
                    command, cwd=tree, env={"PYTHONPATH": str(tree)}, capture_output=True, text=True
                )
                if answer.returncode:
                    raise SystemExit(answer.stderr)
                told[name].append(json.loads(answer.stdout))
        print(f"\n{nodes} nodes | " + " | ".join(trees))
        for what in told["now"][0]:
            row = [statistics.median(one[what] for one in told[name]) for name in trees]
            print(f"{what} | " + " | ".join(f"{value:,.1f}" for value in row), flush=True)


if __name__ == "__main__":
    main()
