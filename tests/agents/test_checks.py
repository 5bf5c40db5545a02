"""What an agent looks at for `unicronctl doctor`: links, sums with others, storage (doctor_checks.py, pair_sum.py)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.agents.conftest import Agents, ForkServers
from tests.agents.processes import children, eventually, has_ended
from unicrond.agents.health import doctor_checks as checks
from unicrond.agents.health import pair_sum
from unicrond.agents.health.doctor_checks import Checks, look_at_storage, unreached
from unicrond.agents.health.pair_sum import Summation, sum_all
from unicrond.agents.protocol.messages import Sum
from unicrond.agents.shell.fork_server_link import ForkLink
from unicrond.agents.shell.run_dir import RunDir
from unicrond.events.queries.node_checks import (
    AnyCheck,
    FactsCheck,
    Finding,
    LinksCheck,
    LinksReport,
    NodeFacts,
    Pair,
    PairSum,
    Peer,
    StorageCheck,
    StorageReport,
    decode_report,
    encode,
)
from unicrond.events.queries.worker_queries import LogsReply, decode_reply
from unicrond.events.vocabulary import StoreAddress

TOKEN = "0123456789abcdef"
HERE = "127.0.0.1"


@pytest.fixture(scope="module")
def store() -> Iterator[Any]:
    """A node's rendezvous store."""
    yield torch.distributed.TCPStore(HERE, 0, is_master=True, wait_for_workers=False)


def pair(store: Any, rank: int, peer: str, turn: int = 0) -> Pair:
    return Pair(peer=peer, rank=rank, store=StoreAddress(host=HERE, port=store.port), turn=turn)


def an_order(*pairs: Pair, **more: Any) -> Sum:
    fixed = {"address": HERE, "library": "gloo", "answer": "", "asked_s": time.monotonic()}
    return Sum(**{**fixed, "pairs": pairs, **more})


def both(store: Any, by: Summation, token: str, limit_s: float = 30.0) -> tuple[PairSum, PairSum]:
    """What the two nodes n0 and n1 tell of their sum."""
    told: dict[int, PairSum] = {}

    def one(rank: int) -> None:
        order = an_order(pair(store, rank, f"n{1 - rank}"), token=token, limit_s=limit_s)
        (told[rank],) = sum_all(torch, order, by, time.monotonic() + limit_s)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return told[0], told[1]


# --- sums ----------------------------------------------------------------------------------------


def test_gloo_sum_of_two_nodes_leaves_store_clean(store: Any) -> None:
    one, other = both(store, pair_sum.by_gloo, "a" * 16)
    assert (one.peer, one.trouble, other.peer, other.trouble) == ("n1", "", "n0", "") and one.duration_us > 0
    assert not [key for key in store.list_keys() if "a" * 16 in key]


def test_wrong_sum_is_reported_by_its_node(store: Any) -> None:
    def by(torch: Any, store: Any, rank: int, address: str, vector: Any) -> None:
        pair_sum.by_gloo(torch, store, rank, address, vector)
        vector[7] += rank

    one, other = both(store, by, "b" * 16)
    assert one.trouble == "" and other.trouble == "the sum is wrong"


def test_sum_reports_error_of_library(store: Any) -> None:
    def by(*_: Any) -> None:
        raise RuntimeError("Connect timeout\nand a stack")

    assert both(store, by, "c" * 16)[0].trouble == "the sum failed: Connect timeout"


def test_sum_reports_absent_peer_in_time(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair_sum, "SUM_S", 0.0)
    monkeypatch.setattr(pair_sum, "_TELL_S", 10.0)
    order = an_order(pair(store, 0, "n1"), token="d" * 16, limit_s=11.0)
    (told,) = sum_all(torch, order, pair_sum.by_gloo, time.monotonic() + 11.0)
    assert told.trouble.startswith(f"the two have not met in the store at {HERE}:{store.port}")


