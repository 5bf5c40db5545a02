"""What an entry costs whoever folds it and decides is linear in the cluster and in its own size (checks/costs.py)."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.benchmarks.scale import Cluster, measure
from tests.golden.regenerate import example
from unicrond.core import fold as folding
from unicrond.core import own_decisions
from unicrond.core.deciding import batch
from unicrond.core.fold import FOLDS
from unicrond.core.rules.invariants import check
from unicrond.core.state.state import ClusterState
from unicrond.events import vocabulary as v
from unicrond.events.vocabulary.field_types import SLOTS_MAX
from unicrond.events.wire.codec import MAX_EVENT_BYTES, BadEvent, decode
from unicrond.events.wire.envelope import Envelope, RecordedEvent
from unicrond.replay.simulation.checks import costs
from unicrond.replay.simulation.faults.boundary_events import KINDS, LONG, SHORT, Edges

SINGLE, NODES = "node00000", 200
OBSERVATIONS = [kind for kind in KINDS if not issubclass(kind, v.Request)]


@functools.cache
def cluster(nodes: int = NODES) -> Cluster:
    """Return 20 tasks with 8 workers a node, at rest."""
    cluster = Cluster(nodes)
    cluster.state.by_node.on(SINGLE)  # an index that every head has
    return cluster


def entry_of(state: ClusterState, event: v.AnyEvent, producer: str) -> RecordedEvent:
    boot, number = state.last_numbers.get(producer, (1, 0))
    envelope = Envelope(producer=producer, boot=boot, number=number + 1, observed_at_us=1, event=event)
    return RecordedEvent(state.seq + 1, state.now_us + 1, envelope)


def excess(state: ClusterState, event: v.AnyEvent, producer: str) -> tuple[ClusterState, str]:
    """Fold and decide; return the state, and in which way that cost too much."""
    entry = entry_of(state, event, producer)
    after, story = costs.fold_exceeds(state, entry)
    return after, story or costs.look_exceeds(state, entry, after, cluster().policy)


@pytest.mark.parametrize(("times", "is_excess"), [(1, False), (2, True)], ids=["once", "each time"])
def test_what_grows_once_for_the_process_is_no_cost_of_an_entry(
    monkeypatch: pytest.MonkeyPatch, times: int, is_excess: bool
) -> None:
    """A cache that doubles, say, after hundreds of other histories."""
    cache, state, fold = list[bytes](), cluster().state, costs.folding.fold

    def growing(before: ClusterState, entry: RecordedEvent) -> ClusterState:
        if len(cache) < times:
            cache.append(bytes(64 << 20))
        return fold(before, entry)

    monkeypatch.setattr(costs.folding, "fold", growing)
    entry = entry_of(state, invented(1), "liar")
    assert bool(costs.fold_exceeds(state, entry)[1]) is is_excess


def invented(count: int, slots: int = SLOTS_MAX) -> v.NodeJoined:
    """Return the word of a node that runs so many workers that nobody has started."""
    running = tuple(
        v.RunningWorker(worker=f"t{number % 20}.{10_000 + number}", task=f"t{number % 20}", pid=7, generation=1)
        for number in range(count)
    )
    joined = cluster().state.nodes[SINGLE]
    return v.NodeJoined(
        node="liar", address="10.9.9.9", slots=slots, store=v.StoreAddress(host="10.9.9.9", port=1), agent_boot=1,
        version=joined.agent.version, workers=running,
    )  # fmt: skip


@settings(deadline=None, max_examples=30)
@given(
    st.randoms(use_true_random=False),
    st.lists(st.sampled_from(OBSERVATIONS), min_size=1, max_size=4),
    st.sampled_from([SHORT, LONG]),
)
def test_any_observation_costs_no_more_than_the_cluster_is_large(
    drawn: random.Random, kinds: list[type[v.Observation]], lengths: Sequence[int]
) -> None:
    state = cluster().state
    workers = [worker for task in list(state.tasks.values())[:2] for worker in list(task.workers)[:8]]
    for kind in kinds:
        envelope = Edges(drawn, [SINGLE], ["t0", "t1"], workers, lengths).envelope(kind)
        if envelope is not None:
            state, story = excess(state, envelope.event, envelope.producer)
            assert not story


@pytest.mark.parametrize(
    ("producer", "event"),
    [
        ("api", v.TaskCancelled(task="t0", reason="a whole task ends")),
        ("liar", invented(SLOTS_MAX)),
        (SINGLE, v.NodeLeft(node=SINGLE, reason="it ends")),
    ],
    ids=["80 stops", "1,024 invented workers", "a node leaves"],
)
def test_what_ends_many_workers_costs_no_more_than_the_cluster_is_large(producer: str, event: v.AnyEvent) -> None:
    assert excess(cluster().state, event, producer)[1] == ""


def test_more_workers_than_a_node_can_have_are_refused_by_their_number() -> None:
    """Before a single one of them is decoded."""
    event = invented(18_000)
    envelope = replace(example(v.NodeJoined), producer="liar", event=event)
    body = msgspec.msgpack.encode(envelope)
    assert 500_000 < len(body) < MAX_EVENT_BYTES

    def refusal() -> str:
        """Return why it is refused."""
        try:
            decode(body)
        except BadEvent as error:
            return str(error)
        return ""

    reason, cost = costs.measure(refusal)
    assert "of length <= 1024 - at `$.event.workers`" in reason
    assert cost.lines < 500 and cost.memory_bytes < 2 * len(body)


# --- mutants: each makes one thing quadratic --------------------------------------------------------


def _stop_every_stray(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(batch, "STRAY_STOPS_MAX", SLOTS_MAX)


def _check_all_after_each(patch: pytest.MonkeyPatch) -> None:
    sound = own_decisions.require_sound

    def whole(state: ClusterState, envelopes: Sequence[Envelope]) -> None:
        """Hold the whole state against the rules after each decision."""
        for _ in envelopes:
            check(state)
        sound(state, envelopes)

    patch.setattr(costs, "require_sound", whole)


def _compare_workers(patch: pytest.MonkeyPatch) -> None:
    joined = FOLDS[v.NodeJoined]

    def compare(state: ClusterState, event: Any, envelope: Envelope) -> ClusterState:
        """Compare each worker that a node lists with each other one."""
        for running in event.workers:
            any(running.worker == other.worker and running is not other for other in event.workers)
        return joined(state, event, envelope)

    patch.setitem(folding.FOLDS, v.NodeJoined, compare)


def _copy_all(patch: pytest.MonkeyPatch) -> None:
    stop = FOLDS[v.StopWorker]

    def copy(state: ClusterState, event: Any, envelope: Envelope) -> ClusterState:
        """Copy the workers of all tasks."""
        dict(item for task in state.tasks.values() for item in task.workers.items())
        return stop(state, event, envelope)

    patch.setitem(folding.FOLDS, v.StopWorker, copy)


@pytest.mark.parametrize(
    ("mutant", "event", "story"),
    [
        (_stop_every_stray, invented(SLOTS_MAX), "decisions on one state"),
        (_compare_workers, invented(SLOTS_MAX), "to fold NodeJoined"),
        (_check_all_after_each, v.TaskCancelled(task="t0", reason=""), "to try what follows from TaskCancelled"),
        (_copy_all, v.TaskCancelled(task="t0", reason=""), "to try what follows from TaskCancelled"),
    ],
)
def test_quadratic_mutant_is_caught(
    monkeypatch: pytest.MonkeyPatch, mutant: Callable[[pytest.MonkeyPatch], None], event: v.AnyEvent, story: str
) -> None:
    state = cluster(20 if mutant is _stop_every_stray else NODES).state
    producer = "liar" if isinstance(event, v.NodeJoined) else "api"
    mutant(monkeypatch)
    assert story in excess(state, event, producer)[1]


def test_benchmark_of_scale_runs() -> None:
    """Between two of its runs months may pass, in which events and parts of the state get other names."""
    assert measure(nodes=40, rounds=2)["fold StepCommitted"] > 0
