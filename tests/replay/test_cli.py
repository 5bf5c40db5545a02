"""`unicron-replay` as people run it."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import stat
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from tests.replay.command import ROOT, unicron_replay
from tests.replay.logs import eventful, fill, troubled, write_log
from unicrond.core.replayer import replay
from unicrond.core.state.state_bytes import digest, to_json
from unicrond.events.log.point import AtSeq
from unicrond.events.nats.connection import Login, connect
from unicrond.events.nats.event_log import NatsEventLog
from unicrond.events.nats.server import EmbeddedServer
from unicrond.events.nats.streams import create_streams
from unicrond.events.vocabulary import Fault, InjectionRequested
from unicrond.events.wire.envelope import Entry
from unicrond.replay.reading.progress import with_bar
from unicrond.replay.reading.source import FileSource


@pytest.fixture(scope="module")
def entries() -> list[Entry]:
    return eventful(11)


@pytest.fixture(scope="module")
def log(entries: list[Entry], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_log(tmp_path_factory.mktemp("log") / "log.bin", entries)


# --- the same digest everywhere ----------------------------------------------------------------


@pytest.mark.parametrize("hash_seed", ["0", "1", "random"])
def test_digest_is_independent_of_process_and_hash_seed(log: Path, entries: list[Entry], hash_seed: str) -> None:
    done = unicron_replay("digest", "--log", log, "--json", hash_seed=hash_seed)
    live = replay(entries)
    expected = {"digest": digest(live), "seq": live.seq, "now_us": live.now_us, "term": live.term}
    assert json.loads(done.stdout) == expected
    assert (done.returncode, done.stderr) == (0, "")


def test_log_is_independent_of_hash_seed_of_writer(tmp_path: Path, log: Path) -> None:
    exported = tmp_path / "again.bin"
    done = unicron_replay("export", exported, "--log", log, hash_seed="1")
    assert done.returncode == 0, done.stderr
    first = unicron_replay("digest", "--log", log, hash_seed="0").stdout
    assert unicron_replay("digest", "--log", exported, hash_seed="random").stdout == first


def test_digest_command_prints_digest_and_entry(log: Path, entries: list[Entry]) -> None:
    done = unicron_replay("digest", "--log", log, "--at", "100")
    assert done.stdout == f"{digest(replay(entries, AtSeq(100)))}  at entry 100\n"


def test_digest_agrees_over_nats_directory_and_export(tmp_path: Path) -> None:
    async def record() -> tuple[EmbeddedServer, str]:
        server = EmbeddedServer(tmp_path / "nats", login=Login(user="head", password="secret"))
        await server.start()
        connection = await connect(server.url, name="test", login=Login(user="head", password="secret"), timeout_s=10)
        await create_streams(connection)
        log = NatsEventLog(connection)
        await fill(log, troubled(12).log)
        entries = [entry async for entry in log.read(until_seq=await log.last_seq())]
        await connection.close()
        return server, digest(replay(entries))

    (tmp_path / "password").write_text("secret\n")
    server, live = asyncio.run(record())
    try:
        login = ("--user", "head", "--password-file", tmp_path / "password", "--json")
        of_nats = unicron_replay("digest", "--nats", server.url, *login)
        of_state_dir = unicron_replay("digest", "--state-dir", tmp_path, *login)
        exported = unicron_replay("export", tmp_path / "log.bin", "--nats", server.url, *login)
        assert exported.returncode == 0, exported.stderr
        of_export = unicron_replay("digest", "--log", tmp_path / "log.bin", "--json")
        for done in (of_nats, of_state_dir, of_export):
            assert done.returncode == 0, done.stderr
            assert json.loads(done.stdout)["digest"] == live
    finally:
        asyncio.run(server.kill())


# --- state --------------------------------------------------------------------------------------


@pytest.mark.parametrize("seq", [0, 1, 77, 150])
def test_state_command_at_number_matches_prefix_fold(log: Path, entries: list[Entry], seq: int) -> None:
    done = unicron_replay("state", "--log", log, "--at", seq, "--json")
    state = replay(entries[:seq])
    expected = {"digest": digest(state), "state": to_json(state)}
    assert json.loads(done.stdout) == json.loads(msgspec.json.encode(expected))


def test_state_command_accepts_time_and_span(log: Path, entries: list[Entry]) -> None:
    by_time = unicron_replay("digest", "--log", log, "--at", "2001-09-09T01:46:40.100Z", "--json")
    by_span = unicron_replay("digest", "--log", log, "--at", "-50ms", "--json")
    last_us = entries[-1].recorded_at_us
    assert json.loads(by_time.stdout)["seq"] == 100
    assert json.loads(by_span.stdout)["seq"] == max(e.seq for e in entries[:-3] if e.recorded_at_us <= last_us - 50_000)


def test_state_command_shows_page(log: Path) -> None:
    page = unicron_replay("state", "--log", log).stdout
    for said in ("nodes", "tasks", "plan ", "incidents (0 open)", "completed", "left", "1 quarantined", "SEV3"):
        assert said in page
    assert "no plan yet" in unicron_replay("state", "--log", log, "--at", "0").stdout


# --- events -------------------------------------------------------------------------------------


def test_events_command_prints_one_printable_line_each(log: Path, entries: list[Entry]) -> None:
    lines = unicron_replay("events", "--log", log).stdout.splitlines()
    assert [int(line.split()[1]) for line in lines] == [entry.seq for entry in entries]
    assert all(line.isprintable() for line in lines)
    assert lines[0].startswith("2001-09-09T01:46:40.001000Z       1 coordinator started term 1")


def test_events_command_prints_json_object_per_line(log: Path, entries: list[Entry]) -> None:
    objects = [json.loads(line) for line in unicron_replay("events", "--log", log, "--json").stdout.splitlines()]
    assert [each["seq"] for each in objects] == [entry.seq for entry in entries]
    assert objects[0]["envelope"]["event"]["type"] == "CoordinatorStarted"
    assert [each["quarantined"] for each in objects if "quarantined" in each] == ["$.event: unknown tag"]


def events(log: Path, *arguments: object) -> list[dict[str, object]]:
    done = unicron_replay("events", "--log", log, "--json", *arguments)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def types(objects: list[dict[str, object]]) -> set[str]:
    return {each["envelope"]["event"]["type"] for each in objects}  # type: ignore[index]


def test_events_command_selects_by_type_node_task_and_range(log: Path, entries: list[Entry]) -> None:
    assert types(events(log, "--type", "PlanAdopted", "--type", "NodeLeft")) == {"PlanAdopted", "NodeLeft"}
    assert [each["seq"] for each in events(log, "--type", "QuarantinedMessage")] == [len(entries) - 1]
    assert [each["seq"] for each in events(log, "--since", "10", "--until", "13")] == [11, 12, 13]
    of_node = events(log, "--node", "n2")
    assert types(of_node) >= {"NodeJoined", "PlanAdopted", "MembershipDecided", "NodeLeft"}
    assert all("n2" in json.dumps(each) for each in of_node)
    of_task = events(log, "--task", "tiny")
    assert types(of_task) == {"TaskSubmitted", "TaskCancelled"}
    assert types(events(log, "--task", "small")) >= {"TaskSubmitted", "StartWorker", "PlanAdopted", "StepCommitted"}


def test_events_command_reports_empty_selection(log: Path) -> None:
    done = unicron_replay("events", "--log", log, "--node", "nobody")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "unicron-replay: no events match\n")


# --- export -------------------------------------------------------------------------------------


def test_export_is_private_complete_and_never_overwrites(log: Path, entries: list[Entry], tmp_path: Path) -> None:
    path = tmp_path / "part.bin"
    done = unicron_replay("export", path, "--log", log, "--until", "100")
    assert done.stdout == f"{path}: entries 1 to 100\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert json.loads(unicron_replay("digest", "--log", path, "--json").stdout)["seq"] == 100

    refused = unicron_replay("export", path, "--log", log)
    assert refused.returncode == 2
    assert "exists; name another one, or give --force" in refused.stderr
    assert json.loads(unicron_replay("digest", "--log", path, "--json").stdout)["seq"] == 100

    assert unicron_replay("export", path, "--log", log, "--force").returncode == 0
    assert json.loads(unicron_replay("digest", "--log", path, "--json").stdout)["seq"] == len(entries)
    assert [each.name for each in tmp_path.iterdir()] == ["part.bin"]


def test_export_beyond_end_leaves_nothing(log: Path, tmp_path: Path) -> None:
    assert unicron_replay("export", tmp_path / "x.bin", "--log", log, "--until", "100000").returncode == 2
    assert not list(tmp_path.iterdir())


# --- errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ("", 2, "COMMAND"),
        ("digest", 2, "one of the arguments --log --nats --state-dir --url is required"),
        ("digest --log LOG --nats nats://h:1", 2, "not allowed with"),
        ("digest --log LOG --at yesterday", 2, "--at: 'yesterday' is not a point of a log; give a sequence number"),
        ("digest --log LOG --at 2026-11-20T09:30:00", 2, "append Z"),
        ("digest --log LOG --at 100000", 2, "--at: entry 100000 is not in the log, which ends at entry"),
        ("events --log LOG --type NodLost", 2, "--type: no event type 'NodLost'; did you mean NodeLost?"),
        ("events --log LOG --node a/b", 2, "--node: 'a/b' is not a valid name"),
        ("digest --nats localhost:4222", 2, "write nats://HOST:PORT"),
        ("digest --nats nats://h:99999", 2, "bad port"),
        ("digest --nats nats://h:1 --creds /missing", 2, "--creds: '/missing' is not a file"),
        ("digest --log /missing", 2, "--log: /missing cannot be read: No such file"),
        ("export /missing/x --log LOG", 2, "FILE: /missing is not a directory"),
        ("digest --log README", 1, "not an event log"),
        ("digest --state-dir /missing", 1, "/missing: holds no log; give the state_dir"),
    ],
)
def test_error_is_one_line_with_fix(log: Path, tmp_path: Path, arguments: str, code: int, said: str) -> None:
    readme = tmp_path / "readme"
    readme.write_text("no log at all")
    words = [{"LOG": str(log), "README": str(readme)}.get(word, word) for word in arguments.split()]
    done = unicron_replay(*words)
    assert (done.returncode, done.stdout) == (code, "")
    assert said in done.stderr
    assert done.stderr.startswith("unicron-replay: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("command", ["", "state", "digest", "export", "events"])
def test_help_has_examples(command: str) -> None:
    done = unicron_replay(*command.split(), "--help")
    assert done.returncode == 0
    assert f"  unicron-replay {command}" in done.stdout.partition("examples:\n")[2]


def test_closed_pipe_is_no_error(log: Path) -> None:
    async def run() -> tuple[int | None, bytes]:
        reading, writing = os.pipe()
        os.close(reading)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "unicrond.replay.cli", "events", "--log", str(log),
            stdout=writing, stderr=asyncio.subprocess.PIPE, cwd=ROOT,
        )  # fmt: skip
        os.close(writing)
        _, said = await process.communicate()
        return process.returncode, said

    assert asyncio.run(run()) == (0, b"")


async def test_interrupt_ends_replay_silently() -> None:
    reached = asyncio.Event()

    async def silent_server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer):  # though the test has ended meanwhile
            reached.set()
            await reader.read()

    server = await asyncio.start_server(silent_server, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "unicrond.replay.cli", "digest", "--nats", f"nats://127.0.0.1:{port}",
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, cwd=ROOT,
        )  # fmt: skip
        await reached.wait()
        process.send_signal(signal.SIGINT)
        out, said = await process.communicate()
    assert (process.returncode, out, said) == (130, b"", b"")


# --- progress -----------------------------------------------------------------------------------


async def test_progress_bar_shows_on_terminal(log: Path, entries: list[Entry]) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100)
    shown = with_bar(FileSource(log).chunks(), "replaying", console=console, show_after_s=0)
    assert len([entry async for chunk in shown for entry in chunk.entries]) == len(entries)
    assert "replaying" in screen.getvalue()
    assert "100%" in screen.getvalue()
    assert f"{len(entries)} events" in screen.getvalue()


async def test_progress_bar_is_hidden_without_terminal(log: Path) -> None:
    screen = io.StringIO()
    console = Console(file=screen)
    async for _ in with_bar(FileSource(log).chunks(), "replaying", console=console, show_after_s=0):
        pass
    assert screen.getvalue() == ""


def test_file_commands_import_no_nats_client() -> None:
    code = "import sys, unicrond.replay.cli; sys.exit('nats' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0


# --- where it is written to ----------------------------------------------------------------------


def test_export_never_replaces_device(log: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    done = unicron_replay("export", tmp_path / "pipe", "--log", log, "--force")
    assert done.returncode == 2 and "is not a regular file" in done.stderr
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_closed_pipe_of_simulation_is_no_error() -> None:
    command = [sys.executable, "-m", "unicrond.replay.cli", "simulate", "--list-assumptions"]
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, cwd=ROOT, timeout=60)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


def test_point_before_log_means_its_beginning(log: Path) -> None:
    done = unicron_replay("digest", "--log", log, "--at", "1960-01-01T00:00:00Z", "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["seq"] == 0


def test_missing_archive_is_named(tmp_path: Path) -> None:
    done = unicron_replay("digest", "--nats", "nats://127.0.0.1:1", "--archive", tmp_path / "none")
    assert done.returncode == 2 and "--archive: " in done.stderr


def test_ordered_fault_belongs_to_task_of_worker() -> None:
    fault = InjectionRequested(node="n1", fault=Fault(kind="kill", worker="big.3"))
    assert list(fault.tasks_named()) == ["big"]
    assert list(InjectionRequested(node="n1", fault=Fault(kind="kill")).tasks_named()) == []
