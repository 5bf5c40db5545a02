"""Agents, fork servers and workers of different versions on one node."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.younger import NEXT, younger
from unicrond.agents.protocol.framing import frame
from unicrond.agents.protocol.messages import InjectIntoWorker, Launch, Reporter
from unicrond.agents.protocol.peers import agent_schema, message_for, plain, write_schema
from unicrond.agents.trainer.process.channel import AgentChannel
from unicrond.events.vocabulary import ErrorReported, Fault, StoreAddress, TaskSpec, WorkerBusy, WorkerReady
from unicrond.events.vocabulary.field_defaults import Since
from unicrond.events.wire.schemas import FIRST, SCHEMA

REPORTER = Reporter(node="n", task="t", worker="t.1")
TROUBLE = ErrorReported(
    **REPORTER,
    kind="connection_broken",
    generation=1,
    iteration=1,
    phase="reduce",
    message="",
    detail="",
    lost_peers=("t.2",),
)
BUSY = WorkerBusy(**REPORTER, section="evaluation", limit_us=5)


@pytest.fixture
def next_schema() -> Iterator[None]:
    """The next schema brings a message of workers, a field of another, and a part of what agents say."""
    fields = {ErrorReported: {"lost_peers": Since(NEXT)}, Fault: {"excluded_from_blame": Since(NEXT)}}
    with pytest.MonkeyPatch.context() as patch, younger(fields=fields):
        patch.setattr(WorkerBusy, "since", NEXT, raising=False)
        yield


@pytest.mark.usefixtures("next_schema")
def test_agent_omits_fields_that_older_worker_refuses() -> None:
    inject = InjectIntoWorker(fault=Fault(kind="kill", worker="t.1", excluded_from_blame=True))
    assert plain(inject) == InjectIntoWorker(fault=Fault(kind="kill", worker="t.1"))
    assert plain(inject, NEXT) is inject


@pytest.mark.usefixtures("next_schema")
def test_worker_speaks_schema_of_agent() -> None:
    assert message_for(FIRST, BUSY) is None
    assert message_for(FIRST, TROUBLE) == msgspec.structs.replace(TROUBLE, lost_peers=())
    assert message_for(NEXT, BUSY) is BUSY and message_for(NEXT, TROUBLE) is TROUBLE


def test_agent_without_schema_file_reads_first_schema(tmp_path: Path) -> None:
    at = str(tmp_path / "agent.sock")
    assert agent_schema(at) == SCHEMA, "no agent has ever been here"
    (tmp_path / "agent.boot").write_text("7")
    assert agent_schema(at) == FIRST
    write_schema(tmp_path, 7)
    assert agent_schema(at) == SCHEMA
    (tmp_path / "agent.boot").write_text("8")  # an older agent has come, which writes its boot alone
    assert agent_schema(at) == FIRST
    (tmp_path / "agent.schema").write_bytes(b"\xff")
    assert agent_schema(at) == FIRST


@pytest.mark.usefixtures("next_schema")
def test_unknown_message_waits_for_newer_agent() -> None:
    store = StoreAddress(host="127.0.0.1", port=1)
    launch = Launch(
        worker="t.1", task="t", node="n", address="127.0.0.1", agent_socket="/nowhere", replica=0, shard=0,
        store=store, spec=TaskSpec(name="t"),
    )  # fmt: skip
    channel = AgentChannel(launch, 60)
    channel._agent_schema = FIRST
    channel.send(BUSY)
    channel.send(WorkerReady(**REPORTER))
    message, body = channel._next_outgoing(None)
    assert message == WorkerReady(**REPORTER) and bytes(body) == frame(WorkerReady(**REPORTER))
    assert channel._next_outgoing(message) == (None, memoryview(b""))
    assert BUSY not in channel._greeting()
    channel._agent_schema = NEXT
    assert BUSY in channel._greeting()
    channel._wake_read.close()
    channel._wake_write.close()
