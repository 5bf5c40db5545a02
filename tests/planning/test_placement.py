"""Placement: small known halls, then properties that hold for any."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.seeds import at_most
from unicrond.core.planning.placement import Placement, Replica, place
from unicrond.events.vocabulary.shape import Shape


def workers_on(replicas: Mapping[str, tuple[Replica, ...]]) -> Counter[str]:
    return Counter(node for of_task in replicas.values() for replica in of_task for node in replica)


def test_placement_starts_task_on_one_node() -> None:
    placed = place({"a": 4}, {"a": Shape()}, {"n1": 3, "n2": 8, "n3": 4}, {})
    assert placed.replicas == {"a": (("n3",),) * 4}


def test_placement_prefers_smallest_fit_then_largest_gap() -> None:
    placed = place({"a": 10}, {"a": Shape()}, {"n1": 2, "n2": 8, "n3": 4}, {})
    assert workers_on(placed.replicas) == {"n2": 8, "n1": 2}


def test_placement_moves_only_workers_of_lost_node() -> None:
    current = {"a": (("n1",), ("n2",)), "b": (("n2",), ("n3",))}
    placed = place({"a": 2, "b": 2}, {"a": Shape(), "b": Shape()}, {"n1": 2, "n3": 2}, current)
    assert placed.replicas == {"a": (("n1",), ("n1",)), "b": (("n3",), ("n3",))}
    assert placed.moves == 0


def test_shrinking_task_leaves_node_with_fewest_workers() -> None:
    current = {"a": (("n1",), ("n2",), ("n2",))}
    placed = place({"a": 2}, {"a": Shape()}, {"n1": 2, "n2": 2}, current)
    assert placed.replicas == {"a": (("n2",), ("n2",))}


def test_placement_splits_stages_and_keeps_tensor_groups() -> None:
    placed = place({"a": 1}, {"a": Shape(tp=2, pp=3)}, {"n1": 3, "n2": 2, "n3": 3}, {})
    (replica,) = placed.replicas["a"]
    assert [len(set(replica[i : i + 2])) for i in (0, 2, 4)] == [1, 1, 1]
    assert Counter(replica) == {"n1": 2, "n2": 2, "n3": 2}


def test_placement_keeps_neighbours_that_share_a_sequence_together() -> None:
    placed = place({"a": 1}, {"a": Shape(tp=2, pp=2, cp=2)}, {"n1": 4, "n2": 5}, {})
    assert placed.replicas["a"] == (("n2",) * 4 + ("n1",) * 4,) or placed.replicas["a"] == (("n1",) * 4 + ("n2",) * 4,)
    assert place({"a": 1}, {"a": Shape(tp=2, pp=2, cp=2)}, {"n1": 3, "n2": 5}, {}).short == {"a": 1}


def test_placement_moves_small_replicas_for_large_group() -> None:
    current = {"small": (("n1",), ("n2",))}
    shapes = {"small": Shape(), "big": Shape(tp=2)}
    placed = place({"small": 2, "big": 1}, shapes, {"n1": 2, "n2": 2}, current)
    assert placed.replicas == {"small": (("n2",), ("n2",)), "big": (("n1", "n1"),)}
    assert (placed.moves, placed.short) == (1, {})


@pytest.mark.timeout(20)
def test_placement_refuses_pointless_exchange() -> None:
    """Two groups of 4 are needed; small would only go back and forth between the nodes."""
    shapes = {"small": Shape(tp=2), "big": Shape(tp=4, pp=2)}
    placed = place({"small": 1, "big": 1}, shapes, {"n1": 4, "n2": 4}, {"small": (("n1", "n1"),)})
    assert placed == Placement({"big": (), "small": (("n1", "n1"),)}, {"big": 1}, 0)


def test_placement_reports_tasks_without_seats() -> None:
    shapes = {"a": Shape(tp=2), "b": Shape()}
    placed = place({"a": 2, "b": 1}, shapes, {"n1": 3, "n2": 1}, {})
    assert placed.short == {"a": 1}
    assert len(placed.replicas["a"]) == 1 and len(placed.replicas["b"]) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (({"a": -1}, {"a": Shape()}, {}, {}), "counts: a has -1"),
        (({"a": 1}, {}, {"n": 1}, {}), "shapes: a is missing"),
        (({"a": 1}, {"a": Shape(tp=2)}, {"n": 2, "o": 2}, {"a": (("n", "o"),)}), "current: a replica of a"),
    ],
)
def test_placement_refuses_invalid_input(arguments: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        place(*arguments)


@st.composite
def halls(draw: st.DrawFn) -> tuple[dict[str, int], dict[str, Shape], dict[str, int], Placement]:
    """A cluster, a placement on it that `place` made, and what is wanted after some nodes went away."""
    nodes = {f"n{i}": draw(st.sampled_from((1, 2, 4, 8))) for i in range(draw(st.integers(1, 6)))}
    tasks = [f"t{i}" for i in range(draw(st.integers(1, 4)))]
    shapes = {t: Shape(draw(st.sampled_from((1, 1, 2, 4))), draw(st.sampled_from((1, 1, 2)))) for t in tasks}
    before = {t: draw(st.integers(0, 6)) for t in tasks}
    start = place(before, shapes, nodes, {})
    left = {n: slots for n, slots in nodes.items() if draw(st.integers(0, 3))}
    counts = {t: draw(st.integers(0, 6)) for t in tasks if draw(st.integers(0, 5))}
    return counts, shapes, left, start


@settings(max_examples=at_most(400), deadline=None, derandomize=True)
@given(halls())
def test_placement_keeps_its_invariants(
    hall: tuple[dict[str, int], dict[str, Shape], dict[str, int], Placement],
) -> None:
    counts, shapes, nodes, start = hall
    placed = place(counts, shapes, nodes, start.replicas)
    # No seat is given twice, none on a node that is not there.
    assert all(workers <= nodes.get(node, 0) for node, workers in workers_on(placed.replicas).items())
    displaced = 0
    for task, count in counts.items():
        replicas = placed.replicas[task]
        assert all(shapes[task].fits(replica) for replica in replicas)
        assert len(replicas) + placed.short.get(task, 0) == count
        healthy = Counter(replica for replica in start.replicas.get(task, ()) if set(replica) <= set(nodes))
        stayed = (healthy & Counter(replicas)).total()
        displaced += (min(count, healthy.total()) - stayed) * shapes[task].workers
    # Whoever could stay stays, but for those that made room.
    assert displaced <= placed.moves
    # A task without tensor parallelism is short only if the cluster is full.
    for task in placed.short:
        if shapes[task].workers == 1:
            assert sum(workers_on(placed.replicas).values()) == sum(nodes.values())
    # The order of the mappings means nothing.
    shuffled = place(
        dict(reversed(counts.items())), dict(reversed(shapes.items())), dict(reversed(nodes.items())), start.replicas
    )
    assert shuffled == placed
    # Nothing to do, nothing done.
    settled = place({t: len(r) for t, r in placed.replicas.items()}, shapes, nodes, placed.replicas)
    assert settled.replicas == placed.replicas and settled.moves == 0


@settings(max_examples=at_most(200), deadline=None, derandomize=True)
@given(st.lists(st.sampled_from((1, 2, 4, 8)), min_size=1, max_size=6), st.data())
def test_placement_fits_powers_of_two(slots: list[int], data: st.DataObject) -> None:
    """Groups of 1, 2, 4, 8 pack without waste: nobody is short while the seats last, wherever they sat before."""
    nodes = {f"n{i}": 8 for i in range(len(slots))}
    shapes = {f"t{tp}": Shape(tp) for tp in (1, 2, 4, 8)}
    before = {f"t{tp}": data.draw(st.integers(0, 8)) for tp in (1, 2, 4, 8)}
    start = place(before, shapes, nodes, {})
    counts, left = {}, 8 * len(nodes)
    for tp in (8, 4, 2, 1):
        counts[f"t{tp}"] = data.draw(st.integers(0, left // tp))
        left -= counts[f"t{tp}"] * tp
    assert place(counts, shapes, nodes, start.replicas).short == {}


def test_closed_node_keeps_its_replicas_and_gets_none() -> None:
    """One leaves it, and the seat stays empty: also where room is made for a larger group."""
    shapes, nodes = {"a": Shape(), "b": Shape(), "pair": Shape(2)}, {"n1": 2, "n2": 2, "n3": 1}
    current = {"a": (("n1",), ("n1",))}
    assert place({"a": 1, "b": 1}, shapes, nodes, current, closed=("n1", "n2")).replicas == {
        "a": (("n1",),),
        "b": (("n3",),),
    }
    assert place({"a": 1, "b": 2}, shapes, nodes, current, closed=("n1", "n2")).short == {"b": 1}
    assert place({"a": 2, "pair": 1}, shapes, {"n1": 2, "n2": 2}, current, closed=("n1",)).replicas["pair"] == (
        ("n2", "n2"),
    )
    assert place({"a": 1, "pair": 1}, shapes, {"n1": 2, "n2": 1}, current, closed=("n1",)).short == {"pair": 1}
