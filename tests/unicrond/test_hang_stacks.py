"""Where the workers of a group that hung stood, in the incident and in its account."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.unicrond.cluster import MiniCluster, members, trained
from tests.unicrond.test_hangs import suspect
from unicrond.core.folding.stacks import PLACES_MAX, WORKERS_MAX
from unicrond.core.replayer import steps
from unicrond.display.describe import describe_object
from unicrond.events import vocabulary as v
from unicrond.views.accounts import Accounts, stood_lines

TEXT = """\
Thread MainThread (most recent call first):
  File "/home/anna/train.py", line 62, in reduce
  File "x.py", line 1, in <module>"""


def hang(cluster: MiniCluster) -> tuple[str, list[str]]:
    """One of three members is stopped; return it and the others."""
    culprit, *others = members(cluster)
    suspect(cluster, culprit, is_stopped=True, is_waiting=False, phase="forward")
    cluster.run()
    return culprit, others


def decided(cluster: MiniCluster) -> list[v.MembershipDecided]:
    return [e.envelope.event for e in cluster.log if isinstance(e.envelope.event, v.MembershipDecided)]


def taken(cluster: MiniCluster, *workers: v.WorkerStack, texts: tuple[str, ...] = (TEXT,)) -> None:
    """Each node reports its own workers; one that has ended is nobody's any more."""
    known = cluster.state.tasks["big"].workers
    by_node: dict[str, list[v.WorkerStack]] = {}
    for worker in workers:
        node = known[worker.worker].node if worker.worker in known else "n0"
        by_node.setdefault(node, []).append(worker)
    for node, stacks in by_node.items():
        event = v.StacksTaken(node=node, task="big", generation=1, workers=tuple(stacks), stacks=texts)
        cluster.say(cluster.hosts[node], event)


def test_stacks_of_a_worker_of_another_node_are_refused() -> None:
    cluster = trained(3)
    _, others = hang(cluster)
    node = next(n for n in cluster.hosts if n != cluster.state.tasks["big"].workers[others[0]].node)
    event = v.StacksTaken(node=node, task="big", generation=1, workers=(waits(others[0]),), stacks=(TEXT,))
    before = cluster.state.quarantined_messages
    cluster.say(cluster.hosts[node], event)
    assert cluster.state.quarantined_messages == before + 1
    assert "runs on" in cluster.state.refusals[-1].reason
    assert not cluster.state.closed_incidents[-1].stacks


def waits(worker: str) -> v.WorkerStack:
    return v.WorkerStack(
        worker=worker, phase="reduce", iteration=4, collectives_entered=9, is_waiting=True, stack=1, reader="worker"
    )


def test_group_after_a_hang_has_the_stacks_taken() -> None:
    cluster = trained(3)
    before = len(decided(cluster))
    hang(cluster)
    after = decided(cluster)[before:]
    assert [(event.urgent, event.takes_stacks) for event in after] == [(True, True), (False, False)]


def test_group_after_a_death_takes_no_stacks() -> None:
    cluster = trained(3)
    worker = members(cluster)[0]
    cluster.kill_worker(cluster.hosts[cluster.state.tasks["big"].workers[worker].node], worker)
    cluster.run()
    assert decided(cluster)[-1].generation > 1
    assert not any(event.takes_stacks for event in decided(cluster))


def test_closed_incident_shows_where_all_ranks_stood() -> None:
    cluster = trained(3)
    culprit, others = hang(cluster)
    cluster.assert_whole()
    (incident,) = cluster.state.closed_incidents
    taken(cluster, *map(waits, others))
    taken(cluster, v.WorkerStack(worker=culprit, phase="forward", iteration=4, is_stopped=True, trouble="no py-spy"))
    (incident,) = cluster.state.closed_incidents
    assert incident.stacks == {
        "waits in collective 9 of iteration 4, at reduce (train.py:62)": tuple(others),
        "in forward of iteration 4, its process is stopped": (culprit,),
    }
    accounts = Accounts()
    for step in steps(cluster.log):
        accounts.feed(step)
    page = "\n".join(accounts.story("incident", incident.id).lines)
    assert f"{culprit} stands in forward of iteration 4" in page and "no py-spy" in page
    assert (
        all(f"stack of {name}:" in page for name in others) and 'File "/home/anna/train.py", line 62, in reduce' in page
    )
    assert f"Where the workers stood:\n  {others[0]}, {others[1]}: waits in collective 9" in page


