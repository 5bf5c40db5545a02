"""What `unicronctl` answers at 3 a.m.: workers, one thing in full, the past, a part of the log, a report."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import zipfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import aiohttp
import pytest

from tests.replay.logs import troubled
from tests.unicrond.serving import Served, healed_cluster, serving
from unicrond.core.faults.severity import kind_of
from unicrond.core.replayer import replay
from unicrond.core.state.state_bytes import to_json
from unicrond.ctl import past_state as past
from unicrond.ctl.client import Client
from unicrond.ctl.main import main
from unicrond.display.cluster_tables import derived_values
from unicrond.events.log.point import AtSeq, AtTime, BeforeEnd
from unicrond.events.vocabulary import NodeLost, TaskCancelled, TaskSubmitted
from unicrond.events.wire.envelope import Entry, RecordedEvent
from unicrond.events.wire.selection import Selection
from unicrond.replay.reading.export import Export

TOKEN = "hf_" + "a1B2" * 8


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    """`unicron-replay` turns it off for its short life."""
    yield
    gc.enable()


Ctl = Callable[..., "asyncio.Future[Outcome]"]


@pytest.fixture(scope="module")
def story() -> list[RecordedEvent]:
    """Of four nodes, two tasks and a worker's death; `big` has a secret, one node is lost."""
    cluster = healed_cluster()
    cluster.kill_host(cluster.hosts["n4"])
    cluster.lose(cluster.hosts["n4"])
    cluster.run()
    for task in ("big", "small"):
        cluster.train(task, 3)
    cluster.run()
    return cluster.log


@pytest.fixture
async def served(tmp_path: Path, story: list[RecordedEvent]) -> AsyncIterator[Served]:
    async with serving(tmp_path, story) as served:
        yield served


@pytest.fixture
def ctl(served: Served, capsys: pytest.CaptureFixture[str]) -> Ctl:
    async def run(*arguments: object) -> Outcome:
        capsys.readouterr()
        code = await asyncio.to_thread(main, [*map(str, arguments), "--url", served.url])
        return Outcome(code, *capsys.readouterr())

    return run  # type: ignore[return-value]


async def entries_in(served: Served) -> list[Entry]:
    last = await served.log.last_seq()
    return [entry async for entry in served.log.read(0, until_seq=last)]


# --- the present ---------------------------------------------------------------------------------


async def test_workers_command_shows_rank_node_and_process(ctl: Ctl, served: Served) -> None:
    outcome = await ctl("workers")
    rows = {line.split()[0]: line.split() for line in outcome.out.splitlines()[1:]}
    known = served.coordinator.state.tasks
    assert outcome.code == 0 and set(rows) == {worker for task in known.values() for worker in task.workers}
    for task in known.values():
        assert task.membership is not None
        for rank, member in enumerate(task.membership.members):
            assert rows[member.worker][1:4] == [str(rank), member.node, str(task.workers[member.worker].pid)]
            assert task.workers[member.worker].pid
    data = json.loads((await ctl("workers", "big", "--json")).out)
    assert {one["worker"] for one in data} == set(known["big"].workers) and all(one["pid"] for one in data)
    assert (await ctl("workers", "nothing")).code == 1


async def test_describe_command_shows_task_node_and_incident(ctl: Ctl, served: Served) -> None:
    state = served.coordinator.state
    task, node = await ctl("describe", "task", "big"), await ctl("describe", "node", "n4")
    incident = await ctl("describe", "incident", state.closed_incidents[0].id)
    assert [task.code, node.code, incident.code] == [0, 0, 0], (task, node, incident)
    assert "iteration" in task.out and state.closed_incidents[0].id in task.out and "last events" in task.out
    assert all(worker in task.out for worker in state.tasks["big"].workers)
    assert "lost" in node.out and "last events" in node.out and "node n4 joined" in node.out
    assert (
        state.closed_incidents[0].message in incident.out
        and f"unicronctl story incident {state.closed_incidents[0].id}" in incident.out
    )
    data = json.loads((await ctl("describe", "task", "big", "--json")).out)
    assert data["task"]["iteration"] == state.tasks["big"].progress.iteration and len(data["workers"]) >= 1
    refused = await ctl("describe", "node", "n9")
    assert refused == Outcome(1, "", "unicronctl: no node n9; known: n1, n2, n3, n4\n")


