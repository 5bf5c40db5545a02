"""TLS of the head: `tls-init`, the configuration, the API and its client, and certificates that change and end."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest
from aiohttp import web

from tests.events.certified import Certified, now
from tests.unicrond.test_warrants import RUNS, enveloped, told
from unicrond.agents.memory.peer_tokens import Credentials
from unicrond.commands.cli import main
from unicrond.commands.logins import _certify
from unicrond.commands.tls import host_name
from unicrond.core.state.field_faults import faults
from unicrond.ctl.client import Client, Unreachable
from unicrond.ctl.client_options import ca_in
from unicrond.events.cli.command_line import UsageError
from unicrond.events.nats.connection import Login
from unicrond.events.trust.certificates import first_certificate, is_signed_by, names_of
from unicrond.events.trust.keys import load_or_create_key, read_key
from unicrond.events.trust.logins import Role
from unicrond.intake.config import Config, ConfigError, check_certificates, embedded_tls, load, login_as
from unicrond.intake.tls import BadTls, Files, expected_name
from unicrond.local.dev import free_port
from unicrond.service.trust.certificates import Certificates
from unicrond.service.trust.membership_certificates import Warrants
from unicrond.service.trust.node_certificates import authority_of, pem_for_node

WIDE = "nats: {host: 0.0.0.0}\n"


def configured(directory: Path, more: str = WIDE) -> Path:
    path = directory / "unicron.yaml"
    path.write_text(f"state_dir: {directory / 'state'}\n{more}")
    return path


def config(directory: Path, more: str = WIDE) -> Config:
    return load(configured(directory, more))


# --- unicrond tls-init ---------------------------------------------------------------------------


def test_tls_init_creates_and_renews_certificates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "token").write_text("a token")
    api = f"api: {{host: 0.0.0.0, token_file: {tmp_path / 'token'}}}\n"
    path, tls = configured(tmp_path, WIDE + api), tmp_path / "state" / "tls"
    command = ["tls-init", "--config", str(path), "--host", "head.example", "--host", "10.1.2.3"]
    assert main([*command, "--renew"]) == 2
    assert "run `unicrond tls-init` first" in capsys.readouterr().err
    assert main([*command, "--days", "10"]) == 0
    assert f"UNICRON_TLS_CA=ca.pem unicronctl --url https://head.example:{7470} status" in capsys.readouterr().out
    assert {file.name: file.stat().st_mode & 0o777 for file in tls.iterdir()} == dict.fromkeys(
        ("ca.key", "ca.pem", "server.pem"), 0o600
    )
    first, ca = first_certificate((tls / "server.pem").read_bytes()), first_certificate((tls / "ca.pem").read_bytes())
    assert {"head.example", "10.1.2.3", "localhost", "127.0.0.1", "::1"} <= set(names_of(first))
    assert timedelta(days=9) < first.not_valid_after_utc - now() <= timedelta(days=10)
    assert main(command) == 2
    assert "--renew makes a new certificate of the same CA" in capsys.readouterr().err
    assert main(["tls-init", "--config", str(path), "--renew"]) == 0
    again = first_certificate((tls / "server.pem").read_bytes())
    assert set(names_of(again)) == set(names_of(first)), "the names of before"
    assert again.serial_number != first.serial_number and is_signed_by(again, ca)
    assert first_certificate((tls / "ca.pem").read_bytes()) == ca


@pytest.mark.parametrize("lost", [(), ("server.pem",), ("server.pem", "ca.pem")])
def test_tls_init_if_missing_completes_what_was_cut_off(tmp_path: Path, lost: tuple[str, ...]) -> None:
    """It writes the CA's key, the CA, and the head's certificate, each whole or not at all."""
    path, tls = configured(tmp_path), tmp_path / "state" / "tls"
    command = ["tls-init", "--if-missing", "--config", str(path)]
    assert main(command) == 0
    before = {file.name: file.read_bytes() for file in tls.iterdir()}
    for name in lost:
        (tls / name).unlink()
    assert main(command) == 0
    after = {file.name: file.read_bytes() for file in tls.iterdir()}
    assert after.keys() == before.keys()
    assert (after == before) is (not lost) and (after["ca.pem"] == before["ca.pem"]) is ("ca.pem" not in lost)
    assert is_signed_by(first_certificate(after["server.pem"]), authority_of(load(path)).certificate)


def test_head_makes_its_certificates_before_its_first_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in a container, where an init container of its own would cost a second at each start."""
    path, cert = configured(tmp_path), tmp_path / "state" / "tls" / "server.pem"
    begun = []

    async def serve(config: Config, *_: object, **__: object) -> None:
        begun.append(names_of(first_certificate(config.certificates.cert.read_bytes())))

    monkeypatch.setattr("unicrond.service.head.daemon.serve", serve)
    assert main(["run", "--config", str(path)]) == 2 and "is not there" in capsys.readouterr().err
    command = ["run", "--config", str(path), "--tls-init", "head.example", "--tls-init", "10.1.2.3"]
    assert main(command) == 0
    before = cert.read_bytes()
    assert main(command) == 0 and cert.read_bytes() == before
    assert len(begun) == 2 and {"head.example", "10.1.2.3"} <= set(begun[0])