def test_sum_skips_wait_for_peer_after_deadline(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair_sum, "_MEET_S", -15.0)  # half of the limit is over after 15 s
    order = an_order(pair(store, 0, "n1"), token="8" * 16, limit_s=30.0)
    began_s = time.monotonic()
    (told,) = sum_all(torch, order, pair_sum.by_gloo, began_s + 29.0)
    assert told.trouble.startswith("the two have not met") and time.monotonic() - began_s < 10


def test_sum_survives_hanging_library(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair_sum, "SUM_S", 0.5)
    hangs = threading.Event()
    one, other = both(store, lambda *_: hangs.wait(40) and None, "e" * 16, limit_s=5.0)
    hangs.set()
    assert one.trouble == other.trouble == "the sum did not end in time"


def test_nccl_sums_run_in_turn_with_own_group(store: Any) -> None:
    """Against a double of NCCL, which no test here runs: one communicator at a time, in the order of the turns."""
    made: list[str] = []

    class Group:
        def __init__(self, *_: Any) -> None:
            made.append("group")

        def allreduce(self, tensors: list[Any]) -> Any:
            tensors[0].mul_(0).add_(torch.arange(len(tensors[0]), dtype=torch.int32) * 3)
            return SimpleNamespace(wait=lambda: None)

        def abort(self) -> None:
            made.append("abort")

    class Vector:
        def __init__(self, tensor: Any) -> None:
            self.tensor = tensor

        def cuda(self) -> Any:
            return self.tensor.clone()

        def copy_(self, other: Any) -> None:
            self.tensor.copy_(other)

    Group.Options = SimpleNamespace  # type: ignore[attr-defined]
    double = SimpleNamespace(distributed=SimpleNamespace(ProcessGroupNCCL=Group))
    turns: list[int] = []

    def by(torch: Any, store: Any, rank: int, address: str, vector: Any) -> None:
        pair_sum.by_nccl(double, store, rank, address, Vector(vector))
        turns.append(len(made))

    for turn in (0, 2):
        store.set(f"doctor/{'f' * 16}/{turn}/here 1", "")
    pairs = (pair(store, 0, "n2", turn=2), pair(store, 0, "n1"))
    order = an_order(*pairs, token="f" * 16, library="nccl", limit_s=30.0)
    told = sum_all(torch, order, by, time.monotonic() + 30.0)
    assert [(one.peer, one.trouble) for one in told] == [("n2", ""), ("n1", "")]
    assert made == ["group", "abort"] * 2 and turns == [2, 4]


# --- connections ---------------------------------------------------------------------------------


def connect(port: int, source: str = HERE) -> Any:
    turn = asyncio.Semaphore(1)
    return asyncio.run(unreached("n2", "store", HERE, port, source=source, semaphore=turn))


def test_connection_check_tells_success_and_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server((HERE, 0)) as server:
        port = server.getsockname()[1]
        assert connect(port) is None
        lost = connect(port, source="192.0.2.1")
        assert lost.reason == "cannot assign requested address", "it begins at the node's own address"
    lost = connect(port)
    assert (lost.peer, lost.service, lost.address, lost.reason) == (
        "n2",
        "store",
        f"{HERE}:{port}",
        "connection refused",
    )
    monkeypatch.setattr(checks, "CONNECT_S", 0.2)

    async def never(*_: Any, **__: Any) -> Any:
        await asyncio.sleep(60)

    monkeypatch.setattr(asyncio, "open_connection", never)
    assert connect(port).reason == "no answer within 0.2 s"


def test_late_connection_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[bool] = []

    async def late(*_: Any, **__: Any) -> Any:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(60)
        return None, SimpleNamespace(close=lambda: closed.append(True))

    monkeypatch.setattr(checks, "CONNECT_S", 0.1)
    monkeypatch.setattr(asyncio, "open_connection", late)
    assert connect(1).reason == "no answer within 0.1 s" and closed == [True]


# --- storage -------------------------------------------------------------------------------------


