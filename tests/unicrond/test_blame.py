"""Whose fault it is that connections break: properties of the evidence, whatever was told and in whatever order."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.unicrond.cluster import MiniCluster
from tests.unicrond.losses import tell
from unicrond.core.faults.blame import PLAIN, BlameVerdict, judge, links, reports, verdict, weights
from unicrond.core.folding.failure_counts import readmit
from unicrond.core.state.state import Incident, Severity
from unicrond.core.state.task_parts import Troubles
from unicrond.events import vocabulary as v

draws = st.integers(0, 2**32).map(random.Random)


def names(count: int) -> list[str]:
    return [f"t.{number}" for number in range(count)]


def places(count: int) -> dict[str, str]:
    return {worker: f"n{number:02}" for number, worker in enumerate(names(count))}


def told_of(draw: random.Random, count: int, dead: set[frozenset[str]]) -> dict[str, tuple[str, ...]]:
    return tell(draw, names(count), dead)


def judged(told: dict[str, tuple[str, ...]], count: int, record: dict[str, int] | None = None) -> BlameVerdict:
    return judge(links(told, places(count)), record or {}, {})


def pairs(bad: list[int], count: int, draw: random.Random | None = None) -> set[frozenset[str]]:
    """The links of the bad ones to all others; with `draw` a part of them, of each bad one two at least."""
    worker = names(count)
    found: set[frozenset[str]] = set()
    for one in bad:
        others = [other for other in range(count) if other not in bad]
        chosen = others if draw is None else draw.sample(others, draw.randint(2, len(others)))
        found |= {frozenset((worker[one], worker[other])) for other in chosen}
    return found


@given(draws, st.integers(2, 8), st.data())
def test_verdict_ignores_order_of_reports(draw: random.Random, count: int, data: st.DataObject) -> None:
    """Any reports at all, true or not, of the same break, in any order, added one by one as the log brings them."""
    lists = st.lists(st.sampled_from(names(count)), unique=True).map(tuple)
    told = data.draw(st.dictionaries(st.sampled_from(names(count)), lists, min_size=1))
    record = data.draw(st.dictionaries(st.sampled_from(sorted(places(count).values())), st.integers(0, 9)))
    shuffled = {worker: told[worker] for worker in draw.sample(sorted(told), len(told))}
    assert judged(told, count, record) == judged(shuffled, count, record)


@given(draws, st.permutations(range(4)), st.permutations(range(4)))
def test_fold_reaches_same_verdict_in_any_order(draw: random.Random, one: list[int], other: list[int]) -> None:
    """The whole way: reports into the log, the fold's incident, the verdict."""
    found = []
    told: dict[str, tuple[str, ...]] = {}
    for order in (one, other):
        cluster = MiniCluster(1)
        for number in range(4):
            cluster.add_host(f"n{number}")
        cluster.submit("t", max_workers=4)
        cluster.run()
        task = cluster.state.tasks["t"]
        assert task.membership is not None
        workers = [member.worker for member in task.membership.members]
        told = told or tell(draw, workers, {frozenset((workers[1], peer)) for peer in workers if peer != workers[1]})
        for number in order:
            if workers[number] in told:
                cluster.report(workers[number], "connection_broken", lost=told[workers[number]])
        (incident,) = cluster.state.incidents.values()
        found.append(verdict(cluster.state.tasks["t"], incident))
    assert found[0] == found[1] and found[0].blamed == found[0].clear == (task.workers[workers[1]].node,)


def test_single_report_gives_no_clear_verdict() -> None:
    """The others may have left because of somebody else, and not have told yet."""
    cluster = MiniCluster(1)
    for number in range(3):
        cluster.add_host(f"n{number}")
    cluster.submit("t", max_workers=3)
    cluster.run()
    task = cluster.state.tasks["t"]
    assert task.membership is not None
    one, other, third = (member.worker for member in task.membership.members)
    cluster.report(one, "connection_broken", lost=(other, third))
    (incident,) = cluster.state.incidents.values()
    assert verdict(cluster.state.tasks["t"], incident) == BlameVerdict((task.workers[one].node,), ())
    for worker in (other, third):
        cluster.report(worker, "connection_broken", lost=(one,))
    (incident,) = cluster.state.incidents.values()
    assert verdict(cluster.state.tasks["t"], incident).clear == (task.workers[one].node,)


