"""Many nodes lost at once: one incident, and no machine to blame."""

from __future__ import annotations

import msgspec
import pytest

from tests.replay.test_story import accounts_of
from tests.replay.test_verify import verify
from tests.unicrond.cluster import MiniCluster, members
from tests.unicrond.test_brakes import break_gpu, held, isolated
from tests.unicrond.test_deaf_head import returned
from tests.unicrond.test_departures import of
from tests.unicrond.test_liveness import NAMES, Bus, node
from tests.unicrond.test_program_faults import end
from unicrond.core.faults.program_faults import LOOPING_MIN
from unicrond.core.fold import fold
from unicrond.core.nodes.liveness import MOST_SILENT_FACTOR, VerdictLimiter
from unicrond.core.nodes.outages import GATHER_MAX_US, GATHER_US, Domains, Loss, losses
from unicrond.core.rules.survey import Survey
from unicrond.core.state.changes import with_task
from unicrond.core.state.policy import Policy
from unicrond.core.state.state import ClusterState, NodeStatus
from unicrond.core.state.task_parts import Crashes
from unicrond.display.cluster_tables import nodes_table
from unicrond.display.describe import describe_object
from unicrond.display.queue import pending_tasks
from unicrond.events import vocabulary as v
from unicrond.page.attention import state_alarms
from unicrond.page.view import view
from unicrond.service.coordinator.alarms import outage_alarms

RACKS = [f"{rack}{number}" for rack in "abc" for number in range(3)]


class RackBus(Bus):
    """A bus that folds NodesLost too."""

    def kinds(self, seconds: float, alive: list[str]) -> list[str]:
        found: list[str] = []
        end_us = self.now_us + int(seconds * 1e6)
        while self.now_us < end_us:
            self.now_us += 100_000
            if self.now_us % 500_000 == 0:
                self.beat("coordinator")
            for place, name in enumerate(alive):
                if self.now_us % 1_000_000 == 100_000 * (place % 9):
                    self.beat(name)
            for verdict in self.liveness.verdicts(self.nodes, self.now_us):
                found.append(type(verdict).__name__)
                names = verdict.nodes_named()
                status = NodeStatus.UP if isinstance(verdict, v.NodeReturned) else NodeStatus.LOST
                self.nodes = {**self.nodes, **{name: node(name, status) for name in names}}
        return found


def test_rack_whose_nodes_beat_at_different_times_is_lost_as_one() -> None:
    bus = RackBus(RACKS)
    assert bus.kinds(5, RACKS) == []
    found = bus.kinds(4, RACKS[:6])
    assert found == ["NodesLost"]
    assert bus.kinds(4, RACKS) == ["NodeReturned"] * 3


def test_few_nodes_are_lost_each_by_itself_and_at_once() -> None:
    bus = RackBus(RACKS)
    bus.kinds(5, RACKS)
    assert bus.kinds(4, RACKS[:7]) == ["NodeLost"] * 2
    bus = RackBus(NAMES)
    bus.kinds(5, NAMES)
    limit_s = bus.liveness.limit_us / 1e6
    assert bus.kinds(limit_s - 0.5, NAMES[1:]) == [] and bus.kinds(0.7, NAMES[1:]) == ["NodeLost"]


def test_most_nodes_are_lost_as_one_after_longer() -> None:
    bus = RackBus(NAMES)
    bus.kinds(5, NAMES)
    limit_s = bus.liveness.limit_us / 1e6 * MOST_SILENT_FACTOR
    assert bus.kinds(limit_s - 1, NAMES[:1]) == []
    assert bus.kinds(2.5, NAMES[:1]) == ["NodesLost"]


def rack_cluster(seed: int, hold_s: float = 0.0, *, spares: tuple[str, ...] = ()) -> MiniCluster:
    cluster = MiniCluster(seed, Policy(outage_hold_s=hold_s))
    for name in [*RACKS, *spares]:
        cluster.add_host(name)
    cluster.submit("big", max_workers=5)
    cluster.submit("small", max_workers=4)
    cluster.run()
    cluster.train("big", 3)
    cluster.train("small", 3)
    return cluster


