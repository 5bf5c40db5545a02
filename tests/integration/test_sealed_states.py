"""A whole cluster that speaks TLS: a node is lost, and a worker takes the state from another node's memory."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path

import pytest
import yaml

from tests.integration.test_memory_cluster import TASK, copied, events, healed, until
from tests.integration.test_regroup import listening
from unicrond.agents.protocol.memory_exchange import TLS
from unicrond.commands.cli import main
from unicrond.events.nats.connection import Login
from unicrond.events.trust.keys import make_key, write_key
from unicrond.events.trust.logins import agent_login
from unicrond.events.vocabulary import NodeJoined
from unicrond.events.wire.envelope import RecordedEvent
from unicrond.intake.config import load
from unicrond.local.dev import DevCluster
from unicrond.replay.reading.nats_source import embedded_login, open_nats
from unicrond.service.trust.node_certificates import pem_for_node


class SealedCluster(DevCluster):
    """NATS is open to others and speaks TLS; each node's key carries a certificate, as `unicrond enroll` makes it."""

    def __init__(self, directory: Path, nodes: int) -> None:
        super().__init__(directory, nodes, 1, 0, 2.0, keys=True)
        settings = yaml.safe_load(self.config_path.read_text())
        settings["nats"]["host"] = "0.0.0.0"
        self.config_path.write_text(yaml.safe_dump(settings))
        assert main(["tls-init", "--config", str(self.config_path)]) == 0

    async def _enroll(self, keys: Path) -> None:
        keys.mkdir(mode=0o700)  # noqa: ASYNC240
        config = load(self.config_path)
        for node in self.node_names:
            key = make_key(agent_login(node))._replace(pem=pem_for_node(config, node))
            write_key(keys / f"{key.login}.key", key)
            await asyncio.to_thread(self.client.enroll, node, key.user.key, 0)


async def test_node_joins_through_tls_after_enrolment(tmp_path: Path) -> None:
    cluster = SealedCluster(tmp_path, 1)
    try:
        await cluster.start()
        await until(cluster, "the node has joined", lambda s: "node1" in s.nodes)
        login = embedded_login(cluster.state_dir, Login())
        async with open_nats([cluster.nats_url], login) as source, aclosing(source.chunks()) as chunks:
            entries = [entry async for chunk in chunks for entry in chunk.entries if isinstance(entry, RecordedEvent)]
        (joined,) = [event for entry in entries if isinstance(event := entry.envelope.event, NodeJoined)]
        assert joined.memory is not None and joined.memory.token == TLS, "no secret in the log"
        family = cluster.processes_of("node1")
        assert {host for process in family for host in listening(process.pid)} == {"127.0.0.1"}, "store and memory"
        assert "ALARM" not in cluster.coordinator.output.read_text()
    finally:
        await cluster.stop()


@pytest.mark.matrix
@pytest.mark.timeout(600)
async def test_state_travels_from_peer_through_tls(tmp_path: Path) -> None:
    cluster = SealedCluster(tmp_path, 3)
    try:
        await cluster.start()
        await cluster.submit({**TASK, "env": {"XDG_CACHE_HOME": str(tmp_path / "cache")}})
        state = await until(cluster, "the state is kept on two nodes", copied)
        (worker,) = state.tasks["solo"].workers.values()
        holders = {kept.node for kept in state.tasks["solo"].copies.holdings.values()} - {worker.node}
        for holder in holders:  # it keeps the copy and gets no worker
            await asyncio.to_thread(cluster.client.cordon, holder, drain=False, reason="test")
        await cluster.kill_node(worker.node)
        await until(cluster, "another node trains on", lambda s: healed(s, 1))
        taken = (await events(cluster, "StateLoaded"))[-1]
        assert taken["source"] == "peer" and taken["iteration"] > 0
        assert "no copy of" not in cluster.agents[worker.node].output.read_text()
    finally:
        await cluster.stop()
