"""A group is left at once, whatever is in flight."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from agents.trainer import group as group_module
from agents.trainer.channel import AgentChannel
from agents.trainer.group import Broken, Group, Superseded, form
from agents.trainer.messages import Launch, Membership
from events.vocabulary import StoreAddress, TaskSpec

CPU = torch.device("cpu")


@pytest.fixture
def store() -> Iterator[StoreAddress]:
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    yield StoreAddress(host="127.0.0.1", port=server.port)


@pytest.fixture
def channels() -> Iterator[tuple[AgentChannel, AgentChannel]]:
    """Channels of two workers without an agent: they wait and are woken."""
    launch = Launch(
        worker="t.1", task="t", node="n", address="127.0.0.1", agent_socket="/nowhere", replica=0, shard=0,
        store=StoreAddress(host="127.0.0.1", port=1), spec=TaskSpec(name="t"),
    )  # fmt: skip
    pair = (AgentChannel(launch, 60), AgentChannel(launch, 60))
    yield pair
    for channel in pair:
        channel._wake_read.close()
        channel._wake_write.close()


def meet(store: StoreAddress, channel: AgentChannel, rank: int, size: int = 2, timeout_s: float | None = 30) -> Group:
    return form(
        channel=channel, store=store, prefix="gen/t/1/0", generation=1, rank=rank, size=size, address="127.0.0.1",
        device=CPU, collective_timeout_s=60, timeout_s=timeout_s,
    )  # fmt: skip


def both(store: StoreAddress, channels: tuple[AgentChannel, AgentChannel]) -> tuple[Group, Group]:
    groups: dict[int, Group] = {}
    other = threading.Thread(target=lambda: groups.update({1: meet(store, channels[1], 1)}))
    other.start()
    groups[0] = meet(store, channels[0], 0)
    other.join(30)
    return groups[0], groups[1]


def urgent(generation: int, store: StoreAddress) -> Membership:
    return Membership(generation=generation, members=(), joiners=(), urgent=True, store=store)


def tell(channel: AgentChannel, membership: Membership) -> None:
    channel._memberships[membership.generation] = membership
    channel.wake()


def test_closing_with_an_operation_in_flight_ends_it_here_and_there(
    store: StoreAddress, channels: tuple[AgentChannel, AgentChannel]
) -> None:
    one, other = both(store, channels)
    tensor = torch.ones(1000)
    one.all_reduce(tensor)
    parked, started = len(group_module._parked), time.monotonic()
    one.close()
    assert len(group_module._parked) == parked, "the operation did not end, the group had to be parked"
    assert time.monotonic() - started < group_module._CLOSE_TIMEOUT_S
    other.all_reduce(tensor)
    with pytest.raises(Broken, match="Connection"):
        other.finish()
    other.close()


def test_an_urgent_membership_ends_the_wait_for_a_silent_peer(
    store: StoreAddress, channels: tuple[AgentChannel, AgentChannel]
) -> None:
    one, other = both(store, channels)
    one.all_gather([1, 2])
    threading.Timer(0.05, tell, (channels[0], urgent(2, store))).start()
    with pytest.raises(Superseded):
        one.finish()
    one.close()
    other.close()


def test_a_group_of_one_needs_nobody(channels: tuple[AgentChannel, AgentChannel]) -> None:
    alone = meet(StoreAddress(host="127.0.0.1", port=1), channels[0], 0, size=1)
    rows = alone.all_gather([7])
    alone.finish()
    assert rows.read() == [[7]]
    alone.close()


def test_forming_is_given_up_for_a_newer_membership(
    store: StoreAddress, channels: tuple[AgentChannel, AgentChannel]
) -> None:
    threading.Timer(0.05, tell, (channels[0], urgent(2, store))).start()
    with pytest.raises(Superseded):
        meet(store, channels[0], 0)


def test_forming_is_bounded(store: StoreAddress, channels: tuple[AgentChannel, AgentChannel]) -> None:
    with pytest.raises(Broken, match=r"within 0\.1 s"):
        meet(store, channels[0], 0, timeout_s=0.1)
