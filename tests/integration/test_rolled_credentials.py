"""Every credential of a running cluster changes, one after another, while a task trains: nobody is lost, nothing
restarts, and the bits are those of a run alone."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import ssl
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
import pytest
import yaml

from tests.integration.live import TASK, Live, members, seats
from tests.integration.test_sealed_states import SealedCluster
from unicrond.agents.trainer.loop import corpus
from unicrond.core.state.state import ClusterState, NodeStatus, TaskStatus
from unicrond.ctl.client import ApiError, Client
from unicrond.events.trust.keys import read_key
from unicrond.events.trust.logins import agent_login
from unicrond.events.vocabulary import LANES
from unicrond.local.dev import DevCluster

ENTRY = Path(__file__).with_name("traced_gpt.py")
TRAINERS = ("node1", "node2")
GUEST = "node3"  # it logs in with the shared login, and has no key
MOVED = "the login to NATS has changed, and is in use"
WAIT_S = 60
REFERENCE_S = 400


class RollingCluster(SealedCluster):
    """Two nodes with keys, one with the shared login; the API speaks TLS too. People have a copy of ca.pem."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, 3)
        self.password, self.ca = directory / "password", directory / "people.pem"
        self.password.write_text("old\n")
        self.guest_password = directory / "guest.password"
        self.guest_password.write_text("old\n")
        (directory / "tokens").write_text("")
        settings = yaml.safe_load(self.config_path.read_text())
        settings["nats"] |= {"auth": "migrate", "user": "unicron", "password_file": str(self.password)}
        settings["api"] |= {"host": "0.0.0.0", "tokens_file": str(directory / "tokens")}
        self.config_path.write_text(yaml.safe_dump(settings))
        self.url = self.url.replace("http:", "https:")
        self.spread_ca()
        self.client = Client(self.url, ca=self.ca)
        guest = self.agents[GUEST].command
        del guest[guest.index("--key") :]
        guest += ["--user", "unicron", "--password-file", str(self.guest_password), "--tls-ca", str(self.ca)]

    def spread_ca(self) -> None:
        """Copy the head's ca.pem to people and to the guest."""
        new = self.ca.with_suffix(".new")
        shutil.copy(self.state_dir / "tls" / "ca.pem", new)
        new.replace(self.ca)

    def key_of(self, node: str) -> Path:
        return self.directory / "keys" / f"{agent_login(node)}.key"


class Drill:
    """A task that trains, and what must not happen to it whatever is changed."""

    def __init__(self, live: Live, processes: dict[str, int]) -> None:
        self._live = live
        self._processes = processes
        self._before = ClusterState()
        self.times: list[tuple[str, float]] = []

    async def begin(self) -> None:
        self._before = await self._live.training(incidents=0, beyond=3)

    async def change(
        self, what: str, action: Awaitable[object], *moved: Callable[[], bool], has_copies: bool = True
    ) -> None:
        """Change a credential; wait until all that use it have moved, and until the task has gone on after that."""
        begin = time.monotonic()
        await action
        async with asyncio.timeout(WAIT_S):
            while not all(each() for each in moved):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        self.times.append((what, time.monotonic() - begin))
        await self.undisturbed(has_copies)

    async def undisturbed(self, has_copies: bool) -> None:
        """The task goes on, with the same processes everywhere, and its newest state is copied to the other node."""
        before, iteration = self._before, (await self._live.dev.state())[0].tasks[TASK].progress.iteration
        state = await self._live.until(
            "the task goes on",
            lambda s: s.tasks[TASK].progress.iteration > iteration + 2 and (copied(s, iteration) or not has_copies),
        )
        assert (state.incidents_total, state.tasks[TASK].generation) == (0, before.tasks[TASK].generation)
        assert (seats(state), state.term) == (seats(before), before.term), "no worker ended, the same head leads"
        assert {name: (node.status, node.joined_us) for name, node in state.nodes.items()} == {
            name: (NodeStatus.UP, node.joined_us) for name, node in before.nodes.items()
        }
        assert all(psutil.pid_exists(pid) for pid in self._processes.values()), "nobody was restarted"

    async def heal(self) -> None:
        """Kill the second member: the task heals, and its next membership has copies."""
        state, _ = await self._live.dev.state()
        os.kill(state.tasks[TASK].workers[members(state)[1]].pid, signal.SIGKILL)
        state = await self._live.training(incidents=1, beyond=3)
        await self._live.until("it is copied again", lambda s: copied(s, state.tasks[TASK].progress.iteration))


