"""Links between nodes (faults/links.py): who is probed, which end a task goes on without, and when all are back."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.unicrond.cluster import SECOND_US, Host, MiniCluster
from unicrond.core.deciding.plans import build_plan, needed_solves
from unicrond.core.faults import links
from unicrond.core.faults.program_faults import LOOPING_MIN
from unicrond.core.folding.plans import membership_decided
from unicrond.core.planning.placement import place
from unicrond.core.planning.solver import solve
from unicrond.core.rules.survey import Survey
from unicrond.core.state.changes import with_task
from unicrond.core.state.holds import Brakes
from unicrond.core.state.node_links import LinkProbing, NodeLink, link_key
from unicrond.core.state.state import ClusterState, Severity, Task
from unicrond.core.state.task_parts import WARM_UP, Crashes
from unicrond.display.cluster_tables import links_table
from unicrond.events import vocabulary as v
from unicrond.events.vocabulary.shape import Shape
from unicrond.events.wire.envelope import Envelope, QuarantinedMessage, RecordedEvent
from unicrond.views.notifications import Notice, step_notices
from unicrond.views.view import LogStep


class LinkedCluster(MiniCluster):
    """Agents answer probes. `conditions`: pair -> what both ends find; the rest is good. No group with a silent pair
    meets."""

    def __init__(self, seed: int, nodes: int, **spec: Any) -> None:
        super().__init__(seed)
        self.conditions: dict[frozenset[str], str] = {}
        #: Who finds every link good, whatever it is.
        self.blind: set[str] = set()
        #: Who never answers.
        self.mute: set[str] = set()
        #: Who hears the datagrams of others.
        self.hearers: set[str] = set()
        self.watches: dict[tuple[str, str], str] = {}
        #: Where agents that join from now on answer probes.
        self.port = 9
        for number in range(nodes):
            self.add_host(f"n{number}")
        self.submit("t", max_workers=nodes, **spec)
        self.run()
        self.train("t")
        self.run()

    def append(self, event: v.AnyEvent, producer: str, boot: int) -> RecordedEvent:
        return super().append(
            replace(event, probe_port=self.port) if isinstance(event, v.NodeJoined) else event, producer, boot
        )

    def _obey(self, host: Host) -> None:
        command = host.commands[0].envelope.event
        if not isinstance(command, v.ProbeLinks):
            super()._obey(host)
            return
        host.commands.pop(0)
        if host.name in self.mute:
            return
        self.watches |= {(host.name, peer.node): command.command_id for peer in command.peers}
        if command.task:
            found = [(peer.node, self._condition(host.name, peer.node)) for peer in command.peers]
            self.tell(host.name, command.command_id, *found)

    def _condition(self, node: str, peer: str) -> str:
        return "good" if node in self.blind else self.conditions.get(frozenset((node, peer)), "good")

    def tell(self, node: str, command_id: str, *found: tuple[str, str]) -> None:
        probes = [
            v.LinkProbe(
                peer=peer,
                condition=condition,  # type: ignore[arg-type]
                took_us=SECOND_US,
                hears_peer=condition == "silent" and node in self.hearers,
            )
            for peer, condition in found
        ]
        self.say(self.hosts[node], v.LinksProbed(node=node, command_id=command_id, probes=tuple(probes)))

    def group_up(self, task: str) -> bool:
        membership = self.state.tasks[task].membership
        nodes = [member.node for member in membership.members] if membership else []
        bad = [pair for pair, condition in self.conditions.items() if condition == "silent" and pair <= set(nodes)]
        return not bad and super().group_up(task)

    def stand_still(self, *, is_waiting: bool = True) -> None:
        """All members are late, and wait in a collective or not."""
        task = self.state.tasks["t"]
        assert task.membership is not None
        for member in task.membership.members:
            late = v.HangSuspected(
                node=member.node,
                task="t",
                worker=member.worker,
                generation=task.generation,
                iteration=task.progress.iteration + 1,
                phase="reduce",
                micro_batch=0,
                collectives_entered=5,
                is_waiting=is_waiting,
                is_stopped=False,
                still_us=3 * SECOND_US,
                limit_us=3 * SECOND_US,
                report_number=1,
            )
            self.say(self.hosts[member.node], late)

    def cut(self, node: str, peer: str, condition: str = "silent") -> None:
        """A link becomes bad, the group stands still, and what follows is done."""
        self.conditions[frozenset((node, peer))] = condition
        self.stand_still()
        self.run()

    def mend(self, node: str, peer: str) -> None:
        """The link is good again, and both ends that watch it say so."""
        del self.conditions[frozenset((node, peer))]
        for one, other in ((node, peer), (peer, node)):
            self.tell(one, self.watches[one, other], (other, "good"))
        self.run()
        self.train("t")
        self.run()

    def said(self, kind: type[v.AnyEvent]) -> list[Any]:
        return [entry.envelope.event for entry in self.log if isinstance(entry.envelope.event, kind)]

    @property
    def members(self) -> list[str]:
        membership = self.state.tasks["t"].membership
        return sorted(member.node for member in membership.members) if membership else []


@pytest.mark.parametrize("seed", range(6))
def test_a_silent_link_costs_one_end_once(seed: int) -> None:
    cluster = LinkedCluster(seed, nodes=3)
    cluster.cut("n0", "n1")
    (withdrawn,) = cluster.said(v.WorkersWithdrawn)
    assert {withdrawn.node, *withdrawn.peers} == {"n0", "n1"}
    assert cluster.members == sorted({"n0", "n1", "n2"} - {withdrawn.node})
    assert not cluster.said(v.NodeIsolated) and not cluster.said(v.IncidentEscalated)
    assert not cluster.state.incidents
    assert (cluster.state.closed_incidents[-1].kind, cluster.state.closed_incidents[-1].severity) == (
        "link_fault",
        Severity.SEV2,
    )
    assert not cluster.state.tasks["t"].troubles.of_nodes, "nothing is held against either node"
    cluster.train("t", steps=3)
    cluster.run()
    assert len(cluster.said(v.WorkersWithdrawn)) == 1
    cluster.mend("n0", "n1")
    assert cluster.members == ["n0", "n1", "n2"]
    cluster.assert_whole()


def test_the_lead_stays() -> None:
    cluster = LinkedCluster(1, nodes=3)
    membership = cluster.state.tasks["t"].membership
    assert membership is not None
    lead, other = membership.members[0].node, membership.members[1].node
    cluster.cut(lead, other)
    assert [event.node for event in cluster.said(v.WorkersWithdrawn)] == [other]


def test_a_node_that_is_silent_to_all_is_the_one() -> None:
    cluster = LinkedCluster(2, nodes=4)
    for peer in ("n1", "n2"):
        cluster.conditions[frozenset(("n0", peer))] = "silent"
    cluster.cut("n0", "n3")
    assert [event.node for event in cluster.said(v.WorkersWithdrawn)] == ["n0"]
    assert cluster.members == ["n1", "n2", "n3"]


def test_a_free_node_takes_the_place() -> None:
    cluster = LinkedCluster(3, nodes=3)
    cluster.add_host("n3")
    cluster.run()
    cluster.cut("n0", "n1")
    (withdrawn,) = cluster.said(v.WorkersWithdrawn)
    assert cluster.members == sorted({"n0", "n1", "n2", "n3"} - {withdrawn.node})


def test_links_of_a_late_replica_are_probed_once_though_the_logs_clock_stands_still() -> None:
    """The clock of the log's server was set back: no time passes for the head, and two ranks of a replica are late."""
    cluster = LinkedCluster(1, nodes=2, pp=2, min_workers=2)
    cluster.now_us -= 3_600 * SECOND_US
    cluster.stand_still(is_waiting=False)
    for _ in range(4):
        cluster.decide()
        cluster.obey_all()
    assert [event.node for event in cluster.said(v.ProbeLinks)] == ["n0", "n1"]
    cluster.train("t")  # and once more behind a step
    cluster.stand_still(is_waiting=False)
    cluster.decide()
    cluster.obey_all()
    assert len(cluster.said(v.ProbeLinks)) == 4