def lose_rack(cluster: MiniCluster, names: list[str]) -> None:
    for name in names:
        cluster.kill_host(cluster.hosts[name])
    cluster.append(v.NodesLost(nodes=tuple(names), reason="silent"), "coordinator", cluster.state.term)


@pytest.mark.parametrize("seed", range(6))
def test_lost_rack_is_one_incident_one_failure_one_plan(seed: int) -> None:
    cluster = rack_cluster(seed)
    since = len(cluster.log)
    lose_rack(cluster, RACKS[:3])
    (incident,) = cluster.state.incidents.values()
    assert incident.kind == "domain_lost" and incident.nodes == tuple(RACKS[:3]) and incident.severity == 1
    assert incident.location == "nodes a0, a1, a2" and not incident.node
    cluster.run()
    cluster.assert_whole()
    assert [each.kind for each in cluster.state.closed_incidents] == ["domain_lost"]
    assert len(of(cluster, v.PlanAdopted, since)) == 1 and not of(cluster, v.NodeIsolated, since)
    assert cluster.state.ledger.failures == 1


@pytest.mark.parametrize("times", [1, 4])
def test_returns_from_outage_are_no_flaps(times: int) -> None:
    cluster = rack_cluster(1)
    for _ in range(times):
        lose_rack(cluster, RACKS[:3])
        cluster.run()
        for name in RACKS[:3]:
            cluster.add_host(name)
        cluster.run()
    cluster.assert_whole()
    assert not any(each.health.returns_us or each.isolation.active for each in cluster.state.nodes.values())
    lose_rack(cluster, RACKS[:3])
    for name in RACKS[:3]:
        cluster.hosts[name].up = True
        returned(cluster, name)
    cluster.run()
    assert not any(each.health.returns_us for each in cluster.state.nodes.values())


# --- the hold ------------------------------------------------------------------------------------


def held_outage(seed: int, spares: tuple[str, ...] = ("d0", "d1")) -> tuple[MiniCluster, int]:
    """Lose rack a, on which only "big" has workers, and let the cluster come to rest; return the entries before."""
    cluster = rack_cluster(seed, 120.0, spares=spares)
    since = len(cluster.log)
    lose_rack(cluster, RACKS[:3])
    cluster.run()
    return cluster, since


@pytest.mark.parametrize("seed", range(6))
def test_outage_is_held_and_its_nodes_come_back_as_one(seed: int) -> None:
    cluster, since = held_outage(seed)
    before = cluster.state.tasks["small"].generation
    assert len(members(cluster)) == 2 and cluster.state.tasks["big"].confirmed, "the survivors go on at once"
    assert [incident.kind for incident in cluster.state.incidents.values()] == ["domain_lost"]
    assert list(cluster.standing()) == ["outage:i" + str(since + 1)]
    for name in RACKS[:3]:
        cluster.add_host(name)
        cluster.run()
    cluster.assert_whole()
    assert not of(cluster, v.PlanAdopted, since) and not of(cluster, v.NodeIsolated, since)
    assert {event.node for event in of(cluster, v.StartWorker, since)} == {*RACKS[:3]}, "no spare is used"
    assert len(of(cluster, v.MembershipDecided, since)) == 2, "one without them, one with them"
    assert cluster.state.tasks["small"].generation == before
    (healed,) = of(cluster, v.TransitionCompleted, since)
    assert "3 of 3 nodes are back, the last after 0.0 s" in healed.reason and cluster.state.ledger.failures == 1
    assert not cluster.state.outages and not cluster.standing()


