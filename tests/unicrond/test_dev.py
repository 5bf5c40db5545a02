"""The small supervisor ends its own processes and nobody else's, and says in one line why it cannot start."""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from unicrond.local.dev import DevCluster, DevError, check_port, free_port, working_directory


def test_supervisor_spares_foreign_processes(tmp_path: Path) -> None:
    cluster = DevCluster(tmp_path, nodes=1, slots=1, api_port=0)
    run_dir, state = str(tmp_path / "run" / "node1"), str(tmp_path / "state" / "nats" / "nats-server.conf")
    wait = "import sys; sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", wait, run_dir, state], stdin=subprocess.PIPE) as bystander:
        assert bystander.pid not in [process.pid for process in cluster.processes_of("node1")]
        cluster._end_leftovers()
        assert bystander.poll() is None
        assert bystander.stdin is not None
        bystander.stdin.close()


def test_supervisor_refuses_occupied_port() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(DevError, match=r"--port: .* is not free"):
            check_port(taken.getsockname()[1])


def test_free_port_never_repeats() -> None:
    """Two servers of one cluster once got the same."""
    ports = [free_port() for _ in range(300)]
    assert len(set(ports)) == 300
    assert max(ports) < int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])


def test_supervisor_refuses_unusable_directory() -> None:
    arguments = argparse.Namespace(dir=Path("/proc/nope"), keep=False)
    with pytest.raises(DevError, match="--dir: cannot use /proc/nope"), working_directory(arguments):
        pass
