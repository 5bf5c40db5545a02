"""Whose floor is met: priorities, preemptible tasks, quotas; settings that change; why a task waits."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import pytest

from tests.unicrond.cluster import MiniCluster, members
from tests.unicrond.serving import serving
from tests.unicrond.test_page import with_tokens
from unicrond.core.fold import fold
from unicrond.core.rules.requests import request_problem
from unicrond.core.state.policy import Policy, Settings, settings_of
from unicrond.core.state.state import ClusterState
from unicrond.core.tasks.quotas import over_quota
from unicrond.display.queue import pending_reason
from unicrond.events import vocabulary as v
from unicrond.events.wire.codec import decode, encode
from unicrond.events.wire.envelope import Envelope, RecordedEvent
from unicrond.intake.config import ApiConfig, Config
from unicrond.intake.tokens import Scope, line_of, make_token


def cluster_of(nodes: int, policy: Policy | None = None) -> MiniCluster:
    cluster = MiniCluster(1, policy or Policy())
    for number in range(nodes):
        cluster.add_host(f"n{number}")
    return cluster


def workers(cluster: MiniCluster) -> dict[str, int]:
    return {name: len(members(cluster, name)) if task.membership else 0 for name, task in cluster.state.tasks.items()}


def submit_as(cluster: MiniCluster, owner: str, name: str, **spec: object) -> None:
    task = v.TaskSpec(name=name, iterations=10**6, **spec)  # type: ignore[arg-type]
    cluster.append(v.TaskSubmitted(spec=task, requester=owner), "api", cluster.state.term)


def test_planner_keeps_production_beside_debug_tasks() -> None:
    cluster = cluster_of(3)
    cluster.submit("prod", weight=10.0, min_workers=3, max_workers=3)
    cluster.run()
    for name in ("dbg1", "dbg2"):
        cluster.submit(name, weight=0.01, min_workers=1, max_workers=1)
    cluster.run()
    assert workers(cluster) == {"prod": 3, "dbg1": 0, "dbg2": 0}
    reason = pending_reason(cluster.state, cluster.state.tasks["dbg1"])
    assert reason == "pending: needs 1 worker, 0 free; runs with 1 more; before it: prod"
    assert cluster.state.plan.waf == cluster.state.plan.waf_if_healthy


def test_healthy_waf_counts_production_that_stands() -> None:
    """With a lost node production cannot run: the loss shows, though the debug tasks run."""
    cluster = cluster_of(3)
    cluster.submit("prod", weight=10.0, min_workers=3, max_workers=3)
    cluster.submit("dbg", weight=0.01, min_workers=1, max_workers=1)
    cluster.run()
    cluster.lose(cluster.hosts["n1"])
    cluster.run()
    assert workers(cluster) == {"prod": 0, "dbg": 1}
    assert cluster.state.plan.waf_if_healthy > 100 * cluster.state.plan.waf
    assert pending_reason(cluster.state, cluster.state.tasks["prod"]).startswith("pending: needs 3 workers, 1 free")


def test_planner_prefers_higher_priority_to_worth() -> None:
    cluster = cluster_of(2)
    cluster.submit("heavy", weight=100.0, min_workers=2, max_workers=2)
    cluster.run()
    cluster.submit("urgent", min_workers=1, max_workers=1, priority=10)
    cluster.run()
    assert workers(cluster)["urgent"] == 1
    heavy = cluster.state.tasks["heavy"]
    assert pending_reason(cluster.state, heavy).endswith("1 free; runs with 1 more; before it: urgent (priority 10)")


def test_planner_gives_preemptible_task_the_rest() -> None:
    cluster = cluster_of(2)
    cluster.submit("spot", weight=100.0, min_workers=2, max_workers=2, preemptible=True, priority=10)
    cluster.run()
    assert workers(cluster)["spot"] == 2
    cluster.submit("usual", min_workers=1, max_workers=1)
    cluster.run()
    assert workers(cluster) == {"spot": 0, "usual": 1}


def test_quota_makes_tasks_beyond_it_preemptible() -> None:
    cluster = cluster_of(3, Policy(quotas={"alice": 1, "*": 3}))
    submit_as(cluster, "alice", "a1", weight=5.0)
    submit_as(cluster, "alice", "a2", weight=5.0)
    cluster.run()
    assert over_quota(cluster.state) == {"a2"}
    assert workers(cluster) == {"a1": 1, "a2": 1}, "what is free may be used"
    submit_as(cluster, "bob", "b", min_workers=2, max_workers=2, global_batch=8)
    cluster.run()
    assert workers(cluster) == {"a1": 1, "a2": 0, "b": 2}
    reason = pending_reason(cluster.state, cluster.state.tasks["a2"])
    assert (
        reason
        == "pending: needs 1 worker, 0 free; over the quota of alice (1 worker); runs with 1 more; before it: b, a1"
    )


def test_quotas_stand_among_the_settings_of_the_log() -> None:
    settings = Settings(Policy(quotas={"alice": 4, "*": 8}), 1.0)
    assert settings_of(settings.numbers()) == settings
    assert not [name for name in Settings(Policy(), 1.0).numbers() if name.startswith("quotas")]


def test_update_moves_workers_of_a_running_task() -> None:
    cluster = cluster_of(2)
    cluster.submit("first", min_workers=2, max_workers=2)
    cluster.run()
    cluster.submit("second", min_workers=2, max_workers=2)
    cluster.run()
    assert workers(cluster) == {"first": 2, "second": 0}
    cluster.append(v.TaskUpdated(task="second", weight=3.0, reason="test"), "api", cluster.state.term)
    cluster.run()
    assert workers(cluster) == {"first": 0, "second": 2}
    assert "task second has other settings" in cluster.state.plan.trigger
    assert cluster.state.tasks["second"].spec.weight == 3.0
    cluster.append(
        v.TaskUpdated(task="first", priority=1, min_workers=1, max_workers=1, reason="test"), "api", cluster.state.term
    )
    cluster.run()
    assert workers(cluster)["first"] == 1


async def test_api_refuses_priority_above_0_without_scope_operate(tmp_path: Path) -> None:
    """Whoever may submit cannot go before other people's tasks by a number."""
    for scopes, status in (((Scope.SUBMIT,), 403), ((Scope.SUBMIT, Scope.OPERATE), 201)):
        token, config = with_tokens(tmp_path, *scopes)
        headers = {"Authorization": f"Bearer {token}"}
        async with serving(tmp_path, config=config) as served, aiohttp.ClientSession(headers=headers) as session:
            for priority, expected in ((0, 201), (-5, 201), (5, status)):
                task = {"name": f"t{priority + 10}", "priority": priority}
                async with session.post(f"{served.url}/v1/tasks", json=task) as answer:
                    assert answer.status == expected, await answer.text()
            update = {"priority": 5}
            async with session.post(f"{served.url}/v1/tasks/t10/update", json=update) as answer:
                body = await answer.json()
                assert answer.status == (403 if status == 403 else 202), body
                assert status != 403 or "priority: 5 goes before other people's tasks" in body["error"]


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({}, "settings: none is given"),
        ({"min_workers": 5}, "min_workers"),
        ({"max_workers": 64}, "max_workers"),
    ],
)
def test_update_is_refused_with_the_field(settings: dict[str, int], problem: str) -> None:
    cluster = cluster_of(2)
    cluster.submit("task", min_workers=1, max_workers=2)
    cluster.run()
    request = v.TaskUpdated(task="task", reason="test", **settings)  # type: ignore[arg-type]
    assert problem in request_problem(cluster.state, request)
    before = cluster.state.tasks["task"].spec
    cluster.append(request, "api", cluster.state.term)
    assert cluster.state.tasks["task"].spec == before