def test_hold_that_is_over_leads_to_one_plan_and_later_returns_to_another() -> None:
    cluster, since = held_outage(1)
    assert cluster.pass_deadlines("outage")
    cluster.run()
    cluster.assert_whole()
    assert len(of(cluster, v.PlanAdopted, since)) == 1 and len(members(cluster)) == 4, "two spares are used now"
    (healed,) = of(cluster, v.TransitionCompleted, since)
    assert "none of 3 nodes is back" in healed.reason
    assert "none of 3 nodes is back" in str(describe_object(cluster.state, "incident", healed.incident))
    since = len(cluster.log)
    for name in RACKS[:2]:
        cluster.add_host(name)
        cluster.run()
    assert not of(cluster, v.PlanAdopted, since) and not of(cluster, v.StartWorker, since), "more of them may come"
    ((name, length_us),) = cluster.standing().items()
    assert name.startswith("return:") and length_us == GATHER_US
    cluster.pass_deadlines("return")
    cluster.run()
    cluster.assert_whole()
    assert len(of(cluster, v.PlanAdopted, since)) == 1 and len(members(cluster)) == 5
    cluster.add_host("a2")
    cluster.run()
    cluster.assert_whole()
    assert not cluster.state.outages and len(of(cluster, v.PlanAdopted, since)) == 2


def test_some_that_are_back_wait_for_the_others_a_while_and_join_together() -> None:
    cluster, since = held_outage(2)
    for name in RACKS[:2]:
        cluster.add_host(name)
        cluster.run()
    assert len(members(cluster)) == 2 and len(of(cluster, v.StartWorker, since)) == 2, "they start, and wait"
    cluster.pass_deadlines("return")
    cluster.run()
    assert len(members(cluster)) == 4 and cluster.state.incidents and not of(cluster, v.PlanAdopted, since)
    cluster.add_host("a2")
    cluster.run()
    cluster.assert_whole()
    assert len(of(cluster, v.MembershipDecided, since)) == 3 and not of(cluster, v.PlanAdopted, since)


def test_returns_one_by_one_wait_for_a_bounded_time() -> None:
    cluster, _ = held_outage(3)
    cluster.add_host("a0")
    cluster.run()
    cluster.now_us += GATHER_MAX_US - GATHER_US // 2
    cluster.add_host("a1")
    cluster.run()
    (length_us,) = [length for name, length in cluster.standing().items() if name.startswith("return")]
    assert 0 < length_us <= GATHER_US // 2


@pytest.mark.parametrize("seed", range(4))
def test_other_failure_during_the_hold_is_healed_as_ever(seed: int) -> None:
    cluster, since = held_outage(seed, spares=("d0",))
    seats = cluster.state.plan.assignments["big"].replicas
    cluster.kill_host(cluster.hosts["c0"])
    cluster.lose(cluster.hosts["c0"])
    cluster.run()
    assert len(of(cluster, v.PlanAdopted, since)) == 1 and len(members(cluster, "small")) == 4, "the spare heals it"
    assert cluster.state.plan.assignments["big"].replicas == seats and len(members(cluster)) == 2
    assert [incident.kind for incident in cluster.state.incidents.values()] == ["domain_lost"]
    (victim,) = cluster.hosts["b0"].processes
    cluster.kill_worker(cluster.hosts["b0"], victim)
    cluster.run()
    assert len(members(cluster)) == 2 and victim not in members(cluster), "it starts anew and joins, whoever is away"
    for name in RACKS[:3]:
        cluster.add_host(name)
    cluster.run()
    cluster.assert_whole()
    assert len(of(cluster, v.PlanAdopted, since)) == 1


def test_other_failure_without_a_spare_takes_nothing_from_those_that_were_hit() -> None:
    cluster, since = held_outage(5, spares=())
    cluster.kill_host(cluster.hosts["c0"])
    cluster.lose(cluster.hosts["c0"])
    cluster.run()
    planned = {node for nodes in cluster.state.plan.assignments["small"].replicas for node in nodes}
    assert planned == {"b2", "c1", "c2"} and len(of(cluster, v.PlanAdopted, since)) == 1
    assert of(cluster, v.PlanAdopted, since)[0].reason.startswith("big awaits nodes of an outage; ")


