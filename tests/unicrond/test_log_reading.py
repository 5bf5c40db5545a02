"""Which node is asked for a log: the one that the state knows, else all, also for what never trained."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.unicrond.serving import healed_cluster
from unicrond.core.state.state import ClusterState, TaskStatus
from unicrond.events.queries.worker_queries import (
    Collective,
    LogsReply,
    WorkerMark,
    decode_request,
    encode,
    encode_flight,
    encode_marks,
)
from unicrond.intake.tokens import Scope
from unicrond.service.api.access import scope_of
from unicrond.service.api.worker_output import LogReader, LogsUnavailable


class Asking(LogReader):
    """`logs`: by node and worker, what its agent has."""

    def __init__(self, logs: dict[str, dict[str, bytes]]) -> None:
        self.logs = logs
        self.asked: list[str] = []
        self.flights: dict[str, list[Collective]] = {}

    async def _ask(self, node: str, body: bytes, timeout_s: float) -> bytes:
        self.asked.append(node)
        request = decode_request(body)
        if request.flight and node in self.flights:
            return encode(LogsReply(node=node, worker=request.worker, data=encode_flight(self.flights[node])))
        if request.flight:
            return encode(LogsReply(node=node, worker=request.worker, error="bad request: unknown field `flight`"))
        if request.stacks:
            return encode(LogsReply(node=node, worker=request.worker, error="bad request: unknown field `stacks`"))
        if request.marks and node == "n1":
            return encode(LogsReply(node=node, error="bad request: unknown field `marks`"))
        if request.marks:
            at = WorkerMark(
                worker=f"{request.task}.{node[1:]}", phase="reduce", generation=2, iteration=9, micro_batch=3,
                collectives_entered=14, is_waiting=True, still_us=1_500_000,
            )  # fmt: skip
            return encode(LogsReply(node=node, data=encode_marks([at])))
        found = self.logs.get(node, {})
        worker = request.worker or max(found, default=None)
        if worker not in found:
            return encode(LogsReply(node=node, worker=worker, error=f"no log of {worker} on node {node}"))
        return encode(LogsReply(node=node, worker=worker, data=found[worker], next_offset=len(found[worker])))


@pytest.fixture(scope="module")
def state() -> ClusterState:
    return healed_cluster().state


def never_trained(state: ClusterState) -> ClusterState:
    """`big` has failed, and nothing is known of its workers."""
    task = replace(state.tasks["big"], workers={}, membership=None, status=TaskStatus.FAILED)
    return replace(state, tasks={**state.tasks, "big": task})


async def test_log_reader_asks_node_of_rank(state: ClusterState) -> None:
    assert state.tasks["big"].membership is not None
    member = state.tasks["big"].membership.members[1]
    reader = Asking({member.node: {member.worker: b"loss 1.0\n"}})
    piece = await reader.read(state, "big", rank=1)
    assert piece == {"worker": member.worker, "node": member.node, "offset": 9, "text": "loss 1.0\n"}
    assert reader.asked == [member.node]
    with pytest.raises(LookupError, match="give 0 to 2"):
        await reader.read(state, "big", rank=3)
    with pytest.raises(LookupError, match="no task nothing"):
        await reader.read(state, "nothing")


async def test_log_reader_searches_all_nodes_for_untrained_task(state: ClusterState) -> None:
    reader = Asking({"n1": {"big.9": b"old"}, "n3": {"big.10": b"Traceback (most recent call last)"}})
    piece = await reader.read(never_trained(state), "big")
    assert (piece["worker"], piece["node"], piece["text"]) == ("big.10", "n3", "Traceback (most recent call last)")
    assert sorted(reader.asked) == ["n1", "n2", "n3", "n4"]


async def test_log_reader_finds_forgotten_worker_by_name(state: ClusterState) -> None:
    reader = Asking({"n2": {"big.3": b"killed"}})
    assert (await reader.read(state, "big", worker="big.3"))["text"] == "killed"
    for name in ("small.1", "big.x", "../etc"):
        with pytest.raises(LookupError, match="worker: "):
            await reader.read(state, "big", worker=name)


async def test_log_reader_falls_back_to_event_log(state: ClusterState) -> None:
    with pytest.raises(LogsUnavailable, match="no node that is up has a log of any worker of big"):
        await Asking({}).read(never_trained(state), "big")
    incident = replace(state.closed_incidents[0], log_tail="ImportError: no module named data", worker="big.3")
    told = replace(never_trained(state), closed_incidents=(incident,))
    piece = await Asking({}).read(told, "big")
    assert "ImportError" in piece["text"] and piece["worker"] == "big.3"


async def test_log_reader_refuses_stacks_of_older_agent(state: ClusterState) -> None:
    with pytest.raises(LogsUnavailable, match="too old for this; upgrade it"):
        await Asking({}).stacks(state, "big", 0)
    with pytest.raises(LookupError):
        await Asking({}).stacks(never_trained(state), "big", 0)


async def test_stacks_answer_needs_stacks_or_flight_recorder(state: ClusterState) -> None:
    reader = Asking({})
    one = Collective(
        library="gloo", group=1, number=2, is_p2p=False, name="all_reduce", state="", is_over=False, sizes="",
        since_us=3,
    )  # fmt: skip
    reader.flights = {node: [one] for node in state.nodes}
    told = await reader.stacks(state, "big", 0)
    assert told["collectives"] == [one] and told["no_flight"] == "" and told["text"] == ""
    assert "too old" in told["no_stacks"]


def test_stacks_need_operate_scope() -> None:
    assert scope_of("GET", "/v1/stacks/big") is Scope.OPERATE
    assert scope_of("GET", "/v1/logs/big") is Scope.READ


async def test_marks_query_asks_all_nodes_of_task(state: ClusterState) -> None:
    membership = state.tasks["big"].membership
    assert membership is not None
    nodes = {member.node for member in membership.members}
    told = await Asking({}).marks(state, "big")
    assert {mark.worker for mark in told["marks"].values()} == {f"big.{node[1:]}" for node in nodes - {"n1"}}
    assert set(told["silent"]) == nodes & {"n1"} and all("too old" in why for why in told["silent"].values())
    assert (await Asking({}).marks(never_trained(state), "big")) == {"marks": {}, "silent": {}}
    with pytest.raises(LookupError, match="no task nothing"):
        await Asking({}).marks(state, "nothing")
    assert scope_of("GET", "/v1/marks/big") is Scope.READ