def look(directory: Path, part: Any) -> StorageReport:
    return look_at_storage(StorageCheck(directory=str(directory), token=TOKEN, part=part))


def test_storage_check_writes_sees_and_removes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "LOOK_S", 0.1)
    one, other = tmp_path / "shared", tmp_path / "local"
    one.mkdir()
    other.mkdir()
    written = look(one / "not yet" / "big", "write")
    assert (written.result, written.directory) == ("seen", str(one)) and not (one / "not yet").exists()
    assert look(one / "not yet" / "big", "look").result == "seen"
    assert look(other / "big", "look").result == "missing"
    look(one / "big", "remove")
    assert list(one.iterdir()) == [] and look(one, "look").result == "missing"


def test_storage_check_tells_reason_of_failed_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.touch()
    seen = look(file, "write")
    assert (seen.result, seen.reason) == ("failed", "Not a directory")

    def refused(*_: Any, **__: Any) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "write_text", refused)
    assert look(tmp_path, "write").result == "refused"


# --- requests ------------------------------------------------------------------------------------


async def ask(asked: Checks, body: bytes) -> LogsReply:
    answered: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def respond(reply: bytes) -> None:
        answered.set_result(reply)

    assert asked.begin(body, respond)
    return decode_reply(await asyncio.wait_for(answered, 90))


def an_agent(fork: Callable[[Sum], str] | None = None, at: Path = Path(), **more: Any) -> Checks:
    """`fork`: sends to a fork server; `at`: where the sum tells its result."""
    findings = [Finding("--slots", "9 slots, but 8 visible GPUs", "look")]
    return Checks("n1", HERE, lambda: findings, fork or (lambda _: "the fork server does not run yet"), at, **more)


async def test_checks_ignore_log_request() -> None:
    async def respond(_: bytes) -> None: ...

    for body in (b"", b"\xc1", b"\x80", b"\x81\xa4task\xa1a"):
        assert not an_agent().begin(body, respond)


async def test_checks_answer_facts_storage_and_bad_requests(tmp_path: Path) -> None:
    told = decode_report((await ask(an_agent(), encode(FactsCheck()))).data, NodeFacts)
    assert told.findings[0].about == "--slots" and told.torch.startswith("2.")
    assert told.mtu == 0, "the loopback's is nobody else's"
    assert abs(told.now_us / 1e6 - time.time()) < 5
    check = StorageCheck(directory=str(tmp_path), token=TOKEN, part="write")
    seen = decode_report((await ask(an_agent(runs_as_others=True), encode(check))).data, StorageReport)
    assert seen.result == "seen" and seen.runs_as_others
    bad = await ask(an_agent(), encode(check).replace(b"write", b"bread"))
    assert bad.error.startswith("bad request: ") and not bad.data


async def test_failing_check_is_reported_alone() -> None:
    def findings() -> list[Finding]:
        raise OSError(5, "Input/output error")

    agent = Checks("n1", HERE, findings, lambda _: "", Path())
    assert "its check failed: OSError" in (await ask(agent, encode(FactsCheck()))).error
    await agent.close()


def links(store: Any, rank: int, peer: str, **more: Any) -> AnyCheck:
    ports = {"store": (HERE, store.port)}
    return LinksCheck(
        token="9" * 16, peers=(Peer(node=peer, ports=ports),), pairs=(pair(store, rank, peer),),
        **{"library": "gloo", "limit_s": 60.0, **more},
    )  # fmt: skip