def test_the_other_end_works_for_another_task() -> None:
    cluster = LinkedCluster(4, nodes=3)
    cluster.cut("n0", "n1")
    (withdrawn,) = cluster.said(v.WorkersWithdrawn)
    cluster.submit("u", max_workers=1)
    cluster.run()
    membership = cluster.state.tasks["u"].membership
    assert membership is not None and [member.node for member in membership.members] == [withdrawn.node]


def test_failing_task_makes_room_for_one_whose_link_is_silent() -> None:
    """Both ends are free, and each has room for one: the pair needs one of them and another node."""
    cluster = LinkedCluster(6, nodes=2, pp=2, min_workers=2)
    cluster.add_host("n2")
    cluster.submit("garbage", max_workers=1)
    cluster.run()
    crashes = Crashes(count=LOOPING_MIN, fruitless=1)
    garbage = cluster.state.tasks["garbage"]
    cluster.state = with_task(cluster.state, replace(garbage, troubles=replace(garbage.troubles, crashes=crashes)))
    link = NodeLink(first="n0", second="n1", conditions={"n0": "silent", "n1": "silent"})
    state = replace(cluster.state, links={link_key("n0", "n1"): link})
    survey = Survey(state, cluster.policy)
    plan = build_plan(survey, {problem: solve(problem) for problem in needed_solves(survey)})
    assert plan is not None
    shares = {share.task: share.replicas for share in plan.assignments}
    assert "n2" in shares["t"][0] and shares["garbage"][0][0] in ("n0", "n1")


