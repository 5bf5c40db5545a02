"""The live view: what it shows of a state, what it prints where nobody watches, and how it bears an absence."""

from __future__ import annotations

import asyncio
import io
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from msgspec.structs import replace
from rich.console import Console

from tests.unicrond.cluster import MiniCluster
from tests.unicrond.serving import healed_cluster, serving
from unicrond.core.state.node_parts import Isolation
from unicrond.core.state.state import ClusterState, TaskStatus
from unicrond.ctl.client import Client
from unicrond.ctl.live_view import incident_table, render, watch
from unicrond.ctl.streams import follow
from unicrond.display.cluster_tables import incidents_table, milliseconds, nodes_table
from unicrond.display.event_lines import BadEventStream, EventLine, EventStreamParser
from unicrond.display.tables import Table, plain
from unicrond.display.worth import si
from unicrond.events.vocabulary import NodeLeft
from unicrond.events.vocabulary.phrases import clean
from unicrond.events.wire.envelope import Envelope


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(state: ClusterState, width: int = 140, **more: object) -> str:
    console = Console(file=io.StringIO(), width=width, height=60, color_system=None)
    console.print(render(state, state.now_us, **more))  # type: ignore[arg-type]
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def line(seq: int, kind: str, summary: str, **event: object) -> EventLine:
    return EventLine(seq=seq, recorded_at_us=seq * 1_000_000, type=kind, summary=summary, envelope={"event": event})


@pytest.fixture(scope="module")
def healed() -> MiniCluster:
    return healed_cluster()


# --- on a terminal -------------------------------------------------------------------------------


def test_view_of_empty_cluster_says_so() -> None:
    text = shown(ClusterState())
    assert "no nodes" in text
    assert "none yet" in text


def test_view_shows_nodes_tasks_incidents_and_events(healed: MiniCluster) -> None:
    text = shown(healed.state, events=[line(3, "NodeJoined", "node n3 joined")])
    for node in healed.state.nodes:
        assert node in text
    assert "3 of 1..3" in text
    assert "10/100" in text
    assert "1.0000" in text
    assert "big 3, small 1  WAF 7 weighted workers" in text, "no task has a table, so nobody knows FLOP/s"
    assert healed.state.plan.reason in " ".join(text.split())
    incident = healed.state.closed_incidents[0]
    for part in (incident.id, "SEV2", "process_exit", "restart the process", incident.message):
        assert part in text
    assert "node n3 joined" in text
    assert "no answer" not in text
    assert "no answer from the coordinator for 7 s" in shown(healed.state, away_s=7.2)


def test_view_shows_open_incident(healed: MiniCluster) -> None:
    cluster = MiniCluster(seed=1)
    for number in range(1, 4):
        cluster.add_host(f"n{number}")
    cluster.submit("a", max_workers=3)
    cluster.run()
    cluster.train("a")
    lead = cluster.state.tasks["a"].membership.members[0]
    cluster.kill_host(cluster.hosts[lead.node])
    cluster.lose(cluster.hosts[lead.node])
    text = shown(cluster.state)
    assert "reconfigure (open)" in text
    assert "2 up, 1 lost" in text or "1 lost, 2 up" in text
    (row,) = incidents_table(cluster.state, cluster.state.now_us + 5_000_000).rows
    assert row[6] == "5000 ms", "the transition of an open incident runs on"


def test_view_rendering_is_pure(healed: MiniCluster) -> None:
    before = healed.state
    assert shown(healed.state) == shown(healed.state)
    assert healed.state == before


def test_view_escapes_markup_and_control_characters(healed: MiniCluster) -> None:
    nasty = "[bold]x[/nope] \x1b[2J\x07\r\nnext \u202e"
    nodes = {name: replace(node, reason=nasty) for name, node in healed.state.nodes.items()}
    text = shown(replace(healed.state, nodes=nodes), events=[line(1, "NodeLeft", nasty)])
    assert "[bold]x[/nope]" in text
    assert all(char.isprintable() or char == "\n" for char in text)


def test_view_fits_80_columns(healed: MiniCluster) -> None:
    ended = replace(healed.state.tasks["small"], status=TaskStatus.CANCELLED)
    text = shown(replace(healed.state, tasks=healed.state.tasks | {"small": ended}), width=80)
    assert "…" not in text, "nothing is cut off"
    assert "cancelled" in text


def test_view_of_large_cluster_fits(healed: MiniCluster) -> None:
    node = healed.state.nodes["n1"]
    nodes = {f"m{number:04}": replace(node, name=f"m{number:04}") for number in range(1000)}
    nodes["m0777"] = replace(nodes["m0777"], isolation=Isolation(active=True), reason="ecc")
    table = nodes_table(replace(healed.state, nodes=nodes), 16)
    assert table.rows[0][:2] == ("m0777", "isolated"), "trouble comes first"
    assert table.rows[-1][:2] == ("and 984 more", "984 up")
    assert len(nodes_table(replace(healed.state, nodes=nodes)).rows) == 1000


