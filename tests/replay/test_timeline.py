"""The course of a log: spans that fit together, and drawings that need nothing from anywhere."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

from tests.replay.command import unicron_replay
from tests.replay.logs import eventful, write_log
from tests.unicrond.cluster import SECOND_US, MiniCluster
from unicrond.events import vocabulary as v
from unicrond.events.wire.envelope import Entry
from unicrond.replay.views.timeline import NODE_LOST, TRAINING, Timeline
from unicrond.replay.views.timeline_drawing import html_page, ticks_us
from unicrond.replay.views.timeline_text import text_page
from unicrond.views.view import feed_all


def timeline_of(entries: Sequence[Entry]) -> Timeline:
    timeline = Timeline()
    feed_all(timeline, entries)
    return timeline.finish()


@pytest.mark.parametrize("seed", range(6))
def test_timeline_spans_join_without_gap(seed: int) -> None:
    timeline = timeline_of(eventful(seed))
    for spans in (*timeline.nodes.values(), *timeline.tasks.values()):
        assert spans[-1].end_us == timeline.end_us
        for one, next_one in pairwise(spans):
            assert one.end_us == next_one.start_us
            assert one[2:] != next_one[2:], "two spans that say the same are one"
    assert [point.at_us for point in timeline.waf] == sorted(point.at_us for point in timeline.waf)
    assert len(timeline.incidents) == timeline.state.incidents_total or len(timeline.incidents) > 0


def lost_and_back() -> MiniCluster:
    cluster = MiniCluster(1)
    for name in ("n1", "n2"):
        cluster.add_host(name)
    cluster.submit("big", max_workers=2)
    cluster.run()
    cluster.now_us += 10 * SECOND_US
    cluster.kill_host(cluster.hosts["n1"])
    cluster.lose(cluster.hosts["n1"])
    cluster.run()
    cluster.now_us += 10 * SECOND_US
    cluster.add_host("n1")
    cluster.run()
    cluster.now_us += 10 * SECOND_US
    cluster.train("big")
    return cluster


def test_timeline_shows_loss_and_return() -> None:
    timeline = timeline_of(lost_and_back().log)
    lost = [span for span in timeline.nodes["n1"] if span.what == NODE_LOST]
    assert len(lost) == 1 and 9 * SECOND_US < lost[0].end_us - lost[0].start_us < 11 * SECOND_US
    trained = [span.workers for span in timeline.tasks["big"] if span.what == TRAINING]
    assert trained == [2, 1, 2]
    assert [incident.kind for incident in timeline.incidents] == ["node_lost"]
    full, half = timeline.waf[-1].running, min(p.running for p in timeline.waf if p.running)
    assert full == 2 * half == timeline.waf[-1].planned


def test_timeline_text_page_has_rows() -> None:
    page = text_page(timeline_of(lost_and_back().log), 60)
    rows = {line.split()[0]: line for line in page.splitlines() if line}
    assert "AAAAA" in rows["n1"] and "xxxxx" in rows["n1"] and "x" not in rows["n2"][2:]
    assert rows["big"].count("1") > 10 and "2222" in rows["big"]
    assert "1" in rows["incidents"]
    assert all(len(line) <= 120 for line in page.splitlines())
    assert max(len(rows[name]) for name in ("n1", "n2", "big", "WAF")) <= 60


class _Page(HTMLParser):
    """Collects tags and attributes, and complains about what does not close."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self._open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in ("meta", "line"):
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def whole(self) -> bool:
        return not self._open


def test_timeline_html_page_is_well_formed_and_offline() -> None:
    timeline = timeline_of(eventful(2))
    page = _Page()
    page.feed(html_page(timeline, 'a <title> & "more"'))
    assert page.whole()
    assert not {"script", "link", "img", "iframe", "object", "image"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name in ("src", "href", "xlink:href")]
    assert "url(" not in html_page(timeline, "") and "@import" not in html_page(timeline, "")
    assert page.tags.count("rect") >= sum(map(len, timeline.nodes.values()))


def test_timeline_draws_empty_log() -> None:
    timeline = timeline_of([])
    assert "incidents" in text_page(timeline)
    assert "<svg" in html_page(timeline, "empty")


def test_timeline_waf_matches_ledger() -> None:
    cluster = MiniCluster(1)
    for name in ("n1", "n2"):
        cluster.add_host(name)
    cluster.submit("big", max_workers=1)
    cluster.submit("small", max_workers=1)
    cluster.run()
    correction = v.ThroughputCorrected(task="big", workers=1, flops=7 * 10**9, iteration_us=1, reports=8, reason="test")
    cluster.append(correction, "coordinator", cluster.state.term)
    timeline = timeline_of(cluster.log)
    assert timeline.waf[-1].running == sum(account.rate for account in timeline.state.ledger.accounts.values())


@pytest.mark.parametrize("points", [0, 5])
def test_timeline_draws_log_without_plan(tmp_path: Path, points: int) -> None:
    pytest.importorskip("matplotlib")
    log = write_log(tmp_path / "log.bin", eventful(2)[:points])
    done = unicron_replay("timeline", "--log", log, "--plot", tmp_path / "x.png")
    assert (done.returncode, done.stderr) == (0, "")


def test_timeline_command_draws_html_and_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    log = write_log(tmp_path / "log.bin", eventful(2))
    html, png = tmp_path / "x.html", tmp_path / "x.png"
    done = unicron_replay("timeline", "--log", log, "--html", html, "--plot", png)
    assert (done.returncode, done.stderr) == (0, "")
    assert png.read_bytes().startswith(b"\x89PNG") and "<svg" in html.read_text()
    said = json.loads(unicron_replay("timeline", "--log", log, "--json", "--until", "50").stdout)
    assert set(said) == {"start_us", "end_us", "nodes", "tasks", "incidents", "waf"}
    wrong = unicron_replay("timeline", "--log", log, "--html", tmp_path / "no" / "x.html")
    assert wrong.returncode == 2 and "is not a directory" in wrong.stderr
    wrong = unicron_replay("timeline", "--log", log, "--plot", tmp_path / "x.pdf")
    assert wrong.returncode == 2 and "does not end in .png" in wrong.stderr
    log = log.rename(tmp_path / "log.html")
    wrong = unicron_replay("timeline", "--log", log, "--html", log)
    assert wrong.returncode == 2 and "is the log itself" in wrong.stderr


@pytest.mark.parametrize("length_us", [1, 999, 1_000_000, 61_500_000, 3_600_000_000, 10**14])
def test_timeline_axis_has_round_times(length_us: int) -> None:
    ticks = ticks_us(length_us)
    assert ticks[0] == 0 and ticks[-1] <= length_us and len(ticks) <= 11
    assert len(ticks) >= 4 or length_us < 4
    assert all(str(tick).rstrip("0") in ("", "1", "2", "5") for tick in ticks[1:2])
