"""Requests for logs: bounded, path-safe, fit for following."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.log_layout import worker_log
from agents.log_service import answer
from events.logs_request import BadLogsMessage, LogsReply, LogsRequest, decode_reply, decode_request, encode


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    for number in (2, 10):
        path = worker_log(tmp_path, "a", f"a.{number}")
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"0123456789" * number)
    path.with_name("a.10.log.1").write_bytes(b"old")
    return tmp_path


def ask(logs: Path, **fields: object) -> LogsReply:
    return decode_reply(answer("n1", logs, encode(LogsRequest(**fields))))  # type: ignore[arg-type]


def test_the_tail_of_the_newest_worker(logs: Path) -> None:
    reply = ask(logs, task="a", tail_bytes=4)
    assert (reply.worker, reply.data, reply.next_offset, reply.error) == ("a.10", b"6789", 100, "")


def test_a_follower_gets_what_is_new_and_after_a_rotation_the_beginning(logs: Path) -> None:
    path = worker_log(logs, "a", "a.2")
    reply = ask(logs, task="a", worker="a.2", tail_bytes=3)
    with path.open("ab") as file:
        file.write(b"new")
    reply = ask(logs, task="a", worker="a.2", offset=reply.next_offset)
    assert (reply.data, reply.next_offset) == (b"new", 23)
    path.write_bytes(b"fresh")
    reply = ask(logs, task="a", worker="a.2", offset=reply.next_offset)
    assert (reply.data, reply.next_offset) == (b"fresh", 5)


def test_what_is_not_there_is_said(logs: Path) -> None:
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
def test_bad_requests_are_answered_with_the_reason(logs: Path, body: dict[str, object]) -> None:
    reply = decode_reply(answer("n1", logs, msgspec.msgpack.encode(body)))
    assert reply.error.startswith("bad request: ")
    assert reply.data == b""


@given(st.binary(max_size=200))
def test_any_bytes_are_answered(body: bytes) -> None:
    decode_reply(answer("n1", Path("/nowhere"), body))
    for decode in (decode_request, decode_reply):
        try:
            decode(body)
        except BadLogsMessage:
            continue