def test_host_name_accepts_valid_names_only() -> None:
    assert [host_name(name) for name in ("head", "*.example.org", "10.0.0.1", "::1")] == [
        *("head", "*.example.org", "10.0.0.1", "::1")
    ]
    for bad in ("", "a b", "-x", "x..y", "a" * 64, "ü"):
        with pytest.raises(ValueError, match="neither a host's name nor an IP address"):
            host_name(bad)


def test_node_certificate_comes_from_own_ca(tmp_path: Path) -> None:
    path = configured(tmp_path)
    assert main(["tls-init", "--config", str(path)]) == 0
    pem = pem_for_node(load(path), "n1").encode()
    assert is_signed_by(first_certificate(pem), authority_of(load(path)).certificate)
    certified = Certified(tmp_path / "own")
    own = f"tls: {{ca: {certified.ca}, cert: {certified.server}, key: {certified.server}}}\n"
    assert pem_for_node(config(tmp_path, WIDE + own), "n1").encode() == certified.authority.certificate_pem
    assert pem_for_node(config(tmp_path, ""), "n1") == "", "loopback"


def test_own_nats_servers_limit_certificate_to_states(tmp_path: Path) -> None:
    """The servers are of another CA, or speak in clear."""
    text = f"nats: {{url: 'nats://10.0.0.5', auth: keys, keys: {tmp_path}}}\n"
    path = configured(tmp_path, text)
    own = load_or_create_key(tmp_path, "agent-n1")
    assert _certify(tmp_path / "agent-n1.key", load(path), "n1") and read_key(tmp_path / "agent-n1.key") == own
    assert main(["tls-init", "--config", str(path)]) == 0
    assert _certify(tmp_path / "agent-n1.key", load(path), "n1")
    assert not _certify(tmp_path / "agent-n2.key", load(path), "n2"), "it was moved to its node"
    key = read_key(tmp_path / "agent-n1.key")
    assert (key.login, key.seed, key.nats_ca, key.is_for_states) == (own.login, own.seed, "", True)
    assert (tmp_path / "agent-n1.key").stat().st_mode & 0o777 == 0o600
    credentials = Credentials(key, tmp_path / "agent-n1.key")
    assert credentials.node == "n1" and credentials.context()
    assert "tls" not in Login(key=tmp_path / "agent-n1.key").options()
    warrants = Warrants(load(path).certificates.cert)
    assert warrants.beside(enveloped(told(5, RUNS)))


# --- the configuration ---------------------------------------------------------------------------


def test_public_bind_uses_tls_unless_switched_off(tmp_path: Path) -> None:
    tokens = tmp_path / "token"
    tokens.write_text("secret")
    api = f"api: {{host: 0.0.0.0, token_file: {tokens}}}\n"
    for text, nats, http in (
        ("", False, False),
        (WIDE, True, False),
        (api, False, True),
        (WIDE + api, True, True),
        (WIDE + api + "tls: off\n", False, False),
        ("nats: {host: 0.0.0.0, url: 'nats://10.0.0.5'}\nauth: off\n", False, False),
    ):
        found = config(tmp_path, text)
        assert (found.nats_tls, found.api_tls) == (nats, http), text
        if nats or http:
            with pytest.raises(
                ConfigError, match=r"open to others and speaks TLS, but .*ca\.pem is not there; run `uni"
            ):
                check_certificates(found, "x")
        else:
            check_certificates(found, "x")
            assert embedded_tls(found) is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tls: on\n", "tls: unknown value 'on'"),
        ("tls: false\n", "tls: expected fields such as ca, cert, key, got false"),
        ("tls: {cx: a}\n", "tls.cx: unknown field"),
        ("tls: {ca: /nowhere}\n", "tls: give ca, cert and key together"),
        ("tls: {ca: /nowhere, cert: /nowhere, key: /nowhere}\n", "tls.ca: /nowhere is not a file"),
    ],
)
def test_configuration_refuses_bad_tls_in_one_line(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        config(tmp_path, text)


def test_validator_handles_unions_without_struct() -> None:
    class Some(msgspec.Struct):
        count: int | None = None

    assert [str(fault) for fault in faults({"count": "x"}, Some)] == ["count: expected a whole number, got text 'x'"]


def test_local_client_expects_name_of_certificate(tmp_path: Path) -> None:
    certified = Certified(tmp_path / "own", ["head.example", "10.0.0.1"])
    files = Files(certified.ca, certified.server, certified.server)
    assert expected_name(files, "10.0.0.1") == "10.0.0.1"
    assert expected_name(files, "127.0.0.1") == "head.example"
    own = f"tls: {{ca: {certified.ca}, cert: {certified.server}, key: {certified.server}, client_certificates: true}}\n"
    login = login_as(config(tmp_path, WIDE + own), Role.READER)
    assert (login.tls_ca, login.tls_name, login.tls_cert) == (certified.ca, "head.example", certified.server)
    certified.server.write_text("x")
    with pytest.raises(BadTls, match=r"no certificate in PEM; run `unicrond tls-init`"):
        expected_name(files, "")


# --- the API --------------------------------------------------------------------------------------


@asynccontextmanager
async def api(context: ssl.SSLContext | None) -> AsyncIterator[int]:
    """The port of something that answers /healthz."""

    async def health(_: web.Request) -> web.Response:
        return web.json_response({"status": "live"})

    app = web.Application()
    app.add_routes([web.get("/healthz", health)])
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port, ssl_context=context).start()
    try:
        yield port
    finally:
        await runner.cleanup()


