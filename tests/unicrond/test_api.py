"""The HTTP API over a real socket: what it takes, what it refuses, and that its JSON is JSON."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.unicrond.cluster import MiniCluster
from tests.unicrond.serving import Served, healed_cluster, serving
from unicrond.core.state.state_bytes import digest, from_json
from unicrond.events import vocabulary as v
from unicrond.events.trust.keys import make_key
from unicrond.events.wire.envelope import RecordedEvent
from unicrond.intake.config import Config, NatsConfig


@asynccontextmanager
async def api(
    tmp_path: Path, *, token: str = "", story: list[RecordedEvent] | None = None, config: Config | None = None
) -> AsyncIterator[tuple[Served, aiohttp.ClientSession]]:
    async with serving(tmp_path, story, token, config) as served, aiohttp.ClientSession(served.url) as session:
        yield served, session


async def refused(response: aiohttp.ClientResponse, status: int, *words: str) -> None:
    """One clear line with these words."""
    text = await response.text()
    assert response.status == status, text
    error = json.loads(text)["error"]
    assert "\n" not in error and all(word in error for word in words), error


def strictly(text: str) -> Any:
    """JSON as everybody else reads it: no NaN, no Infinity."""

    def no(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=no)


TASK = {"name": "new", "max_workers": 2, "iterations": 5}


async def test_api_submits_and_cancels_task(tmp_path: Path) -> None:
    async with api(tmp_path) as (served, http):
        async with http.post("/v1/tasks", json=TASK) as response:
            assert response.status == 201
            answer = await response.json()
        assert answer["task"] == "new"
        assert await served.until(v.TaskSubmitted, after=answer["seq"] - 1) == answer["seq"]
        spec = served.coordinator.state.tasks["new"].spec
        assert spec.checkpoint.dir.endswith("checkpoints/new"), "a task that names no directory is given one"
        async with http.post("/v1/tasks", json=TASK) as response:
            await refused(response, 409, "name:", "new", "cancel it first")
        async with http.post("/v1/tasks/new/cancel", json={"reason": "a slip"}) as response:
            assert response.status == 202
        await served.until(v.TaskCancelled)
        assert served.coordinator.state.tasks["new"].ending.reason == "a slip"
        async with http.post("/v1/tasks/new/cancel") as response:
            await refused(response, 404, "new", "not active")


async def test_api_takes_pipeline_stages_from_megatron_flags(tmp_path: Path) -> None:
    flags = (
        "x.py --num-layers 4 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --micro-batch-size 1"
        " --vocab-size 64 --global-batch-size 4 --train-iters 9 --pipeline-model-parallel-size 2"
        " --num-virtual-stages-per-pipeline-rank 2"
    )
    task = {"name": "lm", "entry": "megatron-lm", "cwd": "/lm", "args": flags.split(), "layouts": "fixed"}
    workers = {"min_workers": 2, "max_workers": 2}
    tasks = [{**task, **workers}, {"name": "built-in", "vpp": 1, "ep": 1}]
    async with serving(tmp_path) as served, aiohttp.ClientSession(served.url) as http:
        for one in tasks:
            async with http.post("/v1/tasks", json=one) as response:
                assert response.status == 201, await response.text()
                seq = (await response.json())["seq"]
            await served.until(v.TaskSubmitted, after=seq - 1)
        known = served.coordinator.state.tasks
        assert [known[str(one["name"])].spec.vpp for one in tasks] == [2, 1]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("{", ["body", "not valid JSON"]),
        ("[]", ["expected fields"]),
        ('{"nam": "a"}', ["nam", "name"]),
        ('{"name": "a b"}', ["name", "is not a valid name"]),
        ('{"name": "a", "min_workers": 3, "max_workers": 1}', ["min_workers"]),
        ('{"name": "a", "weight": "2"}', ["weight"]),
        ('{"name": "a", "checkpoint": {"dir": "s3://bucket/a"}}', ["checkpoint.dir: node n1", "cannot write to s3://"]),
    ],
)
async def test_api_refuses_invalid_task_by_field(tmp_path: Path, body: str, words: list[str]) -> None:
    async with api(tmp_path) as (_, http), http.post("/v1/tasks", data=body) as response:
        await refused(response, 400, *words)


async def test_api_warns_of_env_that_looks_like_secret(tmp_path: Path) -> None:
    env = {"HF_TOKEN": "hf_abc", "COLOUR": "red"}
    secrets = {"WANDB_API_KEY": "file:/etc/secrets/wandb"}
    async with api(tmp_path) as (served, http):
        async with http.post("/v1/tasks", json={"name": "new", "env": env, "secrets": secrets}) as response:
            answer = await response.text()
            (warning,) = json.loads(answer)["warnings"]
        assert "hf_abc" not in answer and warning.startswith("env.HF_TOKEN looks like a secret")
        await served.until(v.TaskSubmitted)
        async with http.get("/v1/state") as response:
            spec = (await response.json())["state"]["tasks"]["new"]["spec"]
    assert spec["env"]["HF_TOKEN"] == "(hidden)" and spec["secrets"] == secrets


async def test_api_refuses_reason_of_wrong_type_or_length(tmp_path: Path) -> None:
    async with api(tmp_path) as (_, http):
        for body, word in (({"reason": 5}, "reason"), ({"reason": "x" * 2000}, "1024"), ({"why": ""}, "why")):
            async with http.post("/v1/tasks/big/cancel", json=body) as response:
                await refused(response, 400, word)


# --- who may ask ---------------------------------------------------------------------------------


async def test_api_rejects_unknown_token(tmp_path: Path) -> None:
    async with api(tmp_path, token="s3cret") as (_, http):
        for path in ("/v1/state", "/v1/events", "/metrics", "/v1/logs/big"):
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer \u00e9"}):
                async with http.get(path, headers=headers) as response:
                    await refused(response, 401, "token")
        async with http.get("/healthz") as response:
            assert response.status == 200
        async with http.get("/v1/state", headers={"Authorization": "Bearer s3cret"}) as response:
            assert response.status == 200


async def test_api_enrolls_and_revokes_nodes(tmp_path: Path) -> None:
    key = make_key("agent-new").user.key
    config = Config(nats=NatsConfig(auth="keys"))
    async with api(tmp_path, config=config) as (served, http):
        for node, body, words in (
            ("new", {"key": "UABC"}, ["key"]),
            ("coordinator", {"key": key}, ["node", "coordinator"]),
            ("new", {"key": key, "unused_h": -1}, ["unused_h"]),
        ):
            async with http.post(f"/v1/nodes/{node}/enroll", json=body) as response:
                await refused(response, 400, *words)
        async with http.post("/v1/nodes/new/enroll", json={"key": key}) as response:
            assert response.status == 202
        await served.until(v.NodeEnrolled)
        async with http.post("/v1/nodes/n1/enroll", json={"key": key}) as response:
            await refused(response, 400, "key", "is the key of node new")
        async with http.post("/v1/nodes/new/revoke", json={}) as response:
            assert response.status == 202
        await served.until(v.NodeRevoked)
        async with http.post("/v1/nodes/new/revoke", json={}) as response:
            await refused(response, 404, "node", "not enrolled")
    unlocked = api(tmp_path, config=Config(auth="off"))
    async with unlocked as (_, http), http.post("/v1/nodes/new/enroll", json={"key": key}) as response:
        await refused(response, 400, "nats.auth", "uses no keys")


@pytest.mark.parametrize("host", ["evil.example", "evil.example:7470", "10.0.0.7", "127.0.0.1.evil.example"])
async def test_api_refuses_rebound_host_name(tmp_path: Path, host: str) -> None:
    async with api(tmp_path) as (_, http), http.get("/v1/state", headers={"Host": host}) as response:
        await refused(response, 403, "host", "not loopback")


async def test_api_refuses_form_of_foreign_origin(tmp_path: Path) -> None:
    async with api(tmp_path) as (served, http):
        headers = {"Origin": "https://evil.example", "Content-Type": "text/plain"}
        async with http.post("/v1/tasks", data=json.dumps(TASK), headers=headers) as response:
            await refused(response, 403, "origin")
        assert "new" not in served.coordinator.state.tasks


@pytest.mark.parametrize(
    "path", ["/v1/tasks", "/v1/tasks/big/cancel", "/v1/plan/whatif", "/v1/faults", "/v1/nodes/n1/cordon"]
)
@pytest.mark.parametrize("depth", [200, 900, 5_000, 100_000])
async def test_api_refuses_deep_json(tmp_path: Path, path: str, depth: int) -> None:
    async with api(tmp_path) as (_, http):
        objects = min(depth, 30_000)  # within the size that a request may have
        for body in ("[" * depth, "[" * depth + "]" * depth, '{"env":' * objects + "{}" + "}" * objects):
            async with http.post(path, data=body) as response:
                assert response.status == 400, await response.text()


@pytest.mark.parametrize("number", ["9" * 5_000, "\u00b2", "\u0663", "1e3", "+1", "1_0", " 1", "", "%ff"])
@pytest.mark.parametrize(
    ("path", "field"),
    [("/v1/events", "after"), ("/v1/logs/big", "rank"), ("/v1/logs/big", "tail_bytes"), ("/v1/logs/big", "offset")],
)
async def test_api_refuses_invalid_number(tmp_path: Path, path: str, field: str, number: str) -> None:
    async with api(tmp_path) as (_, http), http.get(path, params={field: number}) as response:
        await refused(response, 400, f"{field}:", "integer")


async def test_api_refuses_token_that_is_not_text(tmp_path: Path) -> None:
    async with api(tmp_path, token="s3cret") as (served, _):
        request = b"GET /v1/state HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer \xff\xfe\r\n\r\n"
        assert await raw_status(served.port, request) == 401


async def test_api_refuses_host_that_is_not_text(tmp_path: Path) -> None:
    async with api(tmp_path) as (served, _):
        assert await raw_status(served.port, b"GET /v1/state HTTP/1.1\r\nHost: \xff\r\n\r\n") == 403


async def raw_status(port: int, request: bytes) -> int:
    """The status of the answer to a request that no client would send."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    async with asyncio.timeout(60):
        line = await reader.readline()
    writer.close()
    return int(line.split()[1])


