"""unicron-agent's flags: one clear line and exit code 2 for what cannot work."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.agents.processes import environment
from unicrond.agents.host import task_users as users
from unicrond.agents.host.prctl import CAP_KILL, CAP_SETGID, CAP_SETUID
from unicrond.agents.protocol.messages import Identity
from unicrond.agents.shell.cli import parse

GOOD = ("--nats", "nats://127.0.0.1:4222", "--node", "n1", "--slots", "2")


def test_flags_parse_to_options(run_dir: Path) -> None:
    options = parse([*GOOD, "--run-dir", str(run_dir), "--heartbeat-s", "0.5", "--address", "10.0.0.7"])
    assert (options.node, options.slots, options.heartbeat_s, options.address) == ("n1", 2, 0.5, "10.0.0.7")
    assert options.nats == ("nats://127.0.0.1:4222",)


def test_domain_comes_by_flag_or_variable(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse([*GOOD, "--run-dir", str(run_dir)]).domain == ""
    assert parse([*GOOD, "--run-dir", str(run_dir), "--domain", "eu-1a.rack7"]).domain == "eu-1a-rack7"
    monkeypatch.setenv("UNICRON_AGENT_DOMAIN", "rack8")
    assert parse([*GOOD, "--run-dir", str(run_dir)]).domain == "rack8"


def test_flags_set_log_retention(run_dir: Path) -> None:
    options = parse([*GOOD, "--run-dir", str(run_dir)])
    assert (options.logs_dir, options.logs_max_age_s, options.logs_max_bytes) == (None, None, None)
    options = parse([*GOOD, "--run-dir", str(run_dir), "--logs-dir", "/var/l", "--logs-days", "2", "--logs-gib", "1"])
    assert (options.logs_dir, options.logs_max_age_s, options.logs_max_bytes) == (Path("/var/l"), 172_800.0, 2**30)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--node", "a/b"), ("--node", "not a valid name")),
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
        (("--domain", "rack 7"), ("--domain", "not a valid name")),
        (("--colour", "red"), ("--colour",)),
    ],
)
def test_bad_flags_print_one_line(
    flags: tuple[str, str], words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        parse([*GOOD, *flags])
    assert end.value.code == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert all(word in line for word in words), line


def test_help_has_example_and_loads_no_torch() -> None:
    code = (
        "import sys, unicrond.agents.shell.cli\n"
        "try: unicrond.agents.shell.cli.parse(['--help'])\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'megatron', 'numpy', 'numba'} & set(sys.modules), 'the agent must stay light'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True)
    assert "example:" in done.stdout


def test_unusable_run_directory_prints_one_line(run_dir: Path) -> None:
    (run_dir / "file").write_text("")
    command = [sys.executable, "-m", "unicrond.agents.shell.cli", *GOOD, "--run-dir", str(run_dir / "file")]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("unicron-agent: --run-dir: cannot use")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--run-as", "no-such-user"), "--run-as: this node has no user no-such-user"),
        (("--run-as", "root"), "--run-as: user root is root (uid 0)"),
        (("--run-as", "nobody,"), "'nobody,' has an empty name"),
        (("--worker-limit", "nofile=5"), "--worker-limit: is for tasks that run as users of their own; give --run-as"),
        (("--cgroup", "/sys/fs/cgroup"), "--cgroup: is for tasks that run as users of their own"),
        (("--pass-env", "A"), "--pass-env: is for tasks that run as users of their own"),
        (("--worker-limit", "nofile"), "'nofile' is not NAME=VALUE"),
        (("--worker-limit", "files=5"), "'files' is not a limit; use as, core,"),
        (("--worker-limit", "nofile=many"), "nofile: 'many' is not a whole number"),
        (("--worker-limit", "../memory.max=1"), "'../memory.max' is not a limit"),
    ],
)
def test_flags_refuse_impossible_separation(
    flags: tuple[str, str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        parse([*GOOD, *flags])
    line = capsys.readouterr().err
    assert (end.value.code, line.count("\n")) == (2, 1)
    assert words in line


def test_agent_with_user_list_needs_privilege(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(users, "capabilities", lambda: frozenset({CAP_KILL}))
    with pytest.raises(SystemExit):
        parse([*GOOD, "--run-as", "nobody"])
    assert "--run-as: needs CAP_SETGID, CAP_SETUID; start the agent as root, or with Ambient" in capsys.readouterr().err


def test_agent_refuses_python_that_user_cannot_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(users, "capabilities", lambda: frozenset({CAP_KILL, CAP_SETGID, CAP_SETUID}))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(SystemExit):
        parse([*GOOD, "--run-as", "nobody"])
    assert "user nobody cannot run" in capsys.readouterr().err


def test_tasks_see_only_named_agent_environment() -> None:
    environ = {"PATH": "/bin", "LC_ALL": "C", "NCCL_DEBUG": "INFO", "HF_TOKEN": "x", "PATHS": "x", "WANDB_MODE": "off"}
    assert users.visible_environment(environ, ("WANDB_MODE",)).keys() == {"PATH", "LC_ALL", "NCCL_DEBUG", "WANDB_MODE"}


def test_agent_lists_missing_separation() -> None:
    (alone,) = users.not_separated((), "")
    assert alone.startswith("tasks run as this agent's user (") and "they can read its key" in alone
    someone = Identity(name="a", uid=1001, gid=1001, groups=(), home="/")
    (without,) = users.not_separated((someone,), "no cgroup v2 is mounted")
    assert "no cgroups of their own (no cgroup v2 is mounted)" in without
    assert not [*users.not_separated((someone,), "")]


def test_node_name_replaces_dots_by_dashes() -> None:
    options = parse([*GOOD, "--node", "ip-10-0-0-1.eu-west-1.compute.internal"])
    assert options.node == "ip-10-0-0-1-eu-west-1-compute-internal"
    assert options.grace_s == 25.0 and not options.hand_over and not options.supervise
