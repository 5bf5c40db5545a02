"""The page without a browser: its files, what it shows, who may do what from it. With one: tests/browser."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import aiohttp
import pytest
from msgspec.structs import replace

from tests.unicrond.serving import healed_cluster, serving
from tests.unicrond.test_gpu_types import FAST, SLOW, with_task
from tests.unicrond.test_gpu_types import cluster_of as types_of
from unicrond.core.state.work import iteration_flop
from unicrond.ctl.main import main as ctl_main
from unicrond.events import vocabulary as v
from unicrond.intake.config import ApiConfig, Config
from unicrond.intake.tokens import Scope, line_of, make_token
from unicrond.page.files import STATIC
from unicrond.page.view import ranks_of, view
from unicrond.replay.cli import main as replay_main

FILES = sorted(path.name for path in STATIC.iterdir())
SOURCES = [STATIC / name for name in FILES if name.endswith((".js", ".html", ".css"))]


def with_tokens(tmp_path: Path, *scopes: Scope) -> tuple[str, Config]:
    token = make_token()
    (tmp_path / "tokens").write_text(line_of("ann", scopes, token) + "\n")
    return token, Config(api=ApiConfig(tokens_file=str(tmp_path / "tokens")))


async def test_page_files_need_no_token_and_load_nothing_external(tmp_path: Path) -> None:
    _, config = with_tokens(tmp_path, Scope.READ)
    async with serving(tmp_path, config=config) as served, aiohttp.ClientSession() as session:
        for path in ("/", *(f"/page/{name}" for name in FILES)):
            async with session.get(served.url + path) as answer:
                assert answer.status == 200, path
                assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
        for path in ("/page/nothing.js", "/page/..%2f__init__.py", "/page/%2e%2e%2ffiles.py"):
            async with session.get(served.url + path) as answer:
                assert answer.status in (401, 404), path
        async with session.get(served.url + "/v1/view") as answer:
            assert answer.status == 401


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_page_addresses_are_relative(path: Path) -> None:
    text = re.sub(r"http://www\.w3\.org/2000/svg", "", path.read_text())
    assert "http://" not in text and "https://" not in text
    assert not re.search(r"""(?:href|src|from|import|fetch|ask|read)[=( ]+["'`]/""", text), (
        "behind a prefix / is another's"
    )
    assert "innerHTML" not in text and "eval(" not in text


def test_page_modules_are_all_used() -> None:
    text = "".join(path.read_text() for path in SOURCES)
    assert [name for name in FILES if name != "index.html" and name not in text] == []


async def test_page_view_matches_state(tmp_path: Path) -> None:
    async with serving(tmp_path, list(healed_cluster().log)) as served, aiohttp.ClientSession() as session:
        async with session.get(served.url + "/v1/view") as answer:
            told = await answer.json()
        async with session.get(served.url + "/v1/ranks/big") as answer:
            ranks = await answer.json()
        state = served.coordinator.state
    assert told["may"] == sorted(Scope) and told["health"]["status"] == "live" and told["inject"] is False
    shown = told["view"]
    assert [node["name"] for node in shown["nodes"]] == list(state.nodes)
    big = next(task for task in shown["tasks"] if task["name"] == "big")
    task = state.tasks["big"]
    assert big["iteration"] == task.progress.iteration and big["workers"] == 3
    assert big["flops"] == iteration_flop(task.spec) * 1e6 / task.pace.iteration_us
    assert big["eta_us"] == (task.spec.iterations - task.progress.iteration) * task.pace.iteration_us
    (incident,) = shown["incidents"]
    assert (
        incident["kind"] == "process_exit"
        and incident["closed_us"]
        and incident["micro_batches_repeated"] == state.closed_incidents[0].micro_batches_repeated
    )
    placed = {
        (node["name"], number)
        for node in shown["nodes"]
        for place, number, rank, _ in node["workers"]
        if shown["tasks"][place]["name"] == "big" and rank >= 0
    }
    assert placed == {(row["node"], int(row["worker"].split(".")[1])) for row in ranks}
    assert [row["rank"] for row in ranks] == [0, 1, 2] and all(row["in_group"] for row in ranks)


def test_page_shows_gpu_type_of_nodes_and_mixed_tasks() -> None:
    alike = view(with_task(types_of(1, 2, 0)).state)
    assert {node.get("gpu") for node in alike["nodes"]} == {SLOW}
    assert not any("gpu" in one for one in (*alike["tasks"], *alike["plan"]["tasks"]))
    assert not any("gpu" in node for node in view(healed_cluster().state)["nodes"])
    cluster = with_task(types_of(1, 2, 1))
    told = view(cluster.state)
    assert {node["name"]: node["gpu"] for node in told["nodes"]} == {"slow0": SLOW, "slow1": SLOW, "fast0": FAST}
    assert [task["gpu"] for task in told["tasks"]] == [share["gpu"] for share in told["plan"]["tasks"]] == [FAST]
    cluster.append(v.TaskCancelled(task="big", reason="test"), "api", cluster.state.term)
    cluster.run()
    assert [task["gpu"] for task in view(cluster.state)["tasks"]] == [""], "a task that has ended is on none"


def test_page_takes_size_of_replica_from_head() -> None:
    """Not from tp and pp, which are not all of it."""
    state = healed_cluster().state
    task = state.tasks["big"]
    state = replace(state, tasks={"big": replace(task, spec=replace(task.spec, cp=3))})
    (shown,) = view(state)["tasks"]
    assert (shown["workers"], shown["replica_workers"]) == (3, 3)
    page = (STATIC / "tasks.js").read_text()
    assert "${task.workers / task.replica_workers}" in page and "point.replicas * task.replica_workers" in page


def test_page_view_hides_secrets() -> None:
    state = healed_cluster().state
    assert "signal 9" in json.dumps(view(state))
    assert "signal 9" not in json.dumps(view(state, lambda text: text.replace("signal 9", "***")))


def test_page_shows_phase_of_stuck_rank() -> None:
    from unicrond.events import vocabulary as v

    cluster = healed_cluster()
    member = cluster.state.tasks["big"].membership.members[1]
    told = v.HangSuspected(
        node=member.node, task="big", worker=member.worker, generation=cluster.state.tasks["big"].generation,
        iteration=11, phase="reduce", micro_batch=2, collectives_entered=7, is_waiting=True, is_stopped=False,
        still_us=5_000_000, limit_us=3_000_000,
    )  # fmt: skip
    cluster.say(cluster.hosts[member.node], told)
    still = ranks_of(cluster.state.tasks["big"])[1]["still"]
    assert (still["phase"], still["micro_batch"], still["collective"], still["is_waiting"]) == ("reduce", 2, 7, True)
    assert view(cluster.state)["seq"] == cluster.state.seq


ELSEWHERE = (
    {"Origin": "https://evil.example"},
    {"Origin": "null"},
    {"Origin": "OWN.evil.example"},
    {"Origin": "https://evil.example", "Sec-Fetch-Site": "cross-site"},
    {"Origin": "OWN", "Sec-Fetch-Site": "same-site"},
    {"Sec-Fetch-Site": "cross-site"},
)


async def test_page_acts_only_from_own_origin_with_scope(tmp_path: Path) -> None:
    token, config = with_tokens(tmp_path, Scope.READ)
    headers = {"Authorization": f"Bearer {token}"}
    async with (
        serving(tmp_path, list(healed_cluster().log), config=config) as served,
        aiohttp.ClientSession(headers=headers) as session,
    ):
        own, plan = {"Origin": served.url}, served.url + "/v1/plan/whatif"
        async with session.post(plan, json={"lose": ["n1"]}, headers=own) as answer:
            assert answer.status == 200
        through_a_proxy = {"Origin": "https://head.example", "Sec-Fetch-Site": "same-origin"}
        async with session.post(plan, json={"lose": ["n1"]}, headers=through_a_proxy) as answer:
            assert answer.status == 200
        async with session.post(served.url + "/v1/nodes/n1/cordon", json={}, headers=own) as answer:
            assert answer.status == 403 and "operate" in (await answer.json())["error"]
        for given in ELSEWHERE:
            headers = {name: value.replace("OWN", served.url) for name, value in given.items()}
            async with session.post(plan, json={}, headers=headers) as answer:
                assert answer.status == 403 and "web pages of others" in (await answer.json())["error"], given


@pytest.mark.parametrize(
    ("path", "scope"),
    [
        ("/v1/nodes/n1/cordon", Scope.OPERATE),
        ("/v1/nodes/n1/uncordon", Scope.OPERATE),
        ("/v1/nodes/n1/revoke", Scope.OPERATE),
        ("/v1/faults", Scope.OPERATE),
        ("/v1/tasks", Scope.SUBMIT),
        ("/v1/tasks/big/cancel", Scope.SUBMIT),
        ("/v1/tasks/big/reshape", Scope.SUBMIT),
    ],
)
async def test_page_action_needs_its_scope_and_refusal_leaves_no_trace(tmp_path: Path, path: str, scope: Scope) -> None:
    """The page has no right that its token lacks."""
    others = [one for one in Scope if one is not scope]
    token, config = with_tokens(tmp_path, *others)
    async with (
        serving(tmp_path, list(healed_cluster().log), config=config) as served,
        aiohttp.ClientSession() as session,
    ):
        before, own = served.coordinator.state.seq, {"Origin": served.url}
        async with session.post(served.url + path, json={}, headers=own) as answer:
            assert answer.status == 401, "without a token"
        async with session.post(
            served.url + path, json={}, headers=own | {"Authorization": f"Bearer {token}"}
        ) as answer:
            assert answer.status == 403 and f"lacks scope {scope}" in (await answer.json())["error"]
        assert served.coordinator.state.seq == before


async def test_foreign_page_cannot_request_stacks(tmp_path: Path) -> None:
    async with serving(tmp_path, list(healed_cluster().log)) as served, aiohttp.ClientSession() as session:
        stacks = served.url + "/v1/stacks/big?rank=0"
        async with session.get(stacks, headers={"Sec-Fetch-Site": "cross-site"}) as answer:
            assert answer.status == 403
        async with session.get(stacks, headers={"Sec-Fetch-Site": "same-origin"}) as answer:
            assert answer.status == 200


async def test_page_requests_marks_once_for_all_viewers(tmp_path: Path) -> None:
    async with serving(tmp_path, list(healed_cluster().log)) as served, aiohttp.ClientSession() as session:
        for _ in range(5):
            async with session.get(served.url + "/v1/marks/big") as answer:
                told = await answer.json()
        async with session.get(served.url + "/v1/marks/nothing") as answer:
            assert answer.status == 404
        assert served.files.asked_for_marks == 1
        members = served.coordinator.state.tasks["big"].membership.members
    assert list(told["marks"]) == [member.worker for member in members]
    assert told["marks"][members[1].worker]["is_waiting"] is True


async def test_event_stream_ends_at_until(tmp_path: Path) -> None:
    async with (
        serving(tmp_path, list(healed_cluster().log)) as served,
        aiohttp.ClientSession() as session,
        session.get(served.url + "/v1/events?after=3&until=5") as answer,
    ):
        assert re.findall(r"^id: (\d+)$", await answer.text(), re.M) == ["4", "5"]


async def test_events_command_shows_newest_entries(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with serving(tmp_path, list(healed_cluster().log)) as served:
        assert await asyncio.to_thread(ctl_main, ["--url", served.url, "events", "--limit", "3", "--json"]) == 0
        lines = [json.loads(line)["seq"] for line in capsys.readouterr().out.splitlines()]
        seq = served.coordinator.state.seq
    assert lines == [seq - 2, seq - 1, seq]


def test_serve_takes_an_exported_log(capsys: pytest.CaptureFixture[str]) -> None:
    assert replay_main(["serve", "--log", "nowhere.log", "--port", "0"]) == 2
    assert "--log: nowhere.log cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize("given", [[], ["--state-dir", "a", "--log", "b.log"]])
def test_serve_takes_exactly_one_log(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert replay_main(["serve", *given]) == 2
    assert "--log" in capsys.readouterr().err
