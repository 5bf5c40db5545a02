"""Seats as runs: nothing is lost, nothing is large, and only a whole membership counts."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from unicrond.events.vocabulary import (
    WORKERS_MAX,
    AnyEvent,
    Member,
    MembershipDecided,
    MembershipPart,
    MemoryService,
    NodeRun,
    PlanAdopted,
    SeatRun,
    Start,
    StartWorkers,
    StoreAddress,
    TaskAssignment,
    TaskSpec,
    workers_in,
)
from unicrond.events.vocabulary.placements import (
    RUN_MAX,
    PartialMembership,
    add_part,
    broadcast_seats,
    compact,
    cut,
    expand,
    joiners_of,
    members_of,
    runs_of,
    starts,
    starts_of,
)
from unicrond.events.wire.codec import MAX_EVENT_BYTES, BadEvent, decode, encode
from unicrond.events.wire.envelope import Envelope

STORE = StoreAddress(host="10.1.2.3", port=43210)


def said(event: AnyEvent) -> Envelope:
    return Envelope(producer="coordinator", boot=1, number=1, term=1, observed_at_us=1_700_000_000_000_000, event=event)


def members(workers: int, tp: int, *, slots: int = 8, name: str = "gpt") -> tuple[Member, ...]:
    """As a start from nothing seats them: node by node."""
    return tuple(
        Member(worker=f"{name}.{n + 1}", node=f"gpu{n // slots:05d}", replica=n // tp, shard=n % tp)
        for n in range(workers)
    )


def decided(seats: tuple[SeatRun, ...], *, size: int = 1, generation: int = 1, parts: int = 0) -> MembershipDecided:
    peers = tuple(
        MemoryService(node=f"gpu{n:05d}", host=f"10.1.2.{n}", port=41000 + n, token="0123456789abcdef" * 2)
        for n in range(3)
    )
    return MembershipDecided(
        task="gpt",
        generation=generation,
        size=size,
        seats=seats,
        parts=parts,
        peers=peers,
        mtbf_us=10**9,
        urgent=True,
        store=STORE,
        incident="i12345",
        reason="8 of 4096 members are lost",
    )


@st.composite
def memberships(draw: st.DrawFn) -> tuple[tuple[Member, ...], tuple[str, ...], int]:
    """Members in any order of any places, each worker once; some of them joiners; and the size of a replica."""
    size = draw(st.integers(1, 4))
    numbers = draw(st.lists(st.integers(0, 30), unique=True, max_size=20))
    if draw(st.booleans()):
        numbers = sorted(numbers)
    node = st.sampled_from(["a", "b", "c"])
    places = [(draw(node), draw(st.integers(0, 5)), draw(st.integers(0, size - 1))) for _ in numbers]
    there = tuple(
        Member(worker=f"t.{number}", node=where, replica=replica, shard=shard)
        for number, (where, replica, shard) in zip(numbers, places, strict=True)
    )
    joiners = tuple(member.worker for member in there if draw(st.booleans()))
    return there, joiners, size


@given(memberships())
def test_seat_runs_match_list(membership: tuple[tuple[Member, ...], tuple[str, ...], int]) -> None:
    there, joiners, size = membership
    runs = runs_of(there, joiners, size)
    assert members_of("t", runs, size) == there
    assert joiners_of("t", runs) == joiners
    assert workers_in(runs) == len(there)


@given(memberships(), st.integers(1, 60))
def test_membership_parts_match_membership(
    membership: tuple[tuple[Member, ...], tuple[str, ...], int], part_bytes: int
) -> None:
    there, joiners, size = membership
    runs = runs_of(there, joiners, size)
    *parts, last = cut(runs, part_bytes)
    telling: PartialMembership | None = None
    for number, part in enumerate(parts, 1):
        telling = add_part(telling, MembershipPart(task="t", generation=3, part=number, seats=part), 7)
    assert broadcast_seats(telling, decided(last, size=size, generation=3, parts=len(parts)), 7) == runs


@pytest.mark.parametrize("tp", [1, 8])
@pytest.mark.parametrize("joining", ["all", "none", "one node"])
def test_membership_of_4096_workers_takes_ten_kilobytes(tp: int, joining: str) -> None:
    there = members(4096, tp)
    joiners = {"all": there, "none": (), "one node": there[64:72]}[joining]
    runs = runs_of(there, frozenset(member.worker for member in joiners), tp)
    assert len(runs) == 512
    assert len(encode(said(decided(runs, size=tp)))) <= 10_240


def test_replaced_workers_take_own_runs() -> None:
    there = list(members(64, 1))
    there[9] = replace(there[9], worker="gpt.100", replica=100)
    runs = runs_of(there, ("gpt.100",), 1)
    assert [(run.node, run.number, run.count, run.joins) for run in runs[:4]] == [
        ("gpu00000", 1, 8, False),
        ("gpu00001", 9, 1, False),
        ("gpu00001", 100, 1, True),
        ("gpu00001", 11, 6, False),
    ]


@pytest.mark.parametrize("slots", [1, 8, 2048])
def test_largest_task_fits_into_parts(slots: int) -> None:
    """With the longest names that nodes can have; more than RUN_MAX workers on a node take several runs."""
    there = [replace(member, node=member.node.ljust(63, "x")) for member in members(WORKERS_MAX, 1, slots=slots)]
    runs = runs_of(there, (), 1)
    assert len(runs) == WORKERS_MAX // min(slots, RUN_MAX)
    *parts, last = cut(runs, 256 * 1024)
    assert all(
        len(encode(said(MembershipPart(task="gpt", generation=1, part=1, seats=part)))) < 300_000 for part in parts
    )
    body = encode(said(decided(last, parts=len(parts))))
    assert len(body) < MAX_EVENT_BYTES
    assert members_of("gpt", [run for part in (*parts, last) for run in part], 1) == tuple(there)


# --- torn ------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Book:
    """The rule, in a plainer way: all that was said, looked at from its end."""

    said: list[tuple[int, MembershipPart]] = dataclasses.field(default_factory=list)

    def whole(self, event: MembershipDecided, term: int) -> tuple[SeatRun, ...] | None:
        """The last `parts` things said are exactly the parts of this one."""
        count = event.parts
        last = self.said[len(self.said) - count :] if count else []
        wanted = [(term, event.generation, number) for number in range(1, count + 1)]
        if [(each, part.generation, part.part) for each, part in last] != wanted:
            return None
        return tuple(run for _, part in last for run in part.seats) + event.seats


def run(number: int) -> SeatRun:
    return SeatRun(node="n", number=number, seat=number, count=1, joins=False)


parts = st.builds(
    lambda generation, part, number: MembershipPart(task="t", generation=generation, part=part, seats=(run(number),)),
    st.integers(1, 2), st.integers(1, 3), st.integers(1, 99),
)  # fmt: skip
ends = st.builds(
    lambda generation, count, number: decided((run(number),), generation=generation, parts=count),
    st.integers(1, 2), st.integers(0, 3), st.integers(1, 99),
)  # fmt: skip


@given(st.lists(st.tuples(st.integers(1, 2), st.one_of(parts, parts, ends)), max_size=12))
def test_only_complete_membership_counts(story: list[tuple[int, MembershipPart | MembershipDecided]]) -> None:
    """Whatever is said in whatever order and term: a membership counts if its parts were the last things said."""
    book, telling = Book(), None
    for term, event in story:
        if isinstance(event, MembershipPart):
            telling = add_part(telling, event, term)
            if event.part == 1:
                book.said.clear()
            book.said.append((term, event))
        else:
            assert broadcast_seats(telling, event, term) == book.whole(event, term)
            book.said.clear()
            telling = None


def test_torn_membership_is_inert_until_new_term() -> None:
    first = add_part(None, MembershipPart(task="t", generation=5, part=1, seats=(run(1),)), 1)
    assert broadcast_seats(first, decided((run(3),), parts=2, generation=5), 1) is None, "a part is missing"
    assert broadcast_seats(first, decided((run(3),), parts=1, generation=6), 1) is None, "of another generation"
    assert broadcast_seats(first, decided((run(3),), parts=1, generation=5), 2) is None, "of another term"
    assert add_part(first, MembershipPart(task="t", generation=5, part=2, seats=(run(2),)), 2) is None
    anew = add_part(first, MembershipPart(task="t", generation=5, part=1, seats=(run(7),)), 2)
    assert broadcast_seats(anew, decided((run(8),), parts=1, generation=5), 2) == (run(7), run(8))
    assert broadcast_seats(first, decided((run(9),), generation=5), 2) == (run(9),), (
        "one that takes no parts needs none"
    )


def test_seat_runs_respect_worker_limit() -> None:
    many = tuple(SeatRun(node="n", number=n, seat=0, count=1024, joins=False) for n in range(129))
    with pytest.raises(BadEvent, match="more than 131072 workers"):
        encode(said(decided(many)))
    part = MembershipPart(task="t", generation=1, part=1, seats=many[:128])
    telling = add_part(None, part, 1)
    assert telling is not None and workers_in(telling.seats) == WORKERS_MAX
    assert add_part(telling, replace(part, part=2, seats=(run(1),)), 1) is None
    assert broadcast_seats(telling, decided((run(1),), parts=1, generation=1), 1) is None
    beyond = SeatRun(node="n", number=10**9 - 1, seat=0, count=2, joins=False)
    assert broadcast_seats(None, decided((beyond,), generation=1), 1) is None
    assert broadcast_seats(None, decided((replace(beyond, number=1, seat=2**52),), generation=1), 1) is None


# --- plans -----------------------------------------------------------------------------------------


@given(st.lists(st.lists(st.sampled_from("abc"), min_size=3, max_size=3).map(tuple), max_size=8))
def test_plan_runs_match_plan(replicas: list[tuple[str, ...]]) -> None:
    assignment = TaskAssignment(task="t", workers=3 * len(replicas), replicas=tuple(replicas), waf=7)
    runs = compact(assignment, 3)
    assert not runs.replicas and expand(runs) == assignment
    assert expand(assignment) is assignment


def test_plan_for_ten_thousand_nodes_fits() -> None:
    """80,000 workers in 20 tasks, on nodes with names of 24 letters; the names are shared."""
    assignments = [
        TaskAssignment(
            task=f"task{task}",
            workers=4000,
            replicas=tuple((f"rack-0123-node-{task * 500 + n // 8:09d}",) for n in range(4000)),
            waf=10**18,
        )
        for task in range(20)
    ]
    plan = PlanAdopted(
        epoch=1,
        assignments=tuple(compact(each, 1) for each in assignments),
        waf=10**18,
        basis="",
        trigger="",
        reason="",
    )
    body = encode(said(plan))
    assert len(body) < 300_000 < MAX_EVENT_BYTES
    read = decode(body).event
    assert isinstance(read, PlanAdopted)
    again = [expand(each) for each in read.assignments]
    assert again == assignments
    assert len({id(name) for replica in again[0].replicas for name in replica}) == 500


def test_oversized_plan_is_refused() -> None:
    runs = tuple(NodeRun(node="n", count=1024) for _ in range(129))
    assignment = TaskAssignment(task="t", workers=1, replicas=(), waf=1, nodes=runs, replica_workers=1)
    with pytest.raises(BadEvent, match="more than 131072 workers"):
        encode(said(PlanAdopted(epoch=1, assignments=(assignment,), waf=1, basis="", trigger="", reason="")))


# --- starts ----------------------------------------------------------------------------------------


def test_batch_start_command_has_answer_per_worker() -> None:
    command = StartWorkers(
        command_id="2.5.n1.17",
        node="n1",
        epoch=5,
        spec=TaskSpec(name="gpt"),
        starts=tuple(Start(number=n, replica=n, shard=0, store=STORE) for n in (3, 9)),
    )
    one, other = starts(command)
    assert (one.command_id, one.worker, one.replica, one.store) == ("2.5.n1.17/0", "gpt.3", 3, STORE)
    assert (other.command_id, other.worker, other.node, other.epoch) == ("2.5.n1.17/1", "gpt.9", "n1", 5)
    assert starts_of(command.command_id, other.command_id) and starts_of("2.5.n1.17", "2.5.n1.17")
    assert not starts_of("2.5.n1.1", other.command_id) and not starts_of("2.5.n1.17", "2.5.n1.170/1")
    assert not starts_of("", "2.5.n1.17"), "an empty id is no command of anybody"
