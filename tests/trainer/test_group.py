"""A group is left at once, whatever is in flight."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from unicrond.agents.protocol.messages import GroupMembership, Launch
from unicrond.agents.trainer.groups import forming
from unicrond.agents.trainer.groups import group as group_module
from unicrond.agents.trainer.groups.forming import Attempt, GroupPlacement
from unicrond.agents.trainer.groups.group import ShardGroup, form
from unicrond.agents.trainer.groups.rendezvous_store import StoreConnections
from unicrond.agents.trainer.groups.socket_peers import parse_addresses
from unicrond.agents.trainer.groups.standby import Standby
from unicrond.agents.trainer.lifecycle.effects import StartClock
from unicrond.agents.trainer.lifecycle.results import GroupBroken, MembershipSuperseded
from unicrond.agents.trainer.loop.handlers import HANDLERS
from unicrond.agents.trainer.process.channel import AgentChannel
from unicrond.events.vocabulary import StoreAddress, TaskSpec

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


def meet(
    store: StoreAddress, channel: AgentChannel, rank: int, size: int = 2, timeout_s: float | None = 30
) -> ShardGroup:
    place = GroupPlacement(store, "gen/t/1/0", rank, size, "127.0.0.1", CPU, collective_timeout_s=60)
    return form(place, 1, channel, timeout_s)


def both(store: StoreAddress, channels: tuple[AgentChannel, AgentChannel]) -> tuple[ShardGroup, ShardGroup]:
    groups: dict[int, ShardGroup] = {}
    other = threading.Thread(target=lambda: groups.update({1: meet(store, channels[1], 1)}))
    other.start()
    groups[0] = meet(store, channels[0], 0)
    other.join(30)
    return groups[0], groups[1]


def urgent(generation: int, store: StoreAddress) -> GroupMembership:
    return GroupMembership(generation=generation, members=(), joiners=(), urgent=True, store=store)


def tell(channel: AgentChannel, membership: GroupMembership) -> None:
    channel._memberships[membership.generation] = membership
    channel.wake()


def test_close_ends_operation_in_flight_at_both_ends(
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
    with pytest.raises(GroupBroken, match="Connection"):
        other.finish()
    other.close()


def test_broken_group_names_lost_member(store: StoreAddress, channels: tuple[AgentChannel, AgentChannel]) -> None:
    """Until a connection has ended, and once the group is left, none. Which of the two connected is chance."""
    one, other = both(store, channels)
    introduced = one.exchange_ends(), other.exchange_ends()
    for group, heard in zip((one, other), introduced, strict=True):
        group.finish()
        group.learn_ends(heard)
    assert one.ends.lost_members() == other.ends.lost_members() == []
    other.all_reduce(torch.ones(1000))
    ends = other.ends
    one.close()
    with pytest.raises(GroupBroken, match="Connection") as broken:
        other.finish()
    assert ends.lost_members() == [0]
    assert ends.find_member(str(broken.value)) == 0
    other.close()
    assert one.ends.lost_members() == other.ends.lost_members() == []


def test_urgent_membership_ends_wait_for_silent_peer(
    store: StoreAddress, channels: tuple[AgentChannel, AgentChannel]
) -> None:
    one, other = both(store, channels)
    one.all_gather([1, 2])
    threading.Timer(0.05, tell, (channels[0], urgent(2, store))).start()
    with pytest.raises(MembershipSuperseded):
        one.finish()
    one.close()
    other.close()


@pytest.mark.parametrize(
    ("error", "addresses"),
    [
        (
            "[/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:31883: Connection reset by peer.",
            ("127.0.0.1 35708", "127.0.0.1 31883"),
        ),
        (
            "[/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.1.2.3]:38623",
            ("10.1.2.3 57238", "10.1.2.3 38623"),
        ),
        (
            "[/gloo/transport/tcp/pair.cc:547] Connection closed by peer [fe80::1%eth0]:38623.",
            ("fe80::1 57238", "fe80::1 38623"),
        ),
        ("Application timeout caused pair closure", ()),
        ("NCCL error: remote error", ()),
    ],
)
def test_address_parser_reads_errors(error: str, addresses: tuple[str, ...]) -> None:
    assert parse_addresses(error) == addresses


def test_group_of_one_needs_no_peer(channels: tuple[AgentChannel, AgentChannel]) -> None:
    alone = meet(StoreAddress(host="127.0.0.1", port=1), channels[0], 0, size=1)
    rows = alone.all_gather([7])
    alone.finish()
    assert rows.read() == [[7]]
    alone.close()


def test_newer_membership_ends_group_formation(
    store: StoreAddress, channels: tuple[AgentChannel, AgentChannel]
) -> None:
    threading.Timer(0.05, tell, (channels[0], urgent(2, store))).start()
    with pytest.raises(MembershipSuperseded):
        meet(store, channels[0], 0)


def test_group_formation_is_bounded(store: StoreAddress, channels: tuple[AgentChannel, AgentChannel]) -> None:
    with pytest.raises(GroupBroken, match=r"within 0\.1 s"):
        meet(store, channels[0], 0, timeout_s=0.1)


def test_group_forms_with_older_hook(store: StoreAddress, channels: tuple[AgentChannel, AgentChannel]) -> None:
    """It reads every member's port and value itself, and sends the ports of its connections with its position."""
    made: list[object] = []

    def older() -> None:
        theirs = dist.PrefixStore("gen/t/1/0", StoreConnections().acquire(store))
        device, listening = forming._listen("127.0.0.1")
        theirs.set("standby/1", "-")
        theirs.set("port/1", listening.partition(" ")[2])
        theirs.wait(["port/0", "port/1"], timedelta(seconds=30))
        assert all(int(port) for port in theirs.multi_get(["port/0", "port/1"]))
        made.append(forming._connect_gloo(theirs, place(store, "gen/t/1/0", 1), device))

    other = threading.Thread(target=older)
    other.start()
    group = meet(store, channels[0], 0)
    other.join(30)
    assert made and group._formed is not None and group._formed.sockets
    assert group.exchange_ends() is None
    rows = [torch.zeros(2, dtype=torch.int64) for _ in range(2)]
    theirs = made[0].allgather([rows], [torch.tensor([3, 4])])  # type: ignore[attr-defined]
    told = group.all_gather([1, 2])
    group.finish()
    theirs.wait()
    assert told.read() == [[1, 2], [3, 4]]
    group.close()


