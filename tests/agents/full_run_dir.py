"""An agent whose run directory is on a full volume.

    unshare -rm python -m tests.agents.full_run_dir DIR LOG

Mounts a small tmpfs on DIR (which must be empty), in a mount namespace of its own; the store and LOG, the agent's
output, are elsewhere. Exit code 0: the agent came back each time, and said what was wrong.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.agents.test_daemon import AgentProcess, Coordinator
from unicrond.events.nats.connection import connect
from unicrond.events.nats.server import EmbeddedServer
from unicrond.events.nats.streams import create_streams
from unicrond.events.vocabulary import NodeJoined


class Agent(AgentProcess):
    """Its output goes elsewhere: there is no room for it in the run directory."""

    output: Path = Path(sys.argv[2] if len(sys.argv) > 2 else "agent.log")


def fill(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass


def check(output: Path, boot: Path, boots: list[int]) -> None:
    said = output.read_text()
    assert said.count("is full (") == 2, said
    assert "removed the logs of 1 ended workers" in said, said
    assert "Traceback" not in said, said
    assert int(boot.read_text()) == boots[-1], "the boot number is durable all the same"


async def main(run_dir: Path, output: Path) -> None:
    with tempfile.TemporaryDirectory() as store:
        server = EmbeddedServer(Path(store) / "nats")
        await server.start()
        connection = await connect(server.url, name="test", timeout_s=10)
        agent: Agent | None = None
        try:
            await create_streams(connection)
            coordinator = Coordinator(connection)
            agent = Agent(server.url, run_dir)
            boots = [(await coordinator.until(NodeJoined)).agent_boot]

            for full in (run_dir / "logs" / "a" / "a.1.log", run_dir / "somebody-elses"):
                agent.process.kill()
                agent.process.wait()
                fill(full)
                agent.start()
                boots.append((await coordinator.until(NodeJoined)).agent_boot)
                assert boots == sorted(set(boots)), boots
            check(output, run_dir / "agent.boot", boots)
        finally:
            if agent is not None:
                agent.end()
            await connection.close()
            await server.kill()


if __name__ == "__main__":
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "none", sys.argv[1]], check=True)
    asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2])))