def test_one_end_alone_proves_nothing() -> None:
    cluster = LinkedCluster(5, nodes=3)
    cluster.blind.add("n1")
    cluster.conditions[frozenset(("n0", "n1"))] = "slow"
    cluster.stand_still()
    cluster.run()
    assert not cluster.said(v.WorkersWithdrawn)
    assert len(cluster.members) == 3


def test_an_agent_that_never_answers_holds_nothing_up() -> None:
    cluster = LinkedCluster(6, nodes=3)
    cluster.mute.add("n2")
    cluster.conditions[frozenset(("n0", "n1"))] = "silent"
    cluster.stand_still()
    cluster.run(passing=("links", "symptom", "exit"))
    assert len(cluster.said(v.WorkersWithdrawn)) == 1
    assert len(cluster.members) == 2


def test_a_slow_link_is_left_alone_until_it_stops_the_task_twice() -> None:
    cluster = LinkedCluster(7, nodes=3)
    cluster.cut("n0", "n1", "slow")
    assert not cluster.said(v.WorkersWithdrawn)
    assert len(cluster.members) == 3
    cluster.stand_still()
    cluster.run()
    (withdrawn,) = cluster.said(v.WorkersWithdrawn)
    assert {withdrawn.node, *withdrawn.peers} == {"n0", "n1"}, "and nobody else"
    assert not cluster.said(v.IncidentEscalated)


def slow_report(cluster: LinkedCluster, iteration_us: int) -> v.DegradationObserved:
    task = cluster.state.tasks["t"]
    lead = next(iter(task.workers.values()))
    return v.DegradationObserved(
        node=lead.node,
        task="t",
        worker=lead.worker,
        generation=task.generation,
        iteration=9,
        iteration_us=iteration_us,
        usual_us=10,
        slowest="",
        compute_us=5,
        others_us=5,
    )


def test_end_that_was_left_returns_when_both_say_so() -> None:
    """A link that loses a quarter of its packets is found good by one end every few seconds: its other end was taken
    back, and evicted again."""
    cluster = LinkedCluster(19, nodes=3)
    for _ in range(2):
        cluster.cut("n0", "n1", "slow")
    (withdrawn,) = cluster.said(v.WorkersWithdrawn)
    cluster.tell("n1", cluster.watches["n1", "n0"], ("n0", "good"))
    cluster.run()
    assert len(cluster.members) == 2 and withdrawn.node not in cluster.members
    cluster.stand_still()
    cluster.run()
    assert len(cluster.said(v.WorkersWithdrawn)) == 1, "once for one cause"
    cluster.tell("n0", cluster.watches["n0", "n1"], ("n1", "good"))
    cluster.run()
    assert cluster.members == ["n0", "n1", "n2"]


def test_agent_that_answers_no_probes_keeps_nobody_out() -> None:
    cluster = LinkedCluster(20, nodes=3)
    cluster.cut("n0", "n1")
    cluster.port = 0
    cluster.add_host("n1")
    cluster.run()
    assert not cluster.state.links and cluster.members == ["n0", "n1", "n2"]


