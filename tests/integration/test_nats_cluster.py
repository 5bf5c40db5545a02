"""The log on three servers with TLS and an nkey: servers die and leaders change, and no node is ever called lost."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
import yaml

from tests.contracts.logs import started
from tests.integration.nats_cluster import NatsCluster, nats_cluster
from unicrond.core.state.state import ClusterState, NodeStatus
from unicrond.core.state.state_bytes import from_json
from unicrond.events.log.subjects import BEAT_STREAM, EVENT_STREAM
from unicrond.events.nats import streams as nats_streams
from unicrond.events.nats.connection import connect
from unicrond.events.nats.event_log import NatsEventLog
from unicrond.local.dev import HANG_FLOOR_S, SupervisedProcess, free_port

SCRIPTS = Path(sys.executable).parent
NODES = ("n1", "n2")
TIMEOUT_S = 180.0


class Head:
    """A coordinator on the cluster's log, two agents, and what its API says."""

    def __init__(self, directory: Path, nats: NatsCluster) -> None:
        self.nats = nats
        self.url = f"http://127.0.0.1:{free_port()}"
        config = {
            "state_dir": str(directory / "state"),
            "checkpoint_dir": str(directory / "checkpoints"),
            "heartbeat_s": 0.5,
            "nats": {
                "url": ",".join(nats.urls),
                "nkey_seed": str(nats.seed),
                "tls_ca": str(nats.ca),
                "replicas": len(nats.urls),
            },
            "api": {"port": int(self.url.rpartition(":")[2])},
            "auth": "off",
        }
        (directory / "unicron.yaml").write_text(yaml.safe_dump(config))
        env = os.environ | {
            "PYTHONUNBUFFERED": "1",
            "UNICRON_HANG_FLOOR_S": HANG_FLOOR_S,
            "XDG_CACHE_HOME": str(directory / "cache"),
        }
        command = [str(SCRIPTS / "unicrond"), "run", "--config", str(directory / "unicron.yaml")]
        self.parts = [SupervisedProcess("coordinator", command, directory / "coordinator.log", env)]
        for node in NODES:
            command = [str(SCRIPTS / "unicron-agent"), *self.login(), "--node", node, "--heartbeat-s", "0.5"]
            command += ["--slots", "1", "--run-dir", str(directory / node)]
            self.parts.append(SupervisedProcess(node, command, directory / f"{node}.log", env))

    def login(self) -> list[str]:
        """What every client is told."""
        return ["--nats", ",".join(self.nats.urls), "--nkey-seed", str(self.nats.seed), "--tls-ca", str(self.nats.ca)]

    async def get(self, path: str) -> Any:
        async with aiohttp.ClientSession() as session, session.get(self.url + path) as response:
            response.raise_for_status()
            return await response.json()

    async def submit(self) -> None:
        spec = {
            "name": "big",
            "max_workers": len(NODES),
            "model": {"layers": 1, "hidden": 32, "heads": 2, "seq": 32, "vocab": 256},
            "global_batch": 12,
            "iterations": 1_000_000,
            "checkpoint": {"interval": 0},
        }
        deadline = time.monotonic() + TIMEOUT_S
        async with aiohttp.ClientSession() as session:
            while True:
                async with session.post(f"{self.url}/v1/tasks", data=json.dumps(spec)) as response:
                    if response.status == 201:
                        return
                    said = await response.text()
                assert "no head leads yet" in said and time.monotonic() < deadline, said
                await asyncio.sleep(0.1)

    async def until(self, what: str, holds: Callable[[ClusterState], object]) -> ClusterState:
        deadline, state = time.monotonic() + TIMEOUT_S, ClusterState()
        while time.monotonic() < deadline:
            with contextlib.suppress(aiohttp.ClientError, OSError):
                state = from_json((await self.get("/v1/state"))["state"])
                if holds(state):
                    return state
            await asyncio.sleep(0.05)  # the API is all that a person has
        raise AssertionError(f"waited {TIMEOUT_S:g} s for: {what}; {state.nodes} {state.incidents}")

    async def trains_on(self, since: ClusterState | None = None) -> ClusterState:
        """All nodes are up, and the task, on both, is well past where it was."""
        reached = since.tasks["big"].progress.iteration if since else 0
        return await self.until(
            "both nodes train",
            lambda s: (
                [node.status for node in s.nodes.values()] == [NodeStatus.UP] * len(NODES)
                and "big" in s.tasks
                and s.tasks["big"].confirmed
                and s.tasks["big"].membership is not None
                and len(s.tasks["big"].membership.members) == len(NODES)
                and s.tasks["big"].progress.iteration > reached + 3
            ),
        )


@asynccontextmanager
async def head(directory: Path, nats: NatsCluster) -> AsyncIterator[Head]:
    made = Head(directory, nats)
    try:
        for part in made.parts:
            await part.start()
        yield made
    finally:
        for part in reversed(made.parts):
            await part.stop()


