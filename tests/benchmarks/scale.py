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
        from unicrond.core.state.state import ClusterState
        from unicrond.events import vocabulary as v
        from unicrond.events.vocabulary.placements import runs_of
        from unicrond.events.wire.schemas import SCHEMA, told_version

        self.v = v
        self.state: Any = ClusterState()
        self.numbers: dict[str, int] = {}
        self.names = [f"node{number:05}" for number in range(nodes)]
        store = v.StoreAddress(host="10.0.0.1", port=1)
        version = told_version("benchmark", SCHEMA)
        self.tell(v.CoordinatorStarted(term=1, version=version))
        for name in self.names:
            self.say(
                name,
                v.NodeJoined(node=name, address=name, slots=SLOTS, store=store, agent_boot=1, version=version),
            )
        share = nodes // TASKS * SLOTS
        assignments, members = [], {}
        for task in range(TASKS):
            spec = v.TaskSpec(
                name=f"t{task}",
                min_workers=1,
                iterations=10**6,
                max_workers=share,
                global_batch=share,
                throughput={str(share): 10**15},
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
                task=name, generation=1, size=1, seats=runs_of(every, {one.worker for one in every}, 1), urgent=True,
                store=store, incident="", reason="benchmark",
            )  # fmt: skip
            self.tell(decided)
            for member in every:
                self.say(member.node, self.regrouped(name, member, 1))
        self.members = members

    def _plan(self, assignments: list[Any]) -> None:
        from unicrond.core.rules.survey import Survey
        from unicrond.core.state.policy import Policy

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
        return self.v.WorkerJoinedGroup(
            node=member.node, task=task, worker=member.worker, generation=generation, iteration=1,
            micro_batches_assigned=0, duration_us=1, source="own",
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
        from unicrond.events.wire.envelope import Envelope, RecordedEvent

        v = self.v
        ours = isinstance(event, v.Decision | v.Command | v.CoordinatorStarted)
        producer = producer or ("coordinator" if ours else "api")
        number = self.numbers[producer] = self.numbers.get(producer, 0) + 1
        seq = seq or self.state.seq + 1
        envelope = Envelope(
            producer=producer, boot=1, number=number, term=1 if ours else 0, observed_at_us=seq, event=event
        )
        return RecordedEvent(seq, seq, envelope)


def timed(run: Callable[[int], object], rounds: int) -> float:
    """Median microseconds of CPU time of one call."""
    found = []
    for number in range(rounds):
        began_ns = time.thread_time_ns()
        run(number)
        found.append(time.thread_time_ns() - began_ns)
    return statistics.median(found) / 1000


class Rounds:
    """Times single calls on one cluster. `rounds`: of each."""

    def __init__(self, nodes: int, rounds: int) -> None:
        self.cluster = Cluster(nodes)
        self.began = self.cluster.state
        self.rounds = rounds

    def folds(self, make: Callable[[int], tuple[str, Any]]) -> float:
        """Microseconds to fold one of the events that `make` gives: (producer, event)."""
        from unicrond.core.fold import fold

        cluster = self.cluster
        cluster.state, entries = self.began, []
        for number in range(self.rounds):
            producer, event = make(number)
            entries.append(cluster.entry(event, producer, self.began.seq + 1 + number))

        def run(number: int) -> None:
            cluster.state = fold(cluster.state, entries[number])

        return timed(run, self.rounds)

    def member(self, number: int) -> tuple[str, Any]:
        """Another task and another member each time."""
        members = self.cluster.members[f"t{number % TASKS}"]
        return f"t{number % TASKS}", members[number // TASKS % len(members)]

    def of_member(self, make: Callable[[str, Any], Any]) -> float:
        """As `folds`; `make` is given a task and a member, which says the event."""
        return self.folds(lambda number: (self.member(number)[1].node, make(*self.member(number))))

    def step(self, number: int) -> tuple[str, Any]:
        """A step of another task each time."""
        return self.member(number)[1].node, self.cluster.step(f"t{number % TASKS}", number + 1)


def fold_times(rounds: Rounds) -> dict[str, float]:
    """What one event of a kind costs the fold."""
    cluster = rounds.cluster
    v, names = cluster.v, cluster.names
    kept = {"shard": 0, "iteration": 1, "generation": 1, "origin": "own", "size_bytes": 1, "duration_us": 1}

    def lost(number: int) -> tuple[str, Any]:
        evidence = v.Evidence(beat_seq=1, beat_at_us=1)
        return "", v.NodeLost(node=names[number * 7 % len(names)], evidence=evidence, reason="benchmark")

    return {
        "fold StepCommitted": rounds.folds(rounds.step),
        "fold WorkerJoinedGroup": rounds.of_member(lambda t, m: cluster.regrouped(t, m, 1)),
        "fold WorkerStarted": rounds.of_member(
            lambda t, m: v.WorkerStarted(node=m.node, task=t, worker=m.worker, pid=7)
        ),
        "fold CommandApplied": rounds.of_member(
            lambda _, m: v.CommandApplied(node=m.node, command_id=f"1.1.{m.node}.99")
        ),
        "fold SnapshotStored": rounds.of_member(lambda t, m: v.SnapshotStored(node=m.node, task=t, **kept)),
        "fold WorkerExited": rounds.of_member(
            lambda t, m: v.WorkerExited(
                node=m.node, task=t, worker=m.worker, exit_code=None, signal=9, is_expected=False
            )
        ),
        "fold NodeLost": rounds.folds(lost),
    }


def look_times(rounds: Rounds) -> dict[str, float]:
    """What one look at the state costs after an event that changes little."""
    from unicrond.core.decide import decide
    from unicrond.core.rules.deadlines import deadlines
    from unicrond.core.rules.invariants import check
    from unicrond.core.rules.survey import Survey

    cluster, policy, times = rounds.cluster, rounds.cluster.policy, rounds.rounds
    cluster.state = rounds.began
    states = [rounds.began]
    for number in range(times):
        producer, event = rounds.step(number)
        cluster.say(producer, event)
        states.append(cluster.state)
    since = "since" in check.__code__.co_varnames
    found = {
        "check": timed(lambda n: check(states[n + 1], states[n]) if since else check(states[n + 1]), times)  # type: ignore[call-arg]
    }
    surveys: list[Any] = [Survey(rounds.began, policy)]
    decide(surveys[0], {})
    found["survey"] = timed(lambda n: surveys.append(Survey(states[n + 1], policy, surveys[-1])), times)
    found["deadlines at rest"] = timed(lambda n: deadlines(surveys[n + 1]), times)
    found["decide at rest"] = timed(lambda n: decide(surveys[n + 1], {}), times)
    return found


class Fault:
    """One worker's death, from its exit to TransitionCompleted: every event that real agents and workers would write,
    and all that the coordinator does about them. `entries`, `log_bytes`: what the log takes; `cpu_us`: of the
    coordinator: decode, fold, hold against the rules, survey, deadlines, decide, try, encode.

    Of a group that is too large to name its lost peers all members report the break, or (`report_after_s`) a few.
    """

    def __init__(self, cluster: Cluster, task: str) -> None:
        from unicrond.core.rules.survey import Survey

        self.cluster, self.task, self.v = cluster, task, cluster.v
        self.survey = Survey(cluster.state, cluster.policy)
        self.sound = cluster.state
        self.entries = self.log_bytes = 0
        self.cpu_us = 0.0
        self.generation = 1
        self.said: list[tuple[str, Any]] = []
        self.over = False
        self.told: dict[str, float] = {}
        _ = cluster.state.by_node if hasattr(cluster.state, "by_node") else None  # carried along
        self._decide()  # at rest
        self.cpu_us, self.told = 0.0, {}

    def play(self, victim: Any) -> None:
        """To the end. `victim`: a member of the task."""
        v, task = self.v, self.task
        place = {"node": victim.node, "task": task, "worker": victim.worker}
        report = {"generation": 1, "iteration": 7, "phase": "reduce", "message": "connection closed by peer"}
        self.say(victim.node, v.ErrorReported(**place, kind="process_exit", **{**report, "message": "SIGKILL"}))
        self.say(victim.node, v.WorkerExited(**place, exit_code=None, signal=9, is_expected=False))
        members = self.cluster.members[task]
        for rank, one in enumerate(members):
            if one is not victim and _reports_at_once(rank, len(members)):
                broken = v.ErrorReported(
                    node=one.node, task=task, worker=one.worker, kind="connection_broken", **report
                )
                self.say(one.node, broken)
        while self.said:
            answered, self.said = self.said, []
            for count, (producer, event) in enumerate(answered, 1):
                self._read(event, producer)
                if len(answered) <= 16 or count == len(answered):  # what comes in one burst is folded first
                    self._decide()
        if not self.over:
            raise SystemExit("the fault was not healed")

    def say(self, producer: str, event: Any) -> None:
        """An agent's event, of the next burst."""
        self.said.append((producer, event))

    def _read(self, event: Any, producer: str = "") -> None:
        from unicrond.core.fold import fold
        from unicrond.events.wire.codec import decode, encode
        from unicrond.events.wire.envelope import RecordedEvent

        entry = self.cluster.entry(event, producer)
        body = encode(entry.envelope)
        self.entries, self.log_bytes = self.entries + 1, self.log_bytes + len(body)
        began_ns = time.thread_time_ns()
        entry = RecordedEvent(entry.seq, entry.recorded_at_us, decode(body))
        self.cluster.state = fold(self.cluster.state, entry)
        self._spent(type(event).__name__, began_ns)
        if self.cluster.state.quarantined_messages or self.cluster.state.inert:
            raise SystemExit(f"not folded: {event}")

    def _decide(self) -> None:
        """As service/coordinator/coordinator.py does, until nothing more is decided."""
        from unicrond.core.decide import decide, needed_solves
        from unicrond.core.own_decisions import require_sound
        from unicrond.core.rules.deadlines import deadlines
        from unicrond.core.rules.invariants import check
        from unicrond.core.rules.survey import Survey
        from unicrond.events.wire.codec import encode

        decided = True
        while decided:
            began_ns = time.thread_time_ns()
            state = self.cluster.state
            check(state, self.sound) if "since" in check.__code__.co_varnames else check(state)  # type: ignore[call-arg]
            self.sound = state
            self.survey = Survey(state, self.cluster.policy, self.survey)
            deadlines(self.survey)
            if needed_solves(self.survey):
                raise SystemExit("a worker's death asked for a plan")
            decided = decide(self.survey, {})
            self._spent("decide", began_ns)
            if decided:
                seq = state.seq
                envelopes = [self.cluster.entry(event, seq=seq + n).envelope for n, event in enumerate(decided, 1)]
                self.cluster.numbers["coordinator"] -= len(decided)
                began_ns = time.thread_time_ns()
                require_sound(state, envelopes)
                for envelope in envelopes:
                    encode(envelope)
                self._spent("try and encode", began_ns)
            for event in decided:
                self._read(event)
                self._obey(event)

    def _spent(self, what: str, began_ns: int) -> None:
        spent_us = (time.thread_time_ns() - began_ns) / 1000
        self.cpu_us += spent_us
        self.told[what] = self.told.get(what, 0.0) + spent_us

    # --- agents and workers ----------------------------------------------------------------------

    def _obey(self, event: Any) -> None:
        v, task = self.v, self.task
        if isinstance(event, v.Command):
            self.say(event.node, v.CommandApplied(node=event.node, command_id=event.command_id))
        match type(event).__name__:
            case "StartWorker":
                self.say(event.node, v.WorkerStarted(node=event.node, task=task, worker=event.worker, pid=1))
                self.say(event.node, v.WorkerReady(node=event.node, task=task, worker=event.worker))
            case "MembershipDecided":
                self.generation = event.generation
                self._regroup()
            case "TransitionCompleted":
                self.over = True

    def _regroup(self) -> None:
        """Every member comes into the group, and says so, or its lead for it; a joiner takes its state first."""
        v, task, membership = self.v, self.task, self.cluster.state.tasks[self.task].membership
        spoken_for = getattr(membership, "spoken_for", frozenset())
        taken = {"iteration": 6, "size_bytes": 10**10, "duration_us": 10**6, "storage_iteration": 5, "saved_us": 10**7}
        for member in membership.members:
            joins = member.worker in membership.joiners
            regrouped = v.WorkerJoinedGroup(
                node=member.node, task=task, worker=member.worker, generation=self.generation, iteration=7,
                micro_batches_assigned=0, duration_us=10**5, source="replica" if joins else "own",
            )  # fmt: skip
            if joins:
                place = {"node": member.node, "task": task, "worker": member.worker, "generation": self.generation}
                self.say(member.node, v.StateLoaded(**place, source="replica", **taken))
            if member is membership.members[0] or member.worker not in spoken_for:
                self.say(member.node, regrouped)
        if membership.joiners:
            lead = membership.members[0]
            self.say(lead.node, replaced(self.cluster.step(task, 7), generation=self.generation, worker=lead.worker))


def _reports_at_once(rank: int, size: int) -> bool:
    try:
        from unicrond.agents.trainer.groups.shard_group import report_after_s
    except ImportError:
        return True
    return report_after_s(rank, size) == 0.0


def replaced(event: Any, **fields: Any) -> Any:
    import msgspec

    return msgspec.structs.replace(event, **fields)


def fault_costs(cluster: Cluster, plays: int = 7) -> dict[str, float]:
    """Of one worker's death: the median of several, of one where it takes long."""
    members, began, numbers = cluster.members["t0"], cluster.state, dict(cluster.numbers)
    faults: list[Fault] = []
    while len(faults) < plays and not (faults and faults[0].cpu_us > 10**6):
        cluster.state, cluster.numbers = began, dict(numbers)
        faults.append(Fault(cluster, "t0"))
        faults[-1].play(members[len(members) // 2])
    fault = sorted(faults, key=lambda one: one.cpu_us)[len(faults) // 2]
    by_part = sorted(fault.told.items(), key=lambda item: -item[1])
    return {
        "a worker's fault: entries": fault.entries,
        "a worker's fault: log, KB": fault.log_bytes / 1000,
        "a worker's fault: CPU, ms": fault.cpu_us / 1000,
    } | {f"  of that {what}, ms": spent_us / 1000 for what, spent_us in by_part[:6]}


#: As old as a snapshot gets: entries that a restart still has to fold.
TAIL = 10_000


def restart_costs(cluster: Cluster) -> dict[str, float]:
    """What a coordinator does between its start and being live, beside reading: the snapshot, the rest of the log, and
    the first look. However long the log is: nothing else of it is read."""
    from unicrond.core.decide import decide
    from unicrond.core.fold import fold
    from unicrond.core.rules.invariants import check
    from unicrond.core.rules.survey import Survey
    from unicrond.events.log.log_identity import LogMark
    from unicrond.events.wire.codec import decode, encode
    from unicrond.events.wire.envelope import RecordedEvent
    from unicrond.service.coordinator.snapshots import decode_snapshot, encode_snapshot

    found: dict[str, float] = {}

    def spent(what: str, began_ns: int) -> None:
        found[f"restart: {what}, ms"] = (time.thread_time_ns() - began_ns) / 1e6

    began_ns = time.thread_time_ns()
    body = encode_snapshot(cluster.state, LogMark(cluster.state.seq, cluster.state.now_us, ""))
    spent("(to write the snapshot)", began_ns)
    found["restart: snapshot, MB"] = len(body) / 1e6
    steps = [cluster.step(f"t{number % TASKS}", number // TASKS + 1) for number in range(TAIL)]
    first = cluster.state.seq + 1
    tail = [
        (first + number, encode(cluster.entry(step, step.node, first + number).envelope))
        for number, step in enumerate(steps)
    ]
    began_ns = time.thread_time_ns()
    state, *_ = decode_snapshot(body)
    spent("read the snapshot", began_ns)
    began_ns = time.thread_time_ns()
    for seq, entry in tail:
        state = fold(state, RecordedEvent(seq, seq, decode(entry)))
    spent(f"fold {TAIL} entries", began_ns)
    began_ns = time.thread_time_ns()
    check(state)
    spent("hold it against the rules", began_ns)
    began_ns = time.thread_time_ns()
    decide(Survey(state, cluster.policy), {})
    spent("first look", began_ns)
    assert state.seq == first + TAIL - 1 and not state.quarantined_messages
    return found


def measure(nodes: int, rounds: int) -> dict[str, float]:
    """All of it on a cluster of so many nodes."""
    made = Rounds(nodes, rounds)
    found = fold_times(made) | look_times(made)
    made.cluster.state = made.began
    found |= restart_costs(made.cluster)
    found |= fault_costs(made.cluster)
    found["memory, MB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[100, 1000, 10_000])
    parser.add_argument("--base", type=Path, help="another checkout to measure beside this one")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--fault", action="store_true", help="only a worker's fault as a whole, and a restart")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        if given.fault:
            cluster = Cluster(given.one)
            found = restart_costs(cluster) | fault_costs(cluster)
        else:
            found = measure(given.one, given.rounds)
        print(json.dumps(found))
        return
    trees = {"base": given.base, "now": Path.cwd()} if given.base else {"now": Path.cwd()}
    for nodes in given.nodes:
        told: dict[str, list[dict[str, float]]] = {name: [] for name in trees}
        for _ in range(given.turns if nodes < 5000 else 1):
            for name, tree in trees.items():
                command = [sys.executable, __file__, "--one", str(nodes), "--rounds", str(given.rounds)]
                command += ["--fault"] if given.fault else []
                answer = subprocess.run(
                    command, cwd=tree, env={"PYTHONPATH": str(tree)}, capture_output=True, text=True
                )
                if answer.returncode:
                    raise SystemExit(answer.stderr)
                told[name].append(json.loads(answer.stdout))
        print(f"\n{nodes} nodes | " + " | ".join(trees))
        for what in told["now"][0]:
            row = [statistics.median(one.get(what, 0.0) for one in told[name]) for name in trees]
            print(f"{what} | " + " | ".join(f"{value:,.1f}" for value in row), flush=True)


if __name__ == "__main__":
    main()
