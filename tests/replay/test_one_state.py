"""One log, one state: whatever a reader looks up on its way, and wherever it begins again from a snapshot.

Derived facts are computed at the first look and carried from state to state, so a reader that looks often goes another
way through the code than one that folds in one go. Here are four of them, entry by entry, in logs in which nearly
everything happens and valid events of anybody are mixed in.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import islice

import pytest
from msgspec.structs import replace

from tests.replay.logs import eventful
from tests.unicrond.cluster import MiniCluster
from tests.unicrond.test_edge_events import edges, next_identity
from unicrond.core.decide import decide, needed_solves
from unicrond.core.fold import fold
from unicrond.core.rules.deadlines import deadlines
from unicrond.core.rules.invariants import InvariantError, check
from unicrond.core.rules.survey import Survey
from unicrond.core.state import ordered_map
from unicrond.core.state.policy import Policy
from unicrond.core.state.state import ClusterState, WorkerStatus
from unicrond.core.state.state_bytes import decode, digest, encode, to_json
from unicrond.events.vocabulary import AnyEvent, CommandFailed
from unicrond.events.wire.envelope import Entry, RecordedEvent
from unicrond.replay.simulation.faults.boundary_events import KINDS

POLICY = Policy()
#: Each kind of look: what a head, its API and its alarms ask of a state.
LOOKS: tuple[Callable[[ClusterState], object], ...] = (
    lambda state: [state.by_node.on(node) for node in state.nodes],
    lambda state: [state.by_node.of_task(node, task) for node in state.nodes for task in state.tasks],
    lambda state: [task.tally for task in state.tasks.values()],
    lambda state: [(task.confirmed, task.all_able, task.at_rest, [*task.leavers]) for task in state.tasks.values()],
    lambda state: decisions(state),
    lambda state: deadlines(Survey(state, POLICY)),
    lambda state: breach(state),
    digest,
    to_json,
)


def decisions(state: ClusterState) -> str:
    """What a head would decide without a solution. The log's own head knew nothing of what is mixed in: some states are
    such that it cannot."""
    try:
        survey = Survey(state, POLICY)
        return repr((needed_solves(survey), decide(survey, {})))
    except Exception as error:
        return repr(error)


def breach(state: ClusterState) -> str:
    try:
        check(state)
    except InvariantError as error:
        return str(error)
    return ""


class Liars(MiniCluster):
    """A cluster of whose nodes some say, now and then, that they did not obey: the order that started a worker, alone
    or with others, or that of nobody. Whoever is first of those that it may mean is taken for it."""

    def append(self, event: AnyEvent, producer: str, boot: int) -> RecordedEvent:
        entry = super().append(event, producer, boot)
        workers = [worker for task in self.state.tasks.values() for worker in task.workers.values()]
        starting = [worker for worker in workers if worker.status is WorkerStatus.STARTING]
        if starting and self.random.random() < 0.3:
            worker = self.random.choice(starting)
            order = self.random.choice(["", worker.command_id, worker.command_id.partition("/")[0]])
            refusal = CommandFailed(node=worker.node, command_id=order, reason="no free slot")
            super().append(refusal, worker.node, self.hosts[worker.node].boot)
        return entry


def lived(seed: int) -> list[Entry]:
    """The log of a cluster of four nodes that lives through drawn faults, with liars among them."""
    cluster = Liars(seed)
    drawn, slots = random.Random(seed), 1 + seed % 4
    for number in range(4):
        cluster.add_host(f"n{number}", slots)
    for name in ("c", "a", "b"):
        cluster.submit(name, max_workers=2 * slots)
    for _ in range(80):
        host = drawn.choice([*cluster.hosts.values()])
        match drawn.randrange(5):
            case 0 if host.up and host.processes:
                cluster.kill_worker(host, drawn.choice([*host.processes]))
            case 1 if sum(other.up for other in cluster.hosts.values()) > 1 and host.up:
                cluster.kill_host(host)
                cluster.lose(host)
            case 2 if not host.up:
                cluster.add_host(host.name, slots)
            case 3:
                cluster.take_over()
        for _ in range(drawn.randrange(20)):
            drawn.choice(cluster.moves())()
    return [*cluster.log]


def mixed(seed: int) -> list[Entry]:
    """A log of that seed, with valid events of anybody between its entries."""
    drawn, log, state = random.Random(seed), list[Entry](), ClusterState()
    for entry in eventful(seed) if seed % 2 else lived(seed):
        log.append(replace(entry, seq=state.seq + 1))
        state = fold(state, log[-1])
        if state.tasks and drawn.random() < 0.1 and (envelope := edges(drawn, state).envelope(drawn.choice(KINDS))):
            identity = next_identity(state, envelope, drawn)
            log.append(RecordedEvent(state.seq + 1, entry.recorded_at_us, identity))
            state = fold(state, log[-1])
    return log


def view(state: ClusterState) -> tuple[bytes, str, str]:
    """All that tells two states apart: the bytes keep insertion order. It is taken of a copy, which has looked at
    nothing."""
    body = encode(state)
    return body, digest(decode(body)), decisions(decode(body))


@pytest.mark.parametrize("source", [lived, mixed])
@pytest.mark.parametrize("seed", [*range(4), 41, 77])
def test_readers_of_one_log_have_one_state(
    source: Callable[[int], list[Entry]], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ordered_map, "SMALL", 4)  # maps of several chunks
    monkeypatch.setattr(ordered_map, "CHUNK", 2)
    drawn, log = random.Random(seed), source(seed)
    silent = looking = restarting = sometimes = ClusterState()
    for entry in log:
        silent = fold(silent, entry)
        looking = fold(looking, entry)
        for look in drawn.sample(LOOKS, drawn.randrange(len(LOOKS))):
            look(looking)
        restarting = fold(decode(encode(restarting)), entry)
        sometimes = fold(sometimes, entry)
        if drawn.random() < 0.3:
            drawn.choice(LOOKS)(sometimes)
        if drawn.random() < 0.3:
            sometimes = decode(encode(sometimes))
        states = {name: encode(state) for name, state in vars_of(silent, looking, restarting, sometimes).items()}
        assert len({*states.values()}) == 1, (entry, [name for name, body in states.items() if body != encode(silent)])
    assert len({view(state) for state in (silent, looking, restarting, sometimes)}) == 1
    assert len(log) > 60


def vars_of(*states: ClusterState) -> dict[str, ClusterState]:
    return dict(zip(("silent", "looking", "restarting", "sometimes"), states, strict=True))


@pytest.mark.parametrize("seed", range(2))
def test_reader_that_begins_at_any_prefix_ends_in_same_state(seed: int) -> None:
    log = mixed(seed)
    end = view(fold_all(ClusterState(), log))
    prefix = ClusterState()
    for number, entry in enumerate(log):
        if number % 7 == 0:
            assert view(fold_all(decode(encode(prefix)), islice(log, number, None))) == end, number
        prefix = fold(prefix, entry)


def fold_all(state: ClusterState, entries: object) -> ClusterState:
    for entry in entries:  # type: ignore[attr-defined]
        state = fold(state, entry)
    return state