@pytest.mark.timeout(600)
async def test_nats_cluster_survives_server_deaths_without_lost_node(tmp_path: Path) -> None:
    async with nats_cluster(tmp_path / "nats") as nats, head(tmp_path, nats) as cluster:
        connection = await connect(nats.urls, name="test", login=nats.login, timeout_s=TIMEOUT_S)
        await cluster.until("the coordinator and both nodes are there", lambda s: len(s.nodes) == len(NODES))
        await cluster.submit()
        state = await cluster.trains_on()
        leader = await nats.leader(connection, EVENT_STREAM)
        await nats.kill(leader)
        async with asyncio.timeout(TIMEOUT_S):
            while await nats.leader(connection, EVENT_STREAM) in ("", leader):  # noqa: ASYNC110
                await asyncio.sleep(0.1)  # NATS tells nobody of its elections
        state = await cluster.trains_on(await cluster.trains_on())
        await nats.start(leader)
        for stream in (EVENT_STREAM, BEAT_STREAM):
            await nats_streams.api(connection, f"STREAM.LEADER.STEPDOWN.{stream}", {})
            state = await cluster.trains_on(state)
        assert state.incidents_total == 0 and {node.health.returns_us for node in state.nodes.values()} == {()}
        replayed = await asyncio.create_subprocess_exec(
            *(str(SCRIPTS / "unicron-replay"), "state", *cluster.login(), "--json"), stdout=asyncio.subprocess.PIPE
        )
        told, _ = await replayed.communicate()
        assert replayed.returncode == 0
        assert json.loads(told)["state"]["tasks"]["big"]["iteration"] >= state.tasks["big"].progress.iteration
        await connection.close()


@pytest.mark.timeout(600)
async def test_concurrent_claims_have_one_winner(tmp_path: Path) -> None:
    """A stream of several replicas looks at a message's id before it looks at what it expects."""
    async with nats_cluster(tmp_path / "nats") as nats, AsyncExitStack() as stack:
        connections = [
            await connect(nats.urls, name=f"head {i}", login=nats.login, timeout_s=TIMEOUT_S) for i in range(3)
        ]
        for connection in connections:
            stack.push_async_callback(connection.close)
        await nats_streams.create_streams(connections[0], replicas=len(nats.urls))
        logs = [NatsEventLog(connection) for connection in connections]
        for term in range(1, 21):
            claims = (log.claim_term(started(term, f"head:{i}")) for i, log in enumerate(logs))
            outcomes = await asyncio.gather(*claims, return_exceptions=True)
            assert sorted(type(outcome).__name__ for outcome in outcomes) == ["Fence", "Fenced", "Fenced"]


@pytest.mark.matrix
@pytest.mark.timeout(600)
async def test_log_deleted_on_three_servers_is_restored_under_training(tmp_path: Path) -> None:
    async with nats_cluster(tmp_path / "nats") as nats, head(tmp_path, nats) as cluster:
        connection = await connect(nats.urls, name="somebody", login=nats.login, timeout_s=TIMEOUT_S)
        await cluster.until("the coordinator and both nodes are there", lambda s: len(s.nodes) == len(NODES))
        await cluster.submit()
        before = await cluster.trains_on()
        processes = [psutil.Process(worker.pid) for worker in before.tasks["big"].workers.values()]
        end = int((await nats_streams.api(connection, f"STREAM.INFO.{EVENT_STREAM}", {}))["state"]["last_seq"])
        await nats_streams.api(connection, f"STREAM.DELETE.{EVENT_STREAM}", {})
        deleted_s = time.monotonic()
        restoring = await asyncio.create_subprocess_exec(
            *(str(SCRIPTS / "unicrond"), "restore", "--json", "--config", str(tmp_path / "unicron.yaml")),
            stdout=asyncio.subprocess.PIPE,
        )
        output, _ = await restoring.communicate()
        assert restoring.returncode == 0
        report = json.loads(output)
        assert report["last_seq"] >= end and (report["gap"], report["remark"]) == (0, ""), report
        restored_s = time.monotonic()
        await cluster.until("the log goes on", lambda s: s.seq > report["last_seq"])
        goes_on_s = time.monotonic()
        after = await cluster.trains_on(before)
        assert all(process.is_running() for process in processes) and not after.closed_incidents
        assert after.tasks["big"].generation == before.tasks["big"].generation and after.term == before.term
        processes[0].kill()
        killed_s = time.monotonic()
        await cluster.until("it is decided", lambda s: s.tasks["big"].generation > before.tasks["big"].generation)
        print(
            f"restored in {restored_s - deleted_s:.1f} s, {end - report['last_seq']} entries lost; the log goes on "
            f"{goes_on_s - restored_s:.2f} s later; the next fault decided in {time.monotonic() - killed_s:.2f} s"
        )
        await connection.close()