def test_task_of_which_nothing_is_left_waits_for_its_nodes() -> None:
    cluster = rack_cluster(4, 120.0, spares=("d0", "d1", "d2", "d3"))
    since = len(cluster.log)
    hit = [node for (node,) in cluster.state.plan.assignments["small"].replicas]
    lose_rack(cluster, hit)
    cluster.run()
    assert not of(cluster, v.StartWorker, since) and not of(cluster, v.MembershipDecided, since)
    (pending,) = pending_tasks(cluster.state)
    assert pending == f"small pending: waits for {', '.join(sorted(hit))}, lost together"
    cluster.pass_deadlines("outage")
    cluster.run()
    cluster.assert_whole()
    assert not pending_tasks(cluster.state)
    assert {node for (node,) in cluster.state.plan.assignments["small"].replicas} == {"d0", "d1", "d2", "d3"}


def test_task_that_lost_its_last_member_by_itself_begins_with_what_is_left() -> None:
    cluster, _ = held_outage(6, spares=())
    for name in ("b0", "b1"):
        for worker in list(cluster.hosts[name].processes):
            cluster.kill_worker(cluster.hosts[name], worker)
    cluster.run()
    assert len(members(cluster)) == 2 and cluster.state.tasks["big"].confirmed


def test_plan_of_the_hold_is_made_anew_once_the_free_seats_are_back() -> None:
    """Nothing else asks for a plan: nodes and tasks are those that it was made for."""
    cluster = MiniCluster(0, Policy(outage_hold_s=120.0))
    for name in RACKS[:5]:
        cluster.add_host(name)
    cluster.submit("small", min_workers=1, max_workers=1)
    cluster.run()
    cluster.train("small", 3)
    ((used,),) = cluster.state.plan.assignments["small"].replicas
    free = [name for name in RACKS[:5] if name != used]
    lose_rack(cluster, free)
    cluster.run()
    cluster.submit("big", min_workers=2, max_workers=4)
    cluster.run()
    assert not cluster.state.plan.assignments["big"].replicas, "on nodes of an outage no worker is planned anew"
    for name in free:
        cluster.add_host(name)
        cluster.run()
    cluster.assert_whole()
    assert len(members(cluster)) == 4


def test_person_who_changes_a_task_during_the_hold_gets_a_plan() -> None:
    cluster, since = held_outage(0)
    cluster.append(v.TaskUpdated(task="big", max_workers=3, reason="less"), "api", cluster.state.term)
    cluster.run()
    assert len(members(cluster)) == 3 and of(cluster, v.PlanAdopted, since)
    planned = {node for nodes in cluster.state.plan.assignments["big"].replicas for node in nodes}
    assert planned.isdisjoint(RACKS[:3])


def test_forgotten_node_is_awaited_no_longer() -> None:
    cluster, _ = held_outage(0)
    for name in RACKS[:3]:
        cluster.append(v.ForgetRequested(node=name, reason="sold", leave=False), "api", cluster.state.term)
    cluster.run()
    assert not cluster.state.outages
    cluster.assert_whole()


def test_task_that_fails_on_a_node_of_the_outage_asks_for_no_plan_while_free_nodes_go_and_come() -> None:
    cluster = rack_cluster(0, 120.0, spares=("d0", "d1"))
    shares = cluster.state.plan.assignments
    used = [node for share in shares.values() for nodes in share.replicas for node in nodes]
    free = [name for name in cluster.hosts if name not in used]
    ((bad,), *_) = shares["big"].replicas
    for name in list(cluster.hosts[bad].processes):
        cluster.kill_worker(cluster.hosts[bad], name)
    task = cluster.state.tasks["big"]
    crashes = Crashes(count=1, nodes=(bad,), text="FileNotFoundError: corpus.txt")
    troubles = msgspec.structs.replace(task.troubles, crashes=crashes)
    cluster.state = with_task(cluster.state, msgspec.structs.replace(task, troubles=troubles))
    bases = [Survey(cluster.state, cluster.policy).basis]
    lose_rack(cluster, [bad, *free])
    bases.append(Survey(cluster.state, cluster.policy).basis)
    returned(cluster, free[0])
    survey = Survey(cluster.state, cluster.policy)
    assert survey.avoided == {"big": (bad,)} and {*bases, survey.basis} == {bases[0]}