async def test_doctor_reports_lost_node(ctl: Ctl) -> None:
    outcome = await ctl("doctor", "--quick", "--json")
    found = {one["about"]: one["problem"] for one in json.loads(outcome.out)}
    assert outcome.code == 1 and "is lost" in found["n4"] and "--quick" in outcome.err
    assert "its clock is behind" in found["n1"], "the story is of another year"
    whole = await ctl("doctor")
    assert "unicronctl story node n4" in whole.out and "does not answer: no answer within 10 s" in whole.out


async def test_top_prints_once_without_terminal(ctl: Ctl, served: Served) -> None:
    outcome = await ctl("top")
    assert outcome.code == 0 and outcome.out.startswith("tasks\n") and "\nworkers\n" in outcome.out
    worker = next(iter(served.coordinator.state.tasks["big"].workers.values()))
    assert str(worker.pid) in outcome.out


async def test_stacks_command_shows_all_ranks(ctl: Ctl) -> None:
    outcome = await ctl("stacks", "big")
    assert outcome.code == 0
    assert "--- rank 1, worker big.2 on n1, process 4711\nThread of rank 1" in outcome.out
    recorder, ranks = outcome.out.split("ranks side by side")
    assert "gloo 3" in recorder and "all_reduce" in recorder and "2.5 s" in recorder and "scheduled" in recorder
    assert ranks.count("all_reduce Float[4096]") == 2
    alone = await ctl("stacks", "big", "--rank", 7)
    assert alone.code == 1 and "pip install 'unicrond[stacks]'" in alone.err


async def test_logs_command_reads_log_of_exited_worker(ctl: Ctl, served: Served) -> None:
    (served.files.directory / "big.1").write_text("Traceback: here it is\n")
    assert (await ctl("logs", "big", "--worker", "big.1")).out == "Traceback: here it is\n"
    assert (await ctl("logs", "big", "--worker", "big.1", "--rank", "0")).code == 2


# --- waiting -------------------------------------------------------------------------------------


async def test_wait_command_tells_outcome_by_exit_code(ctl: Ctl, served: Served) -> None:
    assert (await ctl("wait", "small", "--for", "training", "--timeout-s", 5)).code == 0
    assert (await ctl("wait", "big", "--timeout-s", "0")) == Outcome(
        3, "", "unicronctl: task big is active, not completed after 0 s\n"
    )
    await ctl("cancel", "big", "--reason", "enough")
    await served.until(TaskCancelled)
    assert (await ctl("wait", "big", "--for", "cancelled")) == Outcome(0, "task big: cancelled\n", "")
    assert (await ctl("wait", "big", "--for", "ended")).code == 0
    otherwise = await ctl("wait", "big")
    assert otherwise.code == 1 and "task big is cancelled (enough" in otherwise.err
    assert (await ctl("wait", "--all", "--timeout-s", "0")).code == 1
    assert (await ctl("wait", "nothing")).code == 1
    assert (await ctl("wait")).code == 2


# --- the past ------------------------------------------------------------------------------------


