"""Requests for logs: bounded, path-safe, fit for following."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unicrond.agents.host.paths import worker_log
from unicrond.agents.output.query_service import answer
from unicrond.agents.output.stacks import NoStacks, stacks
from unicrond.agents.protocol import marks
from unicrond.agents.protocol.marks import Mark, Marker
from unicrond.events.queries.worker_queries import (
    BadLogsMessage,
    LogsReply,
    LogsRequest,
    decode_marks,
    decode_reply,
    decode_request,
    encode,
)


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    for number in (2, 10):
        path = worker_log(tmp_path, "a", f"a.{number}")
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"0123456789" * number)
    path.with_name("a.10.log.1").write_bytes(b"old")
    return tmp_path


def ask(logs: Path, **fields: object) -> LogsReply:
    return decode_reply(asyncio.run(answer("n1", logs, lambda _: 0, encode(LogsRequest(**fields)))))  # type: ignore[arg-type]


def test_log_service_serves_tail_of_newest_worker(logs: Path) -> None:
    reply = ask(logs, task="a", tail_bytes=4)
    assert (reply.worker, reply.data, reply.next_offset, reply.error) == ("a.10", b"6789", 100, "")


def test_log_follower_gets_new_text_and_restarts_after_rotation(logs: Path) -> None:
    path = worker_log(logs, "a", "a.2")
    reply = ask(logs, task="a", worker="a.2", tail_bytes=3)
    with path.open("ab") as file:
        file.write(b"new")
    reply = ask(logs, task="a", worker="a.2", offset=reply.next_offset)
    assert (reply.data, reply.next_offset) == (b"new", 23)
    path.write_bytes(b"fresh")
    reply = ask(logs, task="a", worker="a.2", offset=reply.next_offset)
    assert (reply.data, reply.next_offset) == (b"fresh", 5)


def test_log_service_names_missing_log(logs: Path) -> None:
    assert "no worker of task b" in ask(logs, task="b").error
    assert "no log of a.3" in ask(logs, task="a", worker="a.3").error


@pytest.mark.parametrize(
    "body",
    [
        {"task": "../a"},
        {"task": "a", "worker": "../../etc/passwd"},
        {"task": "a", "worker": "b.1"},
        {"task": "a", "tail_bytes": 10**9},
        {"task": "a", "offset": -1},
        {"task": "a", "colour": "red"},
        {},
    ],
)
def test_log_service_answers_bad_request_with_reason(logs: Path, body: dict[str, object]) -> None:
    reply = decode_reply(asyncio.run(answer("n1", logs, lambda _: 0, msgspec.msgpack.encode(body))))
    assert reply.error.startswith("bad request: ")
    assert reply.data == b""


@given(st.binary(max_size=200))
def test_log_service_answers_any_bytes(body: bytes) -> None:
    decode_reply(asyncio.run(answer("n1", Path("/nowhere"), lambda _: 0, body)))
    for decode in (decode_request, decode_reply):
        try:
            decode(body)
        except BadLogsMessage:
            continue


# --- marks ---------------------------------------------------------------------------------------


def test_marks_reply_tells_positions_of_workers(logs: Path, tmp_path: Path) -> None:
    marker = Marker(tmp_path / "a.2")
    marker.enter_group(3)
    marker.begin_iteration(41, 9_000_000)
    marker.begin_micro_batch(5)
    found = {"a.2": marks.read(tmp_path / "a.2"), "a.7": Mark("reduce", 2**63, 1, 1, 7, 6, 0, 0, marks.now_us())}
    tasks = {"a": {worker: mark for worker, mark in found.items() if mark is not None}}
    request = encode(LogsRequest(task="a", marks=True))
    reply = decode_reply(asyncio.run(answer("n1", logs, lambda _: 0, request, tasks.__getitem__)))
    first, second = decode_marks(reply.data)
    assert (first.worker, first.phase, first.generation, first.iteration) == ("a.2", "forward", 3, 41)
    assert (first.micro_batch, first.collectives_entered, first.is_waiting) == (
        5,
        0,
        False,
    ) and 0 <= first.still_us < 60_000_000
    assert (second.collectives_entered, second.is_waiting) == (7, True)
    assert second.generation == 2**53 - 1, "what a worker writes is bounded"


# --- stacks --------------------------------------------------------------------------------------


def ask_stacks(logs: Path, pid: int) -> LogsReply:
    request = encode(LogsRequest(task="a", worker="a.2", stacks=True))
    return decode_reply(asyncio.run(answer("n1", logs, lambda worker: pid if worker == "a.2" else 0, request)))


def a_py_spy(directory: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = directory / "py-spy"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory}:/usr/bin:/bin")
    monkeypatch.setattr("sys.executable", str(directory / "python"))


def test_stacks_come_from_py_spy(logs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a_py_spy(tmp_path, 'echo "Thread of $3 by $1"', monkeypatch)
    assert ask_stacks(logs, 4711) == LogsReply(node="n1", worker="a.2", data=b"Thread of 4711 by dump\n")


def test_missing_stacks_tell_reason(logs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask_stacks(logs, 0).error == "worker a.2 does not run on node n1"
    a_py_spy(tmp_path, 'echo "Permission PublishDenied: try sudo" >&2; exit 1', monkeypatch)
    assert "Permission PublishDenied" in (error := ask_stacks(logs, 1).error) and "ptrace_scope" in error
    monkeypatch.setenv("PATH", "/nowhere")
    (tmp_path / "py-spy").unlink()
    assert "pip install 'unicrond[stacks]'" in ask_stacks(logs, 1).error


def test_log_request_omits_stacks_for_older_agent() -> None:
    plain = msgspec.msgpack.decode(encode(LogsRequest(task="a", offset=7)))
    assert "stacks" not in plain and plain == {"task": "a", "offset": 7}


def test_py_spy_shows_real_stack() -> None:
    """Where it is installed, and Linux lets us."""
    script = "import sys, time\ndef waits_here():\n    print(flush=True)\n    time.sleep(60)\nwaits_here()"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout is not None and child.stdout.readline() == b"\n"
            told = asyncio.run(stacks(child.pid))
        except NoStacks as why:
            pytest.skip(str(why))
        finally:
            child.kill()
    assert b"waits_here" in told