def sound_beside_failing() -> tuple[MiniCluster, list[str], str]:
    """A task that trains on three nodes, and one whose program fails on the fourth; return the nodes."""
    cluster = MiniCluster(0, Policy(outage_hold_s=120.0))
    for name in RACKS[:4]:
        cluster.add_host(name)
    cluster.submit("sound", max_workers=3)
    cluster.run()
    hit = [node for (node,) in cluster.state.plan.assignments["sound"].replicas]
    cluster.submit("typo", max_workers=1)
    cluster.run()
    cluster.train("sound", 3)
    ((rest,),) = cluster.state.plan.assignments["typo"].replicas
    for _ in range(LOOPING_MIN + 1):
        end(cluster, "typo")
        cluster.run()
    return cluster, hit, rest


def test_task_that_lost_a_node_for_good_gets_the_seats_of_one_that_fails() -> None:
    cluster, hit, rest = sound_beside_failing()
    lose_rack(cluster, hit)
    cluster.run()
    assert cluster.state.plan.assignments["typo"].replicas == ((rest,),), "the others may come back"
    cluster.append(v.ForgetRequested(node=hit[0], reason="sold", leave=False), "api", cluster.state.term)
    cluster.run()
    assert {node for (node,) in cluster.state.plan.assignments["sound"].replicas} == {rest, *hit[1:]}
    assert not cluster.state.plan.assignments["typo"].replicas
    assert len(members(cluster, "sound")) == 1


def test_task_that_lost_a_node_for_good_leaves_the_seats_of_one_that_fails_while_others_are_free() -> None:
    """What fails is tried again until people stop it, and nobody else needs its seat."""
    cluster, hit, rest = sound_beside_failing()
    spare = f"{rest}-spare"
    cluster.add_host(spare)
    cluster.run()
    lose_rack(cluster, hit)
    cluster.run()
    cluster.append(v.ForgetRequested(node=hit[0], reason="sold", leave=False), "api", cluster.state.term)
    cluster.run()
    assert {node for (node,) in cluster.state.plan.assignments["sound"].replicas} == {spare, *hit[1:]}
    assert cluster.state.plan.assignments["typo"].replicas == ((rest,),)


# --- labels --------------------------------------------------------------------------------------


def sorted_losses(silent: dict[str, int], late: str, labels: str, out: str = "") -> tuple[list[Loss], str, str]:
    """Judge nodes n0, n1, ... with one letter each for their domain ("-": none); `late`: which are late besides."""
    of_node = {f"n{place}": label for place, label in enumerate(labels) if label != "-"}
    sizes = {label: labels.count(label) for label in labels}
    every = [*silent, *(f"n{place}" for place in late)]
    found = losses(silent, every, Domains(of_node, sizes, set(out)), len(labels), 5)
    return list(found.joint), " ".join(found.single), " ".join(found.later)


def test_two_nodes_that_are_most_of_their_domain_are_lost_together() -> None:
    assert sorted_losses({"n0": 3, "n1": 3}, "", "aaabbbbbbb") == ([Loss("a", ("n0", "n1"))], "", "")
    assert sorted_losses({"n0": 3, "n1": 3}, "", "aaaabbbbbb") == ([], "n0 n1", ""), "half is not most"
    assert sorted_losses({"n0": 3, "n1": 3}, "", "----------") == ([], "n0 n1", "")
    assert sorted_losses({"n0": 3}, "", "a---------") == ([], "n0", ""), "one node is no domain"


def test_first_of_a_domain_waits_for_the_rest_and_for_nobody_else() -> None:
    assert sorted_losses({"n0": 3, "n9": 3}, "1", "aaabbbbbbb") == ([], "n9", "n0")
    assert sorted_losses({"n0": 6, "n9": 3}, "1", "aaabbbbbbb") == ([], "n0 n9", ""), "it has waited long enough"
    assert sorted_losses({"n0": 6, "n1": 3}, "2", "aaabbbbbbb") == ([Loss("a", ("n0", "n1"))], "", "")


