"""What a worker's mark says of the end of training, and what it tells of stragglers."""

from __future__ import annotations

import itertools
import time
from types import SimpleNamespace
from typing import Any

import pytest

from agents.protocol.marks import Marker
from agents.protocol.messages import Membership, Straggles
from agents.trainer.detection.baseline import LAST_WRITE_US
from agents.trainer.detection.observing import Detection, Sighting
from agents.trainer.ledger import Account, Total
from agents.trainer.process.context import Patience
from events.vocabulary import Member, StoreAddress, TaskSpec

START_US = 600_000_000


@pytest.mark.parametrize(
    ("longest_s", "limit_us"),
    [(None, START_US + LAST_WRITE_US), (0.0, 2 * START_US), (20.0, START_US + 6 * 20_000_000)],
    ids=["others write", "it wrote none yet", "it has written"],
)
def test_the_end_has_a_limit_and_no_collective_gives_up_before_it(longest_s: float | None, limit_us: int) -> None:
    mark, limits_s = Marker(None), list[float]()
    patience = Patience(fault_wait_s=120.0, lease_s=60.0, collective_timeout_s=600.0)
    context: Any = SimpleNamespace(
        patience=patience, launch=SimpleNamespace(spec=TaskSpec(name="t")), mark=mark, channel=None
    )
    group: Any = SimpleNamespace(limit=limits_s.append)
    Detection(context, []).ending(13, group, longest_s)
    assert mark.limit_us == limit_us, "nothing is known of the iterations"
    (limit_s,) = limits_s
    assert limit_s * 1e6 > 10 * limit_us


def told_of(shard: int, rank: int) -> list[Any]:
    """What a worker sends of 60 iterations of two replicas of two shards, in which the second replica is slow."""
    sent: list[Any] = []
    patience = Patience(fault_wait_s=120.0, lease_s=60.0, collective_timeout_s=600.0)
    context: Any = SimpleNamespace(
        patience=patience,
        launch=SimpleNamespace(spec=TaskSpec(name="t")),
        mark=Marker(None),
        channel=SimpleNamespace(send=sent.append),
    )
    detection = Detection(context, [])
    members = tuple(
        Member(worker=f"t.{number + 1}", node=f"n{number // 2}", replica=number // 2, shard=number % 2)
        for number in range(4)
    )
    membership = Membership(
        generation=2, members=members, joiners=(), urgent=False, store=StoreAddress(host="127.0.0.1", port=1)
    )
    account = Account(1, micro_batches=4, samples=4, samples_digest=0, loss_sum=1.0, tokens=1, redone=0)
    total = Total(2, (account, account))
    for iteration in range(1, 61):
        rows = [Sighting(400_000, 4, 1.0, 0).row(), Sighting(500_000, 4, 1.0, 0).row()]
        detection.agreed(rows)
        detection.judge(iteration, total, membership, shard, rank)
    return sent


@pytest.mark.parametrize("shard", [0, 1])
def test_shards_are_compared_with_their_like_and_the_first_replica_tells(
    shard: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count(10**9, 500_000)
    monkeypatch.setattr("agents.trainer.detection.observing.now_us", lambda: next(clock))
    (told,) = told_of(shard, rank=0)
    assert isinstance(told, Straggles)
    assert (told.straggler, told.straggler_node, told.rank) == (f"t.{3 + shard}", "n1", 2 + shard)
    assert told.factor == pytest.approx(1.25) and (told.compute_us, told.others_us) == (125_000, 100_000)
    assert not told_of(shard, rank=1)


def test_who_is_busy_does_not_compute() -> None:
    """An evaluation in the middle of a micro-batch makes nobody a straggler."""
    patience = Patience(fault_wait_s=120.0, lease_s=60.0, collective_timeout_s=600.0)
    context: Any = SimpleNamespace(
        patience=patience,
        launch=SimpleNamespace(spec=TaskSpec(name="t")),
        mark=Marker(None),
        channel=SimpleNamespace(send=lambda _: None),
    )
    detection, evaluation_s = Detection(context, []), 0.05
    began_s = time.monotonic()
    detection.own_time.begin()
    with detection.busy("evaluation", 60.0):
        time.sleep(evaluation_s)
    detection.own_time.end(1)
    assert detection.own_time.taken_us <= (time.monotonic() - began_s - evaluation_s) * 1e6
