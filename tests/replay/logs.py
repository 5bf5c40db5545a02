"""Logs to replay: a cluster in miniature lives through drawn faults, and then says everything else there is to say."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from tests.unicrond.cluster import SECOND_US, Host, MiniCluster
from unicrond.events import vocabulary as v
from unicrond.events.log.event_log import EventLog
from unicrond.events.wire.envelope import Entry, QuarantinedMessage, RecordedEvent
from unicrond.replay.reading.export import Export


def troubled(seed: int, faults: int = 12) -> MiniCluster:
    """Two tasks on four nodes; workers and nodes die, coordinators and agents come back, in an order from `seed`."""
    cluster = MiniCluster(seed)
    draw = random.Random(seed)
    for number in range(4):
        cluster.add_host(f"n{number}")
    cluster.submit("big", weight=2.0, max_workers=3)
    cluster.submit("small", max_workers=3)
    cluster.run()
    for _ in range(faults):
        alive = [(host, worker) for host in cluster.hosts.values() if host.up for worker in host.processes]
        up = [host for host in cluster.hosts.values() if host.up]
        down = [host for host in cluster.hosts.values() if not host.up]
        fault = draw.randrange(5)
        if fault <= 1 and alive:
            cluster.kill_worker(*draw.choice(alive))
        elif fault == 2 and len(up) > 1:
            host = draw.choice(up)
            cluster.kill_host(host)
            cluster.lose(host)
        elif fault == 3 and down:
            cluster.add_host(draw.choice(down).name)
        elif fault == 4:
            cluster.take_over()
        for _ in range(draw.randrange(6)):
            draw.choice(cluster.moves())()
        cluster.train("big", steps=draw.randrange(1, 4))
        cluster.train("small")
        if draw.random() < 0.4:
            cluster.run()
    for host in cluster.hosts.values():
        if not host.up:
            cluster.add_host(host.name)
    cluster.run()
    cluster.assert_whole()
    return cluster


class _Scene(NamedTuple):
    """Whom the events are about: the first member on node n0, its task, and the iteration that it has committed."""

    cluster: MiniCluster
    host: Host
    member: v.Member
    task: str
    iteration: int
    term: int

    @property
    def about(self) -> dict[str, Any]:
        return {"node": "n0", "task": self.task, "worker": self.member.worker}


def eventful(seed: int) -> list[Entry]:
    """A log with every type of event, a repeated event, a decision of an old term and a quarantined message."""
    cluster = troubled(seed)
    memberships = [task.membership for task in cluster.state.tasks.values() if task.membership]
    member = next(member for membership in memberships for member in membership.members if member.node == "n0")
    task = member.worker.partition(".")[0]
    iteration = cluster.iterations.get(task, 0)
    scene = _Scene(cluster, cluster.hosts["n0"], member, task, iteration, cluster.state.term)
    for part in (_troubles, _states, _by_hand, _by_people, _ends):
        part(scene)
    return [*cluster.log, *_oddities(cluster)]


def _troubles(scene: _Scene) -> None:
    """What a worker and its agent report of the member: errors, hangs, slowness, accelerators."""
    cluster, host, member, task, iteration, _ = scene
    about = scene.about
    cluster.say(
        host,
        v.ErrorReported(
            **about,
            kind="connection_broken",
            generation=cluster.state.tasks[task].generation,
            iteration=iteration + 1,
            phase="reduce",
            message="Connection reset by peer \x1b[31m— «gloo»\n",
            detail="first line\n\x1b[31msecond line\x1b[0m",
        ),
    )
    cluster.run()
    cluster.train(task)
    told = {**about, "generation": cluster.state.tasks[task].generation, "iteration": iteration + 1}
    cluster.say(
        host,
        v.HangSuspected(
            **told,
            phase="reduce",
            micro_batch=1,
            collectives_entered=3,
            is_waiting=True,
            is_stopped=False,
            still_us=4_000_000,
            limit_us=3_000_000,
        ),
    )
    cluster.say(
        host,
        v.DegradationObserved(
            **told, iteration_us=2_000_000, usual_us=1_000_000, slowest="", compute_us=9, others_us=0
        ),
    )
    stack = v.WorkerStack(
        worker=member.worker, phase="reduce", iteration=told["iteration"], collectives_entered=3, is_waiting=True,
        still_us=4_000_000, collective="allreduce of gloo, group 1, number 3", reader="worker", stack=1,
    )  # fmt: skip
    text = 'Thread MainThread (most recent call first):\n  File "/srv/train.py", line 62, in reduce'
    cluster.say(
        host,
        v.StacksTaken(node="n0", task=task, generation=told["generation"], workers=(stack,), stacks=(text,)),
    )
    straggler = {"straggler": member.worker, "straggler_node": "n0", "rank": 0}
    cluster.say(
        host,
        v.StragglerObserved(
            **told, **straggler, factor=1.25, compute_us=125, others_us=100, since_iteration=1, since_us=1
        ),
    )
    cluster.say(host, v.WorkerBusy(**about, section="evaluation", limit_us=60 * SECOND_US))
    cluster.say(host, v.WorkerBusy(**about, section="", limit_us=0))
    cluster.say(host, v.WorkerWaiting(**about, generation=told["generation"]))
    cluster.say(host, v.PeersRemembered(node="n0", task=task, peers=()))
    cluster.say(host, v.StragglerRecovered(**told, **straggler, factor=1.01))
    cluster.say(host, v.CorruptionSuspected(**told, sign="loss", suspect="", value=float("inf"), usual=1.0))
    cluster.say(host, v.DivergenceObserved(**told, sign="parameters"))
    cluster.say(
        host,
        v.AcceleratorReported(
            node="n0", accelerator="GPU-1", worker="", kind=None, xid=63, message="XID 63: row remapping recorded"
        ),
    )
    cluster.run()
    cluster.train(task)


def _states(scene: _Scene) -> None:
    """What is kept of its state, and taken."""
    cluster, host, member, task, iteration, _ = scene
    about = scene.about
    cluster.say(
        host,
        v.CheckpointSaved(**about, iteration=iteration, path="/ckpt/7", size_bytes=12345, duration_us=2500),
    )
    cluster.say(
        host,
        v.SnapshotStored(
            node="n0",
            task="big",
            shard=0,
            iteration=iteration,
            generation=1,
            origin="n0",
            size_bytes=5,
            duration_us=7,
        ),
    )
    cluster.say(
        host,
        v.StateLoaded(
            node="n0",
            task=task,
            worker=member.worker,
            generation=1,
            source="replica",
            iteration=iteration,
            size_bytes=5,
            duration_us=7,
        ),
    )


def _by_hand(scene: _Scene) -> None:
    """Answers to commands, and a coordinator's decisions about nodes."""
    cluster, host, term = scene.cluster, scene.host, scene.term
    cluster.append(v.PeersDecided(task="big", peers=()), "coordinator", term)
    _of_large_tasks(scene)
    cluster.say(host, v.CommandApplied(node="n0", command_id=f"{term}.1.n0.1"))
    cluster.say(host, v.CommandFailed(node="n0", command_id=f"{term}.1.n0.2", reason="unknown worker"))
    cluster.append(v.NodeReturned(node="n0", evidence=v.Evidence(beat_seq=9, beat_at_us=1)), "coordinator", term)
    until_us = cluster.now_us + 60 * SECOND_US
    cluster.append(v.NodeIsolated(node="n3", until_us=until_us, reason="by hand"), "coordinator", term)
    cluster.run()
    check = v.CheckNode(command_id=f"{term}.1.n3.78", node="n3", epoch=1, limit_us=60 * SECOND_US, reason="by hand")
    cluster.append(check, "coordinator", term)
    cluster.say(
        cluster.hosts["n3"],
        v.NodeChecked(node="n3", command_id=check.command_id, has_passed=False, duration_us=9, detail="by hand"),
    )
    repaired = v.RepairEnded(node="n3", isolation=1, has_passed=True, duration_us=9, detail="by hand")
    cluster.append(repaired, "coordinator", term)
    cluster.append(v.NodeReadmitted(node="n3", reason="by hand"), "coordinator", term)
    # An entry that is not there: to pass over one of these would change what the other tests count.
    cluster.append(v.EntrySkipped(seq=10**9, reason="by hand"), "coordinator", term)
    cluster.run()