def test_incident_shows_the_slowest_sections_of_all_ranks() -> None:
    cluster = trained(3)
    culprit, (one, other) = hang(cluster)
    taken(cluster, replace(waits(one), section="step", section_us=2_000_000), replace(waits(other), still_us=3_000_000))
    taken(cluster, v.WorkerStack(worker=culprit, phase="forward", iteration=4, section="data", section_us=9_000_000))
    (incident,) = cluster.state.closed_incidents
    assert list(incident.sections.items()) == [
        (culprit, ("data", 9_000_000)), (other, ("reduce", 3_000_000)), (one, ("step", 2_000_000)),
    ]  # fmt: skip
    said = f"longest: {culprit} in data for 9.000 s, {other} in reduce for 3.000 s, {one} in step for 2.000 s"
    assert said in "\n".join(stood_lines(incident))
    shown = describe_object(cluster.state, "incident", incident.id)
    assert said in next(section.body for section in shown if section.title == "where the workers stood")


def test_stacks_of_no_incident_are_kept_in_the_log_alone() -> None:
    cluster = trained(3)
    before = cluster.state.closed_incidents, cluster.state.incidents
    taken(cluster, waits(members(cluster)[0]))
    assert (cluster.state.closed_incidents, cluster.state.incidents) == before


@given(st.lists(st.tuples(st.integers(0, 200), st.integers(0, 20)), max_size=150))
def test_incident_is_bounded_whatever_the_stacks_are(places: list[tuple[int, int]]) -> None:
    cluster = trained(3)
    culprit, _ = hang(cluster)
    for number, iteration in places:
        stack = v.WorkerStack(worker=f"big.{number + 100}", iteration=iteration)
        taken(cluster, stack, replace(stack, worker=culprit), texts=())
    incident = (*cluster.state.closed_incidents, *cluster.state.incidents.values())[0]
    assert len(incident.stacks) <= PLACES_MAX and len(incident.sections) <= WORKERS_MAX
    assert all(0 < len(workers) <= WORKERS_MAX for workers in incident.stacks.values())


def test_account_names_the_rank_that_held_its_replica_up() -> None:
    cluster = MiniCluster(1)
    for number in range(2):
        cluster.add_host(f"n{number}", 2)
    cluster.submit("big", min_workers=4, max_workers=4, tp=2)
    cluster.run()
    cluster.train("big", 3)
    cluster.run()
    names = members(cluster)
    suspect(cluster, names[3], is_stopped=True, is_waiting=False, phase="forward")
    cluster.run()
    (incident,) = [*cluster.state.closed_incidents, *cluster.state.incidents.values()]
    tp = v.GroupStanding(group="1 TENSOR", entered=8, finished=7, ranks=(0, 1))
    taken(cluster, *(replace(waits(name), standings=(tp,)) for name in names[:2]))
    taken(
        cluster,
        replace(waits(names[2]), standings=(tp,)),
        replace(waits(names[3]), standings=(replace(tp, entered=7),)),
    )
    accounts = Accounts()
    for step in steps(cluster.log):
        accounts.feed(step)
    lines = accounts.story("incident", incident.id).lines
    assert [line for line in lines if "in replica" in line] == [
        f"  in replica 1 rank 1 did not begin what the others wait in: {names[3]}"
    ], "and of the other replica, whose ranks wait for each other, nobody is named"
