"""Parts of the optimizer's state: who holds them, what remains of them after a loss, what has to travel."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unicrond.agents.trainer.lifecycle.optimizer_shards import (
    ALIGN,
    NoHolder,
    Span,
    StatePart,
    assign_holders,
    covers,
    gather_moves,
    moves,
)

counts = st.integers(1, 9)
extents = st.lists(st.integers(0, 40).map(lambda units: units * ALIGN), min_size=1, max_size=3)
nodes = st.lists(st.frozensets(st.sampled_from("abcd"), min_size=1, max_size=2), min_size=1, max_size=9)


def spread(extents: list[int], stands: list[frozenset[str]]) -> list[list[Span]]:
    """The spans that each replica holds."""
    return [
        [span for index in indices for span in StatePart(len(stands), index).spans(extents) if span[0] < span[1]]
        for indices in assign_holders(stands)
    ]


def elements(spans: list[Span]) -> set[int]:
    return {element for start, stop in spans for element in range(start, stop, ALIGN)}


@given(extents, counts)
def test_parts_cover_state_and_start_aligned(extents: list[int], count: int) -> None:
    parts = [span for index in range(count) for span in StatePart(count, index).spans(extents)]
    assert sum(stop - start for start, stop in parts) == sum(extents)
    assert elements(parts) == set(range(0, sum(extents), ALIGN))
    assert all(start % ALIGN == 0 for start, _ in parts)


@given(nodes)
def test_part_has_two_holders_on_two_nodes_if_possible(stands: list[frozenset[str]]) -> None:
    held = assign_holders(stands)
    assert [parts[0] for parts in held] == list(range(len(stands)))
    for part in range(len(stands)):
        holders = [replica for replica, parts in enumerate(held) if part in parts]
        assert len(holders) == min(2, len(stands))
        other = [replica for replica in holders if replica != part]
        if any(not stands[part] & nodes for nodes in stands):
            assert not stands[part] & stands[other[0]]


def test_node_blocks_exchange_parts_one_to_one() -> None:
    stands = [frozenset(node) for node in "aaaabbbb"]
    assert assign_holders(stands) == [(r, (r + 4) % 8) for r in range(8)]


@given(extents, nodes, st.integers(0, 8))
def test_loss_of_replica_loses_no_part(extents: list[int], stands: list[frozenset[str]], lost: int) -> None:
    held = spread(extents, stands)
    left = [spans for replica, spans in enumerate(held) if replica != lost % len(stands)]
    assert covers(left, sum(extents)) == (len(stands) > 1 or not sum(extents))


@given(extents, st.lists(st.sampled_from("abc"), min_size=2, max_size=9), st.sampled_from("abc"))
def test_loss_of_node_loses_no_part(extents: list[int], at: list[str], lost: str) -> None:
    stands = [frozenset(node) for node in at]
    left = [spans for spans, node in zip(spread(extents, stands), at, strict=True) if node != lost]
    assert covers(left, sum(extents)) == (bool(left) or not sum(extents))


@given(extents, nodes, nodes)
def test_moves_carry_exactly_missing_spans_from_holders(
    extents: list[int], before: list[frozenset[str]], after: list[frozenset[str]]
) -> None:
    size = max(len(before), len(after))
    held = spread(extents, before) + [[]] * (size - len(before))
    wanted = spread(extents, after) + [[]] * (size - len(after))
    found = moves(held, wanted)
    for move in found:
        assert elements([(move.start, move.stop)]) <= elements(held[move.source])
    for target in range(size):
        arrived = [(move.start, move.stop) for move in found if move.target == target]
        assert elements(arrived) == elements(wanted[target]) - elements(held[target])
        assert sum(stop - start for start, stop in arrived) == ALIGN * len(elements(arrived))


def test_stable_group_gathers_each_part_from_its_owner() -> None:
    extents = [6 * ALIGN]
    held = spread(extents, [frozenset("a")] * 3)
    given = [(move.start // ALIGN, move.stop // ALIGN, move.source) for move in gather_moves(held, extents[0])]
    assert given == [(0, 2, 0), (2, 4, 1), (4, 6, 2)]
    assert not moves(held, held)


def test_span_without_holder_is_reported() -> None:
    extents = [6 * ALIGN]
    held = spread(extents, [frozenset("a")] * 4)
    assert not covers([held[0], held[3]], extents[0])
    with pytest.raises(NoHolder, match="elements 128 to 256"):
        gather_moves([held[0], held[3]], extents[0])
