"""Tables on terminals that are too narrow for them: what matters is not cut, and a cut is marked."""

from __future__ import annotations

import io

import pytest
from msgspec.structs import replace
from rich.console import Console

from tests.unicrond.serving import healed_cluster
from unicrond.core.state.state import ClusterState, TaskStatus
from unicrond.core.state.task_parts import Ending
from unicrond.display.cluster_tables import incidents_table, nodes_table, tasks_table, workers_table
from unicrond.display.tables import Table, for_terminal, show

REASON = "struck 8 times: no heartbeat for 1.53 s (limit 1.50 s), and its peers have lost it as well"


def shown(table: Table, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(for_terminal(table, "title"))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert all(len(line) <= width for line in lines), lines
    return lines


@pytest.fixture(scope="module")
def state() -> ClusterState:
    state = healed_cluster().state
    tasks = {
        name: replace(task, status=TaskStatus.FAILED, ending=Ending(reason=REASON))
        for name, task in state.tasks.items()
    }
    return replace(state, tasks=tasks)


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_tasks_table_shows_status_and_reason(state: ClusterState, width: int) -> None:
    lines = shown(tasks_table(state), width)
    assert "status" in lines[1]
    assert sum("failed" in line for line in lines) == len(state.tasks)
    assert " ".join(" ".join(lines).split()).count(REASON) == len(state.tasks)


@pytest.mark.parametrize("width", [50, 80, 120])
def test_incidents_table_shows_severity(state: ClusterState, width: int) -> None:
    lines = shown(incidents_table(state, state.now_us), width)
    assert "SEV2" in " ".join(lines), lines
    assert state.closed_incidents[0].message in " ".join(" ".join(lines).split())


@pytest.mark.parametrize("width", [60, 80])
def test_workers_table_shows_node_and_pid(state: ClusterState, width: int) -> None:
    tasks = {
        name: replace(
            task,
            workers={
                worker: replace(its, pid=4194303, node="rack07-gpu0123", section="an evaluation of the whole test set")
                for worker, its in task.workers.items()
            },
        )
        for name, task in state.tasks.items()
    }
    lines = shown(workers_table(replace(state, tasks=tasks)), width)
    assert sum("4194303" in line and "rack07-gpu0123" in line and " member" in line for line in lines) == 4
    assert " ".join(" ".join(lines).split()).count("busy: an evaluation of the whole test set") == 4


@pytest.mark.parametrize("width", [40, 80])
def test_nodes_table_shows_status(state: ClusterState, width: int) -> None:
    assert sum(" up " in line for line in shown(nodes_table(state), width)) == len(state.nodes)


@pytest.mark.parametrize(("no_color", "styled"), [("1", False), ("", True)])
def test_no_color_disables_all_styles(no_color: str, styled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", no_color)
    stream = Terminal()
    show(Table(("name", "status"), (("n1", "lost"),)), "nodes", stream)
    assert ("\x1b[" in stream.getvalue()) is styled and "lost" in stream.getvalue()


def test_table_marks_truncation() -> None:
    table = Table(("name", "status", "path", "reason"), (("n" * 20, "completed", "p" * 60, "short"),))
    lines = shown(table, 50)
    assert "completed" in lines[2] and lines[2].count("…") == 2
    assert lines[3] == "    short"


def test_table_aligns_columns_that_fit() -> None:
    table = Table(("name", "n", "reason"), (("a", "10", "x"), ("bcd", "7", "why not")), frozenset({"n"}))
    assert shown(table, 80) == ["title", "name   n  reason", "a     10  x", "bcd    7  why not"]


def test_table_wraps_long_last_column() -> None:
    lines = shown(Table(("name", "reason"), (("a", "word " * 12),)), 40)
    assert lines[2].startswith("a     word word") and all(line.startswith("      word") for line in lines[3:])