def copied(state: ClusterState, above: int) -> bool:
    """A node keeps another's state after an iteration above this one."""
    holdings = state.tasks[TASK].copies.holdings.values()
    return any(copy.iteration > above and copy.origin != copy.node for copy in holdings)


def moves_of(output: Path, count: int = 1) -> Callable[[], bool]:
    """Whether the process with this log has moved to other credentials so often from now on."""
    first = output.read_text().count(MOVED)
    return lambda: output.read_text().count(MOVED) >= first + count


def digests(directory: Path, worker: str) -> dict[int, str]:
    """Iteration -> the digest of the parameters after it."""
    lines = (directory / "traces" / f"{worker}.trace").read_text().split("\n")[:-1]
    return {int(words[1]): words[2] for line in lines if (words := line.split())[0] == "stepped"}


async def submit(live: Live, name: str, **fields: object) -> None:
    env = {"XDG_CACHE_HOME": str(live.directory / "cache"), **fields.pop("env", {})}  # type: ignore[dict-item]
    await live.submit(
        name,
        entry=str(ENTRY),
        args=[str(live.directory / "traces")],
        data=str(live.directory / "stdlib"),
        env=env,
        optimizer={"decay_iterations": 1000},
        global_batch=4,
        **fields,
    )


async def same_bits(live: Live) -> int:
    """End the task; its parameters after each iteration are those of one worker alone. Return how many iterations."""
    state, _ = await live.dev.state()
    worker, last = members(state)[0], state.tasks[TASK].progress.iteration
    await asyncio.to_thread(live.dev.client.cancel, TASK, "compared")
    await submit(live, "alone", env={LANES: str(live.workers)}, max_workers=1, iterations=last)
    async with asyncio.timeout(REFERENCE_S):
        while completed(await live.dev.state()) < {"alone"}:  # noqa: ASYNC110
            await asyncio.sleep(0.5)  # whoever asks all the time takes the time from it
    found, expected = digests(live.directory, worker), digests(live.directory, "alone.1")
    assert [each for each in range(1, last + 1) if found[each] != expected[each]] == []
    return last


def completed(seen: tuple[ClusterState, str]) -> set[str]:
    return {name for name, task in seen[0].tasks.items() if task.status is TaskStatus.COMPLETED}


def answers(cluster: DevCluster, token: str, ca: Path | None = None) -> bool:
    try:
        Client(cluster.url, token, ca=ca).state()
    except ApiError:
        return False
    return True


def take_out(listed: Path, name: str) -> None:
    """Delete a token's line."""
    lines = listed.read_text().splitlines(keepends=True)
    listed.write_text("".join(line for line in lines if not line.startswith(f"{name} ")))


class Person:
    """Who types the commands of docs/operate on the head of a cluster."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._configured = ("--config", str(live.dev.config_path))

    async def unicrond(self, *words: str) -> str:
        return await self._live.run("unicrond", *words, *self._configured)

    async def token(self, name: str) -> str:
        """A token of the API, of the owner `ci`."""
        path = self._live.directory / f"{name}.token"
        await self.unicrond("token", name, "--scopes", "read", "--owner", "ci", "--out", str(path))
        return path.read_text().strip()

    async def write(self, path: Path, text: str) -> None:
        await asyncio.to_thread(path.write_text, text)

    async def change_token(self, drill: Drill, listed: Path, ca: Path | None = None) -> None:
        """A second token of the same owner, then the first one's line is taken out."""
        first, second = await self.token("ci1"), await self.token("ci2")
        assert answers(self._live.dev, first, ca) and answers(self._live.dev, second, ca)
        ended = asyncio.to_thread(take_out, listed, "ci1")
        await drill.change("token of the API", ended, lambda: not answers(self._live.dev, first, ca))
        assert answers(self._live.dev, second, ca)


