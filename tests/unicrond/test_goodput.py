"""Goodput is the ledger taken apart: at every entry its parts add up to the ledger's totals."""

from __future__ import annotations

import asyncio
import json
import random
import re
import urllib.request
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.replay.golden import LOGS
from tests.replay.logs import troubled, write_log
from tests.seeds import at_most
from tests.unicrond.cluster import SECOND_US, MiniCluster
from tests.unicrond.serving import healed_cluster, serving
from tests.unicrond.stories import random_life, trained
from unicrond.core.replayer import LogStep, steps
from unicrond.core.state.changes import with_task, with_worker
from unicrond.core.state.state import ClusterState
from unicrond.core.state.work import iteration_flop
from unicrond.core.state.workers import WorkerStatus
from unicrond.core.worth.costs import costs_at, settle
from unicrond.ctl.main import main as ctl_main
from unicrond.display.goodput_tables import hints
from unicrond.events import vocabulary as v
from unicrond.events.log.log_identity import mark_of
from unicrond.events.log.segments import read_entries
from unicrond.events.wire.envelope import Entry
from unicrond.replay.cli import main as replay_main
from unicrond.service.coordinator.snapshots import decode_snapshot, encode_snapshot
from unicrond.views.goodput import GoodputTotals, account_step, kinds_of, settle_totals
from unicrond.views.goodput_keeper import READING_US, GoodputKeeper
from unicrond.views.goodput_report import EMPTY_READING, open_report, reading, report
from unicrond.views.lemons import COUNT_MAX, count_signals, scores

GROUPS = ("detection", "transition", "repeated", "sub-health")


def follow(entries: Iterable[Entry], *, check: bool = False) -> tuple[ClusterState, GoodputTotals]:
    state, books = ClusterState(), GoodputTotals()
    for step in steps(entries):
        state, books = step.after, account_step(books, step)
        if check:
            assert_adds_up(state, books)
    return state, books


def assert_adds_up(state: ClusterState, books: GoodputTotals) -> None:
    ledger, books = settle(state.ledger, state.now_us), settle_totals(books, state.now_us)
    hits = [hit for kinds in kinds_of(books, state).values() for hit in kinds.values()]
    assert sum(map(int, books.delivered.values())) == int(ledger.delivered)
    assert sum(int(hit.detection) for hit in hits) == int(ledger.detection)
    assert sum(int(hit.transition) for hit in hits) == int(ledger.transition)
    assert sum(int(hit.repeated) for hit in hits) == int(ledger.repeated)
    assert sum(int(work) for causes in books.short.values() for work in causes.values()) == int(ledger.sub_health)


@pytest.mark.parametrize("seed", range(at_most(40)))
def test_goodput_parts_sum_to_ledger_at_every_entry(seed: int) -> None:
    cluster = trained(seed)
    for _ in random_life(cluster, seed, falls=bool(seed % 2)):
        pass
    follow(cluster.log, check=True)


@pytest.mark.parametrize("seed", range(at_most(40)))
def test_goodput_closes_from_any_entry_to_any_other(seed: int) -> None:
    """Of the cluster and of each task, since the beginning and in an interval: nothing below 0 or above 100 %."""
    cluster = trained(seed)
    for _ in random_life(cluster, seed, falls=True):
        pass
    draw = random.Random(seed)
    state, totals, earlier = ClusterState(), GoodputTotals(), [EMPTY_READING]
    for step in steps(cluster.log):
        state, totals = step.after, account_step(totals, step)
        if draw.random() < 0.1:
            now = reading(totals, state)
            for since in (EMPTY_READING, draw.choice(earlier)):
                assert not open_report(report(now, state, since)), f"from entry {since.seq} to {now.seq}"
            earlier.append(now)


@pytest.mark.parametrize("schema", sorted(LOGS))
def test_goodput_parts_match_ledger_in_golden_logs(schema: int) -> None:
    follow(read_entries(LOGS[schema]), check=True)


def fetch(url: str) -> str:
    with urllib.request.urlopen(url) as answer:
        return str(answer.read().decode())


def told(cluster: MiniCluster, **options: float) -> dict[str, Any]:
    state, books = follow(cluster.log)
    return report(reading(books, state), state, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(20))
def test_goodput_report_adds_up_to_flop(seed: int) -> None:
    cluster = trained(seed)
    for _ in random_life(cluster, seed):
        pass
    work, costs = told(cluster)["cluster"], costs_at(cluster.state, cluster.state.now_us)
    assert work["goodput_flop"] == costs.delivered_flop and work["failure_free_flop"] == costs.failure_free_flop
    groups = {group: sum(part["flop"] for part in work["badput"] if part["group"] == group) for group in GROUPS}
    assert groups == {
        "repeated": costs.repeated_flop,
        "detection": costs.detection_flop,
        "transition": costs.transition_flop,
        "sub-health": costs.sub_health_flop,
    }