def test_rest_of_a_domain_that_is_out_goes_with_it() -> None:
    assert sorted_losses({"n0": 3}, "", "aaabbbbbbb", out="a") == ([Loss("a", ("n0",), joins=True)], "", "")
    many = sorted_losses(dict.fromkeys(("n0", "n1", "n2"), 3), "", "aaabbb", out="a")
    assert many == ([Loss("a", ("n0", "n1", "n2"), joins=True)], "", ""), "as many as an outage of its own takes"


def test_nodes_of_two_domains_are_two_outages_unless_they_are_many() -> None:
    silent = dict.fromkeys(("n0", "n1", "n2", "n3"), 3)
    assert sorted_losses(silent, "", "aabb" + "c" * 10) == ([Loss("a", ("n0", "n1")), Loss("b", ("n2", "n3"))], "", "")
    assert sorted_losses(silent, "", "aabb" + "c" * 4) == ([Loss("", tuple(silent))], "", "")
    assert sorted_losses(silent, "", "aaaa" + "c" * 4) == ([Loss("a", tuple(silent))], "", "")


@pytest.mark.parametrize("hold_s", [0.0, 120.0])
def test_rest_of_a_domain_joins_its_incident(hold_s: float) -> None:
    cluster = MiniCluster(0, Policy(outage_hold_s=hold_s))
    for name in RACKS:
        cluster.add_host(name, domain=f"rack-{name[0]}")
    cluster.submit("big", max_workers=9)
    cluster.run()
    cluster.train("big", 3)
    for place, name in enumerate(("a0", "a1", "a2")):
        cluster.kill_host(cluster.hosts[name])
        loss = v.NodesLost(nodes=(name,), reason="silent", domain="rack-a", joins=place > 0)
        cluster.append(loss, "coordinator", cluster.state.term)
    (incident,) = cluster.state.incidents.values()
    assert incident.nodes == ("a0", "a1", "a2") and incident.message.startswith("3 nodes were lost together")
    cluster.run()
    for name in RACKS[:3]:
        cluster.add_host(name, domain="rack-a")
    cluster.pass_deadlines("return")
    cluster.run()
    cluster.assert_whole()
    assert cluster.state.ledger.failures == 1 and len(members(cluster)) == 9


def test_loss_of_thousands_is_told_in_parts_that_fit() -> None:
    names = [f"n{number:062d}" for number in range(3000)]
    bus = RackBus([*names, *RACKS])
    bus.kinds(3, [*names, *RACKS])
    quiet_us = bus.now_us
    found: list[v.AnyEvent] = []
    while not found:
        bus.now_us += 100_000
        if bus.now_us % 500_000 == 0:
            bus.beat("coordinator")
        for name in RACKS:
            bus.beat(name)
        found = bus.liveness.verdicts(bus.nodes, bus.now_us)
    assert bus.now_us - quiet_us < 10_000_000
    assert [(type(event), event.joins) for event in found] == [(v.NodesLost, False), *[(v.NodesLost, True)] * 2]
    assert sorted(name for event in found for name in event.nodes_named()) == sorted(names)
    assert max(len(msgspec.msgpack.encode(event)) for event in found) < 100_000
    assert all(len(event.sentence()) < 1024 for event in found) and "and 1016 more" in found[0].sentence()
    assert len(VerdictLimiter().news(found, bus.now_us)) == 3, "all are told at once"


def test_domain_is_shown_where_a_node_is() -> None:
    cluster = MiniCluster(0)
    cluster.add_host("a0", domain="rack7")
    cluster.add_host("b0")
    table = nodes_table(cluster.state)
    assert table.headers[-1] == "domain" and [row[-1] for row in table.rows] == ["rack7", "-"]
    assert "rack7" in str(describe_object(cluster.state, "node", "a0"))
    assert "rack7" not in str(describe_object(cluster.state, "node", "b0"))
    assert [node.get("domain") for node in view(cluster.state)["nodes"]] == ["rack7", None]
    cluster.add_host("a0", domain="rack8")
    assert cluster.state.nodes["a0"].domain == "rack8", "the newest agent's word counts"


