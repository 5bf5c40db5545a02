"""unicron-agent's flags: one clear line and exit code 2 for what cannot work."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from agents.cli import parse
from tests.agents.processes import environment

GOOD = ("--nats", "nats://127.0.0.1:4222", "--node", "n1", "--slots", "2")


def test_good_flags(run_dir: Path) -> None:
    options = parse([*GOOD, "--run-dir", str(run_dir), "--heartbeat-s", "0.5", "--address", "10.0.0.7"])
    assert (options.node, options.slots, options.heartbeat_s, options.address) == ("n1", 2, 0.5, "10.0.0.7")
    assert options.nats == ("nats://127.0.0.1:4222",)


def test_what_is_kept_of_workers_logs(run_dir: Path) -> None:
    options = parse([*GOOD, "--run-dir", str(run_dir)])
    assert (options.logs_dir, options.logs_max_age_s, options.logs_max_bytes) == (None, None, None)
    options = parse([*GOOD, "--run-dir", str(run_dir), "--logs-dir", "/var/l", "--logs-days", "2", "--logs-gib", "1"])
    assert (options.logs_dir, options.logs_max_age_s, options.logs_max_bytes) == (Path("/var/l"), 172_800.0, 2**30)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--node", "a.b"), ("--node", "no dots")),
        (("--node", "api"), ("--node", "another name")),
        (("--node", "coordinator"), ("--node", "another name")),
        (("--node", "operator"), ("--node", "another name")),
        (("--slots", "0"), ("--slots", "1 to")),
        (("--slots", "two"), ("--slots", "1 to")),
        (("--nats", "http://x"), ("--nats", "nats://HOST:PORT")),
        (("--address", "gpu07"), ("--address", "IP")),
        (("--address", "0.0.0.0"), ("--address", "can connect to")),
        (("--heartbeat-s", "0"), ("--heartbeat-s", "seconds")),
        (("--lease-s", "nan"), ("--lease-s", "seconds")),
        (("--logs-days", "-1"), ("--logs-days", "days")),
        (("--creds", "/no/such/file"), ("--creds", "is not a file")),
        (("--run-dir", "/" + "x" * 120), ("--run-dir", "too long")),
        (("--colour", "red"), ("--colour",)),
    ],
)
def test_bad_flags(flags: tuple[str, str], words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse([*GOOD, *flags])
    assert end.value.code == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert all(word in line for word in words), line


def test_help_has_an_example_and_the_agent_loads_no_torch() -> None:
    code = (
        "import sys, agents.cli\n"
        "try: agents.cli.parse(['--help'])\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'megatron', 'numpy', 'numba'} & set(sys.modules), 'the agent must stay light'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True)
    assert "example:" in done.stdout


def test_a_run_directory_that_is_taken_is_said(run_dir: Path) -> None:
    (run_dir / "file").write_text("")
    command = [sys.executable, "-m", "agents.cli", *GOOD, "--run-dir", str(run_dir / "file")]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("unicron-agent: --run-dir: cannot use")
    assert done.stderr.count("\n") == 1
