"""A drill on three hosts, with the configuration in deploy/nats: `make drill`.

    unshare -rnm python -m tests.integration.drill DIR

Three network namespaces with a NATS server, an agent and a worker each, and two heads. In mid-training die: the head
that leads together with its host's NATS server; the server that leads the event stream; a whole node. Each comes back.
Held against the rules: what was acknowledged stands in the log, every iteration was made once and exactly, the leader
was deposed once, no node was lost but the one that died, a replay verifies. Prints what happened and how long it took.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from tests.integration.hosts import NODES, Namespaces
from tests.integration.live import members
from tests.integration.samples import expected_digest, samples_in_corpus
from unicrond.agents.trainer.loop import corpus
from unicrond.core.state.state import ClusterState, NodeStatus
from unicrond.ctl.client import ApiError, Client
from unicrond.events.log.subjects import EVENT_STREAM
from unicrond.events.nats.connection import Login, connect
from unicrond.events.nats.server_program import find_program
from unicrond.events.nats.streams import api
from unicrond.events.trust.keys import make_key
from unicrond.events.trust.logins import Role, agent_login
from unicrond.local.dev import HANG_FLOOR_S

DEPLOY = Path(__file__).parents[2] / "deploy" / "nats"
SCRIPTS = Path(sys.executable).parent
HEADS = ("n1", "n2")
HEARTBEAT_S = 2.0
TIMEOUT_S = 240.0
TASK = "t"


class Process:
    """One on a host, which can be killed and started again."""

    def __init__(self, prefix: tuple[str, ...], command: list[str], output: Path, **env: str) -> None:
        self._command = [*prefix, *command]
        self.output = output
        self._env = os.environ | {"PYTHONUNBUFFERED": "1", "UNICRON_HANG_FLOOR_S": HANG_FLOOR_S} | env
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        with self.output.open("ab") as output:
            self._process = await asyncio.create_subprocess_exec(
                *self._command, stdout=output, stderr=output, env=self._env, cwd=self.output.parent
            )

    async def end(self, how: signal.Signals = signal.SIGKILL) -> None:
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(how)
        try:
            await asyncio.wait_for(process.wait(), 20)
        except TimeoutError:
            process.kill()
            await process.wait()


class Drill:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.net = Namespaces()
        self.keys = directory / "keys"
        self._make_keys()
        self.nats = ",".join(f"nats://{self.net.address(node)}:4222" for node in NODES)
        self.servers = {node: self._server(node) for node in NODES}
        self.heads = {node: self._head(node, standby=node != HEADS[0]) for node in HEADS}
        self.agents = {node: self._agent(node) for node in NODES}
        urls = ",".join(f"http://{self.net.address(node)}:7470" for node in HEADS)
        self.client = Client(urls, "drill")
        #: Of each request that was acknowledged, its sequence number and what it said.
        self.acknowledged: dict[int, str] = {}
        self.report: list[tuple[str, float]] = []

    # --- its parts -------------------------------------------------------------------------------

    def _make_keys(self) -> None:
        nodes = self.directory / "nodes.txt"
        nodes.write_text("\n".join(NODES))
        command = [str(SCRIPTS / "unicrond"), "nats-config", "--nodes-file", str(nodes), "--keys", str(self.keys)]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        (self.directory / "authorization.conf").write_text(printed)
        (self.directory / "api.token").write_text("drill\n")

    def _server(self, node: str) -> Process:
        where = self.directory / f"nats-{node}"
        where.mkdir()
        for name in ("nats.conf", "servers.env"):
            shutil.copy(DEPLOY / name, where)
        shutil.copy(self.directory / "authorization.conf", where)
        text = (where / "servers.env").read_text().replace("10.0.0.1:4222", "OWN:4222")
        text = text.replace("NATS_ROUTES_LISTEN=10.0.0.1", "NATS_ROUTES_LISTEN=OWN").replace("nats1", f"nats-{node}")
        text = text.replace("/var/lib/nats", str(where / "store")).replace("OWN", self.net.address(node))
        for number, other in enumerate(NODES, start=1):
            text = text.replace(f"//10.0.0.{number}:", f"//{self.net.address(other)}:")
        (where / "servers.env").write_text(text)
        env = dict(line.split("=", 1) for line in text.splitlines() if line and not line.startswith("#"))
        command = [str(find_program()), "-c", str(where / "nats.conf")]
        return Process(self.net.prefix(node), command, self.directory / f"nats-{node}.log", **env)

    def _head(self, node: str, *, standby: bool) -> Process:
        config = self.directory / f"head-{node}.yaml"
        config.write_text(
            f"state_dir: {self.directory / f'head-{node}'}\n"
            f"checkpoint_dir: {self.directory / 'checkpoints'}\n"
            f"heartbeat_s: {HEARTBEAT_S}\n"
            "tls: off\n"  # not what is tried here
            f"nats: {{url: '{self.nats}', auth: keys, keys: {self.keys}, replicas: 3}}\n"
            f"api: {{host: {self.net.address(node)}, token_file: {self.directory / 'api.token'}}}\n"
        )
        command = [str(SCRIPTS / "unicrond"), "run", "--config", str(config), *(["--standby"] if standby else [])]
        return Process(self.net.prefix(node), command, self.directory / f"head-{node}.log")

    def _agent(self, node: str) -> Process:
        command = [str(SCRIPTS / "unicron-agent"), "--nats", self.nats, "--node", node, "--slots", "1"]
        command += ["--key", str(self.keys / f"{agent_login(node)}.key"), "--address", self.net.address(node)]
        command += ["--run-dir", str(self.directory / f"run-{node}"), "--heartbeat-s", str(HEARTBEAT_S)]
        return Process(self.net.prefix(node), command, self.directory / f"agent-{node}.log")

    def kill_host(self, node: str) -> None:
        """Every process in the namespace, at once."""
        pids = subprocess.run(["ip", "netns", "pids", node], capture_output=True, text=True, check=True).stdout
        for pid in pids.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    async def close(self) -> None:
        for node in NODES:
            await asyncio.to_thread(self.kill_host, node)
        for process in (*self.servers.values(), *self.heads.values(), *self.agents.values()):
            await process.end()

    # --- what it looks at ------------------------------------------------------------------------

    async def until(self, what: str, holds: Callable[[ClusterState], object]) -> ClusterState:
        deadline, state = time.monotonic() + TIMEOUT_S, ClusterState()
        while time.monotonic() < deadline:
            with contextlib.suppress(ApiError):
                state, _ = await asyncio.to_thread(self.client.state)
                if holds(state):
                    return state
            await asyncio.sleep(0.05)
        raise AssertionError(f"waited {TIMEOUT_S:g} s for: {what}; {state.nodes} {state.incidents}")

    async def health(self, node: str) -> dict[str, Any]:
        client = Client(f"http://{self.net.address(node)}:7470", timeout_s=2.0)
        with contextlib.suppress(ApiError):
            return await asyncio.to_thread(client.health)
        return {}

    async def until_health(self, node: str, holds: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
        deadline, told = time.monotonic() + TIMEOUT_S, {}
        while time.monotonic() < deadline:
            if holds(told := await self.health(node)):
                return told
            await asyncio.sleep(0.02)
        raise AssertionError(f"head on {node}: {told}")

    async def trains(self, nodes: int, beyond: int = 5) -> ClusterState:
        """All of these many, so many iterations past the first look."""
        first: list[int] = []

        def holds(state: ClusterState) -> bool:
            task = state.tasks.get(TASK)
            if task is None or not task.confirmed or state.incidents or len(members(state, TASK)) != nodes:
                return False
            first.append(task.progress.iteration)
            return task.progress.iteration > first[0] + beyond

        return await self.until(f"{nodes} workers train", holds)

    async def acknowledge(self) -> None:
        """Requests all the time; what is acknowledged must be in the log."""
        while True:
            key = make_key(agent_login("x")).user.key
            with contextlib.suppress(ApiError):
                answer = await asyncio.to_thread(self.client.enroll, "x", key, 0)
                self.acknowledged[int(answer["seq"])] = key
            await asyncio.sleep(0.1)

    async def stream_leader(self) -> str:
        """The host of the server that leads the event stream, once all three servers have it."""
        connection = await connect(
            self.nats.split(","), name="drill", login=Login(key=self.keys / f"{Role.OPERATOR}.key"), timeout_s=60
        )
        try:
            async with asyncio.timeout(TIMEOUT_S):
                while True:
                    info = await api(connection, f"STREAM.INFO.{EVENT_STREAM}", {})
                    peers = info["cluster"].get("replicas") or []
                    if info["cluster"].get("leader") and len(peers) == 2 and all(p["current"] for p in peers):
                        return str(info["cluster"]["leader"]).removeprefix("nats-")
                    await asyncio.sleep(0.1)
        finally:
            await connection.close()

    async def took(self, what: str, wait: Awaitable[Any]) -> Any:
        began_s = time.monotonic()
        result = await wait
        self.report.append((what, time.monotonic() - began_s))
        print(f"{time.monotonic() - began_s:7.2f} s  {what}", flush=True)
        return result


async def play(drill: Drill) -> None:
    for server in drill.servers.values():
        await server.start()
    await drill.heads["n1"].start()
    await drill.until_health("n1", lambda told: told.get("status") == "live")
    for node in NODES:
        key = Login(key=drill.keys / f"{agent_login(node)}.key").options()  # raises where there is none
        assert key
        public = (drill.keys / f"{agent_login(node)}.pub").read_text().strip()
        await asyncio.to_thread(drill.client.enroll, node, public, 0)
    for agent in drill.agents.values():
        await agent.start()
    await drill.heads["n2"].start()
    data = drill.directory / "stdlib"
    await asyncio.to_thread(corpus.build, data)
    spec = {
        "name": TASK,
        "max_workers": len(NODES),
        "global_batch": 12,
        "micro_batch": 2,
        "iterations": 1_000_000,
        "data": str(data),
        "env": {"XDG_CACHE_HOME": str(drill.directory / "cache")},
        "model": {"layers": 1, "hidden": 32, "heads": 2, "seq": 32, "vocab": 256},
        "checkpoint": {"interval": 0},
    }
    await asyncio.to_thread(drill.client.submit, spec)
    await drill.took("three hosts train, two heads run", drill.trains(3))
    told = await drill.until_health("n2", lambda told: told.get("status") == "standby")
    leading = await drill.until_health("n1", lambda told: len(told["heads"]["standing_by"]) == 1)
    assert not leading["weaker"], leading["weaker"]
    asking = asyncio.create_task(drill.acknowledge())
    try:
        await _take_apart(drill, int(told["term"]))
    finally:
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    _hold_against_the_rules(drill, data)


async def _take_apart(drill: Drill, term: int) -> None:
    # 1. The head that leads, with the NATS server of its host.
    await asyncio.gather(drill.heads["n1"].end(), drill.servers["n1"].end())
    taken = drill.until_health("n2", lambda told: told.get("status") == "live")
    await drill.took("head and NATS server of n1 killed: the other head decides", taken)
    await drill.took("... and all three train on", drill.trains(3))
    await drill.servers["n1"].start()
    await drill.heads["n1"].start()
    await drill.until_health("n1", lambda told: told.get("status") == "standby")
    # 2. Another server: the one that leads the stream.
    leader = await drill.stream_leader()
    state = await drill.trains(3)
    await drill.servers[leader].end()
    await drill.took(f"the stream's leader on {leader} killed: all three train on", drill.trains(3))
    assert (await drill.health("n2"))["leads"], "an outage of the log has deposed the leader"
    await drill.servers[leader].start()
    await drill.stream_leader()
    # 3. A node with all that runs there.
    await asyncio.to_thread(drill.kill_host, "n3")
    await drill.took("node n3 killed: the other two train", drill.trains(2))
    await drill.servers["n3"].start()
    await drill.agents["n3"].start()
    await drill.took("n3 started again: all three train", drill.trains(3))
    state, _ = await asyncio.to_thread(drill.client.state)
    assert state.term == term + 1, f"term {state.term}: one takeover was due, after term {term}"
    assert all(node.status is NodeStatus.UP for node in state.nodes.values())


def _hold_against_the_rules(drill: Drill, data: Path) -> None:
    entries = [line for line in drill.client.events() if line.envelope]
    by_seq = {line.seq: line.envelope["event"] for line in entries}
    missing = [seq for seq, key in drill.acknowledged.items() if by_seq.get(seq, {}).get("key") != key]
    assert not missing, f"acknowledged, and not in the log: {missing}"
    lost = [event["node"] for event in by_seq.values() if event["type"] == "NodeLost"]
    assert lost == ["n3"], lost
    windows, seen = samples_in_corpus(data, 32), set[int]()
    for commit in (event for event in by_seq.values() if event["type"] == "StepCommitted"):
        digest, count = expected_digest(1234, commit["first"], commit["last"], 12, windows)
        assert (commit["samples_digest"], commit["samples"]) == (digest, count), commit
        seen.update(range(commit["first"], commit["last"] + 1))
    assert sorted(seen) == list(range(1, max(seen) + 1)), "an iteration is missing"
    reader = ["--nats", drill.nats, "--key", str(drill.keys / f"{Role.READER}.key")]
    command = [*drill.net.prefix("n1"), str(SCRIPTS / "unicron-replay"), "verify", *reader]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{shlex.join(command)}: {done.stdout}{done.stderr}"
    print(
        f"{len(drill.acknowledged)} acknowledged requests and {len(seen)} iterations: all there; {len(entries)} entries"
    )


async def run(drill: Drill) -> None:
    try:
        await play(drill)
    finally:
        await drill.close()


def main(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    drill = Drill(directory)
    asyncio.run(run(drill))
    (directory / "drill.json").write_text(json.dumps(dict(drill.report)))


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
