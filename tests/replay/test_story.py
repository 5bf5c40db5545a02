"""The account of an incident, a node, a task, a plan: complete, in order, and by the right names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.replay.command import unicron_replay
from tests.replay.logs import eventful, troubled, write_log
from tests.unicrond.cluster import MiniCluster
from unicrond.events import vocabulary as v
from unicrond.events.wire.envelope import Entry
from unicrond.views.accounts import Accounts, NoSuchSubject, Subject
from unicrond.views.view import feed_all


def accounts_of(entries: Sequence[Entry]) -> Accounts:
    accounts = Accounts(lines_max=0)
    feed_all(accounts, entries)
    return accounts


def story(entries: Sequence[Entry], kind: str, name: str) -> str:
    """The account, which is the same where all are kept and where one is."""
    alone = Accounts(Subject(kind, name))
    feed_all(alone, entries)
    assert alone.story(kind, name) == accounts_of(entries).story(kind, name)
    return "\n".join(alone.story(kind, name).lines)


def seqs(page: str) -> list[int]:
    """The numbers of the entries that a story tells."""
    return [int(match[1]) for match in re.finditer(r"^  \d\d:\d\d:\d\d\.\d{3} +(\d+)  ", page, re.MULTILINE)]


def small_cluster() -> MiniCluster:
    cluster = MiniCluster(1)
    for name in ("n1", "n2", "n3"):
        cluster.add_host(name)
    cluster.submit("big", max_workers=3)
    cluster.run()
    cluster.train("big", steps=5)
    return cluster


def test_story_of_worker_death_is_complete() -> None:
    cluster = small_cluster()
    host = next(host for host in cluster.hosts.values() if host.processes)
    worker = next(iter(host.processes))
    peer = next(other for other in cluster.hosts.values() if other is not host)
    broken = v.ErrorReported(
        node=peer.name,
        task="big",
        worker=next(iter(peer.processes)),
        kind="connection_broken",
        generation=1,
        iteration=6,
        phase="reduce",
        message="reset by peer",
    )
    cluster.say(peer, broken)
    first = cluster.log[-1].seq
    cluster.kill_worker(host, worker)
    cluster.run()
    last = cluster.log[-1].seq
    page = story(cluster.log, "incident", f"i{first}")
    assert page.startswith(f"Incident i{first}: process_exit, SEV2, worker {worker} on {host.name}")
    assert "It hit big in generation 1." in page
    assert f"-> opens incident i{first}, SEV3" in page
    assert f"-> the cause of incident i{first}, now SEV2" in page
    assert f"because of incident i{first}" in page
    assert f"having read everything up to entry {first + 1}" in page
    told = seqs(page)
    assert told == sorted(told) and told[0] == first
    closed = next(e.seq for e in cluster.log if isinstance(e.envelope.event, v.TransitionCompleted))
    assert told[-1] == closed <= last


def test_story_of_node_loss_begins_with_its_symptoms() -> None:
    cluster = small_cluster()
    host = cluster.hosts["n1"]
    peer = cluster.hosts["n2"]
    broken = v.ErrorReported(
        node="n2",
        task="big",
        worker=next(iter(peer.processes)),
        kind="connection_broken",
        generation=1,
        iteration=6,
        phase="reduce",
        message="reset by peer",
    )
    cluster.say(peer, broken)
    first = cluster.log[-1].seq
    cluster.kill_host(host)
    cluster.lose(host)
    lost = cluster.log[-1].seq
    cluster.run()
    index = accounts_of(cluster.log)
    assert list(index.incidents) == [f"i{lost}"], "the symptom's incident is no story of its own"
    assert index.incidents[f"i{lost}"].first_seq == first
    page = story(cluster.log, "incident", f"i{lost}")
    assert seqs(page)[0] == first and lost in seqs(page)
    assert "node n1 lost" in page and "Response: reconfigure" in page


@pytest.mark.parametrize("seed", range(6))
def test_story_exists_for_every_subject(seed: int) -> None:
    entries = list(troubled(seed).log)
    index = accounts_of(entries)
    for kind, names in {
        "node": index.state.nodes,
        "task": index.state.tasks,
        "incident": index.incidents,
        "plan": index.plans,
    }.items():
        for name in names:
            page = story(entries, kind, str(name))
            told = seqs(page)
            assert told == sorted(told) and told, page
            assert "\x1b" not in page
    for life in index.incidents.values():
        assert life.last_seq >= life.first_seq, "all of them were healed"


def test_story_of_task_summarizes_steps() -> None:
    cluster = small_cluster()
    for _ in range(7):
        cluster.train("big")
    page = story(cluster.log, "task", "big")
    assert "big commits 1 to 12, loss 1" in page
    assert page.count("commits") == 1
    assert "At the end it is active at iteration 12, generation 1, after 0 incidents." in page


def test_story_of_plan_ends_at_next_plan() -> None:
    cluster = small_cluster()
    cluster.submit("small")
    cluster.run()
    index = accounts_of(cluster.log)
    last = max(index.plans)
    assert last > 1
    assert "It is in force at the end of the log." in story(cluster.log, "plan", str(last))
    assert f"It was in force until entry {index.plans[last]}." in story(cluster.log, "plan", str(last - 1))


def test_unknown_name_is_refused_with_the_kind_that_has_it() -> None:
    cluster = small_cluster()
    cluster.submit("n1")
    index = accounts_of(cluster.log)
    assert index.subject("task", "n1").kind == "task" and index.subject("node", "n1").kind == "node"
    with pytest.raises(NoSuchSubject, match="no task n2; did you mean node n2"):
        index.subject("task", "n2")
    with pytest.raises(NoSuchSubject, match="no node x; the log has n1, n2, n3"):
        index.subject("node", "x")


def test_story_command_prints_story(tmp_path: Path) -> None:
    log = write_log(tmp_path / "log.bin", eventful(5))
    done = unicron_replay("story", "node", "n2", "--log", log)
    assert done.returncode == 0 and done.stdout.startswith("Node n2: 1 slots at")
    assert "At the end it is left" in done.stdout
    done = unicron_replay("story", "node", "nobody", "--log", log)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "NAME: no node nobody" in done.stderr
