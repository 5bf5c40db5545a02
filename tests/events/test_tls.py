"""TLS of NATS: whom it lets in, what a refusal says, and that certificates change without a restart."""

from __future__ import annotations

import asyncio
import ssl
from datetime import timedelta
from pathlib import Path

import pytest

from tests.events.certified import Certified, now, served, trusting
from unicrond.events.host.network_addresses import interface_addresses, interface_of
from unicrond.events.nats.connection import Login, LoginRefused, connect
from unicrond.events.nats.server import EmbeddedServer, ServerError, ServerTls, tls_of
from unicrond.events.trust.certificates import BadCertificate, first_certificate, is_signed_by, names_of, read_authority
from unicrond.events.trust.keys import make_key, read_key

QUICK_S = 0.5


async def refused(server: EmbeddedServer, login: Login | None = None, url: str = "") -> str:
    with pytest.raises(LoginRefused) as caught:
        await connect(url or server.url, name="test", login=login, timeout_s=QUICK_S)
    return str(caught.value)


async def let_in(server: EmbeddedServer, login: Login) -> None:
    await (await connect(server.url, name="test", login=login, timeout_s=10)).close()


async def test_key_file_carries_ca_and_certificate(tmp_path: Path) -> None:
    certified = Certified(tmp_path / "tls")
    path, key = certified.key()
    assert path.stat().st_mode & 0o077 == 0
    assert read_key(path) == key
    assert (key.ca.encode(), key.has_certificate) == (certified.authority.certificate_pem, True)
    bare, _ = certified.key("agent-n2", certificate=False)
    assert (read_key(bare).ca, read_key(bare).has_certificate) == (key.ca, False)
    async with served(tmp_path / "nats", certified.tls(), [key]) as server:
        await let_in(server, Login(key=path))


async def test_tls_refusal_is_one_line_with_fix(tmp_path: Path) -> None:
    certified, other = Certified(tmp_path / "tls"), Certified(tmp_path / "other")
    path, key = certified.key()
    async with served(tmp_path / "nats", certified.tls(), [key]) as server:
        said = await refused(server)
        assert "not of a CA that this machine knows; give --tls-ca, or a key of `unicrond enroll`" in said
        said = await refused(server, trusting(other.ca))
        assert f"not of the CA in {other.ca}; copy the head's again (STATE_DIR/tls/ca.pem)" in said
        assert "NATS wants a login and got none" in await refused(server, trusting(certified.ca))
        wrong = Login(tls_ca=certified.ca, user="unicron", password="guess")
        assert "NATS refuses user unicron: the name or the password is wrong" in await refused(server, wrong)
        stranger, _ = certified.key("agent-n2")
        assert "on the head: unicrond enroll n2" in await refused(server, Login(key=stranger))
        (tmp_path / "no.pem").write_text("no certificate")
        assert "holds no CA certificate in PEM" in await refused(server, trusting(tmp_path / "no.pem"))
        await let_in(server, Login(key=path))
        for spoil, line in (
            (certified.expire, "the certificate of NATS has expired; on the head: unicrond tls-init --renew"),
            (lambda: certified.serve(begin=now() + timedelta(days=2)), "not valid yet; compare the clocks"),
            (lambda: certified.serve(["head.example"]), "does not name 127.0.0.1; use a name that it has, or on the"),
        ):
            spoil()
            await server.renew()
            assert line in await refused(server, Login(key=path))


async def test_node_certificate_cannot_serve_as_head(tmp_path: Path) -> None:
    """Its certificate is of the right CA, and names no host."""
    certified = Certified(tmp_path / "tls")
    path, key = certified.key()
    posing = ServerTls(certified.ca, path, path, "127.0.0.1")
    async with served(tmp_path / "nats", posing, [key]) as server:
        assert "the certificate of NATS does not name 127.0.0.1" in await refused(server, Login(key=path))


async def test_client_with_ca_never_speaks_plain(tmp_path: Path) -> None:
    certified = Certified(tmp_path / "tls")
    async with served(tmp_path / "nats", None) as server:
        assert "NATS offers no TLS there, but a CA was given" in await refused(server, trusting(certified.ca))
        assert "NATS offers no TLS there" in await refused(server, url=server.url.replace("nats:", "tls:"))


async def test_server_may_require_client_certificate(tmp_path: Path) -> None:
    certified, other = Certified(tmp_path / "tls"), Certified(tmp_path / "other")
    path, key = certified.key()
    bare, bare_key = certified.key("agent-n2", certificate=False)
    async with served(tmp_path / "nats", certified.tls(wants_clients=True), [key, bare_key]) as server:
        await let_in(server, Login(key=path))
        await let_in(server, Login(key=bare, tls_cert=certified.server))
        assert "NATS wants a certificate of its clients" in await refused(server, Login(key=bare))
        foreign = Login(key=bare, tls_cert=other.server)
        assert "NATS does not accept this client's certificate" in await refused(server, foreign)
        assert tls_of(server.directory)["tls_cert"] == certified.server