@given(draws, st.integers(3, 12), st.booleans())
def test_verdict_blames_single_bad_node_in_any_topology(draw: random.Random, count: int, all_links: bool) -> None:
    """It breaks links to two others or more; who notices first, who hears only of the leaving, is drawn."""
    guilty = draw.randrange(count)
    told = told_of(draw, count, pairs([guilty], count, None if all_links else draw))
    node = places(count)[names(count)[guilty]]
    found = judged(told, count)
    assert found.blamed == (node,), told
    if count > 3:
        assert found.clear == (node,)


@given(draws, st.integers(3, 8))
def test_verdict_blames_node_by_record_of_single_breaks(draw: random.Random, count: int) -> None:
    """Each single break fits two nodes as well; the one that is an end each time stands out after some."""
    guilty = draw.randrange(count)
    node, record = places(count)[names(count)[guilty]], Counter[str]()
    others = [other for other in range(count) if other != guilty]
    found = BlameVerdict()
    for turn in range(6):
        dead = {frozenset((names(count)[guilty], names(count)[others[turn % len(others)]]))}
        told = told_of(draw, count, dead)
        found = judged(told, count, record)
        record.update(weights(links(told, places(count))))
    assert found.blamed == (node,)


@pytest.mark.parametrize("guilty", range(3))
@pytest.mark.parametrize("whole_first", [True, False])
def test_echoes_never_blame_innocent_node(guilty: int, whole_first: bool) -> None:
    """Once both links are told of; once whoever has lost one leaves so soon that the third hears only of that."""
    workers, nodes = names(3), places(3)
    one, other = (worker for worker in workers if worker != workers[guilty])
    whole = {one: (workers[guilty],), other: tuple(sorted((one, workers[guilty])))}
    half = {one: (workers[guilty],), other: (one,)}
    first, second = (whole, half) if whole_first else (half, whole)
    assert judged(second, 3, weights(links(first, nodes))).blamed == (nodes[workers[guilty]],)


@given(draws, st.integers(5, 12))
def test_verdict_blames_two_bad_nodes_of_five_or_more(draw: random.Random, count: int) -> None:
    bad = draw.sample(range(count), 2)
    told = told_of(draw, count, pairs(bad, count) | {frozenset(names(count)[one] for one in bad)})
    found = judged(told, count)
    assert found.blamed == found.clear == tuple(sorted(places(count)[names(count)[one]] for one in bad))


@given(draws, st.integers(2, 8), st.integers(2, 8))
def test_verdict_gives_up_smaller_side(draw: random.Random, one: int, other: int) -> None:
    """All links between them are broken: the larger side trains on; of equal ones the one with the first name."""
    count = one + other
    workers = draw.sample(names(count), count)
    near, far = workers[:one], workers[one:]
    told = told_of(draw, count, {frozenset((a, b)) for a in near for b in far})
    found = judged(told, count)
    given_up = min((near, far), key=lambda side: (len(side), names(count)[0] in side))
    assert found.blamed == found.clear == tuple(sorted(places(count)[worker] for worker in given_up))


@given(draws, st.integers(2, 6))
def test_verdict_keeps_side_with_better_state(draw: random.Random, half: int) -> None:
    workers = draw.sample(names(2 * half), 2 * half)
    near, far = workers[:half], workers[half:]
    told = told_of(draw, 2 * half, {frozenset((a, b)) for a in near for b in far})
    node = places(2 * half)
    better = draw.choice((near, far))
    quality = dict.fromkeys(node.values(), (1, 4)) | {node[draw.choice(better)]: (1, 5)}
    found = judge(links(told, node), {}, quality)
    assert found.blamed == tuple(sorted(node[worker] for worker in (far if better is near else near)))


@given(draws, st.integers(2, 8))
def test_single_link_gives_no_clear_verdict(draw: random.Random, count: int) -> None:
    one, other = draw.sample(names(count), 2)
    assert judged({one: (other,), other: (one,)}, count).clear == ()


@given(draws, st.integers(3, 12))
def test_innocent_node_is_never_clearly_blamed(draw: random.Random, count: int) -> None:
    """Whatever part of its links one node breaks, time after time, nobody else is ever called clearly guilty."""
    guilty, record = draw.randrange(count), Counter[str]()
    node = places(count)[names(count)[guilty]]
    for _ in range(8):
        dead = pairs([guilty], count, draw)
        told = told_of(draw, count, dead)
        assert judged(told, count, record).clear in ((), (node,))
        record.update(weights(links(told, places(count))))


