"""A real browser for the tests: Debian's chromium over its own protocol (CDP), by aiohttp's WebSocket alone."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp

START_S = 60.0
MISSING = "no chromium here: apt-get install chromium, or set UNICRON_CHROMIUM"


def chromium() -> str | None:
    """The browser's path, where there is one."""
    named = os.environ.get("UNICRON_CHROMIUM")
    return named or shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Page:
    """One tab. `errors`: what it has thrown or logged as an error."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._number = 0
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._loaded = asyncio.Event()
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for message in self._socket:
            told = json.loads(message.data)
            if "id" in told:
                answer = self._answers.pop(told["id"], None)
                if answer is not None and not answer.done():
                    answer.set_result(told)
                continue
            method, params = told["method"], told["params"]
            if method == "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                self.errors.append(details.get("exception", {}).get("description") or details["text"])
            elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
                self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
            elif method == "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
            elif method == "Page.loadEventFired":
                self._loaded.set()

    async def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the protocol, and its result."""
        self._number += 1
        answer = self._answers[self._number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": self._number, "method": method, "params": params})
        told = await asyncio.wait_for(answer, START_S)
        assert "error" not in told, f"{method}: {told['error']}"
        return dict(told["result"])

    async def open(self, url: str) -> None:
        self._loaded.clear()
        await self.ask("Page.navigate", url=url)
        await asyncio.wait_for(self._loaded.wait(), START_S)

    async def js(self, expression: str) -> Any:
        """The value of an expression, which may be a promise."""
        told = await self.ask("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    async def until(self, expression: str, within_s: float = 30.0) -> Any:
        """Wait until it is true."""
        last: Any = None
        try:
            async with asyncio.timeout(within_s):
                while not (last := await self.js(expression)):
                    await self.js("new Promise((wake) => setTimeout(wake, 50))")
        except TimeoutError:
            text = await self.js("document.body.innerText.slice(0, 2000)")
            raise AssertionError(f"never so: {expression}\n{text}\nerrors: {self.errors}") from None
        return last

    async def key(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            text = {"text": key} if len(key) == 1 and kind == "keyDown" else {}
            await self.ask("Input.dispatchKeyEvent", type=kind, key=key, **text)

    async def size(self, width: int, height: int) -> None:
        await self.ask(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    async def dark(self, dark: bool) -> None:
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.ask("Emulation.setEmulatedMedia", features=[feature])

    async def picture(self, path: Path) -> None:
        png = base64.b64decode((await self.ask("Page.captureScreenshot", format="png"))["data"])
        await asyncio.to_thread(path.write_bytes, png)

    async def close(self) -> None:
        self._reader.cancel()
        await self._socket.close()


@asynccontextmanager
async def browsing() -> AsyncIterator[Page]:
    """A browser with one empty tab."""
    path = chromium()
    assert path is not None, MISSING
    with tempfile.TemporaryDirectory() as profile:
        arguments = [
            "--headless=new",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--disable-extensions",
        ]
        arguments += ["--disable-background-networking", "--disable-component-update", "--disable-sync", "--mute-audio"]
        arguments += [f"--user-data-dir={profile}", "--remote-debugging-port=0", "about:blank"]
        if os.getuid() == 0:
            arguments.insert(0, "--no-sandbox")
        process = await asyncio.create_subprocess_exec(
            path, *arguments, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE, start_new_session=True
        )
        try:
            port = await asyncio.wait_for(_port(process), START_S)
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                    tab = next(one for one in await answer.json() if one["type"] == "page")
                async with session.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                    page = Page(socket)
                    for domain in ("Page", "Runtime", "Log", "Network"):
                        await page.ask(f"{domain}.enable")
                    yield page
                    await page.close()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            await process.communicate()
            await asyncio.sleep(0.2)  # its children let go of the profile


async def _port(process: asyncio.subprocess.Process) -> int:
    assert process.stderr is not None
    while line := (await process.stderr.readline()).decode():
        if line.startswith("DevTools listening on ws://"):
            return int(line.rsplit(":", 1)[1].split("/")[0])
    raise AssertionError("chromium ended before it listened")
