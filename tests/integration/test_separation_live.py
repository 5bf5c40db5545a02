"""A real task as a user of its own: it trains, heals and is adopted as any other. As root only."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.integration.live import TASK, Live, seats
from tests.other_users import USER, needs_root, opened
from unicrond.ctl.client import ApiRefused
from unicrond.local.dev import DevCluster

WORKERS = 2


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that the task's user can enter; where it may write, too."""
    path = Path(tempfile.mkdtemp(prefix="un"))
    path.chmod(0o755)
    for name in ("cache", "checkpoints"):
        (path / name).mkdir()
        shutil.chown(path / name, USER)
    yield path
    shutil.rmtree(path)


def status(pid: int, field: str) -> list[str]:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return line.split()[1:]
    return []


@needs_root
@pytest.mark.timeout(600)
async def test_task_of_other_user_trains_and_heals(place: Path) -> None:
    dev = DevCluster(place, WORKERS, 1, 0, 10.0, keys=True)  # the agent that adopts takes its time to start
    for part in dev.agents.values():
        part.command = [*opened(), *part.command, "--run-as", USER, "--worker-limit", "nofile=4096"]
    try:
        await dev.start()
        live = Live(dev, WORKERS)
        state = await live.until("all nodes", lambda state: sum(node.schedulable for node in state.nodes.values()) == 2)
        assert {node.users for node in state.nodes.values()} == {(USER,)}
        with pytest.raises(ApiRefused, match=r"run_as: node node[12] and 1 more does not run tasks as somebody"):
            await live.submit(run_as="somebody")
        with pytest.raises(ApiRefused, match=r"env\.LD_PRELOAD: would load other code into every process"):
            await live.submit(env={"LD_PRELOAD": "/tmp/theirs.so"})
        await live.submit(run_as=USER, checkpoint={"interval": 20})
        state = await live.training(0)
        uid = str(pwd.getpwnam(USER).pw_uid)
        first, second = seats(state).values()
        for _, pid in (first, second):
            assert (status(pid, "Uid"), status(pid, "NoNewPrivs")) == ([uid] * 4, ["1"])
            assert psutil.Process(pid).environ().get("UNICRON_HANG_FLOOR_S") is None, (
                "the agent's environment is its own"
            )
        os.kill(first[1], signal.SIGKILL)
        state = await live.training(1)
        assert status(seats(state)[sorted(seats(state))[-1]][1], "Uid") == [uid] * 4
        healed = state.closed_incidents[-1]
        print(f"healed: detection {healed.detection_us / 1e3:.0f} ms, transition {healed.transition_us / 1e3:.0f} ms")
        before = dict(seats(state))
        agent = dev.agents["node1"].process
        assert agent is not None
        agent.send_signal(signal.SIGKILL)  # the next one adopts the worker, which finds it by its line
        await agent.wait()
        state = await live.training(1)
        assert dict(seats(state)) == before
        await live.until("a checkpoint of the task's own", lambda _: any((place / "checkpoints").rglob("*.distcp")))
        assert {path.owner() for path in (place / "checkpoints").rglob("*")} == {USER}
        assert TASK in state.tasks
    finally:
        await dev.stop()
