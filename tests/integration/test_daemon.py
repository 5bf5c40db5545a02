"""`unicrond run` as a process: what it loads, what it answers, how it ends, what it refuses."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from contextlib import AsyncExitStack
from pathlib import Path

import nats
import psutil
import pytest

from tests.integration.head import UNICROND, config, ctl, daemon, get
from unicrond.events.log.subjects import subject
from unicrond.events.vocabulary import CoordinatorStarted
from unicrond.events.wire.codec import encode
from unicrond.events.wire.envelope import Envelope
from unicrond.service.api.connections import connections_max


def nats_pid(directory: Path) -> int | None:
    path = directory / "state" / "nats" / "nats-server.pid"
    return int(path.read_text()) if path.exists() else None


def loaded_libraries(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text()


async def test_daemon_serves_without_torch_and_ends_cleanly(tmp_path: Path) -> None:
    async with daemon(config(tmp_path)) as (process, url):
        health = await asyncio.to_thread(get, f"{url}/healthz")
        assert health["status"] == "live"
        loaded = loaded_libraries(process.pid)
        assert "libtorch" not in loaded and "_numba" not in loaded
    assert process.returncode == 0
    left = nats_pid(tmp_path)
    assert left is None or not psutil.pid_exists(left)


async def test_api_answers_beside_a_thousand_half_requests(tmp_path: Path) -> None:
    connections_max()  # this process holds as many
    async with daemon(config(tmp_path)) as (process, url), AsyncExitStack() as stack:
        host, port = url.removeprefix("http://").split(":")
        for _ in range(1_100):
            _, writer = await asyncio.open_connection(host, int(port))
            stack.callback(writer.close)
            writer.write(b"POST /v1/tasks HTTP/1.1\r\nHost: ")
        assert (await asyncio.to_thread(get, f"{url}/healthz"))["status"] == "live"
        assert process.returncode is None
        assert psutil.Process(process.pid).num_fds() < 1_200


async def test_sigterm_leaves_nats_to_next_coordinator(tmp_path: Path) -> None:
    path = config(tmp_path)
    async with daemon(path) as (process, _):
        pid = nats_pid(tmp_path)
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 20) == 0
    assert pid is not None and psutil.pid_exists(pid)
    async with daemon(path) as (_, url):
        assert (await asyncio.to_thread(get, f"{url}/healthz"))["term"] == 2
        assert nats_pid(tmp_path) == pid


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ("heartbeet_s: 1\n", "heartbeet_s: unknown field; did you mean heartbeat_s?"),
        ("heartbeat_s: fast\n", "heartbeat_s: expected a number"),
        ("policy: {stuck_max: 0}\n", "policy.stuck_max: must be"),
    ],
)
def test_bad_configuration_prints_one_line_and_exits_with_2(tmp_path: Path, extra: str, said: str) -> None:
    done = subprocess.run(
        [UNICROND, "run", "--config", str(config(tmp_path, extra))],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 2
    assert said in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("section", ["api: {host: 0.0.0.0}"])
def test_daemon_needs_credentials_on_public_address(tmp_path: Path, section: str) -> None:
    path = tmp_path / "open.yaml"
    path.write_text(section + "\n")
    done = subprocess.run(
        [UNICROND, "run", "--config", str(path)],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
        env=os.environ | {"HOME": str(tmp_path)},
    )
    assert done.returncode == 2
    assert "is open to others" in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("arguments", [[], ["walk"], ["dev", "--nodes", "many"], ["run", "--confg", "x"]])
def test_bad_usage_prints_one_line_and_exits_with_2(arguments: list[str]) -> None:
    done = subprocess.run([UNICROND, *arguments], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1 and "--help" in done.stderr


def test_daemon_refuses_bad_nats_address() -> None:
    done = subprocess.run(
        [UNICROND, "run", "--nats", "garbage"], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 2
    assert (
        done.stderr
        == "unicrond: --nats: 'garbage' is not a NATS URL; write nats://HOST:PORT; see unicrond run --help\n"
    )


def replayed_digest(directory: Path, seq: int) -> str:
    return subprocess.run(
        [
            str(Path(UNICROND).with_name("unicron-replay")),
            "digest",
            "--state-dir",
            str(directory / "state"),
            "--at",
            str(seq),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout


async def test_skip_undoes_entry_for_coordinators_and_replay(tmp_path: Path) -> None:
    path, task = config(tmp_path), tmp_path / "a.yaml"
    task.write_text("name: a\n")
    async with daemon(path) as (process, url):
        await asyncio.to_thread(ctl, url, "submit", str(task))
        await asyncio.to_thread(ctl, url, "cancel", "a")
        events = [json.loads(line) for line in (await asyncio.to_thread(ctl, url, "--json", "events")).splitlines()]
        (cancelled,) = [event["seq"] for event in events if event["type"] == "TaskCancelled"]
        process.send_signal(signal.SIGTERM)
        await process.wait()
    for arguments in (["--skip", str(cancelled)], []):
        async with daemon(path, *arguments) as (process, url):
            state = await asyncio.to_thread(get, f"{url}/v1/state")
            assert state["state"]["tasks"]["a"]["status"] == "active"  # type: ignore[index]
            assert str(state["digest"]) in await asyncio.to_thread(replayed_digest, tmp_path, state["state"]["seq"])  # type: ignore[index]
            process.send_signal(signal.SIGTERM)
            await process.wait()
    async with daemon(path) as (_, url):
        pass  # ends the NATS server


async def test_forged_claim_raises_only_alarm(tmp_path: Path) -> None:
    forged = Envelope(
        producer="coordinator",
        boot=10**6,
        number=1,
        term=10**6,
        observed_at_us=1,
        event=CoordinatorStarted(term=10**6, version="forged"),
    )
    path = config(tmp_path)
    port = path.read_text().split("nats: {port: ")[1].split("}")[0]
    async with daemon(path) as (_, url):
        connected = await nats.connect(f"nats://127.0.0.1:{port}")
        await connected.jetstream().publish(subject(forged), encode(forged))
        await connected.close()
        task = tmp_path / "a.yaml"
        task.write_text("name: a\n")
        await asyncio.to_thread(ctl, url, "submit", str(task))
        async with asyncio.timeout(30):  # its next decision meets the forged fence
            while (health := await asyncio.to_thread(get, f"{url}/healthz"))["term"] != 2:  # noqa: ASYNC110  (another process)
                await asyncio.sleep(0.05)
        assert health["status"] in ("live", "catching up")
        assert "CoordinatorStarted" in await asyncio.to_thread(ctl, url, "status")


async def test_second_coordinator_in_state_dir_is_refused(tmp_path: Path) -> None:
    async with daemon(config(tmp_path)) as (_, url):
        before = nats_pid(tmp_path)
        second = await asyncio.create_subprocess_exec(
            UNICROND, "run", "--config", str(config(tmp_path)), stderr=asyncio.subprocess.PIPE
        )
        _, said = await asyncio.wait_for(second.communicate(), 30)
        assert second.returncode and b"another coordinator runs in" in said and len(said.splitlines()) == 1
        assert (await asyncio.to_thread(get, f"{url}/healthz"))["status"] == "live" and nats_pid(tmp_path) == before