def test_task_that_is_slow_again_soon_has_its_links_probed_later() -> None:
    """A busy moment had them probed, and the link that became bad a little later was not looked at for its whole
    life."""
    cluster = LinkedCluster(21, nodes=3)
    lead = cluster.hosts[slow_report(cluster, 20).node]
    cluster.say(lead, slow_report(cluster, 20))
    cluster.run()
    rounds = cluster.state.tasks["t"].group.probing.rounds
    cluster.conditions[frozenset(("n1", "n2"))] = "slow"
    cluster.say(lead, slow_report(cluster, 30))
    cluster.run()
    assert cluster.state.tasks["t"].group.probing.rounds == rounds and not cluster.state.links
    cluster.run(passing=("links",))
    assert cluster.state.tasks["t"].group.probing.rounds == rounds + 1
    assert list(cluster.state.links) == [link_key("n1", "n2")]


def test_task_that_has_become_twice_as_slow_has_its_links_probed_at_once() -> None:
    cluster = LinkedCluster(22, nodes=3)
    lead = cluster.hosts[slow_report(cluster, 20).node]
    cluster.say(lead, slow_report(cluster, 20))
    cluster.run()
    cluster.conditions[frozenset(("n1", "n2"))] = "slow"
    cluster.say(lead, slow_report(cluster, 40))
    cluster.run()
    assert list(cluster.state.links) == [link_key("n1", "n2")]


def train_at(cluster: LinkedCluster, iteration_us: int) -> None:
    """As many iterations as tell how long one takes."""
    membership = cluster.state.tasks["t"].membership
    assert membership is not None
    lead, first = membership.members[0], cluster.state.tasks["t"].progress.iteration + 1
    for iteration in range(first, first + WARM_UP + links.TIMINGS_MIN):
        committed = v.StepCommitted(
            node=lead.node,
            task="t",
            worker=lead.worker,
            generation=membership.generation,
            first=iteration,
            last=iteration,
            samples=8,
            samples_digest=0,
            loss=1.0,
            duration_us=iteration_us,
            micro_batches_by_rank=(1,),
        )
        cluster.say(cluster.hosts[lead.node], committed)
    cluster.run()


@pytest.mark.parametrize(("iteration_us", "evictions"), [(1600, 1), (1300, 0)])
def test_group_that_begins_with_a_slow_link_knows_how_long_iterations_took_before(
    iteration_us: int, evictions: int
) -> None:
    """It stood still once and went on, ten times slower, for a minute: its own baseline knew no better."""
    cluster = LinkedCluster(24, nodes=3)
    train_at(cluster, 900)
    cluster.cut("n0", "n1", "slow")
    assert not cluster.said(v.WorkersWithdrawn) and len(cluster.members) == 3
    train_at(cluster, iteration_us)
    assert len(cluster.said(v.WorkersWithdrawn)) == evictions


def test_group_that_does_not_meet_is_probed_after_longer_each_time() -> None:
    """The deadline of the answers went on as that of the meeting: a round every two seconds."""
    cluster = LinkedCluster(23, nodes=3)
    task, now_us = cluster.state.tasks["t"], cluster.now_us
    membership = replace(task.membership, generation=task.generation + 1)
    names, lengths = [], []
    for rounds in (1, 2):
        for orders in ({"n0": "1.1.n0.1"}, {}):
            probing = LinkProbing(rounds=rounds, orders=orders, ordered_us=now_us)
            unmet = replace(
                task, membership=membership, group=replace(task.group, probing=probing, lead_confirmed=False)
            )
            ((name, length_us),) = links.deadlines(with_task(cluster.state, unmet), unmet)
            names.append(name)
            lengths.append(length_us)
    assert len(set(names)) == 4
    assert lengths == [links.ANSWERS_US, 2 * links.MEETING_US, links.ANSWERS_US, 4 * links.MEETING_US]


def test_a_flapping_link_needs_longer_each_time() -> None:
    cluster = LinkedCluster(8, nodes=3)
    patience = []
    for _ in range(4):
        cluster.cut("n0", "n1")
        (link,) = cluster.state.links.values()
        patience.append(links.patience_us(link))
        watch = [event for event in cluster.said(v.ProbeLinks) if not event.task][-1]
        assert watch.patience_us == patience[-1], "the agents are told"
        cluster.mend("n0", "n1")
    assert patience == [0, 10 * SECOND_US, 20 * SECOND_US, 40 * SECOND_US]


