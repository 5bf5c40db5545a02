"""deploy/container/pin_base.py, against a stand-in: a small HTTP server that speaks this part of a registry's API.

It has not asked a real registry.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.integration.installation import ROOT

CONTAINERFILE = ROOT / "deploy" / "container" / "Containerfile"
INDEX = json.dumps({"schemaVersion": 2, "manifests": [{"platform": {"architecture": "amd64"}}]}).encode()
DIGEST = f"sha256:{hashlib.sha256(INDEX).hexdigest()}"


class StandIn(ThreadingHTTPServer):
    """A registry with one image, for which it wants a token that it gives to everybody."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.body = INDEX
        self.claim = DIGEST

    @property
    def url(self) -> str:
        """Return where it listens."""
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Answers(BaseHTTPRequestHandler):
    server: StandIn

    def do_GET(self) -> None:
        body, code = self.server.body, 200
        if self.path.startswith("/token?"):
            assert "scope=repository" in self.path and "service=stand-in" in self.path, self.path
            body = b'{"token": "for-all"}'
        elif not self.path.startswith("/v2/library/python/manifests/3."):
            code = 404
        elif self.headers.get("Authorization") != "Bearer for-all":
            code = 401
        assert code != 200 or self.path.startswith("/token?") or "image.index" in self.headers["Accept"]
        self.send_response(code)
        if code == 401:
            fields = f'realm="{self.server.url}/token",service="stand-in",scope="repository:library/python:pull"'
            self.send_header("WWW-Authenticate", f"Bearer {fields}")
        if self.server.claim:
            self.send_header("Docker-Content-Digest", self.server.claim)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def registry() -> Iterator[StandIn]:
    with StandIn() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    target = tmp_path / "Containerfile"
    target.write_text(CONTAINERFILE.read_text())
    return target


def _pin(registry: str, file: Path) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, str(CONTAINERFILE.with_name("pin_base.py")), "--registry", registry, "--file", str(file)]
    return subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)


def _base(file: Path) -> str:
    return next(line for line in file.read_text().splitlines() if line.startswith("FROM "))


def test_base_gets_digest_and_keeps_it(registry: StandIn, copy: Path) -> None:
    before = _base(copy).partition("@")[0]
    assert _pin(registry.url, copy).returncode == 0
    assert _base(copy) == f"{before}@{DIGEST}"
    done = _pin(registry.url, copy)
    assert done.stdout == f"{before}@{DIGEST} (as before)\n"
    assert copy.read_text().replace(f"@{DIGEST}", "") == CONTAINERFILE.read_text(), "the rest stays"


def test_digest_that_registry_claims_is_not_believed(registry: StandIn, copy: Path) -> None:
    registry.body += b" "
    _refused(_pin(registry.url, copy), copy, "and the registry claims")


def test_one_architecture_is_no_base(registry: StandIn, copy: Path) -> None:
    registry.body, registry.claim = b'{"config": {}}', ""
    _refused(_pin(registry.url, copy), copy, "returned no image index")


def test_unreachable_registry_is_told_in_one_line(copy: Path) -> None:
    _refused(_pin("http://127.0.0.1:9", copy), copy, "Connection refused")


def _refused(done: subprocess.CompletedProcess[str], copy: Path, reason: str) -> None:
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and reason in done.stderr and "nothing was changed" in done.stderr, done.stderr
    assert copy.read_text() == CONTAINERFILE.read_text()