async def test_two_agents_sum_in_own_processes(
    store: Any, fork_server: ForkServers, agent: Agents, run_dir: Path
) -> None:
    server, side = fork_server("--preload=torch"), agent()
    side.inventory()  # the store is there
    before = children(server.pid)
    one, other = (an_agent(lambda order: side.send(order) or "", run_dir / f"{name}.sock") for name in "ab")
    first = asyncio.create_task(ask(one, encode(links(store, 0, "n2"))))
    second = asyncio.create_task(ask(other, encode(links(store, 1, "n1"))))
    while not one._links.locked():  # noqa: ASYNC110  # it begins in this loop
        await asyncio.sleep(0)
    assert "already" in (await ask(one, encode(links(store, 0, "n2")))).error
    seen = [decode_report((await task).data, LinksReport) for task in (first, second)]
    assert [(one.unreachable_ports, one.no_sums, [sum.trouble for sum in one.sums]) for one in seen] == [
        ((), "", [""])
    ] * 2
    assert not any(name.endswith(("a.sock", "b.sock")) for name in os.listdir(run_dir))  # noqa: PTH208
    assert eventually(lambda: children(server.pid) == before)


async def test_sum_process_ends_with_its_agent(
    store: Any, fork_server: ForkServers, agent: Agents, run_dir: Path
) -> None:
    server, side = fork_server("--preload=torch"), agent()
    side.inventory()  # the store is there
    before = set(children(server.pid))
    one = an_agent(lambda order: side.send(order) or "", run_dir / "sum.sock")
    asked = asyncio.create_task(ask(one, encode(links(store, 0, "nobody"))))
    assert await asyncio.to_thread(eventually, lambda: set(children(server.pid)) - before)
    (its,) = set(children(server.pid)) - before
    nice = min(19, os.getpriority(os.PRIO_PROCESS, server.pid) + 10)
    assert await asyncio.to_thread(eventually, lambda: os.getpriority(os.PRIO_PROCESS, its) == nice)
    assert await asyncio.to_thread(eventually, lambda: store.check([f"doctor/{'9' * 16}/0/here 0"])), "it waits"
    asked.cancel()
    await one.close()
    assert has_ended(its) and not (run_dir / "sum.sock").exists()


async def test_nccl_sum_needs_free_gpu(store: Any) -> None:
    seen = decode_report((await ask(an_agent(), encode(links(store, 0, "n2", library="nccl")))).data, LinksReport)
    assert (seen.sums, seen.no_sums) == ((), "no slot with a GPU is free")


def test_busy_node_refuses_late_sum() -> None:
    assert pair_sum.too_late(30.0, 60.0) == ""
    said = "the node is busy: its sums could begin after 31 s; give a --timeout-s above 62"
    assert pair_sum.too_late(31.0, 60.0) == said


async def test_sum_reports_reason_of_its_process(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def says(*_: Any) -> bytes:
        return b'"the node is busy"'

    monkeypatch.setattr(checks, "_process_output", says)
    seen = decode_report((await ask(an_agent(), encode(links(store, 0, "n2")))).data, LinksReport)
    assert (seen.sums, seen.no_sums) == ((), "the node is busy")


async def test_sum_reports_missing_fork_server(store: Any, run_dir: Path) -> None:
    seen = decode_report(
        (await ask(an_agent(at=run_dir / "sum.sock"), encode(links(store, 0, "n2")))).data, LinksReport
    )
    assert (seen.sums, seen.no_sums) == ((), "the fork server does not run yet")


async def test_sum_gives_up_silent_process(store: Any, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "CONNECT_S", 0.1)
    one = an_agent(lambda _: "", run_dir / "sum.sock")
    seen = decode_report((await ask(one, encode(links(store, 0, "n2", limit_s=0.1)))).data, LinksReport)
    assert seen.no_sums == "its process gave no result: it did not end within 0.1 s"


def test_sum_request_needs_running_fork_server(run_dir: Path) -> None:
    link = ForkLink(RunDir(run_dir), arguments=(), on_message=lambda _: None, on_death=lambda: None)
    order, sent = an_order(token=TOKEN, limit_s=1.0), list[object]()
    assert link.sum(order) == "the fork server does not run yet"
    link.trouble = "no fork server: it ended with code 1"
    assert link.sum(order) == link.trouble
    link._is_usable, link.send = True, sent.append  # type: ignore[method-assign]
    assert link.sum(order) == "" and sent == [order]
