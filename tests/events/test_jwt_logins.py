"""Servers in operator mode: credentials files (JWT) with the rights of `unicrond nats-config --nsc` do as keys."""

from __future__ import annotations

import base64
import json
import os
import shlex
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, NamedTuple

import nkeys
import pytest

from tests.contracts.logs import command, fact, started
from tests.events.test_accounts import ATTACKERS, LOGINS, moved, site_of, work
from tests.integration.nats_cluster import nats_cluster
from unicrond.events.log.event_log import LogUnavailable
from unicrond.events.log.subjects import EVENT_STREAM
from unicrond.events.nats.commands import NatsCommandFeed, ensure_command_consumer
from unicrond.events.nats.connection import Connection, Login, LoginRefused, PublishDenied, connect
from unicrond.events.nats.event_log import NatsEventLog
from unicrond.events.nats.server import EmbeddedServer
from unicrond.events.nats.streams import api, create_streams
from unicrond.events.trust.accounts import nsc_commands
from unicrond.events.trust.keys import BadKey, read_key

CREDENTIALS = """-----BEGIN NATS USER JWT-----
{jwt}
------END NATS USER JWT------

************************* IMPORTANT *************************
-----BEGIN USER NKEY SEED-----
{seed}
------END USER NKEY SEED------
"""


class Owner(NamedTuple):
    """One that signs: its seed and its public key."""

    seed: bytes
    name: str


def owner(prefix: int) -> Owner:
    seed = nkeys.encode_seed(os.urandom(32), prefix)
    return Owner(seed, nkeys.from_seed(bytearray(seed)).public_key.decode())


def signed(by: Owner, subject: str, name: str, about: dict[str, Any], **claims: Any) -> str:
    claims |= {"jti": name, "iat": 1, "iss": by.name, "sub": subject, "name": name, "nats": about | {"version": 2}}
    parts = [
        base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=")
        for part in ({"typ": "JWT", "alg": "ed25519-nkey"}, claims)
    ]
    signature = nkeys.from_seed(bytearray(by.seed)).sign(b".".join(parts))
    return b".".join([*parts, base64.urlsafe_b64encode(signature).rstrip(b"=")]).decode()


class Account:
    """An account as nsc's commands make it, as far as NATS's JWT writes it down."""

    def __init__(self) -> None:
        self.owner = owner(nkeys.PREFIX_BYTE_ACCOUNT)
        self.limits: dict[str, Any] = dict.fromkeys(
            ("subs", "data", "payload", "imports", "exports", "conn", "leaf"), -1
        )
        self.limits["wildcards"] = True
        self.exports: list[dict[str, Any]] = []
        self.imports: list[dict[str, Any]] = []
        self.mappings: dict[str, Any] = {}

    def claims(self) -> dict[str, Any]:
        sharing = {"exports": self.exports, "imports": self.imports, "mappings": self.mappings}
        return {"type": "account", "limits": self.limits, **sharing}


def flags_in(words: list[str]) -> dict[str, str]:
    """The flags of a command with their values; "" for a switch."""
    values = [*words[1:], "--"]
    return {
        word.removeprefix("--"): "" if after.startswith("--") else after
        for word, after in zip(words, values, strict=True)
        if word.startswith("--")
    }


