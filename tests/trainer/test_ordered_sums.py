"""Fixed sums over real groups: every member of any of them gets the bits of the reference; a break is only a break."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.trainer.test_lanes import reference
from unicrond.agents.protocol.messages import Launch
from unicrond.agents.trainer.gradients import reduction as reduction_module
from unicrond.agents.trainer.gradients.accumulation import Accumulation
from unicrond.agents.trainer.gradients.passing import Passing
from unicrond.agents.trainer.gradients.reduction import Reduction
from unicrond.agents.trainer.groups import group as group_module
from unicrond.agents.trainer.groups.forming import FormedGroup, GroupPlacement, _connect_gloo
from unicrond.agents.trainer.groups.group import Operation, PendingRows, ShardGroup, form
from unicrond.agents.trainer.lifecycle.lanes import Lanes
from unicrond.agents.trainer.lifecycle.ledger import LaneLedger
from unicrond.agents.trainer.lifecycle.micro_batch_assignment import AHEAD, Assignment, Run, initial_assignment
from unicrond.agents.trainer.lifecycle.results import GroupBroken
from unicrond.agents.trainer.process.channel import AgentChannel
from unicrond.events.vocabulary import StoreAddress, TaskSpec

MICRO_BATCHES = 12
Meet: TypeAlias = Callable[..., list[ShardGroup]]
SHAPES = ((5,), (3, 4), (700,), (1,))


@pytest.fixture
def meet() -> Iterator[Meet]:
    """Groups of so many members, each of a thread's own. By `form` if one is to be left; but that looks among the
    process's sockets for the group's, and here other members make and close some meanwhile: with two that may be."""
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    store = StoreAddress(host="127.0.0.1", port=server.port)
    launch = Launch(
        worker="t.1", task="t", node="n", address="127.0.0.1", agent_socket="/nowhere", replica=0, shard=0,
        store=store, spec=TaskSpec(name="t"),
    )  # fmt: skip
    groups: list[ShardGroup] = []
    channels: list[AgentChannel] = []

    def form_all(size: int, *, to_be_left: bool = False) -> list[ShardGroup]:
        found: dict[int, ShardGroup] = {}
        words = dist.HashStore()

        def one(rank: int, channel: AgentChannel) -> None:
            place = GroupPlacement(
                store, f"of {size}", rank, size, "127.0.0.1", torch.device("cpu"), collective_timeout_s=30
            )
            if to_be_left:
                found[rank] = form(place, 1, channel, 30)
                return
            device = dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")
            connected = None if size == 1 else FormedGroup(_connect_gloo(words, place, device))
            found[rank] = ShardGroup(connected, 1, rank, size, channel, place.device)

        new = [AgentChannel(launch, 60) for _ in range(size)]
        channels.extend(new)
        together([partial(one, rank, channel) for rank, channel in enumerate(new)])
        groups.extend(found[rank] for rank in range(size))
        return [found[rank] for rank in range(size)]

    yield form_all
    for group in groups:
        group.close()
    for channel in channels:
        channel._wake_read.close()
        channel._wake_write.close()


def together(parts: Sequence[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=part) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


def gradients() -> list[list[torch.Tensor]]:
    drawn = torch.Generator().manual_seed(1)
    return [
        [torch.randn(shape, generator=drawn) * 10.0 ** (number % 7 - 3) for shape in SHAPES]
        for number in range(MICRO_BATCHES)
    ]


class Member:
    """Computes as the driver does, without a loop. `sums`: what it gets in the end."""

    def __init__(self, group: ShardGroup, lanes: Lanes, overlap: bool) -> None:
        self.group, self.lanes, self.overlaps = group, lanes, overlap
        self.parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
        self.accumulation = Accumulation(self.parameters, lanes=lanes, bucket_bytes=64)
        self.reduction = Reduction(self.accumulation, lanes)
        self.passing = Passing(self.accumulation, lanes)
        self.ledger = LaneLedger(1, lanes=lanes)
        self.sums = torch.zeros(0)
        self.most_ahead, self.pause_s = 0, 0.0

    def train(self) -> None:
        ledger, reduction, passing = self.ledger, self.reduction, self.passing
        ledger.assign_lanes(initial_assignment(self.group.size, self.lanes), self.group.rank)
        assert ledger.lane_assignment is not None
        reduction.ends = ledger.lane_assignment.ends
        passing.expect(self.group, ledger.lane_assignment)
        while (run := ledger.run) is not None:
            if ledger.may_go_ahead(run) and not passing.has_arrived(self.group, run):
                ledger.go_ahead()
                self.accumulation.go_ahead()
                self.most_ahead = max(self.most_ahead, len(ledger.ahead))
            else:
                if run.source is not None and run.lane not in ledger.from_peers:
                    passing.wait(self.group, run)
                    ledger.receive(run.lane, passing.accept(run))
                self.accumulation.select_lane(run.lane)
                reduction.ending = (run.lane,)
            todo = ledger.todo()[:1]
            if self.overlaps and ledger.is_last(todo):
                reduction.overlap(self.group, 1)
            for micro_batch in todo:
                time.sleep(self.pause_s)
                pairs = zip(self.parameters, gradients()[micro_batch], strict=True)
                sum((parameter * gradient).sum() for parameter, gradient in pairs).backward()  # type: ignore[union-attr]
                ledger.add(float(micro_batch), 1)
            if ledger.finish(len(todo)):
                ledger.end_run()
                reduction.ending = ()
                if run.target is not None:
                    passing.send(self.group, run, ledger.running[run.lane])
                else:
                    self.accumulation.sums.end(run.lane)
        self.reduce()

    def reduce(self) -> None:
        rows: list[PendingRows] = []
        self.reduction.start(self.group, lambda: rows.append(self.group.all_gather([self.group.rank])))
        self.group.finish()
        assert rows[0].read() == [[rank] for rank in range(self.group.size)]
        self.sums = torch.cat([total for _, total in self.reduction.sums()])


@pytest.mark.parametrize("in_order", [False, True], ids=["gloo", "in order, as NCCL"])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("count", [1, 3, 4, 12])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_members_get_bits_of_reference(
    meet: Meet, size: int, count: int, overlap: bool, in_order: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ShardGroup, "keeps_order", in_order)
    monkeypatch.setattr(reduction_module, "STRIP", 100)
    monkeypatch.setattr(reduction_module, "CHUNK", 10)
    members = [Member(group, Lanes(MICRO_BATCHES, count), overlap) for group in meet(size)]
    together([member.train for member in members])
    flat = [np.concatenate([own.flatten().numpy() for own in one]) for one in gradients()]
    expected = reference(flat, count)
    for member in members:
        assert member.sums.numpy().tobytes() == expected.tobytes()
    counted = [member.ledger.sums() for member in members]
    assert sum(loss for loss, _ in counted) == sum(range(MICRO_BATCHES))
    assert sum(tokens for _, tokens in counted) == MICRO_BATCHES


def test_running_sums_are_received_in_order_sent() -> None:
    """The member goes on with lane 5 before lane 3; the giver gives lane 3 first, and NCCL knows no tags."""
    taken: list[int] = []

    def take(tensor: torch.Tensor, member: int, tag: int) -> Operation:
        taken.append(tag // 2)
        return Operation(is_done=True)

    lanes = Lanes(12, 6)
    runs = (Run(5, (11,), source=0, target=2), Run(3, (7,), source=0))
    deal = Assignment((), ((Run(3, (), target=1), Run(5, (), target=1)), runs, ()), ())
    group: Any = SimpleNamespace(rank=1, device=torch.device("cpu"), keeps_order=True, receive=take)
    passing = Passing(Accumulation([torch.nn.Parameter(torch.zeros(3))], lanes=lanes), lanes)
    passing.expect(group, deal)
    assert taken == [], "it would hold up what is given before"
    assert passing.has_arrived(group, runs[0]) and taken == [3, 3, 5, 5]
    passing.accept(runs[0])
    assert passing.has_arrived(group, runs[1]) and taken == [3, 3, 5, 5]


def test_precomputed_gradients_are_added_in_order(meet: Meet) -> None:
    """The first of two members is slow: the second has four micro-batches left to put on top of its running sum."""
    members = [Member(group, Lanes(MICRO_BATCHES, 1), True) for group in meet(2)]
    members[0].pause_s = 0.02
    together([member.train for member in members])
    flat = [np.concatenate([own.flatten().numpy() for own in one]) for one in gradients()]
    assert [member.most_ahead for member in members] == [0, AHEAD]
    assert all(member.sums.numpy().tobytes() == reference(flat, 1).tobytes() for member in members)
    assert members[1].ledger.sums() == (sum(range(6, 12)), 6)


def test_waiting_member_notices_departed_giver(meet: Meet) -> None:
    one, other = (Member(group, Lanes(MICRO_BATCHES, 3), False) for group in meet(2, to_be_left=True))
    threading.Timer(0.1, one.group.close).start()
    with pytest.raises(GroupBroken, match="onnection"):
        other.train()


def test_waiting_member_leaves_at_once(meet: Meet) -> None:
    _, other = (Member(group, Lanes(MICRO_BATCHES, 3), False) for group in meet(2, to_be_left=True))
    other.ledger.assign_lanes(initial_assignment(2, other.lanes), 1)
    other.passing.expect(other.group, initial_assignment(2, other.lanes))
    parked, started_s = len(group_module._parked), time.monotonic()
    other.group.close()
    assert len(group_module._parked) == parked and time.monotonic() - started_s < 0.5
