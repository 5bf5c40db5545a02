"""What systemd hears, on a socket of the test's own; and that the units are as closed as they say."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from unicrond.events.host.systemd import Systemd

ROOT = Path(__file__).parents[2]
UNITS = ("unicrond.service", "unicron-agent.service")


@pytest.fixture(params=["a path", "an abstract name"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, socket.socket]]:
    """What NOTIFY_SOCKET says, and where it arrives."""
    name = str(tmp_path / "notify") if request.param == "a path" else f"@unicron-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as inbox:
        inbox.bind(name.replace("@", "\0", 1) if name.startswith("@") else name)
        inbox.setblocking(False)
        yield name, inbox


async def heard(inbox: socket.socket) -> list[str]:
    async with asyncio.timeout(10):
        return (await asyncio.get_running_loop().sock_recv(inbox, 4096)).decode().splitlines()


async def test_systemd_gets_ready_and_watchdog_messages(
    place: tuple[str, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, inbox = place
    environ = {"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "40000", "WATCHDOG_PID": str(os.getpid()), "PATH": "/bin"}
    systemd = Systemd(environ)
    assert environ == {"PATH": "/bin"}, "no child speaks for the service"
    monkeypatch.setattr("unicrond.events.host.systemd.STATUS_EVERY_S", 0.01)
    ready, status = asyncio.Event(), "folding"
    told = asyncio.create_task(systemd.accompany(ready.wait(), lambda: status))
    starts, alive = ["WATCHDOG=1", "EXTEND_TIMEOUT_USEC=80000"], ["WATCHDOG=1"]
    assert [await heard(inbox) for _ in range(4)] == [starts, ["STATUS=folding"], starts, starts]
    ready.set()
    while (said := await heard(inbox)) == starts:
        pass
    assert said == ["READY=1"]
    for _ in range(3):
        assert await heard(inbox) == alive, "nothing new is said, but that it lives"
    status = "live"
    while (said := await heard(inbox)) == alive:
        pass
    assert said == ["STATUS=live"]
    told.cancel()
    await asyncio.gather(told, return_exceptions=True)
    while (said := await heard(inbox)) == alive:
        pass
    assert said == ["STOPPING=1"]


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"NOTIFY_SOCKET": "/nowhere/notify"},
        {"NOTIFY_SOCKET": "/nowhere", "WATCHDOG_USEC": "1000", "WATCHDOG_PID": "1"},
    ],
)
def test_systemd_calls_are_silent_without_socket(environ: dict[str, str]) -> None:
    systemd = Systemd(environ)
    assert systemd.alive_every_s is None
    systemd.say("READY=1")


@pytest.mark.parametrize("unit", [*UNITS, "nats/nats.service"])
def test_systemd_units_are_closed(unit: str, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze here (Debian: package systemd)")
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--no-pager", ROOT / "deploy" / unit],
        capture_output=True, text=True, check=False, env={**os.environ, "SYSTEMD_COLORS": "0"},
    )  # fmt: skip
    if "unrecognized option" in done.stderr:
        pytest.skip("this systemd-analyze reads no units that are not loaded (systemd 250 does)")
    found = re.search(r"exposure level for \S+: ([0-9.]+)", done.stdout)
    assert found, done.stdout + done.stderr
    assert float(found[1]) < 4.0


@pytest.mark.parametrize("unit", UNITS)
def test_systemd_units_request_needed_settings(unit: str) -> None:
    text = (ROOT / "deploy" / unit).read_text()
    for setting in (
        "Type=notify", "WatchdogSec=", "StateDirectory=", "EnvironmentFile=", "LimitMEMLOCK=", "LimitNOFILE=",
        "KillMode=process", "NoNewPrivileges=yes", "OOMPolicy=continue",
    ):  # fmt: skip
        assert re.search(f"^{setting}", text, re.MULTILINE), setting