async def said(client: Client) -> str:
    with pytest.raises(Unreachable) as caught:
        await asyncio.to_thread(client.health)
    return str(caught.value)


async def test_api_speaks_tls_and_refuses_in_one_line(tmp_path: Path) -> None:
    certified, other = Certified(tmp_path / "tls"), Certified(tmp_path / "other")
    files = Files(certified.ca, certified.server, certified.server)
    keeper = Certificates(files, None, is_for_api=True)
    async with api(keeper.context) as port:
        url = f"https://127.0.0.1:{port}"
        assert (await asyncio.to_thread(Client(url, ca=certified.ca).health))["status"] == "live"
        assert "not of a CA that this machine knows; give the head's STATE_DIR/tls/ca.pem as" in await said(Client(url))
        assert f"not of the CA in {other.ca}" in await said(Client(url, ca=other.ca))
        assert "if it speaks TLS, give https://" in await said(Client(url.replace("https", "http")))
        certified.expire()
        await keeper.look()
        assert "has expired; on the head: unicrond tls-init --renew" in await said(Client(url, ca=certified.ca))
        certified.serve(["head.example"])
        await keeper.look()
        assert "does not name 127.0.0.1" in await said(Client(url, ca=certified.ca))
        named = Client(url, ca=certified.ca, server_name="head.example")
        assert (await asyncio.to_thread(named.health))["status"] == "live"
        people = tmp_path / "people.pem"
        people.write_bytes(other.ca.read_bytes())
        watching = Client(url, ca=people, server_name="head.example")
        assert "not of the CA in" in await said(watching)
        people.write_bytes(other.ca.read_bytes() + certified.ca.read_bytes())
        assert (await asyncio.to_thread(watching.health))["status"] == "live", "the file was replaced under it"
    async with api(None) as port:
        assert "does not speak TLS there" in await said(Client(f"https://127.0.0.1:{port}", ca=certified.ca))


def test_ca_flag_overrides_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = tmp_path / "a.pem", tmp_path / "b.pem"
    first.touch()
    second.touch()
    assert ca_in(None) is None
    monkeypatch.setenv("UNICRON_TLS_CA", str(first))
    assert (ca_in(None), ca_in(second)) == (first, second)
    for given, source in ((Path("/nowhere"), "--tls-ca"), (None, "UNICRON_TLS_CA")):
        monkeypatch.setenv("UNICRON_TLS_CA", "/nowhere")
        with pytest.raises(UsageError, match=f"{source}: /nowhere is not a file; give the CA's certificate"):
            ca_in(given)


class Server:
    def __init__(self) -> None:
        self.renewed = 0

    async def renew(self) -> None:
        self.renewed += 1


async def test_expiring_or_unusable_certificate_raises_alarm(tmp_path: Path) -> None:
    certified, server = Certified(tmp_path), Server()
    at = now()
    keeper = Certificates(
        Files(certified.ca, certified.server, certified.server), server, is_for_api=False, now=lambda: at
    )
    assert keeper.alarms() == []
    at += timedelta(days=4)
    assert keeper.alarms() == [f"the certificate {certified.server} ends in 0 days: unicrond tls-init --renew"]
    certified.serve(days=9)
    await keeper.look()
    assert (keeper.alarms(), server.renewed) == ([], 1)
    at += timedelta(days=7)
    assert "has expired: unicrond tls-init --renew" in keeper.alarms()[0]
    whole = certified.server.read_text()
    certified.server.write_text(whole.partition("-----BEGIN PRIVATE")[0])
    await keeper.look()
    assert "the new certificates are not in use" in keeper.alarms()[0] and server.renewed == 1
    certified.server.write_text(whole)
    await keeper.look()
    assert (len(keeper.alarms()), server.renewed) == (1, 2)
    with pytest.raises(BadTls, match="is not a certificate with its key"):
        Certificates(Files(certified.ca, certified.server, certified.ca), server, is_for_api=False)
