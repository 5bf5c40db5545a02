"""Two states, and what differs between them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.replay.command import unicron_replay
from tests.replay.logs import eventful, troubled, write_log
from unicrond.core.replayer import EMPTY, replay
from unicrond.core.state.state_bytes import digest
from unicrond.events.log.point import AtSeq
from unicrond.replay.views.difference import differences, lines


@pytest.mark.parametrize("seed", range(4))
def test_differences_appear_exactly_with_digests(seed: int) -> None:
    entries = eventful(seed)
    for seq in range(0, len(entries), 9):
        before, after = replay(entries, AtSeq(seq)), replay(entries, AtSeq(seq + 1))
        found = differences(before, after)
        assert bool(found) == (digest(before) != digest(after))
        assert any(each.path == "seq" for each in found)
    assert differences(after, after) == []


def test_difference_of_lost_node_names_path() -> None:
    cluster = troubled(2)
    host = next(host for host in cluster.hosts.values() if host.processes)
    before = cluster.state
    cluster.lose(host)
    told = lines(differences(before, cluster.state))
    assert f"~ nodes.{host.name}.status: up -> lost" in told
    assert any(line.startswith(f"+ incidents.i{cluster.state.seq}: (id i{cluster.state.seq}") for line in told)


def test_differences_compare_closed_incidents_by_id() -> None:
    cluster = troubled(2)
    found = differences(EMPTY, cluster.state)
    assert [each.path for each in found if each.path.startswith("closed_incidents.")] == [
        f"closed_incidents.{incident.id}" for incident in cluster.state.closed_incidents
    ]


def test_diff_command_compares_points_and_logs(tmp_path: Path) -> None:
    here, there = list(troubled(1).log), list(troubled(2).log)
    first = write_log(tmp_path / "here.bin", list(here))
    second = write_log(tmp_path / "there.bin", [*here[:40], *there[40:]])
    same = unicron_replay("diff", "10", "10", "--log", first)
    assert same.returncode == 0 and "the states are equal" in same.stdout
    done = unicron_replay("diff", "-1h", "-0s", "--log", first)
    assert "+ tasks.big" in done.stdout and done.stdout.startswith("A: entry 0, before the first event")
    done = unicron_replay("diff", "41", "41", "--log", first, "--other-log", second, "--json")
    said = json.loads(done.stdout)
    assert said["first_other_entry"] == 41
    assert (said["before"]["digest"] != said["after"]["digest"]) == bool(said["differences"])
    beyond = unicron_replay("diff", "10", "100000", "--log", first)
    assert beyond.returncode == 2 and "entry 100000 is not in the log" in beyond.stderr