@pytest.mark.parametrize("seed", range(5))
def test_goodput_interval_is_difference_of_its_ends(seed: int) -> None:
    cluster = trained(seed)
    for _ in random_life(cluster, seed):
        pass
    state, books = follow(cluster.log[: len(cluster.log) // 2])
    first = reading(books, state)
    end_state, end_books = follow(cluster.log)
    end = reading(end_books, end_state)
    before, after, whole_log = report(first, state), report(end, end_state, first), report(end, end_state)
    for name in ("failure_free_flop", "goodput_flop"):
        assert before["cluster"][name] + after["cluster"][name] == whole_log["cluster"][name]
    for task in whole_log["tasks"]:
        parts = [one for half in (before, after) for one in half["tasks"] if one["task"] == task["task"]]
        assert sum(one["wall_us"] for one in parts) == task["wall_us"]
        assert sum(one["interruptions"] for one in parts) == task["interruptions"]


def test_killed_worker_counts_as_one_interruption() -> None:
    cluster = trained(1)
    cluster.train("big")
    victim = cluster.state.tasks["big"].membership.members[1]
    cluster.kill_worker(cluster.hosts[victim.node], victim.worker)
    cluster.now_us += 2 * SECOND_US
    cluster.run()
    cluster.now_us += 6 * SECOND_US
    cluster.train("big")
    (closed,) = cluster.state.closed_incidents
    big = next(task for task in told(cluster)["tasks"] if task["task"] == "big")
    assert big["interruptions_by_kind"] == {"process_exit": 1}
    assert big["times_us"]["transition: process_exit"] == closed.transition_us
    assert big["wall_us"] == cluster.state.now_us - cluster.state.tasks["big"].submitted_us
    assert big["ettr"] == big["times_us"]["productive"] / big["wall_us"] < 0.8
    assert big["micro_batches_repeated"] == closed.micro_batches_repeated
    assert sum(big["times_us"].values()) == big["wall_us"]


def test_sub_health_names_missing_nodes() -> None:
    cluster = trained(2)
    host = cluster.hosts[cluster.state.tasks["big"].membership.members[1].node]
    cluster.kill_host(host)
    cluster.lose(host)
    cluster.run()
    before = {part["cause"]: part["flop"] for part in told(cluster)["cluster"]["badput"]}
    rate = cluster.state.plan.waf_if_healthy - cluster.state.plan.waf
    cluster.now_us += 10 * SECOND_US
    cluster.train("big")
    after = {part["cause"]: part["flop"] for part in told(cluster)["cluster"]["badput"]}
    assert abs(after["nodes lost"] - before.get("nodes lost", 0) - 10 * rate) <= rate / 1000 > 0


def test_mfu_divides_committed_flop_by_worker_time_and_peak() -> None:
    cluster = trained(3)
    cluster.now_us += 10 * SECOND_US
    cluster.train("big")
    big = told(cluster, peak_flops=1e9)["tasks"][0]
    spec = cluster.state.tasks["big"].spec
    assert big["committed_flop"] == cluster.state.tasks["big"].progress.iteration * iteration_flop(spec)
    assert big["mfu"] == big["committed_flop"] / big["worker_s"] / 1e9
    assert told(cluster)["tasks"][0]["mfu"] is None


def test_goodput_keeper_remembers_sums_of_intervals() -> None:
    cluster = trained(3)
    for _ in range(8):
        cluster.now_us += 400 * SECOND_US
        cluster.train("big")
    keeper, state, seen = GoodputKeeper(), ClusterState(), [EMPTY_READING]
    assert keeper.since(0) == EMPTY_READING
    for step in steps(cluster.log):
        state = step.after
        keeper.feed(step)
        assert keeper.totals is not None
        if state.now_us - seen[-1].at_us >= READING_US:
            seen.append(reading(keeper.totals, state))
    assert len(seen) > 3
    for one in seen[1:]:
        assert keeper.since(one.at_us) == keeper.since(one.at_us + 1) == one
    assert keeper.since(0) == seen[1], "what came before the first of them is not known"
    assert keeper.totals is not None
    hour = report(reading(keeper.totals, state), state, keeper.since(state.now_us - 3600 * SECOND_US // 2))
    assert 1800 * SECOND_US <= hour["until_us"] - hour["from_us"] <= 1800 * SECOND_US + 2 * READING_US


# --- lemons --------------------------------------------------------------------------------------


def test_repeatedly_failing_node_is_lemon_with_reason() -> None:
    cluster = trained(5)
    for _ in range(3):
        cluster.kill_host(cluster.hosts["n1"])
        cluster.lose(cluster.hosts["n1"])
        cluster.run()
        cluster.add_host("n1")
        cluster.run()
    first = told(cluster)["lemons"][0]
    assert first["node"] == "n1" and first["is_lemon"] and "lost x3 = 6" in first["reason"]
    assert first["score"] == sum(points for _, _, points in first["parts"])
    assert "unicronctl drain n1" in hints(told(cluster))[0]


def test_single_signal_or_failure_makes_no_lemon() -> None:
    (one,) = scores({"n1": {"lost": 100}})
    assert one.score == 2.0 * COUNT_MAX and not one.is_lemon
    usual = scores({f"n{number}": {"lost": 4, "strike": 1} for number in range(5)})
    assert not any(node.is_lemon for node in usual), "as bad as all the others"


@pytest.mark.parametrize(("sign", "points"), [("checksum", 3), ("gradient_norm", 1), ("loss", 1)])
def test_explainable_losses_weigh_little(sign: v.CorruptionSign, points: int) -> None:
    cluster = trained(5)
    state = cluster.state
    worker = next(iter(state.tasks["big"].workers.values()))
    suspicion = v.CorruptionSuspected(
        node="n1",
        task="big",
        worker=worker.worker,
        generation=state.tasks["big"].generation,
        iteration=9,
        sign=sign,
        suspect=worker.worker,
        value=24.6,
        usual=2.4,
    )
    entry = cluster.log[-1]
    accused = replace(entry, envelope=replace(entry.envelope, event=suspicion))
    after = state
    if sign == "checksum":
        assert not scores(count_signals({}, LogStep(state, accused, state))), "an accusation alone weighs nothing"
        task = state.tasks["big"]
        after = with_task(state, with_worker(task, replace(worker, status=WorkerStatus.STOPPING)))
    (score,) = scores(count_signals({}, LogStep(state, accused, after)))
    assert (score.node, score.score) == (worker.node, points)


# --- where it is shown ---------------------------------------------------------------------------


async def test_coordinator_and_replay_report_same_goodput(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = troubled(3)
    path = write_log(tmp_path / "some.log", cluster.log)
    state, books = follow(cluster.log)
    said = report(reading(books, state), state)
    assert await asyncio.to_thread(replay_main, ["goodput", "--log", str(path), "--json"]) == 0
    replayed = json.loads(capsys.readouterr().out)
    assert replayed == json.loads(json.dumps(said))
    assert await asyncio.to_thread(replay_main, ["goodput", "--log", str(path)]) == 0
    assert "badput: transition" in capsys.readouterr().out


async def test_ctl_and_replay_cut_same_interval(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = healed_cluster()
    log = list(cluster.log)
    after, at = str(len(log) // 2), str(len(log) - 1)
    async with serving(tmp_path, log) as served:
        url = ["--url", served.url]
        assert await asyncio.to_thread(ctl_main, [*url, "goodput", "--since", after, "--until", at, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    path = write_log(tmp_path / "some.log", cluster.log)
    asked = ["goodput", "--log", str(path), "--since", after, "--until", at, "--json"]
    assert await asyncio.to_thread(replay_main, asked) == 0
    replayed = json.loads(capsys.readouterr().out)
    assert shown["since_seq"] == int(after) and shown["seq"] == int(at)
    for told in (shown, replayed):  # the times of two logs differ
        del told["from_us"], told["until_us"]
    assert [task["highest_step"] for task in shown["tasks"]] == [task["highest_step"] for task in replayed["tasks"]]


async def test_api_and_ctl_show_goodput(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with serving(tmp_path, list(healed_cluster().log)) as served:
        assert await asyncio.to_thread(ctl_main, ["--url", served.url, "goodput", "--json"]) == 0
        shown = json.loads(capsys.readouterr().out)
        state, books = served.coordinator.state, served.coordinator.views.goodput.totals
        assert books is not None
        assert shown == json.loads(json.dumps(report(reading(books, state), state)))
        assert shown["cluster"]["failure_free_flop"] == costs_at(state, 0).failure_free_flop > 0
        assert await asyncio.to_thread(ctl_main, ["--url", served.url, "goodput"]) == 0
        assert "failure-free" in capsys.readouterr().out
        metrics = await asyncio.to_thread(fetch, f"{served.url}/metrics")
    assert re.search(
        r'^unicron_goodput_flop\{(group="goodput",cause=""|cause="",group="goodput")\} [0-9.e+]+$', metrics, re.M
    )
    for line in metrics.splitlines():
        if line.startswith("unicron_task_interruptions_total{"):
            assert 'kind="process_exit"' in line and 'task="big"' in line and line.endswith(" 1.0")
    assert "unicron_task_interruptions_total{" in metrics and "unicron_incidents_closed_total{" in metrics


def test_snapshot_keeps_goodput_ledger() -> None:
    cluster = trained(1)
    state, books = follow(cluster.log)
    body = encode_snapshot(state, mark_of(cluster.log[-1]), books=books)
    assert decode_snapshot(body)[2] == books