async def training(live: Live, nodes: int, idle: str = "") -> Drill:
    """Start the cluster and the task; `idle` is a node that gets no worker."""
    (live.directory / "traces").mkdir()
    corpus.build(live.directory / "stdlib")
    await live.dev.start()
    await live.until("the nodes have joined", lambda s: len(s.nodes) == nodes)
    if idle:
        await asyncio.to_thread(live.client.cordon, idle, drain=False, reason="it has no certificate for states")
    await submit(live, TASK, checkpoint={"interval": 0, "memory_interval": 2}, env={"PAUSE_S": "1"})
    parts = {"head": live.dev.coordinator, **live.dev.agents}
    drill = Drill(live, {name: part.process.pid for name, part in parts.items() if part.process is not None})
    await drill.begin()
    return drill


async def finished(live: Live, drill: Drill) -> None:
    """Compare the bits, look through the logs, print the times."""
    await drill.heal()
    for what, seconds in drill.times:
        print(f"{seconds:6.2f} s  {what}")
    print(f"{len(drill.times)} changes; the same bits in {await same_bits(live)} iterations")
    for part in (live.dev.coordinator, *live.dev.agents.values()):
        text = part.output.read_text()
        assert "Traceback" not in text and "cannot be used" not in text, part.output


@pytest.mark.matrix
@pytest.mark.timeout(900)
async def test_each_credential_changes_under_training(tmp_path: Path) -> None:
    cluster = RollingCluster(tmp_path)
    live = Live(cluster, len(TRAINERS))
    live.client = cluster.client
    person = Person(live)
    outputs = {node: agent.output for node, agent in cluster.agents.items()}
    head, api = cluster.coordinator.output, ("127.0.0.1", cluster.api_port)

    async def enroll(node: str) -> None:
        await person.unicrond("enroll", node, "--out", str(tmp_path / "new.key"))
        (tmp_path / "new.key").replace(cluster.key_of(node))

    async def roll(phase: str) -> None:
        await person.unicrond("tls-init", "--roll", phase)
        cluster.spread_ca()

    try:
        drill = await training(live, 3, idle=GUEST)

        guest, password = cluster.guest_password, cluster.password
        await drill.change("password, clients", person.write(guest, "old\nnew\n"), moves_of(outputs[GUEST]))
        await drill.change("password, head", person.write(password, "new\n"))
        await drill.change("password, old one away", person.write(guest, "new\n"), moves_of(outputs[GUEST]))

        await drill.change("key of a node", enroll("node1"), moves_of(outputs["node1"]))
        for role in ("coordinator", "api", "reader", "operator"):
            moved = [moves_of(head)] if role in ("coordinator", "api") else []
            await drill.change(f"key of {role}", person.unicrond("renew-key", role), *moved)

        await person.change_token(drill, tmp_path / "tokens", cluster.ca)

        def renewed() -> bool:
            return ssl.get_server_certificate(api) != shown

        shown = await asyncio.to_thread(ssl.get_server_certificate, api)
        await drill.change("certificate of the head", person.unicrond("tls-init", "--renew"), renewed)

        cas = {read_key(cluster.key_of("node1")).ca}
        for phase in ("trust", "certificate", "finish"):
            shown = await asyncio.to_thread(ssl.get_server_certificate, api)
            moved = [moves_of(outputs[GUEST]), moves_of(head, 2)] if phase != "certificate" else [renewed]
            await drill.change(f"CA, {phase}", roll(phase), *moved)
            for node in TRAINERS:
                # In the end the key has the new CA alone; the membership's warrant is of the old one.
                is_last = phase == "finish"
                what = f"CA, {phase}: key of {node}"
                await drill.change(what, enroll(node), moves_of(outputs[node]), has_copies=not is_last)
            cas.add(read_key(cluster.key_of("node1")).ca)
        assert len(cas) == 3, "the old one, both, the new one"

        await finished(live, drill)
    finally:
        await cluster.stop()
