"""The runner of views: one step for each entry, and a view that raises harms nobody else."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import aiohttp
import pytest

from tests.replay.logs import write_log
from tests.unicrond.serving import serving
from tests.unicrond.stories import trained
from unicrond.core.replayer import LogStep, steps
from unicrond.core.state.state import ClusterState
from unicrond.events.cli.command_line import UsageError
from unicrond.events.log.event_log import LogDamaged
from unicrond.events.wire.envelope import QuarantinedMessage
from unicrond.replay.cli import parser
from unicrond.replay.views.commands import view_command
from unicrond.service.coordinator.surroundings import HeadViews
from unicrond.views.table import VIEWS
from unicrond.views.view import JsonView, View, Views, feed_all


class _Recorder(View):
    """Keeps the numbers of the entries; raises at one of them."""

    def __init__(self, bad_seq: int = 0) -> None:
        self.seqs: list[int] = []
        self._bad_seq = bad_seq

    def begin(self) -> None:
        self.seqs.clear()

    def feed(self, step: LogStep) -> None:
        if step.entry.seq == self._bad_seq:
            raise KeyError("a bug")
        self.seqs.append(step.entry.seq)


def test_log_steps_chain_up_to_fold() -> None:
    cluster = trained(2)
    chain = list(steps(cluster.log))
    assert chain[0].before == ClusterState() and chain[-1].after == cluster.state
    assert all(step.after is after.before for step, after in pairwise(chain))
    assert [step.event for step in chain] == [entry.envelope.event for entry in cluster.log]
    assert LogStep(cluster.state, QuarantinedMessage(9, 0, "x", "not JSON", 0), cluster.state).event is None


def test_raising_view_is_closed_and_others_continue(caplog: pytest.LogCaptureFixture) -> None:
    cluster = trained(2)
    broken, whole = _Recorder(bad_seq=3), _Recorder()
    views = Views(broken)
    views.add(whole)
    feed_all(views, cluster.log)
    assert broken.seqs == [1, 2] and whole.seqs == [entry.seq for entry in cluster.log]
    kind = type(cluster.log[2].envelope.event).__name__
    assert views.alarms() == [f"the view _Recorder ends at entry 3 ({kind}); nothing else is concerned"]
    assert caplog.text.count("restart the coordinator without its snapshot") == 1 and "a bug" in caplog.text
    views.begin()
    views.feed(next(steps(cluster.log)))
    assert broken.seqs == whole.seqs == [1] and views.alarms() == []


def test_head_reports_end_of_goodput_view(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise KeyError("a bug")

    views = HeadViews()
    monkeypatch.setattr("unicrond.views.goodput_keeper.account_step", fail)
    feed_all(views, trained(2).log)
    assert views.goodput.totals is None and [line.split(" ends")[0] for line in views.alarms()] == [
        "the view GoodputKeeper"
    ]
    views.begin()
    assert views.goodput.totals is not None


class _Counts(JsonView):
    """Counts entries by the type of their event: a view as CONTRIBUTING.md describes it."""

    def __init__(self) -> None:
        self.counts = Counter[str]()

    def feed(self, step: LogStep) -> None:
        self.counts[type(step.event).__name__] += 1

    def value(self, state: ClusterState) -> dict[str, int]:
        return {**self.counts, "seq": state.seq}


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(VIEWS, "counts", _Counts)
    return "counts"


async def test_a_view_in_the_table_runs_in_a_head(counts: str, tmp_path: Path) -> None:
    async with serving(tmp_path) as served, aiohttp.ClientSession() as session:
        async with session.get(f"{served.url}/v1/views/{counts}") as answer:
            value = await answer.json()
        assert value["TaskSubmitted"] == 2 and value["seq"] == served.coordinator.state.seq
        async with session.get(f"{served.url}/v1/views/count") as answer:
            assert answer.status == 404
            assert (await answer.json())["error"] == "name: no view count; did you mean counts?"
        for name in VIEWS:
            async with session.get(f"{served.url}/v1/views/{name}") as answer:
                assert answer.status == 200 and await answer.json()


def show_view(*words: str) -> None:
    asyncio.run(view_command(parser().parse_args(["view", *words])))


def test_a_view_in_the_table_runs_in_a_replay(counts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = trained(2)
    log = str(write_log(tmp_path / "log.bin", list(cluster.log)))
    show_view(counts, "--log", log)
    value = json.loads(capsys.readouterr().out)
    assert value.pop("seq") == len(cluster.log) == sum(value.values())
    for name in VIEWS:
        show_view(name, "--log", log, "--at", "20", "--json")
        assert json.loads(capsys.readouterr().out)
    with pytest.raises(UsageError, match="NAME: no view count; did you mean counts"):
        show_view("count", "--log", log)


def test_a_log_with_a_gap_is_shown_by_no_view() -> None:
    log = trained(2).log
    recorder = _Recorder()
    with pytest.raises(LogDamaged, match="entry 7 follows entry 5"):
        feed_all(recorder, log[:5] + log[6:])
    assert recorder.seqs == [1, 2, 3, 4, 5]
