"""What a difference between replicas means: a replica's fault, or the program's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unicrond.agents.protocol.marks import Marker
from unicrond.agents.protocol.messages import Reporter
from unicrond.agents.trainer.detection.checksum import ParameterDigest
from unicrond.agents.trainer.detection.divergence import (
    ReplicaDifference,
    gradients_number,
    judge_gradients,
    judge_parameters,
)
from unicrond.agents.trainer.detection.observing import Detection
from unicrond.agents.trainer.loop.comparison import ENVIRONMENT_REPORTS_MAX, ReplicaComparison
from unicrond.agents.trainer.process.context import WorkerSettings
from unicrond.events.vocabulary import CorruptionSuspected, DivergenceObserved, TaskSpec

RANKS = st.integers(3, 12)
NAN, INFINITY = float("nan"), float("inf")


def number(norm: float, bits: int = 7) -> int:
    return gradients_number(bits, norm)


@given(RANKS, st.data())
def test_odd_replicas_are_those_that_the_majority_is_not(replicas: int, data: st.DataObject) -> None:
    odd = data.draw(st.sets(st.integers(0, replicas - 1), min_size=1, max_size=(replicas - 1) // 2))
    checksums = [100 + rank if rank in odd else 5 for rank in range(replicas)]
    assert judge_parameters(checksums, ()) == ReplicaDifference(odd=tuple(sorted(odd)))
    rows = [[number(2.0 + rank)] * 2 if rank in odd else [number(1.0)] * 2 for rank in range(replicas)]
    assert judge_gradients(rows) == ReplicaDifference(odd=tuple(sorted(odd)))
    unsteady = [[number(1.0), number(2.0 + rank)] if rank in odd else [number(1.0)] * 2 for rank in range(replicas)]
    assert judge_gradients(unsteady) == ReplicaDifference(odd=tuple(sorted(odd))), "steady nowhere: nobody confirms it"


@given(st.lists(st.integers(1, 3), min_size=2, max_size=9), st.sets(st.integers(0, 8)))
def test_no_majority_accuses_nobody(checksums: list[int], newcomers: set[int]) -> None:
    """Whatever the numbers: fewer than half are accused, no newcomer is, and nobody where the program diverges."""
    difference = judge_parameters(checksums, newcomers)
    assert 2 * len(difference.odd) < len(checksums) and newcomers.isdisjoint(difference.odd)
    assert difference.sign is None or not difference.odd
    assert bool(difference.sign or difference.odd) is (len(set(checksums)) > 1)
    if all(checksums.count(one) * 2 <= len(checksums) for one in checksums):
        assert difference.sign is not None
    assert judge_parameters([*checksums, 0], newcomers) == ReplicaDifference(), "a hook of before made none"


@pytest.mark.parametrize(
    ("checksums", "newcomers", "difference"),
    [
        ([5, 5, 6], {2}, ReplicaDifference("newcomer")),
        ([5, 6], {1}, ReplicaDifference("newcomer")),
        ([6, 5, 5], {1, 2}, ReplicaDifference("newcomer")),
        ([5, 5, 6], {0, 1, 2}, ReplicaDifference("newcomer")),
        ([6, 5, 5], {2}, ReplicaDifference(odd=(0,))),
        ([5, 5, 5, 4, 6], {4}, ReplicaDifference(odd=(3,))),
    ],
    ids=["one", "of two", "most", "all", "a settled one differs", "both differ"],
)
def test_newcomer_that_was_the_same_and_differs_soon_is_the_programs(
    checksums: list[int], newcomers: set[int], difference: ReplicaDifference
) -> None:
    assert judge_parameters(checksums, newcomers) == difference


class Replica:
    """The detection of one of three replicas, with parameters of its own, and what it tells its agent."""

    def __init__(self, rank: int) -> None:
        self.rank, self.sent = rank, list[CorruptionSuspected]()
        settings = WorkerSettings(fault_wait_s=120.0, lease_s=60.0, collective_timeout_s=600.0)
        context: Any = SimpleNamespace(
            settings=settings,
            launch=SimpleNamespace(spec=TaskSpec(name="t"), reporter=Reporter(node="n", task="t", worker=f"t.{rank}")),
            mark=Marker(None),
            channel=SimpleNamespace(send=self.sent.append),
        )
        self.parameter = torch.zeros(4)
        self.detection = Detection(context, [self.parameter])  # type: ignore[list-item]

    def enter(self, generation: int) -> None:
        group: Any = SimpleNamespace(generation=generation, set_timeout=lambda _: None)
        self.detection.start_generation(group)


def compare(replicas: list[Replica], iteration: int) -> ReplicaDifference:
    """One agreement of all; they judge alike."""
    rows = [replica.detection.observe(iteration, 1, 2.0).row() for replica in replicas]
    for replica in replicas:
        replica.detection.record_agreement(rows)
    (difference,) = {replica.detection.compare_parameters(replica.rank) for replica in replicas}
    return difference


@pytest.mark.parametrize(("agreements", "is_programs"), [(0, False), (1, True), (10, True), (11, False)])
def test_newcomer_is_known_in_later_groups_too(agreements: int, *, is_programs: bool) -> None:
    """Healthy replicas of a program that keeps a count of its own were convicted where another joined meanwhile."""
    replicas = [Replica(rank) for rank in range(3)]
    replicas[2].detection.receive_state()
    for iteration in range(1, agreements + 1):
        assert compare(replicas, iteration) == ReplicaDifference()
        for replica in replicas:
            replica.enter(iteration)
    replicas[2].parameter += 1
    assert compare(replicas, 12) == (ReplicaDifference("newcomer") if is_programs else ReplicaDifference(odd=(2,)))


def test_replica_at_fault_that_receives_the_state_is_no_newcomer() -> None:
    """Its eviction is held: its next fault is not the program's."""
    replicas = [Replica(rank) for rank in range(3)]
    replicas[1].parameter += 1
    assert compare(replicas, 1) == ReplicaDifference(odd=(1,))
    replicas[1].detection.receive_state()
    replicas[1].parameter -= 1
    assert compare(replicas, 1) == ReplicaDifference()
    replicas[1].parameter += 1
    assert compare(replicas, 2) == ReplicaDifference(odd=(1,))