def test_outage_is_one_alarm_while_it_is_held_and_one_for_each_node_afterwards() -> None:
    cluster, since = held_outage(1)
    (alarm,) = outage_alarms(cluster.state)
    assert alarm.key == f"domain-lost:i{since + 1}" and "3 nodes are away together since" in alarm
    assert "(a0, a1, a2): awaited, nothing takes their place" in alarm and state_alarms(cluster.state) == []
    cluster.add_host("a0")
    (alarm,) = outage_alarms(cluster.state)
    assert "2 nodes are away" in alarm and "(a1, a2), 1 is back: awaited" in alarm
    cluster.pass_deadlines("outage")
    assert outage_alarms(cluster.state) == []
    assert [alarm.key for alarm in state_alarms(cluster.state)] == ["node-lost:a1", "node-lost:a2"]


def test_hold_of_no_length_is_over_at_once() -> None:
    cluster = rack_cluster(1, 0.0)
    lose_rack(cluster, RACKS[:3])
    ((name, length_us),) = [(name, us) for name, us in cluster.standing().items() if name.startswith("outage")]
    assert length_us == 0
    cluster.pass_deadlines(name)
    assert outage_alarms(cluster.state) == [] and len(state_alarms(cluster.state)) == 3


@pytest.mark.parametrize("hold_s", [0.0, 120.0])
def test_survey_after_another_says_the_same_during_an_outage(hold_s: float) -> None:
    cluster = rack_cluster(2, hold_s, spares=("d0",))
    lose_rack(cluster, RACKS[:3])
    cluster.run()
    cluster.add_host("a1")
    cluster.run()
    cluster.pass_deadlines("return")
    cluster.lose(cluster.hosts["c0"])
    cluster.run()
    cluster.cordon("d0")
    cluster.pass_deadlines("outage")
    cluster.run()
    state, before = ClusterState(), None
    for entry in cluster.log:
        state = fold(state, entry)
        before = Survey(state, cluster.policy, before)
        fresh = Survey(state, cluster.policy)
        assert (before.basis, before.capacity, before.absence) == (fresh.basis, fresh.capacity, fresh.absence)


def test_story_of_an_outage_says_who_came_back() -> None:
    cluster, since = held_outage(1)
    for name in RACKS[:3]:
        cluster.add_host(name)
    cluster.run()
    story = "\n".join(accounts_of(cluster.log).story("incident", f"i{since + 1}").lines)
    assert "3 nodes lost together (a0, a1, a2): silent" in story and "node a1 joined" in story
    assert "Of those that were lost together, 3 of 3 nodes are back, the last after" in story


@pytest.mark.parametrize("seed", range(3))
def test_every_decision_around_an_outage_is_made_again_by_its_log(seed: int) -> None:
    cluster, _ = held_outage(seed, spares=("d0",))
    cluster.kill_host(cluster.hosts["c0"])
    cluster.lose(cluster.hosts["c0"])
    cluster.run()
    cluster.add_host("a0")
    cluster.run()
    cluster.pass_deadlines("return")
    cluster.run()
    cluster.pass_deadlines("outage")
    cluster.run()
    cluster.add_host("a1")
    cluster.pass_deadlines("return")
    cluster.run()
    cluster.assert_whole()
    verify(cluster.log)


def test_awaited_nodes_count_for_no_brake() -> None:
    """A rack without power keeps no bad node in service, and of the others no more may be out than of any cluster."""
    cluster, _ = held_outage(1, spares=("d0", "d1", "d2", "d3", "d4"))
    for name in ("b0", "b1", "b2"):
        break_gpu(cluster, name)
    assert isolated(cluster) == ["b0", "b1"] and held(cluster) == ["b2"]
    (told,) = of(cluster, v.DecisionHeld, 0)
    assert told.detail == "2 of 11 nodes are out (policy.isolated_share: 0.25)"


def test_nodes_whose_wait_is_over_count_as_lost() -> None:
    cluster, _ = held_outage(1, spares=("d0", "d1", "d2", "d3", "d4"))
    assert cluster.pass_deadlines("outage")
    cluster.run()
    break_gpu(cluster, "b0")
    break_gpu(cluster, "b1")
    assert isolated(cluster) == ["b0"] and held(cluster) == ["b1"]