async def test_watch_draws_screen_on_terminal(healed: MiniCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    terminal, stop = Terminal(), asyncio.Event()
    calls = 0

    async def get_state() -> tuple[ClusterState, str]:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise ConnectionRefusedError
        if calls == 3:
            stop.set()
        return healed.state, ""

    await asyncio.wait_for(watch(get_state, stop, stream=terminal), 10)
    assert calls == 3, "an absence is borne"
    assert "\x1b[" in terminal.getvalue()
    assert "unicrond" in terminal.getvalue()


# --- elsewhere -----------------------------------------------------------------------------------


async def test_watch_prints_noteworthy_lines_without_terminal(healed: MiniCluster) -> None:
    stream, stop, told = io.StringIO(), asyncio.Event(), asyncio.Event()

    async def events() -> AsyncIterator[EventLine]:
        yield line(1, "NodeJoined", "node n1 \x1b[31mjoined\nnow")
        yield line(2, "CommandApplied", "machinery")
        yield line(3, "WorkerExited", "ended by signal 9", is_expected=False)
        yield line(4, "WorkerExited", "ended as told", is_expected=True)
        yield EventLine(seq=5, recorded_at_us=0, type="QuarantinedMessage", quarantined="$.event.node: wrong")
        told.set()
        await asyncio.Event().wait()

    async def get_state() -> tuple[ClusterState, str]:
        return healed.state, ""

    watching = asyncio.create_task(watch(get_state, stop, events(), stream=stream))
    await asyncio.wait_for(told.wait(), 10)
    stop.set()
    await asyncio.wait_for(watching, 10)
    lines = stream.getvalue().splitlines()
    said = [text.split("  ", 1)[1] for text in lines[:3]]
    assert said == ["node n1 [31mjoined now", "ended by signal 9", "not a valid event: $.event.node: wrong"]
    assert all("task" in text for text in lines[3:]), "the rest is how the tasks stand at the end"
    assert all(char.isprintable() or char == "\n" for char in stream.getvalue())


async def test_event_stream_is_followed_across_restart(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        last = await served.log.last_seq()
        events = follow(Client(served.url), after=last - 2)
        seen = [await anext(events), await anext(events)]
        await served.stop()
        await served.start()
        left = NodeLeft(node="n4", reason="maintenance")
        await served.log.append([Envelope(producer="n4", boot=9, number=1, observed_at_us=1, event=left)])
        async with asyncio.timeout(20):
            while seen[-1].type != "NodeLeft":
                seen.append(await anext(events))
        await events.aclose()  # type: ignore[attr-defined]
    assert [event.seq for event in seen] == list(range(last - 1, last - 1 + len(seen)))
    assert seen[-1].text == "node n4 left: maintenance"


# --- tables and streams --------------------------------------------------------------------------


def test_incident_table_suits_terminal_or_file(healed: MiniCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    file, terminal = io.StringIO(), Terminal()
    incident_table(healed.state, file)
    incident_table(healed.state, terminal)
    (incident,) = healed.state.closed_incidents
    title, header, row = file.getvalue().splitlines()
    assert title == "incidents"
    assert header.split()[:3] == ["incident", "sev", "cause"]
    assert row.split()[:3] == [incident.id, "SEV2", "process_exit"]
    assert row.endswith(incident.message)
    assert "\x1b[" not in file.getvalue()
    assert "\x1b[" in terminal.getvalue()
    assert incident.id in terminal.getvalue()
    empty = io.StringIO()
    incident_table(ClusterState(), empty)
    assert empty.getvalue() == "incidents\nno incident\n"


def test_plain_table_aligns_columns() -> None:
    table = Table(("name", "n"), (("a", "1"), ("longer", "100")), frozenset({"n"}))
    assert plain(table) == ["name      n", "a         1", "longer  100"]
    assert clean(" a\tb\x00 c\u2028d ") == "a b c d"


def test_numbers_print_with_units() -> None:
    assert [si(0, "B"), si(999, "B"), si(1.5e12, "FLOP/s"), si(2e18, "FLOP/s")] == [
        "0 B", "999 B", "1.5 TFLOP/s", "2 EFLOP/s",
    ]  # fmt: skip
    assert [si(999.4e6, "FLOP/s"), si(999.6e6, "FLOP/s"), si(999.6), si(-999.6e9, "B")] == [
        "999 MFLOP/s", "1 GFLOP/s", "1 k", "-1 TB",
    ]  # fmt: skip
    assert [milliseconds(1), milliseconds(1234), milliseconds(1_234_567)] == ["0.0", "1.2", "1235"]


def test_event_stream_parser_accepts_any_split() -> None:
    text = b"".join(
        b'id: %d\nevent: NodeLeft\ndata: {"seq":%d,"recorded_at_us":1,"summary":"\xc3\xa4","envelope":{"x":NaN}}\r\n\n'
        % (n, n)
        for n in range(1, 20)
    )
    draw = random.Random(3)
    for _ in range(50):
        parser, seen, at = EventStreamParser(), [], 0
        while at < len(text):
            step = draw.randrange(1, 200)
            seen += parser.feed(text[at : at + step])
            at += step
        assert [event.seq for event in seen] == list(range(1, 20))
        assert {(event.type, event.summary) for event in seen} == {("NodeLeft", "ä")}


@pytest.mark.parametrize(
    "chunk", [b"data: {\n\n", b"data: []\n\n", b'data: {"seq":"x"}\n\n', b"data: 1\n\n", b"x" * 5_000_000]
)
def test_event_stream_parser_refuses_bad_data(chunk: bytes) -> None:
    with pytest.raises(BadEventStream):
        list(EventStreamParser().feed(chunk))
