"""The shards of a replica say one word of it, also where one of them has an older hook."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch.distributed as dist

from unicrond.agents.trainer.lifecycle.results import ReplicaWord
from unicrond.agents.trainer.process.replica import ReplicaWorld

T = TypeVar("T")


class VotingShards:
    """Shards that vote with each other, each in a thread: what an all-reduce comes to, without processes."""

    def __init__(self, size: int, *, can_agree: bool) -> None:
        self.votes: list[Sequence[int]] = [()] * size
        self.meet = threading.Barrier(size)
        self.worlds = [self.world(rank, can_agree) for rank in range(size)]

    def world(self, rank: int, can_agree: bool) -> ReplicaWorld:
        world = ReplicaWorld.__new__(ReplicaWorld)
        world.size, world.shard, world.can_agree = len(self.votes), rank, can_agree

        def vote(values: Sequence[int], operation: object) -> list[int]:
            self.votes[rank] = list(values)
            self.meet.wait(10)
            assert len({len(votes) for votes in self.votes}) == 1, "they reduce tensors of different sizes"
            columns = list(zip(*self.votes, strict=True))
            self.meet.wait(10)
            return [(min if operation is dist.ReduceOp.MIN else max)(column) for column in columns]

        world._vote = vote  # type: ignore[method-assign]
        return world

    def all(self, *turns: Callable[[ReplicaWorld], T]) -> list[T]:
        with ThreadPoolExecutor(len(turns)) as pool:
            return [done.result() for done in [pool.submit(*pair) for pair in zip(turns, self.worlds, strict=True)]]


def word(*values: Any) -> Callable[[ReplicaWorld], ReplicaWord]:
    return lambda world: world.agree(ReplicaWord(*values))


def older_vote(value: bool) -> Callable[[ReplicaWorld], bool]:
    """`all_true` as it was."""
    return lambda world: bool(world._vote([int(value)], dist.ReduceOp.MIN)[0])


def test_replica_says_what_its_slowest_shard_takes() -> None:
    shards = VotingShards(2, can_agree=True)
    assert shards.all(word(False, 50, 7), word(False, 80, 7)) == [ReplicaWord(False, 80, 7)] * 2
    assert shards.all(word(True, 50, 7), word(False, 0, 8)) == [ReplicaWord(True, 0, 0)] * 2, "unknown, and not alike"


def test_replica_with_an_older_shard_says_nothing_of_speed() -> None:
    shards = VotingShards(2, can_agree=False)
    assert shards.all(word(False, 50, 7), older_vote(True)) == [ReplicaWord(False), True]
    assert shards.all(word(False, 50, 7), older_vote(False)) == [ReplicaWord(True), False], "it asks for the end"
    assert shards.all(word(True, 50, 7), older_vote(True)) == [ReplicaWord(True), False]