async def test_views_answer_for_past_entries(ctl: Ctl, served: Served) -> None:
    entries = await entries_in(served)
    begun = next(entry.seq for entry in entries if isinstance(entry, RecordedEvent) and kind_of(entry.envelope.event))
    state = replay(entries, AtSeq(begun - 1))
    for view in ("nodes", "tasks"):
        told = json.loads((await ctl(view, "--json", "--at", begun - 1)).out)
        assert [row["name"] for row in told] == list(to_json(state)[view])
    then = json.loads((await ctl("status", "--json", "--at", begun - 1)).out)
    assert then["state"] == json.loads(json.dumps(to_json(state)))
    assert then["derived"] == derived_values(state, state.now_us)["derived"]
    for words in (["status"], ["nodes"], ["tasks"], ["workers"], ["plan", "show"], ["describe", "task", "big"]):
        outcome = await ctl(*words, "--at", begun - 1)
        assert outcome.code == 0 and outcome.out != (await ctl(*words)).out, words
    assert "digest" not in (await ctl("status", "--at", begun - 1)).out
    late = await ctl("nodes", "--at", len(entries) + 1000)
    assert late.code == 2 and "is not in the log, which ends at entry" in late.err


async def test_past_finds_entry_by_bisection(served: Served) -> None:
    client, entries = Client(served.url), await entries_in(served)
    for wanted in (entries[0], entries[7], entries[-1]):
        at = AtTime(wanted.recorded_at_us)
        covered = max(entry.seq for entry in entries if at.covers(entry))
        assert await asyncio.to_thread(past.seq_at, client, at, len(entries)) == covered
    assert await asyncio.to_thread(past.seq_at, client, AtTime(0), len(entries)) == 0
    assert await asyncio.to_thread(past.seq_at, client, BeforeEnd(0), len(entries)) == len(entries)
    assert await asyncio.to_thread(past.seq_at, client, AtSeq(10**9), len(entries)) == len(entries)