def _of_large_tasks(scene: _Scene) -> None:
    """What only a coordinator of large tasks writes; without effect here."""
    cluster, term = scene.cluster, scene.term
    big = cluster.state.tasks["big"]
    peers = (v.ProbedPeer(node="n3", host="n3", port=9),)
    order = v.ProbeLinks(command_id=f"{term}.1.n0.79", node="n0", epoch=1, peers=peers, task="gone", generation=1)
    cluster.append(order, "coordinator", term)
    probes = (v.LinkProbe(peer="n3", condition="silent", took_us=1_000_000, hears_peer=True),)
    cluster.say(scene.host, v.LinksProbed(node="n0", command_id=order.command_id, probes=probes))
    withdrawn = v.WorkersWithdrawn(task="gone", node="n0", peers=("n3",), reason="by hand")
    cluster.append(withdrawn, "coordinator", term)
    starts = v.StartWorkers(command_id=f"{term}.1.n0.80", node="n0", epoch=1, spec=big.spec, starts=())
    cluster.append(starts, "coordinator", term)
    seats = (v.SeatRun(node="n0", number=1, seat=0, count=1, joins=True),)
    cluster.append(v.MembershipPart(task="big", generation=99, part=1, seats=seats), "coordinator", term)
    corrected = v.ThroughputCorrected(task="gone", workers=1, flops=1, iteration_us=1, reports=1, reason="by hand")
    cluster.append(corrected, "coordinator", term)