@given(draws, st.integers(3, 12))
def test_partial_reports_never_clearly_blame_innocent_node(draw: random.Random, count: int) -> None:
    """The agents of an older version tell of the break alone."""
    guilty, record = draw.randrange(count), dict[str, int]()
    node = places(count)[names(count)[guilty]]
    old = {name for name in names(count) if draw.random() < 0.5}
    for _ in range(8):
        told = told_of(draw, count, pairs([guilty], count, draw))
        told = {name: () if name in old else lost for name, lost in told.items()}
        assert judged(told, count, record).clear in ((), (node,))
        for link, weight in links(told, places(count)).items():
            for end in link:
                record[end] = record.get(end, 0) + weight


@pytest.mark.parametrize("told", [{}, {"t.0": ()}, {"t.0": (), "t.1": ()}, {"t.0": ("t.9",)}, {"t.9": ("t.0",)}])
def test_verdict_blames_no_node_without_evidence(told: dict[str, tuple[str, ...]]) -> None:
    assert judged(told, 3) == BlameVerdict()


def test_break_of_all_links_gives_no_clear_verdict() -> None:
    workers = names(4)
    told = {worker: tuple(peer for peer in workers if peer != worker) for worker in workers}
    found = judged(told, 4)
    assert len(found.blamed) == 1 and not found.clear


def test_workers_of_same_node_form_no_link() -> None:
    assert links({"t.0": ("t.1",)}, {"t.0": "n0", "t.1": "n0"}) == {}


def test_verdict_of_64_members_is_immediate() -> None:
    workers = names(64)
    told = {worker: tuple(peer for peer in workers if (int(peer[2:]) ^ int(worker[2:])) & 1) for worker in workers}
    assert judged(told, 64).blamed == tuple(f"n{number:02}" for number in range(1, 64, 2))


def test_verdict_blames_lost_worker_of_1024() -> None:
    """The first 64 name it and all that have left before them, later ones the one whose leaving has stopped them."""
    told: dict[str, tuple[str, ...]] = {}
    for worker in names(1024):
        if worker != "t.7":
            told[worker] = ("t.7", *told) if len(told) < 64 else (next(reversed(told)),)
    assert judged(told, 1024) == BlameVerdict(("n07",), ("n07",))


def test_verdict_of_many_lost_members_is_immediate() -> None:
    workers = names(300)
    told = {worker: tuple(workers[:12]) for worker in workers[12:]}
    assert judged(told, 300).blamed == tuple(f"n{number:02}" for number in range(12))


def test_two_replicas_without_names_count_as_one_link() -> None:
    cluster = MiniCluster(3)
    cluster.add_host("n0")
    cluster.add_host("n1")
    cluster.submit("t", max_workers=2)
    cluster.run()
    task = cluster.state.tasks["t"]
    one, other = sorted(task.workers)
    incident = Incident(
        id="i1",
        kind="connection_broken",
        severity=Severity.SEV3,
        node="n0",
        worker=one,
        generations={"t": 1},
        message="",
        occurred_us=0,
        detected_us=0,
        lost_peers={one: ""},
    )
    assert reports(task, incident) == {one: (other,)}
    assert reports(task, replace(incident, kind="collective_timeout")) == {one: ()}


@given(st.lists(st.sampled_from(names(3)), max_size=3, unique=True))
def test_fold_drops_lost_peers_that_are_no_members(lost: list[str]) -> None:
    assume(lost)
    cluster = MiniCluster(3)
    for number in range(3):
        cluster.add_host(f"n{number}")
    cluster.submit("t", max_workers=3)
    cluster.run()
    reporter = next(iter(cluster.state.tasks["t"].workers))
    cluster.report(reporter, "connection_broken", lost=(*lost, "t.99", reporter))
    (incident,) = cluster.state.incidents.values()
    known = tuple(name for name in sorted(lost) if name in cluster.state.tasks["t"].workers and name != reporter)
    assert incident.links == ({reporter: known} if known else {})
    assert isinstance(cluster.log[-1].envelope.event, v.ErrorReported)


def test_readmission_clears_record_of_node_and_its_peers() -> None:
    held = Troubles(ends={"n1": 6, "n3": 6, "n5": 1}, breaks={"n3": 3}, unclear_breaks={"n3": 3})
    forgiven = readmit(held, "n3")
    assert forgiven.ends == {"n1": 1, "n5": 1} and not forgiven.breaks and not forgiven.unclear_breaks
    verdict = judge({("n1", "n3"): PLAIN}, forgiven.ends, {})
    assert verdict.blamed == ("n1",) and verdict.clear == ()
    assert readmit(held, "n4") == held
