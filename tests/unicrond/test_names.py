"""No sentence names a task, a worker or a node that its evidence does not have, over random histories."""

from __future__ import annotations

import random
import re
from collections.abc import Collection
from dataclasses import dataclass, field

import pytest
from msgspec.structs import replace

from tests.unicrond.cluster import MiniCluster
from unicrond.core.deciding.response import failed_tasks
from unicrond.core.replayer import LogStep, steps
from unicrond.core.state.state import ClusterState, TaskStatus
from unicrond.core.state.task_parts import Troubles
from unicrond.events import vocabulary as v
from unicrond.events.vocabulary.phrases import task_of
from unicrond.events.wire.envelope import Envelope, RecordedEvent
from unicrond.views.accounts import Accounts

TASKS, NODES = ("prod", "scrap", "junk"), ("gpu1", "gpu2", "gpu3", "gpu4", "gpu5")


def random_history(seed: int) -> MiniCluster:
    """Two programs that end whenever they start, one that trains, nodes that are lost: in an order from the seed."""
    cluster, draw = MiniCluster(seed), random.Random(seed)
    for name in NODES:
        cluster.add_host(name)
    for name in TASKS:
        cluster.submit(name, max_workers=2)
    cluster.run()
    for _ in range(25):
        garbage = [
            (host, worker)
            for host in cluster.hosts.values()
            for worker in host.processes
            if host.up and task_of(worker) != "prod"
        ]
        up, fault = [host for host in cluster.hosts.values() if host.up], draw.randrange(8)
        if fault < 6 and garbage:
            cluster.kill_worker(*draw.choice(garbage))
        elif fault == 6 and len(up) > 3:
            host = draw.choice(up)
            cluster.kill_host(host)
            cluster.lose(host)
        elif fault == 7:
            for host in cluster.hosts.values():
                if not host.up:
                    cluster.add_host(host.name)
        cluster.run()
        cluster.train("prod")
    return cluster


def named_in(text: str, names: Collection[str]) -> set[str]:
    return {name for name in names if re.search(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", text)}


def workers_named_in(text: str) -> set[str]:
    return set(re.findall(rf"(?<![\w.-])(?:{'|'.join(TASKS)})\.\d+(?![\w-])", text))


@dataclass
class Evidence:
    """What a log has told so far. `ended`, `isolated_for`: node -> tasks (whose worker ended; named as the reason)."""

    workers: set[str] = field(default_factory=set)
    ended: dict[str, set[str]] = field(default_factory=dict)
    isolated_for: dict[str, set[str]] = field(default_factory=dict)

    def see(self, step: LogStep) -> None:
        event = step.event
        self.workers |= {worker for task in step.after.tasks.values() for worker in task.workers}
        if isinstance(event, v.WorkerExited | v.ErrorReported):
            self.ended.setdefault(event.node, set()).add(event.task)
        if isinstance(event, v.NodeLost):
            for task in step.before.tasks.values():
                if any(worker.node == event.node for worker in task.workers.values()):
                    self.ended.setdefault(event.node, set()).add(task.name)
        if isinstance(event, v.NodeIsolated):
            self.isolated_for[event.node] = named_in(event.reason, TASKS)


def wrong_names(step: LogStep, evidence: Evidence) -> list[str]:
    """What the sentence of the step names, and should not."""
    before, entry, after = step
    assert isinstance(entry, RecordedEvent)
    event, text = entry.envelope.event, entry.envelope.event.sentence()
    there = {*before.nodes, *after.nodes, *after.tasks}
    wrong = [f"{name}: not in the cluster yet" for name in named_in(text, (*TASKS, *NODES)) - there]
    if not isinstance(event, v.Command):
        wrong += [f"{worker}: nobody has started it" for worker in workers_named_in(text) - evidence.workers]
    if isinstance(event, v.NodeIsolated | v.NodeReadmitted):
        node, tasks = event.node, named_in(event.reason, TASKS)
        wrong += [f"{task}: nothing of it ended on {node}" for task in tasks - evidence.ended.get(node, set())]
        wrong += [f"{other}: it is about {node}" for other in named_in(event.reason, NODES) - {node}]
        if tasks:
            wrong += [f"{task}: not named, and it was isolated for it" for task in evidence.isolated_for[node] - tasks]
    for incident in after.incidents.values():
        lost = {*incident.lost_peers, *incident.lost_peers.values()}
        own = {incident.node, incident.worker, *incident.tasks, *lost, *map(task_of, lost), task_of(incident.worker)}
        told = named_in(incident.message, (*TASKS, *NODES)) | workers_named_in(incident.message)
        wrong += [f"{name}: not in the evidence of {incident.id}" for name in told - own]
    return [f"entry {entry.seq}, {text!r}: {fault}" for fault in wrong]


@pytest.mark.parametrize("seed", range(12))
def test_sentences_name_their_evidence(seed: int) -> None:
    evidence = Evidence()
    for step in steps(random_history(seed).log, ClusterState()):
        evidence.see(step)
        assert wrong_names(step, evidence) == []


@pytest.mark.parametrize("seed", range(12))
def test_accounts_tell_what_concerns_their_subject(seed: int) -> None:
    log = random_history(seed).log
    accounts = Accounts(lines_max=0)
    for step in steps(log, ClusterState()):
        accounts.feed(step)
    entries = {entry.seq: entry for entry in log}
    for name, life in accounts.incidents.items():
        incident = life.incident
        for line in accounts.story("incident", name).lines:
            match = re.match(r"  \d\d:\d\d:\d\d\.\d{3} +(\d+)  ", line)
            if match is None:
                continue
            seq = int(match[1])
            event = entries[seq].envelope.event
            assert life.first_seq <= seq <= (life.last_seq or seq), "it tells of its own time"
            concerned = {incident.node, *incident.tasks} & {*event.nodes_named(), *event.tasks_named()}
            general = isinstance(
                event, v.PlanAdopted | v.CoordinatorStarted | v.DeadlineExpired | v.TransitionCompleted
            )
            assert concerned or general, f"{line} in the account of {name}"
            other = re.findall(r"incident (i\d+)", line)
            assert set(other) <= {*accounts.incidents, *life.names}, line


def test_readmission_names_all_tasks_at_fault() -> None:
    cluster = MiniCluster(1)
    for name in NODES[:2]:
        cluster.add_host(name)
    for name in ("junk", "scrap"):
        cluster.submit(name)
    cluster.run()
    struck = Troubles(strikes={"gpu1": 1}), Troubles(strikes={"gpu1": 2})
    tasks = {
        name: replace(cluster.state.tasks[name], status=TaskStatus.FAILED, troubles=troubles)
        for name, troubles in zip(("junk", "scrap"), struck, strict=True)
    }
    state = replace(cluster.state, tasks=tasks)
    assert failed_tasks(state, state.nodes["gpu1"]) == ["junk", "scrap"]
    assert failed_tasks(state, state.nodes["gpu2"]) == []


def test_check_of_names_sees_a_wrong_one() -> None:
    state = random_history(0).state
    event = v.NodeReadmitted(node="gpu1", reason="task junk was at fault, not the node")
    envelope = Envelope(producer="coordinator", boot=1, number=1, term=1, based_on=1, observed_at_us=1, event=event)
    step = LogStep(state, RecordedEvent(state.seq + 1, 1, envelope), state)
    evidence = Evidence(isolated_for={"gpu1": {"scrap"}})
    assert any("it was isolated for it" in fault for fault in wrong_names(step, evidence))
    assert any("nothing of it ended" in fault for fault in wrong_names(step, evidence))