def test_replica_accuses_each_other_one_once_in_a_generation() -> None:
    """Where the accused stays they differ in every iteration."""
    replica, workers = Replica(0), [f"t.{rank}" for rank in range(30)]
    for iteration in (1, 2, 3):
        replica.detection.accuse(range(1, 12), "checksum", iteration, 1, workers)
    assert [accusation.suspect for accusation in replica.sent] == workers[1:12]
    replica.enter(2)
    replica.detection.accuse([1], "checksum", 4, 2, workers)
    assert replica.sent[-1].suspect == workers[1] and len(replica.sent) == 12


@pytest.mark.parametrize(
    ("rows", "sign"),
    [
        ([[1.0, 2.0]], "unsteady"),
        ([[1.0, 2.0], [3.0, 4.0]], "unsteady"),
        ([[1.0, 1.0], [1.0, 2.0]], "unsteady"),
        ([[1.0, 1.0], [2.0, 2.0]], "unequal"),
        ([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]], "unequal"),
        ([[1.0, 1.0], [1.0001, 1.0001]], None),
        ([[1.0, 1.0002], [1.0001, 1.0]], None),
        ([[1.0, 1.0], [INFINITY, INFINITY]], "unequal"),
        ([[NAN, 1.0], [2.0, 3.0]], "unsteady"),
        ([[NAN, 1.0], [2.0, 2.0]], "unsteady"),
        ([[NAN, NAN], [2.0, 2.0]], "unequal"),
        ([[NAN, NAN], [INFINITY, INFINITY], [2.0, 2.0]], None),
        ([[NAN, INFINITY]], None),
    ],
)
def test_gradients_that_nobody_confirms_are_the_programs(rows: list[list[float]], sign: str | None) -> None:
    numbers = [[number(norm, bits=3 * rank + row.index(norm)) for norm in row] for rank, row in enumerate(rows)]
    assert judge_gradients(numbers) == ReplicaDifference(sign)  # type: ignore[arg-type]


@given(RANKS, st.data())
def test_gradients_that_most_replicas_confirm_but_for_rounding_are_right(replicas: int, data: st.DataObject) -> None:
    """On GPUs of two types, or with kernels that are not deterministic, no two replicas need have the same bits."""
    odd = data.draw(st.sets(st.integers(0, replicas - 1), max_size=(replicas - 1) // 2))
    sound = st.floats(1.0, 1.0009).map(lambda norm: number(norm, data.draw(st.integers(0, 99))))
    wrong = st.sampled_from([0.0, 0.9, 1.1, 3.4e38, INFINITY, NAN]).map(number)
    rows = [
        [data.draw(sound), data.draw(sound)]
        if rank not in odd
        else data.draw(st.permutations([data.draw(wrong), data.draw(sound | wrong)]))
        for rank in range(replicas)
    ]
    assert judge_gradients(rows) == ReplicaDifference(odd=tuple(sorted(odd)))


def test_numbers_of_older_hooks_are_not_judged() -> None:
    assert judge_gradients([[5, 5], [number(1.0), number(2.0)]]) == ReplicaDifference()
    assert judge_gradients([[number(1.0)] * 2] * 3) == ReplicaDifference()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
@pytest.mark.parametrize("size", [1, 3, 4, 16])
def test_digest_sees_any_single_bit(dtype: torch.dtype, size: int) -> None:
    parameters = [torch.zeros(size, dtype=dtype), torch.ones(5), torch.ones(9)[1:]]
    digest = ParameterDigest(parameters)
    before = digest.number()
    clones = [parameter.clone() for parameter in parameters]
    assert before == ParameterDigest(clones).number() == digest.number() and 0 < before < 2**62
    for parameter in parameters:
        bytes_of = parameter.view(torch.uint8)
        for place in range(bytes_of.numel()):
            for bit in (0, 7):
                bytes_of[place] ^= 1 << bit
                assert digest.number() != before
                bytes_of[place] ^= 1 << bit
    assert digest.number() == before != ParameterDigest(parameters[:1]).number()
    parameters[1].data = torch.zeros(5)
    assert digest.number() != before, "it looks where the tensor lies now"
    parameters[1].data = clones[1]
    assert digest.number() == before


def test_environments_are_reported_in_a_few_groups_and_other_signs_in_each() -> None:
    sent: list[DivergenceObserved] = []
    reporter = Reporter(node="n1", task="t", worker="t.1")
    rendezvous = SimpleNamespace(generation=0)
    context = SimpleNamespace(
        launch=SimpleNamespace(worker="t.1", reporter=reporter), channel=SimpleNamespace(send=sent.append)
    )
    comparison = ReplicaComparison(SimpleNamespace(), context, rendezvous, SimpleNamespace())  # type: ignore[arg-type]
    for rendezvous.generation in range(1, 2 * ENVIRONMENT_REPORTS_MAX):
        for sign in ("environment", "environment", "unsteady"):
            comparison._send(sign, 7)  # type: ignore[arg-type]
    generations = {
        sign: [report.generation for report in sent if report.sign == sign] for sign in ("environment", "unsteady")
    }
    assert generations["environment"] == [*range(1, 1 + ENVIRONMENT_REPORTS_MAX)]
    assert generations["unsteady"] == [*range(1, 2 * ENVIRONMENT_REPORTS_MAX)]