async def test_endless_tls_retry_logs_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As an agent does: it tries again and again, and gets in once the certificate is right."""
    certified = Certified(tmp_path / "tls")
    certified.expire()
    path, key = certified.key()
    async with served(tmp_path / "nats", certified.tls(), [key]) as server:
        waiting = asyncio.create_task(connect(server.url, name="agent n1", login=Login(key=path), timeout_s=None))
        async with asyncio.timeout(60):
            while "has expired" not in caplog.text:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.5)  # it tries again meanwhile
        assert not waiting.done()
        said = [
            one.getMessage()
            for one in caplog.records
            if one.name.startswith("unicrond.events") and one.levelname != "INFO"
        ]
        assert said == ["the certificate of NATS has expired; on the head: unicrond tls-init --renew"]
        certified.serve()
        await server.renew()
        await (await asyncio.wait_for(waiting, 60)).close()


async def test_certificate_change_keeps_connections(tmp_path: Path) -> None:
    certified = Certified(tmp_path / "tls")
    path, key = certified.key()
    async with served(tmp_path / "nats", certified.tls(), [key]) as server:
        before = await connect(server.url, name="before", login=Login(key=path), timeout_s=10)
        shown = await certificate_of(server, certified.ca)
        certified.serve()
        await server.renew()
        assert await certificate_of(server, certified.ca) != shown
        assert before.is_up
        await before.close()
        certified.server.write_text("no certificate")
        with pytest.raises(Exception, match="has not taken the new users or certificates"):
            await server.renew()
        await let_in(server, Login(key=path))


async def test_server_moves_to_tls_under_its_clients(tmp_path: Path) -> None:
    """In clear; then both, for which nats-server itself has to start again; then TLS alone."""
    certified = Certified(tmp_path / "tls")
    path, key = certified.key()
    plain, plain_key = tmp_path / "plain.key", key._replace(pem="")
    plain.write_text(f"{plain_key.login}\n{plain_key.seed}\n")
    plain.chmod(0o600)
    async with served(tmp_path / "nats", None, [key]) as server:
        assert tls_of(server.directory) == {}
        await let_in(server, Login(key=plain))
        both = EmbeddedServer(server.directory, users=[key.user], tls=certified.tls(also_plain=True))
        with pytest.raises(ServerError, match=r"starts it again with them; .*not supported for AllowNonTLS"):
            await both.start()
        await both.restart()
        await let_in(both, Login(key=plain))
        await let_in(both, Login(key=path))
        alone = EmbeddedServer(server.directory, users=[key.user], tls=certified.tls())
        await both.stop()
        await alone.start()
        await let_in(alone, Login(key=path))
        assert "not of a CA that this machine knows" in await refused(alone, Login(key=plain))
        assert tls_of(server.directory) == {"tls_ca": certified.ca, "tls_name": "127.0.0.1"}
        await alone.kill()


async def test_running_server_adopts_tls(tmp_path: Path) -> None:
    """Who speaks in clear stays until its connection ends."""
    certified = Certified(tmp_path / "tls")
    path, key = certified.key()
    async with served(tmp_path / "nats", None, [key]) as server:
        adopter = EmbeddedServer(server.directory, users=[key.user], tls=certified.tls())
        assert await adopter.start()
        await let_in(adopter, Login(key=path))


async def certificate_of(server: EmbeddedServer, ca: Path) -> bytes:
    """As the server shows it, after NATS's greeting."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    await reader.readline()
    await writer.start_tls(ssl.create_default_context(cafile=str(ca)), server_hostname="localhost")
    shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    assert isinstance(shown, bytes)
    return shown


def test_certificates_carry_names_and_authority(tmp_path: Path) -> None:
    certified, other = Certified(tmp_path / "tls", ["head.example", "10.0.0.1", "::1"]), Certified(tmp_path / "other")
    ours = first_certificate(certified.server.read_bytes())
    assert names_of(ours) == ("head.example", "10.0.0.1", "::1")
    assert is_signed_by(ours, certified.authority.certificate)
    assert not is_signed_by(ours, other.authority.certificate)
    again = read_authority(certified.authority.certificate_pem, certified.authority.key_pem)
    assert (again.certificate, again.key_pem) == (certified.authority.certificate, certified.authority.key_pem)
    certified.serve(days=1000)
    ends = certified.authority.certificate.not_valid_after_utc
    assert first_certificate(certified.server.read_bytes()).not_valid_after_utc == ends, "not beyond its CA"
    with pytest.raises(BadCertificate, match="its key is not that of the certificate"):
        read_authority(certified.authority.certificate_pem, other.authority.key_pem)
    both = certified.authority.certificate_pem + other.authority.certificate_pem
    for authority in (certified.authority, other.authority):
        assert read_authority(both, authority.key_pem).certificate == authority.certificate
    own = certified.server.read_text()
    for pem in (both.decode(), own + both.decode()):
        assert make_key("agent-n1")._replace(pem=pem).ca == both.decode(), "a key carries both while a CA is replaced"
    with pytest.raises(BadCertificate, match="without a password"):
        read_authority(certified.authority.certificate_pem, b"x")
    with pytest.raises(BadCertificate, match="no certificate in PEM"):
        first_certificate(b"x")


def test_interface_lookup_finds_interface_of_address() -> None:
    assert interface_of("127.0.0.1") == interface_of("::1") == interface_of("127.1.2.3") == "lo"
    assert interface_of("192.0.2.77") == interface_of("head.example") == interface_of("") == ""
    for name, address in interface_addresses():
        assert interface_of(address) == name
