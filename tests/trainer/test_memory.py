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


def test_memory_keeps_two_newest_states(memory: Memory) -> None:
    for iteration in (1, 2, 3):
        put(memory, iteration, b"%d" % iteration * 5000)
    assert [head.iteration for head in memory.heads()] == [3, 2]
    assert payload(memory, 3) == b"3" * 5000
    assert payload(memory, 2) == b"2" * 5000
    assert payload(memory, 1) is None


def test_reopened_memory_outlives_first_opening(memory: Memory) -> None:
    put(memory, 7, b"state")
    other = memory.reopen()
    assert payload(other, 7) == b"state"
    put(other, 8, b"newer" * 10000)  # grows: both slots are void for a moment, and the first opening maps anew
    assert payload(memory, 8) == b"newer" * 10000
    assert payload(memory, 7) is None
    other.close()


def test_memory_finds_state_by_layout(memory: Memory) -> None:
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


def test_memory_keeps_head_of_older_agents_where_layout_allows(memory: Memory) -> None:
    """Older agents read heads without cp and etp: those of other layouts have a form of their own."""
    for iteration, shape in ((1, Shape(2, cp=2)), (2, Shape(2, ep=2)), (3, Shape(1, ep=4, etp=2))):
        draft = memory.draft(4)
        assert draft is not None
        draft.view[:] = b"abcd"
        draft.seal(iteration, 1, layout=shape)
        newest = memory.heads()[0]
        assert (newest.iteration, newest.layout) == (iteration, shape)
    magics = {bytes(memory._mapped()[slot * 1024 : slot * 1024 + 8]) for slot in (0, 1)}
    assert magics == {b"unicrnM3", b"unicrnM4"}


def test_later_generation_is_newer_at_any_iteration(memory: Memory) -> None:
    put(memory, 9, b"a", generation=1)
    put(memory, 5, b"b", generation=2)
    put(memory, 6, b"c", generation=2)
    assert [(head.generation, head.iteration) for head in memory.heads()] == [(2, 6), (2, 5)]


def test_killed_writer_leaves_other_slot(memory: Memory) -> None:
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


def test_memory_readers_and_writers_never_block(memory: Memory) -> None:
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


def test_damaged_payload_fails_digest(memory: Memory) -> None:
    put(memory, 1, b"x" * 100)
    with memory.reading(1) as found:
        assert found is not None
        found[1][50] ^= 1
        assert digest_of(found[1]) != found[0].digest


def test_damaged_head_is_ignored(memory: Memory) -> None:
    put(memory, 1, b"x" * 100)
    memory._mapped()[10] ^= 1
    assert memory.heads() == []


def test_received_payload_must_match_digest(memory: Memory) -> None:
    draft = memory.draft(4)
    assert draft is not None
    draft.view[:] = b"good"
    with pytest.raises(ValueError, match="digest"):
        draft.seal(1, 1, digest_of(b"evil"))
    assert memory.heads() == []
    assert memory.draft(4) is not None


def test_memory_stays_within_bound(memory: Memory) -> None:
    with pytest.raises(TooLarge, match="do not fit"):
        memory.draft(MAX_BYTES // 2)
    assert Path(memory.path).stat().st_size <= MAX_BYTES
