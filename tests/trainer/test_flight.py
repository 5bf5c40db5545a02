"""What a worker's flight recorder holds, on its way to the agent that asks."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.agents.processes import eventually
from unicrond.agents.output.query_service import answer
from unicrond.agents.output.stacks import NoStacks, Questions
from unicrond.agents.protocol.framing import Unframer, frame
from unicrond.agents.protocol.messages import (
    Flight,
    FromWorker,
    Hello,
    Launch,
    Stacks,
    TellFlight,
    TellStacks,
)
from unicrond.agents.trainer.process.channel import AgentChannel
from unicrond.agents.trainer.process.flight import read_flight
from unicrond.events.queries.worker_queries import (
    COLLECTIVES_MAX,
    Collective,
    LogsRequest,
    decode_flight,
    decode_reply,
    encode,
)
from unicrond.events.vocabulary import StoreAddress, TaskSpec

MODULE = "torch._C._distributed_c10d"


def entry(**fields: Any) -> dict[str, Any]:
    told = {
        "record_id": 1, "pg_id": 3, "collective_seq_id": 17, "p2p_seq_id": 5, "is_p2p": False,
        "profiling_name": "nccl:all_reduce", "state": "started", "retired": False, "input_sizes": [[4096]],
        "input_dtypes": ["BFloat16"], "time_created_ns": 1_000_000_000, "pg_config": {}, "a_new_field": [1],
    }  # fmt: skip
    return told | fields


def double(*entries: dict[str, Any], dump: str = "_dump_nccl_trace_json") -> dict[str, Any]:
    """torch's module, with a double of NCCL's recorder: no test here has NCCL."""

    def told(**asked: bool) -> bytes:
        assert asked == {"includeCollectives": True, "onlyActive": False}
        return json.dumps({"version": "2.10", "entries": list(entries)}).encode()

    return {MODULE: SimpleNamespace(**{dump: told})}


def test_gloo_flight_recorder_is_read() -> None:
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(seconds=5)
    group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, options)
    group.allreduce([torch.ones(5, 3)]).wait()
    # A thread of the group's notes the end, which may be after `wait` has returned.
    assert eventually(lambda: read_flight().collectives[-1].is_over)
    last = read_flight().collectives[-1]
    assert (last.library, last.name, last.is_p2p) == ("gloo", "all_reduce", False)
    assert last.sizes == "Float[5, 3]" and last.number >= 1 and last.since_us < 60_000_000


def test_nccl_flight_recorder_is_read() -> None:
    (told,) = read_flight(double(entry()), now_ns=3_500_000_000).collectives
    assert told == Collective(
        library="nccl", group=3, number=17, is_p2p=False, name="all_reduce", state="started", is_over=False,
        sizes="BFloat16[4096]", since_us=2_500_000,
    )  # fmt: skip
    (told,) = read_flight(double(entry(is_p2p=True, state="completed"))).collectives
    assert told.number == 5 and told.is_over


def test_open_collectives_take_precedence_over_finished() -> None:
    ended = [entry(record_id=n, time_created_ns=n * 1_000, retired=True) for n in range(10, 200)]
    told = read_flight(double(entry(record_id=1, time_created_ns=1_000), *ended), now_ns=10**9).collectives
    assert len(told) == COLLECTIVES_MAX and not told[0].is_over
    assert [one.since_us for one in told[-2:]] == [999_802, 999_801]


@pytest.mark.parametrize(
    ("modules", "trouble"),
    [
        ({}, "torch.distributed is not loaded"),
        ({MODULE: SimpleNamespace(_dump_fr_trace_json=lambda **_: b"[1")}, "cannot be read: BadDump"),
        ({MODULE: SimpleNamespace(_dump_fr_trace_json=lambda: b"")}, "cannot be read: TypeError"),
    ],
)
def test_missing_flight_recorder_tells_reason(modules: dict[str, Any], trouble: str) -> None:
    assert trouble in read_flight(modules).trouble
    assert read_flight({MODULE: SimpleNamespace()}) == Flight(), "a build without any recorder"


def test_odd_flight_entries_are_bounded() -> None:
    odd = entry(pg_id=-1, collective_seq_id=2**60, profiling_name="x" * 999, state=None, input_sizes=[], retired=True)
    (told,) = read_flight(double(odd), now_ns=0).collectives
    assert (told.group, told.number, len(told.name), told.state, told.since_us) == (0, 2**53 - 1, 64, "", 0)


# --- from the worker to the agent ----------------------------------------------------------------

HELLO = Hello(worker="t.1", task="t", pid=7, generation=0, ready=True, has_flight=True, has_stacks=True)


@contextmanager
def agent_of_a_worker() -> Iterator[socket.socket]:
    """The agent's end of a worker's connection, which the worker's thread serves."""
    launch = Launch(
        worker="t.1", task="t", node="n", address="127.0.0.1", agent_socket="/nowhere", replica=0, shard=0,
        store=StoreAddress(host="127.0.0.1", port=1), spec=TaskSpec(name="t"),
    )  # fmt: skip
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    ours.settimeout(10)
    channel = AgentChannel(launch, 60)
    serving = threading.Thread(target=channel._serve, args=(theirs,))
    serving.start()
    with ours:
        yield ours
    serving.join(10)
    channel._wake_read.close()
    channel._wake_write.close()


