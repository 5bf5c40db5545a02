"""What an archive keeps of the heartbeats proves a node's loss as well as all of them."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing, suppress
from pathlib import Path

import pytest

from tests.replay.command import unicron_replay
from tests.replay.test_verify import HEARTBEAT_US, beat, changed, verify
from tests.unicrond.cluster import SECOND_US, MiniCluster
from unicrond.core.nodes.liveness import MOST_SILENT_FACTOR, RECONNECT_US, Liveness
from unicrond.core.state.policy import Policy
from unicrond.events import vocabulary as v
from unicrond.events.archive.archive import archive
from unicrond.events.log.heartbeat_evidence import NodeVerdicts, evidence, merge_beats, spans, window_us
from unicrond.events.log.subjects import BEAT_STREAM
from unicrond.events.nats.connection import Connection
from unicrond.events.nats.event_log import NatsBeatLog, NatsEventLog
from unicrond.events.nats.server import EmbeddedServer
from unicrond.events.nats.streams import api
from unicrond.events.wire.codec import COORDINATOR
from unicrond.events.wire.envelope import Entry, Envelope, RecordedEvent
from unicrond.replay.views.beat_check import GAP_US, SLACK_US
from unicrond.replay.views.verify import Divergence
from unicrond.service.coordinator.coordinator import Coordinator
from unicrond.service.coordinator.surroundings import HeadSettings

NODES = ("n1", "n2", "n3", "n4", "n5")


class Told:
    """A log and all beats that were ever said; the coordinator's four times as often as the nodes'."""

    def __init__(self) -> None:
        self.cluster = MiniCluster(1)
        for name in NODES:
            self.cluster.add_host(name)
        self.cluster.run()
        self.beats: list[RecordedEvent] = []
        self._ticks = 0

    def run(self, seconds: float, *silent: str) -> None:
        end_us = self.cluster.now_us + int(seconds * SECOND_US)
        while self.cluster.now_us < end_us:
            self._ticks += 1
            self._say(COORDINATOR, self._ticks)
            if self._ticks % 4 == 0:
                for name in NODES:
                    if name not in silent:
                        self._say(name, self._ticks // 4)
            self.cluster.now_us += HEARTBEAT_US // 4

    def _say(self, name: str, number: int) -> None:
        boot = self.cluster.state.term if name == COORDINATOR else 1
        self.beats.append(beat(name, len(self.beats) + 1, self.cluster.now_us, boot=boot, number=number))

    def lose(self, *names: str) -> None:
        for name in names:
            last = [each for each in self.beats if each.envelope.producer == name][-1]
            named = v.Evidence(beat_seq=last.seq, beat_at_us=last.recorded_at_us)
            lost = v.NodeLost(node=name, evidence=named, reason="silent")
            self.cluster.append(lost, COORDINATOR, self.cluster.state.term)
        self.cluster.run()

    @property
    def log(self) -> list[Entry]:
        return list(self.cluster.log)


def kept(log: list[Entry], beats: list[RecordedEvent]) -> list[RecordedEvent]:
    """What archives keep that look at five entries each."""
    verdicts, found = NodeVerdicts(HEARTBEAT_US), []
    for begin in range(0, len(log), 5):
        some = verdicts.among(log[begin : begin + 5])
        said = [beat for low, high in spans(some) for beat in beats if low <= beat.recorded_at_us <= high]
        found += evidence(some, said)
    return merge_beats(found)


def test_beat_window_covers_longest_patience() -> None:
    for heartbeat_us in (50_000, SECOND_US, 60 * SECOND_US):
        patience_us = MOST_SILENT_FACTOR * Liveness(heartbeat_us, 0).limit_us + RECONNECT_US + SLACK_US
        assert window_us(heartbeat_us) >= patience_us + heartbeat_us // 4
        assert heartbeat_us // 4 < GAP_US


def test_archived_beats_prove_distant_losses() -> None:
    told = Told()
    told.run(60)
    told.run(2.75, "n2")
    told.lose("n2")
    told.run(5 * 60, "n2")
    told.run(9, "n2", "n3", "n4", "n5")  # most of them: three times as long
    told.lose("n3", "n4", "n5")
    told.run(60, "n2", "n3", "n4", "n5")
    sparse = kept(told.log, told.beats)
    assert len(sparse) < len(told.beats) / 5
    for beats in (told.beats, sparse):
        findings = verify(told.log, beats)
        assert (findings.node_verdicts, findings.unverifiable) == (4, [])


def test_days_without_beats_need_no_evidence() -> None:
    told = Told()
    told.run(20)
    told.run(3, "n2")
    told.lose("n2")
    told.cluster.now_us += 30 * 24 * 3600 * SECOND_US
    told.run(20, "n2")
    told.run(3, "n2", "n3")
    told.lose("n3")
    findings = verify(told.log, kept(told.log, told.beats))
    assert (findings.node_verdicts, findings.unverifiable) == (2, [])


@pytest.mark.parametrize("silent_s", [1.0, 2.0])
def test_archived_beats_disprove_early_loss(silent_s: float) -> None:
    told = Told()
    told.run(30)
    told.run(silent_s, "n2")
    told.lose("n2")
    with pytest.raises(Divergence) as caught:
        verify(told.log, kept(told.log, told.beats))
    assert "do not support it: the last one of n2 was beat" in caught.value.decided_again[0]


def test_archived_beats_disprove_early_loss_in_mass_silence() -> None:
    told = Told()
    told.run(30)
    told.run(3, "n2", "n3", "n4")
    told.lose("n2")
    with pytest.raises(Divergence):
        verify(told.log, kept(told.log, told.beats))


def test_archived_beats_disprove_false_evidence() -> None:
    told = Told()
    told.run(30)
    told.run(3, "n2")
    told.lose("n2")
    log = told.log
    place = next(
        n for n, e in enumerate(log) if isinstance(e, RecordedEvent) and isinstance(e.envelope.event, v.NodeLost)
    )
    entry = log[place]
    assert isinstance(entry, RecordedEvent) and isinstance(entry.envelope.event, v.NodeLost)
    named = entry.envelope.event.evidence
    other = next(b for b in told.beats if b.seq == named.beat_seq - 1)
    log[place] = changed(entry, evidence=v.Evidence(beat_seq=other.seq, beat_at_us=other.recorded_at_us))
    with pytest.raises(Divergence) as caught:
        verify(log, kept(log, told.beats))
    assert "another node's" in caught.value.decided_again[0]


def test_expired_beats_leave_loss_unverifiable() -> None:
    told = Told()
    told.run(30)
    told.run(3, "n2")
    told.lose("n2")
    told.run(120, "n2")
    told.run(3, "n2", "n3")
    told.lose("n3")
    late = [beat for beat in told.beats if beat.recorded_at_us > told.cluster.now_us - 30 * SECOND_US]
    findings = verify(told.log, kept(told.log, late))
    assert findings.node_verdicts == 1
    assert len(findings.unverifiable) == 1 and "n2 lost" in findings.unverifiable[0]


# --- with a server -------------------------------------------------------------------------------


async def _beat(log: NatsBeatLog, node: str, until: asyncio.Event) -> None:
    number = 0
    while not until.is_set():
        number += 1
        said = v.Heartbeat(node=node, agent_boot=1, beat=number, workers=0, load_milli=0, memory_free_bytes=0)
        await log.publish(Envelope(producer=node, boot=1, number=number, observed_at_us=number, event=said))
        with suppress(TimeoutError):
            await asyncio.wait_for(until.wait(), 0.3)


async def test_verify_proves_loss_after_beats_expired(
    nats_server: EmbeddedServer, nats_connection: Connection, tmp_path: Path
) -> None:
    log, beats = NatsEventLog(nats_connection), NatsBeatLog(nats_connection)
    coordinator = Coordinator(log, beats, HeadSettings(policy=Policy(), heartbeat_s=0.3))
    ends = {node: asyncio.Event() for node in ("n1", "n2")}
    running = asyncio.create_task(coordinator.run())
    beating = [asyncio.create_task(_beat(beats, node, end)) for node, end in ends.items()]
    store = v.StoreAddress(host="127.0.0.1", port=1)
    try:
        await asyncio.wait_for(coordinator.live.wait(), 10)
        for node in ends:
            event = v.NodeJoined(node=node, address="127.0.0.1", slots=1, store=store, agent_boot=1, version="test")
            await log.append([Envelope(producer=node, boot=1, number=1, observed_at_us=1, event=event)])
        await asyncio.sleep(3.0)  # two for the grace of a start
        ends["n2"].set()
        async with asyncio.timeout(20), aclosing(log.read()) as entries:
            async for entry in entries:
                if isinstance(entry, RecordedEvent) and isinstance(entry.envelope.event, v.NodeLost):
                    break
        held = await archive(nats_connection, tmp_path)
        assert held.beats > 0
        assert (await archive(nats_connection, tmp_path)).beats == 0
    finally:
        ends["n1"].set()
        running.cancel()
        await asyncio.gather(running, *beating, return_exceptions=True)
    await api(nats_connection, f"STREAM.DELETE.{BEAT_STREAM}", {})
    for where in (("--nats", nats_server.url, "--archive", tmp_path), ("--log", tmp_path)):
        done = await asyncio.to_thread(unicron_replay, "verify", "--json", *where)
        found = json.loads(done.stdout)
        assert found["verified"] and found["node_verdicts"] >= 1 and not found["unverifiable"], done.stdout
    done = await asyncio.to_thread(unicron_replay, "verify", "--json", "--nats", nats_server.url)
    assert json.loads(done.stdout)["node_verdicts"] == 0