@pytest.mark.parametrize("port", ["4711", "+4711"], ids=["without a sign", "with numbers"])
def test_group_refuses_older_hook_without_lanes(
    store: StoreAddress, channels: tuple[AgentChannel, AgentChannel], port: str
) -> None:
    """A hook before lanes sums integers; it reads our port all the same."""
    theirs = dist.PrefixStore("gen/t/1/0", StoreConnections().acquire(store))
    theirs.set("standby/1", "-")
    theirs.set("port/1", port)
    with pytest.raises(forming.SumsMismatch, match=r"^members 1 of the group have an older hook, .* numerics: follow$"):
        form(replace(place(store, "gen/t/1/0", 0), lanes=True), 1, channels[0], 30)
    assert int(theirs.get("port/0")) > 1023


@pytest.mark.parametrize("lanes", [True, False])
def test_group_refuses_older_hook_whose_fp16_gradients_are_not_divided(
    store: StoreAddress, channels: tuple[AgentChannel, AgentChannel], lanes: bool
) -> None:
    theirs = dist.PrefixStore("gen/t/1/0", StoreConnections().acquire(store))
    theirs.set("standby/1", "-")
    theirs.set("port/1", "+04711" if lanes else "+4711")
    with pytest.raises(
        forming.SumsMismatch, match=r"^members 1 .* does not divide fp16 gradients: have their nodes leave and join$"
    ):
        form(replace(place(store, "gen/t/1/0", 0), lanes=lanes, divided=True), 1, channels[0], 30)
    assert int(theirs.get("port/0")) > 1023


@pytest.mark.parametrize("divided", [False, True])
def test_members_with_lanes_form_group(
    store: StoreAddress, channels: tuple[AgentChannel, AgentChannel], divided: bool
) -> None:
    places = [replace(place(store, "gen/t/1/0", rank), lanes=True, divided=divided) for rank in range(2)]
    made = [Attempt(each, channels[each.rank]) for each in places]
    for attempt in made:
        attempt._thread.join(30)
    assert all(attempt.succeeded for attempt in made)
    for attempt in made:
        attempt.abandon()


def test_store_connection_is_reused(store: StoreAddress, channels: tuple[AgentChannel, AgentChannel]) -> None:
    stores = [StoreConnections(), StoreConnections()]
    kept = []
    for prefix in ("gen/t/1/0", "gen/t/2/0"):
        made = [Attempt(place(store, prefix, rank), channels[rank], stores=stores[rank]) for rank in range(2)]
        for attempt in made:
            attempt._thread.join(30)
        assert all(attempt.succeeded for attempt in made)
        for attempt in made:
            attempt.abandon()
        kept.append([one._idle for one in stores])
    assert kept[0] == kept[1] and None not in kept[0]
    ended = _Ended()
    stores[0].release(store, ended)
    assert stores[0].acquire(store) is not ended


class _Ended:
    """A connection whose store has been replaced."""

    def check(self, _keys: list[str]) -> bool:
        raise dist.DistNetworkError("Connection reset by peer")


