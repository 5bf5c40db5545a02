"""Health checks: the core's part, the process, and the self-test, sound and broken on purpose."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.agents.node import NODE, Node
from tests.agents.processes import ROOT, environment, has_ended
from unicrond.agents.core.state import Append, Checked, RunCheck
from unicrond.agents.health.health_check import run
from unicrond.events.vocabulary import CheckNode, CommandApplied, CommandFailed, NodeChecked


@pytest.fixture
def node() -> Node:
    """A node that is up."""
    node = Node()
    node.boot()
    return node


def check(number: int) -> CheckNode:
    return CheckNode(
        command_id=f"1.1.{NODE}.{number}", node=NODE, epoch=1, argv=("true",), limit_us=9_000_000, reason="XID 48"
    )


def ended(number: int, *, passed: bool = True) -> Checked:
    return Checked(command_id=f"1.1.{NODE}.{number}", has_passed=passed, duration_us=7, detail="well")


# --- the core -------------------------------------------------------------------------------------


def test_health_check_runs_reports_and_acknowledges(node: Node) -> None:
    (asked,) = node.command(check(1))
    assert asked == RunCheck(command_id=f"1.1.{NODE}.1", argv=("true",), limit_s=9.0, reason="XID 48")
    assert node.command(check(1)) == [], "the same command again, while it runs"
    told = [action.event for action in node.feed(ended(1)) if isinstance(action, Append)]
    assert told == [
        NodeChecked(node=NODE, command_id=f"1.1.{NODE}.1", has_passed=True, duration_us=7, detail="well"),
        CommandApplied(node=NODE, command_id=f"1.1.{NODE}.1"),
    ]
    (again,) = node.command(check(1))
    assert isinstance(again, Append) and isinstance(again.event, CommandApplied), "it is not run again"
    assert node.feed(ended(1)) == []


def test_health_check_refuses_concurrent_or_old_command(node: Node) -> None:
    node.command(check(1))
    for refused in (node.command(check(2)), node.command(check(3), age_s=3600.0)):
        (answer,) = refused
        assert isinstance(answer, Append) and isinstance(answer.event, CommandFailed)
    node.feed(ended(1))
    assert isinstance(node.command(check(4))[0], RunCheck)


# --- the process ----------------------------------------------------------------------------------


async def test_check_command_runs_niced_with_reason() -> None:
    script = "import os; print(os.nice(0), os.environ['UNICRON_REASON'])"
    told = await run((sys.executable, "-c", script), 60.0, {**os.environ, "UNICRON_REASON": "XID 48"})
    assert told == (True, f"{os.nice(0) + 10} XID 48")


async def test_check_fails_on_error_timeout_or_missing_command() -> None:
    assert await run(("/bin/sh", "-c", "echo ill; exit 1"), 60.0, dict(os.environ)) == (False, "ill")
    assert await run(("/bin/sh", "-c", "exit 9"), 60.0, dict(os.environ)) == (False, "exit code 9: no output")
    passed, why = await run(("/bin/sh", "-c", "echo on it; exec sleep 600"), 3.0, dict(os.environ))
    assert not passed and why == "did not end within 3 s: on it"
    passed, why = await run(("/no/such/check",), 60.0, dict(os.environ))
    assert not passed and "/no/such/check cannot be run" in why


async def test_cancelled_check_leaves_no_process(tmp_path: Path) -> None:
    fifo = tmp_path / "pid"
    os.mkfifo(fifo)
    running = asyncio.create_task(run(("/bin/sh", "-c", f"echo $$ > {fifo}; exec sleep 600"), 600.0, dict(os.environ)))
    pid = int(await asyncio.to_thread(fifo.read_text))
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert has_ended(pid)


# --- the self-test --------------------------------------------------------------------------------


def self_test(*arguments: str) -> tuple[int, str]:
    command = (
        sys.executable,
        "-m",
        "unicrond.agents.health.self_test",
        "--slots",
        "2",
        "--accelerators",
        "fake",
        *arguments,
    )
    without_gpus = {**environment(), "CUDA_VISIBLE_DEVICES": ""}
    ran = subprocess.run(command, cwd=ROOT, env=without_gpus, capture_output=True, text=True, check=False, timeout=120)
    return ran.returncode, ran.stdout


def test_self_test_passes_on_sound_node() -> None:
    code, told = self_test()
    assert code == 0 and "found nothing wrong" in told and "a sum over 2 slots by gloo" in told
    assert len(told.splitlines()) == 1


@pytest.mark.parametrize(
    ("breakage", "says"),
    [
        ("matmul:0", "slot 0: a matrix product in torch.float32 differs between two runs"),
        ("memory:1", "slot 1: memory of the CPU does not keep its bits"),
        ("collective:1", "slot 1: a sum over the node's 2 slots by gloo is wrong"),
        ("silence:1", "did not answer within 5 s"),
    ],
)
def test_self_test_fails_on_broken_node(breakage: str, says: str) -> None:
    code, told = self_test("--break", breakage, *(("--limit-s", "5.5") if "silence" in breakage else ()))
    assert code == 1 and says in told