def _by_people(scene: _Scene) -> None:
    """What people ask for: nodes, another layout, a fault, the end of a task."""
    cluster, member, iteration, term = scene.cluster, scene.member, scene.iteration, scene.term
    cluster.cordon("n3", drain=True)
    cluster.run()
    cluster.uncordon("n3")
    window = cluster.maintain("n3", after_s=10**10, for_s=600)  # to come by any clock that a copy may be stamped by
    cluster.append(v.MaintenanceCancelled(window=window, reason="by hand"), "api", term)
    cluster.drain_by("n3", 3600)
    cluster.append(v.DrainStarted(node="n3", reason="no worker is on it"), "coordinator", term)
    cluster.run()
    cluster.uncordon("n3")
    cluster.append(v.ModeRequested(mode="heal", reason="by hand"), "api", term)
    held = v.DecisionHeld(
        action="isolation", node="n3", reason="XID 94", limit="isolated_share", detail="2 of 8 are out"
    )
    cluster.append(held, "coordinator", term)
    lifted = v.HoldLifted(action="isolation", node="n3", reason="nothing asks for it any more")
    cluster.append(lifted, "coordinator", term)
    cluster.run()
    cluster.append(v.NodeEnrolled(node="n4", key="U" + "A" * 55, expires_us=0), "api", term)
    cluster.append(v.NodeRevoked(node="n4", reason="by hand"), "api", term)
    cluster.run()
    alarm = "volume-full:state"
    cluster.append(v.AlarmAcknowledged(alarm=alarm, reason="by hand", requester="anna"), "api", term)
    cluster.append(v.AlarmSilenced(alarm=alarm, for_us=3600 * SECOND_US, reason="by hand"), "api", term)
    cluster.append(v.AlarmAssigned(alarm=alarm, person="bob", reason="by hand"), "api", term)
    cluster.append(v.AlarmEnded(alarm="node-lost:n3"), "coordinator", term)
    asked = v.ReshapeRequested(task="big", tp=1, pp=1, min_workers=1, max_workers=2, reason="by hand")
    cluster.append(asked, "api", term)
    cluster.run()
    cluster.append(v.ProofRequested(task="big"), "api", term)
    update = v.TaskUpdated(task="big", priority=1, preemptible=True, reason="by hand")
    cluster.append(update, "api", term)
    cluster.run()
    fault = v.Fault(kind="slow", worker=member.worker, at_iteration=iteration + 1, phase="forward", seconds=0.5)
    cluster.append(v.InjectionRequested(node="n0", fault=fault), "api", term)
    cluster.run()
    escalated = v.IncidentEscalated(incident="i1", severity=2, worker=member.worker, reason="it was closed before")
    cluster.append(escalated, "coordinator", term)
    cluster.submit("tiny")
    cluster.append(v.TaskCancelled(task="tiny", reason="a slip"), "api", term)
    cluster.submit("doomed")
    cluster.append(v.TaskFailed(task="doomed", reason="no node has room"), "coordinator", term)
    cluster.run()


