"""`unicron-agent --probe` against a real agent, whose NATS, fork server and loop fail one after another."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.agents.processes import eventually
from tests.agents.test_daemon import AgentProcess, Coordinator, agent, coordinator
from tests.integration.head import UNICROND
from unicrond.agents.host.paths import PROBE_SOCKET
from unicrond.agents.shell import probe
from unicrond.events.nats.connection import Login
from unicrond.events.nats.server import EmbeddedServer

__all__ = ("agent", "coordinator")
AGENT = str(Path(UNICROND).with_name("unicron-agent"))


def probed(kind: str, run_dir: Path) -> tuple[int, str]:
    done = subprocess.run(
        [AGENT, "--probe", kind, "--run-dir", str(run_dir)], capture_output=True, text=True, timeout=30, check=False
    )
    return done.returncode, done.stdout + done.stderr


def becomes(run_dir: Path, wanted: bool) -> str:
    """What the agent says once it is ready, or no more."""
    assert eventually(lambda: probe.ask(run_dir / PROBE_SOCKET).is_ready is wanted)
    return probe.ask(run_dir / PROBE_SOCKET).status


async def test_nats_or_fork_server_outage_affects_only_readiness(
    agent: AgentProcess, coordinator: Coordinator, nats_server: EmbeddedServer, run_dir: Path
) -> None:
    assert eventually((run_dir / PROBE_SOCKET).exists)
    assert becomes(run_dir, wanted=True) == "joined"
    assert probed("ready", run_dir) == (0, "joined\n") and probed("live", run_dir)[0] == 0

    await nats_server.stop()
    assert "no NATS at" in becomes(run_dir, wanted=False)
    assert probed("live", run_dir)[0] == 0 and probed("ready", run_dir)[0] == 1
    await nats_server.start()
    becomes(run_dir, wanted=True)

    os.kill(agent.fork_server(), signal.SIGSTOP)
    os.kill(agent.fork_server(), signal.SIGKILL)
    becomes(run_dir, wanted=True)  # the next one serves

    os.kill(agent.process.pid, signal.SIGSTOP)
    try:
        with pytest.raises(TimeoutError):
            probe.ask(run_dir / PROBE_SOCKET, timeout_s=0.2)
    finally:
        os.kill(agent.process.pid, signal.SIGCONT)
    agent.process.kill()
    agent.process.wait()
    code, said = probed("live", run_dir)
    assert code == 1 and "no agent answers in" in said


async def test_unstarted_fork_server_is_not_ready_with_reason(agent: AgentProcess, run_dir: Path) -> None:
    assert eventually((run_dir / PROBE_SOCKET).exists)
    becomes(run_dir, wanted=True)
    os.kill(agent.process.pid, signal.SIGINT)
    agent.process.wait(20)
    agent.more = ("--fork-server=--preload=no.such.module",)
    agent.start()
    assert eventually(lambda: "no fork server: it ended with code" in _status(run_dir))
    assert probed("live", run_dir)[0] == 0 and probed("ready", run_dir)[0] == 1


async def test_refused_nats_login_is_not_ready(tmp_path: Path, run_dir: Path) -> None:
    server = EmbeddedServer(tmp_path / "locked", login=Login(user="u", password="right"), dies_with_us=True)
    await server.start()
    agent = AgentProcess(server.url, run_dir)
    try:
        assert eventually(lambda: "no NATS at" in _status(run_dir))
        assert eventually(lambda: "NATS wants a login and got none" in _status(run_dir))
        assert probed("live", run_dir)[0] == 0 and probed("ready", run_dir)[0] == 1
    finally:
        agent.end()
        await server.stop()


def _status(run_dir: Path) -> str:
    try:
        return probe.ask(run_dir / PROBE_SOCKET).status
    except OSError:
        return ""


async def test_probe_of_agent_that_starts_waits_for_it(run_dir: Path) -> None:
    """A kubelet asks every five seconds: an agent that is ready in between would wait for the next time."""
    with ThreadPoolExecutor() as pool:
        path, is_ready = run_dir / PROBE_SOCKET, [False]
        answer = asyncio.wrap_future(pool.submit(probe.ask_until, path, lambda condition: condition.is_ready, 60.0))
        asked = asyncio.Event()

        def condition() -> probe.Condition:
            asked.set()
            return probe.Condition(is_ready[0], "joined")

        server = await probe.serve(path, condition)
        await asyncio.wait_for(asked.wait(), 20)
        assert not answer.done(), "an answer that is not enough"
        is_ready[0] = True
        assert (await asyncio.wait_for(answer, 20)).is_ready
        server.close()
        path.unlink()
        with pytest.raises(FileNotFoundError):
            probe.ask_until(path, lambda _: True, 0.2)


async def test_start_is_no_failed_probe(run_dir: Path) -> None:
    """Each failed one is a warning in Kubernetes' events."""
    path, asked, is_new = run_dir / PROBE_SOCKET, asyncio.Event(), [True]

    def condition() -> probe.Condition:
        asked.set()
        return probe.Condition(is_ready=False, status="waits for the log", is_new=is_new[0])

    server = await probe.serve(path, condition)
    with ThreadPoolExecutor() as pool:
        answer = asyncio.wrap_future(
            pool.submit(probe.ask_until, path, lambda condition: condition.is_ready, 0.0, start_patience_s=60.0)
        )
        for _ in range(3):
            asked.clear()
            await asyncio.wait_for(asked.wait(), 20)
        assert not answer.done(), "patience is over, but the agent is new"
        is_new[0] = False
        assert not (await asyncio.wait_for(answer, 20)).is_ready
    server.close()


def test_probe_needs_directory_and_loads_no_agent(run_dir: Path) -> None:
    done = subprocess.run([AGENT, "--probe", "live"], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    code = f"import sys; from unicrond.agents.shell import probe; probe.main(['--probe=live', '--run-dir={run_dir}']); "
    code += "print([m for m in ('asyncio', 'msgspec', 'nats', 'unicrond.agents.core.state') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout == "[]\n"