def test_a_new_agent_is_told_to_watch_and_its_peer_to_watch_the_new_one() -> None:
    """It answers probes at another port than the one before it."""
    cluster = LinkedCluster(9, nodes=3)
    cluster.cut("n0", "n1")
    before = len(cluster.said(v.ProbeLinks))
    cluster.port = 10
    cluster.add_host("n1")
    cluster.run()
    orders = {event.node: event.peers for event in cluster.said(v.ProbeLinks)[before:]}
    assert {node: [(peer.node, peer.port) for peer in peers] for node, peers in orders.items()} == {
        "n0": [("n1", 10)],
        "n1": [("n0", 9)],
    }
    assert len(cluster.said(v.ProbeLinks)) == before + 2, "once"


def test_an_order_that_a_new_agent_has_overtaken_is_given_again() -> None:
    """The watch was decided before the peer's new agent joined, and comes after it: it names a port that is gone."""
    cluster = LinkedCluster(9, nodes=3)
    cluster.cut("n0", "n1")
    overtaken = [event for event in cluster.said(v.ProbeLinks) if event.node == "n0" and not event.task][-1]
    cluster.port = 10
    cluster.add_host("n1")
    number = cluster.state.nodes["n0"].commands + 1
    again = replace(overtaken, command_id=f"{cluster.state.term}.0.n0.{number}")
    cluster.append(again, "coordinator", cluster.state.term)
    before = len(cluster.said(v.ProbeLinks))
    cluster.run()
    orders = [event for event in cluster.said(v.ProbeLinks)[before:] if event.node == "n0"]
    assert [(peer.node, peer.port) for event in orders for peer in event.peers] == [("n1", 10)]


def test_a_forgotten_node_takes_its_links_along() -> None:
    cluster = LinkedCluster(10, nodes=3)
    cluster.cut("n0", "n1")
    assert list(cluster.state.links) == [link_key("n0", "n1")]
    cluster.kill_host(cluster.hosts["n1"])
    cluster.lose(cluster.hosts["n1"])
    cluster.run()
    cluster.append(v.ForgetRequested(node="n1", reason="gone", leave=False), "api", 1)
    cluster.run()
    assert "n1" not in cluster.state.nodes and not cluster.state.links


def test_what_both_ends_say_makes_a_link_silent() -> None:
    link = NodeLink(first="a", second="b", conditions={"a": "silent"})
    assert not link.is_poor and not link.is_barred
    assert replace(link, conditions={"a": "silent", "b": "silent"}).is_barred
    slow = replace(link, conditions={"a": "silent", "b": "slow"})
    assert slow.is_poor and not slow.is_barred and replace(slow, has_stopped_task=True).is_barred


@pytest.mark.parametrize(
    ("hears", "text"),
    [
        ({"n1"}, "n1 -> n0 is cut; the other way works"),
        ({"n0"}, "n0 -> n1 is cut; the other way works"),
        (set(), "nothing passes between n0 and n1"),
        ({"n0", "n1"}, "nothing passes between n0 and n1"),
    ],
)
def test_story_names_the_way_that_is_cut(hears: set[str], text: str) -> None:
    """An end that hears the other, and is not heard, shows which."""
    cluster = LinkedCluster(25, nodes=3)
    cluster.hearers = hears
    cluster.cut("n0", "n1")
    (withdrawn,) = cluster.said(v.WorkersWithdrawn)
    assert withdrawn.reason == text
    assert cluster.state.closed_incidents[-1].message == text
    (row,) = links_table(cluster.state).rows
    assert row[1] == text.partition(";")[0].removesuffix(" between n0 and n1")


def test_way_is_named_by_both_ends_alone() -> None:
    link = NodeLink(first="a", second="b", conditions={"a": "silent", "b": "silent"}, hears={"a": True, "b": False})
    assert link.cut_way == ("a", "b")
    assert replace(link, hears={"a": True}).cut_way is None
    assert replace(link, conditions={"a": "silent", "b": "slow"}).cut_way is None


