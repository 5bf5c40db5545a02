"""What `unicron-agent --check` finds (agents/health/preflight.py)."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from unicrond.agents.health.preflight import MachineFacts, NodeFlags, findings, is_remote, look
from unicrond.agents.shell import cli

NOW = datetime(2026, 1, 1, tzinfo=UTC)
ASKED = NodeFlags(8, "10.0.0.7", Path("/run/unicron"), Path("/var/log/unicron"), None, True)
SEEN = MachineFacts(
    gpus=8,
    has_rdma=True,
    mtu=9000,
    memory_bytes=1 << 40,
    shm_bytes=1 << 38,
    run_dir_in_memory=True,
    free_bytes={"--run-dir": 1 << 36, "--logs-dir": 1 << 36},
    limits={"nofile": 1 << 20, "memlock": 1 << 62},
    torch="2.13.0",
    key_ends=NOW + timedelta(days=300),
    now=NOW,
)


def test_preflight_finds_nothing_on_sound_node() -> None:
    assert findings(ASKED, SEEN) == []
    assert findings(ASKED, SEEN._replace(container_bytes=1 << 40)) == []
    cpu_node = SEEN._replace(gpus=0, has_rdma=False, torch="2.13.0+cpu", limits={"nofile": 1 << 20, "memlock": 65536})
    assert findings(ASKED._replace(slots=2), cpu_node) == []


@pytest.mark.parametrize(
    ("asked", "seen", "about", "what"),
    [
        ({"slots": 9}, {}, "--slots", "9 slots, but 8 visible GPUs"),
        ({"slots": 4}, {}, "--slots", "4 slots, but 8 visible GPUs: the others idle"),
        ({"slots": 4}, {"gpus": 1}, "--slots", "4 slots, but 1 visible GPU"),
        ({"address": "127.0.0.1"}, {}, "--address", "127.0.0.1 cannot be reached by other nodes"),
        ({}, {"mtu": None}, "--address", "no interface of this node has 10.0.0.7"),
        ({}, {"mtu": 1400}, "--address", "the interface of 10.0.0.7 has an MTU of 1400"),
        ({"memory_bytes": 3 << 38}, {}, "--memory-gib", "768 GiB for states of 1024 GiB of memory"),
        ({}, {"torch": ""}, "torch", "is not installed where the agent runs"),
        ({}, {"torch": "2.13.0+cpu"}, "torch", "2.13.0+cpu computes on the CPU, and there are GPUs"),
        ({}, {"shm_bytes": 64 << 20}, "shared memory", "/dev/shm has 64 MiB; data loaders and NCCL need more"),
        ({}, {"limits": {"nofile": 1024, "memlock": 1 << 62}}, "limits", "1024 open files are allowed"),
        (
            {"memory_bytes": 1 << 28},
            {"container_bytes": 8 << 30, "memory_bytes": 8 << 30, "shm_bytes": 4 << 30, "run_dir_bytes": 64 << 20},
            "container",
            "more than half of its limit of 8192 MiB may lie in memory "
            "(/dev/shm 4096, states 256, run directory 64 MiB)",
        ),
        ({}, {"key_ends": NOW - timedelta(days=1)}, "--key", "its certificate has ended on 2025-12-31"),
        ({}, {"key_ends": NOW + timedelta(days=3)}, "--key", "its certificate ends on 2026-01-04"),
        ({}, {"free_bytes": {"--logs-dir": 3 << 20}}, "--logs-dir", "its volume has 3 MiB free"),
    ],
)
def test_preflight_finding_has_fix(asked: dict[str, Any], seen: dict[str, Any], about: str, what: str) -> None:
    (found,) = findings(ASKED._replace(**asked), SEEN._replace(**seen))
    assert (found.about, found.problem) == (about, what) and found.fix


def test_preflight_allows_small_run_directory_without_logs() -> None:
    small = SEEN._replace(free_bytes={"--run-dir": 64 << 20, "--logs-dir": 1 << 36})
    assert findings(ASKED, small) == []
    (found,) = findings(ASKED, small._replace(free_bytes={"--run-dir": 16 << 20, "--logs-dir": 1 << 36}))
    assert found.about == "--run-dir"
    one = {"--run-dir": 64 << 20, "--logs-dir": 64 << 20}
    assert findings(ASKED._replace(logs_dir=ASKED.run_dir), SEEN._replace(free_bytes=one))


def test_preflight_checks_disk_and_locked_memory() -> None:
    (disk,) = findings(ASKED, SEEN._replace(run_dir_in_memory=False))
    (locked,) = findings(ASKED, SEEN._replace(limits={"nofile": 1 << 20, "memlock": 8 << 20}))
    assert disk.about == "--run-dir" and locked.problem.startswith("8 MiB may be locked")


def test_preflight_reads_this_machine(tmp_path: Path) -> None:
    asked = ASKED._replace(run_dir=tmp_path / "not there yet", logs_dir=tmp_path)
    seen = look(asked._replace(address="127.0.0.1"), None)
    assert look(asked._replace(address="192.0.2.1"), None).mtu is None and seen.mtu
    assert seen.memory_bytes > 0 and seen.torch and seen.key_ends is None
    assert seen.free_bytes["--run-dir"] == seen.free_bytes["--logs-dir"] > 0


def test_preflight_detects_remote_nats() -> None:
    assert not is_remote(("nats://127.0.0.1:4222", "nats://localhost:4222", "tls://[::1]:4222"))
    assert is_remote(("nats://127.0.0.1:4222", "tls://head:4222")) and is_remote(("nats://10.0.0.1:4222",))


def test_check_flag_prints_findings_without_joining(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--nats", "nats://127.0.0.1:9", "--node", "n1", "--slots", "1", "--run-dir", str(tmp_path / "run")]
    assert cli.main([*flags, "--check"]) == 1
    *lines, last = capsys.readouterr().out.splitlines()
    assert any(line.startswith("NATS: ") for line in lines) and last.startswith(f"{len(lines)} finding")
    assert not (tmp_path / "run").exists()
