"""The page over a real cluster of three nodes, with real workers: what one sees while a worker is killed and heals.

UNICRON_PICTURES=DIR: pictures of the views go there.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from tests.browser.chromium import MISSING, Page, browsing, chromium
from tests.integration.live import Live, live_cluster, members

pytestmark = [pytest.mark.skipif(chromium() is None, reason=MISSING), pytest.mark.matrix]
TIMEOUT_S = 60.0
#: A node is looked for by its name.
FIND = "{ const f = document.querySelector('input[type=search]'); f.value = %r; f.dispatchEvent(new Event('input')) }"
VIEWS = ("cluster", "tasks", "incidents", "goodput", "plan", "ranks", "log")


async def shown(page: Page, view: str, *texts: str) -> None:
    await page.js(f"location.hash = {view!r}")
    for text in texts:
        await page.until(f"document.querySelector('#main').innerText.includes({text!r})", TIMEOUT_S)


@pytest.mark.timeout(240)
async def test_page_shows_worker_failure_and_recovery(tmp_path: Path) -> None:
    async with live_cluster(tmp_path, nodes=3, workers=3, injection=True) as live, browsing() as page:
        await page.size(1280, 860)
        await live.submit()
        await live.training(incidents=0)
        await page.open(live.dev.url + "/")
        await page.until("document.querySelector('#health').innerText.startsWith('live')")
        # Where each rank is comes from its agent.
        await shown(page, "ranks/big", "rank 2", "micro-batch", "collective")
        await page.until("/^3 ranks: /.test(document.querySelector('#ranks-summary').innerText)")
        before = await page.js("[...document.querySelectorAll('.rank')].map((one) => one.innerText).join()")
        await page.until(f"[...document.querySelectorAll('.rank')].map((one) => one.innerText).join() !== {before!r}")
        await page.js("document.querySelector('.rank').click()")
        await page.until("document.querySelector('pre:not([hidden])').innerText.length > 20", TIMEOUT_S)
        # A worker dies; the story is there without a reload, with the end of the worker's log.
        await kill(live)
        await live.training(incidents=1)
        await shown(page, "incidents", "process_exit")
        await page.until("document.querySelectorAll('tr.click').length === 1", TIMEOUT_S)
        await page.js("document.querySelector('tr.click').click()")
        await page.until("document.querySelector('#story pre')?.innerText.split('\\n').length > 12", TIMEOUT_S)
        assert "SIGKILL" in await page.js("document.querySelector('#story').innerText")
        await shown(page, "goodput", "transition: process_exit")
        await shown(page, "tasks", "loss: ")
        await shown(page, "plan", "Should this come next")
        await pictures(page)
        # What the page orders happens: a drained node loses its worker.
        await drained(page, live)
        assert page.errors == []


async def kill(live: Live) -> None:
    state, _ = await live.dev.state()
    os.kill(state.tasks["big"].workers[members(state)[1]].pid, signal.SIGKILL)


async def drained(page: Page, live: Live) -> None:
    await page.js("location.hash = 'cluster'")
    await page.js(FIND % "node3")
    await page.until("[...document.querySelectorAll('button')].some((one) => one.innerText === 'Drain…')")
    await page.js("[...document.querySelectorAll('button')].find((one) => one.innerText === 'Drain…').click()")
    await page.until("document.querySelector('dialog').open")
    await page.js("document.querySelector('dialog button[value=yes]').click()")
    await page.until("document.querySelector('dialog').innerText.includes('Ordered at entry')")
    await page.js("document.querySelector('dialog button').click()")
    await live.until("node3 has no worker", lambda state: len(members(state)) == 2 and state.tasks["big"].confirmed)
    await page.until("document.querySelector('#main').innerText.includes('drained')", TIMEOUT_S)


async def pictures(page: Page) -> None:
    if not (where := os.environ.get("UNICRON_PICTURES")):
        return
    for view in VIEWS:
        await page.js(f"location.hash = {view!r}")
        if view == "cluster":
            await page.js(FIND % "node2")
        await asyncio.sleep(2.5)
        await page.picture(Path(where) / f"live-{view}.png")
