"""Agents of several versions under one coordinator: each is told what it can read, and nobody is blamed for less."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
from msgspec.structs import replace

from tests.unicrond.cluster import MiniCluster
from tests.unicrond.serving import serving
from tests.younger import NEXT, younger
from unicrond.core.fold import fold
from unicrond.core.state.state import UNREAD_MAX, ClusterState, WorkerStatus
from unicrond.events import vocabulary as v
from unicrond.events.vocabulary.field_defaults import Since
from unicrond.events.wire.envelope import Envelope, RecordedEvent
from unicrond.events.wire.schemas import FIRST, beyond_schema, schema_of, told_version


@pytest.fixture(autouse=True)
def next_schema() -> Iterator[None]:
    """The next schema brings a command, a setting of tasks, and a field of memberships."""
    fields = {v.TaskSpec: {"start_timeout_s": Since(NEXT)}, v.MembershipDecided: {"mtbf_us": Since(NEXT)}}
    with younger(v.DropState, v.PeersRemembered, fields=fields):
        yield


def cluster(**nodes: int) -> MiniCluster:
    """One node per name, of the schema given; a task on all of them trains."""
    made = MiniCluster(seed=1)
    made.schema = NEXT
    made.take_over()
    for name, schema in nodes.items():
        made.add_host(name)
        speak(made, name, schema)
    made.submit("a", max_workers=len(nodes), start_timeout_s=120.0)
    made.run()
    assert made.state.tasks["a"].confirmed
    return made


def speak(made: MiniCluster, name: str, schema: int) -> None:
    """Another agent on the node, with the same workers: its version is of `schema`."""
    made.add_host(name)
    joined = made.log[-1].envelope.event
    assert isinstance(joined, v.NodeJoined)
    host = made.hosts[name]
    host.boot += 1
    version = "0.1.0" if schema == FIRST else told_version("0.1.0", schema)
    host.reads = schema
    made.say(host, replace(joined, agent_boot=host.boot, version=version))


def commands(made: MiniCluster, kind: type[v.Command]) -> dict[str, v.Command]:
    """The last command of the kind to each node."""
    events = [entry.envelope.event for entry in made.log]
    return {event.node: event for event in events if isinstance(event, kind)}


def test_command_uses_schema_of_node() -> None:
    made = cluster(old=FIRST, new=NEXT, newer=NEXT + 1)
    assert {name: node.agent.schema for name, node in made.state.nodes.items()} == {
        "old": FIRST,
        "new": NEXT,
        "newer": NEXT + 1,
    }
    starts = commands(made, v.StartWorker)
    assert {name: schema_of(command) for name, command in starts.items()} == {"old": FIRST, "new": NEXT, "newer": NEXT}
    assert {name: c.spec.start_timeout_s for name, c in starts.items() if isinstance(c, v.StartWorker)} == {
        "old": None,
        "new": 120.0,
        "newer": 120.0,
    }


@pytest.mark.parametrize(("reads", "told"), [(FIRST, FIRST), (NEXT, NEXT)])
def test_shared_decision_uses_oldest_schema(reads: int, told: int) -> None:
    made = cluster(m=NEXT, n=reads)
    decided = [e.envelope.event for e in made.log if isinstance(e.envelope.event, v.MembershipDecided)]
    assert {schema_of(event) for event in decided} == {told}


def test_downgraded_agent_gets_unread_decisions_again() -> None:
    made = cluster(m=NEXT, n=NEXT)
    made.kill_worker(made.hosts["m"], next(iter(made.hosts["m"].processes)))
    assert made.decide()
    generation = made.state.tasks["a"].generation
    made.hosts["n"].commands.clear()  # the older agent passes over it
    speak(made, "n", FIRST)
    assert made.state.tasks["a"].group.unread_generation == generation
    made.run()
    assert made.state.tasks["a"].confirmed
    assert made.state.incidents_total == 1, "the kill alone"


def test_current_agent_gets_nothing_again() -> None:
    made = cluster(m=NEXT, n=NEXT)
    generation = made.state.tasks["a"].generation
    speak(made, "n", FIRST)
    made.run()
    assert made.state.tasks["a"].generation == generation


def test_command_unknown_to_node_is_not_sent() -> None:
    made = cluster(old=FIRST, new=NEXT)
    for host in made.hosts.values():
        kept = v.SnapshotStored(
            node=host.name, task="a", shard=0, iteration=1, generation=1, origin=host.name, size_bytes=1, duration_us=1
        )
        made.say(host, kept)
    made.append(v.TaskCancelled(task="a", reason="test"), "api", made.state.term)
    made.run()
    assert list(commands(made, v.DropState)) == ["new"]
    assert not made.decide(), "and that is all: nothing is decided again and again"


def test_coordinator_of_schema_1_writes_only_schema_1() -> None:
    made = MiniCluster(seed=1)
    made.append(v.CoordinatorStarted(term=2, version="0.1.0"), "coordinator", 2)
    made.add_host("n")
    made.submit("a", start_timeout_s=120.0)
    made.run()
    decided = [e.envelope.event for e in made.log if isinstance(e.envelope.event, v.Command | v.Decision)]
    assert {schema_of(event) for event in decided[2:]} == {FIRST}


def failed(made: MiniCluster, command: v.Command, reads: int) -> None:
    made.say(
        made.hosts[command.node],
        v.CommandFailed(
            node=command.node, command_id=command.command_id, reason="cannot read it", readable_schema=reads
        ),
    )


def unread(made: MiniCluster, name: str) -> Iterator[v.Command]:
    """Each command that waits for the node, taken away."""
    host = made.hosts[name]
    while host.commands:
        command = host.commands.pop(0).envelope.event
        assert isinstance(command, v.Command)
        yield command


def test_unreadable_start_is_repeated_in_older_schema() -> None:
    made = MiniCluster(seed=1)
    made.schema = NEXT
    made.take_over()
    made.add_host("n")
    made.submit("a", start_timeout_s=120.0)
    while not made.hosts["n"].commands:
        made.decide()
    (start,) = unread(made, "n")
    failed(made, start, reads=FIRST)
    assert made.state.nodes["n"].agent.schema == FIRST
    made.run()
    again = commands(made, v.StartWorker)["n"]
    assert again != start
    assert schema_of(again) == FIRST
    assert made.state.tasks["a"].confirmed
    assert not made.state.incidents_total


def test_unreadable_stop_is_repeated() -> None:
    made = cluster(n=NEXT)
    made.append(v.TaskCancelled(task="a", reason="test"), "api", made.state.term)
    while not made.hosts["n"].commands:
        made.decide()
    for command in unread(made, "n"):
        failed(made, command, reads=FIRST)
    assert [w.status for w in made.state.tasks["a"].workers.values()] == [WorkerStatus.LOST]
    made.run()
    assert not made.state.tasks["a"].workers
    assert not made.state.incidents_total


def test_unreadable_command_is_not_repeated_forever() -> None:
    made = MiniCluster(seed=1)
    made.add_host("n")
    made.submit("a")
    starts = 0
    for _ in range(50):
        made.decide()
        for command in unread(made, "n"):
            starts += isinstance(command, v.StartWorker)
            failed(made, command, reads=FIRST)
        made.pass_deadlines()
    assert made.state.nodes["n"].agent.unreadable_commands > UNREAD_MAX
    assert made.state.incidents_total >= 1
    assert starts <= UNREAD_MAX + 10, "then the rules for starts that fail hold"


def test_version_without_schema_means_first() -> None:
    joined = v.NodeJoined(
        node="n", address="h", slots=1, store=v.StoreAddress(host="h", port=1), agent_boot=1, version="0.1.0"
    )
    envelope = Envelope(producer="n", boot=1, number=1, observed_at_us=1, event=joined)
    state = fold(ClusterState(), RecordedEvent(1, 1, envelope))
    assert state.nodes["n"].agent.schema == FIRST
    assert state.schema == FIRST


async def test_downgradable_coordinator_writes_and_accepts_older_schema(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path, story=[], schema=FIRST) as served, aiohttp.ClientSession(served.url) as http:
        assert served.coordinator.state.schema == FIRST
        async with http.post("/v1/tasks", json={"name": "a", "start_timeout_s": 60.0}) as response:
            assert response.status == 400
            assert "spec.start_timeout_s: this coordinator writes schema 1" in (await response.json())["error"]
        async with http.post("/v1/tasks", json={"name": "a"}) as response:
            assert response.status == 201


def test_beyond_schema_names_fields() -> None:
    spec = v.TaskSpec(name="a", start_timeout_s=60.0)
    assert beyond_schema(v.TaskSubmitted(spec=spec), FIRST) == ["spec.start_timeout_s"]
    assert beyond_schema(v.TaskSubmitted(spec=spec), NEXT) == []
    assert beyond_schema(v.PeersRemembered(node="n", task="a", peers=()), FIRST) == ["PeersRemembered"]