class Server(EmbeddedServer):
    """In operator mode, with the accounts that `unicrond nats-config --nsc` makes."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory / "nats")
        self._keys = directory
        self._operator, self._system = owner(nkeys.PREFIX_BYTE_OPERATOR), Account()
        self._accounts: dict[str, Account] = {}
        for line in nsc_commands([]):
            name, _, command_line = line.partition("=$(")
            if command_line:  # the shell keeps the account's key under its name
                assert command_line.startswith(f"nsc describe account --name {name} ")
            else:
                self._run_nsc(shlex.split(line))

    def _run_nsc(self, words: list[str]) -> None:
        flags = flags_in(words)
        kind = {"type": "service" if "service" in flags else "stream"}
        match words[1:3]:
            case ["add", "account"]:
                self._accounts[flags["name"]] = Account()
            case ["edit", "account"]:
                limits = {"disk_storage": "js-disk-storage", "mem_storage": "js-mem-storage"}
                limits |= {"streams": "js-streams", "consumer": "js-consumer"}
                self._accounts[flags["name"]].limits |= {name: int(flags[flag]) for name, flag in limits.items()}
            case ["add", "mapping"]:
                self._accounts[flags["account"]].mappings[flags["from"]] = [{"subject": flags["to"]}]
            case ["add", "export"]:
                answers = {"response_type": flags["response-type"]} if "response-type" in flags else {}
                entry = {"name": flags["name"], "subject": flags["subject"], **kind, **answers}
                self._accounts[flags["account"]].exports.append(entry)
            case ["add", "import"]:
                lender = self._accounts[flags["src-account"].removeprefix("$")].owner.name
                entry = {"name": flags["name"], "subject": flags["remote-subject"], "account": lender, **kind}
                entry |= {"local_subject": flags["local-subject"], "share": "share" in flags}
                self._accounts[flags["account"]].imports.append(entry)
            case _:
                raise AssertionError(words)

    def _config(self) -> str:
        before, _, _ = super()._config().partition("accounts {")
        return before + "\n".join(self.account_lines()) + "\n"

    def account_lines(self) -> list[str]:
        """Lines of any server's configuration."""
        accounts = {
            account.owner.name: signed(self._operator, account.owner.name, name, account.claims())
            for name, account in {"SYS": self._system, **self._accounts}.items()
        }
        operator = signed(self._operator, self._operator.name, "O", {"type": "operator"})
        lines = [f"operator: {operator}", f"system_account: {self._system.owner.name}", "resolver: MEMORY"]
        return [*lines, f"resolver_preload: {json.dumps(accounts)}"]

    def credentials(self, login: str, **claims: Any) -> Path:
        """As nsc makes them from the command that `unicrond nats-config --nsc` prints."""
        words = shlex.split(nsc_commands([login])[-1])
        flags = flags_in(words)
        assert words[:3] == ["nsc", "add", "user"] and flags["name"] == login
        allowed = {flag: {"allow": flags[flag].split(",")} for flag in ("allow-pub", "allow-sub")}
        user = owner(nkeys.PREFIX_BYTE_USER)
        about = {"type": "user", "pub": allowed["allow-pub"], "sub": allowed["allow-sub"], "subs": -1, "data": -1}
        path = self._keys / f"{login}.creds"
        account = self._accounts[flags["account"]].owner
        jwt = signed(account, user.name, login, about | {"payload": -1}, **claims)
        path.write_text(CREDENTIALS.format(jwt=jwt, seed=user.seed.decode()))
        path.chmod(0o600)
        return path


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    made = Server(tmp_path)
    await made.start()
    yield made
    await made.kill()


async def test_credentials_file_grants_same_rights_as_key(server: Server) -> None:
    async with AsyncExitStack() as stack:

        async def log_in(login: str) -> Connection:
            key = Login(key=server.credentials(login))
            connection = await connect(server.url, name=login, login=key, timeout_s=10)
            stack.push_async_callback(connection.close)
            return connection

        await create_streams(await log_in("operator"))
        head, agent = await log_in("coordinator"), await log_in("agent-n1")
        log = NatsEventLog(head)
        fence = await log.claim_term(started(1))
        assert await NatsEventLog(agent).append([fact(1, "n1")])
        await ensure_command_consumer(head, "n1", ["a"])
        feed = NatsCommandFeed(agent, "n1", makes_consumer=False)
        await feed.follow(["a"])
        await log.append([command(1, "n1")], fence=fence)
        assert (await anext(feed.read())).envelope.producer == "coordinator"
        with pytest.raises(LogUnavailable):
            await NatsEventLog(agent, give_up_s=0.5).append([fact(1, "n2")])
        with pytest.raises(PublishDenied):
            await api(agent, f"STREAM.MSG.GET.{EVENT_STREAM}", {"seq": 1})


@pytest.mark.timeout(300)
@pytest.mark.parametrize("replicas", [1, 3])
async def test_no_answer_moves_anything_in_operator_mode(replicas: int, tmp_path: Path) -> None:
    """Accounts by JWT lend more widely than a configuration does: the walls are as high."""
    server, keys = Server(tmp_path), tmp_path / "keys"
    keys.mkdir()
    for login in LOGINS:
        server.credentials(login).rename(keys / f"{login}.key")
    async with AsyncExitStack() as stack:
        if replicas == 1:
            await server.start()
            stack.push_async_callback(server.kill)
            site = await site_of(stack, [server.url], keys, None, replicas)
        else:
            several = nats_cluster(tmp_path / "several", logins="\n".join(server.account_lines()))
            cluster = await stack.enter_async_context(several)
            site = await site_of(stack, cluster.urls, keys, cluster.ca, replicas)
        for login in ATTACKERS:
            sent, before, after = await moved(site, login)
            assert sent > 500
            assert after == before, f"{login} has moved something"
        await work(site)


async def test_expired_credentials_print_one_line(server: Server) -> None:
    path = server.credentials("agent-n1", exp=int(time.time()) - 10)
    with pytest.raises(
        LoginRefused, match=r"^NATS refuses the credentials of agent-n1 .*: they have expired; get new ones"
    ):
        await connect(server.url, name="n1", login=Login(key=path), timeout_s=3)


def test_foreign_credentials_are_refused(tmp_path: Path) -> None:
    account, user, other = (owner(nkeys.PREFIX_BYTE_USER) for _ in range(3))
    for name, seed, why in (("somebody", user.seed, "is not a login"), ("agent-n1", other.seed, "not that of its JWT")):
        path = tmp_path / f"{name}.creds"
        jwt = signed(account, user.name, name, {"type": "user"})
        path.write_text(CREDENTIALS.format(jwt=jwt, seed=seed.decode()))
        path.chmod(0o600)
        with pytest.raises(BadKey, match=why):
            read_key(path)
