"""The alert rules and the board name metrics that unicrond has, with labels that they have."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from prometheus_client.core import Metric

from tests.unicrond.serving import healed_cluster
from unicrond.service.api.metrics import exposition
from unicrond.service.coordinator.surroundings import HeadViews
from unicrond.service.event_log import statistics as log_figures
from unicrond.service.event_log.statistics import AppendTimes, Figures, LogVolume
from unicrond.views.view import feed_all

DEPLOY = Path(__file__).parents[2] / "deploy"
RULES = DEPLOY / "prometheus" / "unicron.rules.yaml"
BOARD = DEPLOY / "grafana" / "unicron.json"
#: A metric, and the labels that are asked of it.
METRIC = re.compile(r"\b(unicron_\w+)(?:\{([^}]*)\})?")


def expressions() -> Iterator[str]:
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        yield from (rule["expr"] for rule in group["rules"])
    for panel in json.loads(BOARD.read_text())["panels"]:
        yield from (target["expr"] for target in panel["targets"])


def of_the_log() -> Iterator[Metric]:
    """What the log's life adds in the coordinator's process."""
    yield from log_figures.metrics(Figures(disks=(LogVolume("state", "/var", 5, 10),)))
    yield from AppendTimes(lambda: 0.0).metrics()


@pytest.fixture(scope="module")
def known() -> dict[str, set[str]]:
    """Each metric's labels, of a cluster that has seen most things."""
    cluster = healed_cluster()
    cluster.kill_host(cluster.hosts["n1"])
    cluster.lose(cluster.hosts["n1"])
    cluster.run()
    views = HeadViews()
    feed_all(views, cluster.log)
    assert views.alarms() == []
    text = exposition(lambda: cluster.state, more=of_the_log, views=views)().decode()
    found: dict[str, set[str]] = {}
    for name, labels in re.findall(r"^(unicron_\w+)(?:\{([^}]*)\})? ", text, re.M):
        found.setdefault(name, set()).update(re.findall(r"(\w+)=", labels))
    return found


def test_alert_rules_and_board_name_existing_metrics(known: dict[str, set[str]]) -> None:
    for expression in expressions():
        for name, labels in METRIC.findall(expression):
            assert name in known, f"{name} in {expression}"
            assert set(re.findall(r"(\w+)\s*!?=", labels)) <= known[name], expression


def test_board_panels_never_overlap() -> None:
    seats = [
        (x, y)
        for panel in json.loads(BOARD.read_text())["panels"]
        for at in [panel["gridPos"]]
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(seats) == len(set(seats)) and max(x for x, _ in seats) < 24


needs_promtool = pytest.mark.skipif(not shutil.which("promtool"), reason="no promtool here: apt-get install prometheus")


def promtool(*arguments: str) -> None:
    checked = subprocess.run(["promtool", *arguments], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr


@needs_promtool
def test_promtool_accepts_alert_rules() -> None:
    promtool("check", "rules", str(RULES))


#: Series a minute apart, and the alerts after so long.
COURSES: list[tuple[dict[str, str], str, set[str]]] = [
    ({'unicron_nodes{status="isolated"}': "0+0x5 1+0x60"}, "60m", {"UnicronNodeIsolated"}),
    ({'unicron_tasks{status="failed"}': "0+0x20 1+0x60"}, "25m", {"UnicronTaskFailed"}),
    ({'unicron_tasks{status="failed"}': "0+0x20 1+0x60"}, "60m", set()),
    (
        {'unicron_task_iteration{task="big"}': "0+9x30 270+0x60", 'unicron_task_members{task="big"}': "3+0x90"},
        "80m",
        {"UnicronNoProgress"},
    ),
    ({'unicron_task_iteration{task="big"}': "0+9x90", 'unicron_task_members{task="big"}': "3+0x90"}, "80m", set()),
    (
        {'unicron_task_iteration{task="old"}': "270+0x90", 'unicron_task_members{task="old"}': "0+0x90"},
        "80m",
        set(),  # it has ended
    ),
    (
        {
            'unicron_goodput_flop{group="goodput",cause=""}': "0+100x30 2900+70x120",  # a fault dates back
            'unicron_work_flop{kind="failure_free"}': "0+100x150",
        },
        "140m",
        {"UnicronLowGoodput"},
    ),
    (
        {
            'unicron_goodput_flop{group="goodput",cause=""}': "0+100x30 2900+99x120",
            'unicron_work_flop{kind="failure_free"}': "0+100x150",
        },
        "140m",
        set(),
    ),
    (
        {'unicron_disk_free_bytes{volume="state"}': "5e9+0x60", 'unicron_disk_size_bytes{volume="state"}': "1e11+0x60"},
        "30m",
        {"UnicronDiskNearlyFull"},
    ),
    (
        {
            'unicron_log_append_seconds_bucket{le="1.0"}': "0+1x60",
            'unicron_log_append_seconds_bucket{le="2.0"}': "0+9x60",
            'unicron_log_append_seconds_bucket{le="+Inf"}': "0+10x60",
        },
        "40m",
        {"UnicronSlowAppends"},
    ),
    ({"unicron_deciding": "1+0x5 0+0x9"}, "10m", {"UnicrondHasStoppedDeciding"}),
    ({'up{job="unicrond"}': "1+0x5 0+0x9"}, "10m", {"UnicrondAway"}),
]


@needs_promtool
def test_alerts_fire_as_expected(tmp_path: Path) -> None:
    names = [rule["alert"] for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    tests = []
    for number, (series, at, expected) in enumerate(COURSES):
        asked = [
            {
                "expr": f"count(ALERTS{{alertname={name!r},alertstate='firing'}}) or vector(0)",
                "eval_time": at,
                "exp_samples": [{"labels": "{}", "value": int(name in expected)}],
            }
            for name in names
        ]
        inputs = [{"series": name, "values": values} for name, values in series.items()]
        tests.append({"name": str(number), "interval": "1m", "input_series": inputs, "promql_expr_test": asked})
    path = tmp_path / "test.yaml"
    path.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": tests}))
    promtool("test", "rules", str(path))
