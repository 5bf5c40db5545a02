"""A head that stands by passes what it is asked to do on to the one that leads: one hop, with the caller's token."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.contracts.memory_log import MemoryLog
from tests.unicrond.test_two_heads_api import Served
from unicrond.commands.cli import main
from unicrond.ctl.client import ApiRefused, Client, NotLeader
from unicrond.intake.config import ApiConfig, Config, ConfigError, check
from unicrond.intake.tokens import Scope, hash_token
from unicrond.local.dev import free_port
from unicrond.replay.simulation.cluster.lease import MemoryLease
from unicrond.service.api.access import Access
from unicrond.service.api.forwarding import HOP

ALICE, READER = "unicron_alice", "unicron_reader"


@asynccontextmanager
async def two_heads(directory: Path, *, listed: bool = True, tls: bool = False) -> AsyncIterator[tuple[Served, Served]]:
    """The one that leads, and the one that stands by. `listed`: each is among the heads of the configuration."""
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    tokens = directory / "tokens"
    tokens.write_text(f"alice submit,read {hash_token(ALICE)}\nreader {Scope.READ} {hash_token(READER)}\n")
    log, lease = MemoryLog(), MemoryLease()
    async with contextlib.AsyncExitStack() as stack:
        served = []
        for name, address in zip(("one", "two"), addresses, strict=True):
            api = ApiConfig(
                host="0.0.0.0" if tls else "127.0.0.1",
                tokens_file=str(tokens),
                advertise=address,
                heads=tuple(addresses) if listed else (),
            )
            config = Config(state_dir=str(directory / "state"), api=api)
            head = Served(name, log, lease, directory, config, Access("", tokens))
            await head.start()
            stack.push_async_callback(head.stop)
            served.append(head)
            await until_status(head, "standby" if name == "two" else "live", directory if tls else None)
        yield served[0], served[1]


async def until_status(head: Served, status: str, directory: Path | None) -> None:
    client = client_of(head, "", directory)
    async with asyncio.timeout(20):
        while (await asyncio.to_thread(client.health))["status"] != status:  # noqa: ASYNC110
            await asyncio.sleep(0.02)  # it offers no event


def client_of(head: Served, token: str, directory: Path | None = None) -> Client:
    return Client(head.url, token, ca=directory / "ca.pem" if directory else None)


async def test_write_to_either_head_is_carried_out_for_its_caller(tmp_path: Path) -> None:
    async with two_heads(tmp_path) as (leads, stands_by):
        for head, name in ((stands_by, "a"), (leads, "b")):
            accepted = await asyncio.to_thread(client_of(head, ALICE).submit, {"name": name})
            assert accepted["task"] == name
        tasks = leads.coordinator.state.tasks
        assert {name: task.owner for name, task in tasks.items()} == {"a": "alice", "b": "alice"}
        with pytest.raises(ApiRefused, match="already exists") as refusal:
            await asyncio.to_thread(client_of(stands_by, ALICE).submit, {"name": "a"})
        assert refusal.value.status == 409, "the answer of the one that leads"
        with pytest.raises(ApiRefused, match="reader lacks scope submit"):
            await asyncio.to_thread(client_of(stands_by, READER).submit, {"name": "c"})
        with pytest.raises(ApiRefused, match="missing or wrong"):
            await asyncio.to_thread(client_of(stands_by, "unicron_guess").submit, {"name": "c"})
        assert (await asyncio.to_thread(client_of(stands_by, ALICE).cancel, "a", "enough"))["task"] == "a"


async def test_head_that_leads_refuses_token_it_does_not_know(tmp_path: Path) -> None:
    """A token is judged where the request is carried out, not only where it came."""
    async with two_heads(tmp_path) as (leads, stands_by):
        leads.access._look = lambda: None  # type: ignore[method-assign]
        leads.access._listed = {}
        with pytest.raises(ApiRefused, match="missing or wrong") as refusal:
            await asyncio.to_thread(client_of(stands_by, ALICE).submit, {"name": "a"})
        assert refusal.value.status == 401 and not leads.coordinator.state.tasks


async def test_request_takes_one_hop(tmp_path: Path) -> None:
    async with two_heads(tmp_path) as (leads, stands_by):
        client = client_of(stands_by, ALICE)
        client._headers = {**client._headers, HOP: "somebody"}
        with pytest.raises(NotLeader, match=r"this head stands by; ask the one that leads, one"):
            await asyncio.to_thread(client.submit, {"name": "a"})
        assert not leads.coordinator.state.tasks


async def test_nothing_is_passed_on_to_unlisted_address(tmp_path: Path) -> None:
    """Somebody with a shared login could write his own address into the lease, and would be sent people's tokens."""
    async with two_heads(tmp_path, listed=False) as (leads, stands_by):
        with pytest.raises(NotLeader, match=rf"ask the one that leads, one \(API {leads.head.me.api}\)"):
            await asyncio.to_thread(client_of(stands_by, ALICE).submit, {"name": "a"})


async def test_unreachable_leader_is_named(tmp_path: Path) -> None:
    async with two_heads(tmp_path) as (leads, stands_by):
        await leads.close_api()
        with pytest.raises(NotLeader, match=rf"does not reach the one that leads, {leads.head.me.api}"):
            await asyncio.to_thread(client_of(stands_by, ALICE).submit, {"name": "a"})


async def test_write_is_passed_on_by_tls_to_head_of_same_authority(tmp_path: Path) -> None:
    config = tmp_path / "unicron.yaml"
    (tmp_path / "none").write_text("")
    config.write_text(
        f"state_dir: {tmp_path / 'state'}\napi: {{host: 0.0.0.0, tokens_file: {tmp_path / 'none'}}}\n"
        "nats: {host: 0.0.0.0}\n"
    )
    assert main(["tls-init", "--config", str(config)]) == 0
    (tmp_path / "ca.pem").write_bytes((tmp_path / "state" / "tls" / "ca.pem").read_bytes())
    async with two_heads(tmp_path, tls=True) as (leads, stands_by):
        assert stands_by.url.startswith("https://")
        await asyncio.to_thread(client_of(stands_by, ALICE, tmp_path).submit, {"name": "a"})
        assert set(leads.coordinator.state.tasks) == {"a"}
        other = tmp_path / "other"
        (tmp_path / "other.yaml").write_text(config.read_text().replace(str(tmp_path / "state"), str(other)))
        assert main(["tls-init", "--config", str(tmp_path / "other.yaml")]) == 0
        (tmp_path / "state" / "tls" / "ca.pem").write_bytes((other / "tls" / "ca.pem").read_bytes())
        with pytest.raises(NotLeader, match=r"does not reach the one that leads, .*certificate"):
            await asyncio.to_thread(client_of(stands_by, ALICE, tmp_path).submit, {"name": "b"})
        assert set(leads.coordinator.state.tasks) == {"a"}


@pytest.mark.parametrize("api", [{"advertise": "head1"}, {"heads": ("head1:7470", "head2:x")}, {"advertise": "a/b:1"}])
def test_configuration_refuses_bad_addresses(api: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"api\.(advertise|heads): .* is no HOST:PORT; give one like head1:7470"):
        check(Config(api=ApiConfig(**api)), "file")  # type: ignore[arg-type]
