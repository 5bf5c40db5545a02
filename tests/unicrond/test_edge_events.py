"""Whatever valid events stand in the log, the pure core goes on: it folds, stays sound, decides, and starts again."""

from __future__ import annotations

import functools
import random

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unicrond.cluster import MiniCluster
from unicrond.core.decide import decide, needed_solves
from unicrond.core.fold import fold
from unicrond.core.own_decisions import batches, require_sound
from unicrond.core.planning.solver import solve
from unicrond.core.rules.deadlines import deadlines
from unicrond.core.rules.invariants import check
from unicrond.core.rules.survey import Survey
from unicrond.core.state import state_bytes
from unicrond.core.state.policy import Policy
from unicrond.core.state.state import ClusterState
from unicrond.core.state.state_bytes import digest, to_json
from unicrond.core.worth.costs import costs_at
from unicrond.events.wire.codec import encode
from unicrond.events.wire.envelope import Entry, Envelope, RecordedEvent
from unicrond.replay.simulation.faults.boundary_events import KINDS, Edges
from unicrond.service.api.metrics import exposition

POLICY = Policy()


@functools.cache
def trained() -> MiniCluster:
    """Two tasks on three nodes, in the middle of their training."""
    cluster = MiniCluster(7)
    for number in range(3):
        cluster.add_host(f"n{number}", 2)
    cluster.submit("a", min_workers=1, max_workers=3, iterations=1000)
    cluster.submit("b", min_workers=2, max_workers=2, tp=2, iterations=1000)
    cluster.run()
    for task in ("a", "b"):
        cluster.train(task, 3)
    return cluster


def edges(drawn: random.Random, state: ClusterState) -> Edges:
    workers = [name for task in state.tasks.values() for name in task.workers]
    return Edges(drawn, list(state.nodes), list(state.tasks), workers)


def next_identity(state: ClusterState, envelope: Envelope, drawn: random.Random) -> Envelope:
    """The envelope under an identity that its producer might have now, or at the edge of what one may be."""
    boot, number = state.last_numbers.get(envelope.producer, (1, 0))
    choices = [(boot, number + 1)] * 6 + [(boot + 1, 1), (2**52 - 1, 1), (boot, 2**53 - 1), (boot, number)]
    boot, number = drawn.choice(choices)
    return msgspec.structs.replace(envelope, boot=boot, number=max(1, number))


def require_alive(state: ClusterState) -> None:
    """The state is sound, can be shown, kept and decided upon, and what is decided fits it."""
    check(state)
    digest(state)
    to_json(state)
    state_bytes.encode(state)
    costs_at(state, state.now_us + 1)
    exposition(lambda: state)()
    deadlines(Survey(state, POLICY))
    solutions = {problem: solve(problem) for problem in needed_solves(Survey(state, POLICY))}
    decided = decide(Survey(state, POLICY), solutions)
    number = state.last_numbers["coordinator"][1]
    said = [
        Envelope(
            producer="coordinator", boot=state.term, number=number + n, term=state.term, observed_at_us=1, event=event
        )
        for n, event in enumerate((event for batch in batches(decided) for event in batch), start=1)
    ]
    for envelope in said:
        encode(envelope)
    if state.last_numbers["coordinator"][0] == state.term:
        require_sound(state, said)


@settings(deadline=None)
@given(st.randoms(use_true_random=False), st.lists(st.sampled_from(KINDS), min_size=1, max_size=8))
def test_core_survives_valid_events_in_any_order(drawn: random.Random, kinds: list[type]) -> None:
    cluster = trained()
    state, log = cluster.state, list[Entry](cluster.log)
    for kind in kinds:
        envelope = edges(drawn, state).envelope(kind)
        if envelope is None:
            continue
        entry = RecordedEvent(state.seq + 1, state.now_us + 1, next_identity(state, envelope, drawn))
        state = fold(state, entry)
        log.append(entry)
        require_alive(state)
    again = functools.reduce(fold, log, ClusterState())
    assert digest(again) == digest(state), "a restart comes to the same state"


@settings(deadline=None)
@given(
    st.sampled_from([2, 3, 10**9 - 1]),
    st.sampled_from([1, 2, 3, 2**52 - 1]),
    st.lists(st.sampled_from(KINDS), max_size=2),
)
def test_forged_term_never_blocks_next_claim(term: int, boot: int, kinds: list[type]) -> None:
    """A forged term neither poisons the numbers nor stops the next claim."""
    state = trained().state
    drawn = random.Random(term)
    state = fold(state, RecordedEvent(state.seq + 1, state.now_us, edges(drawn, state).claim(term, boot)))
    assert state.term in (trained().state.term, trained().state.term + 1)
    claim = edges(drawn, state).claim(state.term + 1, state.term + 1)
    state = fold(state, RecordedEvent(state.seq + 1, state.now_us, claim))
    assert state.term == claim.term, "the next claim counts"
    assert state.last_numbers["coordinator"] == (claim.term, 1)
    require_alive(state)
