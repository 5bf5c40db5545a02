"""Every credential of a running cluster changes, one after another, while a task trains: nobody is lost, nothing
restarts, and the bits are those of a run alone."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import trustme
import yaml

from tests.integration.live import TASK, Live, members, printed_by, seats
from tests.integration.nats_cluster import NatsCluster, nats_cluster
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
#: What a node that has not been enrolled again lacks in a phase: the next one is refused with that.
LACKS = {"trust": ("certificate", "without the new CA"), "certificate": ("finish", "with a certificate of the old CA")}
MOVED = "the login to NATS has changed, and is in use"
WAIT_S = 60
REFERENCE_S = 400


class RollingCluster(SealedCluster):
    """Two nodes with keys, one with the shared login; the API speaks TLS too. People have a copy of ca.pem. The NATS
    server is the head's, and shows the head's certificate."""

    shows_head_certificate = True

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, 3)
        self.ca, self.guest_password = directory / "people.pem", directory / "guest.password"
        self.guest_password.write_text("old\n")
        (directory / "tokens").write_text("")
        settings = yaml.safe_load(self.config_path.read_text())
        settings["nats"] = self.nats_settings(settings["nats"])
        settings["api"] |= {"host": "0.0.0.0", "tokens_file": str(directory / "tokens")}
        self.config_path.write_text(yaml.safe_dump(settings))
        self.url = self.url.replace("http:", "https:")
        self.spread_ca()
        self.client = Client(self.url, ca=self.ca)
        guest = self.agents[GUEST].command
        del guest[guest.index("--key") :]
        guest += ["--user", "unicron", "--password-file", str(self.guest_password), "--tls-ca", str(self.ca)]

    def nats_settings(self, settings: dict[str, Any]) -> dict[str, Any]:
        """The section `nats` of the configuration."""
        self.password = self.directory / "password"
        self.password.write_text("old\n")
        return {**settings, "auth": "migrate", "user": "unicron", "password_file": str(self.password)}

    async def set_password(self, person: Person, password: str) -> None:
        """Have the server take this password."""
        await person.write(self.password, f"{password}\n")

    async def renew_key(self, person: Person, login: str) -> None:
        """Make a new key for a part of the head, or for a node, where its agent reads it."""
        if login.startswith("agent-"):
            await self.enroll(person, login.removeprefix("agent-"))
        else:
            await person.unicrond("renew-key", login)

    async def enroll(self, person: Person, node: str) -> None:
        """Enroll a node again, its key into the place of the old one."""
        new = self.directory / "new.key"
        await person.unicrond("enroll", node, "--out", str(new))
        new.replace(self.key_of(node))

    async def roll_servers(self, person: Person, drill: Drill) -> None:
        """Change what only servers of one's own have."""

    def spread_ca(self) -> None:
        """Copy the head's ca.pem to people and to the guest."""
        new = self.ca.with_suffix(".new")
        shutil.copy(self.state_dir / "tls" / "ca.pem", new)
        new.replace(self.ca)

    def key_of(self, node: str) -> Path:
        return self.directory / "keys" / f"{agent_login(node)}.key"


