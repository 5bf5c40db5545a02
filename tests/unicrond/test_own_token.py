"""The head's own token: who is told where it is, and to whom unicronctl gives it."""

from __future__ import annotations

import json
import os
import pwd
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path
from typing import ClassVar

import pytest

from tests.other_users import USER, needs_root
from unicrond.ctl.client import ApiRefused, Client
from unicrond.intake.config import Config, is_loopback
from unicrond.intake.own_token import NoOwnToken, own_token
from unicrond.service.api.access import FAILURES_MAX, Access, AccessDenied
from unicrond.service.head.parts import access_of


@pytest.fixture
def port() -> Iterator[int]:
    """A port on which this process listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def token_file(directory: Path, text: str = "unicron_secret\n", mode: int = 0o600) -> Path:
    path = directory / "operator.token"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_token_is_read_for_listener_of_its_owner(tmp_path: Path, port: int) -> None:
    assert own_token(token_file(tmp_path), port) == "unicron_secret"


def test_token_goes_to_nobody_else(tmp_path: Path, port: int) -> None:
    """Nobody listens there: no head could have named the file."""
    path = token_file(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as other:
        unused = other.getsockname()[1]
    with pytest.raises(NoOwnToken, match="is not of the user who listens on port"):
        own_token(path, unused)


@needs_root
def test_token_of_another_user_is_not_given_to_this_listener(tmp_path: Path, port: int) -> None:
    path = token_file(tmp_path)
    os.chown(path, pwd.getpwnam(USER).pw_uid, -1)
    with pytest.raises(NoOwnToken, match="is not of the user who listens on port"):
        own_token(path, port)


@pytest.mark.parametrize(
    ("text", "mode", "problem"),
    [
        ("unicron_x\n", 0o644, "is not a file of its owner alone; chmod 600 it"),
        ("", 0o600, "is not one line that begins with unicron_; remove it and restart the head"),
        ("unicron_a\nb\n", 0o600, "is not one line that begins with unicron_"),
        ("ssh-ed25519 AAAA\n", 0o600, "is not one line that begins with unicron_"),
    ],
)
def test_file_that_is_no_token_is_refused(tmp_path: Path, port: int, text: str, mode: int, problem: str) -> None:
    with pytest.raises(NoOwnToken, match=problem):
        own_token(token_file(tmp_path, text, mode), port)


def test_link_and_missing_file_are_refused(tmp_path: Path, port: int) -> None:
    (tmp_path / "link").symlink_to(token_file(tmp_path))
    for name in ("link", "missing"):
        with pytest.raises(NoOwnToken, match=f"cannot read {tmp_path}/{name}: .*; give --token-file"):
            own_token(tmp_path / name, port)


def test_head_makes_one_token_and_keeps_it(tmp_path: Path) -> None:
    config = Config(state_dir=str(tmp_path / "state"))
    access_of(config)
    assert config.own_token is not None
    text = config.own_token.read_text()
    assert config.own_token.stat().st_mode & 0o777 == 0o600 and text.startswith("unicron_")
    grant = access_of(config).grant("POST", "/v1/faults", text.strip(), "127.0.0.1", 0.0)
    assert grant.name == "token" and config.own_token.read_text() == text


def test_off_makes_no_token_and_asks_for_none(tmp_path: Path) -> None:
    config = Config(state_dir=str(tmp_path / "state"), auth="off")
    assert access_of(config).is_open and not (tmp_path / "state").exists()


def test_only_own_machine_is_told_where_token_is_and_asking_is_no_guess(tmp_path: Path) -> None:
    access = Access("secret", local=tmp_path / "operator.token")

    def told(token: str, address: str) -> tuple[int, str]:
        with pytest.raises(AccessDenied) as denied:
            access.grant("GET", "/v1/state", token, address, 0.0)
        return denied.value.status, denied.value.token_file

    assert not is_loopback("10.0.0.1") and told("", "10.0.0.1") == (401, "")
    for _ in range(FAILURES_MAX + 1):
        assert told("", "127.0.0.1") == (401, str(tmp_path / "operator.token"))
    assert told("guess", "127.0.0.1") == (401, "")


class CuriousHead(BaseHTTPRequestHandler):
    """A server that names a file to whoever asks without a token, and keeps what it is given."""

    path_named: ClassVar[str]
    headers_seen: ClassVar[list[str]]

    def do_GET(self) -> None:
        self.headers_seen.append(self.headers.get("Authorization", ""))
        body = json.dumps({"error": "no token", "token_file": self.path_named}).encode()
        self.send_response(401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.mark.parametrize("path", ["/", "\0"])
def test_what_is_no_file_is_refused_in_a_line(path: str, port: int) -> None:
    with pytest.raises(NoOwnToken, match="token: "):
        own_token(Path(path), port)


def test_head_at_default_port_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    CuriousHead.path_named, CuriousHead.headers_seen = str(token_file(tmp_path)), []
    with ThreadingHTTPServer(("127.0.0.1", 0), CuriousHead) as server:
        threading.Thread(target=server.serve_forever).start()
        monkeypatch.setattr("http.client.HTTPConnection.default_port", server.server_port)
        with pytest.raises(ApiRefused):
            Client("http://127.0.0.1").health()
        server.shutdown()
    assert CuriousHead.headers_seen == ["", "Bearer unicron_secret"]


@pytest.mark.parametrize(("is_own_machine", "tokens"), [(True, ["", "Bearer unicron_secret"]), (False, [""])])
def test_head_on_another_machine_gets_no_file_that_it_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_own_machine: bool, tokens: list[str]
) -> None:
    CuriousHead.path_named, CuriousHead.headers_seen = str(token_file(tmp_path)), []
    if not is_own_machine:
        monkeypatch.setattr("unicrond.ctl.client.ip_address", lambda _: ip_address("192.0.2.1"))
    with ThreadingHTTPServer(("127.0.0.1", 0), CuriousHead) as server:
        threading.Thread(target=server.serve_forever).start()
        with pytest.raises(ApiRefused):
            Client(f"http://127.0.0.1:{server.server_port}").health()
        server.shutdown()
    assert CuriousHead.headers_seen == tokens