# --- reading -------------------------------------------------------------------------------------


def with_nan() -> MiniCluster:
    """A healed cluster whose last step's loss is no number."""
    cluster = healed_cluster()
    task = cluster.state.tasks["big"]
    assert task.membership is not None
    lead = task.membership.members[0]
    iteration = task.progress.iteration + 1
    step = v.StepCommitted(
        node=lead.node,
        task="big",
        worker=lead.worker,
        generation=task.generation,
        first=iteration,
        last=iteration,
        samples=8,
        samples_digest=0,
        loss=math.nan,
        duration_us=1000,
        micro_batches_by_rank=(1,),
    )
    cluster.say(cluster.hosts[lead.node], step)
    return cluster


async def test_api_shows_nan_loss_as_null(tmp_path: Path) -> None:
    async with api(tmp_path, story=with_nan().log) as (_, http):
        async with http.get("/v1/state") as response:
            assert response.content_type == "application/json"
            state = strictly(await response.text())["state"]
        assert state["tasks"]["big"]["loss"] is None
        assert state["tasks"]["small"]["loss"] == 1.0
        async with http.get("/v1/events") as response:
            data = [line[6:] for line in (await response.text()).splitlines() if line.startswith("data: ")]
        steps = [strictly(line)["envelope"]["event"] for line in data if '"StepCommitted"' in line]
        assert steps[-1]["loss"] is None