class OwnServersCluster(RollingCluster):
    """The same on three NATS servers of one's own, with a certificate and a CA of their own."""

    shows_head_certificate = False

    def __init__(self, directory: Path, nats: NatsCluster) -> None:
        self.nats, self.head_keys = nats, directory / "head-keys"
        super().__init__(directory)
        self.nats_url = ",".join(nats.urls)
        for agent in self.agents.values():
            agent.command[agent.command.index("--nats") + 1] = self.nats_url
            agent.command += ["--tls-ca", str(nats.ca)]

    def nats_settings(self, settings: dict[str, Any]) -> dict[str, Any]:
        url, ca = ",".join(self.nats.urls), str(self.nats.ca)
        return {"url": url, "auth": "keys", "keys": str(self.head_keys), "tls_ca": ca, "replicas": len(self.nats.urls)}

    async def _enroll(self, keys: Path) -> None:
        keys.mkdir(mode=0o700)  # noqa: ASYNC240
        for node in TRAINERS:
            await self.enroll(Person(self), node)

    async def set_password(self, person: Person, password: str) -> None:
        await self.let_in(person, password)

    async def renew_key(self, person: Person, login: str) -> None:
        await person.unicrond("renew-key", login)
        await self.let_in(person)
        if login.startswith("agent-"):
            await self.enroll(person, login.removeprefix("agent-"))

    async def enroll(self, person: Person, node: str) -> None:
        new = self.directory / "new.key"
        await person.unicrond("enroll", node)
        await asyncio.to_thread(shutil.copy, self.head_keys / f"{agent_login(node)}.key", new)
        new.replace(self.key_of(node))

    async def let_in(self, person: Person, password: str = "new") -> None:
        """Have the servers let in whom `unicrond nats-config` lists, and the guest by this password."""
        self.nats.configure(await logins_of(self.directory, self.head_keys, password))
        await self.nats.reload()

    async def roll_servers(self, person: Person, drill: Drill) -> None:
        for public in self.head_keys.glob("*.pub"):
            public.write_text(f"{public.read_text().split()[0]}\n")
        await drill.change("keys, old ones away", self.let_in(person))
        await drill.change("certificate of the servers", self.certify(self.nats.authority))
        old, new = self.nats.authority, trustme.CA()
        outputs = [agent.output for agent in self.agents.values()]
        moved = [*map(moves_of, outputs), moves_of(self.coordinator.output, 2)]
        await drill.change("CA of the servers, both", asyncio.to_thread(self.nats.trust, old, new), *moved)
        await drill.change("CA of the servers, certificate", self.certify(new))
        moved = [*map(moves_of, outputs), moves_of(self.coordinator.output, 2)]
        await drill.change("CA of the servers, new one alone", asyncio.to_thread(self.nats.trust, new), *moved)

    async def certify(self, authority: trustme.CA) -> None:
        self.nats.certify(authority)
        await self.nats.reload()


async def logins_of(directory: Path, keys: Path, password: str) -> str:
    """What `unicrond nats-config` prints for the servers, with a user and a password beside the coordinator."""
    nodes = directory / "nodes.txt"
    nodes.write_text("\n".join(TRAINERS))
    printed = await printed_by("unicrond", "nats-config", "--nodes-file", str(nodes), "--keys", str(keys))
    shared = f'    users: [\n      {{"user": "unicron", "password": "{password}"}}'
    return printed.replace("    users: [", shared, 1)


@asynccontextmanager
async def embedded(directory: Path) -> AsyncIterator[RollingCluster]:
    cluster = RollingCluster(directory)
    try:
        yield cluster
    finally:
        await cluster.stop()


@asynccontextmanager
async def own_servers(directory: Path) -> AsyncIterator[RollingCluster]:
    logins = await logins_of(directory, directory / "head-keys", "old")
    async with nats_cluster(directory / "nats", logins=logins) as nats:
        cluster = OwnServersCluster(directory, nats)
        try:
            yield cluster
        finally:
            await cluster.stop()