def next_of(agent: socket.socket, incoming: Unframer[FromWorker]) -> FromWorker:
    while True:
        for message in incoming.feed(agent.recv(65536)):
            return message


def test_worker_answers_flight_request_beside_main_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, MODULE, double(entry())[MODULE])
    incoming: Unframer[FromWorker] = Unframer(FromWorker)
    with agent_of_a_worker() as agent:
        hello = next_of(agent, incoming)
        assert isinstance(hello, Hello) and hello.has_flight
        agent.sendall(frame(TellFlight(number=5)))
        told = next_of(agent, incoming)
    assert isinstance(told, Flight) and (told.collectives[0].number, told.question) == (17, 5)


def test_worker_tells_its_stacks_before_it_takes_the_next_message() -> None:
    incoming: Unframer[FromWorker] = Unframer(FromWorker)
    with agent_of_a_worker() as agent:
        hello = next_of(agent, incoming)
        assert isinstance(hello, Hello) and hello.has_stacks
        assert hello.repeats_numbers
        agent.sendall(frame(TellStacks(number=7)) + frame(TellFlight()))
        told = next_of(agent, incoming)
    assert isinstance(told, Stacks) and "test_flight.py" in told.text.splitlines()[1] and told.question == 7


async def test_agent_waits_limited_time_for_flight() -> None:
    sent: list[str] = []
    asking = Questions(lambda worker, _: sent.append(worker))
    assert "too old" in (await asking.flight("t.1", 0.05)).trouble and not sent
    asking.connected(HELLO)
    assert "stand still" in (await asking.flight("t.1", 0.05)).trouble and sent == ["t.1"]
    both = [asyncio.create_task(asking.flight("t.1", 10)) for _ in range(2)]
    await asyncio.sleep(0)
    asking.receive("t.9", Flight())
    asking.receive("t.1", told := read_flight(double(entry())))
    assert [await one for one in both] == [told, told]
    asking.receive("t.1", told)  # late
    asking.disconnected("t.1")
    assert "does not run here" in (await asking.flight("t.1", 10)).trouble


async def test_flights_and_stacks_are_answers_to_their_own_questions() -> None:
    asking = Questions(lambda *_: None)
    asking.connected(HELLO)
    flight, stacks = asyncio.create_task(asking.flight("t.1", 10)), asyncio.create_task(asking.stacks("t.1", 10))
    await asyncio.sleep(0)
    asking.receive("t.1", Stacks(text="here"))
    asking.receive("t.1", told := read_flight(double(entry())))
    assert (await flight, await stacks) == (told, "here")
    with pytest.raises(NoStacks, match=r"worker t\.1: no answer within 0\.01 s"):
        await asking.stacks("t.1", 0.01)


async def test_flight_request_is_answered(tmp_path: Any) -> None:
    told = read_flight(double(entry()))
    asking = Questions(lambda worker, question: answers[type(question)](worker))
    answers = {TellFlight: lambda worker: asking.receive(worker, told)}
    asking.connected(HELLO)

    async def ask(worker: str) -> Any:
        body = encode(LogsRequest(task="t", worker=worker, flight=True))
        return decode_reply(await answer("n1", tmp_path, lambda _: 0, body, questions=asking))

    assert decode_flight((await ask("t.1")).data) == list(told.collectives)
    assert (await ask("t.2")).error.startswith("node n1: worker t.2: it does not run here")


async def test_stacks_come_from_the_worker_where_py_spy_is_missing(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    asking = Questions(lambda worker, _: asking.receive(worker, Stacks(text="where it stands")))
    asking.connected(HELLO)
    body = encode(LogsRequest(task="t", worker="t.1", stacks=True))
    told = decode_reply(await answer("n1", tmp_path, lambda _: 7, body, questions=asking))
    assert (told.data, told.error) == (b"where it stands", "")
    asking.disconnected("t.1")
    told = decode_reply(await answer("n1", tmp_path, lambda _: 7, body, questions=asking))
    assert "py-spy is not on this node" in told.error and "does not run here" in told.error