def test_withdrawal_that_a_brake_holds_is_told_once() -> None:
    """While the next probes were awaited nothing asked for it, so it was told as lifted and held in turns."""
    cluster = LinkedCluster(26, nodes=3)
    cluster.state = replace(cluster.state, brakes=Brakes(evictions_per_hour=0))
    cluster.cut("n0", "n1")
    for _ in range(3):
        cluster.pass_deadlines("links")
        cluster.run()
        cluster.stand_still()
        cluster.run()
    (held,) = cluster.said(v.DecisionHeld)
    assert (held.action, held.limit) == ("withdrawal", "evictions_per_hour") and not cluster.said(v.HoldLifted)
    cluster.mend("n0", "n1")
    assert len(cluster.said(v.HoldLifted)) == 1 and not cluster.state.holds
    assert not cluster.said(v.WorkersWithdrawn) and len(cluster.members) == 3


NAMES = [f"n{number}" for number in range(6)]
PAIRS = st.lists(st.sampled_from(list(combinations(NAMES, 2))), min_size=1, max_size=8, unique=True)


@given(pairs=PAIRS, weights=st.lists(st.integers(1, 4), min_size=len(NAMES), max_size=len(NAMES)))
def test_the_ends_that_go_are_the_cheapest(pairs: list[tuple[str, str]], weights: list[int]) -> None:
    costs = {name: (weight,) for name, weight in zip(NAMES, weights, strict=True)}
    gone = links.ends_to_leave(pairs, costs)
    assert all(set(pair) & set(gone) for pair in pairs)
    covers = [c for n in range(7) for c in combinations(NAMES, n) if all(set(pair) & set(c) for pair in pairs)]
    assert sum(costs[name][0] for name in gone) == min(sum(costs[name][0] for name in c) for c in covers)


@given(
    pairs=PAIRS,
    counts=st.lists(st.integers(0, 6), min_size=1, max_size=3),
    slots=st.lists(st.integers(1, 3), min_size=len(NAMES), max_size=len(NAMES)),
)
def test_no_task_is_placed_on_both_ends(pairs: list[tuple[str, str]], counts: list[int], slots: list[int]) -> None:
    nodes = dict(zip(NAMES, slots, strict=True))
    tasks = {f"t{number}": count for number, count in enumerate(counts)}
    placed = place(tasks, dict.fromkeys(tasks, Shape(1, 1)), nodes, {}, pairs)
    for name, count in tasks.items():
        on = {node for replica in placed.replicas[name] for node in replica}
        assert not links.among(pairs, on)
        assert len(placed.replicas[name]) + placed.short.get(name, 0) == count


@given(count=st.integers(2, 40))
def test_probes_are_mutual_and_few(count: int) -> None:
    cluster = LinkedCluster(0, nodes=2)
    nodes = [f"m{number}" for number in range(count)]
    peers = links.peers_to_probe(cluster.state.tasks["t"], None, nodes)
    assert all(node in peers[peer] for node, others in peers.items() for peer in others)
    assert all(1 <= len(others) <= links.NEIGHBOURS_MAX for others in peers.values()) and len(peers) == count


def test_people_are_told_of_the_pair_and_of_its_end() -> None:
    cluster = LinkedCluster(11, nodes=3)
    before = cluster.state
    cluster.cut("n0", "n1", "slow")
    table = links_table(cluster.state)
    assert [row[:2] for row in table.rows] == [("n0-n1", "slow")]
    (notice,) = [one for one in notices_between(before, cluster.state) if one.rule == "link"]
    assert "the link between n0 and n1 is bad" in notice.title and notice.text == "tasks on both: t"
    before = cluster.state
    cluster.mend("n0", "n1")
    (notice,) = [one for one in notices_between(before, cluster.state) if one.rule == "link"]
    assert notice.is_over and not links_table(cluster.state).rows


def test_a_task_that_is_slow_for_no_workers_fault_has_its_links_probed() -> None:
    cluster = LinkedCluster(12, nodes=3)
    cluster.conditions[frozenset(("n1", "n2"))] = "slow"
    slow = slow_report(cluster, 20)
    cluster.say(cluster.hosts[slow.node], slow)
    cluster.run()
    assert list(cluster.state.links) == [link_key("n1", "n2")]
    assert len(cluster.members) == 3 and not cluster.said(v.WorkersWithdrawn)