def _ends(scene: _Scene) -> None:
    """A task completes; a node leaves."""
    cluster, iteration = scene.cluster, scene.iteration
    term = cluster.state.term
    cluster.append(v.SilenceHeld(nodes=4, reason="by hand"), "coordinator", term)
    cluster.append(v.SilenceEnded(reason="by hand"), "coordinator", term)
    cluster.append(v.NodesLost(nodes=("n9",), reason="by hand"), "coordinator", term)
    cluster.run()
    lead = cluster.state.tasks["big"].membership
    assert lead is not None
    first = lead.members[0]
    stop = v.StopRequested(node=first.node, task="big", worker=first.worker, iteration=iteration, reason="by hand")
    cluster.say(cluster.hosts[first.node], stop)
    unsaved = v.SaveFailed(
        node=first.node,
        task="big",
        worker=first.worker,
        iteration=iteration,
        saver="program",
        reason="OSError: no space",
    )
    cluster.say(cluster.hosts[first.node], unsaved)
    cluster.say(
        cluster.hosts[first.node],
        v.TaskCompleted(
            node=first.node,
            task="big",
            worker=first.worker,
            iteration=cluster.iterations["big"],
            loss=float("nan"),
            params_digest="00ff",
        ),
    )
    cluster.run()
    cluster.say(cluster.hosts["n2"], v.NodeLeaving(node="n2", grace_us=9, reason="maintenance"))
    cluster.say(cluster.hosts["n2"], v.NodeLeft(node="n2", reason="maintenance"))
    term = cluster.state.term
    cluster.say(cluster.hosts["n0"], v.MachineReported(node="n0", hold="", reason=""))
    cluster.append(v.ForgetRequested(node="n9", leave=True, reason="by hand"), "api", term)
    leave = v.LeaveCluster(
        command_id=f"{term}.1.n3.79", node="n3", epoch=1, for_good=False, limit_us=1, reason="by hand"
    )
    cluster.append(leave, "coordinator", term)
    cluster.hosts["n3"].commands.clear()
    cluster.append(v.NodeForgotten(node="n9", reason="by hand"), "coordinator", term)


def _oddities(cluster: MiniCluster) -> list[Entry]:
    """The last entry again, an unreadable message, and a decision of an old term."""
    last = cluster.log[-1]
    later_us = last.recorded_at_us + 1000
    stale = next(entry for entry in cluster.log if isinstance(entry.envelope.event, v.PlanAdopted))
    of_old_term = msgspec.structs.replace(stale.envelope, boot=10_000, number=1, term=1)
    return [
        RecordedEvent(last.seq + 1, later_us, last.envelope),
        QuarantinedMessage(last.seq + 2, later_us, "unicron.v1.obs.n1.Nonsense", "$.event: unknown tag", 17),
        RecordedEvent(last.seq + 3, later_us - 500, of_old_term),
    ]


def write_log(path: Path, entries: list[Entry], batch: int = 100) -> Path:
    """The entries as an exported log."""
    with Export(path) as export:
        for begin in range(0, len(entries), batch):
            export.write(entries[begin : begin + batch])
    return path


async def fill(log: EventLog, entries: list[RecordedEvent]) -> None:
    """Append what a cluster said, as its coordinator and agents would."""
    for entry in entries:
        if isinstance(entry.envelope.event, v.CoordinatorStarted):
            await log.claim_term(entry.envelope)
        else:
            await log.append([entry.envelope])