def with_secrets() -> MiniCluster:
    """A cluster whose nodes keep states in memory, and a task with secrets in its environment."""
    cluster = MiniCluster(seed=7)
    for number in range(1, 4):
        service = v.MemoryService(node=f"n{number}", host="127.0.0.1", port=7000 + number, token="s3cret-of-memory")
        cluster.add_host(f"n{number}", memory=service)
    env = {"HF_TOKEN": "s3cret-a", "DB_PASSWORD": "s3cret-b", "STORE": "s3://me:s3cret-c@host/x", "KEYBOARD": "shown"}
    cluster.submit("big", max_workers=3, env=env)
    cluster.run()
    cluster.train("big", 5)
    cluster.run()
    assert cluster.state.tasks["big"].copies.peers, "the rig must hold what is to be hidden"
    return cluster


async def test_api_hides_tokens_and_passwords(tmp_path: Path) -> None:
    cluster = with_secrets()
    async with api(tmp_path, story=cluster.log) as (served, http):
        for path in ("/v1/state", "/v1/events"):
            async with http.get(path) as response:
                text = await response.text()
            assert "s3cret" not in text and "(hidden)" in text and "shown" in text
        assert "s3cret" in str(served.coordinator.state), "the state itself is as it was"
        async with http.get("/v1/state") as response:
            body = await response.json()
        assert body["digest"] == digest(served.coordinator.state)
        assert from_json(body["state"]).tasks["big"].spec.env["HF_TOKEN"] == "(hidden)"


async def test_api_refuses_state_until_log_is_folded(tmp_path: Path) -> None:
    async with api(tmp_path) as (served, http):
        served.coordinator.live.clear()
        served.coordinator.caught_up.clear()
        for path in ("/v1/state", "/v1/logs/big", "/v1/plan/table"):
            async with http.get(path) as response:
                await refused(response, 503, "coordinator:", "reading its log")
        for path in ("/healthz", "/metrics", "/v1/events"):
            async with http.get(path) as response:
                assert response.status == 200