async def test_closed_event_stream_leaves_no_error(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    client = Client(served.url)
    for _ in range(3):
        following = client.events(0, follow=True)
        await asyncio.to_thread(next, following)
        await asyncio.to_thread(following.close)  # type: ignore[attr-defined]
    for name in ("n1", "n2", "n3"):
        await asyncio.to_thread(client.cordon, name, drain=False, reason="")
        await asyncio.sleep(0.05)
    assert not [record for record in caplog.records if record.levelname == "ERROR"], caplog.text


# --- a part of the log ---------------------------------------------------------------------------


def numbers(outcome: Outcome) -> list[int]:
    assert outcome.code == 0, outcome
    return [int(line.split()[0]) for line in outcome.out.splitlines()]


async def test_events_command_selects_part_of_log(ctl: Ctl, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(past, "_PIECE", 3)  # looked for in several pieces
    entries = [entry for entry in await entries_in(served) if isinstance(entry, RecordedEvent)]
    of_big = [entry.seq for entry in entries if Selection(task="big").takes(entry)]
    lost = [entry.seq for entry in entries if isinstance(entry.envelope.event, NodeLost)]
    assert len(lost) == 1 and len(of_big) > 20
    assert numbers(await ctl("events", "-n", 5)) == [entry.seq for entry in entries[-5:]]
    assert numbers(await ctl("events", "--task", "big")) == of_big
    assert numbers(await ctl("events", "--task", "big", "-n", 7)) == of_big[-7:]
    assert numbers(await ctl("events", "--since", 10, "--until", 15)) == [11, 12, 13, 14, 15]
    assert numbers(await ctl("events", "--severity", "SEV1")) == lost
    assert numbers(await ctl("events", "--kind", "node_lost", "--node", "n4")) == lost
    assert numbers(await ctl("events", "--kind", "node_lost", "--node", "n1")) == []
    kinds = [entry.seq for entry in entries if kind_of(entry.envelope.event) == "process_exit"]
    assert kinds and numbers(await ctl("events", "--severity", "SEV2", "--severity", "SEV1")) == sorted(kinds + lost)
    assert (await ctl("events", "--kind", "node_lots")).code == 2
    assert (await ctl("events", "--type", "NodeLots")).err.startswith("unicronctl: --type: no event type")


async def test_story_and_verify_match_exported_log(
    ctl: Ctl, served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from unicrond.replay.cli import main as replayed

    with Export(tmp_path / "log") as export:
        export.write(await entries_in(served))

    async def of_file(*arguments: str) -> str:
        capsys.readouterr()
        await asyncio.to_thread(replayed, [*arguments, "--log", str(tmp_path / "log")])
        return capsys.readouterr().out

    incident = served.coordinator.state.closed_incidents[0].id
    for subject in (("incident", incident), ("task", "big"), ("node", "n4")):
        told = await ctl("story", *subject)
        assert told.code == 0 and told.out == await of_file("story", *subject) != ""
    assert (await ctl("story", "task", "big", "--until", 12)).out != (await ctl("story", "task", "big")).out
    assert (await ctl("story", "nothing")).code == 2 and (await ctl("story", "node", "nothing")).code == 2
    by_api, by_file = json.loads((await ctl("verify", "--json")).out), json.loads(await of_file("verify", "--json"))
    assert by_api == by_file


async def test_incidents_command_groups_by_cause_and_story_tells_of_the_last_hours(ctl: Ctl, served: Served) -> None:
    rows = json.loads((await ctl("incidents", "--json")).out)
    assert [row["cause"] for row in rows] == ["hardware", "unknown"] and rows[0]["kind"] == "node_lost"
    assert sum(row["count"] for row in rows) == served.coordinator.state.incidents_total
    table = (await ctl("incidents")).out.splitlines()
    assert table[1].startswith("hardware") and "node_lost" in table[1] and len(table) == 1 + len(rows)
    last_hours, page = [(await ctl("story", "--since", since)).out for since in ("8h", "2001-01-01T00:00:00Z")]
    assert last_hours.startswith("The cluster from ") and "node n4 lost" in last_hours
    assert page.index("hardware") < page.index("unknown") < page.index("Tasks: ")
    async with aiohttp.ClientSession() as session, session.get(f"{served.url}/v1/story?since_us=0") as answer:
        lines = (await answer.json())["lines"]
    assert lines[1:] == page.splitlines()[1:], "the web page shows the same"


def test_verify_stops_at_any_entry(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from unicrond.replay.cli import main as replayed

    log = troubled(3, faults=4).log
    with Export(tmp_path / "log") as export:
        export.write(list(log))
    for seq in range(1, 30):
        assert replayed(["verify", "--log", str(tmp_path / "log"), "--until", str(seq)]) == 0, capsys.readouterr().out


# --- a report ------------------------------------------------------------------------------------


async def test_report_opens_in_replay_without_secrets(
    ctl: Ctl, served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from unicrond.replay.cli import main as replayed

    task = tmp_path / "secret.yaml"
    task.write_text(f"name: secret\niterations: 10\nenv:\n  HF_TOKEN: {TOKEN}\n")
    assert (await ctl("submit", task)).code == 0
    await served.until(TaskSubmitted, len(healed_cluster().log))
    (tmp_path / "big.1").write_text("the last words\n")
    out = tmp_path / "report.zip"
    outcome = await ctl("debug", "--out", out)
    assert outcome.code == 0 and f"unicron-replay state --log {out}" in outcome.out, outcome
    assert out.stat().st_mode & 0o777 == 0o600
    with zipfile.ZipFile(out) as bundle:
        members = {name: bundle.read(name) for name in bundle.namelist()}
    assert {
        "events.log",
        "state.json",
        "health.json",
        "metrics.txt",
        "versions.json",
        "README.txt",
    } <= set(members)
    assert not [name for name, content in members.items() if TOKEN.encode() in content]
    capsys.readouterr()
    assert await asyncio.to_thread(replayed, ["state", "--log", str(out), "--json"]) == 0
    state = json.loads(capsys.readouterr().out)["state"]
    assert "secret" in state["tasks"] and state["seq"] >= await served.log.last_seq() - 5
    with os.scandir(tmp_path) as left:
        assert not [one.name for one in left if one.name.startswith(".report")]
