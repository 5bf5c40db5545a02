"""What a worker's mark says of the end of training, and what it tells of stragglers."""

from __future__ import annotations

import itertools
import sys
import time
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.agents.node import committed
from unicrond.agents.protocol.marks import Marker
from unicrond.agents.protocol.messages import GroupMembership, Reporter
from unicrond.agents.trainer.detection.baseline import LAST_WRITE_US
from unicrond.agents.trainer.detection.checksum import checksum, checksum_of_pieces
from unicrond.agents.trainer.detection.observing import Detection, Sighting
from unicrond.agents.trainer.lifecycle.deal import Deal
from unicrond.agents.trainer.lifecycle.ledger import ReplicaAccount, Total
from unicrond.agents.trainer.process import determinism
from unicrond.agents.trainer.process.context import WorkerSettings
from unicrond.agents.trainer.states.saving import Saving
from unicrond.events.vocabulary import Member, StoreAddress, StragglerObserved, TaskSpec

REPORTER = Reporter(node="n", task="t", worker="t.1")

START_US = 600_000_000


@pytest.mark.parametrize(
    ("longest_s", "limit_us"),
    [(None, START_US + LAST_WRITE_US), (0.0, 2 * START_US), (20.0, START_US + 6 * 20_000_000)],
    ids=["others write", "it wrote none yet", "it has written"],
)
def test_final_save_limit_is_below_collective_timeout(longest_s: float | None, limit_us: int) -> None:
    mark, limits_s = Marker(None), list[float]()
    patience = WorkerSettings(fault_wait_s=120.0, lease_s=60.0, collective_timeout_s=600.0)
    context: Any = SimpleNamespace(
        settings=patience, launch=SimpleNamespace(spec=TaskSpec(name="t"), reporter=REPORTER), mark=mark, channel=None
    )
    group: Any = SimpleNamespace(set_timeout=limits_s.append)
    Detection(context, []).start_final_save(13, group, longest_s)
    assert mark.limit_us == limit_us, "nothing is known of the iterations"
    (limit_s,) = limits_s
    assert limit_s * 1e6 > 10 * limit_us