async def test_api_streams_events_from_sequence(tmp_path: Path) -> None:
    async with api(tmp_path) as (served, http):
        async with http.get("/v1/events", params={"after": "3"}) as response:
            assert response.content_type == "text/event-stream"
            text = await response.text()
        ids = [int(line[4:]) for line in text.splitlines() if line.startswith("id: ")]
        assert ids == list(range(4, await served.log.last_seq() + 1))
        async with http.get("/v1/events", params={"after": str(ids[-1])}) as response:
            assert await response.text() == ""
        async with http.get("/v1/events", params={"after": "-1"}) as response:
            await refused(response, 400, "after")


async def test_api_follows_new_events(tmp_path: Path) -> None:
    async with api(tmp_path) as (served, http):
        last = await served.log.last_seq()
        async with http.get("/v1/events", params={"after": str(last), "follow": "1"}) as response:
            async with http.post("/v1/tasks/small/cancel"):
                pass
            assert (await response.content.readline()).decode() == f"id: {last + 1}\n"
            assert (await response.content.readline()).decode() == "event: TaskCancelled\n"


async def test_api_serves_worker_logs(tmp_path: Path) -> None:
    (tmp_path / "1").write_text("hello from rank 1\n")
    async with api(tmp_path) as (_, http):
        async with http.get("/v1/logs/big", params={"rank": "1", "tail_bytes": "7"}) as response:
            assert (await response.json())["text"] == "rank 1\n"
        async with http.get("/v1/logs/big", params={"rank": "one"}) as response:
            await refused(response, 400, "rank")
        async with http.get("/v1/logs/nobody") as response:
            await refused(response, 404, "nobody")


# --- nodes ---------------------------------------------------------------------------------------


async def test_api_forgets_node(tmp_path: Path) -> None:
    async with api(tmp_path) as (served, http):
        async with http.post("/v1/nodes/n1/forget") as response:
            await refused(response, 409, "unicronctl forget --leave n1")
        async with http.post("/v1/nodes/n9/forget") as response:
            await refused(response, 404, "n9")
        async with http.post("/v1/nodes/n1/forget", json={"leave": True, "boot": 7}) as response:
            await refused(response, 409, "agent_boot")
        async with http.post("/v1/nodes/n1/forget", json={"leave": True, "reason": "sold"}) as response:
            assert response.status == 202
        await served.until(v.ForgetRequested)
        await served.until(v.LeaveCluster)
        node = served.coordinator.state.nodes["n1"]
        assert (node.cordon.draining, node.departure.removal) == (True, "sold")


async def test_api_cordons_drains_and_uncordons_node(tmp_path: Path) -> None:
    async with api(tmp_path) as (served, http):
        async with http.post("/v1/nodes/n1/cordon", json={"drain": True, "reason": "new fan"}) as response:
            assert response.status == 202
            seq = (await response.json())["seq"]
        await served.until(v.NodeCordoned, after=seq - 1)
        node = served.coordinator.state.nodes["n1"]
        assert (node.cordon.active, node.cordon.draining, node.cordon.reason) == (True, True, "new fan")
        await served.until(v.PlanAdopted, after=seq)
        assert all(
            "n1" not in nodes for a in served.coordinator.state.plan.assignments.values() for nodes in a.replicas
        )
        async with http.post("/v1/nodes/n1/uncordon") as response:
            assert response.status == 202
        await served.until(v.NodeUncordoned)
        assert served.coordinator.state.nodes["n1"].schedulable
        async with http.post("/v1/nodes/n9/cordon") as response:
            await refused(response, 404, "n9")
        async with http.post("/v1/nodes/n1/cordon", json={"drain": "yes"}) as response:
            await refused(response, 400, "drain")


async def test_api_drains_by_deadline_and_opens_maintenance_window(tmp_path: Path) -> None:
    async with api(tmp_path) as (served, http):
        async with http.post("/v1/nodes/n1/cordon", json={"drain": True, "by": {"in_s": 3600}}) as response:
            assert response.status == 202
            by_us = (await response.json())["empty_by_us"]
        await served.until(v.NodeCordoned)
        assert served.coordinator.state.nodes["n1"].cordon.empty_by_us == by_us
        async with http.post("/v1/nodes/n2/cordon", json={"by": {"in_s": 3600}}) as response:
            await refused(response, 400, "by: only a drain has a time")
        about = {"nodes": ["n2", "n3"], "begins": {"in_s": 7200}, "for_s": 600, "reason": "new cables"}
        async with http.post("/v1/maintenance", json=about) as response:
            assert response.status == 201
            told = await response.json()
        window = f"w{told['seq']}"
        await served.until(v.MaintenancePlanned)
        assert served.coordinator.state.windows[window].nodes == ("n2", "n3")
        assert told["until_us"] - told["from_us"] == 600_000_000
        async with http.post("/v1/maintenance", json={**about, "nodes": ["n9"]}) as response:
            await refused(response, 404, "n9")
        async with http.post("/v1/maintenance", json={**about, "begins": {"at_us": 1}}) as response:
            await refused(response, 400, "from: the window would be over")
        async with http.post("/v1/maintenance/w1/cancel") as response:
            await refused(response, 404, "w1")
        async with http.post(f"/v1/maintenance/{window}/cancel") as response:
            assert response.status == 202
        await served.until(v.MaintenanceCancelled)
        assert not served.coordinator.state.windows