class Drill:
    """A task that trains, and what must not happen to it whatever is changed."""

    def __init__(self, live: Live, processes: dict[str, int]) -> None:
        self._live = live
        self._processes = processes
        self._before = ClusterState()
        self.times: list[tuple[str, float]] = []

    async def begin(self) -> None:
        self._before = await self._live.training(incidents=0, beyond=3)

    async def change(self, what: str, action: Awaitable[object], *moved: Callable[[], bool]) -> None:
        """Change a credential; wait until all that use it have moved, and until the task has gone on after that."""
        begin = time.monotonic()
        await action
        async with asyncio.timeout(WAIT_S):
            while not all(each() for each in moved):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        self.times.append((what, time.monotonic() - begin))
        await self.undisturbed()

    async def undisturbed(self) -> None:
        """The task goes on, with the same processes everywhere, and its newest state is copied to the other node."""
        before, iteration = self._before, (await self._live.dev.state())[0].tasks[TASK].progress.iteration
        state = await self._live.until(
            "the task goes on",
            lambda s: s.tasks[TASK].progress.iteration > iteration + 2 and copied(s, iteration),
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

    def __init__(self, cluster: DevCluster) -> None:
        self._cluster = cluster

    async def unicrond(self, *words: str, status: int = 0) -> str:
        return await printed_by("unicrond", *words, "--config", str(self._cluster.config_path), status=status)

    async def token(self, name: str) -> str:
        """A token of the API, of the owner `ci`."""
        path = self._cluster.directory / f"{name}.token"
        await self.unicrond("token", name, "--scopes", "read", "--owner", "ci", "--out", str(path))
        return path.read_text().strip()

    async def write(self, path: Path, text: str) -> None:
        await asyncio.to_thread(path.write_text, text)

    async def change_token(self, drill: Drill, listed: Path, ca: Path | None = None) -> None:
        """A second token of the same owner, then the first one's line is taken out."""
        first, second = await self.token("ci1"), await self.token("ci2")
        assert answers(self._cluster, first, ca) and answers(self._cluster, second, ca)
        ended = asyncio.to_thread(take_out, listed, "ci1")
        await drill.change("token of the API", ended, lambda: not answers(self._cluster, first, ca))
        assert answers(self._cluster, second, ca)


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
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("make", [embedded, own_servers])
async def test_each_credential_changes_under_training(
    tmp_path: Path, make: Callable[[Path], AbstractAsyncContextManager[RollingCluster]]
) -> None:
    async with make(tmp_path) as cluster:
        await roll_all(cluster)


async def roll_all(cluster: RollingCluster) -> None:
    """Change each credential of the cluster."""
    live = Live(cluster, len(TRAINERS))
    live.client = cluster.client
    person = Person(cluster)
    outputs = {node: agent.output for node, agent in cluster.agents.items()}
    head, api = cluster.coordinator.output, ("127.0.0.1", cluster.api_port)

    async def roll(phase: str) -> None:
        await person.unicrond("tls-init", "--roll", phase)
        cluster.spread_ca()

    async def is_refused(phase: str, reason: str) -> None:
        """The phase before ends only when all nodes have been heard."""
        refusal = await person.unicrond("tls-init", "--roll", phase, status=2)
        assert f"nodes stand on the old CA: {TRAINERS[1]} ({reason});" in refusal, refusal

    drill = await training(live, 3, idle=GUEST)

    guest = cluster.guest_password
    await drill.change("password, clients", person.write(guest, "old\nnew\n"), moves_of(outputs[GUEST]))
    await drill.change("password, server", cluster.set_password(person, "new"))
    await drill.change("password, old one away", person.write(guest, "new\n"), moves_of(outputs[GUEST]))

    for login in (agent_login("node1"), *("coordinator", "api", "reader", "operator")):
        users = {agent_login("node1"): outputs["node1"], "coordinator": head, "api": head}
        moved = [moves_of(users[login])] if login in users else []
        await drill.change(f"key of {login}", cluster.renew_key(person, login), *moved)
    await cluster.roll_servers(person, drill)

    await person.change_token(drill, cluster.directory / "tokens", cluster.ca)

    def renewed() -> bool:
        return ssl.get_server_certificate(api) != shown

    shown = await asyncio.to_thread(ssl.get_server_certificate, api)
    await drill.change("certificate of the head", person.unicrond("tls-init", "--renew"), renewed)

    cas = {read_key(cluster.key_of("node1")).ca}
    for phase in ("trust", "certificate", "finish"):
        shown = await asyncio.to_thread(ssl.get_server_certificate, api)
        moved = [renewed] if phase == "certificate" else []
        if phase != "certificate" and cluster.shows_head_certificate:
            moved = [moves_of(outputs[GUEST]), moves_of(head, 2)]
        await drill.change(f"CA, {phase}", roll(phase), *moved)
        for node in TRAINERS:
            if node is TRAINERS[1] and phase in LACKS:
                await is_refused(*LACKS[phase])
            # In the end the key has the new CA alone, and the membership's warrant was signed anew.
            await drill.change(f"CA, {phase}: key of {node}", cluster.enroll(person, node), moves_of(outputs[node]))
        cas.add(read_key(cluster.key_of("node1")).ca)
    assert len(cas) == 3, "the old one, both, the new one"

    await finished(live, drill)
