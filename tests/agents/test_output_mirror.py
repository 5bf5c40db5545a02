"""Workers' output on the agent's standard output: whole lines behind the worker's name, over rotations and ends."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

from tests.agents.processes import TIMEOUT_S
from tests.agents.test_daemon import AgentProcess, Coordinator, coordinator
from unicrond.agents.host.paths import worker_log
from unicrond.agents.host.rotated_output import RotatedLog
from unicrond.agents.output.output_mirror import OutputMirror
from unicrond.events.nats.server import EmbeddedServer

__all__ = ["coordinator"]  # a fixture


class Shown:
    """What was shown, and the workers that live."""

    def __init__(self, logs: Path) -> None:
        self.logs = logs
        self.living: set[str] = set()
        self.text = b""

    def log(self, worker: str, max_bytes: int = 1 << 20) -> RotatedLog:
        return RotatedLog(worker_log(self.logs, worker.rpartition(".")[0], worker), max_bytes=max_bytes)

    def mirror(self) -> OutputMirror:
        return OutputMirror(self.logs, lambda: tuple(self.living), self.take)

    def take(self, text: bytes) -> None:
        self.text += text

    def until(self, text: bytes) -> None:
        ends_s = time.monotonic() + 60
        while text not in self.text:
            assert time.monotonic() < ends_s, self.text
            time.sleep(0.01)


def test_mirror_prefixes_whole_lines_with_worker(tmp_path: Path) -> None:
    shown = Shown(tmp_path)
    mirror = shown.mirror()
    log = shown.log("big.1")
    log.write(b"one\ntw")
    shown.living.add("big.1")
    shown.until(b"big.1| one\n")
    assert b"tw" not in shown.text, "the rest of the line may come"
    log.write(b"o\nlast words")
    shown.until(b"big.1| two\n")
    shown.living.clear()
    shown.until(b"big.1| last words\n")
    mirror.close()
    assert shown.text == b"big.1| one\nbig.1| two\nbig.1| last words\n"


def test_mirror_skips_output_before_agent_start(tmp_path: Path) -> None:
    shown = Shown(tmp_path)
    log = shown.log("big.1")
    log.write(b"before\n")
    shown.living.add("big.1")
    mirror = shown.mirror()
    log.write(b"after\n")
    shown.until(b"big.1| after\n")
    mirror.close()
    assert b"before" not in shown.text


def test_mirror_shows_short_lived_worker_once(tmp_path: Path) -> None:
    shown = Shown(tmp_path)
    mirror = shown.mirror()
    shown.log("big.1").write(b"boom\n")
    mirror.ended("big.1")
    shown.until(b"big.1| boom\n")
    time.sleep(0.3)
    mirror.ended("big.1")
    mirror.close()
    assert shown.text == b"big.1| boom\n"


def test_mirror_follows_rotation_and_cuts_endless_line(tmp_path: Path) -> None:
    shown = Shown(tmp_path)
    log = shown.log("big.1", max_bytes=64)
    shown.living.add("big.1")
    mirror = shown.mirror()
    for number in range(6):
        log.write(f"line {number} of sixty-four bytes at most\n".encode())
        shown.until(f"big.1| line {number} ".encode())
    assert worker_log(tmp_path, "big", "big.1").with_name("big.1.log.1").exists(), "it was rotated"
    log.write(b"x" * 40_000)
    shown.until(b"big.1| " + b"x" * 16_000)
    mirror.close()


def test_blocked_output_never_blocks_mirror(tmp_path: Path) -> None:
    shown, blocked = Shown(tmp_path), threading.Event()
    shown.log("big.1").write(b"one\n")
    mirror = OutputMirror(tmp_path, lambda: tuple(shown.living), lambda _: blocked.wait(30))
    shown.living.add("big.1")
    begun_s = time.monotonic()
    mirror.close()
    assert time.monotonic() - begun_s < 10
    blocked.set()


async def test_agent_mirrors_output_and_keeps_file(
    nats_server: EmbeddedServer, coordinator: Coordinator, run_dir: Path
) -> None:
    agent = AgentProcess(nats_server.url, run_dir, "--hand-over", "--worker-output", "stdout")
    try:
        await coordinator.start("a.1", "describe")
        log = worker_log(run_dir / "logs", "a", "a.1")
        async with asyncio.timeout(TIMEOUT_S):
            while "\na.1| {" not in agent.log():  # noqa: ASYNC110  # another process writes it
                await asyncio.sleep(0.05)
        assert log.read_text().startswith("{")
    finally:
        agent.end()