# --- ordered faults ------------------------------------------------------------------------------

ALLOWED = Config(injection=True)


async def test_api_refuses_fault_without_allow_injection(tmp_path: Path) -> None:
    async with api(tmp_path) as (served, http):
        before = await served.log.last_seq()
        async with http.post("/v1/faults", json={"kind": "kill", "task": "big"}) as response:
            await refused(response, 409, "--allow-injection")
        assert await served.log.last_seq() == before


async def test_fault_order_becomes_command_to_node_of_worker(tmp_path: Path) -> None:
    async with api(tmp_path, config=ALLOWED) as (served, http):
        task = served.coordinator.state.tasks["big"]
        assert task.membership is not None
        member = task.membership.members[1]
        order = {"kind": "nan", "task": "big", "rank": 1, "at_iteration": 99, "phase": "forward"}
        async with http.post("/v1/faults", json=order) as response:
            assert response.status == 202
            answer = await response.json()
        assert (answer["worker"], answer["node"]) == (member.worker, member.node)
        seq = await served.until(v.InjectFault)
        (entry,) = [e async for e in served.log.read(seq - 1, until_seq=seq)]
        assert isinstance(entry, RecordedEvent)
        command = entry.envelope.event
        assert isinstance(command, v.InjectFault) and command.injection == f"f{answer['seq']}"
        assert command.node == member.node
        assert command.agent_boot == served.coordinator.state.nodes[member.node].agent.boot > 0
        assert command.fault == v.Fault(
            kind="nan", worker=member.worker, at_iteration=99, phase="forward", excluded_from_blame=True
        )
        assert not served.coordinator.state.injections, "passed on once"


@pytest.mark.parametrize(
    ("order", "status", "words"),
    [
        ({"kind": "melt"}, 400, ["kind", "melt"]),
        ({"kind": "kill"}, 400, ["node", "--task or --node"]),
        ({"kind": "hang", "node": "n1"}, 400, ["task", "worker's fault"]),
        ({"kind": "hang", "task": "nobody"}, 404, ["nobody"]),
        ({"kind": "hang", "task": "big", "rank": 7}, 404, ["rank 7", "has 3"]),
        ({"kind": "hang", "task": "big", "at_iteration": 2}, 409, ["at_iteration", "has passed"]),
        ({"kind": "kill", "node": "n1", "rank": 0}, 400, ["rank"]),
        ({"kind": "kill", "node": "n9"}, 404, ["n9"]),
        ({"kind": "drop_network", "node": "n1", "at_iteration": 99}, 400, ["at_iteration"]),
        ({"kind": "slow", "task": "big"}, 400, ["seconds"]),
        ({"kind": "slow", "task": "big", "seconds": -1.0}, 400, ["seconds"]),
        ({"kind": "exit", "task": "big", "seconds": 1.0}, 400, ["seconds"]),
        ({"kind": "xid", "node": "n1"}, 400, ["xid"]),
        ({"kind": "kill", "task": "big", "xid": 79}, 400, ["xid"]),
    ],
)
async def test_api_refuses_impossible_fault(
    tmp_path: Path, order: dict[str, Any], status: int, words: list[str]
) -> None:
    async with api(tmp_path, config=ALLOWED) as (_, http), http.post("/v1/faults", json=order) as response:
        await refused(response, status, *words)


async def test_api_refuses_fault_for_absent_node(tmp_path: Path) -> None:
    cluster = healed_cluster()
    cluster.kill_host(cluster.hosts["n4"])
    cluster.lose(cluster.hosts["n4"])
    async with (
        api(tmp_path, story=cluster.log, config=ALLOWED) as (_, http),
        http.post("/v1/faults", json={"kind": "kill", "node": "n4"}) as response,
    ):
        await refused(response, 409, "n4 is lost")
