"""A node's memory: what was sealed is found, what was torn is not, and nobody waits."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from unicrond.agents.protocol.memory import Memory, StateHead, TooLarge, digest_of
from unicrond.events.vocabulary.shape import Shape

MAX_BYTES = 1 << 20


@pytest.fixture
def memory() -> Iterator[Memory]:
    made = Memory.private(MAX_BYTES)
    yield made
    made.close()


def put(memory: Memory, iteration: int, payload: bytes, generation: int = 1) -> StateHead:
    draft = memory.draft(len(payload))
    assert draft is not None
    draft.view[:] = payload
    return draft.seal(iteration, generation)


def payload(memory: Memory, iteration: int) -> bytes | None:
    with memory.reading(iteration) as found:
        if found is None:
            return None
        head, view = found
        assert digest_of(view) == head.digest
        return bytes(view)


def test_two_states_are_kept_and_the_older_one_goes(memory: Memory) -> None:
    for iteration in (1, 2, 3):
        put(memory, iteration, b"%d" % iteration * 5000)
    assert [head.iteration for head in memory.heads()] == [3, 2]
    assert payload(memory, 3) == b"3" * 5000
    assert payload(memory, 2) == b"2" * 5000
    assert payload(memory, 1) is None


def test_another_opening_sees_it_and_outlives_the_first(memory: Memory) -> None:
    put(memory, 7, b"state")
    other = memory.reopen()
    assert payload(other, 7) == b"state"
    put(other, 8, b"newer" * 10000)  # grows: both slots are void for a moment, and the first opening maps anew
    assert payload(memory, 8) == b"newer" * 10000
    assert payload(memory, 7) is None
    other.close()


def test_a_state_is_found_by_its_layout(memory: Memory) -> None:
    """Shards of as many workers, cut otherwise, are another state."""
    for iteration, shape in ((1, Shape(2, 2, vpp=2)), (2, Shape(2, 2, ep=2))):
        draft = memory.draft(4)
        assert draft is not None
        draft.view[:] = b"abcd"
        draft.seal(iteration, 1, layout=shape)
    assert [head.layout for head in memory.heads()] == [Shape(2, 2, ep=2), Shape(2, 2, vpp=2)]
    with memory.reading(1, Shape(2, 2)) as found:
        assert found is None
    with memory.reading(1, Shape(2, 2, vpp=2)) as found:
        assert found is not None


def test_a_later_generation_is_newer_whatever_its_iteration(memory: Memory) -> None:
    put(memory, 9, b"a", generation=1)
    put(memory, 5, b"b", generation=2)
    put(memory, 6, b"c", generation=2)
    assert [(head.generation, head.iteration) for head in memory.heads()] == [(2, 6), (2, 5)]


def test_a_writer_killed_half_way_leaves_the_other_slot(memory: Memory) -> None:
    put(memory, 1, b"first")
    put(memory, 2, b"second")
    child = os.fork()
    if child == 0:
        draft = memory.reopen().draft(5)
        assert draft is not None
        draft.view[:3] = b"tor"
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert [head.iteration for head in memory.heads()] == [2]
    put(memory, 3, b"third")  # the dead hold no lock
    assert [head.iteration for head in memory.heads()] == [3, 2]


def test_who_reads_is_not_overwritten_and_who_writes_is_not_waited_for(memory: Memory) -> None:
    put(memory, 1, b"first")
    put(memory, 2, b"second")
    reader, writer = memory.reopen(), memory.reopen()
    with reader.reading(1) as found:
        assert found is not None
        assert writer.draft(5) is None
        assert writer.draft(50_000) is None, "growing would void what is being read"
        assert bytes(found[1]) == b"first"
    draft = writer.draft(5)
    assert draft is not None
    assert memory.draft(5) is None
    draft.abandon()
    assert [head.iteration for head in memory.heads()] == [2]


def test_a_damaged_payload_is_seen(memory: Memory) -> None:
    put(memory, 1, b"x" * 100)
    with memory.reading(1) as found:
        assert found is not None
        found[1][50] ^= 1
        assert digest_of(found[1]) != found[0].digest


def test_a_damaged_head_is_no_head(memory: Memory) -> None:
    put(memory, 1, b"x" * 100)
    memory._mapped()[10] ^= 1
    assert memory.heads() == []


def test_a_payload_from_elsewhere_must_have_its_digest(memory: Memory) -> None:
    draft = memory.draft(4)
    assert draft is not None
    draft.view[:] = b"good"
    with pytest.raises(ValueError, match="digest"):
        draft.seal(1, 1, digest_of(b"evil"))
    assert memory.heads() == []
    assert memory.draft(4) is not None


def test_the_bound_holds(memory: Memory) -> None:
    with pytest.raises(TooLarge, match="do not fit"):
        memory.draft(MAX_BYTES // 2)
    assert Path(memory.path).stat().st_size <= MAX_BYTES