def told_of(shard: int, rank: int) -> list[Any]:
    """What a worker sends of 60 iterations of two replicas of two shards, in which the second replica is slow."""
    sent: list[Any] = []
    patience = WorkerSettings(fault_wait_s=120.0, lease_s=60.0, collective_timeout_s=600.0)
    context: Any = SimpleNamespace(
        settings=patience,
        launch=SimpleNamespace(spec=TaskSpec(name="t"), reporter=REPORTER),
        mark=Marker(None),
        channel=SimpleNamespace(send=sent.append),
    )
    detection = Detection(context, [])
    members = tuple(
        Member(worker=f"t.{number + 1}", node=f"n{number // 2}", replica=number // 2, shard=number % 2)
        for number in range(4)
    )
    membership = GroupMembership(
        generation=2, members=members, joiners=(), urgent=False, store=StoreAddress(host="127.0.0.1", port=1)
    )
    account = ReplicaAccount(1, micro_batches=4, samples=4, samples_digest=0, loss_sum=1.0, tokens=1, repeated=0)
    total = Total(2, (account, account))
    for iteration in range(1, 61):
        rows = [Sighting(400_000, 4, 1.0, 0).row(), Sighting(500_000, 4, 1.0, 0).row()]
        detection.record_agreement(rows)
        detection.judge(iteration, total, membership, shard, rank, Deal())
    return sent


@pytest.mark.parametrize("shard", [0, 1])
def test_shards_compare_with_peers_and_first_replica_reports(shard: int, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(10**9, 500_000)
    monkeypatch.setattr("unicrond.agents.trainer.detection.straggler_reports.now_us", lambda: next(clock))
    (told,) = told_of(shard, rank=0)
    assert isinstance(told, StragglerObserved)
    assert (told.straggler, told.straggler_node, told.rank) == (f"t.{3 + shard}", "n1", 2 + shard)
    assert told.factor == pytest.approx(1.25) and (told.compute_us, told.others_us) == (125_000, 100_000)
    assert not told_of(shard, rank=1)


def test_busy_section_counts_as_no_compute() -> None:
    """An evaluation in the middle of a micro-batch makes nobody a straggler."""
    patience = WorkerSettings(fault_wait_s=120.0, lease_s=60.0, collective_timeout_s=600.0)
    context: Any = SimpleNamespace(
        settings=patience,
        launch=SimpleNamespace(spec=TaskSpec(name="t"), reporter=REPORTER),
        mark=Marker(None),
        channel=SimpleNamespace(send=lambda _: None),
    )
    detection, evaluation_s = Detection(context, []), 0.05
    began_s = time.monotonic()
    detection.compute_time.begin()
    with detection.section("evaluation", 60.0):
        time.sleep(evaluation_s)
    detection.compute_time.end(1)
    assert detection.compute_time.compute_us <= (time.monotonic() - began_s - evaluation_s) * 1e6


def test_iteration_that_stood_still_for_a_checkpoint_is_not_plain() -> None:
    context: Any = SimpleNamespace(
        settings=WorkerSettings(fault_wait_s=120.0, lease_s=60.0, collective_timeout_s=600.0),
        launch=SimpleNamespace(spec=TaskSpec(name="t"), reporter=REPORTER),
        mark=Marker(None),
        channel=SimpleNamespace(send=lambda _: None),
    )
    group: Any = SimpleNamespace(set_timeout=lambda _: None)
    for stand_still in (lambda d: d.saving(), lambda d: d.section("checkpoint", 60.0)):
        detection = Detection(context, [])
        assert detection.is_plain(100)
        with stand_still(detection):
            time.sleep(0.001)
        assert not detection.is_plain(1000)
        assert detection.is_plain(60_000_000), "a little of it counts as none"
        assert not detection.complete(committed(1, 1), is_writing=False).is_plain
        detection.commit(1, 1000, group)
        assert detection.complete(committed(1, 2), is_writing=False).is_plain, "the next one"
        assert not detection.complete(committed(1, 2), is_writing=True).is_plain, "it is written beside the iterations"


@pytest.mark.parametrize("quick", [False, True])
def test_write_beside_the_iterations_is_told_with_each_of_them(*, quick: bool) -> None:
    """Also one that began after one commit and ended before the next, or that nobody has collected yet."""
    sealing = Future[None]()
    saving: Any = Saving.__new__(Saving)
    write = SimpleNamespace(is_busy=False, is_late=False)
    saving._sealing, saving._storage, saving._writes = sealing, write, True
    told = [] if quick else [saving.has_written()]
    write.is_busy = True
    sealing.set_result(None)
    told += [] if quick else [saving.has_written()]
    write.is_busy = False
    assert [*told, saving.has_written()] == [True] * (len(told) + 1)
    assert not saving.has_written()
    saving._sealing, write.is_busy = None, True
    assert saving.has_written(), "it was collected, and is not over"
    write.is_late = True
    saving.has_written()
    assert not saving.has_written(), "one that hangs keeps nobody busy"


def test_commit_carries_checksum_common_to_replicas() -> None:
    """Of the parameters that its iteration began with; also where it is told again, in another group."""
    context: Any = SimpleNamespace(
        settings=WorkerSettings(120.0, 60.0, 600.0, checksum_every=2),
        launch=SimpleNamespace(spec=TaskSpec(name="t"), reporter=REPORTER),
        mark=Marker(None), channel=SimpleNamespace(send=lambda _: None),
    )  # fmt: skip
    detection = Detection(context, [torch.nn.Parameter(torch.ones(3))])
    told = []
    for iteration in (1, 2, 3):
        own = detection.observe(iteration, 4, 1.0)
        if detection.checksums_due(iteration):
            detection.record_sums(77)
        detection.record_agreement([own.row(), own.row()])
        told.append(detection.with_checksums(committed(1, iteration)))
    first, second, third = (commit.checksums for commit in told)
    assert first is None and third is None
    assert second is not None and (second.iteration, second.parameters > 0, second.sums) == (1, True, 77)
    own = detection.observe(4, 4, 1.0)
    detection.record_agreement([own.row(), replace(own, checksum=own.checksum + 1).row()])
    assert detection.with_checksums(committed(1, 4)).checksums is None, "a replica has other parameters"


def test_deviating_environment_is_described() -> None:
    own = determinism.environment()
    assert torch.__version__ in own and determinism.environment_number(own) == determinism.environment_number(own) > 0
    here, there = determinism.environment_number(own), determinism.environment_number("another GPU")
    assert determinism.deviating_ranks([here, here]) == ()
    assert determinism.deviating_ranks([here, there, here]) == (1,)
    assert determinism.deviating_ranks([0, here, 0, there]) == (3,), "older hooks say nothing of it"
    torch.set_float32_matmul_precision("high")
    try:
        assert determinism.environment() == f"{own}, high precision of float32"
    finally:
        torch.set_float32_matmul_precision("highest")
    told = determinism.describe_deviation((1, 2), 1, own)
    assert told == f"replicas 1, 2 compute on something else than replica 0 (this one too: {own})"
    assert "this one not" in determinism.describe_deviation((1,), 0, own)


def test_environment_names_loaded_release_of_megatron_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Releases train differently, so a joiner with another is noticed; hooks before this one ran with 0.16 alone."""
    monkeypatch.delitem(sys.modules, "megatron.core", raising=False)
    without = determinism.environment()
    for version, text in (("0.16.1", ""), ("0.17.0", ", megatron-core 0.17.0"), ("0.19.0", ", megatron-core 0.19.0")):
        monkeypatch.setitem(sys.modules, "megatron.core", SimpleNamespace(__version__=version))
        assert determinism.environment() == f"{without}{text}"


def test_checksum_is_independent_of_pieces() -> None:
    one, other = torch.arange(10.0), torch.arange(10.0, 13.0)
    whole = checksum([one, other])
    assert checksum_of_pieces([[one], [other]]) == checksum_of_pieces([one.split(3), other.split(2)]) == whole
    assert checksum_of_pieces([[other], [one]]) != whole
    one[3] += 1e-6
    assert checksum([one, other]) != whole


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([(5, 5), (5, 5)], ""),
        ([(5, 5), (5, 6), (7, 7)], "on replica 1 a micro-batch computed twice has different bits"),
        ([(5, 5), (6, 6), (5, 5), (6, 6)], "replicas 1, 3 compute other bits than replica 0"),
    ],
    ids=["the same", "unsteady", "of another type"],
)
def test_checksum_comparison_describes_deviation(rows: list[tuple[int, int]], told: str) -> None:
    found = determinism.compare_checksums(rows)
    assert found.startswith(told) and bool(found) == bool(told)


def test_scaled_gradient_norms_are_not_compared() -> None:
    """They double with the scale, and are infinite where it was too large."""
    context: Any = SimpleNamespace(
        settings=WorkerSettings(120.0, 60.0, 600.0), launch=SimpleNamespace(spec=TaskSpec(name="t"), reporter=REPORTER),
        mark=Marker(None), channel=None,
    )  # fmt: skip
    assert Detection(context, [], loss_scaled=True).observe(1, 4, float("inf")).norm == 0.0
    assert Detection(context, []).observe(1, 4, 2.0).norm == 2.0