# --- standby groups ------------------------------------------------------------------------------


def place(store: StoreAddress, prefix: str, rank: int, size: int = 2) -> GroupPlacement:
    return GroupPlacement(store, prefix, rank, size, "127.0.0.1", CPU, collective_timeout_s=60)


def attempts(
    store: StoreAddress, channels: tuple[AgentChannel, AgentChannel], prefix: str,
    standby: tuple[tuple[str, Attempt] | None, tuple[str, Attempt] | None] = (None, None),
) -> list[Attempt]:  # fmt: skip
    """Both members' attempts, when they are over."""
    made = [Attempt(place(store, prefix, rank), channels[rank], standby[rank]) for rank in range(2)]
    for channel, attempt in zip(channels, made, strict=True):
        assert channel.wait(lambda attempt=attempt: attempt.over, 30)  # type: ignore[misc]
    return made


def test_standby_group_is_used_if_all_have_it(store: StoreAddress, channels: tuple[AgentChannel, AgentChannel]) -> None:
    one, other = attempts(store, channels, "standby/t/1/0/2")
    standing = one._formed
    assert standing is not None
    used = attempts(store, channels, "gen/t/2/0", (("1/2", one), ("1/2", other)))
    assert used[0].claim()[0] is standing
    assert not one.succeeded, "it is used once"
    used[1].abandon()


@pytest.mark.parametrize("theirs", [None, "1/1"])
def test_incomplete_standby_group_is_left_unused(
    store: StoreAddress, channels: tuple[AgentChannel, AgentChannel], theirs: str | None
) -> None:
    one, other = attempts(store, channels, "standby/t/1/0/2")
    formed = attempts(store, channels, "gen/t/2/0", (("1/2", one), None if theirs is None else (theirs, other)))
    assert all(attempt.succeeded for attempt in formed)
    assert one.succeeded, "it was left alone"
    for attempt in (one, other, *formed):
        attempt.abandon()


def test_standby_groups_omit_one_replica_each(store: StoreAddress, channels: tuple[AgentChannel, AgentChannel]) -> None:
    standbys = [Standby(channel, 8) for channel in channels]
    for rank, standby in enumerate(standbys):
        standby.prepare(1, ["t.1", "t.2", "t.3"], place(store, "standby/t/1/0", rank, 3))
    for rank, standby in enumerate(standbys):
        assert channels[rank].wait(lambda standby=standby: standby.offer(["t.1", "t.2"]), 30)  # type: ignore[misc]
        assert standby.offer(["t.1", "t.3"]) is None, "t.3 does not build any"
        assert standby.offer(["t.1", "t.2", "t.3"]) is None
    for rank, standby in enumerate(standbys):
        standby.prepare(2, ["t.1", "t.2"], place(store, "standby/t/2/0", rank))
        assert standby.offer(["t.1"]) is None, "a group of one needs nobody"
        standby.close()


def test_group_leaves_foreign_connection_open(store: StoreAddress, channels: tuple[AgentChannel, AgentChannel]) -> None:
    """A connection that somebody else in the process makes while a group forms is none of the group's."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        first = Attempt(place(store, "gen/t/1/0", 0), channels[0])
        with socket.create_connection(listener.getsockname()) as stranger, listener.accept()[0] as theirs:
            second = Attempt(place(store, "gen/t/1/0", 1), channels[1])
            for channel, attempt in zip(channels, (first, second), strict=True):
                assert channel.wait(lambda attempt=attempt: attempt.over, 30)  # type: ignore[misc]
            assert first._formed and first._formed.sockets and second._formed and second._formed.sockets
            first.abandon()
            second.abandon()
            stranger.sendall(b"still here")
            assert theirs.recv(100) == b"still here"


def test_member_reports_once_that_it_waits(
    store: StoreAddress, channels: tuple[AgentChannel, AgentChannel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_module, "WAITS_S", 0.02)
    one, other = both(store, channels)
    said = threading.Semaphore(0)
    one.on_wait = said.release
    one.all_gather([1])
    late = threading.Thread(target=one.finish)
    late.start()
    assert said.acquire(timeout=10)
    other.all_gather([2])
    other.finish()
    late.join(10)
    assert not said.acquire(blocking=False)
    one.close()
    other.close()


def test_slow_collectives_in_iteration_report_no_wait() -> None:
    """Else each one would be an entry of the log, for as long as the group trains."""
    group = ShardGroup(None, 1, 0, 1, channel=Any, device=CPU)
    group.on_wait = lambda: None
    here: Any = SimpleNamespace(detection=SimpleNamespace(start_iteration=lambda _: None), group=group)
    HANDLERS[StartClock](here, StartClock(1))
    assert group.on_wait is None