def test_update_says_what_changes() -> None:
    request = v.TaskUpdated(task="big", weight=2.5, preemptible=True, reason="nightly", requester="alice")
    assert request.sentence() == ("task big is to have weight 2.5, preemptible yes: nightly (asked by alice)")


def test_quotas_pass_the_codec_and_come_back_from_the_log() -> None:
    """A claim that cannot be written would keep every head from deciding."""
    quotas = {"alice": 4, "bob-2": 0, "*": 8}
    started = v.CoordinatorStarted(term=1, version="0", policy=Settings(Policy(quotas=quotas), 1.0).numbers())
    envelope = Envelope(producer="coordinator", boot=1, number=1, term=1, observed_at_us=1, event=started)
    event = decode(encode(envelope)).event
    assert isinstance(event, v.CoordinatorStarted)
    assert settings_of(event.policy).policy.quotas == quotas
    assert fold(ClusterState(), RecordedEvent(1, 1, envelope)).quotas == quotas


async def test_api_lets_no_token_change_another_owners_task(tmp_path: Path) -> None:
    alice, bob = make_token(), make_token()
    lines = (line_of("alice", (Scope.SUBMIT,), alice), line_of("bob", (Scope.SUBMIT, Scope.OPERATE), bob))
    eve = make_token()
    lines = (*lines, line_of("eve", (Scope.SUBMIT,), eve))
    (tmp_path / "tokens").write_text("\n".join(lines) + "\n")
    config = Config(api=ApiConfig(tokens_file=str(tmp_path / "tokens")))

    def bearer(token: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {token}"}

    async with serving(tmp_path, config=config) as served, aiohttp.ClientSession() as session:
        url = f"{served.url}/v1/tasks"
        async with session.post(url, json={"name": "hers"}, headers=bearer(alice)) as answer:
            assert answer.status == 201, await answer.text()
        for order, body in (("update", {"priority": -1000}), ("cancel", {}), ("reshape", {"max_workers": 1})):
            async with session.post(f"{url}/hers/{order}", json=body, headers=bearer(eve)) as answer:
                error = (await answer.json())["error"]
                assert answer.status == 403 and "hers is alice's" in error, error
        for token in (alice, bob):
            async with session.post(f"{url}/hers/update", json={"weight": 2}, headers=bearer(token)) as answer:
                assert answer.status == 202, await answer.text()


def test_update_of_bounds_waits_for_reshape_of_a_person() -> None:
    cluster = cluster_of(2)
    cluster.submit("task", min_workers=1, max_workers=2)
    cluster.run()
    reshape = v.ReshapeRequested(task="task", tp=1, pp=1, min_workers=1, max_workers=1, reason="test")
    cluster.append(reshape, "api", cluster.state.term)
    request = v.TaskUpdated(task="task", max_workers=2, reason="test")
    assert "max_workers: the reshape that is under way" in request_problem(cluster.state, request)
    assert not request_problem(cluster.state, v.TaskUpdated(task="task", weight=2.0, reason="test"))
