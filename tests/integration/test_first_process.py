"""A head as process 1 of a pid namespace, as in a container: its end is its nats-server's, in order."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.agents.processes import children, eventually
from tests.integration.head import UNICROND, config
from tests.integration.test_known_log import url_of
from tests.integration.test_probes import probe


def is_ready(url: str) -> bool:
    try:
        return probe(f"{url}/readyz")[0] == 200
    except OSError:
        return False


@pytest.mark.skipif(os.getuid() != 0, reason="a pid namespace needs root")
def test_sigterm_ends_server_and_releases_store_lease(tmp_path: Path) -> None:
    path = config(tmp_path)
    words = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", UNICROND, "run", "--config", str(path)]
    outer = subprocess.Popen(words, stderr=subprocess.DEVNULL)
    try:
        assert eventually(lambda: is_ready(url_of(path)), 60)
        (head,) = children(outer.pid)
        os.kill(head, signal.SIGTERM)
        assert outer.wait(30) == 0
    finally:
        outer.kill()
        outer.wait()
    store = tmp_path / "state" / "nats"
    assert json.loads((store / "lease.1").read_text())["released"]
    assert "Server Exiting" in (store / "nats-server.log").read_text()
