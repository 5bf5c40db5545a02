"""Every decision is made again from its recorded inputs; what differs is found where it first differs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.replay.command import unicron_replay
from tests.replay.logs import troubled, write_log
from tests.unicrond.cluster import SECOND_US, MiniCluster
from unicrond.core.planning.solution import Solution
from unicrond.core.planning.solver import solve
from unicrond.core.state.policy import Policy
from unicrond.events import vocabulary as v
from unicrond.events.wire.envelope import Entry, Envelope, RecordedEvent
from unicrond.events.wire.schemas import SCHEMA
from unicrond.replay.cli import main
from unicrond.replay.views.verify import Divergence, Findings, Verifier, bases
from unicrond.service.coordinator.code_identity import code_version
from unicrond.views.view import feed_all

HEARTBEAT_US = SECOND_US


def verify(entries: Sequence[Entry], beats: Sequence[RecordedEvent] = ()) -> Findings:
    verifier = Verifier(bases(entries), beats)
    feed_all(verifier, entries)
    return verifier.finish()


def changed(entry: RecordedEvent, **fields: object) -> RecordedEvent:
    """The entry with another event."""
    event: Any = replace(entry.envelope.event, **fields)
    return RecordedEvent(entry.seq, entry.recorded_at_us, replace(entry.envelope, event=event))


def first(log: Sequence[RecordedEvent], kind: type) -> int:
    return next(number for number, entry in enumerate(log) if isinstance(entry.envelope.event, kind))


@pytest.mark.parametrize("seed", range(12))
def test_verify_repeats_every_decision(seed: int) -> None:
    log = troubled(seed).log
    findings = verify(log)
    decided = [
        entry
        for entry in log
        if isinstance(entry.envelope.event, v.Decision | v.Command)
        and not isinstance(entry.envelope.event, v.CoordinatorStarted | v.NodeLost | v.DeadlineExpired)
    ]
    assert findings.decisions == len(decided) > 20
    passed = [entry for entry in log if isinstance(entry.envelope.event, v.DeadlineExpired)]
    assert findings.deadlines == len(passed)
    assert findings.entries == len(log)


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        (v.PlanAdopted, {"reason": "another one"}),
        (v.PlanAdopted, {"waf": 1}),
        (v.MembershipDecided, {"urgent": False}),
        (v.StartWorker, {"replica": 9}),
        (v.TransitionCompleted, {"micro_batches_repeated": 77}),
    ],
)
def test_verify_finds_differing_decision(kind: type, change: dict[str, object]) -> None:
    log = list(troubled(3).log)
    at = first(log, kind)
    log[at] = changed(log[at], **change)
    batch = [entry.seq for entry in log if entry.envelope.based_on == log[at].envelope.based_on]
    with pytest.raises(Divergence) as caught:
        verify(log)
    assert caught.value.seq == min(seq for seq in batch if seq > log[at].envelope.based_on)
    assert caught.value.based_on == log[at].envelope.based_on
    (field,) = change
    assert caught.value.differing and caught.value.differing[0].startswith(f"{kind.__name__}.{field}: ")


def second_of_a_batch(log: list[RecordedEvent]) -> int:
    """The place of the first command that was decided together with what stands before it."""
    return next(
        at
        for at, (before, entry) in enumerate(pairwise(log), 1)
        if isinstance(entry.envelope.event, v.Command) and before.envelope.based_on == entry.envelope.based_on
    )


def test_verify_finds_missing_decision() -> None:
    log = list(troubled(3).log)
    at = second_of_a_batch(log)
    gone = log.pop(at)
    log[at:] = [RecordedEvent(entry.seq - 1, entry.recorded_at_us, entry.envelope) for entry in log[at:]]
    with pytest.raises(Divergence) as caught:
        verify(log)
    assert caught.value.based_on == gone.envelope.based_on
    assert len(caught.value.decided_again) == len(caught.value.recorded) + 1


def test_verify_rejects_truncated_batch() -> None:
    log = list(troubled(3).log)
    at = second_of_a_batch(log)
    with pytest.raises(Divergence):
        verify(log[:at])


def test_verify_finds_deadline_that_never_existed() -> None:
    cluster = troubled(5)
    cluster.append(v.DeadlineExpired(deadline_id="symptom:i7"), "coordinator", cluster.state.term)
    with pytest.raises(Divergence, match=f"entry {len(cluster.log)} ") as caught:
        verify(cluster.log)
    assert "no such deadline existed" in caught.value.decided_again[0]


def test_verify_finds_first_plan_of_other_planner(monkeypatch: pytest.MonkeyPatch) -> None:
    log = troubled(4).log
    plans = [entry for entry in log if isinstance(entry.envelope.event, v.PlanAdopted)]
    workers = [sum(a.workers for a in entry.envelope.event.assignments) for entry in plans]  # type: ignore[union-attr]
    wrong_at = next(number for number, count in enumerate(workers) if count >= 3)

    def greedy(problem: Any) -> Solution:
        """As long as there is little to share it is right; then the first task takes a worker too few."""
        solution = solve(problem)
        if problem.workers < 3:
            return solution
        return dataclasses.replace(solution, workers=(max(0, solution.workers[0] - 1), *solution.workers[1:]))

    monkeypatch.setattr("unicrond.replay.views.verify.solve", greedy)
    with pytest.raises(Divergence) as caught:
        verify(log)
    assert caught.value.seq <= plans[wrong_at].seq
    batch = [entry.seq for entry in log if entry.envelope.based_on == caught.value.based_on]
    assert plans[wrong_at].seq in batch


def test_verify_notes_versions_and_configurations() -> None:
    cluster = MiniCluster(1)
    cluster.add_host("n1")
    cluster.submit("a")
    cluster.run()
    cluster.policy = Policy(worker_mtbf_s=3600.0, strikes_max=4)
    cluster.take_over()
    cluster.run()
    cluster.policy = Policy(worker_mtbf_s=3600.0, strikes_max=4)
    cluster.append(
        v.CoordinatorStarted(term=cluster.state.term + 1, version="0.0.1"), "coordinator", cluster.state.term + 1
    )
    notes = verify(cluster.log).notes
    assert f"version test+schema{SCHEMA} (this is version {code_version()})" in notes[0]
    assert "strikes_max 2.0 -> 4.0" in notes[1] and "worker_mtbf_s 604800.0 -> 3600.0" in notes[1]
    assert "no policy recorded" in notes[2]


def test_verify_uses_policy_of_term() -> None:
    cluster = MiniCluster(1, Policy(strikes_max=1))
    for name in ("n1", "n2"):
        cluster.add_host(name)
    cluster.submit("a")
    cluster.run()
    host = next(host for host in cluster.hosts.values() if host.processes)
    cluster.kill_worker(host, next(iter(host.processes)))
    cluster.run()
    cluster.train("a")  # elsewhere: it follows the node
    cluster.run()
    assert any(isinstance(entry.envelope.event, v.NodeIsolated) for entry in cluster.log)
    verify(cluster.log)
    started = cluster.log[0].envelope.event
    assert isinstance(started, v.CoordinatorStarted)
    other = [changed(cluster.log[0], policy={**started.policy, "strikes_max": 2.0}), *cluster.log[1:]]
    with pytest.raises(Divergence):
        verify(other)


def test_verify_skips_decisions_of_old_term() -> None:
    cluster = troubled(6)
    cluster.take_over()
    cluster.run()
    assert verify(cluster.log).inert == 0
    plan = cluster.log[first(cluster.log, v.PlanAdopted)]
    stale = replace(plan.envelope, boot=10_000, number=1, term=1)
    assert verify([*cluster.log, RecordedEvent(len(cluster.log) + 1, cluster.now_us, stale)]).inert == 1


# --- node losses from heartbeats -----------------------------------------------------------------


def beat(node: str, seq: int, at_us: int, boot: int = 1, number: int = 0, echo: int = 0) -> RecordedEvent:
    said = v.Heartbeat(
        node=node, agent_boot=boot, beat=number or seq, workers=0, load_milli=0, memory_free_bytes=0, echo_beat=echo
    )
    envelope = Envelope(producer=node, boot=boot, number=seq, observed_at_us=at_us, event=said)
    return RecordedEvent(seq, at_us, envelope)


def silent_node(silence_us: int) -> tuple[list[RecordedEvent], list[RecordedEvent]]:
    """Two nodes beat for 10 s, then one is silent for `silence_us` and declared lost: log and beats."""
    cluster = MiniCluster(1)
    cluster.add_host("n1")
    cluster.add_host("n2")
    cluster.run()
    start_us = cluster.now_us
    lost_us = start_us + 10 * SECOND_US + silence_us
    beats: list[RecordedEvent] = []
    for tick in range((lost_us - start_us) // (HEARTBEAT_US // 2) + 4):
        at_us = start_us + tick * HEARTBEAT_US // 2
        for name in ("coordinator", "n1", "n2"):
            if name == "n2" and at_us > start_us + 10 * SECOND_US:
                continue
            beats.append(beat(name, len(beats) + 1, at_us, number=tick + 1))
    last = [each for each in beats if each.envelope.producer == "n2"][-1]
    cluster.now_us = lost_us
    evidence = v.Evidence(beat_seq=last.seq, beat_at_us=last.recorded_at_us)
    cluster.append(v.NodeLost(node="n2", evidence=evidence, reason="silent"), "coordinator", cluster.state.term)
    return cluster.log, beats


def deaf_node(deaf: str, heartbeats: int) -> tuple[list[RecordedEvent], list[RecordedEvent]]:
    """Two nodes beat; after ten heartbeats no beat comes back to `deaf`. After so many more n2 is declared lost."""
    cluster = MiniCluster(1)
    cluster.add_host("n1")
    cluster.add_host("n2")
    cluster.run()
    beats: list[RecordedEvent] = []
    for tick in range(2 * (10 + heartbeats)):
        cluster.now_us += HEARTBEAT_US // 2
        for name in ("coordinator", "n1", "n2") if tick % 2 else ("coordinator",):
            number = tick // 2 + 1 if name != "coordinator" else tick + 1
            echo = 0 if name == "coordinator" else min(number - 1, 10) if name == deaf else number - 1
            beats.append(beat(name, len(beats) + 1, cluster.now_us, number=number, echo=echo))
    last = [each for each in beats if each.envelope.producer == "n2"][-1]
    cluster.now_us += 300_000
    evidence = v.Evidence(beat_seq=last.seq, beat_at_us=last.recorded_at_us)
    lost = v.NodeLost(node="n2", evidence=evidence, reason="heard, and hears nothing")
    cluster.append(lost, "coordinator", cluster.state.term)
    return cluster.log, beats


def test_verify_proves_loss_of_node_that_hears_nothing() -> None:
    findings = verify(*deaf_node("n2", 3))
    assert (findings.node_verdicts, findings.unverifiable) == (1, [])


@pytest.mark.parametrize(("deaf", "heartbeats"), [("n1", 4), ("n2", 2), ("", 4)])
def test_verify_finds_loss_of_node_that_heard(deaf: str, heartbeats: int) -> None:
    with pytest.raises(Divergence) as caught:
        verify(*deaf_node(deaf, heartbeats))
    assert "do not support it: the last one of n2 was beat" in caught.value.decided_again[0]


def test_verify_proves_node_loss_from_beats() -> None:
    findings = verify(*silent_node(2_600_000))
    assert (findings.node_verdicts, findings.unverifiable) == (1, [])


def test_verify_finds_early_node_loss() -> None:
    with pytest.raises(Divergence) as caught:
        verify(*silent_node(1_500_000))
    assert "do not support it: the last one of n2 was beat" in caught.value.decided_again[0]


def test_verify_finds_evidence_of_other_beat() -> None:
    log, beats = silent_node(2_600_000)
    log[-1] = changed(log[-1], evidence=v.Evidence(beat_seq=beats[-1].seq, beat_at_us=5))
    with pytest.raises(Divergence) as caught:
        verify(log, beats)
    assert "another node's" in caught.value.decided_again[0]


def test_verify_judges_reused_beat_number_by_rerun() -> None:
    """A crash of nats-server takes the newest beats back: the last of n2 among them, and its number goes on."""
    log, beats = silent_node(2_600_000)
    last = next(n for n in reversed(range(len(beats))) if beats[n].envelope.producer == "n2")
    anew = [replace(later, seq=later.seq - 1) for later in beats[last + 1 :]]
    evidence = log[-1].envelope.event.evidence
    assert anew[0].seq == evidence.beat_seq and anew[0].recorded_at_us > evidence.beat_at_us
    findings = verify(log, [*beats[:last], *anew])
    assert (findings.node_verdicts, findings.unverifiable) == (1, [])


@pytest.mark.parametrize("kept", ["none", "too few", "too old"])
def test_verify_counts_loss_without_beats_as_unverifiable(kept: str) -> None:
    log, beats = silent_node(2_600_000)
    beats = {"none": [], "too few": beats[-3:], "too old": beats[:4]}[kept]
    findings = verify(log, beats)
    assert findings.node_verdicts == 0
    assert len(findings.unverifiable) == 1 and "n2 lost" in findings.unverifiable[0]


# --- the command ---------------------------------------------------------------------------------


def test_verify_command_prints_comparison(tmp_path: Path) -> None:
    done = unicron_replay("verify", "--log", write_log(tmp_path / "log.bin", list(troubled(2).log)))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "verified: every decision equals today's" in done.stdout
    assert "not verifiable" in done.stdout


def test_verify_command_fails_at_first_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = write_log(tmp_path / "log.bin", list(troubled(2).log))
    nothing = lambda problem: dataclasses.replace(solve(problem), workers=(0,) * len(problem.tasks))  # noqa: E731
    monkeypatch.setattr("unicrond.replay.views.verify.solve", nothing)
    assert main(["verify", "--log", str(log)]) == 1
    page = capsys.readouterr().out
    assert "NOT VERIFIED: entry" in page and "decided again:" in page and "PlanAdopted" in page
    assert main(["verify", "--log", str(log), "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["verified"] is False and said["divergence"]["recorded"] != said["divergence"]["decided_again"]
