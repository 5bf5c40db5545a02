"""A message that somebody known wrote and nobody can read is told to people, wherever they look."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from msgspec.structs import replace

from tests.unicrond.cluster import MiniCluster
from tests.unicrond.serving import Served, healed_cluster, serving
from unicrond.core.fold import fold
from unicrond.core.state.state_bytes import digest
from unicrond.core.state.task_parts import TaskProgress
from unicrond.events import vocabulary as v
from unicrond.events.vocabulary.phrases import to_the_second
from unicrond.events.wire.envelope import Entry, QuarantinedMessage
from unicrond.events.wire.schemas import SCHEMA
from unicrond.service.coordinator.alarms import STANDS_US, Alarms, unsaved_alarms, written_by

NOW_US = 1_700_000_000_000_000


def refused(subject: str, seq: int = 9, at_us: int = NOW_US) -> QuarantinedMessage:
    return QuarantinedMessage(seq, at_us, subject, "$.event.node: unreadable", 100)


def test_alarm_takes_producer_from_subject() -> None:
    assert written_by("unicron.v1.obs.n1.WorkerExited") == ("n1", "WorkerExited")
    assert written_by("unicron.v1.obs.api.TaskSubmitted") == ("api", "TaskSubmitted")
    for subject, kind in (("command.n1.StartWorker", "StartWorker"), ("decision.big.PlanAdopted", "PlanAdopted")):
        assert written_by(f"unicron.v1.{subject}") == ("coordinator", kind)
    assert written_by("unicron.v1.term") == ("coordinator", "CoordinatorStarted")
    for nobody in ("", "unicron.v1.obs.n1", "some.where"):
        assert written_by(nobody) == ("", "")


def test_known_producer_message_raises_alarm_for_an_hour() -> None:
    state = healed_cluster().state
    alarms = Alarms()
    assert not alarms.quarantined(refused("unicron.v1.obs.stranger.NodeJoined"), state)
    assert not alarms.standing(NOW_US)
    line = alarms.quarantined(refused("unicron.v1.obs.n1.WorkerExited"), state)
    assert line.startswith("node n1: ") and "sequence 9 (WorkerExited): $.event.node: unreadable" in line
    alarms.quarantined(refused("unicron.v1.obs.n1.WorkerExited", seq=10, at_us=NOW_US + 5), state)
    alarms.quarantined(refused("unicron.v1.term", seq=11), state)
    assert [alarm.split(":")[0] for alarm in alarms.standing(NOW_US)] == ["the coordinator", "node n1"]
    assert "2 unreadable messages" in alarms.standing(NOW_US)[1]
    assert [alarm.split(":")[0] for alarm in alarms.standing(NOW_US + STANDS_US)] == ["node n1"]
    assert not alarms.standing(NOW_US + STANDS_US + 5)


def test_alarm_names_newer_schema() -> None:
    cluster = MiniCluster(seed=1)
    cluster.add_host("n1")
    cluster.say(cluster.hosts["n1"], replace(cluster.log[-1].envelope.event, version="9+schema9"))
    line = Alarms().quarantined(refused("unicron.v1.obs.n1.DiskSmelt"), cluster.state)
    assert line.endswith(f"its agent is of schema 9, this coordinator reads {SCHEMA}")


def test_failed_save_raises_alarm_until_later_save() -> None:
    cluster = healed_cluster()

    def told() -> list[str]:
        return unsaved_alarms(cluster.state)

    task = next(iter(cluster.state.active))
    worker = task.workers[next(iter(task.member_names))]

    def say(event: type[v.CheckpointSaved] | type[v.SaveFailed], **fields: Any) -> None:
        told_of = {"node": worker.node, "task": task.name, "worker": worker.worker, "iteration": 3}
        cluster.say(cluster.hosts[worker.node], event(**(told_of | fields)))

    assert told() == []
    say(v.SaveFailed, saver="unicron", reason="OSError: no space left")
    say(v.SaveFailed, saver="program", reason="RuntimeError: no")
    say(v.SaveFailed, saver="unicron", reason="from a stranger", worker=f"{task.name}.99999")

    def task_progress() -> TaskProgress:
        return cluster.state.tasks[task.name].progress

    first = task_progress().unsaved_since_us["unicron"]
    cluster.now_us += 90_000_000
    say(v.SaveFailed, saver="unicron", reason="OSError: no space left", iteration=4)
    assert task_progress().unsaved_since_us["unicron"] == first, "since the first of them"
    (line,) = told()  # one alarm of one key
    since = to_the_second(first)
    assert line == (
        f"task {task.name}: its program did not save its checkpoint of iteration 3: RuntimeError: no; "
        f"so since {since}; "
        f"did not save the checkpoint of iteration 4: OSError: no space left; so since {since}; "
        "its directory has none yet"
    )
    say(v.CheckpointSaved, path="/x", size_bytes=1, duration_us=1)
    say(v.SaveFailed, saver="program", reason="")
    assert told() == []


def test_state_holds_no_alarms() -> None:
    state = healed_cluster().state
    known, unknown = (
        fold(state, refused(f"unicron.v1.obs.{name}.X", seq=state.seq + 1, at_us=state.now_us)) for name in ("n1", "x")
    )
    assert digest(known) == digest(unknown)
    assert known.quarantined_messages == state.quarantined_messages + 1


async def write(served: Served, entry: Entry) -> None:
    """As if somebody had published what is no valid event."""
    log = served.log
    log._keep([entry])
    while (await asyncio.wait_for(served.coordinator.folded.get(), 10)).seq < entry.seq:
        pass


async def test_alarm_shows_in_health_page_and_status(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(tmp_path) as served, aiohttp.ClientSession(served.url) as http:
        async with http.get("/healthz") as response:
            assert (await response.json())["alarms"] == []
        seq = await served.log.last_seq() + 1
        with caplog.at_level(logging.ERROR, "unicrond"):
            await write(served, refused("unicron.v1.obs.n1.WorkerExited", seq, time.time_ns() // 1000))
        assert f"ALARM: node n1: an unreadable message at sequence {seq}" in caplog.text
        async with http.get("/healthz") as response:
            told = await response.json()
        assert told["status"] == "live"
        assert len(told["alarms"]) == 1 and told["alarms"][0]["text"].startswith("node n1: ")
        assert told["alarms"][0]["alarm"] == "message-unreadable:n1"
        async with http.get("/metrics") as response:
            assert 'unicron_quarantined_known_total{producer="n1"} 1.0' in await response.text()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "unicrond.ctl.main", "status", "--url", served.url), stdout=asyncio.subprocess.PIPE
        )
        output, _ = await process.communicate()
        assert "ALARM 1      node n1: an unreadable message" in " ".join(output.decode().split("\n"))