@pytest.mark.parametrize(("compute_us", "is_probed"), [(6, True), (5 + 200, False)])
def test_worker_that_stands_out_a_little_explains_no_slow_task(compute_us: int, *, is_probed: bool) -> None:
    """On a busy machine somebody always does. An iteration takes 600 longer; three replicas share the micro-batches."""
    cluster = LinkedCluster(18, nodes=3, global_batch=12)
    task = cluster.state.tasks["t"]
    lead = next(iter(task.workers.values()))
    slow = v.DegradationObserved(
        node=lead.node,
        task="t",
        worker=lead.worker,
        generation=task.generation,
        iteration=9,
        iteration_us=700,
        usual_us=100,
        slowest=lead.worker,
        compute_us=compute_us,
        others_us=5,
    )
    cluster.say(cluster.hosts[lead.node], slow)
    cluster.run()
    assert any(event.task for event in cluster.said(v.ProbeLinks)) is is_probed


@pytest.mark.parametrize("worker", ["t.999", "t.0"])
def test_degradation_of_no_member_has_no_link_probed(worker: str) -> None:
    """Whoever has a node's key could fill the log with orders and answers, and cost a healthy task an end."""
    cluster = LinkedCluster(15, nodes=3)
    task = cluster.state.tasks["t"]
    slow = v.DegradationObserved(
        node="n0",
        task="t",
        worker=worker,
        generation=task.generation,
        iteration=9,
        iteration_us=20,
        usual_us=1,
        slowest="",
        compute_us=5,
        others_us=5,
    )
    before = len(cluster.log)
    cluster.say(cluster.hosts["n0"], slow)
    cluster.run()
    assert not [e for e in cluster.log[before:] if isinstance(e.envelope.event, v.ProbeLinks)]


def test_repeated_degradation_is_probed_once_a_minute() -> None:
    cluster = LinkedCluster(16, nodes=3)
    for _ in range(5):
        slow = slow_report(cluster, 20)
        cluster.say(cluster.hosts[slow.node], slow)
        cluster.run()
    orders = [e for e in cluster.log if isinstance(e.envelope.event, v.ProbeLinks) and e.envelope.event.task]
    assert 0 < len(orders) <= 3


def test_answer_of_a_lost_node_is_not_awaited() -> None:
    """An order without an answer kept the group from every other response."""
    cluster = LinkedCluster(17, nodes=2)
    task = cluster.state.tasks["t"]
    probing = LinkProbing(orders={"n0": "1.1.n0.1", "n1": "1.1.n1.1"}, ordered_us=cluster.now_us)
    state = with_task(cluster.state, replace(task, group=replace(task.group, probing=probing)))
    last = next(e.envelope.event for e in reversed(cluster.log) if isinstance(e.envelope.event, v.MembershipDecided))
    seats = tuple(run for run in last.seats if run.node == "n0")
    decided = replace(last, generation=task.generation + 1, seats=seats, urgent=True)
    envelope = Envelope(producer="coordinator", boot=1, number=10**6, term=state.term, observed_at_us=1, event=decided)
    after = membership_decided(state, decided, envelope).tasks["t"]
    assert after.group.probing.orders == {"n0": "1.1.n0.1"}
    assert list(links.deadlines(state, after)), "a group of one node waits for its own answer with an end"


def trained_at(usual_us: int, iteration_us: int) -> Task:
    cluster = LinkedCluster(13, nodes=3)
    task = cluster.state.tasks["t"]
    pace = replace(task.pace, timings=(iteration_us,) * 5)
    group = replace(task.group, probing=LinkProbing(usual_us=usual_us))
    return replace(task, pace=pace, group=group)


def test_a_slow_link_is_left_where_the_rest_would_be_faster() -> None:
    assert not links.goes_better_without(trained_at(0, 900), workers=1), "it is not known what is usual"
    assert not links.goes_better_without(trained_at(100, 160), workers=1), "two need 150, and a little is not enough"
    assert links.goes_better_without(trained_at(100, 170), workers=1)
    assert not links.goes_better_without(trained_at(100, 170), workers=2), "one alone needs 300"
    assert not links.goes_better_without(trained_at(100, 900), workers=3), "nobody would be left"


def notices_between(before: ClusterState, after: ClusterState) -> list[Notice]:
    return step_notices(LogStep(before, QuarantinedMessage(1, 0, "unicron.v1.obs.n1.X", "not JSON", 0), after))
